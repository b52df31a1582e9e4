"""A follower's decisions: which primary to follow, what to pull first, what to do with a batch.

A partition that this node is to follow is WAITING until it is opened at its primary. The answer
says which of the stages come first; records that are streamed meanwhile are kept back:

    SNAPSHOT     the copy is replaced, range by range; nothing is streamed; then it opens again
    REPAIR       own records above the common point are replaced by the primary's
    CATCH_UP     a pass brings what is above the common point, in key order
    JOINING      all that was to be pulled is here; waits until the stream has reached the newest
                 record that was pulled
    POSITIONING  the transaction that makes the copy complete is on its way; batches follow it
    LIVE         the primary knows; batches are applied as they come

Why the kept-back batches may be applied blindly, in one transaction with the new position: let L be
where the stream begins and X the last sequence received, no pulled record being above X. What was
pulled of a key is its state at or after L, so its version at X is the last one in (L, X], which is
among the batches, or else the pulled one. Before that transaction the records pulled are above
``complete_through`` and the copy is marked DIRTY_TAIL: if the primary changes, they are repaired.

A copy that writes wait for, because it is in sync or about to be, may be elected at any moment,
with what it has by then. Nothing of that may be half: some records of a group that it pulls, and
not the others, or half of its own tail. Such a copy *holds* what it pulls and removes, in memory,
and stores all of it in that one transaction; until then the copy is what it was. That is bounded:
what such a copy lacks, or has too much, is not complete, and a primary has so much in flight and no
more. (Else an atomic batch could be half: its records lie apart in the order of keys.)

Where more is kept back than there is room for, it is dropped; the pass goes on for what it brings,
and makes the copy complete through its first page's bound; the newer records that it brought remain
a tail until the partition has been opened again. A copy that holds what it pulled stores that if it
is nothing newer than this bound, and else pulls it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from heapq import heappop, heappush
from itertools import zip_longest
from typing import NamedTuple

from koinon_node.core.formats.records import NO_SEQUENCE, EpochStart, PartitionEpochs
from koinon_node.core.replication.copies import CopyState
from koinon_proto.contract.errors import KoinonError, ResourceExhaustedError
from koinon_proto.contract.table import (
    NO_NODE,
    NodeNumber,
    NodeStatus,
    PartitionRow,
    Table,
    first_sequence,
)

BUFFER_PARTITION_BYTES_MAX = 4 * 1024 * 1024
BUFFER_BYTES_MAX = 48 * 1024 * 1024  # of one stream
HELD_BYTES_MAX = 256 * 1024 * 1024
"""Of one partition; far above what a primary has in flight (``Limits.pending_bytes``)."""
ROW_OVERHEAD_BYTES = 48
_RETRY_MIN_S, _RETRY_MAX_S, _RETRY_IN_SYNC_MAX_S = 0.02, 1.0, 0.1


@dataclass(kw_only=True, eq=False)
class BadMessageError(KoinonError):
    """A primary's message contradicts itself: a checksum, an order, a number."""

    reason: str


# --- whom to follow ----------------------------------------------------------------------------


class Rank(IntEnum):
    """The order of openings: what the cluster's durability waits for, then what a move brings."""

    IN_SYNC = 0
    SETTLED = 1
    ADDING = 2


class Want(NamedTuple):
    """The newest row's demand on this node for one partition."""

    primary_epoch: int
    partition_epoch: int
    rank: Rank


class Wanted:
    """The partitions to follow at each primary, by the newest table. A row is looked at again only
    when it has changed: tables come by the hundred while replicas move.
    """

    def __init__(self) -> None:
        self._forget(None, 0)

    def _forget(self, of: tuple[NodeNumber, int] | None, size: int) -> None:
        self._of = of  # whose wants these are
        self._rows: Sequence[PartitionRow | None] = [None] * size
        self._primaries: dict[int, NodeNumber] = {}
        self._wants: dict[NodeNumber, dict[int, Want]] = {}

    def of(
        self, table: Table, me: NodeNumber, node_epoch: int, seen_epoch: Callable[[int], int]
    ) -> Mapping[NodeNumber, Mapping[int, Want]]:
        """Return the wants by primary. They change with the next call.

        Nothing while the table is older than this node's registration or newer than its fence;
        never a primary of an epoch below one that this store has seen (rule 4). (What the store has
        seen since a row was looked at is from a newer row, or from this very one.)
        """
        node = table.nodes.get(me)
        if (
            not node_epoch
            or node is None
            or node.node_epoch != node_epoch
            or node.status in (NodeStatus.FENCED, NodeStatus.LEFT)
        ):
            self._forget(None, 0)
            return self._wants
        if self._of != (me, node_epoch) or len(self._rows) > len(table.rows):
            self._forget((me, node_epoch), 0)
        pairs = zip_longest(table.rows, self._rows)
        changed = [new for new, old in pairs if new is not None and new is not old]
        self._rows = table.rows
        for row in changed:
            self._take(row, table, me, seen_epoch)
        return self._wants

    def _take(
        self, row: PartitionRow, table: Table, me: NodeNumber, seen_epoch: Callable[[int], int]
    ) -> None:
        p, primary = row.partition_id, row.primary
        before = self._primaries.pop(p, None)
        if before is not None:
            del self._wants[before][p]
            if not self._wants[before]:
                del self._wants[before]
        if primary in (NO_NODE, me) or me not in row.replicas or primary not in table.nodes:
            return
        if row.primary_epoch >= seen_epoch(p):
            want = Want(row.primary_epoch, row.partition_epoch, rank_of(row, me))
            self._wants.setdefault(primary, {})[p] = want
            self._primaries[p] = primary


def rank_of(row: PartitionRow, me: NodeNumber) -> Rank:
    if me in row.in_sync:
        return Rank.IN_SYNC
    return Rank.ADDING if me in row.adding else Rank.SETTLED


# --- one partition -----------------------------------------------------------------------------


class Stage(IntEnum):
    """The stages of a followed partition; see the module's docstring."""

    WAITING = auto()
    OPENING = auto()
    SNAPSHOT = auto()
    REPAIR = auto()
    CATCH_UP = auto()
    JOINING = auto()
    POSITIONING = auto()
    LIVE = auto()


class Step(IntEnum):
    """The steps that take a partition from stage to stage."""

    OPEN = auto()
    REPLACE = auto()
    REPAIR = auto()
    PULL = auto()
    JOIN = auto()
    POSITION = auto()
    DURABLE = auto()
    CLOSE = auto()


NEXT: Mapping[tuple[Stage, Step], Stage] = {
    (Stage.WAITING, Step.OPEN): Stage.OPENING,
    (Stage.OPENING, Step.REPLACE): Stage.SNAPSHOT,
    (Stage.OPENING, Step.REPAIR): Stage.REPAIR,
    (Stage.OPENING, Step.PULL): Stage.CATCH_UP,
    (Stage.OPENING, Step.JOIN): Stage.JOINING,
    (Stage.REPAIR, Step.PULL): Stage.CATCH_UP,
    (Stage.REPAIR, Step.JOIN): Stage.JOINING,
    (Stage.CATCH_UP, Step.JOIN): Stage.JOINING,
    (Stage.JOINING, Step.POSITION): Stage.POSITIONING,
    (Stage.POSITIONING, Step.DURABLE): Stage.LIVE,
    **{(stage, Step.CLOSE): Stage.WAITING for stage in Stage},
}

KEEPING_BACK = frozenset({Stage.REPAIR, Stage.CATCH_UP, Stage.JOINING})
APPLYING = frozenset({Stage.POSITIONING, Stage.LIVE})
PULLING = frozenset({Stage.OPENING, Stage.SNAPSHOT, Stage.REPAIR, Stage.CATCH_UP})
ON_THE_WAY = frozenset(Stage) - {Stage.WAITING, Stage.LIVE}


class Sent(NamedTuple):
    """The follower's description of its copy when it opened the partition. ``unchanged_from``: from
    there through ``complete_through`` its lineage has no write, and it holds none above.
    """

    complete_through: int
    state: CopyState
    unchanged_from: int


def described(complete_through: int, state: CopyState, epochs: PartitionEpochs) -> Sent:
    """Return the description of a copy."""
    is_whole = state is CopyState.USABLE
    lowest = epochs.unchanged_before(complete_through) if is_whole else complete_through
    return Sent(complete_through, state, lowest)


_NOTHING_SENT = Sent(0, CopyState.USABLE, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The primary's answer: where both agree, where the stream begins, and its lineage."""

    common_point: int = 0
    stream_from: int = 0
    history: tuple[EpochStart, ...] = ()
    unchanged_from: int = NO_SEQUENCE  # see PartitionEpochs
    records: int = 0  # that the partition has there, about
    size: int = 0  # bytes of them
    required: bool = False  # the primary's writes wait for this copy

    def epochs(self, primary_epoch: int) -> PartitionEpochs:
        """Return the metadata of a copy that is as the primary's, in a store that has seen this
        epoch.
        """
        return PartitionEpochs(
            primary_epoch=primary_epoch,
            history=self.history,
            unchanged_from=self.unchanged_from,
        )


class KeptBack(NamedTuple):
    """A batch's rows of one partition."""

    keys: Sequence[bytes]
    records: Sequence[bytes]


def retry_delay_s(followed: Followed) -> float:
    """Return how long to wait before the partition is opened again. The delay doubles, but stays
    short where the row says that this copy is in sync: a new primary that was not ready to be
    followed serves no client before all of those follow it (rule 4).
    """
    in_sync = followed.want.rank is Rank.IN_SYNC
    most_s = _RETRY_IN_SYNC_MAX_S if in_sync else _RETRY_MAX_S
    return min(_RETRY_MIN_S * (1 << min(followed.attempts, 8)), most_s)


@dataclass(slots=True, eq=False)
class Followed:
    """A followed partition: its stage, and below it what has come since it was opened."""

    partition_id: int
    want: Want
    due_at: float = 0.0  # when it is to be opened next; seconds of the driver's clock
    attempts: int = 0  # to open it, since the last that went well
    stage: Stage = Stage.WAITING
    sent: Sent = _NOTHING_SENT
    opened: Opened = field(default_factory=Opened)
    received: int = 0  # the last sequence streamed
    newest_pulled: int = 0
    bound: int = 0  # of a whole pass: what it makes the copy complete through; 0: none
    kept_back: list[KeptBack] = field(default_factory=list)  # batches until the pass has ended
    kept_bytes: int = 0
    overflowed: bool = False  # they were too many, and were dropped: another pass has to come
    holds: bool = False  # what is pulled, until the position: the copy may be elected meanwhile
    held: dict[bytes, bytes] = field(default_factory=dict)  # b"": removed
    held_bytes: int = 0
    held_floor: int = 0  # the purge floor that removals raise
    purge_floor: int = 0  # announced by the primary
    records: int = 0  # pulled
    size: int = 0  # bytes pulled
    index: StageIndex | None = None  # in which it is filed, under what it is now

    def take(self, step: Step) -> None:
        """Change the stage."""
        stage = NEXT[self.stage, step]
        if self.index is not None:
            self.index.remove(self)
        self.stage = stage
        if self.index is not None:
            self.index.add(self)

    def open(self, sent: Sent) -> None:
        self.take(Step.OPEN)
        self.sent = sent

    def close(self, due_at: float = 0.0) -> None:
        """Forget the opening."""
        self.due_at = due_at
        self.take(Step.CLOSE)
        self.opened = Opened()
        self.received = self.newest_pulled = self.bound = self.purge_floor = 0
        self.records = self.size = 0
        self.overflowed = self.holds = False
        self.drop_kept_back()
        self.drop_held()

    def hold(self, keys: Sequence[bytes], records: Sequence[bytes], floor: int) -> None:
        """Keep aside what was pulled; an empty record removes the key.

        Raises:
            ResourceExhaustedError: it is more than any primary has in flight.
        """
        self.held.update(zip(keys, records, strict=True))
        self.held_floor = max(self.held_floor, floor)
        self.held_bytes += sum(map(len, keys)) + sum(map(len, records))
        self.held_bytes += ROW_OVERHEAD_BYTES * len(keys)
        if self.held_bytes > HELD_BYTES_MAX:
            raise ResourceExhaustedError(
                resource="bytes that a copy in sync lacks", limit=HELD_BYTES_MAX
            )

    def drop_held(self) -> None:
        self.held = {}
        self.held_bytes = self.held_floor = 0

    def drop_kept_back(self) -> None:
        self.kept_back = []
        self.kept_bytes = 0

    def pulled(self, newest: int, rows: int, size: int) -> None:
        """Count records that were pulled."""
        self.newest_pulled = max(self.newest_pulled, newest)
        self.records += rows
        self.size += size

    @property
    def joined(self) -> bool:
        """Return whether the stream has reached all that was pulled."""
        return (
            self.stage is Stage.JOINING
            and not self.overflowed
            and self.received >= self.newest_pulled
        )

    @property
    def position(self) -> int:
        """The sequence through which the copy is complete with all that was received. At least the
        beginning of the primary's epoch: nothing lies between that and what came before.
        """
        return max(self.received, first_sequence(self.want.primary_epoch))


def first_step(followed: Followed, tail_epoch: int) -> Step:
    """Return what comes first. ``tail_epoch``: whose lineage the copy's tail belongs to, if known.

    Raises:
        BadMessageError: the primary claims more of this copy than it holds.
    """
    opened, sent = followed.opened, followed.sent
    if opened.common_point > _reach(sent, opened.history):
        raise BadMessageError(
            reason=f"partition {followed.partition_id}: common point {opened.common_point} is above"
            f" what was complete, {sent.complete_through}"
        )
    dirty = bool(sent.state & CopyState.DIRTY_TAIL)
    own_tail = dirty and tail_epoch != followed.want.primary_epoch
    if own_tail or sent.complete_through > opened.common_point:
        return Step.REPAIR
    return step_after_repair(opened)


def step_after_repair(opened: Opened) -> Step:
    return Step.PULL if opened.common_point < opened.stream_from else Step.JOIN


def _reach(sent: Sent, history: Sequence[EpochStart]) -> int:
    """Return the highest sequence that may say the same in the lineage as where the copy ends: an
    epoch that began right there, or where nothing was written since, may begin with nothing.
    """
    reach = sent.complete_through
    for epoch, previous in history:
        if sent.unchanged_from <= previous <= reach:
            reach = max(reach, first_sequence(epoch))
    return reach


# --- one primary's stream ----------------------------------------------------------------------


class Fate(Enum):
    """The fate of a batch's rows of one partition."""

    APPLY = auto()
    KEEP_BACK = auto()
    IGNORE = auto()
    GAP = auto()


class StageIndex:
    """The partitions that are followed at one primary by rank and stage. So what may be opened is
    found, and what is on its way is counted, without a look at each: there may be thousands, and
    something changes for each of them.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[Rank, Stage]] = Counter()
        self.joining: dict[int, Followed] = {}  # by partition
        self._due: dict[Rank, dict[int, Followed]] = {rank: {} for rank in Rank}  # WAITING
        # And those that are due later: a heap of (due_at, partition, the partition's object). An
        # entry that does not say what the object says now is of the past.
        self._later: list[tuple[float, int, Followed]] = []

    def add(self, followed: Followed) -> None:
        """File it, as it is now."""
        rank, stage, p = followed.want.rank, followed.stage, followed.partition_id
        self.counts[rank, stage] += 1
        if stage is Stage.JOINING:
            self.joining[p] = followed
        elif stage is Stage.WAITING and followed.due_at:
            heappush(self._later, (followed.due_at, p, followed))
        elif stage is Stage.WAITING:
            self._due[rank][p] = followed

    def remove(self, followed: Followed) -> None:
        """Take it out: it is about to change, or has ended."""
        rank, stage = followed.want.rank, followed.stage
        self.counts[rank, stage] -= 1
        if stage is Stage.JOINING:
            del self.joining[followed.partition_id]
        elif stage is Stage.WAITING:
            self._due[rank].pop(followed.partition_id, None)

    @property
    def has_some_not_in_sync(self) -> bool:
        """True if a copy that is not in sync, by the newest row, has to be brought up."""
        return any(count and rank is not Rank.IN_SYNC for (rank, _), count in self.counts.items())

    def due(self, rank: Rank, now: float) -> Iterable[Followed]:
        """Return what waits and is due, in the order in which it became so."""
        while self._later and self._later[0][0] <= now:
            at, p, followed = heappop(self._later)
            if followed.index is self and followed.stage is Stage.WAITING and followed.due_at == at:
                self._due[followed.want.rank][p] = followed
        return self._due[rank].values()

    @property
    def next_due_at(self) -> float | None:
        """The time to look again for something that is due; None: all that waits is due already."""
        return self._later[0][0] if self._later else None


class ReplicaSync:
    """All that is followed at one primary.

    ``unanswered``: opened on this stream, and the answer has not come. Answers carry no number, so
    a partition is not opened again before.
    """

    def __init__(self) -> None:
        self.partitions: dict[int, Followed] = {}
        self.index = StageIndex()
        self.unanswered: dict[int, float] = {}  # and since when
        self.kept_bytes = 0

    def want(self, wants: Mapping[int, Want]) -> tuple[list[Followed], list[Followed]]:
        """Take the newest rows; return (ended, changed): what was under way of those is over.

        A row that changed only in who is in sync ends nothing, and gives what waits another try.
        """
        ended = [f for p, f in self.partitions.items() if p not in wants]
        for followed in ended:
            del self.partitions[followed.partition_id]
            self.kept_bytes -= followed.kept_bytes
            self.index.remove(followed)
            followed.index = None
        changed: list[Followed] = []
        for partition_id, want in wants.items():
            known = self.partitions.get(partition_id)
            if known is None:
                new = Followed(partition_id, want, index=self.index)
                self.partitions[partition_id] = new
                self.index.add(new)
            elif known.want is not want and known.want != want:  # most rows have not changed
                if known.want.primary_epoch != want.primary_epoch:
                    changed.append(known)
                self.index.remove(known)
                known.want = want
                known.due_at, known.attempts = 0.0, 0
                self.index.add(known)
        return ended, changed

    def close(self, followed: Followed, due_at: float = 0.0) -> None:
        self.kept_bytes -= followed.kept_bytes
        followed.close(due_at)

    def lose(self) -> None:
        """The stream has ended, and with it everything that was open on it."""
        for followed in self.partitions.values():
            if followed.stage is not Stage.WAITING:
                followed.close()
        self.unanswered.clear()
        self.kept_bytes = 0

    def open(self, followed: Followed, sent: Sent, now: float) -> None:
        self.unanswered[followed.partition_id] = now
        followed.open(sent)

    def answered(self, partition_id: int) -> Followed | None:
        """An opening was answered; return what it was for, or None if that is over."""
        self.unanswered.pop(partition_id, None)
        followed = self.partitions.get(partition_id)
        return followed if followed is not None and followed.stage is Stage.OPENING else None

    def due(self, rank: Rank, now: float) -> Iterator[Followed]:
        """Return what may be opened now, by its rank."""
        return (f for f in self.index.due(rank, now) if f.partition_id not in self.unanswered)

    def fate_of(
        self, partition_id: int, primary_epoch: int, previous: int, last: int
    ) -> tuple[Fate, Followed | None]:
        """Decide on a batch's step of one partition, and count it as received."""
        followed = self.partitions.get(partition_id)
        if followed is None or followed.want.primary_epoch != primary_epoch:
            return Fate.IGNORE, followed
        keeping = followed.stage in KEEPING_BACK
        if not keeping and followed.stage not in APPLYING:
            return Fate.IGNORE, followed
        if followed.overflowed:
            return Fate.IGNORE, followed
        start = first_sequence(primary_epoch)  # nothing is streamed from below it
        if max(previous, start) != max(followed.received, start) or last < previous:
            return Fate.GAP, followed
        followed.received = last
        return (Fate.KEEP_BACK if keeping else Fate.APPLY), followed

    def keep_back(
        self, followed: Followed, keys: Sequence[bytes], records: Sequence[bytes]
    ) -> None:
        """Keep rows until the copy is ready for them; drop all of the partition's if too many."""
        size = sum(map(len, keys)) + sum(map(len, records)) + ROW_OVERHEAD_BYTES * len(keys)
        if (
            followed.kept_bytes + size > BUFFER_PARTITION_BYTES_MAX and not followed.holds
        ) or self.kept_bytes + size > BUFFER_BYTES_MAX:
            self.kept_bytes -= followed.kept_bytes
            followed.drop_kept_back()
            followed.overflowed = True
            return
        followed.kept_back.append(KeptBack(keys, records))
        followed.kept_bytes += size
        self.kept_bytes += size

    def take_kept_back(self, followed: Followed) -> list[KeptBack]:
        """Return what was kept back, in order, and keep it no longer."""
        taken = followed.kept_back
        self.kept_bytes -= followed.kept_bytes
        followed.drop_kept_back()
        return taken


def chunks_by_size(ready: Sequence[Followed], bytes_max: int) -> Iterator[list[Followed]]:
    """Cut into chunks that have kept back so many bytes, or hold a single larger one."""
    chunk: list[Followed] = []
    size = 0
    for followed in ready:
        own = followed.kept_bytes + followed.held_bytes
        if chunk and size + own > bytes_max:
            yield chunk
            chunk, size = [], 0
        chunk.append(followed)
        size += own
    if chunk:
        yield chunk
