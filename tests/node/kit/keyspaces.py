"""Keyspaces beside ``default`` in a scripted coordinator's table."""

from __future__ import annotations

from dataclasses import replace

from koinon_proto.contract.keyspaces import Keyspace, KeyspaceId, KeyspaceList, default_keyspace
from koinon_proto.contract.table import NO_NODE, NodeNumber, PartitionId, PartitionStatus, Table
from tests.node.kit.scripted_coordinator import ScriptedCoordinator


def create_keyspace(
    coordinator: ScriptedCoordinator,
    keyspace_id: int,
    name: str,
    *,
    primaries: tuple[int, ...] = (1, 1, 1, 1),
    partitioner: str = "murmur2",
) -> Keyspace:
    """Give the table a keyspace behind all others, whose partitions have these primaries."""
    made: list[Keyspace] = []

    def change(table: Table) -> Table:
        version = table.table_version + 1
        keyspace = replace(
            default_keyspace(table.cluster),
            keyspace_id=KeyspaceId(keyspace_id),
            name=name,
            base=len(table.rows),
            partition_count=len(primaries),
            partitioner=partitioner,
        )
        made.append(keyspace)
        rows = tuple(
            replace(
                table.rows[0],
                partition_id=PartitionId(keyspace.base + place),
                replicas=(NodeNumber(number),),
                in_sync=(NodeNumber(number),),
                primary=NodeNumber(number),
                status=PartitionStatus.ONLINE,
                changed_at=version,
            )
            for place, number in enumerate(primaries)
        )
        known = KeyspaceList(
            changed_at=version, keyspaces=(*table.keyspace_list.keyspaces, keyspace)
        )
        return replace(table, keyspace_list=known, rows=(*table.rows, *rows))

    coordinator.change_table(change)
    return made[0]


def drop_keyspace(coordinator: ScriptedCoordinator, keyspace: Keyspace) -> None:
    """Take the keyspace, and its partitions' replicas, out of the table; its range stays unused."""

    def change(table: Table) -> Table:
        version = table.table_version + 1
        dropped = replace(keyspace, is_dropping=True)
        listed = tuple(
            dropped if one.keyspace_id == keyspace.keyspace_id else one
            for one in table.keyspace_list.keyspaces
        )
        rows = tuple(
            replace(
                row,
                replicas=(),
                in_sync=(),
                primary=NO_NODE,
                primary_epoch=row.primary_epoch + 1,
                status=PartitionStatus.OFFLINE,
                changed_at=version,
            )
            if row.partition_id in keyspace.partition_ids
            else row
            for row in table.rows
        )
        known = KeyspaceList(changed_at=version, keyspaces=listed)
        return replace(table, keyspace_list=known, rows=rows)

    coordinator.change_table(change)
