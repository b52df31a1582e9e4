"""Checkers of what must hold after every event of a simulated cluster.

- No two nodes serve one partition at one instant (a valid lease, a published epoch, not stopped).
- Table versions and the rows' epochs never fall, on any node.
- Every write that was acknowledged is, from then on, in the store of every live member of the
  committed in_sync: looked at when it is acknowledged, and again whenever the row changes.
- No value that a client writes is given two versions, by whichever primaries.
- When a planned hand-over is committed, its primary takes no requests and has nothing in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from koinon_coordinator.core.cluster.commands import AlterPartitions, Command
from koinon_node.core.formats import records
from koinon_node.core.replication.in_sync_and_hand_over import Why
from koinon_proto.contract.table import PartitionRow, Table
from tests.checkers.applied import Applied, OneVersionEach

if TYPE_CHECKING:
    from tests.simulation.node import SimulatedNode


class ViolationError(AssertionError):
    """Something that must never happen has happened."""


class ClusterChecker:
    """See the module's text. ``table`` gives the table after all that is committed."""

    def __init__(
        self, nodes: Mapping[str, SimulatedNode], table: Callable[[], Table | None]
    ) -> None:
        self._nodes = nodes
        self._committed_table = table
        self._served: dict[str, tuple[object, ...]] = {}
        self._serves: dict[str, frozenset[int]] = {}
        self._versions: dict[str, int] = {}
        self._table: Table | None = None
        self._acknowledged: dict[int, dict[bytes, int]] = defaultdict(dict)
        self._decided = OneVersionEach()
        self.checks = 0

    # --- one primary -------------------------------------------------------------------------

    def after_event(self, name: str) -> None:
        """Look at the node that something has just run on."""
        node = self._nodes[name]
        life = node.life
        if life is None:
            return
        state = life.state
        size = len(state.served.epochs)
        seen = (state.served, state.lease, state.stopped[:size].tobytes())
        before = self._served.get(name)
        if before is not None and before[0] is seen[0] and before[1:] == seen[1:]:
            return
        self._served[name] = seen
        self._check_version(name, state.served.table)
        serves = (state.served.epochs != 0) & ~state.stopped[:size]
        self._serves[name] = frozenset(np.flatnonzero(serves).tolist())
        if self._serves[name] and state.serving():
            self._check_alone(name)

    def forget(self, name: str) -> None:
        """The node's process is gone."""
        for known in (self._served, self._serves, self._versions):
            known.pop(name, None)

    def _check_alone(self, name: str) -> None:
        mine = self._serves[name]
        for other, theirs in self._serves.items():
            if other == name or mine.isdisjoint(theirs):
                continue
            node = self._nodes[other]
            if node.life is not None and node.life.state.serving():
                both = sorted(mine & theirs)
                raise ViolationError(f"{name} and {other} serve partitions {both} at one time")

    def _check_version(self, name: str, table: Table | None) -> None:
        version = table.table_version if table is not None else 0
        if version < self._versions.get(name, 0):
            raise ViolationError(f"{name} went back to table version {version}")
        self._versions[name] = version

    # --- rows --------------------------------------------------------------------------------

    def on_committed(self, command: Command) -> None:
        """The command was committed: look at the rows that it changed."""
        before, table = self._table, self._committed_table()
        if table is None or table is before:
            return
        self._table = table
        old_rows: Sequence[PartitionRow] = before.rows if before is not None else ()
        for old, row in zip(old_rows, table.rows, strict=False):
            if old is row:
                continue
            if row.primary_epoch < old.primary_epoch or row.partition_epoch < old.partition_epoch:
                raise ViolationError(f"epochs of partition {row.partition_id} fell: {old} {row}")
            if set(row.in_sync) - set(row.replicas) or row.primary not in (0, *row.in_sync):
                raise ViolationError(f"a row contradicts itself: {row}")
            if set(row.in_sync) - set(old.in_sync) or row.primary != old.primary:
                self.check_copies(row)
            if isinstance(command, AlterPartitions) and row.primary_epoch > old.primary_epoch:
                self._check_hand_over(table, old)

    def _check_hand_over(self, table: Table, old: PartitionRow) -> None:
        """Check that who handed the partition over of its own will had stopped and drained it."""
        node, p = self._nodes[table.nodes[old.primary].node_id], old.partition_id
        replicator = node.life.replicator if node.life is not None and node.life.started else None
        if node.life is None or replicator is None:
            return
        leading = replicator.leading
        if p >= len(leading.epochs) or int(leading.epochs[p]) != old.primary_epoch:
            return  # another process has proposed it
        hand_over = replicator._proposals.hand_overs.get(p)
        if hand_over is not None and hand_over.why in (Why.UNREACHABLE, Why.BROKEN):
            return
        drained = int(leading.completed[p]) >= int(leading.primaries.last_sequences[p])
        in_flight = not drained and (hand_over is None or hand_over.why is not Why.HANGING)
        if hand_over is None or not node.life.state.stopped[p] or in_flight:
            raise ViolationError(f"{node.name} hands over what it has not drained: {old}")

    # --- acknowledged writes -----------------------------------------------------------------

    def on_decided(self, puts: Iterable[Applied]) -> None:
        """Check what a primary is about to write."""
        for twice in self._decided.note(puts):
            raise ViolationError(twice)

    def on_acknowledged(self, rows: Sequence[tuple[int, bytes, int]]) -> None:
        """Note writes (partition, key, version) that are about to be answered, or were read: what
        one read has seen, each later one must.
        """
        for partition_id, key, version in rows:
            known = self._acknowledged[partition_id]
            known[key] = max(known.get(key, 0), version)
        table = self._committed_table()
        assert table is not None
        self._check_held(table.rows, rows)

    def forget_acknowledged(self, partition_ids: range) -> None:
        """Forget what was acknowledged in partitions that are another keyspace's now."""
        for partition_id in partition_ids:
            self._acknowledged.pop(partition_id, None)

    def check_copies(self, row: PartitionRow) -> None:
        """Check that every member of in_sync has all that was ever acknowledged."""
        acknowledged = self._acknowledged[row.partition_id].items()
        self._check_held(
            {row.partition_id: row}, [(row.partition_id, k, v) for k, v in acknowledged]
        )

    def _check_held(
        self,
        table_rows: Sequence[PartitionRow] | Mapping[int, PartitionRow],
        writes: Sequence[tuple[int, bytes, int]],
    ) -> None:
        table = self._committed_table()
        assert table is not None
        for partition_id, key, version in writes:
            row = table_rows[partition_id]
            for number in row.in_sync:
                info = table.nodes[number]
                node = self._nodes[info.node_id]
                if node.life is None or not node.disk.is_known_as(info):
                    continue
                self.checks += 1
                self._check_one(node, row, key, version)

    @staticmethod
    def _check_one(node: SimulatedNode, row: PartitionRow, key: bytes, version: int) -> None:
        assert node.life is not None
        data = node.life.store.get(records.head_of(row.partition_id) + key)
        held = records.decode_record(data).sequence if data is not None else 0
        if held >= version:
            return
        copy = node.life.store.read_copies([row.partition_id])[row.partition_id]
        if data is None and copy.purge_floor >= version:
            return
        raise ViolationError(
            f"{node.name} is in sync of partition {row.partition_id} and lacks an acknowledged "
            f"write: key {key!r} version {version >> 40}.{version & 0xFFFFFFFFFF}, "
            f"it has {held >> 40}.{held & 0xFFFFFFFFFF}; row {row}; {copy}"
        )
