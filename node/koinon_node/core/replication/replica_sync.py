"""A follower's decisions: which primary to follow, what to pull first, how to treat a batch.

A partition that this node should follow is WAITING until this node opens it at its primary. The
answer says which stage comes first. Batches that are streamed before POSITIONING are kept back.

    SNAPSHOT     a snapshot replaces the copy, range by range, without a stream; then it reopens
    REPAIR       the primary's records replace own records above the common point
    CATCH_UP     a pass pulls the primary's records above the common point, in key order
    JOINING      the pass is over; the stream has not yet reached the newest pulled record
    POSITIONING  the transaction that makes the copy complete is queued; batches are queued after it
    LIVE         the primary knows that the copy is complete; each batch is applied as it comes

Why the kept-back batches may be applied blindly, in one transaction with the new position: let L be
the sequence where the stream begins, and X the last sequence received; no pulled record is above X.
The pulled record of a key is its state at some sequence from L on. So the key's version at X is its
last one in (L, X], which is among the batches, or else the pulled record. Before that transaction
the pulled records are above ``complete_through`` and the copy is marked DIRTY_TAIL: if the primary
changes, they are repaired.

A copy for which writes wait, because it is in sync or about to be, may be elected at any moment,
with its records at that moment. These must not contain a part of a commit group that the copy
pulls, nor a part of its own repaired tail: the records of an atomic batch lie apart in key order.
So such a copy *holds* pulled and removed rows in memory and stores all of them in that one
transaction; until then the copy is unchanged. The held rows are bounded: they are writes that are
not complete yet, and a primary limits the writes in flight.

If kept-back batches exceed their limits they are dropped. The pass continues and makes the copy
complete through the bound of its first page; newer pulled records remain a tail until the partition
has been opened again. A copy that holds its rows stores them only if none is newer than this bound;
otherwise it pulls them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from heapq import heappop, heappush
from itertools import zip_longest
from typing import NamedTuple

from koinon_node.core.formats.records import NO_SEQUENCE, EpochStart, PartitionEpochs
from koinon_node.core.replication.copies import Copies, CopyState
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
BUFFER_BYTES_MAX = 48 * 1024 * 1024  # of kept-back batches of one stream
HELD_BYTES_MAX = 256 * 1024 * 1024
"""The most held rows of one partition; far above a primary's ``Limits.pending_bytes`` in flight."""
ROW_OVERHEAD_BYTES = 48
_RETRY_MIN_S, _RETRY_MAX_S, _RETRY_IN_SYNC_MAX_S = 0.02, 1.0, 0.1


@dataclass(kw_only=True, eq=False)
class BadMessageError(KoinonError):
    """A primary's message is not consistent: a checksum, an order or a number is wrong."""

    reason: str


# --- which primary to follow -------------------------------------------------------------------


class Rank(IntEnum):
    """The order of openings: in-sync copies first, since writes wait for them; copies that a move
    adds last.
    """

    IN_SYNC = 0
    SETTLED = 1
    ADDING = 2


class Want(NamedTuple):
    """The newest row's demand on this node for one partition."""

    primary_epoch: int
    partition_epoch: int
    rank: Rank


class Wanted:
    """The partitions to follow at each primary, by the newest table. Only changed rows are
    evaluated again: while replicas move, hundreds of tables arrive.

    A partition whose copy here is of the past (``copies.is_of_past``) is not followed until that
    copy is erased. The copy has nothing of the primary's lineage; and the primary cannot put the
    copy out of in_sync, to replace it by a snapshot, where the minimum needs it.
    """

    def __init__(self) -> None:
        self._forget(None, 0)

    def _forget(self, of: tuple[NodeNumber, int] | None, size: int) -> None:
        self._of = of  # (node, node epoch) of the wants
        self._rows: Sequence[PartitionRow | None] = [None] * size
        self._primaries: dict[int, NodeNumber] = {}
        self._wants: dict[NodeNumber, dict[int, Want]] = {}
        self._of_past: set[int] = set()  # looked at again with each call

    def of(
        self, table: Table, me: NodeNumber, node_epoch: int, copies: Copies
    ) -> Mapping[NodeNumber, Mapping[int, Want]]:
        """Return the wants by primary. They change with the next call.

        There are none while the table is older than this node's registration or newer than its
        fence. A primary is left out if ``copies`` have seen a higher epoch of the partition (rule
        4). (An epoch seen since a row was evaluated comes from that row or a newer.)
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
        changed += [table.rows[p] for p in self._of_past]
        self._rows, self._of_past = table.rows, set()
        for row in changed:
            self._take(row, table, me, copies)
        return self._wants

    def _take(self, row: PartitionRow, table: Table, me: NodeNumber, copies: Copies) -> None:
        p, primary = row.partition_id, row.primary
        before = self._primaries.pop(p, None)
        if before is not None:
            del self._wants[before][p]
            if not self._wants[before]:
                del self._wants[before]
        if primary in (NO_NODE, me) or me not in row.replicas or primary not in table.nodes:
            return
        if copies.of_past(table.keyspaces, [p]):
            self._of_past.add(p)
        elif row.primary_epoch >= copies.epochs_of(p).primary_epoch:
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
    """The steps that change a partition's stage."""

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
    """This node's description of its copy at the opening. Its lineage has no write from
    ``unchanged_from`` through ``complete_through``, and the copy holds none above.
    """

    complete_through: int
    state: CopyState
    unchanged_from: int


def described(complete_through: int, state: CopyState, epochs: PartitionEpochs) -> Sent:
    """Build the description of a copy."""
    is_whole = state is CopyState.USABLE
    lowest = epochs.unchanged_before(complete_through) if is_whole else complete_through
    return Sent(complete_through, state, lowest)


_NOTHING_SENT = Sent(0, CopyState.USABLE, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The primary's answer to an opening: the common point of both copies, where the stream begins,
    and the primary's lineage.
    """

    common_point: int = 0
    stream_from: int = 0
    history: tuple[EpochStart, ...] = ()
    unchanged_from: int = NO_SEQUENCE  # see PartitionEpochs
    records: int = 0  # roughly how many the primary holds
    size: int = 0  # their bytes
    required: bool = False  # the primary's writes wait for this copy

    def epochs(self, primary_epoch: int) -> PartitionEpochs:
        """Return the epochs of a copy that equals the primary's, in a store that has seen this
        primary epoch.
        """
        return PartitionEpochs(
            primary_epoch=primary_epoch,
            history=self.history,
            unchanged_from=self.unchanged_from,
        )


class KeptBack(NamedTuple):
    """The rows of one partition from one batch."""

    keys: Sequence[bytes]
    records: Sequence[bytes]


def retry_delay_s(followed: Followed) -> float:
    """Return the delay in seconds before the partition is opened again. The delay doubles with each
    attempt. It stays short for an in-sync copy: a new primary serves no client before all in-sync
    copies follow it (rule 4).
    """
    in_sync = followed.want.rank is Rank.IN_SYNC
    most_s = _RETRY_IN_SYNC_MAX_S if in_sync else _RETRY_MAX_S
    return min(_RETRY_MIN_S * (1 << min(followed.attempts, 8)), most_s)


@dataclass(slots=True, eq=False)
class Followed:
    """A followed partition: its stage, and the state since it was opened."""

    partition_id: int
    want: Want
    due_at: float = 0.0  # earliest time of the next opening; seconds of the driver's clock
    attempts: int = 0  # openings since the last success
    stage: Stage = Stage.WAITING
    sent: Sent = _NOTHING_SENT
    opened: Opened = field(default_factory=Opened)
    received: int = 0  # the last sequence streamed
    newest_pulled: int = 0
    bound: int = 0  # the sequence through which a whole pass makes the copy complete; 0: no pass
    kept_back: list[KeptBack] = field(default_factory=list)  # rows of batches before POSITIONING
    kept_bytes: int = 0  # of ``kept_back``
    overflowed: bool = False  # ``kept_back`` exceeded its limit and was dropped
    holds: bool = False  # pulled rows stay in memory until the position: the copy may be elected
    held: dict[bytes, bytes] = field(default_factory=dict)  # these rows; b"": remove the key
    held_bytes: int = 0
    held_floor: int = 0  # the purge floor after the removals among them
    purge_floor: int = 0  # announced by the primary
    records: int = 0  # pulled
    size: int = 0  # bytes pulled
    index: StageIndex | None = None  # the index that lists this partition under its present stage

    def take(self, step: Step) -> None:
        """Change the stage, and the entry in the index."""
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
        """End the opening: drop all state of it."""
        self.due_at = due_at
        self.take(Step.CLOSE)
        self.opened = Opened()
        self.received = self.newest_pulled = self.bound = self.purge_floor = 0
        self.records = self.size = 0
        self.overflowed = self.holds = False
        self.drop_kept_back()
        self.drop_held()

    def hold(self, keys: Sequence[bytes], records: Sequence[bytes], floor: int) -> None:
        """Keep pulled rows in memory; an empty record removes the key.

        Raises:
            ResourceExhaustedError: the rows exceed ``HELD_BYTES_MAX``.
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
        """Return whether the stream has reached the newest pulled record."""
        return (
            self.stage is Stage.JOINING
            and not self.overflowed
            and self.received >= self.newest_pulled
        )

    @property
    def position(self) -> int:
        """The sequence through which the copy is complete once all received rows are applied. It is
        at least the beginning of the primary's epoch: no sequence lies between earlier epochs and
        it.
        """
        return max(self.received, first_sequence(self.want.primary_epoch))


def first_step(followed: Followed, tail_epoch: int) -> Step:
    """Return the first step after an opening. ``tail_epoch``: the primary epoch whose lineage the
    copy's tail belongs to; 0 if unknown.

    Raises:
        BadMessageError: the primary claims more of this copy than it holds.
    """
    opened, sent = followed.opened, followed.sent
    if opened.common_point > _reach(sent, opened.history):
        raise BadMessageError(
            reason=f"partition {followed.partition_id}: the common point {opened.common_point} is "
            f"above the copy's complete_through, {sent.complete_through}"
        )
    dirty = bool(sent.state & CopyState.DIRTY_TAIL)
    own_tail = dirty and tail_epoch != followed.want.primary_epoch
    if own_tail or sent.complete_through > opened.common_point:
        return Step.REPAIR
    return step_after_repair(opened)


def step_after_repair(opened: Opened) -> Step:
    return Step.PULL if opened.common_point < opened.stream_from else Step.JOIN


def _reach(sent: Sent, history: Sequence[EpochStart]) -> int:
    """Return the highest sequence of the lineage at which its content equals the copy's end. An
    epoch that began right at the copy's end, or where no write was since, adds its empty beginning.
    """
    reach = sent.complete_through
    for epoch, previous in history:
        if sent.unchanged_from <= previous <= reach:
            reach = max(reach, first_sequence(epoch))
    return reach


# --- one primary's stream ----------------------------------------------------------------------


class Fate(Enum):
    """The decision on a batch's rows of one partition."""

    APPLY = auto()
    KEEP_BACK = auto()
    IGNORE = auto()
    GAP = auto()


class StageIndex:
    """The partitions followed at one primary, by rank and stage. It finds the partitions to open
    and counts the ones on their way without a scan: there may be thousands, and each of them
    changes.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[Rank, Stage]] = Counter()
        self.joining: dict[int, Followed] = {}  # by partition
        # WAITING partitions that may be opened now, and a heap of (due_at, partition_id, partition)
        # of the ones that wait for a later time. An entry that differs from its object is stale.
        self._due: dict[Rank, dict[int, Followed]] = {rank: {} for rank in Rank}
        self._later: list[tuple[float, int, Followed]] = []

    def add(self, followed: Followed) -> None:
        """Enter the partition under its present rank and stage."""
        rank, stage, p = followed.want.rank, followed.stage, followed.partition_id
        self.counts[rank, stage] += 1
        if stage is Stage.JOINING:
            self.joining[p] = followed
        elif stage is Stage.WAITING and followed.due_at:
            heappush(self._later, (followed.due_at, p, followed))
        elif stage is Stage.WAITING:
            self._due[rank][p] = followed

    def remove(self, followed: Followed) -> None:
        """Take the partition out, before it changes or ends."""
        rank, stage = followed.want.rank, followed.stage
        self.counts[rank, stage] -= 1
        if stage is Stage.JOINING:
            del self.joining[followed.partition_id]
        elif stage is Stage.WAITING:
            self._due[rank].pop(followed.partition_id, None)

    @property
    def has_some_not_in_sync(self) -> bool:
        """True if the newest row of any partition here does not count this node as in sync."""
        return any(count and rank is not Rank.IN_SYNC for (rank, _), count in self.counts.items())

    def due(self, rank: Rank, now: float) -> Iterable[Followed]:
        """Return the WAITING partitions whose time has come, in the order in which it came."""
        while self._later and self._later[0][0] <= now:
            at, p, followed = heappop(self._later)
            if followed.index is self and followed.stage is Stage.WAITING and followed.due_at == at:
                self._due[followed.want.rank][p] = followed
        return self._due[rank].values()

    @property
    def next_due_at(self) -> float | None:
        """The time at which the next WAITING partition becomes due, or None if all are due
        already.
        """
        return self._later[0][0] if self._later else None


class ReplicaSync:
    """All partitions that this node follows at one primary.

    ``unanswered``: the partitions whose opening on this stream has no answer yet. Answers carry no
    number, so a partition is not opened again before the answer to its last opening.
    """

    def __init__(self) -> None:
        self.partitions: dict[int, Followed] = {}
        self.index = StageIndex()
        self.unanswered: dict[int, float] = {}  # by partition: when it was opened
        self.kept_bytes = 0

    def want(self, wants: Mapping[int, Want]) -> tuple[list[Followed], list[Followed]]:
        """Apply the newest rows; return (ended, changed) partitions. The work for both has ended.

        A row of which only in_sync changed ends no work; a WAITING partition is tried again at
        once.
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
            elif known.want is not want and known.want != want:  # ``is`` first: most are unchanged
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
        """Close all openings: the stream has ended."""
        for followed in self.partitions.values():
            if followed.stage is not Stage.WAITING:
                followed.close()
        self.unanswered.clear()
        self.kept_bytes = 0

    def open(self, followed: Followed, sent: Sent, now: float) -> None:
        self.unanswered[followed.partition_id] = now
        followed.open(sent)

    def answered(self, partition_id: int) -> Followed | None:
        """Note the answer to an opening; return the partition, or None if the opening has ended."""
        self.unanswered.pop(partition_id, None)
        followed = self.partitions.get(partition_id)
        return followed if followed is not None and followed.stage is Stage.OPENING else None

    def due(self, rank: Rank, now: float) -> Iterator[Followed]:
        """Return the partitions of a rank that may be opened now."""
        return (f for f in self.index.due(rank, now) if f.partition_id not in self.unanswered)

    def fate_of(
        self, partition_id: int, primary_epoch: int, previous: int, last: int
    ) -> tuple[Fate, Followed | None]:
        """Decide on a batch's rows of one partition, and count the batch as received."""
        followed = self.partitions.get(partition_id)
        if followed is None or followed.want.primary_epoch != primary_epoch:
            return Fate.IGNORE, followed
        keeping = followed.stage in KEEPING_BACK
        if not keeping and followed.stage not in APPLYING:
            return Fate.IGNORE, followed
        if followed.overflowed:
            return Fate.IGNORE, followed
        start = first_sequence(primary_epoch)  # no sequence below it is streamed
        if max(previous, start) != max(followed.received, start) or last < previous:
            return Fate.GAP, followed
        followed.received = last
        return (Fate.KEEP_BACK if keeping else Fate.APPLY), followed

    def keep_back(
        self, followed: Followed, keys: Sequence[bytes], records: Sequence[bytes]
    ) -> None:
        """Keep rows until the copy can apply them. Beyond the limits, drop all kept rows of the
        partition.
        """
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
        """Return the kept-back rows in order, and forget them."""
        taken = followed.kept_back
        self.kept_bytes -= followed.kept_bytes
        followed.drop_kept_back()
        return taken


def chunks_by_size(ready: Sequence[Followed], bytes_max: int) -> Iterator[list[Followed]]:
    """Split partitions into chunks of at most ``bytes_max`` kept-back bytes, or a single larger
    one.
    """
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
