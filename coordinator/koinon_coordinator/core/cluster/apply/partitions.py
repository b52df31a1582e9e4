"""Applies what makes the table's rows and their primaries: rules in ``election``.

The cluster and its first rows; what nodes report and propose of partitions that they lead; what an
operator wishes or forces.
"""

from __future__ import annotations

from dataclasses import replace

from koinon_coordinator.core.cluster import election, moves
from koinon_coordinator.core.cluster.commands import (
    AlterPartitions,
    Applied,
    AssignPartitions,
    CreateCluster,
    ForcePrimary,
    PartitionsHosted,
    Reason,
    Rejected,
    Result,
    WantPrimaries,
)
from koinon_coordinator.core.cluster.data import ClusterData, Handlers
from koinon_proto.contract.table import PartitionId, PartitionRow, PartitionStatus


def _create_cluster(data: ClusterData, command: CreateCluster) -> Result:
    if data.config is not None:
        return Rejected(reason=Reason.CLUSTER_EXISTS)
    data.config = command.config
    data.version += 1
    return Applied()


def _assign_partitions(data: ClusterData, command: AssignPartitions) -> Result:
    config = data.config
    if config is None:
        return Rejected(reason=Reason.NO_CLUSTER)
    if data.rows:
        return Rejected(reason=Reason.ALREADY_ASSIGNED)
    fits = len(command.replicas) == config.partition_count and all(
        len(set(replicas)) == len(replicas) == config.replication_factor
        and data.live.issuperset(replicas)
        for replicas in command.replicas
    )
    if not fits:
        return Rejected(reason=Reason.BAD_ASSIGNMENT)
    data.version += 1
    for partition_id, replicas in enumerate(command.replicas):
        data.put_row(
            PartitionRow(
                partition_id=PartitionId(partition_id),
                replicas=replicas,
                in_sync=replicas,
                primary=replicas[0],
                primary_epoch=1,
                partition_epoch=1,
                status=PartitionStatus.ASSIGNED,
                changed_at=data.version,
            )
        )
    return Applied(rows_changed=len(data.rows))


def _partitions_hosted(data: ClusterData, command: PartitionsHosted) -> Result:
    record = data.node_at_epoch(command.node_number, command.node_epoch)
    if isinstance(record, Rejected):
        return record
    current = {
        row.partition_id: row
        for hosted in command.hosted
        if (row := data.row(hosted.partition_id)) is not None
        and row.status is PartitionStatus.ASSIGNED
        and row.primary == command.node_number
        and row.primary_epoch == hosted.primary_epoch
        and row.partition_epoch == hosted.partition_epoch
    }
    if not record.confirmed:
        data.put_node(replace(record, confirmed=True))
    if not current:
        return Rejected(reason=Reason.NOTHING_CURRENT)
    data.version += 1
    for row in current.values():
        data.put_row(election.online(row, version=data.version))
    return Applied(rows_changed=len(current))


def _alter_partitions(data: ClusterData, command: AlterPartitions) -> Result:
    record = data.node_at_epoch(command.node_number, command.node_epoch)
    if isinstance(record, Rejected):
        return record
    after: dict[PartitionId, PartitionRow] = {}
    rejected: list[PartitionId] = []
    for change in command.changes:
        row = data.row(change.partition_id)
        altered = row and election.altered(
            row,
            change,
            command.node_number,
            data.live,
            min_in_sync=data.keyspaces.min_in_sync(row),
            version=data.version + 1,
        )
        if altered is None or change.partition_id in after:
            rejected.append(change.partition_id)
        else:
            after[change.partition_id] = altered
    return data.change_to(after.values(), rejected)


def _want_primaries(data: ClusterData, command: WantPrimaries) -> Result:
    after: list[PartitionRow] = []
    rejected: list[PartitionId] = []
    for p, node in dict(command.wishes).items():
        row = data.row(p)
        wished = row and moves.wished(row, node, version=data.version + 1)
        if wished is None:
            rejected.append(p)
        elif wished is not row:
            after.append(wished)
    return data.change_to(after, rejected)


def _force_primary(data: ClusterData, command: ForcePrimary) -> Result:
    row = data.row(command.partition_id)
    if row is None:
        return Rejected(reason=Reason.UNKNOWN_PARTITION)
    if row.partition_epoch != command.partition_epoch:
        return Rejected(reason=Reason.NOTHING_CURRENT)
    if row.status is not PartitionStatus.OFFLINE:
        return Rejected(reason=Reason.NOT_OFFLINE)
    node = command.node_number
    if node not in row.replicas or node not in data.live:
        return Rejected(reason=Reason.NOT_A_REPLICA)
    after = election.forced(row, node, version=data.version + 1)
    if after is None:
        return Rejected(reason=Reason.BAD_VALUE)
    return data.change_to([after])


HANDLERS: Handlers = {
    CreateCluster: _create_cluster,
    AssignPartitions: _assign_partitions,
    PartitionsHosted: _partitions_hosted,
    AlterPartitions: _alter_partitions,
    WantPrimaries: _want_primaries,
    ForcePrimary: _force_primary,
}
