"""One RESP connection of the event loop: commands go out in order, replies come in that order.

Operations that were added in one turn of the loop leave in one write. Nothing waits for a reply but
the operation that it answers; one that has ended meanwhile (its deadline passed, its caller is
gone) keeps its place in the order, and its reply is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import hiredis

from koinon.core import resp
from koinon.core.batching import PendingOperation
from koinon.core.exchange import PendingMessage
from koinon.core.node_clock import NodeClock, of_welcome
from koinon.core.operations import attempt_timeout_s
from koinon.core.routing import Routing
from koinon.driver.request_ids import RequestId
from koinon.driver.resets import reset_at_close
from koinon.driver.resp.replies import error_of
from koinon_proto.contract.errors import (
    ClientClosedError,
    DeadlinePassedError,
    KoinonError,
    UnknownFateError,
)

IN_FLIGHT_MAX = 1_000
"""Operations that may be sent and not answered. Others wait: they can still go elsewhere."""
_BUFFER_BYTES = 64 * 1024
_WRITE_BYTES = 256 * 1024
"""About what one write takes; the transport says then whether it can take more."""


E = TypeVar("E", PendingOperation, PendingMessage)


class Operations(Protocol[E]):
    """The owner of a connection's operations, as the connection sees it."""

    @property
    def now(self) -> Callable[[], float]: ...

    def routing(self) -> Routing: ...

    def watch_answers(self) -> None:
        """Look after nodes that do not answer."""

    def send_again(self, singles: Sequence[E]) -> None:
        """Take back operations that were not sent."""

    def settle_failed(self, failed: list[tuple[E, KoinonError]]) -> None:
        """Take back operations that were sent, and not served, with their errors."""


class Owner(Protocol):
    """The owner of connections; the connections report to it."""

    def on_leaving(self) -> None:
        """The node is about to stop."""

    def on_lost(self, connection: Connection[Any]) -> None:
        """The connection has ended."""


class Connection(asyncio.BufferedProtocol, Generic[E]):
    """Reads, or writes, or messages, of one node. Belongs to one event loop."""

    def __init__(self, address: str, hello: bytes, owner: Owner, operations: Operations[E]) -> None:
        self._address = address
        self._hello = hello
        self._owner = owner
        self._operations: Operations[E] = operations
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader: Any = hiredis.Reader()
        self._buffer = bytearray(_BUFFER_BYTES)  # what arrives; the reader copies from it
        self._view = memoryview(self._buffer)
        self._queue: deque[E] = deque()  # not sent yet
        self._waiting: deque[E] = deque()  # sent, in the order of their replies
        self._flush_due = False
        self._paused = False  # the transport holds as much as it will
        self._retired = False  # nothing is sent any more; ends with the last reply
        self._silent_since = 0.0  # while some wait: when the first was sent, or bytes arrived
        self.last_request: RequestId | None = None  # of the operation that was sent last
        self._is_behind = False  # a write was refused as late which was not: the clocks differ
        self._asked_at = 0.0  # when the first command, KOINON.HELLO, was sent
        self._clock: NodeClock | None = None  # the node's, once it has let this client in
        self.opened: asyncio.Future[bool] = self._loop.create_future()
        """Ends with the answer whether the node has let this client in."""
        self.lost = asyncio.Event()
        """Set once the socket is closed, if there was one."""

    @property
    def alive(self) -> bool:
        """True while operations may be added."""
        return self._transport is not None and not self._retired

    def is_outdated(self) -> bool:
        """Return whether a new connection should take this one's place: the node's clock is not
        known well enough any more.
        """
        clock = self._clock
        return clock is not None and (self._is_behind or clock.is_old(self._operations.now()))

    @property
    def load(self) -> int:
        """The number of operations that were added and are not answered."""
        return len(self._waiting) + len(self._queue)

    @property
    def peer(self) -> tuple[int, Any]:
        """The address family and the address of the other end."""
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        return sock.family, self._transport.get_extra_info("peername")

    @property
    def silence_s(self) -> float:
        """For how long the node has sent nothing while operations wait."""
        return self._operations.now() - self._silent_since if self._waiting else 0.0

    def overdue(self) -> bool:
        """Return whether a read has waited so long that it should be asked elsewhere."""
        now = self._operations.now()
        return any(
            not single.write
            and now - single.sent_at
            >= attempt_timeout_s(max(1.0, single.deadline - single.sent_at), write=False)
            for single in self._waiting
        )

    # --- sending --------------------------------------------------------------------------------

    def add(self, single: E) -> None:
        """Send an operation at the end of this turn, with those that are added meanwhile."""
        self._queue.append(single)
        self._flush_soon()

    def take_queued(self) -> list[E]:
        """Return what was not sent: it goes another way."""
        queued = [single for single in self._queue if not single.done]
        self._queue.clear()
        return queued

    def _flush_soon(self) -> None:
        if not (self._flush_due or self._paused) and len(self._waiting) < IN_FLIGHT_MAX:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._transport is None or self._paused or not self._queue:
            return
        operations, queue, waiting = self._operations, self._queue, self._waiting
        try:
            routing = operations.routing()
        except ClientClosedError:
            return  # what is queued ends with the client
        table_version, now = routing.table.table_version, operations.now()
        if not waiting:
            self._silent_since = now
        room, size = IN_FLIGHT_MAX - len(waiting), 0
        out: list[bytes] = []
        while queue and room > 0 and size < _WRITE_BYTES:
            single = queue.popleft()
            if not single.begin_attempt():
                continue
            request = single.request
            if request is None:
                request = single.request = RequestId()
            out += resp.command(single, table_version, request.next_call(), self._clock)
            size += len(single.value)
            single.sent_at, single.revision = now, routing.revision
            waiting.append(single)
            room -= 1
            self.last_request = request
        if out:
            operations.watch_answers()
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        if queue:
            self._flush_soon()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._queue:
            self._flush_soon()

    # --- receiving ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        reset_at_close(transport.get_extra_info("socket"))
        self._asked_at = self._operations.now()
        self._transport.write(self._hello)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._view  # TLS takes slices of it, which of a bytearray would be copies

    def buffer_updated(self, nbytes: int) -> None:
        self._silent_since = self._operations.now()
        failed: list[tuple[E, KoinonError]] = []
        try:
            self._reader.feed(self._buffer, 0, nbytes)
            self._take_replies(failed)
        except (hiredis.ProtocolError, ValueError) as error:
            self._settle(failed)
            self.lose(f"{self._address} cannot be understood: {error}")
            return
        self._settle(failed)
        if self._retired and not self._waiting:
            self._end()
        elif self._queue:
            self._flush_soon()

    def _take_replies(self, failed: list[tuple[E, KoinonError]]) -> None:
        """End the operations whose replies are whole; add those that failed to ``failed``."""
        gets, waiting, result_of = self._reader.gets, self._waiting, resp.result_of
        while (reply := gets()) is not False:
            kind = type(reply)
            if kind is hiredis.PushNotification:
                if reply and reply[0] == resp.LEAVING:
                    self._owner.on_leaving()
                    self.retire()
            elif not self.opened.done():
                self._let_in(reply)
            elif not waiting:
                raise ValueError("a reply to nothing")
            elif kind is hiredis.ReplyError:
                error = error_of(str(reply))  # it may raise, so the place is kept
                if isinstance(error, DeadlinePassedError) and not waiting[0].done:
                    self._is_behind = True
                failed.append((waiting.popleft(), error))
            else:
                result = result_of(waiting[0], reply)
                waiting.popleft().succeed(result)

    def _let_in(self, reply: Any) -> None:
        if type(reply) is not bytes:
            raise ValueError(f"no welcome: {reply}")
        self._clock = of_welcome(reply, self._asked_at)
        self.opened.set_result(True)

    def _settle(self, failed: list[tuple[E, KoinonError]]) -> None:
        if failed:
            self._operations.settle_failed(failed)

    # --- the end --------------------------------------------------------------------------------

    def retire(self) -> None:
        """Send nothing more, and end once all that was sent is answered, or has had its time: what
        the kernel holds of it then never arrives.
        """
        if self._retired:
            return
        self._retired = True
        self._operations.send_again(self.take_queued())
        if not self._waiting:
            self._end()
            return
        last = max(single.deadline for single in self._waiting)
        self._loop.call_later(max(0.0, last - self._operations.now()), self._cut_if_open)

    def waits_for(self, single: E) -> bool:
        """Return whether the operation was sent here and is not answered."""
        return single in self._waiting

    def _cut_if_open(self) -> None:
        if self._transport is not None:
            self.lose(f"{self._address}: no answer in time")

    def _end(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            if transport.can_write_eof():
                transport.write_eof()  # a child of a fork may hold the socket open
            transport.close()

    def lose(self, reason: str) -> None:
        """Cut the connection: operations that were sent end with an unknown fate, queued ones are
        sent another way.
        """
        self.close()
        unknown: list[tuple[E, KoinonError]] = [
            (single, UnknownFateError(reason=reason)) for single in self._waiting if not single.done
        ]
        self._waiting.clear()
        self._settle(unknown)
        self._operations.send_again(self.take_queued())

    def connection_lost(self, exc: Exception | None) -> None:
        why = f": {exc}" if exc else ""
        self.lose(f"the connection to {self._address} was lost{why}")
        self._owner.on_lost(self)
        self.lost.set()

    def close(self) -> None:
        """Cut the connection. What becomes of its operations is the caller's to say."""
        if not self.opened.done():
            self.opened.set_result(False)
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
