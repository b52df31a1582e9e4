"""Brings one partition's copy up to the beginning of its primary's stream: repair, catch-up or
snapshot.

- Repair replaces every own record above the common point by the primary's record of the key, and
  removes records that the primary lacks. It compares nothing: the own records may be of another
  lineage (rule 12).
- Catch-up pulls the records above the common point in pages, in key order. ``complete_through``
  stays unchanged until the pass is over (rule 11). The pass is void once the primary has purged
  tombstones above its start (rule 14).
- A snapshot replaces one key range a page. It begins by making the copy unusable, durably, and only
  its end makes it usable again (rule 14).

``pull`` is one pass, from the opening to joining the stream. A pass that took a snapshot closes the
opening: the partition is then opened again with the new copy's description.

A copy that holds pulled rows in memory (``Followed.holds``) writes nothing during repair and
catch-up: the transaction that makes the copy complete writes the rows.

Otherwise at most two pages are in memory: one is written while the next is requested.
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
REPAIR_KEYS = 1_000  # of one request
_OWN_KEYS = 4_096  # read from the own copy at once
_PAGES_IN_FLIGHT = 2
_TRIES = 3  # of a page that arrives damaged


def crc_of(keys: Sequence[bytes], rows: Sequence[bytes], merges: Sequence[bytes] = ()) -> int:
    """Return the CRC-32 that messages carry: over all keys, then all records, then all merge
    steps.
    """
    crc = zlib.crc32(b"".join(rows), zlib.crc32(b"".join(keys)))
    return zlib.crc32(b"".join(merges), crc) if merges else crc


class Page(NamedTuple):
    """A page whose checksum was verified."""

    keys: list[bytes]  # user keys
    records: list[bytes]
    bound: int  # the pass makes the copy complete through this sequence
    last_key: bytes  # the next page begins after this key
    end: bool  # this is the last page of the pass
    purge_floor: int  # the primary's: it may have purged tombstones up to this sequence

    @property
    def size(self) -> int:
        return sum(map(len, self.keys)) + sum(map(len, self.records))

    @property
    def newest(self) -> int:
        """Return the highest sequence of the page's records."""
        rows = [record for record in self.records if record]
        return int(records.sequences_of(rows).max()) if rows else 0


def checked(message: replication_pb2.RecordPage) -> Page:
    """Verify a page's checksum; return the page.

    Raises:
        BadMessageError: its checksum is another one, or it contradicts itself.
    """
    keys, rows = list(message.keys), list(message.records)
    if len(keys) != len(rows):
        raise BadMessageError(reason=f"a page of {len(keys)} keys and {len(rows)} records")
    if crc_of(keys, rows) != message.crc32:
        raise BadMessageError(reason="a page's checksum does not match its records")
    last_key = bytes(message.last_key)
    return Page(keys, rows, message.bound, last_key, message.end, message.purge_floor)


class BatchRows(NamedTuple):
    """A batch's writes: data keys, records and partition ids by row; merge steps by partition."""

    keys: list[bytes]
    records: list[bytes]
    partition_ids: records.U32Array
    merges: dict[int, MergeStep]


def checked_batch(batch: replication_pb2.Batch, last_number: int) -> BatchRows:
    """Verify a batch; return its rows.

    Raises:
        BadMessageError: its checksum is another one, or it contradicts itself.
    """
    keys, rows, ids = list(batch.keys), list(batch.records), list(batch.partition_ids)
    columns = {len(ids), len(batch.primary_epochs), len(batch.previous), len(batch.last)}
    row_ids = records.partitions_of_data_keys(keys)
    if batch.number <= last_number:
        reason = f"it follows batch {last_number}"
    elif len(keys) != len(rows) or crc_of(keys, rows, batch.merges) != batch.crc32:
        reason = "its checksum does not match its records"
    elif len(columns) != 1 or len(set(ids)) != len(ids):
        reason = "its columns have unequal lengths"
    else:  # the checksum holds: the bytes arrived as they were sent
        steps = [MergeStep.FromString(merge) for merge in batch.merges]
        merges = {step.partition_id: step for step in steps}
        if not ({*row_ids.tolist()} <= set(ids) and merges.keys() <= set(ids)):
            reason = "it has rows of partitions that it does not name"
        elif len(merges) != len(steps):
            reason = "it has two merge steps of one partition"
        else:
            return BatchRows(keys, rows, row_ids, merges)
    raise BadMessageError(reason=f"batch {batch.number}: {reason}")


def check_order(page: Page, after_key: bytes) -> None:
    """Raise BadMessageError unless the page's keys ascend, lie above ``after_key`` and do not pass
    ``last_key``.
    """
    keys = [after_key, *page.keys] if after_key else page.keys
    ascending = all(a < b for a, b in itertools.pairwise(keys))
    within = not page.keys or page.end or page.keys[-1] <= page.last_key
    if not ascending or not within or not (page.end or page.last_key > after_key):
        raise BadMessageError(reason="a page's keys are out of order")
    if b"" in page.records or b"" in page.keys:
        raise BadMessageError(reason="a page holds an empty record or key")


class Source:
    """Requests pages of one partition from its primary."""

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
        """Return the next page of a pass. A page that arrives damaged is requested again."""
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

        return await self._with_retries(ask)

    async def keys(self, keys: Sequence[bytes]) -> Page:
        """Return the current records of some of these keys, from the first on; of at least one
        key.
        """
        request = replication_pb2.ReadKeysRequest(
            cluster_id=self._cluster_id,
            partition_id=self._partition_id,
            primary_epoch=self._primary_epoch,
            keys=keys,
        )

        async def ask() -> Page:
            page = checked(await self._peers.read_keys(self._node, request))
            if not page.keys or page.keys != list(keys[: len(page.keys)]):
                raise BadMessageError(reason="a page holds other keys than were requested")
            return page

        return await self._with_retries(ask)

    async def _with_retries(self, ask: Callable[[], Awaitable[Page]]) -> Page:
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
                    reason=f"node {self._node.node_id} sent no page within {CALL_TIMEOUT_S} s"
                ) from None
        raise AssertionError("unreachable")


class Fetcher:
    """Repairs one copy's tail, and catches the copy up or replaces it, within one opening."""

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
            return  # held rows are written by the transaction that sets the position
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
        """Set the records of these keys to the primary's."""
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
                # The primary may have purged the tombstone of a removed key, at or below ``base``.
                purge_floor=base if removed else 0,
            )
            self._pulled(page.newest, len(page.keys), page.size)

    # --- passes ----------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Pull the primary's records above the common point. The pulled records are not complete
        yet, and not durable before ``written`` returns: another pass may pull meanwhile.
        """
        followed = self._followed
        start, reach = followed.opened.common_point, followed.opened.stream_from
        through = int(self._copies.complete_through[self._partition_id])
        bound: int | None = None  # the first page's: later pages may be of newer states
        after_key: bytes = b""
        while True:
            allowed = await self._context.allow_page(self._followed)
            page = await self._source.page(after_key, allowed, after_sequence=start, reach=reach)
            self._context.spend(self._followed, page.size - allowed)
            if page.purge_floor > start:
                raise _purged(page.purge_floor, start)
            if bound is None:
                bound = page.bound
            if bound < reach:
                raise BadMessageError(reason=f"a page with bound {bound}, below {reach}")
            if not page.end:
                self._leave_journal()
            if page.keys:
                await self._push_page(page, through, CopyState.DIRTY_TAIL)
            if page.end:
                break
            after_key = page.last_key
        followed.bound = bound

    async def snapshot(self) -> None:
        """Replace the copy by the primary's, one key range per page."""
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
        bound: int | None = None  # the first page's, 0 too: later pages may be of newer states
        floor, after_key = 0, b""
        while True:
            allowed = await self._context.allow_page(self._followed)
            page = await self._source.page(after_key, allowed, snapshot=True)
            self._context.spend(self._followed, page.size - allowed)
            bound = page.bound if bound is None else bound
            floor = max(floor, page.purge_floor)
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
            # The last page's floor: later pages lack the tombstones that were purged meanwhile.
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
        """Remove the copy's records in the page's key range that the page lacks."""
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

    def _check_followed(self) -> None:
        """Raise SupersededError if this node should no longer follow the partition in this epoch.
        Runs right before each write.
        """
        if not self._context.current(self._partition_id, self._primary.number, self._epoch):
            raise SupersededError

    def _leave_journal(self) -> None:
        """Drop the partition from the journal: a pass pulls too many records to keep in it. The
        journal says nothing of the partition until the copy has a position again. (Held rows do
        not change the store yet, so the journal keeps the partition.)
        """
        self._check_followed()
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
        """Queue a change, once at most one earlier change is not durable and there is room; or hold
        its rows in memory.
        """
        if self._followed.holds:
            self._check_followed()
            self._followed.hold([*keys, *removed], [*rows, *[b""] * len(removed)], purge_floor)
            return
        while len(self._writing) >= _PAGES_IN_FLIGHT:
            await self._writing.popleft()
        if epochs is None and not self._copies.epochs_of(self._partition_id).primary_epoch:
            # A copy that begins has an epoch from its first row on: see ``copies.is_of_past``.
            epochs = PartitionEpochs(primary_epoch=self._epoch)
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
        self._check_followed()
        self._writing.append(self._applier.submit(change))

    async def written(self) -> None:
        """Wait until all queued changes are durable."""
        while self._writing:
            await self._writing.popleft()


async def pull(
    context: StreamContext, primary: NodeInfo, following: ReplicaSync, followed: Followed
) -> None:
    """Run a pass once a place for it is free. Afterwards the copy is JOINING, or is opened again.

    Raises:
        SupersededError: the row has changed, and this node does not follow that primary any more.
        KoinonError: the primary cannot be reached, or the records cannot be stored.
    """
    puller = Fetcher(context, primary, followed)
    async with context.passes[followed.want.rank]:
        if followed.stage is Stage.SNAPSHOT:
            await _replace(context, following, followed, puller)
            return
        await _complete(context, followed, puller)
    if followed.stage is Stage.CATCH_UP:
        await puller.written()  # raises if a page found no room
        followed.take(Step.JOIN)


async def _replace(
    context: StreamContext, following: ReplicaSync, followed: Followed, puller: Fetcher
) -> None:
    """Replace the copy by a snapshot, and close the opening."""
    context.tail_epochs.pop(followed.partition_id, None)
    epoch = followed.want.primary_epoch
    await puller.snapshot()
    context.tail_epochs[followed.partition_id] = epoch
    followed.attempts = 0
    following.close(followed)  # no message to the primary, which keeps the tombstones held
    context.wake()


async def _complete(context: StreamContext, followed: Followed, puller: Fetcher) -> None:
    """Repair the tail and catch up where needed. The last pages of a catch-up may not be durable on
    return.
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
