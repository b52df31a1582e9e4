"""A follower's stream to one primary: opens partitions, receives, applies, acknowledges.

Three tasks share a stream: one opens due partitions, one receives, one makes copies complete that
have caught up. Each pass (``catch_up.pull``) has a task of its own. All tasks end with the stream;
when one partition's work ends (by its row, a gap, a full store), its pass is cancelled at once.

Before each write the newest table is checked: does this node still follow the partition in that
epoch? The table may have changed before ``update`` was called.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence

import numpy as np

from koinon_node.core.formats.records import NO_SEQUENCE, EpochStart, PartitionEpochs
from koinon_node.core.replication import replica_sync as core
from koinon_node.core.replication.copies import NEEDS_SNAPSHOT, STATES, CopyState
from koinon_node.core.replication.replica_sync import (
    BadMessageError,
    Fate,
    Followed,
    Opened,
    Rank,
    ReplicaSync,
    Sent,
    Stage,
    Step,
    Want,
)
from koinon_node.ports import FollowerEnd, PeerLostError
from koinon_node.replication.applier import BatchAcks, Held, TakenBatch, change_of
from koinon_node.replication.catch_up import BatchRows, checked_batch, pull
from koinon_node.replication.stream_context import StreamContext, SupersededError
from koinon_proto.contract.convert import error_from_proto
from koinon_proto.contract.errors import KoinonError, StorageFullError
from koinon_proto.contract.table import NodeInfo
from koinon_proto.v1 import replication_pb2 as wire

log = logging.getLogger(__name__)

_BACKOFF_MIN_S, _BACKOFF_MAX_S = 0.05, 1.0
_TELL_FULL_EVERY_S = 5.0  # between two log lines about a full store
_ANSWER_TIMEOUT_S = 10.0
_OPENINGS_PER_MESSAGE = 1_024


class Link:
    """The stream to one primary; it reconnects until ``stop``."""

    def __init__(self, context: StreamContext, node: NodeInfo) -> None:
        self.node = node  # the primary
        self.following = ReplicaSync()  # the partitions followed there, and each copy's state
        self._context = context
        self._stream: FollowerEnd | None = None  # None between two streams
        self._group: asyncio.TaskGroup | None = None  # runs the present stream's tasks
        self._task: asyncio.Task[None] | None = None  # reconnects and runs the streams
        self._jobs: dict[int, asyncio.Task[None]] = {}  # passes under way, by partition
        self._opening_due = asyncio.Event()  # set when something may be opened
        self._joining_due = asyncio.Event()  # set when a copy may have caught up
        self._acks = BatchAcks(self._send)
        self._answered = False  # whether this stream's primary has answered an opening
        self._leaves = False  # whether the primary should remove this node from in_sync

    # --- called by Follower ----------------------------------------------------------------

    def start(self, group: asyncio.TaskGroup) -> None:
        self._task = group.create_task(self._run())

    def stop(self) -> None:
        """Cancel all work at once."""
        self.update({})
        if self._task is not None:
            self._task.cancel()

    def update(self, wants: Mapping[int, Want]) -> None:
        """Apply the newest rows. Work for rows that have changed has ended when this returns."""
        ended, changed = self.following.want(wants)
        for followed in ended:
            self._end_job(followed)
            followed.close()
        for followed in changed:
            self._end_job(followed)
            self.following.close(followed)
        if ended or changed:
            self._send_close([f.partition_id for f in (*ended, *changed)])
        self.wake()

    def leave(self) -> None:
        """Tell the primary that this node is about to stop or that its disk hangs. The node
        acknowledges writes as long as the primary waits for it.
        """
        self._leaves = True
        self._send_close((), leaves=True)

    def stay(self) -> None:
        """Follow as if this node had never wanted to leave. That takes a new stream, since a
        primary forgets a leave only with the stream.
        """
        self._leaves = False
        if self._stream is not None:
            self._stream.close()

    def wake(self) -> None:
        self._opening_due.set()

    # --- the stream's life -----------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = _BACKOFF_MIN_S
        while True:
            self._answered = False
            error = await self._run_in_task(self._follow_once())
            if self._answered:
                log.info("stream to primary ended node=%s reason=%s", self.node.node_id, error)
            else:
                log.debug("no stream to primary node=%s reason=%s", self.node.node_id, error)
            backoff_s = _BACKOFF_MIN_S if self._answered else backoff_s
            await asyncio.sleep(backoff_s * self._context.random.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)

    async def _run_in_task(self, work: Coroutine[None, None, KoinonError]) -> KoinonError:
        """Run the work in a task, so that a cancellation always reaches the caller: a task group
        that fails at the same moment would swallow it.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            await asyncio.wait({task})
        return task.result()

    async def _follow_once(self) -> KoinonError:
        """Follow until the stream ends; return the error that ended it."""
        try:
            self._stream = stream = await self._context.peers.follow(self.node)
        except KoinonError as error:
            return error
        self._acks.begin()
        try:
            stream.send(wire.FollowRequest(hello=self._context.hello(self.node.number)))
            if self._leaves:
                self._send_close((), leaves=True)
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._receive(stream))
                group.create_task(self._open_due(stream))
                group.create_task(self._join_due())
        except KoinonError as error:
            return error
        except BaseExceptionGroup as errors:
            expected, unexpected = errors.split(KoinonError)
            if unexpected is not None or expected is None:
                raise
            return _first(expected)
        finally:
            self._stream = self._group = None
            self._jobs.clear()
            self.following.lose()
            stream.close()
            self._context.wake()
        raise AssertionError("a stream ends only with an error")

    def _send(self, request: wire.FollowRequest) -> None:
        """Send a message. If the stream has ended nothing happens: the receiving task gets the
        error.
        """
        if self._stream is not None:
            with contextlib.suppress(PeerLostError):
                self._stream.send(request)

    def _send_close(self, partition_ids: Sequence[int], *, leaves: bool = False) -> None:
        close = wire.ClosePartitions(partition_ids=partition_ids, leaves=leaves)
        self._send(wire.FollowRequest(close=close))

    # --- opening ---------------------------------------------------------------------------

    async def _open_due(self, stream: FollowerEnd) -> None:
        """Open due partitions whenever there are some, all in one message, but only once the
        primary is connected. A dead primary is dialled until it is fenced; to describe thousands of
        copies for each attempt would delay the new primaries.
        """
        context = self._context
        await stream.connected()
        while True:
            self._opening_due.clear()
            now = context.clock()
            due = context.openings(self)
            ids = [followed.partition_id for followed in due]
            if due and context.applier.busy[ids].any():
                await context.applier.idle(ids)
                continue
            if due and await context.applier.led(ids):
                continue
            for start in range(0, len(due), _OPENINGS_PER_MESSAGE):
                self._send_openings(stream, due[start : start + _OPENINGS_PER_MESSAGE], now)
            asked = min(self.following.unanswered.values(), default=None)
            if asked is not None and now - asked > _ANSWER_TIMEOUT_S:
                reason = f"node {self.node.node_id} has not answered an opening in time"
                raise PeerLostError(reason=reason)
            due_at = self.following.index.next_due_at
            wait_s = [max(due_at - now, 0.0)] if due_at is not None else []
            wait_s += [asked + _ANSWER_TIMEOUT_S - now + 0.01] if asked is not None else []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, default=None)):
                    await self._opening_due.wait()

    def _send_openings(self, stream: FollowerEnd, due: Sequence[Followed], now: float) -> None:
        copies = self._context.copies
        message = wire.OpenPartitions()
        ids = [followed.partition_id for followed in due]
        columns = copies.complete_through[ids].tolist(), copies.states[ids].tolist()
        for followed, through, state in zip(due, *columns, strict=True):
            partition_id = followed.partition_id
            epochs = copies.epochs_of(partition_id)
            sent = core.described(through, STATES[state], epochs)
            self.following.open(followed, sent, now)
            unusable = bool(sent.state & NEEDS_SNAPSHOT)
            opening = message.partitions.add(
                partition_id=partition_id,
                primary_epoch=followed.want.primary_epoch,
                complete_through=0 if unusable else sent.complete_through,
                needs_snapshot=unusable,
            )
            if unusable:
                continue
            if sent.unchanged_from < sent.complete_through:
                opening.unchanged_from = sent.unchanged_from
            for epoch, previous in epochs.history:
                opening.history.add(primary_epoch=epoch, previous_sequence=previous)
        stream.send(wire.FollowRequest(open=message))

    def _held(self, partition_id: int) -> Sent:
        copies = self._context.copies
        through, state = copies.complete_through[partition_id], copies.states[partition_id]
        return core.described(int(through), STATES[state], copies.epochs_of(partition_id))

    # --- receiving -------------------------------------------------------------------------

    async def _receive(self, stream: FollowerEnd) -> None:
        while True:
            message = await stream.receive()
            kind = message.WhichOneof("kind")
            if kind == "batch":
                await self._on_batch(message.batch)
            elif kind == "opened":
                self._on_opened(message.opened)
            elif kind == "closed":
                self._on_closed(message.closed)
            elif kind == "floors":
                self._on_floors(message.floors)

    def _on_opened(self, message: wire.OpenedPartitions) -> None:
        self._answered = True
        jitter = self._context.random.uniform(0.5, 1.0)
        refused: list[wire.OpenedPartition] = []
        for entry in message.partitions:
            followed = self.following.answered(entry.partition_id)
            if followed is None:
                continue
            if entry.HasField("refusal"):
                refused.append(entry)
                self._reopen_later(followed, jitter)
                continue
            try:
                self._take_answer(followed, entry)
            except BadMessageError as bad:
                self._reopen([followed], bad)
            else:
                self._context.settled_bound.opened(followed)
        if refused:
            error = error_from_proto(refused[-1].refusal)
            log.debug("openings refused count=%d last_error=%s", len(refused), error)
        self._context.wake()
        self._joining_due.set()

    def _take_answer(self, followed: Followed, entry: wire.OpenedPartition) -> None:
        """Start the first step that the answer to an opening asks for."""
        if entry.primary_epoch != followed.want.primary_epoch:
            raise BadMessageError(reason=f"an answer for epoch {entry.primary_epoch}")
        if followed.sent != self._held(followed.partition_id):
            raise BadMessageError(reason="the copy has changed since it was described")
        followed.opened = Opened(
            common_point=entry.common_point,
            stream_from=entry.stream_from,
            history=tuple(EpochStart(e.primary_epoch, e.previous_sequence) for e in entry.history),
            unchanged_from=entry.unchanged_from
            if entry.HasField("unchanged_from")
            else NO_SEQUENCE,
            records=entry.records,
            size=entry.bytes,
            required=entry.required,
        )
        followed.holds = entry.required or followed.want.rank is Rank.IN_SYNC
        followed.received = entry.stream_from
        if entry.take_snapshot:
            if followed.holds:
                raise BadMessageError(reason="a copy that is in sync is not replaced by a snapshot")
            followed.take(Step.REPLACE)
        else:
            tail_epoch = self._context.tail_epochs.get(followed.partition_id, 0)
            followed.take(core.first_step(followed, tail_epoch))
        if followed.stage is not Stage.JOINING:
            assert self._group is not None
            job = self._group.create_task(self._pull(followed))
            self._jobs[followed.partition_id] = job

    def _on_closed(self, message: wire.ClosedPartitions) -> None:
        jitter = self._context.random.uniform(0.5, 1.0)
        for partition_id in message.partition_ids:
            followed = self.following.partitions.get(partition_id)
            if followed is not None and followed.stage not in (Stage.WAITING, Stage.OPENING):
                self._reopen_later(followed, jitter)
        log.debug(
            "closed by primary count=%d reason=%s",
            len(message.partition_ids),
            error_from_proto(message.reason),
        )
        self._context.wake()

    def _on_floors(self, message: wire.PurgeFloors) -> None:
        for partition_id, sequence in zip(message.partition_ids, message.sequences, strict=True):
            followed = self.following.partitions.get(partition_id)
            if followed is not None and followed.stage is not Stage.WAITING:
                followed.purge_floor = max(followed.purge_floor, sequence)

    # --- batches ---------------------------------------------------------------------------

    async def _on_batch(self, batch: wire.Batch) -> None:
        """Apply a batch's rows of live copies, and keep back rows of copies that catch up. Waits
        for room first; meanwhile the stream receives nothing more.
        """
        try:
            whole = checked_batch(batch, self._acks.last_number)
        except BadMessageError as error:
            log.warning("batch refused node=%s error=%s", self.node.node_id, error)
            raise
        taken = self._acks.take(batch.number)
        full: StorageFullError | None = None
        try:
            merged = sum(step.bytes for step in whole.merges.values())
            size = sum(map(len, whole.keys)) + sum(map(len, whole.records)) + merged
            await self._context.applier.room(
                len(whole.keys), size, whole.records, merged_size=merged
            )
        except StorageFullError as error:
            full = error
        applied, kept, gone = self._split_by_fate(batch)
        self._without_merges(whole, kept, gone)
        if full is not None:
            gone += [followed for followed, _ in applied.values()]
            applied = {}
        if gone:
            self._reopen(gone, full or BadMessageError(reason="a gap in the stream"))
        for partition_id, followed in kept.items():
            mine = np.flatnonzero(whole.partition_ids == partition_id).tolist()
            keys, rows = [whole.keys[i] for i in mine], [whole.records[i] for i in mine]
            self.following.keep_back(followed, keys, rows)
            if followed.stage is Stage.JOINING:
                self._joining_due.set()
        if not applied:
            self._acks.durable(taken)
            return
        if len(applied) < len(batch.partition_ids):
            mine = np.flatnonzero(np.isin(whole.partition_ids, list(applied))).tolist()
            whole = whole._replace(
                keys=[whole.keys[i] for i in mine],
                records=[whole.records[i] for i in mine],
                merges={p: step for p, step in whole.merges.items() if p in applied},
            )
        self._apply(taken, applied, whole)

    def _split_by_fate(
        self, batch: wire.Batch
    ) -> tuple[dict[int, tuple[Followed, int]], dict[int, Followed], list[Followed]]:
        """Split a batch's partitions by fate: (to apply, with the last sequence; to keep back; to
        open again).
        """
        applied: dict[int, tuple[Followed, int]] = {}
        kept: dict[int, Followed] = {}
        gone: list[Followed] = []
        columns = (batch.partition_ids, batch.primary_epochs, batch.previous, batch.last)
        for partition_id, epoch, previous, last in zip(*columns, strict=True):
            fate, followed = self.following.fate_of(partition_id, epoch, previous, last)
            if followed is None or fate is Fate.IGNORE:
                continue
            if fate is Fate.GAP or not self._current(followed):
                gone.append(followed)
            elif fate is Fate.KEEP_BACK:
                kept[partition_id] = followed
            else:
                applied[partition_id] = (followed, last)
        return applied, kept, gone

    @staticmethod
    def _without_merges(batch: BatchRows, kept: dict[int, Followed], gone: list[Followed]) -> None:
        """Move partitions with a merge step from ``kept`` to ``gone``: a merge step reads the
        copy's staged rows, which are not complete before the copy is LIVE.
        """
        gone += [kept.pop(p) for p in batch.merges.keys() & kept.keys()]

    def _apply(
        self,
        taken: TakenBatch,
        applied: Mapping[int, tuple[Followed, int]],
        batch: BatchRows,
    ) -> None:
        """Queue a batch's rows and the copies' new positions."""
        ids = np.fromiter(applied, np.uint32, len(applied))
        through = np.array([last for _, last in applied.values()], np.uint64)
        openings = [(followed, followed.opened) for followed, _ in applied.values()]

        def done(error: KoinonError | None) -> None:
            if error is not None:
                self._reopen([f for f, opened in openings if f.opened is opened], error)
            self._acks.durable(taken)

        rows = dict(zip(batch.keys, batch.records, strict=True))
        self._context.applier.submit(change_of(ids, through, rows, merges=batch.merges), done)

    # --- joining ---------------------------------------------------------------------------

    async def _join_due(self) -> None:
        """Make copies complete that have joined, as many as are ready in one transaction."""
        while True:
            await self._joining_due.wait()
            self._joining_due.clear()
            joining = list(self.following.index.joining.values())
            for followed in joining:
                if followed.overflowed and followed.stage is Stage.JOINING:
                    await self._join_without_stream(followed)
            ready = [followed for followed in joining if followed.joined]
            for chunk in core.chunks_by_size(ready, self._context.group_bytes):
                await self._position(chunk)

    async def _position(self, chunk: Sequence[Followed]) -> None:
        context = self._context
        try:
            size = sum(f.kept_bytes + f.held_bytes for f in chunk)
            stored = [record for f in chunk for kept in f.kept_back for record in kept.records]
            stored += [record for f in chunk for record in f.held.values()]
            await context.applier.room(len(stored), size, stored)
        except StorageFullError as error:
            self._reopen(chunk, error)
            return
        ready = [f for f in chunk if f.joined and self._current(f)]
        if not ready:
            return
        held = Held()
        merged: dict[bytes, bytes] = {}
        for followed in ready:
            held.take(followed)
            for kept in self.following.take_kept_back(followed):
                merged.update(zip(kept.keys, kept.records, strict=True))
            followed.take(Step.POSITION)
            if followed.partition_id in context.uncovered:
                context.uncovered.discard(followed.partition_id)
                context.journal.reset(followed.partition_id, followed.position)
        ids = np.array([f.partition_id for f in ready], np.uint32)
        through = np.array([f.position for f in ready], np.uint64)
        epochs = {f.partition_id: self._epochs(f) for f in ready}
        openings = [(f, f.opened, f.want.primary_epoch, f.position) for f in ready]

        def done(error: KoinonError | None) -> None:
            mine = [place for place in openings if place[0].opened is place[1]]
            if error is not None:
                self._reopen([place[0] for place in mine], error)
                return
            self._positioned([(f, epoch, position) for f, _, epoch, position in mine])

        context.applier.submit(change_of(ids, through, merged, epochs, held=held), done)

    def _positioned(self, positions: Iterable[tuple[Followed, int, int]]) -> None:
        """Tell the primary that these copies are complete and durable: batches then apply as they
        come.
        """
        acks = wire.PositionAcks()
        for followed, epoch, position in positions:
            followed.take(Step.DURABLE)
            followed.attempts = 0
            self._context.tail_epochs.pop(followed.partition_id, None)
            acks.partition_ids.append(followed.partition_id)
            acks.primary_epochs.append(epoch)
            acks.sequences.append(position)
        if acks.partition_ids:
            self._send(wire.FollowRequest(positions=acks))
        self._context.wake()

    async def _join_without_stream(self, followed: Followed) -> None:
        """Make the copy complete through the pass's bound, and open it again: the kept-back batches
        were dropped.
        """
        if followed.bound and not (followed.holds and followed.newest_pulled > followed.bound):
            ids = np.array([followed.partition_id], np.uint32)
            through = np.array([followed.bound], np.uint64)
            epochs = {followed.partition_id: self._epochs(followed)}
            if not self._current(followed):
                return
            change = change_of(ids, through, {}, epochs, CopyState.DIRTY_TAIL)
            if followed.holds:
                held = Held()
                held.take(followed)
                change = change_of(ids, through, {}, epochs, held=held)
            try:
                await self._context.applier.submit(change)
            except KoinonError as error:
                self._reopen([followed], error)
                return
        if followed.stage is Stage.JOINING:
            self._send_close([followed.partition_id])
            self.following.close(followed)
            self._context.wake()

    def _epochs(self, followed: Followed) -> PartitionEpochs:
        known = self._context.copies.epochs_of(followed.partition_id)
        epoch = max(known.primary_epoch, followed.want.primary_epoch)
        return followed.opened.epochs(epoch)

    # --- passes ----------------------------------------------------------------------------

    async def _pull(self, followed: Followed) -> None:
        """Run the partition's pass."""
        try:
            await pull(self._context, self.node, self.following, followed)
            self._jobs.pop(followed.partition_id, None)
            if followed.stage is Stage.JOINING:
                self._joining_due.set()
        except SupersededError:
            pass  # the new table reaches this stream by ``update``
        except KoinonError as error:
            self._reopen([followed], error)

    # --- ending ----------------------------------------------------------------------------

    def _current(self, followed: Followed) -> bool:
        want = followed.want
        return self._context.current(followed.partition_id, self.node.number, want.primary_epoch)

    def _end_job(self, followed: Followed) -> None:
        job = self._jobs.pop(followed.partition_id, None)
        if job is not None and job is not asyncio.current_task():
            job.cancel()

    def _reopen_later(self, followed: Followed, jitter: float) -> None:
        """End the opening; retry after an exponential backoff."""
        self._end_job(followed)
        delay_s = core.retry_delay_s(followed)
        followed.attempts += 1
        self.following.close(followed, self._context.clock() + delay_s * jitter)

    def _reopen(self, partitions: Sequence[Followed], error: KoinonError) -> None:
        """End these openings because of a local error, tell the primary, and retry later."""
        context = self._context
        begun = [f for f in partitions if f.stage is not Stage.WAITING]
        if not begun:
            return
        if isinstance(error, StorageFullError):
            if context.clock() - context.logged_full_at >= _TELL_FULL_EVERY_S:
                log.warning("no room to follow, retrying error=%s", error)
                context.logged_full_at = context.clock()
        else:
            log.info("partitions will be opened again count=%d error=%s", len(begun), error)
        jitter = context.random.uniform(0.5, 1.0)
        for followed in begun:
            self._reopen_later(followed, jitter)
        self._send_close([followed.partition_id for followed in begun])
        context.wake()


def _first(errors: BaseExceptionGroup[KoinonError]) -> KoinonError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, KoinonError)
    return error
