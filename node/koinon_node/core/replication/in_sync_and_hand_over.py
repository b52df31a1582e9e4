"""A primary's proposals for its rows: a new in-sync set, or a hand-over to another primary.

Rules that hold here:
- From the moment that a set is proposed its members are required, until a newer row is seen or the
  proposal was rejected for certain (rule 5). At most one proposal a partition is under way.
- A follower is added only when it holds every complete write. Writes wait for it from a short while
  before, so that even a follower slower than the others reaches that point.
- in_sync never shrinks below the row's minimum: the partition refuses new writes instead.
- A planned hand-over stops the partition, waits until nothing is in flight, and then proposes; once
  it has proposed, only a newer row that names this node lets it serve again (rule 7). If the wanted
  primary has died, the node proposes the row unchanged, to get a newer row.
- A node that is about to stop hands over each partition that it leads once, in the same way, to a
  node that is not about to stop, and leaves the partition's in_sync where the minimum allows.
- A partition whose epoch has few sequences left is handed over by this node to itself in the same
  way: it continues under a new epoch.
- A follower that is about to stop is removed from in_sync at once. Writes wait for it until that
  change is committed.
- A primary that lacks too many of the live replicas, or whose own commit failed after followers had
  the group, hands over to one of them (rules 6 and 8). In the second case it leaves in_sync or, if
  no other replica is in sync, begins a new epoch.
- A primary whose disk hangs hands over without draining, and leaves in_sync (rule 22). It hands
  over only partitions with enough other in-sync replicas, and only to replicas that made writes
  durable which it could not. So a hanging disk that all nodes share deposes no primary. It also
  hands back partitions that it was elected for and cannot take over. Once the disk answers, it
  serves again every partition for which it had proposed nothing yet.

Pure: the driver calls ``decide`` with the time, sends its proposals, and reports their fates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

import numpy as np

from koinon_node.core.formats.records import BoolArray
from koinon_node.core.membership.disk_health import DiskHealth
from koinon_node.core.replication.replica_tracker import ReplicaTracker
from koinon_proto.contract.table import NO_NODE, NodeNumber, PartitionRow, PartitionStatus

_AGAIN_S = 0.2  # between two proposals for one partition
_CHANGES_MAX = 16_384  # proposals of one call: coordinators refuse more
_WIDEN_EVERY_S = 0.25  # additions are gathered: a new table costs the same for one row or many
_PAUSE_MIN_S, _PAUSE_MAX_S = 2.0, 60.0  # between two hand-overs for want of a connection
_NEVER = float("inf")
_OUT_S = 0.5  # while this disk takes longer for a commit, no follower is called late
_FASTER = 3  # a disk counts as healthy if it answered so many times faster than this node's
_LEAVING_AT_ONCE, _LEAVING_PARTS = 64, 12  # stopped at once: the greater of 64 and a twelfth


class RowChange(NamedTuple):
    """A primary's proposal for its row, valid only while the row has these epochs: the whole new
    ``in_sync``, and the node to hand over to (``NO_NODE``: no hand-over). See PartitionChange in
    v1/membership.proto.
    """

    partition_id: int
    primary_epoch: int
    partition_epoch: int
    in_sync: tuple[NodeNumber, ...]
    hand_over_to: NodeNumber = NO_NODE


class Why(Enum):
    """The reason for a hand-over."""

    WANTED = auto()  # the row names another primary
    LEAVING = auto()  # this node is about to stop
    UNREACHABLE = auto()  # rule 6
    BROKEN = auto()  # rule 8
    HANGING = auto()  # rule 22
    USED_UP = auto()  # nearly all sequences of the epoch are used


@dataclass(slots=True)
class HandOver:
    """A hand-over under way: the partition is stopped until a newer row decides who leads."""

    to: NodeNumber
    why: Why
    since: float  # when it was stopped; seconds of the driver's clock
    partition_epoch: int  # of the row at that time: a newer row ends this hand-over
    proposed: bool = False  # from then on only a newer row lets this node serve again


class Masks(Protocol):
    """Masks by partition that every read and write checks, with a flag each for "any is set"; see
    state.py.
    """

    stopped: BoolArray
    too_few: BoolArray
    any_stopped: bool
    any_too_few: bool


class Proposals:
    """Decides what to propose, from the columns of ``leading``; keeps the masks ``stopped`` and
    ``too_few``.
    """

    def __init__(self, leading: ReplicaTracker, masks: Masks, disk: DiskHealth) -> None:
        self._leading = leading
        self._masks = masks
        self._disk = disk
        self._faster: BoolArray | None = None  # by follower, while the disk hangs: rule 22
        # Until then leaving followers are not late: their disks may be this node's hanging one.
        self._spare_until = 0.0
        self._given_up: list[int] = []  # partitions stopped for a hanging disk; see the taker
        # All by partition.
        self.hand_overs: dict[int, HandOver] = {}
        self._under_way: dict[int, RowChange] = {}  # proposed, not answered yet
        self._unknown: dict[int, list[RowChange]] = {}  # proposed, fate unknown
        self._again_at: dict[int, float] = {}  # the earliest time of the next proposal
        # The earliest time of the next additions; and that time if the last decision is sent.
        self._widen_at = self._widened_until = 0.0
        self._completed_before = leading.completed
        self._cut_off_since: dict[int, float] = {}
        self._pauses: dict[int, tuple[float, float]] = {}  # (length, earliest next) by rule 6
        self._leaving: dict[int, int] = {}  # partition -> primary epoch when ``leave`` was called
        self._leaving_room = 0  # how many more of these partitions may be stopped now

    # --- what happens ----------------------------------------------------------------------

    def on_rows(self, changed: Iterable[int], lost: Iterable[int]) -> None:
        """Take newer rows, which settle the fate of proposals on the older ones."""
        leading = self._leading
        touched = {*changed, *lost}
        noted = {*self.hand_overs, *self._unknown, *self._under_way, *self._again_at}
        if not (self._masks.any_stopped or leading.broken.any()):
            touched &= noted  # thousands of rows may change; this object notes few of them
        for p in touched:
            row = self._row(p)
            led = bool(leading.epochs[p])
            hand_over = self.hand_overs.get(p)
            if hand_over is not None and (
                row.primary != leading.me or row.partition_epoch > hand_over.partition_epoch
            ):
                del self.hand_overs[p]
            kept = [q for q in self._unknown.pop(p, ()) if led and _same_row(q, row)]
            if kept:
                self._unknown[p] = kept
            under_way = self._under_way.get(p)
            if under_way is not None and not (led and _same_row(under_way, row)):
                del self._under_way[p]
            stopped = p in self.hand_overs or bool(leading.broken[p])
            if stopped or self._masks.any_stopped:
                self._set_stopped(p, stopped)
            self._again_at.pop(p, None)
        self._count(touched)
        self.check_too_few(())

    def sent(self, proposals: Sequence[RowChange]) -> None:
        """Note that these proposals, the newest decision's, are being sent now."""
        self._widen_at = self._widened_until
        for proposal in proposals:
            p = proposal.partition_id
            self._under_way[p] = proposal
            if proposal.hand_over_to != NO_NODE and p in self.hand_overs:
                self.hand_overs[p].proposed = True
        self._count([proposal.partition_id for proposal in proposals])

    def answered(self, proposals: Sequence[RowChange], now: float) -> None:
        """Note that each proposal is settled: it was committed and its row was seen, or it was
        rejected or never sent and will not be committed.
        """
        self._settle(proposals, now, keep=False)

    def unknown(self, proposals: Sequence[RowChange], now: float) -> None:
        """Note that each proposal may be committed, now or later."""
        self._settle(proposals, now, keep=True)

    def _settle(self, proposals: Sequence[RowChange], now: float, *, keep: bool) -> None:
        for proposal in proposals:
            p = proposal.partition_id
            if self._under_way.get(p) is not proposal:
                continue  # a newer row has settled it
            del self._under_way[p]
            self._again_at[p] = now + _AGAIN_S
            if keep:
                known = self._unknown.setdefault(p, [])
                if proposal not in known:
                    known.append(proposal)
        self._count([proposal.partition_id for proposal in proposals])

    def _count(self, partition_ids: Collection[int]) -> None:
        """Recompute the members of proposed sets whose fate is not known."""
        leading = self._leading
        leading.proposed[:, list(partition_ids)] = False
        for p in partition_ids:
            under_way = self._under_way.get(p)
            for proposal in (*self._unknown.get(p, ()), *((under_way,) if under_way else ())):
                for number in proposal.in_sync:
                    if number != leading.me:
                        leading.proposed[leading.slot_of(number), p] = True
        leading.require(list(partition_ids))

    def break_off(self, partition_ids: Iterable[int]) -> None:
        """Stop partitions in which this node's own commit failed after followers may have got it
        (rule 8). The next ``decide`` hands them over.
        """
        for p in partition_ids:
            if self._leading.epochs[p]:
                self._leading.broken[p] = True
                self._set_stopped(p, True)

    @property
    def rests(self) -> bool:
        """True if no proposal or hand-over is under way or waits for its time."""
        pending = (self.hand_overs, self._under_way, self._unknown, self._leaving)
        return not any((*pending, self._cut_off_since)) and self._leading.rests

    def leave(self) -> None:
        """Begin to hand over the partitions that this node leads now, in portions, since it is
        about to stop. Each epoch is handed over once, so two leaving nodes do not pass a partition
        to and fro.
        """
        table, me = self._leading.table, self._leading.me
        rows = table.rows if table is not None else ()
        self._leaving = {r.partition_id: r.primary_epoch for r in rows if r.primary == me}

    def handing_over(self) -> bool:
        """Return whether any leaving partition may still be handed over: another in-sync replica
        could lead it, or is taking it over.
        """
        return any(self._on_its_way(self._row(p), epoch) for p, epoch in self._leaving.items())

    def _on_its_way(self, row: PartitionRow, primary_epoch: int) -> bool:
        leading = self._leading
        if row.primary == leading.me:
            p = row.partition_id
            drains = not self._disk.hangs or self._is_spared(row) or leading.drained(p)
            return row.primary_epoch == primary_epoch and drains and bool(self._successor(p))
        taking = row.status is PartitionStatus.ASSIGNED and row.primary in leading.slots
        return taking and bool(leading.live[leading.slots[row.primary]])

    # --- decisions -------------------------------------------------------------------------

    def decide(self, now: float, timeout_s: float) -> list[RowChange]:
        """Return the proposals to send now, at most one per partition. Those beyond
        ``_CHANGES_MAX`` are decided again after the answer.
        """
        leading = self._leading
        if leading.table is None or not leading.table.rows:
            return []
        leading.look(now)
        self._faster = None
        if self._disk.hangs:
            within_s = self._disk.out_s / _FASTER
            self._faster = leading.durable_since(self._disk.out_since, within_s)
        if self._disk.out_s > _OUT_S:  # this node is late itself: a smaller set would not help
            self._spare_until = now + timeout_s
            late = np.zeros_like(leading.required)
        else:
            late = leading.late(now, timeout_s, spare=now < self._spare_until)
        added = self._choose_added(late, leading.reached(timeout_s))
        stuck: set[int] = set()
        wanted: dict[int, RowChange] = {}
        due = late.any(axis=0)
        self._widened_until = self._widen_at
        if now >= self._widen_at and (added.any(axis=0) & ~due).any():
            self._widened_until = now + _WIDEN_EVERY_S
            due = (late | added).any(axis=0)
        looked = np.flatnonzero(due).tolist()
        joining, leaving = leading.members_by(added, looked), leading.members_by(late, looked)
        for p in looked:
            in_sync = self._new_in_sync(p, leaving.get(p, ()), joining.get(p, ()))
            if in_sync is None:
                stuck.add(p)
            elif not self._waits(p, now):
                wanted[p] = self._propose(p, in_sync)
        self.check_too_few(stuck)
        self._leaving_room = self._room_to_leave()
        for p in self._hand_over_candidates():
            self._begin_hand_over(p, now)
        self._notice_cut_off(now, timeout_s)
        if self._disk.hangs:
            self._leave_hanging_disk(now)
        for p, hand_over in list(self.hand_overs.items()):
            proposal = self._hand_over(p, hand_over, now, timeout_s)
            if proposal is not None and not self._waits(p, now):
                wanted[p] = proposal
        return list(wanted.values())[:_CHANGES_MAX]

    def _row(self, p: int) -> PartitionRow:
        assert self._leading.table is not None
        return self._leading.table.rows[p]

    def _waits(self, p: int, now: float) -> bool:
        return p in self._under_way or now < self._again_at.get(p, 0.0)

    def _propose(
        self, p: int, in_sync: Sequence[NodeNumber], to: NodeNumber = NO_NODE
    ) -> RowChange:
        row = self._row(p)
        return RowChange(p, row.primary_epoch, row.partition_epoch, tuple(in_sync), to)

    def _choose_added(self, late: BoolArray, reached: BoolArray) -> BoolArray:
        """Return a (follower, partition) mask of the followers that may join in_sync now; begin to
        require those that nearly may.
        """
        leading = self._leading
        outside = (
            leading.replicas
            & ~leading.in_sync
            & reached
            & (leading.live & ~leading.departing)[:, None]
            & (leading.led & ~leading.broken)
        )
        before = self._completed_before
        if len(before) != len(leading.completed):
            before = leading.completed
        joining = outside & ~late & (leading.acked >= before)
        changed = np.flatnonzero((joining != leading.joining).any(axis=0))
        if len(changed):
            leading.joining = joining
            leading.require(changed.tolist())
        self._completed_before = leading.completed.copy()
        added: BoolArray = joining & (leading.acked >= leading.completed)
        return added

    def _new_in_sync(
        self, p: int, late: Sequence[NodeNumber], added: Sequence[NodeNumber]
    ) -> list[NodeNumber] | None:
        """Return the in_sync to propose, or None if the late followers cannot be left out.

        Followers that the table calls dead leave first, then those that hold least.
        """
        leading, row = self._leading, self._row(p)
        members = [*row.in_sync, *(n for n in added if n not in row.in_sync)]
        leaving = [n for n in late if n in row.in_sync]
        leaving.sort(
            key=lambda n: (
                bool(leading.live[leading.slots[n]]),
                int(leading.acked[leading.slots[n], p]),
            )
        )
        kept_late = 0
        for number in leaving:
            if len(members) > int(leading.minima[p]):
                members.remove(number)
            else:
                kept_late += 1
        if kept_late and set(members) == set(row.in_sync):
            return None
        return members

    def check_too_few(self, stuck: Collection[int]) -> None:
        """Set ``too_few`` for the partitions with too few in-sync replicas for new writes, by the
        table or because a late follower cannot be left out (``stuck``).
        """
        leading = self._leading
        size = len(leading.epochs)
        too_few = self._masks.too_few
        too_few[:size] = leading.led & (leading.live_in_sync() < leading.minima)
        too_few[list(stuck)] = True
        self._masks.any_too_few = bool(too_few[:size].any())

    def _set_stopped(self, p: int, stopped: bool) -> None:
        self._masks.stopped[p] = stopped
        self._masks.any_stopped = stopped or bool(self._masks.stopped.any())

    # --- hand-overs ------------------------------------------------------------------------

    def _hand_over_candidates(self) -> list[int]:
        leading = self._leading
        table = leading.table
        assert table is not None
        broken = np.flatnonzero(leading.broken).tolist()
        leaving = [p for p in self._leaving if self._leaves(p)]
        wanted: list[int] = []
        if not table.moves.paused:
            wanted = np.flatnonzero(leading.ready & leading.given_up & ~leading.broken).tolist()
        few_left = leading.primaries.nearly_used_up(len(leading.ready))
        used_up = np.flatnonzero(leading.ready & few_left).tolist()
        return [p for p in {*broken, *leaving, *wanted, *used_up} if p not in self.hand_overs]

    def _room_to_leave(self) -> int:
        """Return the number of further partitions that a leaving node may stop now. One limit holds
        for the partitions that are stopped here; twice that limit holds for these together with the
        partitions that other nodes are taking over.
        """
        if not self._leaving:
            return 0
        at_once = max(_LEAVING_AT_ONCE, len(self._leaving) // _LEAVING_PARTS)
        stopped = sum(h.why is Why.LEAVING for h in self.hand_overs.values())
        rows = ((self._row(p), epoch) for p, epoch in self._leaving.items())
        taken = sum(r.primary != self._leading.me and self._on_its_way(r, e) for r, e in rows)
        return min(at_once - stopped, 2 * at_once - stopped - taken)

    def _leaves(self, p: int) -> bool:
        """Return whether this node still leads the partition in the epoch in which it began to
        leave.
        """
        return p in self._leaving and int(self._leading.epochs[p]) == self._leaving[p]

    def _begin_hand_over(self, p: int, now: float) -> None:
        leading, row = self._leading, self._row(p)
        if leading.broken[p]:
            # Without another in-sync replica this node continues under a new epoch: a follower that
            # has the write which this node could not store repairs its tail then.
            to, why = self._successor(p) or leading.me, Why.BROKEN
        else:
            to, why = self._wanted(row), Why.WANTED
            if self._leaves(p):
                if self._leaving_room <= 0:
                    return
                to, why = to or self._successor(p), Why.LEAVING
            if to == NO_NODE and leading.primaries.nearly_used_up(p + 1)[p]:
                to, why = leading.me, Why.USED_UP
            if to == NO_NODE or self._waits(p, now):
                return
            if self._masks.too_few[p] and not leading.drained(p):
                return  # stopping would not help: the writes in flight cannot complete now
            if why is not Why.USED_UP:
                slot = leading.slots[to]
                if not leading.positioned[slot, p] or leading.acked[slot, p] < leading.completed[p]:
                    return
        if to != NO_NODE:
            self._stop(p, to, why, now)

    def _stop(self, p: int, to: NodeNumber, why: Why, now: float) -> None:
        self._leaving_room -= why is Why.LEAVING
        self.hand_overs[p] = HandOver(to, why, now, self._row(p).partition_epoch)
        self._set_stopped(p, True)

    def _wanted(self, row: PartitionRow) -> NodeNumber:
        """Return the node that the row wants as primary instead of this node, or ``NO_NODE``."""
        me, wanted = self._leading.me, row.wanted_primary
        if wanted not in (NO_NODE, me) and self._can_lead(row, wanted):
            return wanted
        if me in row.removing and all(n in row.in_sync for n in row.adding):
            return next((n for n in row.target if self._can_lead(row, n)), NO_NODE)
        return NO_NODE

    def _can_lead(self, row: PartitionRow, number: NodeNumber) -> bool:
        leading = self._leading
        if number == leading.me or number not in row.in_sync:
            return False
        slot = leading.slots[number]
        if not leading.live[slot] or leading.departing[slot]:
            return False
        if self._faster is None or self._faster[slot]:
            return True
        # This node serves nothing that it does not lead: then an unknown disk is good enough.
        return not leading.epochs[row.partition_id] and not leading.positioned[slot].any()

    def _successor(self, p: int) -> NodeNumber:
        """Return the node that should lead instead of this one: the in-sync replica that holds
        most.
        """
        leading, row = self._leading, self._row(p)
        able = [n for n in row.replicas if self._can_lead(row, n)]
        return max(able, key=lambda n: int(leading.acked[leading.slots[n], p]), default=NO_NODE)

    def _notice_cut_off(self, now: float, timeout_s: float) -> None:
        """Rule 6: hand over partitions of which this node reaches too few live replicas."""
        leading = self._leading
        reached = leading.reached(timeout_s)
        cut_off = (
            leading.led
            & ~leading.broken
            & (1 + (leading.in_sync & reached).sum(axis=0) < leading.minima)
            & (leading.live_in_sync() >= leading.minima)
        )
        now_cut_off = set(np.flatnonzero(cut_off).tolist())
        for p in self._cut_off_since.keys() - now_cut_off:
            del self._cut_off_since[p]
            if leading.epochs[p]:
                self._pauses.pop(p, None)
        for p in now_cut_off:
            since = self._cut_off_since.setdefault(p, now)
            length, not_before = self._pauses.get(p, (0.0, 0.0))
            if p in self.hand_overs or now - since <= 2 * timeout_s or now < not_before:
                continue
            row = self._row(p)
            to = next(
                (
                    n
                    for n in row.replicas
                    if self._can_lead(row, n) and not reached[leading.slots[n], p]
                ),
                NO_NODE,
            )
            if to != NO_NODE:
                length = min(max(2 * length, _PAUSE_MIN_S), _PAUSE_MAX_S)
                self._pauses[p] = (length, now + 2 * timeout_s + length)
                self._stop(p, to, Why.UNREACHABLE, now)

    def _leave_hanging_disk(self, now: float) -> None:
        """Rule 22: stop the partitions that another replica can lead, without draining them."""
        leading = self._leading
        assert leading.table is not None
        for row in leading.table.rows:
            p = row.partition_id
            if row.primary != leading.me or leading.broken[p] or not self._is_spared(row):
                continue
            known = self.hand_overs.get(p)
            if known is None or not (known.proposed or known.why is Why.HANGING):
                to = self._successor(p)
                if to != NO_NODE:
                    self._stop(p, to, Why.HANGING, now)
                    self._given_up.append(p)

    def _is_spared(self, row: PartitionRow) -> bool:
        """Return whether in_sync has enough members without this node."""
        return len(row.in_sync) > int(self._leading.minima[row.partition_id])

    def take_given_up(self) -> list[int]:
        """Return the partitions that were stopped for a hanging disk since the last call. No waiter
        needs to wait for their writes in flight any longer.
        """
        taken, self._given_up = self._given_up, []
        return taken

    def _hand_over(
        self, p: int, hand_over: HandOver, now: float, timeout_s: float
    ) -> RowChange | None:
        """Return the proposal for a stopped partition, or None if it is too early."""
        leading, row = self._leading, self._row(p)
        leaves = hand_over.why in (Why.BROKEN, Why.LEAVING, Why.HANGING)
        planned = hand_over.why in (Why.WANTED, Why.LEAVING, Why.USED_UP)
        if hand_over.why is not Why.USED_UP and not self._can_lead(row, hand_over.to):
            hand_over.to = self._successor(p) if leaves else NO_NODE
            if hand_over.to == NO_NODE and hand_over.why is Why.BROKEN:
                hand_over.to = leading.me
        if hand_over.why is Why.HANGING and (not self._is_spared(row) or not self._disk.hangs):
            hand_over.to = NO_NODE
        if hand_over.to == NO_NODE:
            if hand_over.proposed:
                return self._propose(p, row.in_sync)  # an unchanged set, to get a newer row
            self._serve_again(p, now)
            return None
        if planned and not hand_over.proposed and not leading.drained(p):
            if now - hand_over.since > timeout_s:
                self._serve_again(p, now)
            return None
        leaving = [leading.me] if leaves and hand_over.to != leading.me else []
        leaving += [n for n in row.in_sync if n != leading.me and self._departs(n)]
        in_sync = list(row.in_sync)
        for number in leaving:
            if len(in_sync) > int(leading.minima[p]) and number != hand_over.to:
                in_sync.remove(number)
        return self._propose(p, in_sync, hand_over.to)

    def _departs(self, number: NodeNumber) -> bool:
        return bool(self._leading.departing[self._leading.slots[number]])

    def _serve_again(self, p: int, now: float) -> None:
        """Cancel a hand-over that was not proposed: no other node was named to lead."""
        del self.hand_overs[p]
        self._set_stopped(p, bool(self._leading.broken[p]))
        self._again_at[p] = now + _AGAIN_S


def _same_row(proposal: RowChange, row: PartitionRow) -> bool:
    """Return whether the row is still the one that the proposal was made of, so that its fate is
    open.
    """
    return (
        proposal.primary_epoch == row.primary_epoch
        and proposal.partition_epoch == row.partition_epoch
    )
