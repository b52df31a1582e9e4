"""A model of what the nodes' stores hold, against which a row's ``in_sync`` is judged.

Between any two commands every partition that can be written is: its primary acknowledges a write
once all of ``in_sync`` and all that it has proposed have it. From then on only those stores hold
all that was acknowledged. A proposal to take a replica in says that its store held everything when
the proposal was made. A store that registers with another epoch than the one that it was last given
is an old copy of itself: it holds nothing that counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from koinon_coordinator.core.cluster.commands import (
    AlterPartitions,
    AssignPartitions,
    Command,
    ForcePrimary,
    Registered,
    RegisterNode,
    Rejected,
    Result,
)
from koinon_coordinator.core.cluster.image import NodeRecord, StateImage
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_proto.contract.bulk_loads import LoadState
from koinon_proto.contract.keyspaces import Keyspaces
from koinon_proto.contract.table import (
    NO_NODE,
    NodeNumber,
    NodeStatus,
    OfflineReason,
    PartitionRow,
    PartitionStatus,
)

Store = tuple[str, str]
"""A node's name and a store's."""


@dataclass
class Copies:
    """Apply commands by ``apply``: the model goes along and every invariant is checked."""

    state: ClusterState
    epochs: dict[Store, int] = field(default_factory=dict)
    holders: dict[int, set[Store]] = field(default_factory=dict)
    proposed: list[tuple[AlterPartitions, set[Store]]] = field(default_factory=list)
    index: int = 0  # of the last command in the log

    def fork(self) -> Copies:
        """A copy that goes its own way, its state restored from a snapshot."""
        return Copies(
            state=ClusterState(self.state.image()),
            epochs=dict(self.epochs),
            holders={p: set(stores) for p, stores in self.holders.items()},
            proposed=[(command, set(stores)) for command, stores in self.proposed],
            index=self.index,
        )

    def propose(self, command: AlterPartitions) -> None:
        """A primary sends this; it is applied later or never. Until then the primary waits for
        whom it has proposed, too.
        """
        rows = self.state.image().rows
        stores = {
            self.store_of(n)
            for change in command.changes
            for n in set(change.in_sync) - set(rows[change.partition_id].in_sync)
        }
        self.proposed.append((command, stores))

    def deliver(self) -> Result | None:
        """Apply the oldest proposal that is under way."""
        if not self.proposed:
            return None
        command, complete = self.proposed.pop(0)
        return self.apply(command, complete=complete)

    def apply(self, command: Command, *, complete: set[Store] | None = None) -> Result:
        before = self.state.image()
        is_old = isinstance(command, RegisterNode) and self._is_old_copy(command)
        self.index += 1
        result = self.state.apply(command, self.index)
        after = self.state.image()
        if isinstance(command, RegisterNode) and isinstance(result, Registered):
            store = (str(command.node_id), command.store_id)
            self.epochs[store] = result.node_epoch
            if is_old:
                self._wipe(store)
        if not isinstance(result, Rejected):
            self._copy(before, command, after, complete)
        check_state(after)
        check_step(before, command, result, after)
        self._check()
        for row in after.rows:
            self._write(row)
        return result

    def store_of(self, number: NodeNumber) -> Store:
        record = self.state.node(number)
        assert record is not None
        return record.info.node_id, record.info.store_id

    def _is_old_copy(self, command: RegisterNode) -> bool:
        known = self.state.node_by_id(command.node_id)
        # Its answer was lost: nothing was acknowledged under the epoch that it never heard of.
        is_unanswered = (
            known is not None
            and not known.confirmed
            and known.registration_id == command.registration_id
            and known.base_node_epoch == command.last_node_epoch
            and known.info.store_id == command.store_id
        )
        store = (str(command.node_id), command.store_id)
        return self.epochs.get(store) != command.last_node_epoch and not is_unanswered

    def _wipe(self, store: Store) -> None:
        for holders in self.holders.values():
            holders.discard(store)
        for _, stores in self.proposed:
            stores.discard(store)

    def _copy(
        self, before: StateImage, command: Command, after: StateImage, complete: set[Store] | None
    ) -> None:
        if isinstance(command, AssignPartitions):
            for row in after.rows:
                self.holders[row.partition_id] = {self.store_of(n) for n in row.in_sync}
        elif isinstance(command, ForcePrimary):
            self.holders[command.partition_id] = {self.store_of(command.node_number)}
        elif isinstance(command, AlterPartitions):
            for was, row in zip(before.rows, after.rows, strict=True):
                added = {self.store_of(n) for n in set(row.in_sync) - set(was.in_sync)}
                self.holders[row.partition_id] |= added if complete is None else added & complete

    def _write(self, row: PartitionRow) -> None:
        required = set(row.in_sync)
        for command, _ in self.proposed:
            for change in command.changes:
                at = (change.partition_id, change.primary_epoch)
                if at == (row.partition_id, row.primary_epoch):
                    required.update(change.in_sync)
        records = [self.state.node(n) for n in required]
        if row.primary != NO_NODE and all(r and r.live and r.confirmed for r in records):
            self.holders[row.partition_id] = {self.store_of(n) for n in required}

    def _check(self) -> None:
        """Check that every replica that may be elected holds every acknowledged write."""
        for row in self.state.image().rows:
            for n in row.in_sync:
                assert self.store_of(n) in self.holders[row.partition_id], row


def check_state(image: StateImage) -> None:
    """Check what holds after every command."""
    numbers = {record.info.number: record for record in image.nodes}
    for record in image.nodes:
        assert record.info.changed_at <= image.table_version
        assert record.info.number <= image.last_node_number
        if record.live:
            assert record.draining == (record.info.status is NodeStatus.DRAINING)
    for p, row in enumerate(image.rows):
        assert row.partition_id == p
        assert row.changed_at <= image.table_version
        _check_row(row, numbers)
    _check_moves(image)
    _check_loads(image)
    for entry in image.stranded:
        assert not image.rows[entry.partition_id].in_sync
        assert entry.node in image.rows[entry.partition_id].replicas


def _check_row(row: PartitionRow, numbers: dict[NodeNumber, NodeRecord]) -> None:
    assert row.replicas
    assert len(set(row.replicas)) == len(row.replicas)
    assert len(set(row.in_sync)) == len(row.in_sync)
    assert set(row.in_sync) <= set(row.replicas)
    assert row.replicas == row.target + row.removing
    assert set(row.adding) <= set(row.target)
    assert row.wanted_primary == NO_NODE or row.wanted_primary in row.target
    assert not any(numbers[n].left for n in row.replicas)
    if row.primary == NO_NODE:
        assert row.status is PartitionStatus.OFFLINE
        assert not any(numbers[n].live for n in row.in_sync), "a live one must be elected"
        assert (row.offline_reason is OfflineReason.STORE_LOST) == (not row.in_sync)
    else:
        assert row.primary in row.in_sync
        assert row.primary != row.wanted_primary
        assert numbers[row.primary].live
        assert row.status is not PartitionStatus.OFFLINE
        assert row.offline_reason is OfflineReason.NONE


def _check_moves(image: StateImage) -> None:
    moves = {move.partition_id: move for move in image.moves}
    assert len(moves) == len(image.moves)
    for row in image.rows:
        move = moves.pop(row.partition_id, None)
        if move is not None and move.running:
            assert row.target == move.target
            assert set(row.replicas) == {*move.origin, *move.target}
        else:
            assert row.adding == row.removing == ()
            assert move is None or row.replicas == move.origin
    assert not moves


def _check_loads(image: StateImage) -> None:
    active, ended = image.loads.active, image.loads.ended
    assert [load.load_id for load in active] == sorted({load.load_id for load in active})
    known = (*active, *ended)
    assert len({load.load_id for load in known}) == len(known)
    assert len({load.job_id for load in known}) == len(known)
    batches = [load.stream_batch for load in active if load.stream_batch is not None]
    applied = {batch.query_id: batch.batch_id for batch in image.loads.batches}
    for load in active:
        assert load.state is (LoadState.MERGING if load.unmerged else LoadState.OPEN)
        assert bool(load.attempts_digest) == (load.state is LoadState.MERGING)
        assert len(load.unmerged) <= load.partitions or load.state is LoadState.OPEN
    for load in ended:
        assert load.state.ended
        assert not load.attempts
        assert not load.unmerged
    for load in known:
        if load.stream_batch is not None and load.attempts_digest:
            assert load.stream_batch.batch_id <= applied[load.stream_batch.query_id]
    assert all(batches.count(b) == 1 or b.batch_id <= applied[b.query_id] for b in batches)


def check_step(before: StateImage, command: Command, result: object, after: StateImage) -> None:
    """Epochs only grow, and grow when they must; the version counts changes of the table."""
    assert after.table_version - before.table_version in (0, 1)
    changed = _shown(before) != _shown(after)
    assert changed == (after.table_version != before.table_version)
    if isinstance(result, Rejected):
        assert not changed
        assert (before.moves, before.stranded) == (after.moves, after.stranded)
        assert before.loads == after.loads
    for old, new in zip(before.nodes, after.nodes, strict=False):
        assert new.info.number == old.info.number
        assert new.info.node_epoch >= old.info.node_epoch
        assert (new.info.changed_at == after.table_version) or new.info == old.info
        assert new == old or not old.left
    for was, row in zip(before.rows, after.rows, strict=False):
        if row != was:
            assert before.config is not None
            keyspaces = Keyspaces(before.config, before.keyspaces)
            _check_change(keyspaces, was, row, command)
            assert row.changed_at == after.table_version


def _check_change(
    keyspaces: Keyspaces, was: PartitionRow, row: PartitionRow, command: Command
) -> None:
    assert row.partition_epoch == was.partition_epoch + 1
    assert row.primary_epoch - was.primary_epoch in (0, 1)
    if row.primary != was.primary:
        assert row.primary_epoch == was.primary_epoch + 1
    lost = set(was.in_sync) - set(row.in_sync)
    if lost and not isinstance(command, RegisterNode | ForcePrimary):
        assert len(row.in_sync) >= min(keyspaces.min_in_sync(was), keyspaces.min_in_sync(row))
    if set(row.in_sync) - set(was.in_sync):
        assert isinstance(command, AlterPartitions | RegisterNode | ForcePrimary)


def _shown(image: StateImage) -> object:
    nodes = [record.info for record in image.nodes]
    loads = [(load.load_id, load.state) for load in image.loads.active]
    return image.config, image.rows, nodes, image.move_settings, loads
