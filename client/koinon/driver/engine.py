"""The driver under both clients: one event loop that carries out what the core decides.

All methods run on the engine's loop, unless they say otherwise. It owns the channels, the table
refresh, the timers and the lanes of single operations; which rows go where, what is retried and
what an error means is decided in ``koinon.core``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from koinon.core import limits
from koinon.core.batching import (
    Deferred,
    Failed,
    Kind,
    NodeQueue,
    PendingOperation,
    settle_failed,
    settle_singles,
)
from koinon.core.operations import (
    Call,
    ReadReply,
    ReadRows,
    RowsOperation,
    UpdateReply,
    WriteReply,
    WriteRows,
    attempt_timeout_s,
)
from koinon.core.retry import RetryAfter, RetryPolicy
from koinon.core.routing import Router, Routing
from koinon.core.row_chunks import Chunk, delete_chunks, put_chunks
from koinon.driver import forks, request_ids
from koinon.driver.deadlines import Deadlines
from koinon.driver.discovery import Cancel, Discovery
from koinon.driver.messages import single_reads, single_updates, single_writes, write_request
from koinon.driver.node_link import Link
from koinon.driver.observing import Observing
from koinon.driver.resp.link import RespLink
from koinon.driver.resp.pool import SOCKETS_MAX, Pools
from koinon.options import ClientOptions
from koinon.types import BytesLike, Durability
from koinon_proto.contract.errors import (
    ClientClosedError,
    KoinonError,
    NotSentError,
    ReplyTooLargeError,
    ResourceExhaustedError,
    UnknownFateError,
    WrongEventLoopError,
)
from koinon_proto.contract.table import MAX_BATCH_ROWS
from koinon_proto.security.transport import dialing
from koinon_proto.v1 import kv_pb2

if TYPE_CHECKING:
    from koinon.core.routing import PartitionIds

_LANE_ROWS = 1_000
_SLOW_S = 0.5  # without any answer: a node may hang, or be gone
_SUSPECT_S = 0.25  # between two questions whether it is


class Engine:
    """Everything that one client shares. Make it on its loop; ``start`` before use. With
    ``threads``, threads send operations themselves (``pools``) where they can.
    """

    def __init__(
        self, seeds: Sequence[str], options: ClientOptions, *, threads: bool = False
    ) -> None:
        forks.holds_channels(self)
        self.options = options
        self.dialing = dialing(options.tls_bundle, options.token_file)
        self.observing = Observing(options.observer)
        self.router = Router()
        self.policy = RetryPolicy()
        self.random = Random()
        self.closed = False  # no operation begins any more
        self._loop = asyncio.get_running_loop()
        self.now = time.monotonic  # also on threads: uvloop's own clock stands while it waits
        sockets_max = min(SOCKETS_MAX, options.max_pending)
        self.pools = (
            Pools(self._on_late, self.dialing, sockets_max=sockets_max) if threads else None
        )
        self._links: dict[str, Link] = {}  # by address; kept until the client is closed
        self._resp_links: dict[tuple[str, str], RespLink] = {}  # by the addresses for gRPC and RESP
        self._lanes: dict[tuple[str, bool, bool, Durability], NodeQueue] = {}
        self._live: set[PendingOperation] = set()  # begun and not ended; ``max_pending`` at most
        self._deadlines = Deadlines(self.now)  # of those that are live
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio itself holds tasks weakly
        self._look_after: Cancel | None = None  # ends the wait for the next look at silent nodes
        self.discovery = Discovery(seeds, self.router, self.link, self.dialing)

    async def start(self) -> None:
        """Fetch the table within the default timeout; where that fails, close.

        Raises:
            ClusterNotReadyError, UnavailableError, WrongClusterError
        """
        try:
            with request_ids.operation():
                await self.discovery.first_table(self.options.timeout_ms)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every operation under way and close the channels."""
        if self.closed:
            return
        self.closed = True
        if self._look_after is not None:
            self._look_after()
        self.discovery.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*[link.close() for link in self._resp_links.values()])
        for single in list(self._live):
            sent = UnknownFateError(reason="the client was closed before the answer came")
            single.fail(sent if single.sent and single.write else ClientClosedError())
        self._deadlines.close()
        await asyncio.gather(*[link.close() for link in self._links.values()])

    def link(self, address: str) -> Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link(address, self.dialing)
        return link

    def check_loop(self) -> None:
        """Refuse a call from another loop. A client that is closed says that instead, on any.

        Raises:
            WrongEventLoopError: the running loop is not the engine's.
        """
        if asyncio.get_running_loop() is not self._loop and not self.closed:
            raise WrongEventLoopError

    def routing(self) -> Routing:
        """Return the current routing. From any thread."""
        if self.closed:
            raise ClientClosedError()
        routing = self.router.routing
        assert routing is not None, "start() has returned"
        return routing

    @property
    def cluster_id(self) -> str:
        """The one cluster that this client ever talks to."""
        return self.routing().table.cluster.cluster_id

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- single operations ----------------------------------------------------------------------

    def make_single(
        self,
        kind: Kind,
        key: BytesLike,
        *,
        timeout_ms: int | None,
        value: BytesLike = b"",
        ttl_ms: int | None = None,
        by: int = 0,
        if_version: int | None = None,
        retry_unknown: bool | None = None,
        durability: Durability = "all_in_sync",
    ) -> PendingOperation:
        """Check the arguments and return the operation, ready for ``submit``. From any thread."""
        routing = self.routing()
        key = limits.check_key(key)
        value = limits.check_value(value, routing.table.cluster.max_value_bytes)
        limits.check_ttl(ttl_ms)
        limits.check_increment(by)
        limits.check_version(if_version)
        limits.check_durability(durability)
        if timeout_ms is None:
            timeout_ms = self.options.timeout_ms
        else:
            limits.check_positive("timeout_ms", timeout_ms)
        return PendingOperation(
            kind,
            key,
            routing.partitioner.partition_of(key),
            deadline=self.now() + timeout_ms / 1000,
            timeout_ms=timeout_ms,
            value=value,
            ttl_ms=ttl_ms,
            by=by,
            if_version=if_version,
            retry_unknown=self.options.retry_unknown if retry_unknown is None else retry_unknown,
            durability=durability,
            request=request_ids.given(),
        )

    def submit(
        self,
        single: PendingOperation,
        waiter: Callable[[PendingOperation], None],
        failure: KoinonError | None = None,
    ) -> None:
        """Begin an operation; ``waiter`` is called with it, once, when it has ended. ``failure`` is
        what an attempt came to that a thread has made.

        Raises:
            ResourceExhaustedError: ``max_pending`` operations are under way.
        """
        direct = self.pools.in_use if self.pools is not None else 0
        if len(self._live) + direct >= self.options.max_pending:
            raise ResourceExhaustedError(
                resource="client operations under way", limit=self.options.max_pending
            )
        if self.closed:
            raise ClientClosedError()
        self._live.add(single)
        single.waiter = waiter
        single.on_done = self._ended
        self._deadlines.add(single)
        if failure is None:
            self._enqueue(single)
        else:
            self.settle_failed([(single, failure)])

    def _ended(self, single: PendingOperation) -> None:
        self._live.discard(single)
        self._deadlines.discard(single)
        single.waiter(single)

    def abandon(self, single: PendingOperation) -> None:
        """The caller has gone. Unsent, the operation is dropped; sent, its batch goes on."""
        if not single.done:
            single.abandon()
            self._live.discard(single)
            self._deadlines.discard(single)

    def _enqueue(self, single: PendingOperation) -> None:
        routing = self.routing()
        address = routing.owner_of[single.partition_id]
        if not address:
            error = routing.offline(single.partition_id)
            self._settle([single], error, routing.revision)
            return
        link = self._resp_link(address, routing)
        if link is not None and link.add(single):
            return
        kind = address, single.write, single.update, single.durability
        lane = self._lanes.get(kind)
        if lane is None:
            lane = self._lanes[kind] = NodeQueue(
                address,
                write=single.write,
                update=single.update,
                durability=single.durability,
                rows_max=_LANE_ROWS,
                bytes_max=self.options.batch_bytes,
            )
        lane.add(single)
        self._flush_soon(lane)

    def _resp_link(self, address: str, routing: Routing) -> RespLink | None:
        """Return the node's link by RESP, if it offers that and may be asked so."""
        listener = routing.redis_addresses.get(address)
        if listener is None or self.options.transport == "grpc":
            return None
        link = self._resp_links.get((address, listener))
        if link is None:
            link = RespLink(address, listener, self.cluster_id, self, self.pools, self.dialing)
            self._resp_links[address, listener] = link
        return link

    def send_again(self, singles: Sequence[PendingOperation]) -> None:
        """These were not sent: route them anew."""
        for single in singles:
            if not self.closed:
                self._enqueue(single)

    def _flush_soon(self, lane: NodeQueue) -> None:
        """Send at the end of this turn of the loop, so that operations begun in it go along."""
        if not lane.flush_due and lane.in_flight < self.options.singles_in_flight:
            lane.flush_due = True
            self._loop.call_soon(self._flush, lane)

    def _flush(self, lane: NodeQueue) -> None:
        lane.flush_due = False
        link = self.link(lane.address)
        while len(lane) and lane.in_flight < self.options.singles_in_flight and not self.closed:
            if not link.ready():
                lane.flush_due = True  # by the connection
                self._spawn(self._flush_connected(lane, link))
                return
            batch = lane.take()
            if batch:
                lane.in_flight += 1
                self._spawn(self._exchange(lane, link, batch))

    async def _flush_connected(self, lane: NodeQueue, link: Link) -> None:
        connected = await link.connect_soon()
        if connected:
            self._flush(lane)
            return
        lane.flush_due = False
        self._settle(lane.drain(), link.not_sent(), self.router.revision)

    async def _exchange(self, lane: NodeQueue, link: Link, batch: list[PendingOperation]) -> None:
        routing = self.routing()
        request_ids.adopt(_named(batch))
        left_s = max([single.deadline for single in batch]) - self.now()
        timeout_s = attempt_timeout_s(left_s, write=lane.write)
        outcome: ReadReply | WriteReply | UpdateReply | KoinonError
        self.watch_answers()
        try:
            if lane.update:
                outcome = await link.update(single_updates(batch, routing), timeout_s)
            elif lane.write:
                outcome = await link.write(single_writes(batch, routing), timeout_s)
            else:
                outcome = await link.read(single_reads(batch, routing), timeout_s)
                too_large = isinstance(outcome, ReplyTooLargeError)
                lane.on_reply_size(len(batch), too_large)
        finally:
            lane.in_flight -= 1
        self._settle(batch, outcome, routing.revision)
        self._flush_soon(lane)

    def watch_answers(self) -> None:
        """Look after nodes that do not answer, from now on and as long as anything is sent."""
        if self._look_after is None and not self.closed:
            self._look_after = self._loop.call_later(_SLOW_S, self._look).cancel

    def _on_late(self) -> None:
        """A thread has waited long for an answer. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._look_now)

    def _look_now(self) -> None:
        if self._look_after is None:
            self._look()

    def _look(self) -> None:
        """Where a node has not answered for long, ask who serves its partitions now. What is still
        queued for it goes there; what was sent is given up once the node is known to be gone.
        """
        self._look_after = None
        if self.closed:
            return
        links: list[Link | RespLink] = [*self._links.values(), *self._resp_links.values()]
        silences = [link.silence_s for link in links]
        silent = [
            link for link, silence_s in zip(links, silences, strict=True) if silence_s >= _SLOW_S
        ]
        addresses = {link.address for link in silent}
        routing = self.routing()
        for link in silent:
            if not routing.is_live(link.address):
                link.drop()
            elif isinstance(link, RespLink):
                link.ask_elsewhere()
        queues: list[NodeQueue | RespLink]
        queues = [*self._lanes.values(), *self._resp_links.values()]
        for queue in queues:
            if queue.address in addresses:
                self.send_again(queue.drain())
        if silent:
            again, owned = RetryAfter(_SUSPECT_S, refresh=True), routing.owned_by([*addresses])
            with request_ids.operation(silent[0].last_request):
                self._look_after = self.discovery.on_news(
                    self._look, again, routing.revision, owned
                )
        elif any(silences):
            self.watch_answers()

    def settle_failed(self, failed: Failed) -> None:
        """End operations that were sent each by itself and not served, or send them again."""
        by_revision: dict[int, Failed] = {}
        for single, error in failed:
            by_revision.setdefault(single.revision, []).append((single, error))
        for revision, group in by_revision.items():
            parked = settle_failed(
                group,
                revision=revision,
                router=self.router,
                policy=self.policy,
                random=self.random,
            )
            self._park(parked, revision)

    def _settle(
        self,
        batch: Sequence[PendingOperation],
        outcome: ReadReply | WriteReply | UpdateReply | KoinonError,
        revision: int,
    ) -> None:
        parked = settle_singles(
            batch,
            outcome,
            revision=revision,
            router=self.router,
            policy=self.policy,
            random=self.random,
        )
        self._park(parked, revision)

    def _park(self, parked: Deferred | None, revision: int) -> None:
        """Let operations wait for news, if any are to go again, after outcomes under ``revision``
        were learned from.
        """
        self._wake_on_news(revision)
        if parked is not None:
            self.discovery.on_news(
                lambda: self._resume(parked),
                parked.again,
                parked.revision,
                [single.partition_id for single in parked.singles],
            )

    def _resume(self, parked: Deferred) -> None:
        """Send operations on their way again; where the partition has changed, back-off begins
        anew.
        """
        if self.closed:
            return
        routing = self.routing()
        for single in parked.singles:
            if not single.done:
                if routing.changed_since([single.partition_id], parked.revision):
                    single.attempt = 0
                self._enqueue(single)

    def _wake_on_news(self, revision: int) -> None:
        """Wake the operations that wait, if a refusal of one of them changed the routing."""
        if self.router.revision > revision:
            self.discovery.wake()

    # --- operations over many rows --------------------------------------------------------------

    async def run_rows(self, operation: RowsOperation[Any], timeout_ms: int) -> None:
        """Carry out an operation until every row is settled. Raises nothing of its own."""
        deadline = self.now() + timeout_ms / 1000
        calls = operation.route(self.routing())
        await self._run_calls(operation, calls, deadline, timeout_ms)

    async def _run_calls(
        self, operation: RowsOperation[Any], calls: list[Call], deadline: float, timeout_ms: int
    ) -> None:
        while True:
            if len(calls) != 1:
                await all_of([self._run_calls(operation, [c], deadline, timeout_ms) for c in calls])
                return
            outcome = await self._attempt(operation, calls[0], deadline)
            leftover = operation.settle(calls[0], outcome, self.router)
            self._wake_on_news(calls[0].revision)
            if leftover is None:
                return
            again, revision = leftover.again, leftover.revision
            partition_ids = operation.partition_ids[leftover.rows]
            if not await self.wait_for_news(again, revision, deadline, partition_ids):
                operation.fail(leftover.rows, leftover.error, timed_out_ms=timeout_ms)
                return
            changed = self.routing().changed_since(partition_ids, revision)
            attempt = 0 if changed else leftover.attempt
            calls = operation.route(self.routing(), leftover.rows, attempt)

    async def _attempt(self, operation: RowsOperation[Any], call: Call, deadline: float) -> Any:
        """Send one call; return the reply or the error."""
        if not call.address:
            return self.routing().offline(int(call.partition_ids[0]))
        link = self.link(call.address)
        if not link.ready():
            try:
                async with asyncio.timeout_at(deadline):
                    connected = await link.connect_soon()
            except TimeoutError:
                connected = False
            if not connected:
                return link.not_sent()
        left_s = deadline - self.now()
        if left_s <= 0:
            return NotSentError(reason="the deadline passed before the request was sent")
        timeout_s = attempt_timeout_s(left_s, write=operation.write)
        self.watch_answers()
        if isinstance(operation, WriteRows):
            return await link.write(write_request(operation, call, self.cluster_id), timeout_s)
        assert isinstance(operation, ReadRows)
        request = kv_pb2.BatchGetRequest(
            table_version=call.table_version,
            keys=call.keys,
            partition_ids=call.partition_ids.tolist(),
            want_versions=operation.want_entries,
            cluster_id=self.cluster_id,
        )
        return await link.read(request, timeout_s)

    async def wait_for_news(
        self,
        again: RetryAfter,
        revision: int,
        deadline: float,
        partition_ids: PartitionIds | Sequence[int],
    ) -> bool:
        """Wait until one of the partitions has changed since ``revision``, at the latest for the
        delay; return False if the deadline passed.
        """
        event = asyncio.Event()
        cancel = self.discovery.on_news(event.set, again, revision, partition_ids)
        try:
            async with asyncio.timeout_at(deadline):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            cancel()
        return self.now() < deadline

    def timeout_ms(self, timeout_ms: int | None) -> int:
        """Return the given timeout, checked, or the default. From any thread."""
        if timeout_ms is None:
            return self.options.timeout_ms
        limits.check_positive("timeout_ms", timeout_ms)
        return timeout_ms

    def chunk_rows(self) -> int:
        """Return how many rows of a ``*_many`` call make a full batch for every node."""
        owners = max(1, len(self.routing().addresses) - 1)
        return min(MAX_BATCH_ROWS, self.options.batch_rows * owners)

    async def read_many(
        self, keys: Sequence[BytesLike], *, want_entries: bool, timeout_ms: int | None
    ) -> list[Any]:
        """Return the values (or entries) of the keys, in their order."""
        routing, timeout_ms = self.routing(), self.timeout_ms(timeout_ms)
        keys = limits.check_keys(keys)
        rows = self.chunk_rows()
        parts = (
            [keys] if len(keys) <= rows else [keys[a : a + rows] for a in range(0, len(keys), rows)]
        )
        window = asyncio.Semaphore(self.options.batches_in_flight)

        async def read(part: Sequence[bytes]) -> list[Any]:
            async with window:
                operation = ReadRows(
                    part,
                    routing.partitioner.partitions_of(part),
                    want_entries=want_entries,
                    policy=self.policy,
                    random=self.random,
                )
                if part:
                    await self.run_rows(operation, timeout_ms)
                if operation.error is not None:
                    raise operation.error
                return operation.results

        name = "get_entries" if want_entries else "get_many"
        with self.observing.operation(name, len(keys)), request_ids.operation():
            if len(parts) == 1:
                return await read(parts[0])
            return [
                value for values in await all_of([read(part) for part in parts]) for value in values
            ]

    def put_chunks(
        self, items: Mapping[bytes, BytesLike] | Iterable[tuple[BytesLike, BytesLike]]
    ) -> Iterator[Chunk]:
        """Cut the input of ``put_many``. From any thread."""
        return put_chunks(
            items,
            rows_max=self.chunk_rows(),
            bytes_max=self.options.batch_bytes,
            max_value_bytes=self.routing().table.cluster.max_value_bytes,
        )

    def delete_chunks(self, keys: Iterable[BytesLike]) -> Iterator[Chunk]:
        """Cut the input of ``delete_many``. From any thread."""
        return delete_chunks(keys, rows_max=self.chunk_rows())


async def all_of(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all; if one raises, cancel the others and raise it plain."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _named(batch: Sequence[PendingOperation]) -> request_ids.RequestId:
    """Let all go under the id of the first that has one; return it."""
    request: request_ids.RequestId | None
    request = next((single.request for single in batch if single.request is not None), None)
    if request is None:
        request = request_ids.RequestId()
    for single in batch:
        single.request = request
    return request
