"""The replicated state: the cluster's configuration, its nodes and its partition table.

``ClusterState.apply`` is the only way in which it changes. It is deterministic (the same commands
give the same state on every member) and total: a command that was valid when it was proposed may
be stale when it commits, so ``apply`` checks the epochs again and answers ``Rejected``; it never
raises for a stale or a repeated command. Nothing here knows of time, sessions or leases.

Registration and the stores
---------------------------
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
  epoch). Epoch + 1, and the node leaves every ``in_sync`` in the same command. The store that it
  had is remembered (``left_behind``) if partitions are offline for want of it;
* the return of that store (a disk that had not been mounted, directories that were swapped back):
  it holds all that was ever acknowledged in the partitions of which it was the only replica, since
  nobody could write to them without it. Those come back; the rest is as with a lost store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from koinon_proto.table import (
    ClusterConfig,
    NodeId,
    NodeInfo,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
    PartitionStatus,
    Table,
)

from . import election
from .commands import (
    Applied,
    AssignPartitions,
    Command,
    ConfirmRegistration,
    CreateCluster,
    FenceNode,
    PartitionsHosted,
    Reason,
    Registered,
    RegisterNode,
    Rejected,
    Result,
)

LIVE_STATUSES = frozenset({NodeStatus.ACTIVE, NodeStatus.DRAINING})


@dataclass(frozen=True, slots=True)
class StoreLife:
    """A store as the last process on it left it."""

    store_id: str
    node_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """A node and the registration that made its current epoch."""

    info: NodeInfo
    registration_id: str
    base_node_epoch: int
    confirmed: bool
    left_behind: StoreLife | None = None

    @property
    def live(self) -> bool:
        return self.info.status in LIVE_STATUSES


@dataclass(frozen=True, kw_only=True, slots=True)
class StateImage:
    """All of the state, immutable: what a snapshot holds."""

    config: ClusterConfig | None
    table_version: int
    last_node_number: int
    nodes: tuple[NodeRecord, ...]
    rows: tuple[PartitionRow, ...]


EMPTY_IMAGE = StateImage(config=None, table_version=0, last_node_number=0, nodes=(), rows=())


class ClusterState:
    """See the module's text."""

    def __init__(self, image: StateImage = EMPTY_IMAGE) -> None:
        self._config = image.config
        self._version = image.table_version
        self._last_number = image.last_node_number
        self._nodes = {record.info.number: record for record in image.nodes}
        self._numbers = {record.info.node_id: record.info.number for record in image.nodes}
        self._rows = list(image.rows)
        self._live = {number for number, record in self._nodes.items() if record.live}
        self._table: Table | None = None
        self._assigned: dict[NodeNumber, tuple[PartitionRow, ...]] | None = None

    # --- reading ------------------------------------------------------------------------------

    @property
    def config(self) -> ClusterConfig | None:
        return self._config

    @property
    def table_version(self) -> int:
        return self._version

    @property
    def bootstrapped(self) -> bool:
        return bool(self._rows)

    @property
    def live_nodes(self) -> list[NodeRecord]:
        """The nodes that are registered and not fenced, by number."""
        return [self._nodes[number] for number in sorted(self._live)]

    @property
    def nodes(self) -> list[NodeRecord]:
        """Every node, by number."""
        return [self._nodes[number] for number in sorted(self._nodes)]

    def node(self, number: NodeNumber) -> NodeRecord | None:
        return self._nodes.get(number)

    def node_by_id(self, node_id: str) -> NodeRecord | None:
        number = self._numbers.get(NodeId(node_id))
        return None if number is None else self._nodes[number]

    def row(self, partition_id: int) -> PartitionRow | None:
        """The partition's row; None if there is no such partition, or no table yet."""
        return self._rows[partition_id] if 0 <= partition_id < len(self._rows) else None

    def table(self) -> Table | None:
        """The table at the current version, None before there is a cluster. Made once a version."""
        if self._config is None:
            return None
        if self._table is None or self._table.table_version != self._version:
            self._table = Table(
                cluster=self._config,
                table_version=self._version,
                nodes={number: record.info for number, record in self._nodes.items()},
                rows=tuple(self._rows),
            )
        return self._table

    def assigned_to(self, number: NodeNumber) -> tuple[PartitionRow, ...]:
        """The rows that the node leads and has not acknowledged yet."""
        if self._assigned is None:
            found: dict[NodeNumber, list[PartitionRow]] = {}
            for row in self._rows:
                if row.status is PartitionStatus.ASSIGNED:
                    found.setdefault(row.primary, []).append(row)
            self._assigned = {node: tuple(rows) for node, rows in found.items()}
        return self._assigned.get(number, ())

    def image(self) -> StateImage:
        """Return all of the state; ``ClusterState(image)`` equals this one."""
        return StateImage(
            config=self._config,
            table_version=self._version,
            last_node_number=self._last_number,
            nodes=tuple(self.nodes),
            rows=tuple(self._rows),
        )

    # --- applying -----------------------------------------------------------------------------

    def apply(self, command: Command) -> Result:
        """Apply a committed command; say what came of it."""
        return _APPLY[type(command)](self, command)

    def _create_cluster(self, command: CreateCluster) -> Result:
        if self._config is not None:
            return Rejected(reason=Reason.CLUSTER_EXISTS)
        self._config = command.config
        self._version += 1
        return Applied()

    def _register_node(self, command: RegisterNode) -> Result:
        if self._config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        known = self.node_by_id(command.node_id)
        if known is None:
            if command.known_node_epoch:
                return Rejected(reason=Reason.STALE_EPOCH)
            return self._add_node(command)
        if known.live and _is_copy(known, command):
            return self._repeat_registration(known, command)
        if command.known_node_epoch != known.info.node_epoch:
            return Rejected(reason=Reason.STALE_EPOCH)
        if known.info.status is NodeStatus.LEFT:
            return Rejected(reason=Reason.NODE_LEFT)
        return self._renew_node(known, command)

    def _add_node(self, command: RegisterNode) -> Result:
        self._last_number += 1
        self._version += 1
        number = NodeNumber(self._last_number)
        # A store that remembers an epoch which this group never gave has had another coordinator
        # group: epochs still only grow.
        epoch = command.last_node_epoch + 1
        self._put_node(_registered(command, number, epoch, self._version))
        return Registered(node_number=number, node_epoch=epoch)

    def _repeat_registration(self, known: NodeRecord, command: RegisterNode) -> Result:
        info = known.info
        if (info.address, info.rack) != (command.address, command.rack):
            self._version += 1
            info = replace(
                info, address=command.address, rack=command.rack, changed_at=self._version
            )
            self._put_node(replace(known, info=info))
        return Registered(node_number=info.number, node_epoch=info.node_epoch, repeated=True)

    def _renew_node(self, known: NodeRecord, command: RegisterNode) -> Result:
        number = known.info.number
        self._version += 1
        epoch = max(known.info.node_epoch, command.last_node_epoch) + 1
        record = _registered(command, number, epoch, self._version)
        self._put_node(replace(record, left_behind=known.left_behind))
        if _is_known_store(known, command):
            self._change_rows(
                lambda row: election.with_registered(row, number, self._live, version=self._version)
            )
            return Registered(node_number=number, node_epoch=epoch)
        lost = [row for row in self._rows if number in row.in_sync]
        self._change_rows(
            lambda row: election.with_store_lost(row, number, self._live, version=self._version)
        )
        reclaimed = 0
        self._put_node(record)
        if known.left_behind == StoreLife(command.store_id, command.last_node_epoch):
            reclaimed = self._change_rows(
                lambda row: election.with_store_returned(
                    row, number, self._live, version=self._version
                )
            )
        self._leave_behind(known, number)
        return Registered(
            node_number=number,
            node_epoch=epoch,
            copies_lost=len(lost),
            stranded=sum(not self._rows[row.partition_id].in_sync for row in lost),
            reclaimed=reclaimed,
        )

    def _leave_behind(self, known: NodeRecord, number: NodeNumber) -> None:
        """Remember the store that stranded partitions wait for, while there are any."""
        if any(election.waits_for_store_of(row, number) for row in self._rows):
            life = known.left_behind or StoreLife(known.info.store_id, known.info.node_epoch)
            self._put_node(replace(self._nodes[number], left_behind=life))

    def _confirm_registration(self, command: ConfirmRegistration) -> Result:
        record = self._at_epoch(command.node_number, command.node_epoch)
        if isinstance(record, Rejected):
            return record
        if record.confirmed:
            return Rejected(reason=Reason.ALREADY_CONFIRMED)
        self._put_node(replace(record, confirmed=True))
        return Applied()

    def _assign_partitions(self, command: AssignPartitions) -> Result:
        config = self._config
        if config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        if self._rows:
            return Rejected(reason=Reason.ALREADY_ASSIGNED)
        fits = len(command.replicas) == config.partition_count and all(
            len(set(replicas)) == len(replicas) == config.replication_factor
            and self._live.issuperset(replicas)
            for replicas in command.replicas
        )
        if not fits:
            return Rejected(reason=Reason.BAD_ASSIGNMENT)
        self._version += 1
        self._rows = [
            PartitionRow(
                partition_id=PartitionId(partition_id),
                replicas=replicas,
                in_sync=replicas,
                primary=replicas[0],
                primary_epoch=1,
                partition_epoch=1,
                status=PartitionStatus.ASSIGNED,
                changed_at=self._version,
            )
            for partition_id, replicas in enumerate(command.replicas)
        ]
        self._assigned = None
        return Applied(rows_changed=len(self._rows))

    def _fence_node(self, command: FenceNode) -> Result:
        record = self._at_epoch(command.node_number, command.node_epoch)
        if isinstance(record, Rejected):
            return record
        assert self._config is not None  # there are no nodes before there is a cluster
        min_in_sync = self._config.min_in_sync
        self._version += 1
        info = replace(record.info, status=NodeStatus.FENCED, changed_at=self._version)
        self._put_node(replace(record, info=info))
        changed = self._change_rows(
            lambda row: election.without_fenced(
                row, info.number, self._live, min_in_sync=min_in_sync, version=self._version
            )
        )
        return Applied(rows_changed=changed)

    def _partitions_hosted(self, command: PartitionsHosted) -> Result:
        record = self._at_epoch(command.node_number, command.node_epoch)
        if isinstance(record, Rejected):
            return record
        current = {
            row.partition_id: row
            for hosted in command.hosted
            if (row := self.row(hosted.partition_id)) is not None
            and row.status is PartitionStatus.ASSIGNED
            and row.primary == command.node_number
            and row.primary_epoch == hosted.primary_epoch
            and row.partition_epoch == hosted.partition_epoch
        }
        if not record.confirmed:
            self._put_node(replace(record, confirmed=True))
        if not current:
            return Rejected(reason=Reason.NOTHING_CURRENT)
        self._version += 1
        for partition_id, row in current.items():
            self._rows[partition_id] = replace(
                row,
                status=PartitionStatus.ONLINE,
                partition_epoch=row.partition_epoch + 1,
                changed_at=self._version,
            )
        self._assigned = None
        return Applied(rows_changed=len(current))

    # --- helpers ------------------------------------------------------------------------------

    def _at_epoch(self, number: NodeNumber, node_epoch: int) -> NodeRecord | Rejected:
        """The live node's record if ``node_epoch`` is its current one, else why not."""
        record = self._nodes.get(number)
        if record is None:
            return Rejected(reason=Reason.UNKNOWN_NODE)
        if record.info.node_epoch != node_epoch:
            return Rejected(reason=Reason.STALE_EPOCH)
        if not record.live:
            return Rejected(reason=Reason.ALREADY_FENCED)
        return record

    def _put_node(self, record: NodeRecord) -> None:
        number = record.info.number
        self._nodes[number] = record
        self._numbers[record.info.node_id] = number
        (self._live.add if record.live else self._live.discard)(number)

    def _change_rows(self, change: Callable[[PartitionRow], PartitionRow]) -> int:
        changed = 0
        for partition_id, row in enumerate(self._rows):
            after = change(row)
            if after is not row:
                self._rows[partition_id] = after
                changed += 1
        self._assigned = None
        return changed


def _is_copy(known: NodeRecord, command: RegisterNode) -> bool:
    """Whether this is the registration that made the current epoch, which nobody has used yet."""
    return (
        not known.confirmed
        and known.registration_id == command.registration_id
        and known.base_node_epoch == command.last_node_epoch
        and known.info.store_id == command.store_id
    )


def _is_known_store(known: NodeRecord, command: RegisterNode) -> bool:
    """Whether the store holds all that was ever acknowledged under this node."""
    if known.info.store_id != command.store_id:
        return False
    return command.last_node_epoch == known.info.node_epoch or _is_copy(known, command)


def _registered(
    command: RegisterNode, number: NodeNumber, node_epoch: int, version: int
) -> NodeRecord:
    return NodeRecord(
        info=NodeInfo(
            number=number,
            node_id=command.node_id,
            address=command.address,
            rack=command.rack,
            node_epoch=node_epoch,
            status=NodeStatus.ACTIVE,
            store_id=command.store_id,
            changed_at=version,
        ),
        registration_id=command.registration_id,
        base_node_epoch=command.last_node_epoch,
        confirmed=False,
    )


_APPLY: dict[type[Any], Callable[[ClusterState, Any], Result]] = {
    CreateCluster: ClusterState._create_cluster,
    RegisterNode: ClusterState._register_node,
    ConfirmRegistration: ClusterState._confirm_registration,
    AssignPartitions: ClusterState._assign_partitions,
    FenceNode: ClusterState._fence_node,
    PartitionsHosted: ClusterState._partitions_hosted,
}
