"""A primary's view of its followers: the sequence that each must hold, and has said to hold.

Invariants:
- A write is complete when it is durable here and on every required follower: the members of the
  row's in_sync, and of every proposed set whose fate is not known (rule 5). Only then do reads see
  it, and is it acknowledged. ``completed[p]`` only rises, and never above what any of them said.
- The position of a follower counts only while the partition is open to it, from the follower's own
  statement of it (``positioned``) until its stream ends.
- A follower that is silent although it should answer is late in every partition of which it is in
  sync, not only in the ones being written: else each partition would wait for it once.
- An adopted partition is not served before every required follower holds the beginning of the epoch
  (rule 4).
- A partition whose newest row does not name this node as primary of the adopted epoch has no
  followers here, and no write of it waits for one.

State is held in columns over partitions, and over (follower, partition). The first index is the
follower's slot, which a node keeps while this process lives. Pure: the driver passes messages and
the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from koinon_node.core.formats.records import (
    NO_SEQUENCE,
    BoolArray,
    EpochStart,
    F64Array,
    U32Array,
    U64Array,
)
from koinon_node.core.replication.copies import Copies
from koinon_node.core.replication.epoch_history import Lineage, common_point
from koinon_node.core.writes.commit_group import CommitGroup
from koinon_node.core.writes.pending_writes import PendingWrites
from koinon_node.core.writes.write_decisions import Primaries
from koinon_proto.contract.table import (
    NO_NODE,
    SEQUENCE_COUNTER_BITS,
    NodeNumber,
    NodeStatus,
    PartitionRow,
    Table,
    first_sequence,
)

_LIVE = (NodeStatus.ACTIVE, NodeStatus.DRAINING)
_STEP_S_MAX = 0.25  # silence counted per round at most: a pause of this process is not theirs
_STUCK_S = 0.2
"""A group that has waited so many seconds for a silent follower is stuck."""


class Answer(Enum):
    """The answer to a follower's opening of a partition."""

    OPENED = auto()
    TAKE_SNAPSHOT = auto()
    NOT_PRIMARY = auto()
    ASK_AGAIN = auto()


class Opening(NamedTuple):
    """An answer with its fields, which count only for OPENED. ``required``: writes wait for this
    follower.
    """

    answer: Answer
    common_point: int = 0
    stream_from: int = 0
    required: bool = False


class Asked(NamedTuple):
    """A follower's description of its copy at the opening. Its lineage has no write from
    ``unchanged_from`` through ``complete_through``, and the copy holds none above.
    """

    partition_id: int
    primary_epoch: int
    complete_through: int
    unchanged_from: int
    needs_snapshot: bool
    history: Sequence[EpochStart]


_Columns = Mapping[str, tuple[type[np.generic], float]]
_BY_FOLLOWER_AND_PARTITION: _Columns = {
    **dict.fromkeys(("replicas", "in_sync", "proposed", "joining", "leaving"), (np.bool_, False)),
    **dict.fromkeys(("required", "opened", "positioned"), (np.bool_, False)),
    "acked": (np.uint64, 0),
    "holds": (np.uint64, NO_SEQUENCE),
}
_BY_FOLLOWER: _Columns = {
    "live": (np.bool_, False),
    "heard": (np.bool_, False),
    "departing": (np.bool_, False),
    "silence_s": (np.float64, 0.0),
    "durable_from": (np.float64, -np.inf),
    "durable_in_s": (np.float64, 0.0),
}
_BY_PARTITION: _Columns = {
    "epochs": (np.uint64, 0),
    "streamed": (np.uint64, 0),
    "completed": (np.uint64, 0),
    "ready": (np.bool_, False),
    "broken": (np.bool_, False),
    "adopted_at": (np.float64, 0.0),
    "minima": (np.int64, 1),
    "given_up": (np.bool_, False),
}
"""Each column's type and its initial value."""


class ReplicaTracker:
    """The columns, and the decisions that read them."""

    # By (follower, partition).
    replicas: BoolArray  # member of the newest row's replicas, without this node
    in_sync: BoolArray  # member of the newest row's in_sync, without this node
    proposed: BoolArray  # member of a proposed in_sync whose fate is not known
    joining: BoolArray  # about to be proposed as a member
    leaving: BoolArray  # has failed for good: to be proposed out of in_sync
    required: BoolArray  # writes wait for this follower; see ``require``
    opened: BoolArray  # open on the follower's stream
    positioned: BoolArray  # the follower has stated its position since the opening
    acked: U64Array  # the last sequence that the follower said to hold durably; 0: none stated
    holds: U64Array  # a pass of the follower needs the tombstones above this sequence
    # By follower.
    live: BoolArray  # alive by the newest table
    heard: BoolArray  # has acknowledged something since the last ``look``
    departing: BoolArray  # the node is about to stop
    silence_s: F64Array  # how long it has been silent although it should answer
    durable_from: F64Array  # when the batch that it made durable last was sent, monotonic seconds
    durable_in_s: F64Array  # time from then to the acknowledgement
    # By partition.
    epochs: U64Array  # adopted, and the newest row's; 0: this node does not lead the partition
    streamed: U64Array  # the last sequence sent to followers
    completed: U64Array  # the last sequence that is durable here and on all required followers
    ready: BoolArray  # may be served: rule 4 holds since the adoption
    broken: BoolArray  # this node could not store a write that followers have (rule 8)
    adopted_at: F64Array  # monotonic seconds
    minima: npt.NDArray[np.int64]  # how many in-sync replicas a write needs, this node included
    given_up: BoolArray  # the row wants another primary

    def __init__(self, copies: Copies, primaries: Primaries, pending: PendingWrites) -> None:
        self.copies = copies
        self.primaries = primaries
        self.pending = pending
        self.table: Table | None = None
        self.me = NO_NODE
        self.slots: dict[NodeNumber, int] = {}  # a follower's index into the columns
        self.numbers: list[NodeNumber] = []  # by slot
        self.any_required = False  # whether any partition has a required follower
        self.any_replicated = False  # whether any row has more than one replica
        self._has_unready = False  # whether a partition was adopted that may not be ready yet
        self._looked_at = 0.0  # the time of the last ``look``, monotonic seconds
        self._size = -1  # rows in the table; a new keyspace adds some
        self._resize(0, 0)

    def _resize(self, slots: int, size: int) -> None:
        """Grow the columns to so many followers and partitions; keep their values."""
        is_first = self._size < 0
        self._size = size
        for shape, columns in (
            ((slots, size), _BY_FOLLOWER_AND_PARTITION),
            ((slots,), _BY_FOLLOWER),
            ((size,), _BY_PARTITION),
        ):
            for name, (kind, empty) in columns.items():
                column = np.full(shape, empty, kind)
                if not is_first:
                    old = getattr(self, name)
                    kept = tuple(slice(min(pair)) for pair in zip(shape, old.shape, strict=True))
                    column[kept] = old[kept]
                setattr(self, name, column)

    def slot_of(self, number: NodeNumber) -> int:
        """Return the node's slot; give it a new one if it has none."""
        slot = self.slots.get(number)
        if slot is None:
            slot = self.slots[number] = len(self.numbers)
            self.numbers.append(number)
            if slot >= len(self.live):
                self._resize(2 * slot + 2, self._size)
        return slot

    @property
    def led(self) -> BoolArray:
        led: BoolArray = self.epochs != 0
        return led

    # --- rows ------------------------------------------------------------------------------

    def on_table(
        self, table: Table, me: NodeNumber, node_epoch: int
    ) -> tuple[list[int], list[int]]:
        """Apply the newest table. Return the partitions that this node no longer leads, and the
        partitions whose row changed. ``me`` and ``node_epoch`` are this node's, as far as it is
        registered.
        """
        before, same = self.table, self.me == me
        self.table, self.me = table, me
        if not table.rows:
            return [], []
        if self._size != len(table.rows):
            self._resize(len(self.live), len(table.rows))
        info = table.nodes.get(me)
        registered = info is not None and node_epoch != 0 and info.node_epoch == node_epoch
        old_rows = before.rows if before is not None else ()
        pairs = zip_longest(table.rows, old_rows[: self._size])
        news = [(row, old) for row, old in pairs if row is not old]
        changed: list[int] = [row.partition_id for row, _ in news]
        self._take_rows(
            [row for row, old in news if not (same and old is not None and _same_members(row, old))]
        )
        settings = table.cluster, table.keyspace_list
        if before is not None and (before.cluster, before.keyspace_list) != settings:
            # Live nodes count for unchanged rows, too.
            self.minima[:] = list(map(table.keyspaces.min_in_sync, table.rows))
        for mask in (self.joining, self.opened, self.positioned):
            mask[:, changed] &= self.replicas[:, changed]
        self.leaving[:, changed] &= self.in_sync[:, changed]
        self.require(changed)
        self.any_replicated = bool(self.primaries.replicated.any())
        # An unchanged row still names this node as primary.
        looked = changed if registered and same else np.flatnonzero(self.led).tolist()
        lost = [
            p
            for p, epoch in zip(looked, self.epochs[looked].tolist(), strict=True)
            if epoch
            and not (
                registered and table.rows[p].primary == me and table.rows[p].primary_epoch == epoch
            )
        ]
        if lost:
            self._lose(lost)
            self.require(lost)
        for slot, number in enumerate(self.numbers):
            node = table.nodes.get(number)
            self.live[slot] = node is not None and node.status in _LIVE
        return lost, changed

    def _take_rows(self, rows: Sequence[PartitionRow]) -> None:
        """Set the columns to these rows. Rows with the same members are handled together: thousands
        may change at once.
        """
        assert self.table is not None
        minima = list(map(self.table.keyspaces.min_in_sync, rows))
        self.minima[[row.partition_id for row in rows]] = minima
        alike: dict[tuple[Sequence[NodeNumber], Sequence[NodeNumber], bool], list[int]] = {}
        for row in rows:
            given_up = row.wanted_primary != NO_NODE or bool(row.removing)
            place = row.replicas, row.in_sync, given_up
            alike.setdefault(place, []).append(row.partition_id)
        for (replicas, in_sync, given_up), p in alike.items():
            self.given_up[p] = given_up
            self.primaries.replicated[p] = len(replicas) > 1
            for number in replicas:
                if number != self.me:
                    self.slot_of(number)
            for slot, number in enumerate(self.numbers):
                self.replicas[slot, p] = number in replicas and number != self.me
                self.in_sync[slot, p] = number in in_sync and number != self.me

    def _lose(self, p: Sequence[int]) -> None:
        """Forget partitions that this node no longer leads. The caller then recomputes
        ``required``, once for all changes.
        """
        self.epochs[p] = 0
        self.ready[p] = self.broken[p] = False
        for mask in (self.proposed, self.joining, self.leaving, self.opened, self.positioned):
            mask[:, p] = False
        self.acked[:, p] = 0
        self.holds[:, p] = NO_SEQUENCE

    def require(self, partition_ids: Sequence[int]) -> None:
        """Recompute which followers are required in these partitions."""
        p = np.asarray(partition_ids, np.intp)
        wanted = self.in_sync[:, p] | self.proposed[:, p] | self.joining[:, p]
        self.required[:, p] = wanted & (self.epochs[p] != 0)
        self.any_required = bool(self.required.any())

    def adopt(self, adopted: Mapping[int, int], now: float) -> None:
        """Lead the partitions in these epochs, which are durable here, unless the newest rows have
        changed.
        """
        if self.table is None:
            return
        p: list[int] = []
        for partition_id, primary_epoch in adopted.items():
            row = self.table.rows[partition_id] if partition_id < self._size else None
            if row and row.primary == self.me and row.primary_epoch == primary_epoch:
                p.append(partition_id)
        epochs = np.array([adopted[partition_id] for partition_id in p], np.uint64)
        self._lose(p)
        self.epochs[p] = epochs
        self.streamed[p] = self.completed[p] = epochs << np.uint64(SEQUENCE_COUNTER_BITS)
        self.adopted_at[p] = now
        self._has_unready |= bool(p)
        self.require(p)

    def take_ready(self) -> list[int]:
        """Return the partitions that may be served and were not returned before."""
        if not self._has_unready:  # quick exit: this runs at each acknowledgement
            return []
        waiting = np.flatnonzero(self.led & ~self.ready)
        if not len(waiting):
            self._has_unready = False
            return []
        starts = self.epochs[waiting] << np.uint64(40)
        missing = self.required[:, waiting] & (self.acked[:, waiting] < starts)
        found = waiting[~missing.any(axis=0)]
        self.ready[found] = True
        taken: list[int] = found.tolist()
        return taken

    # --- followers -------------------------------------------------------------------------

    def open(self, slot: int, asked: Asked) -> Opening:
        """Answer a follower's opening; count the partition as open to it if the answer is
        OPENED.
        """
        p, table = asked.partition_id, self.table
        self.heard[slot] = True
        if table is None or p >= self._size:
            return Opening(Answer.ASK_AGAIN)
        row = table.rows[p]
        if asked.primary_epoch > row.primary_epoch:
            return Opening(Answer.ASK_AGAIN)
        if row.primary != self.me or asked.primary_epoch < row.primary_epoch:
            return Opening(Answer.NOT_PRIMARY)
        self._close_those(slot, p)
        # A removal that left no tombstone must lie below the beginning of the stream.
        unsent_removal = self.copies.purge_floors[p] > self.streamed[p]
        led = int(self.epochs[p]) == asked.primary_epoch
        if not led or not self.replicas[slot, p] or self.broken[p] or unsent_removal:
            return Opening(Answer.ASK_AGAIN)
        stream_from = int(self.streamed[p])
        known = self.copies.epochs_of(p)
        mine = Lineage(known.history, stream_from)
        point = common_point(mine, Lineage(asked.history, asked.complete_through))
        if asked.needs_snapshot or point < int(self.copies.purge_floors[p]):
            if self.in_sync[slot, p] or self.proposed[slot, p]:
                self.leaving[slot, p] = True
                return Opening(Answer.ASK_AGAIN)
            self.joining[slot, p] = False
            self.require([p])
            self.holds[slot, p] = self.copies.complete_through[p]
            return Opening(Answer.TAKE_SNAPSHOT)
        self.holds[slot, p] = point
        self.opened[slot, p] = True
        if asked.unchanged_from <= point and known.unchanged_from <= point:
            # Neither lineage has a write between there and the copy's end, or the epoch's
            # beginning.
            point = max(point, first_sequence(asked.primary_epoch))
        return Opening(Answer.OPENED, point, stream_from, bool(self.required[slot, p]))

    def close(self, slot: int, partition_ids: U32Array) -> None:
        """Note that the follower has closed these partitions."""
        self._close_those(slot, partition_ids[partition_ids < self._size])

    def _close_those(self, slot: int, p: U32Array | int) -> None:
        self.opened[slot, p] = self.positioned[slot, p] = False
        self.acked[slot, p] = 0
        self.holds[slot, p] = NO_SEQUENCE

    def depart(self, slot: int) -> None:
        """Note that the follower's node is about to stop. It will be removed from every in_sync;
        until then writes still wait for it, since it still acknowledges.
        """
        self.departing[slot] = True

    def lose_follower(self, slot: int) -> None:
        """Forget what a follower holds: its stream has ended."""
        if self.departing[slot]:
            self.departing[slot] = False
            self.leaving[slot] |= self.required[slot]
        self.opened[slot] = self.positioned[slot] = False
        self.acked[slot] = 0
        self.holds[slot] = NO_SEQUENCE
        self.durable_from[slot] = -np.inf

    def position(
        self, slot: int, partition_ids: U32Array, primary_epochs: U64Array, sequences: U64Array
    ) -> None:
        """Note that the follower's copies are complete through these sequences and apply
        batches.
        """
        self.heard[slot] = True
        known = partition_ids < self._size
        p, epochs, held = partition_ids[known], primary_epochs[known], sequences[known]
        holds = (
            self.opened[slot, p]
            & (self.epochs[p] == epochs)
            & (held <= self.streamed[p])
            & (held >= epochs << np.uint64(40))
        )
        p, held = p[holds], held[holds]
        self.positioned[slot, p] = True
        self.leaving[slot, p] = False
        self.acked[slot, p] = np.maximum(self.acked[slot, p], held)
        self.holds[slot, p] = NO_SEQUENCE

    def acknowledge(self, slot: int, partition_ids: U32Array, lasts: U64Array) -> None:
        """Note that batches up to these sequences are durable on the follower, where it is
        positioned.
        """
        self.heard[slot] = True
        held = np.where(self.positioned[slot, partition_ids], lasts, 0)
        self.acked[slot, partition_ids] = np.maximum(self.acked[slot, partition_ids], held)

    def made_durable(self, slot: int, touched: U32Array, sent_at: float, now: float) -> None:
        """Note when the follower acknowledged a batch that was sent at ``sent_at``.
        Acknowledgements of kept-back rows do not count: they say nothing about its disk.
        """
        if self.positioned[slot, touched].any():
            self.durable_from[slot], self.durable_in_s[slot] = sent_at, now - sent_at

    def durable_since(self, sent_at: float, within_s: float) -> BoolArray:
        """Return a mask of the followers that made a batch sent at ``sent_at`` or later durable
        within so many seconds.
        """
        since: BoolArray = (self.durable_from >= sent_at) & (self.durable_in_s <= within_s)
        return since

    # --- groups ----------------------------------------------------------------------------

    def send(self, group: CommitGroup, touched: U32Array, lasts: U64Array) -> U64Array:
        """Note that the group is sent to followers, with these last sequences; return for each
        entry the last sequence that was sent before.
        """
        group.touched, group.lasts = touched, lasts
        previous = self.streamed[touched]
        self.streamed[touched] = lasts
        return previous

    def missing(self, touched: U32Array, lasts: U64Array) -> BoolArray:
        """Return a (follower, entry) mask of the required followers that have not acknowledged the
        entry's sequence.
        """
        missing: BoolArray = self.required[:, touched] & (self.acked[:, touched] < lasts)
        return missing

    def covers(self, touched: U32Array, lasts: U64Array) -> bool:
        """Return whether all required followers hold these sequences."""
        if not self.any_required:
            return True
        if len(touched) == 1:  # a single put: Python numbers cost less than arrays of one
            p, last = touched.item(), lasts.item()
            acked = self.acked[:, p].tolist()
            required = self.required[:, p].tolist()
            return all(held >= last for held, has_to in zip(acked, required, strict=True) if has_to)
        return not self.missing(touched, lasts).any()

    def now_complete(self, *, stuck_too: bool = False) -> list[CommitGroup]:
        """Return the durable groups that have become complete. Groups that have been stuck for long
        are checked only with ``stuck_too``; of these each complete partition counts by itself.
        """
        found = []
        for group in self.pending.durable():
            if group.stuck and not stuck_too:
                continue
            if self.covers(group.touched, group.lasts):
                found.append(group)
                self._complete(group.touched, group.lasts)
            elif group.stuck:
                there = ~self.missing(group.touched, group.lasts).any(axis=0)
                self._complete(group.touched[there], group.lasts[there])
        return found

    def _complete(self, touched: U32Array, lasts: U64Array) -> None:
        if len(touched) == 1:
            p = touched.item()
            self.completed[p] = max(self.completed[p], lasts.item())
        else:
            self.completed[touched] = np.maximum(self.completed[touched], lasts)

    def drained(self, p: int) -> bool:
        """Return whether every write of this epoch is complete."""
        return int(self.completed[p]) >= int(self.primaries.last_sequences[p])

    def look(self, now: float) -> None:
        """Add to the silence of each follower that owes an acknowledgement of something durable
        here, or has opened nothing although it is in sync; find the stuck groups.
        """
        step_s = min(now - self._looked_at, _STEP_S_MAX)
        self._looked_at = now
        durable = np.minimum(self.streamed, self.copies.complete_through[: self._size])
        owing = (self.positioned & (self.acked < durable)).any(axis=1)
        absent = (self.in_sync & self.led).any(axis=1) & ~self.opened.any(axis=1)
        silent = (owing | absent) & ~self.heard
        self.silence_s = np.where(silent, self.silence_s + step_s, 0.0)
        self.heard[:] = False
        for group in self.pending.durable():
            if now - group.committed_at <= _STUCK_S:
                break
            group.stuck = group.stuck or self._waits_for_silent(group)

    def _waits_for_silent(self, group: CommitGroup) -> bool:
        """Return whether the group waits for a follower that is silent or has no stream. A group
        that waits only for slow followers may be completed by their next acknowledgement.
        """
        speaks = self.positioned[:, group.touched] & (self.silence_s <= _STUCK_S)[:, None]
        return bool((self.missing(group.touched, group.lasts) & ~speaks).any())

    def reached(self, timeout_s: float) -> BoolArray:
        """Return a (follower, partition) mask: the follower is positioned and was not silent for
        the timeout.
        """
        reached: BoolArray = self.positioned & (self.silence_s <= timeout_s)[:, None]
        return reached

    def late(self, now: float, timeout_s: float, *, spare: bool = False) -> BoolArray:
        """Return a (follower, partition) mask of late followers: required ones that have delayed a
        write or a takeover for longer than the timeout or have failed for good, and silent in-sync
        ones. A write that is not durable here makes no follower late, so a hanging disk that all
        share makes none late. With ``spare`` followers that leave are not late either.
        """
        late: BoolArray = (self.leaving | self.departing[:, None]) & self.required & (not spare)
        silent = self.silence_s > timeout_s
        late[silent] |= self.in_sync[silent] & self.led
        for group in self.pending.durable():
            if now - group.committed_at <= timeout_s:
                break
            missing = self.missing(group.touched, group.lasts)
            group.stuck = bool(missing.any())
            for slot in np.flatnonzero(missing.any(axis=1)).tolist():
                late[slot, group.touched[missing[slot]]] = True
        taking = np.flatnonzero(self.led & ~self.ready & (now - self.adopted_at > timeout_s))
        if len(taking):
            starts = self.epochs[taking] << np.uint64(40)
            late[:, taking] |= self.required[:, taking] & (self.acked[:, taking] < starts)
        return late

    # --- derived facts ---------------------------------------------------------------------

    @property
    def rests(self) -> bool:
        """True while every led partition is served, every replica is in sync and none is silent:
        then no decision becomes due by time alone.
        """
        led = self.led
        return (
            not bool(self.silence_s.any())
            and bool((self.ready | ~led).all())
            and not bool(((self.replicas & ~self.in_sync) & led).any())
        )

    def live_in_sync(self) -> U64Array:
        """Return how many live in-sync replicas each partition has, this node included."""
        count: U64Array = 1 + (self.in_sync & self.live[:, None]).sum(axis=0)
        return count

    def purge_bounds(self, partition_ids: U32Array) -> U64Array:
        """Return for each partition the sequence through which tombstones may be purged: every
        required follower holds it, and no pass needs a tombstone below. 0 where this node does not
        serve.
        """
        p = partition_ids
        bounds: U64Array = self.completed[p].copy()
        if len(self.live):
            acked = np.where(self.required[:, p], self.acked[:, p], np.uint64(NO_SEQUENCE))
            bounds = np.minimum(bounds, acked.min(axis=0))
            bounds = np.minimum(bounds, self.holds[:, p].min(axis=0))
        return np.where(self.ready[p], bounds, np.uint64(0))

    def members_by(
        self, mask: BoolArray, partition_ids: Sequence[int]
    ) -> dict[int, list[NodeNumber]]:
        """Return the nodes in a (follower, partition) mask, by partition; partitions without any
        are left out. One pass handles all: thousands of partitions may lose a follower at once.
        """
        found: dict[int, list[NodeNumber]] = {}
        slots, places = np.nonzero(mask[:, partition_ids])
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            found.setdefault(partition_ids[place], []).append(self.numbers[slot])
        return found


def _same_members(row: PartitionRow, old: PartitionRow) -> bool:
    """Return whether two rows have the same members, so that the columns do not change."""
    return (
        row.in_sync == old.in_sync
        and row.replicas == old.replicas
        and row.adding == old.adding
        and row.removing == old.removing
        and row.wanted_primary == old.wanted_primary
    )
