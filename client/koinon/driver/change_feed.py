"""Carries out a change feed: one stream to each node that leads some of the partitions.

    nodes    >  streams (a task each)  >  queue, bounded  >  the caller's batches
                  |  refused, or the stream ended
                  v
             partitions that wait for a newer table or a back-off  >  another stream

A stream waits while the queue is full; gRPC's flow control then holds the node back. The feed keeps
two positions of each partition: that of the last change read, from which a stream is reopened, and
that of the last change delivered, which batches carry to the caller. There is one stream for each
node: a partition that moves to a node, or is added, joins the others there in a new stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

import grpc

from koinon.core import limits
from koinon.core.feeds import (
    FROM_NOW,
    ChangeBatch,
    FeedPart,
    FeedPositions,
    PartitionPosition,
    closed_up,
)
from koinon.core.retry import final_error
from koinon.core.scanning import partitions_with
from koinon.core.target import Target
from koinon.driver import request_ids
from koinon.driver.engine import Engine
from koinon.driver.rpc.attended_channel import PROTOCOL, Connection
from koinon.types import BytesLike
from koinon_proto.contract import convert
from koinon_proto.contract.errors import (
    ClientClosedError,
    HistoryBranchedError,
    InvalidArgumentError,
    KoinonError,
    NotSentError,
    ResourceExhaustedError,
    SnapshotNeededError,
    UnknownFateError,
    WrongClusterError,
)
from koinon_proto.server import rpc
from koinon_proto.v1 import feed_pb2

Since = FeedPositions | str | Literal["now"] | None
"""Start of a feed: positions (or ``str`` of them), ``"now"``, or None for a snapshot of all records
first.
"""

QUEUE_BYTES: Final = 4 * 1024 * 1024
"""The bytes of nodes' messages that are received and not yet given to the caller, beyond which no
more are received. A message has half a MiB, or more if an atomic batch is larger.
"""
BATCH_BYTES: Final = 512 * 1024
"""Messages that have arrived are given to the caller in one batch, up to so many bytes: a slow
caller gets fewer and larger batches.
"""
TIMEOUT_MS: Final = 60_000
"""The default timeout: a partition that no node serves for this long ends the feed."""
_EMPTY_BATCH_S = 1.0
_SILENT_S = 5.0  # a node sends a message every second at least
_OF_ONE_PARTITION = (SnapshotNeededError, HistoryBranchedError)
"""Errors that end only the partition that they name."""
_JOIN_S = 0.01  # partitions that move to a node within this time share a stream


@dataclass(frozen=True, slots=True)
class FeedQuery:
    """The caller's arguments of a feed."""

    prefix: BytesLike = b""
    since: Since = None
    keys_only: bool = False
    is_partial: bool = False
    """True: the feed begins with no partition, and follows those that ``add`` names. It outlasts
    its timeout: after each timeout in which a node had no place for its stream the node's error
    comes once.
    """


@dataclass(slots=True, eq=False)
class _Stream:
    """The open stream to one node."""

    partition_ids: set[int]
    task: asyncio.Task[None]


@dataclass(slots=True)
class _Failing:
    """A partition that no node has served since ``began``."""

    began: float
    attempts: int = 0


@dataclass(slots=True)
class _Read:
    """One message of a node, and the partitions' positions after it."""

    message: Any
    size: int = 0  # bytes
    parts: list[FeedPart] = field(default_factory=list)
    positions: dict[int, PartitionPosition] = field(default_factory=dict)
    caught_up: set[int] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)  # partitions in a backfill
    is_cut: bool = False  # the message has rows of partitions that were removed since

    def drop(self, partition_ids: Collection[int]) -> None:
        """Drop the changes and positions of these partitions."""
        kept = [part for part in self.parts if part.partition_id not in partition_ids]
        self.is_cut = self.is_cut or len(kept) < len(self.parts)
        self.parts = kept
        for p in partition_ids:
            self.positions.pop(p, None)
            self.caught_up.discard(p)
            self.behind.discard(p)


class ChangeFeed:
    """One change feed of one caller. Every call must come from the engine's event loop."""

    def __init__(
        self,
        engine: Engine,
        target: Target,
        query: FeedQuery,
        timeout_ms: int | None,
        arrived: asyncio.Event | None = None,
    ) -> None:
        """``arrived`` is set when ``take`` has a batch or an error to return."""
        self._engine = engine
        self._target = target
        self._prefix = limits.check_key_part("prefix", query.prefix)
        self._keys_only = query.keys_only
        self._is_lasting = query.is_partial
        self._timeout_ms = engine.timeout_ms(TIMEOUT_MS if timeout_ms is None else timeout_ms)
        self._begin = self._positions_of(query.since)
        wanted = () if query.is_partial else partitions_with(self._prefix, target.partitioner)
        first = FROM_NOW if query.since == "now" else PartitionPosition()
        known = self._begin.partitions if self._begin is not None else {}
        self._read_to = {p: known.get(p, first) for p in wanted}
        self._given = {p: place for p, place in self._read_to.items() if place != first}
        self._behind = set(wanted)  # partitions whose delivered changes have not caught up
        self._streams: dict[str, _Stream] = {}
        self._waiting: set[int] = set(wanted)  # partitions without a stream
        self._outdated: set[str] = set()  # addresses whose streams send removed partitions, too
        self._failing: dict[int, _Failing] = {}
        self._queue: deque[_Read] = deque()
        self._queued_bytes = 0
        self._error: BaseException | None = None  # the error that ends the feed
        self._refused: deque[KoinonError] = deque()  # errors that ended single partitions
        self._opened = self._closed = False
        self._wake, self._room = asyncio.Event(), asyncio.Event()
        self._arrived = arrived or asyncio.Event()

    def _positions_of(self, since: Since) -> FeedPositions | None:
        """Return the positions that the caller starts from, or None.

        Raises:
            InvalidArgumentError: the text is no positions, or they belong to another keyspace.
            WrongClusterError: the positions belong to another cluster.
        """
        if since is None or since == "now":
            return None
        positions = FeedPositions.parse(since) if isinstance(since, str) else since
        if positions.cluster_id != self._engine.cluster_id:
            raise WrongClusterError(
                expected_cluster_id=self._engine.cluster_id, actual_cluster_id=positions.cluster_id
            )
        if positions.keyspace_id != self._target.keyspace_id:
            raise InvalidArgumentError(
                field="since", reason="the positions belong to another keyspace"
            )
        return positions

    # --- for the caller --------------------------------------------------------------------

    async def next(self) -> ChangeBatch:
        """Return the next batch; an empty one after a second without a change.

        Raises:
            SnapshotNeededError, HistoryBranchedError: a partition cannot continue from its
                position.
            UnavailableError: no node served a partition for the timeout.
            KoinonError: another error that a retry does not mend.
        """
        self._engine.check_loop()
        deadline = self._engine.now() + _EMPTY_BATCH_S
        while True:
            self._arrived.clear()
            if (taken := self.take()) is not None:
                return taken[0]
            try:
                async with asyncio.timeout(max(0.0, deadline - self._engine.now())):
                    await self._arrived.wait()
            except TimeoutError:
                return self._batch(())

    def take(self) -> tuple[ChangeBatch, Sequence[FeedPart]] | None:
        """Return the next batch that was read, and its parts, or None. Opens the feed at its first
        call. After SnapshotNeededError and HistoryBranchedError the feed continues without their
        partition; a partial feed continues after ResourceExhaustedError, too.

        Raises:
            KoinonError: as ``next``.
        """
        if not self._opened:
            self._opened = True
            self._engine.spawn(self._keep_streams_open())
        was_behind, size = bool(self._behind), 0
        reads: list[_Read] = []
        while self._queue and size < BATCH_BYTES:
            read = self._queue.popleft()
            self._given.update(read.positions)
            self._behind = (self._behind | read.behind) - read.caught_up
            size += read.size
            reads.append(read)
        self._queued_bytes -= size
        self._room.set()
        parts = closed_up([part for read in reads for part in read.parts])
        if any(part.rows for part in parts) or was_behind != bool(self._behind):
            return self._batch(reads), parts
        if self._error is not None:
            raise self._error
        if self._refused:
            raise self._refused.popleft()
        return None

    @property
    def positions(self) -> Mapping[int, PartitionPosition]:
        """The positions after what was delivered, also of partitions without a change since."""
        return self._given

    @property
    def caught_up(self) -> bool:
        """True if no partition has changes to deliver that were there when the feed began."""
        return not self._behind

    def add(self, positions: Mapping[int, PartitionPosition]) -> None:
        """Follow these partitions, too, from these positions on."""
        self._read_to.update(positions)
        self._given.update(positions)
        self._behind.update(positions)
        self._waiting.update(positions)
        self._wake.set()

    def remove(self, partition_ids: Collection[int]) -> None:
        """Follow these partitions no more. Nothing of them is delivered any more, not even changes
        that were read before.
        """
        for p in partition_ids:
            self._read_to.pop(p, None)
            self._given.pop(p, None)
            self._failing.pop(p, None)
        self._behind.difference_update(partition_ids)
        self._waiting.difference_update(partition_ids)
        for read in self._queue:
            read.drop(partition_ids)
        for address, stream in self._streams.items():
            if not stream.partition_ids.isdisjoint(partition_ids):
                stream.partition_ids.difference_update(partition_ids)
                self._outdated.add(address)
                self._wake.set()

    def close(self) -> None:
        """End the feed and close its streams."""
        self._closed = True
        self._wake.set()

    def _batch(self, reads: Sequence[_Read]) -> ChangeBatch:
        keys: list[bytes] = []
        values: list[bytes | None] = []
        versions: list[int] = []
        expires_at_ms: list[int | None] = []
        for read in reads:
            message = read.message
            found: list[bytes | None] = list(message.values)
            for row in message.deletes:
                found[row] = None
            pieces = [slice(part.start, part.end) for part in read.parts if part.rows]
            for piece in pieces if read.is_cut else (slice(None),):
                keys += message.keys[piece]
                values += found[piece]
                versions += message.versions[piece]
                expires_at_ms += (at or None for at in message.expires_at_ms[piece])
        return ChangeBatch(
            keys=keys,
            values=values,
            versions=versions,
            expires_at_ms=expires_at_ms,
            positions=FeedPositions(
                self._engine.cluster_id,
                self._target.keyspace_id,
                MappingProxyType(dict(self._given)),
            ),
            caught_up=not self._behind,
        )

    # --- streams ---------------------------------------------------------------------------

    async def _keep_streams_open(self) -> None:
        """Keep a stream open for every partition, until the feed is closed or fails."""
        try:
            with request_ids.operation():
                while not self._closed and self._error is None:
                    await self._open_streams()
                    await self._wake.wait()
                    self._wake.clear()
                    await asyncio.sleep(_JOIN_S)
        except KoinonError as error:
            self._fail(error)
        finally:
            tasks = [stream.task for stream in self._streams.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._fail(ClientClosedError())

    async def _open_streams(self) -> None:
        """Open streams for the partitions without one, one for each node; partitions that already
        have a stream to the node join the new stream.

        Raises:
            UnknownKeyspaceError: the keyspace has been dropped.
        """
        routing = self._engine.routing()
        self._target.settings(routing)
        while self._outdated:
            self._waiting |= await self._end_stream(self._outdated.pop())
        streamed = {p for stream in self._streams.values() for p in stream.partition_ids}
        by_owner: dict[str, set[int]] = {}
        for p in self._waiting - streamed:
            by_owner.setdefault(routing.owner_of[p], set()).add(p)
        self._waiting = set()
        for p in by_owner.pop("", ()):
            self._reopen_later((p,), routing.offline(p))
        for address, partition_ids in by_owner.items():
            partition_ids |= await self._end_stream(address)
            partition_ids &= self._read_to.keys()  # some may have been removed meanwhile
            if not partition_ids:
                continue
            task = asyncio.create_task(self._read_stream(address, partition_ids))
            task.add_done_callback(self._on_ended)
            self._streams[address] = _Stream(partition_ids, task)

    async def _end_stream(self, address: str) -> set[int]:
        """End the stream to a node, if there is one; return its partitions."""
        former = self._streams.pop(address, None)
        if former is None:
            return set()
        former.task.cancel()
        await asyncio.gather(former.task, return_exceptions=True)
        return former.partition_ids

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        """End the feed if its stream ended with an unexpected exception."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _read_stream(self, address: str, partition_ids: set[int]) -> None:
        """Read the changes of these partitions from one node until the stream ends; then reopen the
        partitions that are left.
        """
        connection = Connection(address, lambda: None, self._engine.dialing)
        try:
            error = await self._read_messages(connection, address, partition_ids)
        finally:
            await connection.close()
        stream = self._streams.get(address)
        if stream is not None and stream.task is asyncio.current_task():
            del self._streams[address]
        left = tuple(partition_ids)
        partition_ids.clear()
        if left:
            self._reopen_later(left, error)

    async def _read_messages(
        self, connection: Connection, address: str, partition_ids: set[int]
    ) -> KoinonError:
        """Deliver the node's messages until its stream ends; return the error that says why."""
        if not await connection.reach():
            return NotSentError(reason=f"no connection to {address}")
        metadata = (*request_ids.metadata(), *connection.metadata)
        try:
            call = connection.changes(self._request(partition_ids), metadata=metadata)
            while True:
                async with asyncio.timeout(_SILENT_S):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return UnknownFateError(reason=f"{address} ended the stream of changes")
                await self._deliver(message, partition_ids)
                if not partition_ids:
                    return NotSentError(reason=f"{address} serves none of the partitions any more")
        except TimeoutError:
            return UnknownFateError(reason=f"{address} sent nothing for {_SILENT_S:.0f} s")
        except grpc.aio.AioRpcError as failure:
            return rpc.fate_of(failure, at=address, unimplemented=PROTOCOL)
        except grpc.aio.UsageError:
            return NotSentError(reason=f"no connection to {address}")

    def _request(self, partition_ids: Iterable[int]) -> feed_pb2.ChangesRequest:
        places = ((p, self._read_to[p]) for p in sorted(partition_ids))
        return feed_pb2.ChangesRequest(
            table_version=self._engine.routing().table.table_version,
            cluster_id=self._engine.cluster_id,
            keyspace_id=self._target.keyspace_id,
            positions=[
                feed_pb2.FeedPosition(
                    partition_id=p,
                    sequence=place.sequence,
                    bound=place.bound,
                    after_key=place.after_key,
                )
                for p, place in places
            ],
            prefix=self._prefix,
            keys_only=self._keys_only,
        )

    async def _deliver(self, message: Any, partition_ids: set[int]) -> None:
        """Queue a message for the caller once there is room, and advance the read positions."""
        while self._queued_bytes >= QUEUE_BYTES:
            self._room.clear()
            await self._room.wait()
        read = self._read_of(message)
        read.drop(read.positions.keys() - partition_ids)  # removed meanwhile
        self._queue.append(read)
        self._queued_bytes += read.size
        self._read_to.update(read.positions)
        self._arrived.set()
        refusals = {one.partition_id: one.error for one in message.refusals}
        for p in partition_ids - refusals.keys() if self._failing else ():
            self._failing.pop(p, None)
        for p, error in refusals.items():
            if p in partition_ids:
                partition_ids.discard(p)
                self._reopen_later((p,), convert.error_from_proto(error))

    def _read_of(self, message: Any) -> _Read:
        """Return a message with its parts and positions."""
        read = _Read(message, message.ByteSize())
        row = 0
        for advance in message.advances:
            place = advance.position
            p = place.partition_id
            after = PartitionPosition(place.sequence, place.bound, place.after_key)
            before = read.positions.get(p) or self._read_to.get(p, PartitionPosition())
            read.parts.append(FeedPart(p, row, row + advance.rows, before, after))
            read.positions[p] = after
            row += advance.rows
            if place.bound:
                read.behind.add(p)
                read.caught_up.discard(p)
            elif advance.caught_up:
                read.caught_up.add(p)
        return read

    def _reopen_later(self, partition_ids: Sequence[int], error: KoinonError) -> None:
        """Reopen the partitions once a newer table arrives or the back-off has passed; end the feed
        if the error is not retriable, or the timeout is over and the feed does not outlast it.
        """
        engine, now = self._engine, self._engine.now()
        revision = engine.router.revision
        engine.router.learn((error,))
        failing = [self._failing.setdefault(p, _Failing(now)) for p in partition_ids]
        attempts = max(one.attempts for one in failing)
        again = engine.policy.decide(error, attempt=attempts, idempotent=True)
        if isinstance(error, _OF_ONE_PARTITION):
            self._refused.append(error)
            for p in partition_ids:
                del self._read_to[p], self._failing[p]
            self._arrived.set()
            return
        if again is None:
            self._fail(error)
            return
        if now - min(one.began for one in failing) >= self._timeout_ms / 1000:
            if not self._is_lasting:
                self._fail(
                    final_error(
                        error, write=False, maybe_applied=False, timed_out_ms=self._timeout_ms
                    )
                )
                return
            if isinstance(error, ResourceExhaustedError):
                self._refused.append(error)
                self._arrived.set()
                for one in failing:
                    one.began = now
        for one in failing:
            one.attempts += 1

        def resume() -> None:
            self._waiting.update(self._read_to.keys() & partition_ids)
            self._wake.set()

        engine.discovery.on_news(resume, again, revision, partition_ids)
        engine.wake_on_news(revision)

    def _fail(self, error: BaseException) -> None:
        """End the feed with this error; messages that were read before are still delivered."""
        if self._error is None:
            self._error = error
        self._arrived.set()
        self._wake.set()
