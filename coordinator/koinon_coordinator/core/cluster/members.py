"""A node's record, and its changes by registrations and by an operator. Pure.

A node's epoch stands for one process on one store. Beside the epoch, the node's record keeps the
``registration_id`` that made it, the epoch that the store had before (``base``), and whether a
heartbeat of the epoch was ever received (``confirmed``). No lease is given under an unconfirmed
epoch, hence no write was acknowledged under it. So a registration is

* new, if the id is unknown: number and epoch are given;
* a copy of the registration that made the current epoch, if it has its ``registration_id`` and the
  epoch is unconfirmed: the answer was lost, or is still under way. The answer is the same epoch;
* the known store's next life, if ``store_id`` is the known one and ``last_node_epoch`` the current
  epoch, or the base of an unconfirmed epoch made by the same ``registration_id`` (which was fenced
  before it was ever answered): epoch + 1, and what the node led begins a new primary epoch;
* of a lost store otherwise: an empty disk (another ``store_id``) or one rolled back (an older
  epoch). Epoch + 1, and the node leaves every ``in_sync`` in the same command. Partitions of which
  it was the last in-sync replica are stranded, and each remembers the store that it lost;
* the return of such a store (a disk that had not been mounted, directories that were swapped back).
  It holds all acknowledged writes of the partitions that were stranded by its loss, since no node
  could lead them without it. These come back; the rest is as with a lost store. The store is
  recognised as above: by its last epoch, or the base of an unconfirmed one and the same
  ``registration_id``.
"""

from __future__ import annotations

from dataclasses import replace

from koinon_coordinator.core.cluster import election
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
    StoreStanding,
)
from koinon_coordinator.core.cluster.data import ClusterData, Handlers
from koinon_coordinator.core.cluster.image import NodeRecord, Stranded
from koinon_proto.contract.table import (
    NodeInfo,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
    registration_digest,
)

NODE_EPOCH_MAX = (1 << 64) - 1  # the largest that a table or a snapshot can carry


def stranded(known: NodeRecord, partition_id: PartitionId) -> Stranded:
    """Return the entry of a partition that waits for the store that the node had."""
    return Stranded(
        partition_id=partition_id,
        node=known.info.number,
        store=known.store,
        registration_id="" if known.confirmed else known.registration_id,
        base_node_epoch=0 if known.confirmed else known.base_node_epoch,
    )


def next_epoch(known: NodeRecord | None, command: RegisterNode) -> int | None:
    """Return the epoch for a registration: above the known one, and above the store's. None if no
    epoch is left. A store may have an epoch that this group never gave, from an earlier group;
    epochs still only grow.
    """
    before = max(known.info.node_epoch if known is not None else 0, command.last_node_epoch)
    return before + 1 if before < NODE_EPOCH_MAX else None


def registered(
    command: RegisterNode,
    number: NodeNumber,
    node_epoch: int,
    version: int,
    *,
    draining: bool = False,
) -> NodeRecord:
    """Return the record after a registration. A node that was draining still is."""
    return NodeRecord(
        info=NodeInfo(
            number=number,
            node_id=command.node_id,
            address=command.address,
            rack=command.rack,
            node_epoch=node_epoch,
            status=NodeStatus.DRAINING if draining else NodeStatus.ACTIVE,
            store_id=command.store_id,
            changed_at=version,
            weight=command.weight,
            registration_digest=registration_digest(command.registration_id),
            redis_address=command.redis_address,
            pool=command.pool,
            redis_ports=command.redis_ports,
        ),
        registration_id=command.registration_id,
        base_node_epoch=command.last_node_epoch,
        confirmed=False,
        draining=draining,
    )


def repeated(known: NodeRecord, command: RegisterNode, version: int) -> NodeRecord:
    """Return the record after a repeated registration, whose address may have changed."""
    info = replace(
        known.info,
        address=command.address,
        rack=command.rack,
        weight=command.weight,
        redis_address=command.redis_address,
        pool=command.pool,
        redis_ports=command.redis_ports,
    )
    if info == known.info:
        return known
    return replace(known, info=replace(info, changed_at=version))


def fenced(known: NodeRecord, version: int) -> NodeRecord:
    return replace(known, info=replace(known.info, status=NodeStatus.FENCED, changed_at=version))


def with_status(known: NodeRecord, status: NodeStatus, version: int) -> NodeRecord:
    """Return the record with the status that an operator sets, for a node that has not left. A
    fenced node stays fenced, and drains (or not) once it is back.
    """
    draining = status is NodeStatus.DRAINING
    if status is not NodeStatus.LEFT and not known.live:
        status = known.info.status
    info = known.info
    if status is not info.status:
        info = replace(info, status=status, changed_at=version)
    return replace(known, info=info, draining=draining)


def is_copy(known: NodeRecord, command: RegisterNode) -> bool:
    """Return whether this registration made the current epoch, which is not confirmed yet."""
    return (
        not known.confirmed
        and known.registration_id == command.registration_id
        and known.base_node_epoch == command.last_node_epoch
        and known.info.store_id == command.store_id
    )


def standing(known: NodeRecord, command: RegisterNode) -> StoreStanding:
    """Compare the store that registers with the store known for the node."""
    if is_known_store(known, command):
        return StoreStanding.KNOWN
    is_old = (
        command.store_id == known.info.store_id and command.last_node_epoch < known.info.node_epoch
    )
    return StoreStanding.OLD if is_old else StoreStanding.OTHER


def is_known_store(known: NodeRecord, command: RegisterNode) -> bool:
    """Return whether the store holds all writes ever acknowledged under this node."""
    if known.info.store_id != command.store_id:
        return False
    return command.last_node_epoch == known.info.node_epoch or is_copy(known, command)


# --- commands ----------------------------------------------------------------------------------


def _register_node(data: ClusterData, command: RegisterNode) -> Result:
    if data.config is None:
        return Rejected(reason=Reason.NO_CLUSTER)
    known = data.node_by_id(command.node_id)
    epoch = next_epoch(known, command)
    if known is None:
        if command.known_node_epoch:
            return Rejected(reason=Reason.STALE_EPOCH)
        if epoch is None:
            return Rejected(reason=Reason.BAD_VALUE)
        return _add_node(data, command, epoch)
    if known.live and is_copy(known, command):
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
    data.put_node(registered(command, number, epoch, data.version))
    return Registered(node_number=number, node_epoch=epoch)


def _repeat_registration(data: ClusterData, known: NodeRecord, command: RegisterNode) -> Result:
    after = repeated(known, command, data.version + 1)
    if after is not known:
        data.version += 1
        data.put_node(after)
    info = known.info
    return Registered(node_number=info.number, node_epoch=info.node_epoch, repeated=True)


def _renew_node(data: ClusterData, known: NodeRecord, command: RegisterNode, epoch: int) -> Result:
    number = known.info.number
    data.version += 1
    data.put_node(registered(command, number, epoch, data.version, draining=known.draining))
    store = standing(known, command)
    if store is StoreStanding.KNOWN:
        data.change_rows(
            lambda row: election.with_registered(row, number, data.live, version=data.version)
        )
        return Registered(node_number=number, node_epoch=epoch)
    lost, stranded_count = _lose_store(data, known)
    reclaimed = _reclaim(data, number, command)
    return Registered(
        node_number=number,
        node_epoch=epoch,
        copies_lost=lost,
        stranded=stranded_count,
        reclaimed=reclaimed,
        store=store,
        known_epoch=known.info.node_epoch,
    )


def _lose_store(data: ClusterData, known: NodeRecord) -> tuple[int, int]:
    """Remove the node from every ``in_sync``; return the number of changed rows, and how many of
    them have no in-sync replica now.
    """
    number = known.info.number
    lost = [row.partition_id for row in data.rows if number in row.in_sync]
    data.change_rows(
        lambda row: election.with_store_lost(row, number, data.live, version=data.version)
    )
    bare = [p for p in lost if not data.rows[p].in_sync]
    for p in bare:
        data.stranded[p] = stranded(known, p)
    return len(lost), len(bare)


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
    data.put_node(fenced(record, data.version))
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
    after = with_status(record, command.status, data.version + 1)
    data.version += after.info != record.info
    data.put_node(after)
    return Applied()


HANDLERS: Handlers = {
    RegisterNode: _register_node,
    ConfirmRegistration: _confirm_registration,
    FenceNode: _fence_node,
    SetNodeStatus: _set_node_status,
}
