"""Applies registrations, fences and an operator's standing of nodes: rules in ``members``."""

from __future__ import annotations

from dataclasses import replace

from koinon_coordinator.core.cluster import election, members
from koinon_coordinator.core.cluster.commands import (
    Applied,
    ConfirmRegistration,
    FenceNode,
    Reason,
    Registered,
    RegisterNode,
    Rejected,
    Result,
    SetNodeStatus,
)
from koinon_coordinator.core.cluster.data import ClusterData, Handlers
from koinon_coordinator.core.cluster.members import NodeRecord
from koinon_proto.contract.table import NodeNumber, NodeStatus, PartitionRow


def _register_node(data: ClusterData, command: RegisterNode) -> Result:
    if data.config is None:
        return Rejected(reason=Reason.NO_CLUSTER)
    known = data.node_by_id(command.node_id)
    epoch = members.next_epoch(known, command)
    if known is None:
        if command.known_node_epoch:
            return Rejected(reason=Reason.STALE_EPOCH)
        if epoch is None:
            return Rejected(reason=Reason.BAD_VALUE)
        return _add_node(data, command, epoch)
    if known.live and members.is_copy(known, command):
        return _repeat_registration(data, known, command)
    if command.known_node_epoch != known.info.node_epoch:
        return Rejected(reason=Reason.STALE_EPOCH)
    if known.info.status is NodeStatus.LEFT:
        return Rejected(reason=Reason.NODE_LEFT)
    if epoch is None:
        return Rejected(reason=Reason.BAD_VALUE)
    return _renew_node(data, known, command, epoch)


def _add_node(data: ClusterData, command: RegisterNode, epoch: int) -> Result:
    data.last_number += 1
    data.version += 1
    number = NodeNumber(data.last_number)
    data.put_node(members.registered(command, number, epoch, data.version))
    return Registered(node_number=number, node_epoch=epoch)


def _repeat_registration(data: ClusterData, known: NodeRecord, command: RegisterNode) -> Result:
    after = members.repeated(known, command, data.version + 1)
    if after is not known:
        data.version += 1
        data.put_node(after)
    info = known.info
    return Registered(node_number=info.number, node_epoch=info.node_epoch, repeated=True)


def _renew_node(data: ClusterData, known: NodeRecord, command: RegisterNode, epoch: int) -> Result:
    number = known.info.number
    data.version += 1
    data.put_node(members.registered(command, number, epoch, data.version, draining=known.draining))
    if members.is_known_store(known, command):
        data.change_rows(
            lambda row: election.with_registered(row, number, data.live, version=data.version)
        )
        return Registered(node_number=number, node_epoch=epoch)
    lost, stranded = _lose_store(data, known)
    reclaimed = _reclaim(data, number, command)
    return Registered(
        node_number=number,
        node_epoch=epoch,
        copies_lost=lost,
        stranded=stranded,
        reclaimed=reclaimed,
    )


def _lose_store(data: ClusterData, known: NodeRecord) -> tuple[int, int]:
    """Put the node out of every ``in_sync``; return how many rows that were, and how many of
    them have no replica in sync now.
    """
    number = known.info.number
    lost = [row.partition_id for row in data.rows if number in row.in_sync]
    data.change_rows(
        lambda row: election.with_store_lost(row, number, data.live, version=data.version)
    )
    stranded = [p for p in lost if not data.rows[p].in_sync]
    for p in stranded:
        data.stranded[p] = members.stranded(known, p)
    return len(lost), len(stranded)


def _reclaim(data: ClusterData, number: NodeNumber, command: RegisterNode) -> int:
    """Bring back the partitions that wait for this store; return how many."""
    waiting = {p for p, entry in data.stranded.items() if entry.waits_for(number, command)}

    def change(row: PartitionRow) -> PartitionRow:
        if row.partition_id not in waiting:
            return row
        return election.with_store_returned(row, number, data.live, version=data.version)

    return data.change_rows(change) if waiting else 0


def _confirm_registration(data: ClusterData, command: ConfirmRegistration) -> Result:
    record = data.node_at_epoch(command.node_number, command.node_epoch)
    if isinstance(record, Rejected):
        return record
    if record.confirmed:
        return Rejected(reason=Reason.ALREADY_CONFIRMED)
    data.put_node(replace(record, confirmed=True))
    return Applied()


def _fence_node(data: ClusterData, command: FenceNode) -> Result:
    record = data.node_at_epoch(command.node_number, command.node_epoch)
    if isinstance(record, Rejected):
        return record
    data.version += 1
    data.put_node(members.fenced(record, data.version))
    changed = data.change_rows(
        lambda row: election.without_fenced(
            row,
            command.node_number,
            data.live,
            min_in_sync=data.keyspaces.min_in_sync(row),
            version=data.version,
        )
    )
    return Applied(rows_changed=changed)


def _set_node_status(data: ClusterData, command: SetNodeStatus) -> Result:
    record = data.nodes.get(command.node_number)
    if record is None:
        return Rejected(reason=Reason.UNKNOWN_NODE)
    if command.status is NodeStatus.FENCED:
        return Rejected(reason=Reason.BAD_VALUE)
    if record.left:
        leaves_again = command.status is NodeStatus.LEFT
        return Applied() if leaves_again else Rejected(reason=Reason.NODE_LEFT)
    if command.status is NodeStatus.LEFT and data.is_in_use(command.node_number):
        return Rejected(reason=Reason.NODE_IN_USE)
    after = members.with_status(record, command.status, data.version + 1)
    data.version += after.info != record.info
    data.put_node(after)
    return Applied()


HANDLERS: Handlers = {
    RegisterNode: _register_node,
    ConfirmRegistration: _confirm_registration,
    FenceNode: _fence_node,
    SetNodeStatus: _set_node_status,
}
