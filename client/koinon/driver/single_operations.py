"""Single operations from the call to the end: batching, retries, deadlines.

An operation goes to its partition's owner by RESP if the node offers it, else in a gRPC batch with
the others of its ``NodeQueue`` (``koinon.core.batching``). If it is refused or not sent, it waits
for a newer table and is retried. All methods run on the engine's loop unless their docstrings say
otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
from koinon.core.operations import ReadReply, UpdateReply, WriteReply, attempt_timeout_s
from koinon.core.routing import Routing
from koinon.core.target import Target
from koinon.driver import request_ids
from koinon.driver.cluster_access import ClusterAccess
from koinon.driver.deadlines import Deadlines
from koinon.driver.node_requests import outcome_as
from koinon.driver.resp.link import RespLink, RespPlace
from koinon.driver.rpc.kv_messages import (
    read_reply,
    single_reads,
    single_updates,
    single_writes,
    update_reply,
    write_reply,
)
from koinon.driver.rpc.node_link import Link
from koinon.types import BytesLike, Durability
from koinon_proto.contract.errors import (
    ClientClosedError,
    KoinonError,
    ReplyTooLargeError,
    ResourceExhaustedError,
    UnknownFateError,
)

_ROWS_MAX = 1_000


class SingleOperations:
    """The single operations of one client that have begun and not ended."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._options = access.options
        self._loop = access.loop
        self.now = access.now
        self._resp_links: dict[tuple[str, str, int], RespLink] = {}
        """By the node's gRPC and RESP addresses and the keyspace's id."""
        self._queues: dict[tuple[str, int, bool, bool, Durability], NodeQueue] = {}
        self._live: set[PendingOperation] = set()  # at most ``max_pending``
        self._deadlines = Deadlines(self.now)  # number of live operations

    @property
    def resp_links(self) -> list[RespLink]:
        """The RESP links to all nodes."""
        return [*self._resp_links.values()]

    async def close(self) -> None:
        """Close the RESP links, then end every operation."""
        await asyncio.gather(*[link.close() for link in self._resp_links.values()])
        for single in list(self._live):
            sent = UnknownFateError(reason="the client was closed before the answer came")
            single.fail(sent if single.sent and single.write else ClientClosedError())
        self._deadlines.close()

    def routing(self) -> Routing:
        """Return the current routing. From any thread."""
        return self._access.routing()

    def watch_answers(self) -> None:
        """Begin to check for nodes that do not reply."""
        self._access.watch_answers()

    def redirect(self, addresses: set[str]) -> None:
        """Reroute the operations queued for these nodes to their partitions' present owners."""
        queues: list[NodeQueue | RespLink]
        queues = [*self._queues.values(), *self._resp_links.values()]
        for queue in queues:
            if queue.address in addresses:
                self.send_again(queue.drain())

    def make(
        self,
        target: Target,
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
        value = limits.check_value(value, target.settings(routing).max_value_bytes)
        limits.check_ttl(ttl_ms)
        limits.check_increment(by)
        limits.check_version(if_version)
        limits.check_durability(durability)
        timeout_ms = self._access.timeout_ms(timeout_ms)
        if retry_unknown is None:
            retry_unknown = self._options.retry_unknown
        return PendingOperation(
            kind,
            key,
            target.partitioner.partition_of(key),
            keyspace_id=target.keyspace_id,
            deadline=self.now() + timeout_ms / 1000,
            timeout_ms=timeout_ms,
            value=value,
            ttl_ms=ttl_ms,
            by=by,
            if_version=if_version,
            retry_unknown=retry_unknown,
            durability=durability,
            request=request_ids.given(),
        )

    def submit(
        self,
        single: PendingOperation,
        waiter: Callable[[PendingOperation], None],
        failure: KoinonError | None = None,
    ) -> None:
        """Begin an operation; ``waiter`` is called with it once, when it has ended. ``failure``:
        the error of the attempt that a thread has already made, if any.

        Raises:
            ResourceExhaustedError: ``max_pending`` operations are under way.
        """
        direct = self._access.pools.in_use if self._access.pools is not None else 0
        if len(self._live) + direct >= self._options.max_pending:
            raise ResourceExhaustedError(
                resource="client operations under way", limit=self._options.max_pending
            )
        if self._access.closed:
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
        if single.expired and single.maybe_applied:
            for link in self.resp_links:
                link.end_where_unanswered(single)
        single.waiter(single)

    def abandon(self, single: PendingOperation) -> None:
        """Abandon an operation whose caller is gone. Unsent, it is dropped; sent, its batch
        continues.
        """
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
        link = self.resp_link(address, single.keyspace_id, routing)
        if link is not None and link.add(single):
            return
        kind = address, single.keyspace_id, single.write, single.update, single.durability
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = NodeQueue(
                address,
                write=single.write,
                update=single.update,
                durability=single.durability,
                rows_max=_ROWS_MAX,
                bytes_max=self._options.batch_bytes,
            )
        queue.add(single)
        self._flush_soon(queue)

    def resp_link(self, address: str, keyspace_id: int, routing: Routing) -> RespLink | None:
        """Return the RESP link to the node; None if the node has no RESP listener, or the client
        must not use it.
        """
        listener = routing.redis_addresses.get(address)
        if listener is None or self._options.transport == "grpc":
            return None
        link = self._resp_links.get((address, listener, keyspace_id))
        if link is None:
            self._retire_dropped(routing)
            link = RespLink(
                RespPlace(address, listener, self._access.cluster_id, keyspace_id),
                self,
                self._access.pools,
                self._access.dialing,
            )
            self._resp_links[address, listener, keyspace_id] = link
        return link

    def _retire_dropped(self, routing: Routing) -> None:
        """Retire the links of keyspaces that no longer exist."""
        known = routing.table.keyspaces
        for place in [place for place in self._resp_links if known.by_id(place[2]) is None]:
            self._resp_links.pop(place).retire()

    def send_again(self, singles: Sequence[PendingOperation]) -> None:
        """Route unsent operations anew."""
        for single in singles:
            if not self._access.closed:
                self._enqueue(single)

    def _flush_soon(self, queue: NodeQueue) -> None:
        """Send the queue at the end of this turn of the loop, together with operations begun later
        in the turn.
        """
        if not queue.flush_due and queue.in_flight < self._options.singles_in_flight:
            queue.flush_due = True
            self._loop.call_soon(self._flush, queue)

    def _flush(self, queue: NodeQueue) -> None:
        queue.flush_due = False
        link = self._access.link(queue.address)
        while (
            len(queue)
            and queue.in_flight < self._options.singles_in_flight
            and not self._access.closed
        ):
            if not link.ready():
                queue.flush_due = True  # the connection
                self._access.spawn(self._flush_connected(queue, link))
                return
            batch = queue.next_batch()
            if batch:
                queue.in_flight += 1
                self._access.spawn(self._exchange(queue, link, batch))

    async def _flush_connected(self, queue: NodeQueue, link: Link) -> None:
        connected = await link.connect_soon()
        if connected:
            self._flush(queue)
            return
        queue.flush_due = False
        self._settle(queue.drain(), link.not_sent(), self._access.router.revision)

    async def _exchange(self, queue: NodeQueue, link: Link, batch: list[PendingOperation]) -> None:
        routing = self.routing()
        request_ids.adopt(_named(batch))
        left_s = max([single.deadline for single in batch]) - self.now()
        timeout_s = attempt_timeout_s(left_s, write=queue.write)
        request: Any
        as_reply: Callable[[Any], ReadReply | WriteReply | UpdateReply]
        if queue.update:
            request = single_updates(batch, routing)
            method, as_reply = "batch_update", partial(update_reply, request)
        elif queue.write:
            request, method, as_reply = single_writes(batch, routing), "batch_write", write_reply
        else:
            request, method, as_reply = single_reads(batch, routing), "batch_get", read_reply
        self.watch_answers()
        try:
            outcome = await link.call(method, request, timeout_s, write=queue.write)
        finally:
            queue.in_flight -= 1
        if not queue.write:
            queue.on_reply_size(len(batch), isinstance(outcome, ReplyTooLargeError))
        self._settle(batch, outcome_as(as_reply, outcome), routing.revision)
        self._flush_soon(queue)

    def settle_failed(self, failed: Failed) -> None:
        """Fail or defer operations that were sent one by one and refused."""
        by_revision: dict[int, Failed] = {}
        for single, error in failed:
            by_revision.setdefault(single.revision, []).append((single, error))
        for revision, group in by_revision.items():
            parked = settle_failed(
                group,
                revision=revision,
                router=self._access.router,
                policy=self._access.policy,
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
            router=self._access.router,
            policy=self._access.policy,
        )
        self._park(parked, revision)

    def _park(self, deferred: Sequence[Deferred], revision: int) -> None:
        """Let deferred operations wait for a newer table. ``revision``: of the routing under which
        they were sent; if a refusal has changed the routing since, waiters are woken now.
        """
        self._access.wake_on_news(revision)
        for parked in deferred:
            if parked.again.not_before_s:
                self._fail_where_retry_is_too_late(parked)
            self._access.discovery.on_news(
                partial(self._resume, parked),
                parked.again,
                parked.revision,
                [single.partition_id for single in parked.singles],
            )

    def _fail_where_retry_is_too_late(self, parked: Deferred) -> None:
        """Fail the operations whose deadline is before the earliest time at which a retry can
        succeed.
        """
        not_before = self.now() + parked.again.not_before_s
        for single in parked.singles:
            if single.deadline <= not_before and single.last_error is not None:
                single.fail(single.last_error, timed_out_ms=single.timeout_ms)

    def _resume(self, parked: Deferred) -> None:
        """Retry deferred operations; if the partition has changed, back-off starts anew."""
        if self._access.closed:
            return
        routing = self.routing()
        for single in parked.singles:
            if single.resume(parked):
                if routing.changed_since([single.partition_id], parked.revision):
                    single.attempt = 0
                self._enqueue(single)


def _named(batch: Sequence[PendingOperation]) -> request_ids.RequestId:
    """Give every operation of the batch the first request id that one of them has; return this
    id.
    """
    request: request_ids.RequestId | None
    request = next((single.request for single in batch if single.request is not None), None)
    if request is None:
        request = request_ids.RequestId()
    for single in batch:
        single.request = request
    return request
