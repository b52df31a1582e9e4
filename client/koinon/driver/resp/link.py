"""The RESP link to one node and keyspace: opens, replaces and closes its connections.

The loop's own connections are *lanes*. There is one lane for reads and one for writes, since a node
carries out the commands of a connection in order, and a read would wait for the write before it;
each stands in for the other if that cannot be opened. There are a few lanes for reads of many rows.
Pages of scans may take long at a node: for them there are as many lanes as concurrent pages. The
lanes also notice when the node leaves or is gone; then nothing more is sent to it on any
connection, including the threads' sockets. While no connection is available, operations go over
gRPC, which finds out what is wrong with the node.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from koinon.core import resp
from koinon.core.batching import PendingOperation
from koinon.core.exchange import Command, PendingMessage
from koinon.core.routing import Routing
from koinon.driver.request_ids import RequestId
from koinon.driver.resp.connection import Connection, Operations
from koinon.driver.resp.pool import Pool, Pools
from koinon.driver.rpc.channels import CONNECT_S_MAX
from koinon_proto.contract.errors import KoinonError, UnknownFateError
from koinon_proto.security.names import ANY_SERVER
from koinon_proto.security.transport import PLAIN, Dialing

_SOON_S = 0.25
_AGAIN_S = 0.5
_CLOSE_S_MAX = 1.0
ROW_LANES = range(2, 10)
"""For reads of many rows: each request takes the lane with the least load."""
PAGE_LANES = range(10, 42)
"""Each has one page in flight. Requests beyond these go over gRPC."""


class MessageRequests:
    """The messages that wait for a reply of one node. A message is one attempt: the scan or
    operation that made it decides about a retry. ``operations`` provides the clock and the table.
    """

    def __init__(self, operations: Operations[PendingOperation]) -> None:
        self.now: Callable[[], float] = operations.now
        self.routing: Callable[[], Routing] = operations.routing
        self.watch_answers = operations.watch_answers
        self._live: set[PendingMessage] = set()

    def begin(self, message: PendingMessage) -> None:
        self._live.add(message)

    def end(self, message: PendingMessage) -> None:
        """Abandon an attempt: its reply is dropped when it comes."""
        message.done = True
        self._live.discard(message)

    def send_again(self, singles: Sequence[PendingMessage]) -> None:
        for message in singles:
            message.end(None)

    def settle_failed(self, failed: list[tuple[PendingMessage, KoinonError]]) -> None:
        for message, error in failed:
            message.end(error)

    def close(self, reason: str) -> None:
        """End every attempt with an unknown fate."""
        for message in list(self._live):
            message.end(UnknownFateError(reason=reason))


@dataclass(frozen=True, slots=True)
class RespPlace:
    """A node's RESP listener, for the operations of one client in one keyspace."""

    address: str
    """The gRPC address, by which the table identifies the node."""
    listener: str
    """The address of its RESP listener."""
    cluster_id: str
    keyspace_id: int


class RespLink:
    """The link to one node; belongs to one event loop. While one of the loop's connections is open,
    ``pools`` (if given) have a pool for threads.
    """

    def __init__(
        self,
        place: RespPlace,
        operations: Operations[PendingOperation],
        pools: Pools | None,
        dialing: Dialing = PLAIN,
    ) -> None:
        self._dialing = dialing
        self._place = place
        self.address = place.address
        self._hello = resp.hello(place.cluster_id, place.keyspace_id, dialing.token)
        self._operations = operations
        self._messages = MessageRequests(operations)
        self._pools = pools
        self._pool: Pool | None = None
        self._former_pools: list[Pool] = []  # ended pools; some of their sockets may be in use
        self._loop = asyncio.get_running_loop()
        # by lane
        self._open: dict[int, Connection[Any]] = {}
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._queued: defaultdict[int, list[Any]] = defaultdict(list)
        # retired connections: nothing more is sent on them
        self._ending: set[Connection[Any]] = set()
        self._failed = False  # connecting failed: no operation waits for the next attempt
        self._again_at = 0.0  # no attempt to connect before this time
        self._closed = False

    def add(self, single: PendingOperation) -> bool:
        """Accept an operation, to be sent at the end of this turn or once there is a connection;
        return False if it must go over gRPC.
        """
        return self._add(single, single.write)

    async def ask(self, message: PendingMessage, timeout_s: float) -> bool:
        """Send a message, and wait for its reply or error; return False if it was not sent and must
        go over gRPC. If the caller is cancelled, the reply is dropped.
        """
        lane = self._lane_for(message)
        if lane is None:
            return False
        ended = asyncio.Event()
        message.on_end = ended.set
        self._messages.begin(message)
        try:
            if not self._add(message, lane):
                return False
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        except TimeoutError:
            message.expire()
        finally:
            self._messages.end(message)
        return message.result is not None or message.error is not None

    def _lane_for(self, message: PendingMessage) -> int | None:
        """Return a lane for a message: an idle one, or for reads of rows the one with the least
        load.
        """
        for_rows = message.command is Command.GET_MANY
        lanes = ROW_LANES if for_rows else PAGE_LANES
        free = next((lane for lane in lanes if not self._load(lane)), None)
        return min(lanes, key=self._load) if free is None and for_rows else free

    def _load(self, lane: int) -> int:
        """Return the number of a lane's messages in flight."""
        connection = self._open.get(lane)
        if connection is not None and connection.alive:
            return connection.load
        return len(self._queued[lane]) if lane in self._connecting else 0

    def _add(self, single: PendingOperation | PendingMessage, lane: int) -> bool:
        connection = self._open.get(lane)
        if connection is not None and connection.alive and connection.is_outdated():
            self._replace(lane, connection)
            connection = None
        if connection is not None and connection.alive:
            connection.add(single)
            return True
        if self._closed:
            return False
        if lane not in self._connecting and self._operations.now() >= self._again_at:
            self._begin_to_connect(lane)
        if lane in self._connecting and not self._failed:
            self._queued[lane].append(single)
            return True
        return self._add_beside(single, lane)

    def _add_beside(self, single: Any, lane: int) -> bool:
        """Send a single read on the connection for writes, or the reverse: a node without file
        descriptors takes no more connections, but serves those it has.
        """
        beside = None if _brings_messages(lane) else self._open.get(1 - lane)
        if beside is None or not beside.alive:
            return False
        beside.add(single)
        return True

    # --- opening --------------------------------------------------------------------------------

    def _begin_to_connect(self, lane: int) -> None:
        connecting = self._loop.create_task(self._connect(lane))
        self._connecting[lane] = connecting
        soon = self._loop.call_later(_SOON_S, self._wait_no_more, lane)

        def ended(_: asyncio.Task[None]) -> None:
            soon.cancel()
            del self._connecting[lane]

        connecting.add_done_callback(ended)

    async def _connect(self, lane: int) -> None:
        operations: Operations[Any] = self._messages if _brings_messages(lane) else self._operations
        connection = Connection(self.address, self._hello, self, operations)
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                await self._dialing.connect(lambda: connection, self._place.listener, ANY_SERVER)
                await connection.opened
        # ValueError: the listener in the table is no address
        except (OSError, TimeoutError, ValueError):
            connection.close()
        except BaseException:
            connection.close()
            raise
        if connection.alive:
            self._stands(lane, connection)
        else:
            self._again_at = self._operations.now() + _AGAIN_S
            self._wait_no_more(lane)

    def _stands(self, lane: int, connection: Connection[Any]) -> None:
        self._failed = False
        self._open[lane] = connection
        if self._pools is not None and self._pool is None:
            self._pool = self._pools.open(
                self.address, self._place.keyspace_id, connection.peer, self._hello
            )
        for single in self._queued.pop(lane, ()):
            if not single.done:
                connection.add(single)

    def _wait_no_more(self, lane: int) -> None:
        """Send the lane's waiting operations over gRPC, and all later ones until there is a
        connection.
        """
        self._failed = True
        queued = [single for single in self._queued.pop(lane, ()) if not single.done]
        operations: Operations[Any] = self._messages if _brings_messages(lane) else self._operations
        operations.send_again(queued)

    # --- the node leaves, is gone, or is fenced ---------------------------------------------------

    def on_leaving(self) -> None:
        """Send nothing more to the node, which is about to stop; wait for replies to sent
        operations, and send the others to its successor.
        """
        self._pause()
        self._retire()

    def on_lost(self, connection: Connection[Any]) -> None:
        self._ending.discard(connection)
        if connection in self._open.values():
            self._retire()
            self._ending.discard(connection)

    def drop(self) -> None:
        """Give up sent operations: the table says that the node is gone, and it does not reply."""
        self._pause()
        connections = self._cut(f"{self.address} was fenced before the answer came")
        for connection in connections:
            connection.lose(f"{self.address} was fenced before the answer came")

    def retire(self) -> None:
        """Send nothing more, and close once every sent operation is answered."""
        self._closed = True
        for lane, connecting in list(self._connecting.items()):
            connecting.cancel()
            self._wait_no_more(lane)
        self._retire()

    def _pause(self) -> None:
        """Stop opening connections to this node for a while; operations do not wait for one."""
        self._failed, self._again_at = True, self._operations.now() + _AGAIN_S

    def _retire(self) -> None:
        retired = list(self._open.values())
        self._open.clear()
        self._ending.update(retired)
        self._end_pool()
        for connection in retired:
            connection.retire()

    def _end_pool(self) -> None:
        if self._pool is not None:
            self._pool.retire()
            self._former_pools.append(self._pool)
            self._pool = None
        self._former_pools = [pool for pool in self._former_pools if pool.sockets]

    def _cut(self, why: str) -> list[Connection[Any]]:
        """Close the threads' sockets; return the loop's connections, for the caller to close."""
        self._end_pool()
        for pool in self._former_pools:
            pool.cut(why)
        return [*self._open.values(), *self._ending]

    async def close(self) -> None:
        self._closed = True
        connecting = list(self._connecting.values())
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        connections = self._cut("the client was closed before the answer came")
        for connection in connections:
            connection.close()
        self._messages.close("the client was closed before the answer came")
        if connections:
            lost = [asyncio.ensure_future(connection.lost.wait()) for connection in connections]
            await asyncio.wait(lost, timeout=_CLOSE_S_MAX)

    # --- replies that do not come -----------------------------------------------------------------

    def end_where_unanswered(self, single: PendingOperation) -> None:
        """Retire the connection of a write whose deadline has passed, and everything in flight
        there: otherwise the write could arrive whenever the network recovers.
        """
        for lane in (0, 1):
            connection = self._open.get(lane)
            if connection is not None and connection.waits_for(single):
                self._replace(lane, connection)

    def _replace(self, lane: int, connection: Connection[Any]) -> None:
        """Send nothing more on this connection; another one is opened for later operations."""
        del self._open[lane]  # so that its end does not count as the node's
        self._ending.add(connection)
        connection.retire()

    @property
    def silence_s(self) -> float:
        """Return for how many seconds the node has replied to none of the operations in flight."""
        silences = [one.silence_s for one in (*self._open.values(), *self._ending)]
        silences += [pool.silence_s for pool in self._former_pools]
        return max([*silences, self._pool.silence_s if self._pool is not None else 0.0])

    @property
    def last_request(self) -> RequestId | None:
        """The id of an operation that waits on a thread, or of the one sent last here."""
        pools = [*self._former_pools, *([self._pool] if self._pool is not None else [])]
        last = [pool.last_request for pool in pools]
        last += [one.last_request for one in (*self._open.values(), *self._ending)]
        return next((request for request in last if request is not None), None)

    def drain(self) -> list[PendingOperation]:
        """Remove and return the operations that were not sent; they may go to another node."""
        singles = [one for lane, one in self._open.items() if not _brings_messages(lane)]
        return [single for one in singles for single in one.take_queued()]

    def ask_elsewhere(self) -> None:
        """Give up reads and pages that were sent so long ago that another node should be asked. A
        message retires only its own lane: a scan may be slow at a node that answers everything
        else.
        """
        overdue = {lane: one for lane, one in self._open.items() if one.overdue()}
        for lane in filter(_brings_messages, overdue):
            # so that its end does not count as the node's
            self._ending.add(self._open.pop(lane))
        for connection in overdue.values():  # from here on operations may come back to this link
            connection.lose(f"{self.address}: no reply in time")


def _brings_messages(lane: int) -> bool:
    return lane in ROW_LANES or lane in PAGE_LANES
