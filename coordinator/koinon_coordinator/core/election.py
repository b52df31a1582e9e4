"""Who leads a partition, and how a row changes when a member goes or comes back. Pure.

The primary is the first live member of ``in_sync`` in ``replicas`` order. Every member of
``in_sync`` holds every acknowledged write, and nobody else may lead: a partition without a live
one is offline and says why, until one comes back.

Each function returns the row itself where nothing changes, else a row with ``partition_epoch`` + 1
and, where the primary changed or begins anew, ``primary_epoch`` + 1.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from koinon_proto.table import (
    NO_NODE,
    NodeNumber,
    OfflineReason,
    PartitionRow,
    PartitionStatus,
)


def elect(row: PartitionRow, live: Set[NodeNumber]) -> NodeNumber:
    """Return who should lead, or ``NO_NODE``."""
    for node in row.replicas:
        if node in row.in_sync and node in live:
            return node
    return NO_NODE


def without_fenced(
    row: PartitionRow, node: NodeNumber, live: Set[NodeNumber], *, min_in_sync: int, version: int
) -> PartitionRow:
    """Return the row after ``node`` was fenced (``live`` no longer has it).

    The node leaves ``in_sync`` unless that would shrink it below ``min_in_sync``: the last copies
    that hold every acknowledged write are kept by name, live or not.
    """
    in_sync = row.in_sync
    if node in in_sync and len(in_sync) > max(min_in_sync, 1):
        in_sync = tuple(n for n in in_sync if n != node)
    if in_sync == row.in_sync and row.primary != node:
        return row
    return _settle(replace(row, in_sync=in_sync), live, version, begins_anew=row.primary == node)


def with_registered(
    row: PartitionRow, node: NodeNumber, live: Set[NodeNumber], *, version: int
) -> PartitionRow:
    """Return the row after ``node`` registered anew with the store known for it.

    What it led begins a new ``primary_epoch``, under whoever is elected; what was offline for want
    of it is led again.
    """
    if row.primary != node and (row.primary != NO_NODE or node not in row.in_sync):
        return row
    return _settle(row, live, version, begins_anew=True)


def with_store_lost(
    row: PartitionRow, node: NodeNumber, live: Set[NodeNumber], *, version: int
) -> PartitionRow:
    """Return the row after ``node`` registered with another store than the one known.

    Its copy is not the one that acknowledged writes: it leaves ``in_sync`` whatever the minimum
    (a lost copy in the set could be elected). Without any other the partition stays offline.
    """
    if node not in row.in_sync and row.primary != node:
        return row
    in_sync = tuple(n for n in row.in_sync if n != node)
    return _settle(replace(row, in_sync=in_sync), live, version, begins_anew=row.primary == node)


def waits_for_store_of(row: PartitionRow, node: NodeNumber) -> bool:
    """Whether the partition's only replica is on ``node`` and its store is not there."""
    return row.replicas == (node,) and not row.in_sync


def with_store_returned(
    row: PartitionRow, node: NodeNumber, live: Set[NodeNumber], *, version: int
) -> PartitionRow:
    """Return the row after the store came back that held the partition's only replica.

    With other replicas this would not do: one of them may have acknowledged more since.
    """
    if not waits_for_store_of(row, node):
        return row
    return _settle(replace(row, in_sync=(node,)), live, version, begins_anew=True)


def _settle(
    row: PartitionRow, live: Set[NodeNumber], version: int, *, begins_anew: bool
) -> PartitionRow:
    """Elect if the old primary is gone or begins anew; count the change."""
    row = replace(row, partition_epoch=row.partition_epoch + 1, changed_at=version)
    if not begins_anew and row.primary != NO_NODE:
        return row
    primary = elect(row, live)
    if primary != NO_NODE:
        status, why = PartitionStatus.ASSIGNED, OfflineReason.NONE
    else:
        lost = not row.in_sync
        status = PartitionStatus.OFFLINE
        why = OfflineReason.STORE_LOST if lost else OfflineReason.NO_LIVE_REPLICA
    return replace(
        row,
        primary=primary,
        primary_epoch=row.primary_epoch + (begins_anew or primary != row.primary),
        status=status,
        offline_reason=why,
    )
