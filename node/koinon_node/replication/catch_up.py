"""Brings one partition's copy to where its primary's stream begins: repair, catch-up, snapshot.

- Repair replaces every own record above the common point by what the primary holds, and removes
  what it lacks, without comparing: those records may be of another lineage (rule 12).
- Catch-up pulls what is above the common point, in key order, in pages; ``complete_through`` stays
  where it was until the pass is over (rule 11). It is void once the primary has purged tombstones
  above its start (rule 14).
- A snapshot replaces one key range a page. It begins by making the copy unusable, durably, and only
  its end makes it usable again (rule 14).

``pull`` is one pass, from the opening to joining the stream. A pass that took a snapshot closes the
opening: the copy is described, and opened, anew.

Where a copy holds what it pulls (``Followed.holds``), repair and catch-up write nothing: the
transaction that makes the copy complete does.

Else two pages at most are held: one is being written while the next is asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from koinon_node.core.formats import records
from koinon_node.core.formats.records import NO_SEQUENCE, PartitionEpochs
from koinon_node.core.replication import epoch_history
from koinon_node.core.replication.copies import CopyState
from koinon_node.core.replication.replica_sync import (
    BadMessageError,
    Followed,
    ReplicaSync,
    Stage,
    Step,
    step_after_repair,
)
from koinon_node.ports import Peers
from koinon_node.replication.applier import Change, one
from koinon_node.replication.stream_context import StreamContext, SupersededError
from koinon_proto.contract.errors import KoinonError, ReplyTooLargeError, UnavailableError
from koinon_proto.contract.table import NodeInfo
from koinon_proto.v1 import replication_pb2
from koinon_proto.v1.replication_pb2 import MergeStep

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
REPAIR_KEYS = 1_000
_OWN_KEYS = 4_096
_PAGES_IN_FLIGHT = 2
_TRIES = 3


def crc_of(keys: Sequence[bytes], rows: Sequence[bytes], merges: Sequence[bytes] = ()) -> int:
    """Return the checksum that messages carry: over all keys, then all records, then all merges."""
    crc = zlib.crc32(b"".join(rows), zlib.crc32(b"".join(keys)))
    return zlib.crc32(b"".join(merges), crc) if merges else crc


class Page(NamedTuple):
    """A page that has been checked."""

    keys: list[bytes]  # user keys
    records: list[bytes]
    bound: int  # the pass makes the copy complete through this sequence
    last_key: bytes  # of the page; the next page begins after it
    end: bool  # the pass has no page more
    purge_floor: int  # the primary's: no tombstone at or below it is needed any more

    @property
    def size(self) -> int:
        return sum(map(len, self.keys)) + sum(map(len, self.records))

    @property
    def newest(self) -> int:
        """Return the highest sequence among its records."""
        rows = [record for record in self.records if record]
        return int(records.sequences_of(rows).max()) if rows else 0


def checked(message: replication_pb2.RecordPage) -> Page:
    """Return the page.

    Raises:
        BadMessageError: its checksum is another one, or it contradicts itself.
    """
    keys, rows = list(message.keys), list(message.records)
    if len(keys) != len(rows):
        raise BadMessageError(reason=f"a page of {len(keys)} keys and {len(rows)} records")
    if crc_of(keys, rows) != message.crc32:
        raise BadMessageError(reason="a page's checksum does not fit its records")
    last_key = bytes(message.last_key)
    return Page(keys, rows, message.bound, last_key, message.end, message.purge_floor)


class BatchRows(NamedTuple):
    """A batch's writes: data keys, records, the partition of each; merge steps, by partition."""

    keys: list[bytes]
    records: list[bytes]
    partition_ids: records.U32Array
    merges: dict[int, MergeStep]


def checked_batch(batch: replication_pb2.Batch, last_number: int) -> BatchRows:
    """Return the batch's rows.

    Raises:
        BadMessageError: its checksum is another one, or it contradicts itself.
    """
    keys, rows, ids = list(batch.keys), list(batch.records), list(batch.partition_ids)
    columns = {len(ids), len(batch.primary_epochs), len(batch.previous), len(batch.last)}
    row_ids = records.partitions_of_data_keys(keys)
    if batch.number <= last_number:
        reason = f"it comes after batch {last_number}"
    elif len(keys) != len(rows) or crc_of(keys, rows, batch.merges) != batch.crc32:
        reason = "its checksum does not fit its records"
    elif len(columns) != 1 or len(set(ids)) != len(ids):
        reason = "its columns do not fit one another"
    else:  # the bytes are those that were sent
        steps = [MergeStep.FromString(merge) for merge in batch.merges]
        merges = {step.partition_id: step for step in steps}
        if not ({*row_ids.tolist()} <= set(ids) and merges.keys() <= set(ids)):
            reason = "it has rows of partitions that it does not name"
        elif len(merges) != len(steps):
            reason = "it merges twice in a partition"
        else:
            return BatchRows(keys, rows, row_ids, merges)
    raise BadMessageError(reason=f"batch {batch.number}: {reason}")


def check_order(page: Page, after_key: bytes) -> None:
    """Raise BadMessageError unless the page's keys ascend from above ``after_key`` to its last."""
    keys = [after_key, *page.keys] if after_key else page.keys
    ascending = all(a < b for a, b in itertools.pairwise(keys))
    within = not page.keys or page.end or page.keys[-1] <= page.last_key
    if not ascending or not within or not (page.end or page.last_key > after_key):
        raise BadMessageError(reason="a page's keys are out of order")
    if b"" in page.records or b"" in page.keys:
        raise BadMessageError(reason="a page holds an empty record or key")


class Source:
    """One partition at its primary, asked page by page."""

    def __init__(
        self, peers: Peers, node: NodeInfo, cluster_id: str, partition_id: int, primary_epoch: int
    ) -> None:
        self._peers = peers
        self._node = node
        self._cluster_id = cluster_id
        self._partition_id = partition_id
        self._primary_epoch = primary_epoch

    async def page(
        self,
        after_key: bytes,
        bytes_max: int,
        *,
        after_sequence: int = 0,
        reach: int = 0,
        snapshot: bool = False,
    ) -> Page:
        """Return the next page of a pass. One that arrives damaged is asked for again."""
        request = replication_pb2.ReadPageRequest(
            cluster_id=self._cluster_id,
            partition_id=self._partition_id,
            primary_epoch=self._primary_epoch,
            after_sequence=after_sequence,
            after_key=after_key,
            reach=reach,
            bytes_max=bytes_max,
            snapshot=snapshot,
        )

        async def ask() -> Page:
            page = checked(await self._peers.read_page(self._node, request))
            check_order(page, after_key)
            return page

        return await self._tried(ask)

    async def keys(self, keys: Sequence[bytes]) -> Page:
        """Return the current records of the first of these keys, at least of one."""
        request = replication_pb2.ReadKeysRequest(
            cluster_id=self._cluster_id,
            partition_id=self._partition_id,
            primary_epoch=self._primary_epoch,
            keys=keys,
        )

        async def ask() -> Page:
            page = checked(await self._peers.read_keys(self._node, request))
            if not page.keys or page.keys != list(keys[: len(page.keys)]):
                raise BadMessageError(reason="a page holds other keys than it was asked for")
            return page

        return await self._tried(ask)

    async def _tried(self, ask: Callable[[], Awaitable[Page]]) -> Page:
        for left in reversed(range(_TRIES)):
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    return await ask()
            except BadMessageError as error:
                log.warning(
                    "page refused partition=%d primary=%s error=%s",
                    self._partition_id,
                    self._node.node_id,
                    error,
                )
                if not left:
                    raise
            except TimeoutError:
                raise UnavailableError(
                    reason=f"node {self._node.node_id} gave no page in {CALL_TIMEOUT_S} s"
                ) from None
        raise AssertionError("unreachable")


class Fetcher:
    """Repairs one copy's tail, catches it up or replaces it, from its primary, in one opening."""

    def __init__(self, context: StreamContext, primary: NodeInfo, followed: Followed) -> None:
        self._context = context
        self._followed = followed
        self._primary = primary
        self._partition_id = followed.partition_id
        self._epoch = followed.want.primary_epoch
        self._source = Source(
            context.peers, primary, context.cluster_id, self._partition_id, self._epoch
        )
        self._store = context.store
        self._applier = context.applier
        self._copies = context.copies
        self._journal = context.journal
        self._uncovered = context.uncovered
        self._writing: deque[asyncio.Future[None]] = deque()

    # --- repair ----------------------------------------------------------------------------

    async def repair(self) -> None:
        """Replace the copy's tail by the primary's records."""
        sent, opened = self._followed.sent, self._followed.opened
        base = min(sent.complete_through, opened.common_point)
        tail = self._journal.since(self._partition_id, base)
        clean = not sent.state & CopyState.DIRTY_TAIL
        if tail == [] and clean and step_after_repair(opened) is Step.JOIN:
            return  # nothing is written before the transaction that says where the copy is
        if not self._followed.holds:
            known = self._copies.epochs_of(self._partition_id)
            cut = PartitionEpochs(
                primary_epoch=max(known.primary_epoch, self._epoch),
                history=epoch_history.cut(known.history, base),
            )
            await self._write(base, CopyState.DIRTY_TAIL, epochs=cut)
        if tail is not None:
            await self._replace(tail, base)
        else:
            self._leave_journal()
            await self._applier.settle(self._partition_id)
            after_key: bytes | None = b""
            while after_key is not None:
                keys, after_key = self._store.keys_above(
                    self._partition_id, base, after_key, _OWN_KEYS
                )
                await self._replace(keys, base)
                await asyncio.sleep(0)
        await self.written()
        log.debug(
            "tail repaired partition=%d common_point=%d scanned=%s",
            self._partition_id,
            base,
            tail is None,
        )

    async def _replace(self, data_keys: Sequence[bytes], base: int) -> None:
        """Make the records of these keys what the primary holds of them."""
        prefix = records.prefix_of(self._partition_id)
        rest = [key[2:] for key in data_keys]
        limit = REPAIR_KEYS
        while rest:
            try:
                page = await self._source.keys(rest[:limit])
            except ReplyTooLargeError:
                if limit == 1:
                    raise
                limit = max(1, limit // 4)
                continue
            rest = rest[len(page.keys) :]
            if page.purge_floor > base:
                raise _purged(page.purge_floor, base)
            rows = list(zip(page.keys, page.records, strict=True))
            removed = [prefix + key for key, record in rows if not record]
            await self._push(
                base,
                CopyState.DIRTY_TAIL,
                keys=[prefix + key for key, record in rows if record],
                rows=[record for _, record in rows if record],
                removed=removed,
                # A tombstone of what is removed here may have been purged there, at or below base.
                purge_floor=base if removed else 0,
            )
            self._pulled(page.newest, len(page.keys), page.size)

    # --- passes ----------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Pull what is above the common point. What it brings is not complete yet, and not durable
        before ``written`` returns: meanwhile another pass may pull.
        """
        followed = self._followed
        start, reach = followed.opened.common_point, followed.opened.stream_from
        through = int(self._copies.complete_through[self._partition_id])
        bound, after_key = 0, b""
        while True:
            leave = await self._context.leave(self._followed)
            page = await self._source.page(after_key, leave, after_sequence=start, reach=reach)
            self._context.spend(self._followed, page.size - leave)
            if page.purge_floor > start:
                raise _purged(page.purge_floor, start)
            if not bound:
                bound = page.bound
            if bound < reach:
                raise BadMessageError(reason=f"a pass from {bound}, asked to reach {reach}")
            if not page.end:
                self._leave_journal()
            if page.keys:
                await self._push_page(page, through, CopyState.DIRTY_TAIL)
            if page.end:
                break
            after_key = page.last_key
        followed.bound = bound

    async def snapshot(self) -> None:
        """Replace the copy by the primary's, range by range."""
        followed, partition_id = self._followed, self._partition_id
        known = self._copies.epochs_of(partition_id)
        epoch = max(known.primary_epoch, self._epoch)
        self._leave_journal()
        await self._write(
            0,
            CopyState.UNUSABLE,
            epochs=PartitionEpochs(primary_epoch=epoch),
            metadata=[(records.dropping_key(partition_id), None)],
        )
        await self._applier.settle(partition_id)
        empty = not self._store.scan_keys(partition_id, b"", b"", 1)
        bound = floor = 0
        after_key = b""
        while True:
            leave = await self._context.leave(self._followed)
            page = await self._source.page(after_key, leave, snapshot=True)
            self._context.spend(self._followed, page.size - leave)
            bound, floor = bound or page.bound, max(floor, page.purge_floor)
            if not empty:
                await self._clear_range(page, after_key)
            if page.keys:
                await self._push_page(page, 0, CopyState.UNUSABLE)
            if page.end:
                break
            after_key = page.last_key
        newest = followed.newest_pulled
        await self._write(
            bound,
            CopyState.DIRTY_TAIL if newest > bound else CopyState.USABLE,
            epochs=followed.opened.epochs(epoch),
            # The last page's, not the first's: later pages may lack what was purged meanwhile.
            purge_floor=floor,
        )
        self._journal.reset(partition_id, max(newest, bound))
        self._uncovered.discard(partition_id)
        log.debug(
            "snapshot taken partition=%d complete_through=%d records=%d bytes=%d",
            partition_id,
            bound,
            followed.records,
            followed.size,
        )

    async def _clear_range(self, page: Page, after_key: bytes) -> None:
        """Remove what the copy holds in the page's range and the page lacks."""
        prefix = records.prefix_of(self._partition_id)
        kept = {prefix + key for key in page.keys}
        until = b"" if page.end else page.last_key
        for own in self._own_keys(after_key, until):
            stale = [key for key in own if key not in kept]
            if stale:
                await self._push(0, CopyState.UNUSABLE, removed=stale)
            await asyncio.sleep(0)

    def _own_keys(self, after_key: bytes, until: bytes) -> Iterator[list[bytes]]:
        while True:
            own = self._store.scan_keys(self._partition_id, after_key, until, _OWN_KEYS)
            yield own
            if len(own) < _OWN_KEYS:
                return
            after_key = own[-1][2:]

    async def _push_page(self, page: Page, through: int, state: CopyState) -> None:
        prefix = records.prefix_of(self._partition_id)
        size = page.size
        await self._push(
            through, state, keys=[prefix + key for key in page.keys], rows=page.records
        )
        self._pulled(page.newest, len(page.keys), size)

    def _pulled(self, newest: int, rows: int, size: int) -> None:
        self._followed.pulled(newest, rows, size)
        self._context.bytes_pulled += size

    # --- writing ---------------------------------------------------------------------------

    def _guard(self) -> None:
        """Raise SupersededError once this node is not to follow the partition in this epoch. Asked
        right before anything is written.
        """
        if not self._context.current(self._partition_id, self._primary.number, self._epoch):
            raise SupersededError

    def _leave_journal(self) -> None:
        """Take the partition out of the journal: its pass pulls too much to be worth the room
        there. The journal answers nothing of it until the copy has a position again. (Rows that are
        held back change nothing yet, so they leave it as it is.)
        """
        self._guard()
        if self._followed.holds:
            return
        if self._partition_id not in self._uncovered:
            self._uncovered.add(self._partition_id)
            self._journal.reset(self._partition_id, NO_SEQUENCE)

    async def _write(self, through: int, state: CopyState, **more: Any) -> None:
        await self._push(through, state, **more)
        await self.written()

    async def _push(
        self,
        through: int,
        state: CopyState,
        *,
        keys: Sequence[bytes] = (),
        rows: Sequence[bytes] = (),
        removed: Sequence[bytes] = (),
        purge_floor: int = 0,
        epochs: PartitionEpochs | None = None,
        metadata: Sequence[tuple[bytes, bytes | None]] = (),
    ) -> None:
        """Hold a change, or queue it once those before it but one are durable and there is room."""
        if self._followed.holds:
            self._guard()
            self._followed.hold([*keys, *removed], [*rows, *[b""] * len(removed)], purge_floor)
            return
        while len(self._writing) >= _PAGES_IN_FLIGHT:
            await self._writing.popleft()
        ids, column = one(self._partition_id, through)
        _, floors = one(self._partition_id, purge_floor)
        change = Change(
            partition_ids=ids,
            complete_through=column,
            under_epoch=self._epoch,
            state=state,
            purge_floors=floors if purge_floor else None,
            epochs={self._partition_id: epochs} if epochs is not None else {},
            keys=keys,
            records=rows,
            removed=removed,
            metadata=metadata,
            journalled=self._partition_id not in self._uncovered,
            bulk=bool(keys),
        )
        await self._applier.room(len(keys) + len(removed), change.size, rows, bulk=True)
        self._guard()
        self._writing.append(self._applier.submit(change))

    async def written(self) -> None:
        """Wait until all that was queued is durable."""
        while self._writing:
            await self._writing.popleft()


async def pull(
    context: StreamContext, primary: NodeInfo, following: ReplicaSync, followed: Followed
) -> None:
    """Do the pass, once there is room for it. Then the copy is to join, or is to be opened again.

    Raises:
        SupersededError: the row has changed: this node does not follow there any more.
        KoinonError: the primary cannot be asked, or something here is in the way.
    """
    puller = Fetcher(context, primary, followed)
    async with context.passes[followed.want.rank]:
        if followed.stage is Stage.SNAPSHOT:
            await _replace(context, following, followed, puller)
            return
        await _complete(context, followed, puller)
    if followed.stage is Stage.CATCH_UP:
        await puller.written()  # or a page that found no room would go unnoticed
        followed.take(Step.JOIN)


async def _replace(
    context: StreamContext, following: ReplicaSync, followed: Followed, puller: Fetcher
) -> None:
    """Take a snapshot in place of the copy, and close the opening."""
    context.tail_epochs.pop(followed.partition_id, None)
    epoch = followed.want.primary_epoch
    await puller.snapshot()
    context.tail_epochs[followed.partition_id] = epoch
    followed.attempts = 0
    following.close(followed)  # the primary keeps its hold: it is not told
    context.wake()


async def _complete(context: StreamContext, followed: Followed, puller: Fetcher) -> None:
    """Repair the tail and catch up, as far as there is need. The last pages of a catch-up may not
    be durable.
    """
    partition_id, epoch = followed.partition_id, followed.want.primary_epoch
    if followed.stage is Stage.REPAIR:
        if not followed.holds:
            context.tail_epochs.pop(partition_id, None)
        await puller.repair()
        if not followed.holds:
            context.tail_epochs[partition_id] = epoch
        followed.take(step_after_repair(followed.opened))
    if followed.stage is Stage.CATCH_UP:
        if not followed.holds:
            context.tail_epochs[partition_id] = epoch
        await puller.catch_up()


def _purged(floor: int, start: int) -> KoinonError:
    return UnavailableError(
        reason=f"the primary has purged tombstones up to {floor}, the pass began at {start}"
    )
