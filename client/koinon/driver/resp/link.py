"""The way to one node and keyspace by RESP: what stands, what is being opened, and when it ends.

Connections of the loop's own, each a *lane*: one for reads and one for writes, since a node carries
out what comes on one in order, and a read would wait for the write before it; a few for reads of
many rows; and for pages of scans, which may wait there for long, as many as are asked for at a
time. They also hear when the node leaves, or is gone; then nothing more is sent on any connection
to it, threads' sockets included. While none can be had, operations go over gRPC, which finds out
what is wrong with the node.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from koinon.core import resp
from koinon.core.batching import PendingOperation
from koinon.core.exchange import Command, PendingMessage
from koinon.driver.channels import CONNECT_S_MAX
from koinon.driver.request_ids import RequestId
from koinon.driver.resp.connection import Connection, Operations
from koinon.driver.resp.messages import MessageRequests
from koinon.driver.resp.pool import Pool, Pools
from koinon_proto.security.names import ANY_SERVER
from koinon_proto.security.transport import PLAIN, Dialing

_SOON_S = 0.25
_AGAIN_S = 0.5
_CLOSE_S_MAX = 1.0
ROW_LANES = range(2, 10)
"""For reads of many rows: each goes to the lane that has the least to do."""
PAGE_LANES = range(10, 42)
"""Each has one page under way. What is asked for beyond these goes over gRPC."""


class RespLink:
    """Belongs to one event loop. ``address`` is the node's own, ``listener`` where it speaks RESP;
    all operations are in one keyspace. ``pools`` get one for both while a connection of the loop's
    stands, if there are any.
    """

    def __init__(
        self,
        address: str,
        listener: str,
        cluster_id: str,
        keyspace_id: int,
        operations: Operations[PendingOperation],
        pools: Pools | None,
        dialing: Dialing = PLAIN,
    ) -> None:
        self._dialing = dialing
        self.address = address
        self._listener = listener
        self._keyspace_id = keyspace_id
        self._hello = resp.hello(cluster_id, keyspace_id, dialing.token)
        self._operations = operations
        self._messages = MessageRequests(operations)
        self._pools = pools
        self._pool: Pool | None = None
        self._former_pools: list[Pool] = []  # ended; some of their sockets may wait for an answer
        self._loop = asyncio.get_running_loop()
        # Each by its lane.
        self._open: dict[int, Connection[Any]] = {}
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._queued: defaultdict[int, list[Any]] = defaultdict(list)
        self._ending: set[Connection[Any]] = set()  # nothing more is sent on them
        self._failed = False  # none could be had: nothing waits for the next attempt
        self._again_at = 0.0  # no attempt before
        self._closed = False

    def add(self, single: PendingOperation) -> bool:
        """Take an operation, to be sent at the end of this turn or as soon as there is a
        connection; return False if it is to go over gRPC.
        """
        return self._add(single, single.write)

    async def ask(self, message: PendingMessage, timeout_s: float) -> bool:
        """Send a message, and wait for what that comes to; return False if it is to go over gRPC.
        A caller that is cancelled leaves the reply to be dropped.
        """
        lane = None if message.command in self._messages.unknown else self._lane_for(message)
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
        """Return a lane for a message: one that has nothing to do, else, of those for rows, the one
        that has the least.
        """
        for_rows = message.command is Command.GET_MANY
        lanes = ROW_LANES if for_rows else PAGE_LANES
        free = next((lane for lane in lanes if not self._load(lane)), None)
        return min(lanes, key=self._load) if free is None and for_rows else free

    def _load(self, lane: int) -> int:
        """Return the number of messages of a lane that are not answered."""
        connection = self._open.get(lane)
        if connection is not None and connection.alive:
            return connection.load
        return len(self._queued[lane]) if lane in self._connecting else 0

    def _add(self, single: PendingOperation | PendingMessage, lane: int) -> bool:
        connection = self._open.get(lane)
        if connection is not None and connection.alive:
            connection.add(single)
            return True
        if self._closed:
            return False
        if lane not in self._connecting:
            if self._operations.now() < self._again_at:
                return False
            self._begin_to_connect(lane)
        if self._failed:
            return False
        self._queued[lane].append(single)
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
                await self._dialing.connect(lambda: connection, self._listener, ANY_SERVER)
                await connection.opened
        except (OSError, TimeoutError, ValueError):  # the last: what the table names is no address
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
                self.address, self._keyspace_id, connection.peer, self._hello
            )
        for single in self._queued.pop(lane, ()):
            if not single.done:
                connection.add(single)

    def _wait_no_more(self, lane: int) -> None:
        """Send what waits for a connection over gRPC, and so all that comes until there is a
        connection.
        """
        self._failed = True
        queued = [single for single in self._queued.pop(lane, ()) if not single.done]
        operations: Operations[Any] = self._messages if _brings_messages(lane) else self._operations
        operations.send_again(queued)

    # --- the node leaves, is gone, or is fenced ---------------------------------------------------

    def on_leaving(self) -> None:
        """Wait for the answers to what was sent; all else goes to the node's successor."""
        self._pause()
        self._retire()

    def on_lost(self, connection: Connection[Any]) -> None:
        self._ending.discard(connection)
        if connection in self._open.values():
            self._retire()
            self._ending.discard(connection)

    def drop(self) -> None:
        """The table says that the node is gone, and it answers nothing: give up what was sent."""
        self._pause()
        connections = self._cut(f"{self.address} was fenced before the answer came")
        for connection in connections:
            connection.lose(f"{self.address} was fenced before the answer came")

    def retire(self) -> None:
        """No operation needs this link any more: send nothing, and end once what was sent is
        answered.
        """
        self._closed = True
        for lane, connecting in list(self._connecting.items()):
            connecting.cancel()
            self._wait_no_more(lane)
        self._retire()

    def _pause(self) -> None:
        """Let no call wait for a connection to this node for a while."""
        self._failed, self._again_at = True, self._operations.now() + _AGAIN_S

    def _retire(self) -> None:
        retired = list(self._open.values())
        self._open.clear()
        self._ending.update(retired)
        self._messages.unknown.clear()  # another build may start there
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
        """End the threads' sockets; return the connections of the loop's, to be ended."""
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

    # --- answers that do not come -----------------------------------------------------------------

    @property
    def silence_s(self) -> float:
        """For how long the node has answered none of the operations that wait for it."""
        silences = [one.silence_s for one in (*self._open.values(), *self._ending)]
        silences += [pool.silence_s for pool in self._former_pools]
        return max([*silences, self._pool.silence_s if self._pool is not None else 0.0])

    @property
    def last_request(self) -> RequestId | None:
        """The id of an operation that waits on a thread, or was sent last here."""
        pools = [*self._former_pools, *([self._pool] if self._pool is not None else [])]
        last = [pool.last_request for pool in pools]
        last += [one.last_request for one in (*self._open.values(), *self._ending)]
        return next((request for request in last if request is not None), None)

    def drain(self) -> list[PendingOperation]:
        """Return the operations that were not sent: they may go elsewhere."""
        singles = [one for lane, one in self._open.items() if not _brings_messages(lane)]
        return [single for one in singles for single in one.take_queued()]

    def ask_elsewhere(self) -> None:
        """Give up reads and pages that were sent so long ago that they should be asked for again. A
        message takes only its own lane with it: a scan may be slow at a node that answers all else.
        """
        for lane, connection in list(self._open.items()):
            if not connection.overdue():
                continue
            if _brings_messages(lane):
                del self._open[lane]  # so that its end is not taken for that of the node
                self._ending.add(connection)
            connection.lose(f"{self.address}: no answer in time")


def _brings_messages(lane: int) -> bool:
    return lane in ROW_LANES or lane in PAGE_LANES
