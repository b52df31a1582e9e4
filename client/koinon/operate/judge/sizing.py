"""Advises on the number of partitions of a cluster from its expected load. Pure.

A partition is written in one order and served by one node, so its rate is bounded; and whole
partitions are spread over nodes and moved, so each node should have several. The number is chosen
once: the advice leaves room for twice the peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_PARTITION_COUNT, SLOT_COUNT

PARTITION_MB_S: Final = 50
PER_NODE_MIN: Final = 16
_ROW_BYTES: Final = 22  # bytes of the encoded table for each partition
_COPY_BYTES: Final = 2  # bytes for each of its copies


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The advice. ``for_peak`` and ``for_nodes`` are the numbers of partitions that each of them
    needs, ``partitions`` the greater one.
    """

    partitions: int
    for_peak: int
    for_nodes: int
    peak_mb_s: float  # rows of a partition, if all are alike
    rows: int  # of a partition
    primaries: int  # partitions that a node leads
    copies: int  # copies on a node
    table_bytes: int  # fetched by each client and node at its start
    slots: bool  # True if clients of Redis Cluster can use this number of partitions


def size(peak_mb_s: float, rows: int, nodes: int, copies: int) -> Sizing:
    """Return the advice.

    Raises:
        InvalidArgumentError: no number of partitions is enough.
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
