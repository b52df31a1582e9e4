"""The progress of replicas that are not in sync yet, as their nodes report it, and the pace.
Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from koinon_proto.contract.table import NodeNumber, PartitionId

PACE_WINDOW_S = 10.0


class Stage(IntEnum):
    """The stages of a replica on its way into sync, with their numbers on the wire."""

    WAITING = 1
    SNAPSHOT = 2
    CATCH_UP = 3
    LIVE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A node's report of a replica that is not in sync yet. Totals are estimates, 0: unknown."""

    partition_id: PartitionId
    stage: Stage
    records: int = 0
    bytes: int = 0
    records_total: int = 0
    bytes_total: int = 0


ProgressOf = Mapping[NodeNumber, Mapping[PartitionId, Progress]]


def received_since(before: Mapping[PartitionId, Progress], now: Iterable[Progress]) -> int:
    """Return the bytes that a node received between two of its reports. A replica that is new in
    the report counts from zero, and so does one that began again.
    """
    received = 0
    for progress in now:
        known = before.get(progress.partition_id)
        since = known.bytes if known is not None and known.bytes <= progress.bytes else 0
        received += progress.bytes - since
    return received


class Pace:
    """Bytes per second, averaged over about the last ``PACE_WINDOW_S``, with exponentially falling
    weights. Bytes that came after a node's last report of a replica are not seen.
    """

    def __init__(self, now: float) -> None:
        self._began_at = self._at = now
        self._bytes = 0.0

    def add(self, size: int, now: float) -> None:
        """Count ``size`` bytes received until now."""
        self._bytes = self._bytes_at(now) + size
        self._at = now

    def per_second(self, now: float) -> float:
        """Return the pace at ``now``."""
        seen = -math.expm1(-(now - self._began_at) / PACE_WINDOW_S)
        return self._bytes_at(now) / (PACE_WINDOW_S * seen) if seen > 0 else 0.0

    def _bytes_at(self, now: float) -> float:
        return self._bytes * math.exp(-max(0.0, now - self._at) / PACE_WINDOW_S)
