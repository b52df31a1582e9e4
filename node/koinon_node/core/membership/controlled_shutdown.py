"""Decides when a node may stop: as soon as no other node's writes wait for it. Pure."""

from __future__ import annotations

from koinon_proto.contract.table import NO_NODE, NodeNumber, PartitionRow, Table


def is_waited_for(table: Table, me: NodeNumber) -> bool:
    """Return whether a primary has the node in an in-sync set that it could take it out of."""
    return any(_counts(table, row, me) for row in table.rows)


def _counts(table: Table, row: PartitionRow, me: NodeNumber) -> bool:
    if me not in row.in_sync or row.primary in (NO_NODE, me):
        return False
    return len(row.in_sync) > table.keyspaces.min_in_sync(row)
