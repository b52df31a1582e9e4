"""A node's record: what registrations and an operator make of it. Pure.

A node's epoch stands for one process life of one store. The record of a node keeps, beside the
epoch, the ``registration_id`` that made it, the epoch that the store had before (``base``), and
whether a heartbeat of the epoch was ever heard (``confirmed``). No lease is given under an
unconfirmed epoch, hence no write was acknowledged under it. So a registration is

* new, if the id is unknown: number and epoch are given;
* a copy of the one that made the current epoch, if it has its ``registration_id`` and the epoch is
  unconfirmed: its answer was lost, or is being waited for. The same epoch is answered;
* the known store's next life, if ``store_id`` is the known one and ``last_node_epoch`` the current
  epoch, or the base of an unconfirmed epoch made by the same ``registration_id`` (which was fenced
  before it was ever answered): epoch + 1, and what the node led begins a new primary epoch;
* of a lost store otherwise: an empty disk (another ``store_id``) or one rolled back (an older
  epoch). Epoch + 1, and the node leaves every ``in_sync`` in the same command. Partitions of which
  it was the last in-sync replica are stranded, and each remembers the store that it lost;
* the return of such a store (a disk that had not been mounted, directories that were swapped back):
  it holds all that was ever acknowledged in the partitions that were stranded by its going, since
  no node could lead them without it. Those come back; the rest is as with a lost store. It is known
  as above: by its last epoch, or the base of an unconfirmed one and the same ``registration_id``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from koinon_coordinator.core.cluster.commands import RegisterNode
from koinon_proto.contract.table import (
    NodeInfo,
    NodeNumber,
    NodeStatus,
    PartitionId,
    registration_digest,
)

LIVE_STATUSES = frozenset({NodeStatus.ACTIVE, NodeStatus.DRAINING})
NODE_EPOCH_MAX = (1 << 64) - 1  # the largest that a table or a snapshot can carry


@dataclass(frozen=True, slots=True)
class StoreLife:
    """A store as the last process on it left it."""

    store_id: str
    node_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stranded:
    """A partition whose last in-sync replica went with its store, and that store. If its last epoch
    was never confirmed, ``registration_id`` made it, after ``base_node_epoch``; else "" and 0.
    """

    partition_id: PartitionId
    node: NodeNumber
    store: StoreLife
    registration_id: str = ""
    base_node_epoch: int = 0

    def waits_for(self, number: NodeNumber, command: RegisterNode) -> bool:
        """Return whether the node registers the very store that was lost. One that never heard the
        answer of its last registration says the epoch before, and repeats that registration.
        """
        if (number, command.store_id) != (self.node, self.store.store_id):
            return False
        unanswered = (self.registration_id, self.base_node_epoch)
        return command.last_node_epoch == self.store.node_epoch or (
            command.base_epoch_counts
            and self.registration_id != ""
            and unanswered == (command.registration_id, command.last_node_epoch)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """A node and the registration that made its current epoch. ``draining`` outlives a fence, under
    which ``info.status`` does not show it.
    """

    info: NodeInfo
    registration_id: str
    base_node_epoch: int
    confirmed: bool
    draining: bool = False

    @property
    def live(self) -> bool:
        return self.info.status in LIVE_STATUSES

    @property
    def left(self) -> bool:
        return self.info.status is NodeStatus.LEFT

    @property
    def store(self) -> StoreLife:
        return StoreLife(self.info.store_id, self.info.node_epoch)


def stranded(known: NodeRecord, partition_id: PartitionId) -> Stranded:
    """Return that the partition waits for the store that the node had."""
    return Stranded(
        partition_id=partition_id,
        node=known.info.number,
        store=known.store,
        registration_id="" if known.confirmed else known.registration_id,
        base_node_epoch=0 if known.confirmed else known.base_node_epoch,
    )


def next_epoch(known: NodeRecord | None, command: RegisterNode) -> int | None:
    """Return the epoch that a registration is given, above the known one and above what the store
    says; None if there is none left. A store may remember an epoch that this group never gave: it
    has had another group, and epochs still only grow.
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
    """Return the record that a registration makes; a node that was draining still is."""
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
    """Return the record after a copy of the registration that made it, which may have moved."""
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
    """Return the record of a node that has not left, in the standing that an operator gives it. A
    fenced node stays fenced, and drains (or does not) once it is back.
    """
    draining = status is NodeStatus.DRAINING
    if status is not NodeStatus.LEFT and not known.live:
        status = known.info.status
    info = known.info
    if status is not info.status:
        info = replace(info, status=status, changed_at=version)
    return replace(known, info=info, draining=draining)


def is_copy(known: NodeRecord, command: RegisterNode) -> bool:
    """Return whether this registration made the current epoch, which is not used yet."""
    return (
        not known.confirmed
        and known.registration_id == command.registration_id
        and known.base_node_epoch == command.last_node_epoch
        and known.info.store_id == command.store_id
    )


def is_known_store(known: NodeRecord, command: RegisterNode) -> bool:
    """Return whether the store holds all that was ever acknowledged under this node."""
    if known.info.store_id != command.store_id:
        return False
    return command.last_node_epoch == known.info.node_epoch or is_copy(known, command)
