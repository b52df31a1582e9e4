"""The number of partitions that a cluster should have, from what it is for. Pure.

A partition is written in one order and served by one node, so its rate is bounded; and whole
partitions are what is spread over nodes and moved, so each node should have several. The number is
chosen once: what is advised leaves room for twice the peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_PARTITION_COUNT, SLOT_COUNT

PARTITION_MB_S: Final = 50
PER_NODE_MIN: Final = 16
_ROW_BYTES: Final = 22  # of the table as it is sent, for a partition
_COPY_BYTES: Final = 2  # for each of its copies


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """``for_peak`` and ``for_nodes`` are what each of them asks for, ``partitions`` the greater."""

    partitions: int
    for_peak: int
    for_nodes: int
    peak_mb_s: float  # of a partition, if all are alike
    rows: int  # of a partition
    primaries: int  # of a node; of partitions that it leads
    copies: int  # of a node
    table_bytes: int  # what each client and node fetches when it starts
    slots: bool  # whether clients of Redis Cluster can use so many


def size(peak_mb_s: float, rows: int, nodes: int, copies: int) -> Sizing:
    """Return the advice.

    Raises:
        InvalidArgumentError: no number of partitions would do.
    """
    if not math.isfinite(peak_mb_s):
        raise InvalidArgumentError(field="peak-mb-s", reason="must be a number of MB a second")
    for_peak = 2 * _power_of_two(-int(-peak_mb_s // PARTITION_MB_S))
    for_nodes = _power_of_two(PER_NODE_MIN * nodes)
    partitions = max(for_peak, for_nodes)
    if partitions > MAX_PARTITION_COUNT:
        raise InvalidArgumentError(
            field="peak-mb-s" if for_peak > for_nodes else "nodes",
            reason="needs more partitions than a cluster can have: spread the data over several",
            limit=MAX_PARTITION_COUNT,
            actual=partitions,
        )
    return Sizing(
        partitions=partitions,
        for_peak=for_peak,
        for_nodes=for_nodes,
        peak_mb_s=peak_mb_s / partitions,
        rows=-(-rows // partitions),
        primaries=-(-partitions // nodes),
        copies=-(-partitions * copies // nodes),
        table_bytes=partitions * (_ROW_BYTES + _COPY_BYTES * copies),
        slots=partitions <= SLOT_COUNT,
    )


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
