"""The replicated state: the cluster's configuration, its nodes and its partition table.

``ClusterState.apply`` is the only way in which it changes. It is deterministic (the same commands
give the same state on every member) and total: a command that was valid when it was proposed may
be stale when it commits, so ``apply`` checks the epochs again and answers ``Rejected``; it never
raises for a stale or a repeated command. Nothing here knows of time, sessions or leases.

Registration and the stores
---------------------------
``members`` has the rules: which store a node comes back with, and what that does to its rows.

Moves
-----
A plan's moves are queued beside the table and change rows only once they are started; ``moves`` has
the steps. Nothing else changes the replicas of a row. ``table_version`` counts changes of what the
table shows: a queue that grows or shrinks is none.

Bulk loads
----------
``bulk_loads`` has their rules. The table shows which of them are open and which are being merged:
each change of that is a version, how far a merge has come is none.

Keyspaces
---------
``keyspaces`` has the rules. The table shows them whole.

Access
------
``access`` has the rules of users, roles and tokens. They have a version of their own, and the table
shows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from koinon_coordinator.core.cluster import access, election, keyspaces, members, moves
from koinon_coordinator.core.cluster.bulk_loads import Loads
from koinon_coordinator.core.cluster.commands import (
    AcceptPlan,
    AccessChanged,
    AccessCommand,
    AlterKeyspace,
    AlterPartitions,
    Applied,
    AssignPartitions,
    CancelMoves,
    Command,
    ConfirmRegistration,
    CreateCluster,
    CreateKeyspace,
    DropKeyspace,
    FenceNode,
    FinishMoves,
    ForcePrimary,
    ForgetKeyspace,
    KeyspaceChanged,
    LoadCommand,
    Move,
    PartitionsHosted,
    Reason,
    Registered,
    RegisterNode,
    Rejected,
    Result,
    SetMoveSettings,
    SetNodeStatus,
    SetReplicationFactor,
    StartMoves,
    WantPrimaries,
)
from koinon_coordinator.core.cluster.image import EMPTY_IMAGE, StateImage
from koinon_coordinator.core.cluster.members import NodeRecord
from koinon_proto.contract.access import Access
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceId, Keyspaces
from koinon_proto.contract.table import (
    ClusterConfig,
    MoveSettings,
    NodeId,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
    PartitionStatus,
    Table,
)


class ClusterState:
    """The replicated state of the cluster. Only ``apply`` changes it."""

    def __init__(self, image: StateImage = EMPTY_IMAGE) -> None:
        self._config = image.config
        self._version = image.table_version
        self._last_number = image.last_node_number
        self._nodes = {record.info.number: record for record in image.nodes}
        self._numbers = {record.info.node_id: record.info.number for record in image.nodes}
        self._rows = list(image.rows)
        self._moves = {move.partition_id: move for move in image.moves}
        self._move_settings = image.move_settings
        self._stranded = {entry.partition_id: entry for entry in image.stranded}
        self._loads = Loads(image.loads)
        self._access = image.access
        self._compiled = Access()
        self._keyspace_list = image.keyspaces
        self._last_keyspace_id = image.last_keyspace_id
        self._keyspaces: Keyspaces | None = None  # of config and list; made when it is asked for
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
    def live_numbers(self) -> Set[NodeNumber]:
        """The numbers of these. To be read only."""
        return self._live

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

    @property
    def moves(self) -> Mapping[PartitionId, Move]:
        """The moves that are queued or run, in the order of their plans. A view, not a copy."""
        return MappingProxyType(self._moves)

    @property
    def move_settings(self) -> MoveSettings:
        return self._move_settings

    @property
    def loads(self) -> Loads:
        """The bulk loads. To be read only: ``apply`` changes them."""
        return self._loads

    @property
    def keyspaces(self) -> Keyspaces:
        """The keyspaces. Only once there is a cluster."""
        if self._keyspaces is None:
            assert self._config is not None, "there is no cluster yet"
            self._keyspaces = Keyspaces(self._config, self._keyspace_list)
        return self._keyspaces

    @property
    def partition_ids_end(self) -> int:
        """The first partition id above all rows."""
        return len(self._rows)

    @property
    def access(self) -> Access:
        """Who may do what. Made once a version."""
        if self._compiled.state is not self._access:
            self._compiled = Access(self._access, self._compiled)
        return self._compiled

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
                moves=self._move_settings,
                loads=self._loads.shown(),
                keyspace_list=self._keyspace_list,
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

    def is_in_use(self, number: NodeNumber) -> bool:
        """Return whether the node has replicas, or a move is to give it some."""
        return any(number in row.replicas for row in self._rows) or any(
            number in move.target for move in self._moves.values()
        )

    def image(self) -> StateImage:
        """Return all of the state; ``ClusterState(image)`` equals this one."""
        return StateImage(
            config=self._config,
            table_version=self._version,
            last_node_number=self._last_number,
            nodes=tuple(self.nodes),
            rows=tuple(self._rows),
            moves=tuple(self._moves.values()),
            move_settings=self._move_settings,
            stranded=tuple(self._stranded[p] for p in sorted(self._stranded)),
            loads=self._loads.image(),
            access=self._access,
            keyspaces=self._keyspace_list,
            last_keyspace_id=self._last_keyspace_id,
        )

    # --- applying -----------------------------------------------------------------------------

    def apply(self, command: Command, index: int = 0) -> Result:
        """Apply a committed command; return its result. ``index`` is its place in the log, which
        only the opening of a load needs.
        """
        if isinstance(command, LoadCommand):
            return self._change_loads(command, index)
        if isinstance(command, AccessCommand):
            return self._change_access(command)
        return _APPLY[type(command)](self, command)

    def _create_cluster(self, command: CreateCluster) -> Result:
        if self._config is not None:
            return Rejected(reason=Reason.CLUSTER_EXISTS)
        self._config = command.config
        self._keyspaces = None
        self._version += 1
        return Applied()

    def _register_node(self, command: RegisterNode) -> Result:
        if self._config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        known = self.node_by_id(command.node_id)
        epoch = members.next_epoch(known, command)
        if known is None:
            if command.known_node_epoch:
                return Rejected(reason=Reason.STALE_EPOCH)
            if epoch is None:
                return Rejected(reason=Reason.BAD_VALUE)
            return self._add_node(command, epoch)
        if known.live and members.is_copy(known, command):
            return self._repeat_registration(known, command)
        if command.known_node_epoch != known.info.node_epoch:
            return Rejected(reason=Reason.STALE_EPOCH)
        if known.info.status is NodeStatus.LEFT:
            return Rejected(reason=Reason.NODE_LEFT)
        if epoch is None:
            return Rejected(reason=Reason.BAD_VALUE)
        return self._renew_node(known, command, epoch)

    def _add_node(self, command: RegisterNode, epoch: int) -> Result:
        self._last_number += 1
        self._version += 1
        number = NodeNumber(self._last_number)
        self._put_node(members.registered(command, number, epoch, self._version))
        return Registered(node_number=number, node_epoch=epoch)

    def _repeat_registration(self, known: NodeRecord, command: RegisterNode) -> Result:
        after = members.repeated(known, command, self._version + 1)
        if after is not known:
            self._version += 1
            self._put_node(after)
        info = known.info
        return Registered(node_number=info.number, node_epoch=info.node_epoch, repeated=True)

    def _renew_node(self, known: NodeRecord, command: RegisterNode, epoch: int) -> Result:
        number = known.info.number
        self._version += 1
        self._put_node(
            members.registered(command, number, epoch, self._version, draining=known.draining)
        )
        if members.is_known_store(known, command):
            self._change_rows(
                lambda row: election.with_registered(row, number, self._live, version=self._version)
            )
            return Registered(node_number=number, node_epoch=epoch)
        lost, stranded = self._lose_store(known)
        reclaimed = self._reclaim(number, command)
        return Registered(
            node_number=number,
            node_epoch=epoch,
            copies_lost=lost,
            stranded=stranded,
            reclaimed=reclaimed,
        )

    def _lose_store(self, known: NodeRecord) -> tuple[int, int]:
        """Put the node out of every ``in_sync``; return how many rows that were, and how many of
        them have no replica in sync now.
        """
        number = known.info.number
        lost = [row.partition_id for row in self._rows if number in row.in_sync]
        self._change_rows(
            lambda row: election.with_store_lost(row, number, self._live, version=self._version)
        )
        stranded = [p for p in lost if not self._rows[p].in_sync]
        for p in stranded:
            self._stranded[p] = members.stranded(known, p)
        return len(lost), len(stranded)

    def _reclaim(self, number: NodeNumber, command: RegisterNode) -> int:
        """Bring back the partitions that wait for this store; return how many."""
        waiting = {p for p, entry in self._stranded.items() if entry.waits_for(number, command)}

        def change(row: PartitionRow) -> PartitionRow:
            if row.partition_id not in waiting:
                return row
            return election.with_store_returned(row, number, self._live, version=self._version)

        return self._change_rows(change) if waiting else 0

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
        self._version += 1
        self._put_node(members.fenced(record, self._version))
        changed = self._change_rows(
            lambda row: election.without_fenced(
                row,
                command.node_number,
                self._live,
                min_in_sync=self.keyspaces.min_in_sync(row),
                version=self._version,
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
        for row in current.values():
            self._put_row(
                replace(
                    row,
                    status=PartitionStatus.ONLINE,
                    partition_epoch=row.partition_epoch + 1,
                    changed_at=self._version,
                )
            )
        return Applied(rows_changed=len(current))

    def _alter_partitions(self, command: AlterPartitions) -> Result:
        record = self._at_epoch(command.node_number, command.node_epoch)
        if isinstance(record, Rejected):
            return record
        after: dict[PartitionId, PartitionRow] = {}
        rejected: list[PartitionId] = []
        for change in command.changes:
            row = self.row(change.partition_id)
            altered = row and election.altered(
                row,
                change,
                command.node_number,
                self._live,
                min_in_sync=self.keyspaces.min_in_sync(row),
                version=self._version + 1,
            )
            if altered is None or change.partition_id in after:
                rejected.append(change.partition_id)
            else:
                after[change.partition_id] = altered
        return self._change_to(after.values(), rejected)

    # --- moves --------------------------------------------------------------------------------

    def _accept_plan(self, command: AcceptPlan) -> Result:
        reason = moves.plan_refusal(command.moves, self.row, self._moves, self._nodes)
        if reason is not None:
            return Rejected(reason=reason)
        for move in command.moves:
            self._moves[move.partition_id] = replace(move, running=False, cancelled=False)
        return Applied(rows_changed=len(command.moves))

    def _start_moves(self, command: StartMoves) -> Result:
        after: list[PartitionRow] = []
        rejected: list[PartitionId] = []
        for p in command.partition_ids:
            move = self._moves.get(p)
            if move is None or move.running:
                rejected.append(p)
                continue
            after.append(moves.started(self._rows[p], move, version=self._version + 1))
            self._moves[p] = replace(move, running=True)
        return self._change_to(after, rejected)

    def _finish_moves(self, command: FinishMoves) -> Result:
        after: list[PartitionRow] = []
        rejected: list[PartitionId] = []
        for p in command.partition_ids:
            move = self._moves.get(p)
            keyspace = self.keyspaces.of(p) if move is not None else None
            if not (move and keyspace and moves.can_finish(keyspace, self._rows[p], move)):
                rejected.append(p)
                continue
            after.append(moves.finished(self._rows[p], move, version=self._version + 1))
            del self._moves[p]
        return self._change_to(after, rejected)

    def _cancel_moves(self, command: CancelMoves) -> Result:
        after: list[PartitionRow] = []
        rejected: list[PartitionId] = []
        dropped = 0
        for p in command.partition_ids:
            move = self._moves.get(p)
            keyspace = self.keyspaces.of(p) if move is not None else None
            if move is not None and not move.running:
                del self._moves[p]
                dropped += 1
            elif move and keyspace and moves.can_turn_back(keyspace, self._rows[p], move):
                row, self._moves[p] = moves.turned_back(
                    self._rows[p], move, version=self._version + 1
                )
                after.append(row)
            else:
                rejected.append(p)
        turned = self._change_to(after, rejected)
        return replace(turned, rows_changed=turned.rows_changed + dropped)

    # --- what an operator sets ----------------------------------------------------------------

    def _set_move_settings(self, command: SetMoveSettings) -> Result:
        settings = command.settings
        if self._config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        if settings.moves_per_node < 1 or settings.bytes_per_second < 0:
            return Rejected(reason=Reason.BAD_VALUE)
        if settings != self._move_settings:
            self._move_settings = settings
            self._version += 1
        return Applied()

    def _set_node_status(self, command: SetNodeStatus) -> Result:
        record = self._nodes.get(command.node_number)
        if record is None:
            return Rejected(reason=Reason.UNKNOWN_NODE)
        if command.status is NodeStatus.FENCED:
            return Rejected(reason=Reason.BAD_VALUE)
        if record.left:
            leaves_again = command.status is NodeStatus.LEFT
            return Applied() if leaves_again else Rejected(reason=Reason.NODE_LEFT)
        if command.status is NodeStatus.LEFT and self.is_in_use(command.node_number):
            return Rejected(reason=Reason.NODE_IN_USE)
        after = members.with_status(record, command.status, self._version + 1)
        self._version += after.info != record.info
        self._put_node(after)
        return Applied()

    def _want_primaries(self, command: WantPrimaries) -> Result:
        after: list[PartitionRow] = []
        rejected: list[PartitionId] = []
        for p, node in dict(command.wishes).items():
            row = self.row(p)
            wished = row and moves.wished(row, node, version=self._version + 1)
            if wished is None:
                rejected.append(p)
            elif wished is not row:
                after.append(wished)
        return self._change_to(after, rejected)

    def _force_primary(self, command: ForcePrimary) -> Result:
        row = self.row(command.partition_id)
        if row is None:
            return Rejected(reason=Reason.UNKNOWN_PARTITION)
        if row.partition_epoch != command.partition_epoch:
            return Rejected(reason=Reason.NOTHING_CURRENT)
        if row.status is not PartitionStatus.OFFLINE:
            return Rejected(reason=Reason.NOT_OFFLINE)
        node = command.node_number
        if node not in row.replicas or node not in self._live:
            return Rejected(reason=Reason.NOT_A_REPLICA)
        after = election.forced(row, node, version=self._version + 1)
        if after is None:
            return Rejected(reason=Reason.BAD_VALUE)
        return self._change_to([after])

    def _set_replication_factor(self, command: SetReplicationFactor) -> Result:
        config, factor = self._config, command.replication_factor
        if config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        keyspace = self._usable(command.keyspace_id)
        if keyspace is None:
            return Rejected(reason=Reason.KEYSPACE_UNKNOWN)
        if not 1 <= factor <= sum(not record.left for record in self._nodes.values()):
            return Rejected(reason=Reason.BAD_VALUE)
        self._set_keyspace(
            replace(keyspace, replication_factor=factor, min_in_sync=(factor + 1) // 2)
        )
        return Applied()

    # --- keyspaces ----------------------------------------------------------------------------

    def _usable(self, keyspace_id: KeyspaceId) -> Keyspace | None:
        """The keyspace, unless there is none or it is being dropped."""
        found = self.keyspaces.by_id(keyspace_id)
        return None if found is None or found.is_dropping else found

    def _set_keyspace(self, keyspace: Keyspace) -> None:
        """Let the keyspace be so; a version, if that is a change."""
        if self.keyspaces.by_id(keyspace.keyspace_id) == keyspace:
            return
        assert self._config is not None
        self._version += 1
        self._config = keyspaces.with_settings(self._config, keyspace)
        self._keyspaces = None
        if self.keyspaces.by_id(keyspace.keyspace_id) != keyspace:  # more than the config says
            self._keyspace_list = keyspaces.with_keyspace(
                self._keyspace_list, keyspace, self._version
            )
            self._keyspaces = None

    def _create_keyspace(self, command: CreateKeyspace) -> Result:
        if self._config is None or not self._rows:
            return Rejected(reason=Reason.NO_CLUSTER)
        refusal = keyspaces.creation_refusal(command, self.keyspaces, self._rows, self._live)
        if refusal is not None:
            return Rejected(reason=refusal)
        rows = [
            keyspaces.created_row(p, replicas, self.row(p), self._version + 1)
            for p, replicas in zip(command.keyspace.partition_ids, command.replicas, strict=True)
        ]
        made = [row for row in rows if row is not None]
        if len(made) < len(rows):
            return Rejected(reason=Reason.BAD_VALUE)
        self._last_keyspace_id += 1
        keyspace_id = KeyspaceId(self._last_keyspace_id)
        self._set_keyspace(replace(command.keyspace, keyspace_id=keyspace_id))
        for row in made:
            self._put_row(row)
        return KeyspaceChanged(keyspace_id=keyspace_id)

    def _alter_keyspace(self, command: AlterKeyspace) -> Result:
        if self._config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        before = self._usable(command.keyspace.keyspace_id)
        if before is None:
            return Rejected(reason=Reason.KEYSPACE_UNKNOWN)
        after = keyspaces.altered(before, command.keyspace)
        if after is None:
            return Rejected(reason=Reason.BAD_VALUE)
        self._set_keyspace(after)
        return KeyspaceChanged(keyspace_id=after.keyspace_id)

    def _drop_keyspace(self, command: DropKeyspace) -> Result:
        if self._config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        keyspace = self.keyspaces.by_id(command.keyspace_id)
        if keyspace is None:
            return Rejected(reason=Reason.KEYSPACE_UNKNOWN)
        if keyspace.is_dropping:
            return KeyspaceChanged(keyspace_id=keyspace.keyspace_id)
        if keyspace is self.keyspaces.default:
            return Rejected(reason=Reason.BAD_VALUE)
        if self._loads.are_active_in(keyspace.keyspace_id):
            return Rejected(reason=Reason.KEYSPACE_LOADING)
        self._set_keyspace(replace(keyspace, is_dropping=True))
        for p in map(PartitionId, keyspace.partition_ids):
            self._moves.pop(p, None)
            self._stranded.pop(p, None)
            self._put_row(keyspaces.dropped_row(self._rows[p], self._version))
        return KeyspaceChanged(keyspace_id=keyspace.keyspace_id)

    def _forget_keyspace(self, command: ForgetKeyspace) -> Result:
        if self._config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        keyspace = self.keyspaces.by_id(command.keyspace_id)
        if keyspace is None or not keyspace.is_dropping:
            return Rejected(reason=Reason.KEYSPACE_UNKNOWN)
        self._version += 1
        self._keyspace_list = keyspaces.without_keyspace(
            self._keyspace_list, keyspace.keyspace_id, self._version
        )
        self._keyspaces = None
        return KeyspaceChanged(keyspace_id=keyspace.keyspace_id)

    # --- bulk loads ---------------------------------------------------------------------------

    def _change_loads(self, command: LoadCommand, index: int) -> Result:
        if self._config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        before = self._loads.shown()
        result = self._loads.apply(command, index=index, keyspaces=self.keyspaces)
        self._version += self._loads.shown() != before
        return result

    # --- access -------------------------------------------------------------------------------

    def _change_access(self, command: AccessCommand) -> Result:
        if self._config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        fault = access.fault(self._access, command, self.keyspaces)
        if fault is not None:
            return Rejected(reason=fault.reason)
        self._access = access.changed(self._access, command)
        return AccessChanged(version=self._access.version)

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

    def _put_row(self, row: PartitionRow) -> None:
        if row.partition_id == len(self._rows):
            self._rows.append(row)
        self._rows[row.partition_id] = row
        if row.in_sync:
            self._stranded.pop(row.partition_id, None)
        self._assigned = None

    def _change_rows(self, change: Callable[[PartitionRow], PartitionRow]) -> int:
        after = [(row, change(row)) for row in self._rows]
        changed = [row for was, row in after if row is not was]
        for row in changed:
            self._put_row(row)
        return len(changed)

    def _change_to(
        self, rows: Iterable[PartitionRow], rejected: Iterable[PartitionId] = ()
    ) -> Applied:
        """Put rows that were made for the next version, which there is if there are any."""
        changed = list(rows)
        for row in changed:
            self._put_row(row)
        self._version += bool(changed)
        return Applied(rows_changed=len(changed), rejected=tuple(rejected))


_APPLY: dict[type[Any], Callable[[ClusterState, Any], Result]] = {
    CreateCluster: ClusterState._create_cluster,
    RegisterNode: ClusterState._register_node,
    ConfirmRegistration: ClusterState._confirm_registration,
    AssignPartitions: ClusterState._assign_partitions,
    FenceNode: ClusterState._fence_node,
    PartitionsHosted: ClusterState._partitions_hosted,
    AlterPartitions: ClusterState._alter_partitions,
    AcceptPlan: ClusterState._accept_plan,
    StartMoves: ClusterState._start_moves,
    FinishMoves: ClusterState._finish_moves,
    CancelMoves: ClusterState._cancel_moves,
    SetMoveSettings: ClusterState._set_move_settings,
    SetNodeStatus: ClusterState._set_node_status,
    WantPrimaries: ClusterState._want_primaries,
    ForcePrimary: ClusterState._force_primary,
    SetReplicationFactor: ClusterState._set_replication_factor,
    CreateKeyspace: ClusterState._create_keyspace,
    AlterKeyspace: ClusterState._alter_keyspace,
    DropKeyspace: ClusterState._drop_keyspace,
    ForgetKeyspace: ClusterState._forget_keyspace,
}
