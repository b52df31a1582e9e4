"""A primary's view of its followers: what each has to hold, and what it said that it holds.

Invariants:
- A write is complete, and only then seen by reads and acknowledged, when it is durable here and on
  every follower that is required: the row's in_sync, and all in a proposed set whose fate is not
  known (rule 5). ``completed[p]`` only rises, and never above what each of them has said.
- What a follower holds counts only while the partition is open to it, after it has said so itself
  (``positioned``); with its stream all of it is forgotten.
- A follower that says nothing although it should is late with all that it is in sync of, not only
  with what happens to be written: else every partition would wait for it once.
- A partition that was adopted is not served before every required follower holds the beginning of
  the epoch (rule 4).
- A partition that the newest row does not give to this node at the adopted epoch has no followers
  here, and nothing waits for any.

State is held in columns over partitions, and over (follower, partition). A follower is known by its
slot, which its node keeps while this process lives. Pure: the driver passes messages and time.
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
_STEP_S_MAX = 0.25  # of silence, from one look to the next: a pause of this process is not theirs
_STUCK_S = 0.2
"""A group that has waited for so long for a follower that says nothing is stuck."""


class Answer(Enum):
    """The answer to a follower that opens a partition."""

    OPENED = auto()
    TAKE_SNAPSHOT = auto()
    NOT_PRIMARY = auto()
    ASK_AGAIN = auto()


class Opening(NamedTuple):
    """All but the answer counts only for OPENED. ``required``: writes wait for this follower."""

    answer: Answer
    common_point: int = 0
    stream_from: int = 0
    required: bool = False


class Asked(NamedTuple):
    """A follower's description of its copy when it opens a partition. ``unchanged_from``: from
    there through ``complete_through`` the copy's lineage has no write, and it holds none above.
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
"""Each column's type, and what it holds where nothing is known."""


class ReplicaTracker:
    """The columns. ``stopped`` and ``too_few`` are what reads and writes look at (state.py)."""

    # By (follower, partition).
    replicas: BoolArray  # by the newest row, this node left out
    in_sync: BoolArray  # by the newest row, this node left out
    proposed: BoolArray  # in sets whose fate is not known
    joining: BoolArray  # about to be proposed
    leaving: BoolArray  # cannot go on
    required: BoolArray  # has to hold what this node writes; see ``require``
    opened: BoolArray  # the follower has it open on its stream
    positioned: BoolArray  # and has said since what its copy is complete through
    acked: U64Array  # the last sequence that it said to hold durably; 0: said nothing
    holds: U64Array  # tombstones above these are needed
    # By follower.
    live: BoolArray  # by the newest table
    heard: BoolArray  # since the last look
    departing: BoolArray  # its node is about to stop
    silence_s: F64Array  # for how long it has said nothing although it should
    durable_from: F64Array  # when what it made durable last was sent, monotonic seconds
    durable_in_s: F64Array  # and how long it took, there and back
    # By partition.
    epochs: U64Array  # adopted, and given by the newest row; 0: not led here
    streamed: U64Array  # the last sequence that followers were sent
    completed: U64Array  # the last sequence that is durable on all that are required
    ready: BoolArray  # served since it was adopted
    broken: BoolArray  # an own commit failed that followers have
    adopted_at: F64Array  # monotonic seconds
    minima: npt.NDArray[np.int64]  # how many in-sync replicas a write needs, this node included
    given_up: BoolArray  # the row wants another primary

    def __init__(self, copies: Copies, primaries: Primaries, pending: PendingWrites) -> None:
        self.copies = copies
        self.primaries = primaries
        self.pending = pending
        self.table: Table | None = None
        self.me = NO_NODE
        self.slots: dict[NodeNumber, int] = {}  # rows of the columns by follower
        self.numbers: list[NodeNumber] = []  # by slot
        self.any_required = False  # whether any partition has a required follower
        self.any_replicated = False  # whether any row has more than one replica
        self._has_unready = False  # whether a partition was adopted that may not be ready yet
        self._looked_at = 0.0  # monotonic seconds
        self._size = -1  # of rows in the table, which keyspaces make longer
        self._resize(0, 0)

    def _resize(self, slots: int, size: int) -> None:
        """Make room for so many followers and partitions; what is known of them stays."""
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
        """Return the node's slot; a new one if it has none."""
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
        """Take the newest table. Returns the partitions that are led no more, and those whose row
        changed; ``me`` and ``node_epoch`` are this node's, as far as it is registered.
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
            # They count for rows that have not changed, too.
            self.minima[:] = list(map(table.keyspaces.min_in_sync, table.rows))
        for mask in (self.joining, self.opened, self.positioned):
            mask[:, changed] &= self.replicas[:, changed]
        self.leaving[:, changed] &= self.in_sync[:, changed]
        self.require(changed)
        self.any_replicated = bool(self.primaries.replicated.any())
        # What is led by a row that has not changed is led by this node still.
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
        """Let the columns say what these rows say. Of thousands most have members alike."""
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
        """Forget partitions that another node leads, or none: nothing waits for their followers.
        The caller recomputes who is required, for all that it changes at once.
        """
        self.epochs[p] = 0
        self.ready[p] = self.broken[p] = False
        for mask in (self.proposed, self.joining, self.leaving, self.opened, self.positioned):
            mask[:, p] = False
        self.acked[:, p] = 0
        self.holds[:, p] = NO_SEQUENCE

    def require(self, partition_ids: Sequence[int]) -> None:
        """Recompute who is required."""
        p = np.asarray(partition_ids, np.intp)
        wanted = self.in_sync[:, p] | self.proposed[:, p] | self.joining[:, p]
        self.required[:, p] = wanted & (self.epochs[p] != 0)
        self.any_required = bool(self.required.any())

    def adopt(self, adopted: Mapping[int, int], now: float) -> None:
        """Lead the partitions in these epochs, which are durable here, as far as the newest rows
        still say so.
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
        """Return (once) the partitions that may be served now."""
        if not self._has_unready:  # this is asked at each acknowledgement
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
        """Decide what the follower is told, and count the partition as open if it is opened."""
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
        # A removal that left no tombstone has to be below what is streamed from here on.
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
            # Neither lineage has a write between there and where the copy ends, or the epoch began.
            point = max(point, first_sequence(asked.primary_epoch))
        return Opening(Answer.OPENED, point, stream_from, bool(self.required[slot, p]))

    def close(self, slot: int, partition_ids: U32Array) -> None:
        """The follower has these open no more."""
        self._close_those(slot, partition_ids[partition_ids < self._size])

    def _close_those(self, slot: int, p: U32Array | int) -> None:
        self.opened[slot, p] = self.positioned[slot, p] = False
        self.acked[slot, p] = 0
        self.holds[slot, p] = NO_SEQUENCE

    def depart(self, slot: int) -> None:
        """The follower's node is about to stop: it is to be put out of every set, and counts for
        as long as that takes, since it still acknowledges.
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
        """Note that these copies are complete through these sequences, and follow."""
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
        """Batches up to these sequences are durable there, where the follower is positioned."""
        self.heard[slot] = True
        held = np.where(self.positioned[slot, partition_ids], lasts, 0)
        self.acked[slot, partition_ids] = np.maximum(self.acked[slot, partition_ids], held)

    def made_durable(self, slot: int, touched: U32Array, sent_at: float, now: float) -> None:
        """Note that it has acknowledged what was sent then of these. What it only keeps back is
        acknowledged too, and says nothing of its disk.
        """
        if self.positioned[slot, touched].any():
            self.durable_from[slot], self.durable_in_s[slot] = sent_at, now - sent_at

    def durable_since(self, sent_at: float, within_s: float) -> BoolArray:
        """Return by follower who has made durable something that was sent then or later, in less
        than so many seconds.
        """
        since: BoolArray = (self.durable_from >= sent_at) & (self.durable_in_s <= within_s)
        return since

    # --- groups ----------------------------------------------------------------------------

    def send(self, group: CommitGroup, touched: U32Array, lasts: U64Array) -> U64Array:
        """The group is on its way, and followers have to hold this of it; return what was streamed
        of each entry's partition before.
        """
        group.touched, group.lasts = touched, lasts
        previous = self.streamed[touched]
        self.streamed[touched] = lasts
        return previous

    def missing(self, touched: U32Array, lasts: U64Array) -> BoolArray:
        """Return, by (follower, entry), who has to hold what and has not said so."""
        missing: BoolArray = self.required[:, touched] & (self.acked[:, touched] < lasts)
        return missing

    def covers(self, touched: U32Array, lasts: U64Array) -> bool:
        """Return whether all who have to hold these."""
        if not self.any_required:
            return True
        if len(touched) == 1:  # of a put alone: numbers cost less than arrays of one
            p, last = touched.item(), lasts.item()
            acked = self.acked[:, p].tolist()
            required = self.required[:, p].tolist()
            return all(held >= last for held, has_to in zip(acked, required, strict=True) if has_to)
        return not self.missing(touched, lasts).any()

    def now_complete(self, *, stuck_too: bool = False) -> list[CommitGroup]:
        """Return the durable groups that are complete, for the caller to say so. Those that have
        been stuck for long are looked at only if asked for, and count partition by partition.
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
        """Return whether all that was ever written in this epoch is complete."""
        return int(self.completed[p]) >= int(self.primaries.last_sequences[p])

    def look(self, now: float) -> None:
        """Count for how long each follower has said nothing although it was sent something that is
        durable here, or has nothing open although it is in sync; see which groups are stuck.
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
        """Return whether a follower that has no stream, or says nothing, keeps the group waiting.
        Of one that is slow the next acknowledgement may complete all of the group.
        """
        speaks = self.positioned[:, group.touched] & (self.silence_s <= _STUCK_S)[:, None]
        return bool((self.missing(group.touched, group.lasts) & ~speaks).any())

    def reached(self, timeout_s: float) -> BoolArray:
        """Return by (follower, partition) who follows, and has not been silent for the timeout."""
        reached: BoolArray = self.positioned & (self.silence_s <= timeout_s)[:, None]
        return reached

    def late(self, now: float, timeout_s: float, *, spare: bool = False) -> BoolArray:
        """Return by (follower, partition) who is required and has kept a write or a takeover
        waiting for longer than the timeout, or cannot go on; and who is in sync and silent. No
        follower is late with what is not durable here: a disk that all share makes none late.
        ``spare``: nor is one that leaves, for now.
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

    # --- what follows from it --------------------------------------------------------------

    @property
    def rests(self) -> bool:
        """True while all that is led is served, with every replica in sync and none silent: then
        nothing comes due by time alone.
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
        """Return through which sequence each partition's tombstones may be purged: what every
        required follower holds, and no pass needs. 0 where it is not served here.
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
        """Return the nodes of a mask over (follower, partition), by those partitions that have any.
        One look for all of them: thousands may lose a follower at once.
        """
        found: dict[int, list[NodeNumber]] = {}
        slots, places = np.nonzero(mask[:, partition_ids])
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            found.setdefault(partition_ids[place], []).append(self.numbers[slot])
        return found


def _same_members(row: PartitionRow, old: PartitionRow) -> bool:
    """Return whether the columns of a row stay: only its epochs or its status have changed."""
    return (
        row.in_sync == old.in_sync
        and row.replicas == old.replicas
        and row.adding == old.adding
        and row.removing == old.removing
        and row.wanted_primary == old.wanted_primary
    )
