"""Change feeds: deliver changes of partitions that this node leads, once each change is complete.

A partition of a feed is *live* while the tail of recent changes (core/writes/change_tail.py) has
every change above the feed's position. Otherwise it is in a *backfill*: a pass over the store in
key order. The pass reads only the keys that the journal of recent writes names, or all keys where
the journal does not reach back to the position.

    position     0 ......... sequence ......... bound ......... completed ..... durable here
    backfill                      (-- delivered --]   left to the next pass or the tail
    live                     (--------------------- delivered -------]

Rules:
- A change is delivered only once it is complete, that is on every in-sync replica. So no failover
  takes back a delivered change.
- A backfill delivers records above ``sequence`` and through ``bound``, which is complete. It leaves
  a record above ``bound`` to the next pass or the tail. But such a record has replaced an older
  record of its key, which a failover could bring back. So the pass waits until the newer record is
  complete.
- A position must lie in the partition's lineage (``last_common``) and above the purge floor, below
  which tombstones are forgotten. Otherwise the feed refuses the partition with a typed error.
- Memory is bounded: a feed holds one message and one page of a pass.

Belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.formats.records import U32Array, U64Array
from koinon_node.core.replication.epoch_history import Lineage, last_common
from koinon_node.core.writes.change_tail import Change, change_of, size_of
from koinon_node.partition.serving_context import ServingContext
from koinon_node.replication.commit_tracker import CommitTracker
from koinon_node.storage.store import Range
from koinon_proto.contract.errors import (
    HistoryBranchedError,
    KoinonError,
    SnapshotNeededError,
    UnavailableError,
)

MESSAGE_BYTES: Final = 512 * 1024
"""A message with so many bytes of changes (``size_of``) is full. An atomic batch is never split."""
PROGRESS_S: Final = 1.0
"""The longest time between two messages of a feed, in seconds."""
FROM_NOW: Final = records.NO_SEQUENCE
_GATHER_S = 0.005  # after the first change, wait so long for more of them before sending
_PAGE_ROWS, _PAGE_BYTES = 1_024, 512 * 1024
_JOURNAL_KEYS_MAX = 1_000
_LINGER_S = 120.0
"""The tail keeps a closed feed's partitions for so many seconds: the reader may reconnect."""


@dataclass(slots=True)
class Position:
    """A reader's position in one partition. The reader has seen every change through ``sequence``.
    With a ``bound`` it has also seen the changes above ``sequence`` and through ``bound`` of the
    keys up to and including ``after_key``.
    """

    partition_id: int
    sequence: int = 0  # 0: start from nothing; FROM_NOW: skip all that is complete at the opening
    bound: int = 0  # 0: no backfill is under way
    after_key: bytes = b""  # a data key without its partition prefix

    def copy(self) -> Position:
        return Position(self.partition_id, self.sequence, self.bound, self.after_key)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedRequest:
    """The positions from which to follow partitions, and a filter on keys. With ``keys_only``
    changes carry empty values.
    """

    positions: Sequence[Position]
    prefix: bytes = b""
    keys_only: bool = False


@dataclass(slots=True)
class Advance:
    """The next changes of one partition, and the position after them."""

    position: Position
    changes: Sequence[Change] = ()
    caught_up: bool = False  # True once the partition goes live after its opening or a backfill


@dataclass(slots=True)
class FeedMessage:
    """A message to the reader. An empty message is a keep-alive."""

    advances: list[Advance] = field(default_factory=list)
    refusals: dict[int, KoinonError] = field(default_factory=dict)  # partitions that end here
    rows: int = 0  # changes in ``advances``
    size: int = 0  # bytes of these changes (``size_of``)

    def __bool__(self) -> bool:
        return bool(self.advances or self.refusals)

    @property
    def is_full(self) -> bool:
        return self.size >= MESSAGE_BYTES

    def add(self, advance: Advance) -> None:
        self.advances.append(advance)
        self.rows += len(advance.changes)
        self.size += sum(map(size_of, advance.changes))


@dataclass(slots=True)
class _Member:
    """A partition that one feed follows."""

    position: Position  # how far changes were put into messages
    epoch: int  # the primary epoch in which this node led the partition at the opening
    sent: Position  # the last position that a message carried
    bound: int = 0  # of the pass under way; ``position`` takes it over with the first page
    caught_up: bool = False  # a message has said so since the last backfill


@dataclass(slots=True)
class _Page:
    """A page of a pass. It may be delivered once its newest record is complete."""

    member: _Member
    changes: list[Change]
    newest: int  # the highest sequence that the pass met on this page
    last_key: bytes
    end: bool  # the pass ends with this page


class ChangeFeeds:
    """The open feeds of this node."""

    def __init__(self, context: ServingContext, commits: CommitTracker) -> None:
        self.context = context
        self.tail = commits.tail
        self.journal = commits.journal
        self.leading = commits.leading
        self._feeds: dict[Feed, None] = {}  # in the order in which they were opened
        self.changes_sent = 0  # over all feeds since the start, for metrics
        commits.on_complete = self._on_complete

    @property
    def open_feeds(self) -> int:
        return len(self._feeds)

    def open(self, request: FeedRequest) -> Feed:
        """Open a feed. Its holder ends it by ``Feed.close``."""
        feed = Feed(self, request)
        self._feeds[feed] = None
        return feed

    def closed(self, feed: Feed, followed: Sequence[int]) -> None:
        """Remove a closed feed. The partitions that it followed stay in the tail for ``_LINGER_S``
        more.
        """
        self._feeds.pop(feed, None)
        asyncio.get_running_loop().call_later(_LINGER_S, self._leave, followed)

    def _leave(self, partition_ids: Sequence[int]) -> None:
        self.tail.leave(partition_ids)
        self.tail.mark(self.context.primaries.followed)

    def _on_complete(self, partition_ids: U32Array) -> None:
        for feed in self._feeds:
            feed.wake(partition_ids.tolist())


class Feed:
    """One feed. Its reader asks for the next message, writes it to the stream, and asks again."""

    def __init__(self, feeds: ChangeFeeds, request: FeedRequest) -> None:
        self._feeds = feeds
        self._request = request
        context = feeds.context
        self._state, self._store, self._writer = context.state, context.store, context.writer
        self._primaries = context.primaries
        self._members: dict[int, _Member] = {}
        self._followed: list[int] = []
        self._refusals: dict[int, KoinonError] = {}  # of positions refused at the opening
        self._due: dict[int, None] = {}  # live partitions that may have changes, oldest first
        self._backfills: dict[int, None] = {}  # partitions in a backfill; the first one is read now
        self._page: _Page | None = None  # read, but its newest record is not complete yet
        self._woken = asyncio.Event()
        self._ids: U32Array = np.zeros(0, np.uint32)  # the members' partition ids, and
        self._epochs: U64Array = np.zeros(0, np.uint64)  # their epochs, in the same order
        self._now = asyncio.get_running_loop().time
        self._progress_at = self._now() + PROGRESS_S
        self._follow(request.positions)

    def close(self) -> None:
        """End the feed."""
        self._feeds.closed(self, self._followed)

    def wake(self, partition_ids: Iterable[int]) -> None:
        """Note that a commit group became complete in these partitions."""
        for p in partition_ids:
            if p in self._members:
                if p not in self._backfills:
                    self._due[p] = None
                self._woken.set()

    async def next(self) -> FeedMessage | None:
        """Return the next message, or None once no partition is left. All changes in it are
        complete.

        Raises:
            UnavailableError: the store has not taken over enough of its log.
        """
        while True:
            message = FeedMessage()
            message.refusals, self._refusals = self._refusals, {}
            self._drop_unserved(message)
            self._add_live_changes(message)
            goes_on = True
            while goes_on and self._backfills and not message.is_full:
                goes_on = await self._add_page(message)
                await asyncio.sleep(0)
            if message:
                self._feeds.changes_sent += message.rows
                self._progress_at = self._now() + PROGRESS_S
                return message
            if not self._members:
                return None
            if self._now() >= self._progress_at:
                self._add_progress(message)
                return message
            await self._wait_for_changes()

    async def _wait_for_changes(self) -> None:
        """Wait until a group is complete in a followed partition, or a progress message is due."""
        try:
            async with asyncio.timeout_at(self._progress_at):
                await self._woken.wait()
            await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            # A stuck group becomes complete partition by partition, without a wake-up.
            self.wake(list(self._members))
        self._woken.clear()

    # --- members ---------------------------------------------------------------------------

    def _follow(self, positions: Sequence[Position]) -> None:
        """Follow the partitions that this node serves and whose positions are valid; refuse the
        rest.
        """
        view, tail = self._state.served, self._feeds.tail
        for position in positions:
            p = position.partition_id
            error = self._refusal(p)
            if error is None and position.sequence == FROM_NOW:
                position.sequence = int(self._feeds.leading.completed[p])
            error = error or self._fault_of(position)
            if error is not None:
                self._refusals[p] = error
                continue
            epoch = int(view.epochs[p])
            tail.follow(p, epoch, int(self._feeds.leading.copies.complete_through[p]))
            self._followed.append(p)
            self._members[p] = _Member(position, epoch, position.copy(), position.bound)
            (self._backfills if position.bound else self._due)[p] = None
        tail.mark(self._primaries.followed)
        self._list_members()

    def _list_members(self) -> None:
        count = len(self._members)
        self._ids = np.fromiter(self._members, np.uint32, count)
        self._epochs = np.fromiter((m.epoch for m in self._members.values()), np.uint64, count)

    def _refusal(self, p: int) -> KoinonError | None:
        """Return the reason why this node does not serve the partition, or None if it serves it.

        Raises:
            LeaseExpiredError: this node serves no partition at all.
        """
        self._state.check_lease()  # without a lease this node may not even know the partitions
        view = self._state.served
        if view.epochs[p] and not self._state.stopped[p]:
            return None
        return self._state.refusal(view, p, 0)

    def _fault_of(self, position: Position) -> KoinonError | None:
        """Return the reason why the lineage lacks the position, or None if it has the position."""
        p, leading = position.partition_id, self._feeds.leading
        lineage = Lineage(leading.copies.epochs_of(p).history, int(leading.streamed[p]))
        for sequence in filter(None, (position.sequence, position.bound)):
            common = last_common(lineage, sequence)
            if common is None:
                return SnapshotNeededError(partition_id=p, sequence=sequence, purge_floor=0)
            if common < sequence:
                return HistoryBranchedError(
                    partition_id=p, sequence=sequence, common_sequence=common
                )
        return None

    def _drop_unserved(self, message: FeedMessage) -> None:
        """Refuse the partitions that this node no longer serves in the epoch of the opening."""
        epochs, stopped = self._state.served.epochs, self._state.stopped
        if self._state.serving() and len(epochs) > self._ids.max(initial=0):
            gone = (epochs[self._ids] != self._epochs) | stopped[self._ids]
            lost: list[int] = self._ids[gone].tolist()
        else:
            lost = list(self._members)
        for p in lost:
            error = self._refusal(p) if p < len(epochs) else None
            reason = f"partition {p} has another primary now: open the feed anew"
            self._drop(p, error or UnavailableError(reason=reason), message)
        if lost:
            self._list_members()

    def _drop(self, p: int, error: KoinonError, message: FeedMessage) -> None:
        message.refusals[p] = error
        del self._members[p]
        self._due.pop(p, None)
        self._backfills.pop(p, None)
        if self._page is not None and self._page.member.position.partition_id == p:
            self._page = None

    # --- delivery --------------------------------------------------------------------------

    def _add_live_changes(self, message: FeedMessage) -> None:
        """Add complete changes of live partitions from the tail, until the message is full."""
        completed, tail = self._feeds.leading.completed, self._feeds.tail
        while self._due and not message.is_full:
            p = next(iter(self._due))
            member = self._members[p]
            position, through = member.position, int(completed[p])
            found = tail.read(
                p, member.epoch, position.sequence, through, bytes_max=MESSAGE_BYTES - message.size
            )
            if found is None:
                del self._due[p]
                self._backfills[p] = None
                member.caught_up = False
                continue
            changes, reached = found
            position.sequence = reached
            ends = reached >= through
            if ends:
                del self._due[p]
            self._add_changes(message, member, changes, caught_up=ends and not member.caught_up)

    def _add_changes(
        self, message: FeedMessage, member: _Member, changes: list[Change], *, caught_up: bool
    ) -> None:
        """Filter the changes of a member and add them to the message, unless none is left."""
        prefix = self._request.prefix
        if prefix:
            changes = [change for change in changes if change.key.startswith(prefix)]
        if self._request.keys_only:
            changes = [c if c.value is None else c._replace(value=b"") for c in changes]
        if changes or caught_up:
            member.caught_up |= caught_up
            member.sent = member.position.copy()
            message.add(Advance(member.sent, changes, caught_up))

    def _add_progress(self, message: FeedMessage) -> None:
        """Add the positions that moved past changes which the filter left out."""
        for member in self._members.values():
            if member.position != member.sent:
                member.sent = member.position.copy()
                message.add(Advance(member.sent))
        self._progress_at = self._now() + PROGRESS_S

    async def _add_page(self, message: FeedMessage) -> bool:
        """Add the next page of the first backfill; return whether another page can be read now."""
        p = next(iter(self._backfills))
        member = self._members[p]
        page, self._page = self._page, None
        if page is None:
            try:
                page = await self._read_page(member)
            except SnapshotNeededError as error:
                self._drop(p, error, message)
                self._list_members()
                return True
        self._drop_unserved(message)  # another node may have become primary during the read
        if p not in self._members:
            return True
        if int(self._feeds.leading.completed[p]) < page.newest:
            self._page = page
            return False
        position = member.position
        position.bound, position.after_key = member.bound, page.last_key
        if page.end:
            position.sequence, position.bound, position.after_key = member.bound, 0, b""
            member.bound = 0
            del self._backfills[p]
            self._due[p] = None
        self._add_changes(message, member, page.changes, caught_up=False)
        if page.end:
            self._add_live_changes(message)
        # The tail may not reach back to the end of this pass. Then the partition needs another
        # pass, which would find nothing before the next write.
        return p not in self._backfills or not page.end

    # --- passes ----------------------------------------------------------------------------

    async def _read_page(self, member: _Member) -> _Page:
        """Read the next page of a pass.

        Raises:
            SnapshotNeededError: tombstones that the pass would have to deliver were purged.
            UnavailableError: the store has not taken over enough of its log.
        """
        position = member.position
        p = position.partition_id
        if not member.bound:
            member.bound = int(self._feeds.leading.copies.complete_through[p])
        bound = member.bound
        if self._store.lacks((p,)):
            await self._writer.settle((p,))
        page = self._records(position)
        if page.purge_floor > (position.sequence or bound):
            raise SnapshotNeededError(
                partition_id=p, sequence=position.sequence, purge_floor=page.purge_floor
            )
        after = position.sequence
        changes: list[Change] = []
        newest = bound
        for data_key, encoded in page.rows:
            change = change_of(data_key[records.KEY_AT :], encoded)
            sequence = change.sequence
            if sequence > newest:
                newest = sequence
            is_users = data_key[records.KEY_AT - 1] == records.USER
            # A reader that starts from nothing never saw a deleted record.
            is_news = after or change.value is not None
            if is_users and is_news and after < sequence <= bound:
                changes.append(change)
        end = page.end or self._is_past_prefix(page.last_key)
        return _Page(member, changes, newest, page.last_key, end)

    def _records(self, position: Position) -> Range:
        """Read the records of a page: of the keys that the journal names, or of all keys."""
        p, after_key = position.partition_id, position.after_key
        if position.sequence and self._primaries.replicated[p]:  # no journal without followers
            keys = self._feeds.journal.since(p, position.sequence)
            if keys is not None:
                after = records.prefix_of(p) + after_key
                keys = [key for key in keys if key > after][: _JOURNAL_KEYS_MAX + 1]
                page = self._store.read_keys(p, keys[:_JOURNAL_KEYS_MAX], _PAGE_BYTES)
                last = page.last_key or after_key
                return page._replace(last_key=last, end=page.end and len(keys) <= _JOURNAL_KEYS_MAX)
        start = records.head_of(p)[2:] + self._request.prefix
        return self._store.read_range(
            p, after_key, position.sequence, _PAGE_ROWS, _PAGE_BYTES, start_key=start
        )

    def _is_past_prefix(self, last_key: bytes) -> bool:
        """Return whether the pass is past all keys with the reader's prefix."""
        wanted = records.head_of(0)[2:] + self._request.prefix
        return last_key > wanted and not last_key.startswith(wanted)
