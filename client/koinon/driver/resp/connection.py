"""One RESP connection of the event loop: commands are sent in order, and replies arrive in that
order.

Operations that are added in one turn of the loop are sent in one write. No operation waits for
another one's reply; if an operation has ended meanwhile (its deadline passed, or its caller is
gone), its place in the order is kept, and its reply is dropped.
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
"""The limit of operations in flight. Further ones wait, and can still be sent elsewhere."""
_BUFFER_BYTES = 64 * 1024
_WRITE_BYTES = 256 * 1024
"""The approximate bytes of one write; after each the transport says whether it accepts more."""


E = TypeVar("E", PendingOperation, PendingMessage)


class Operations(Protocol[E]):
    """The owner of the operations, as a connection calls it."""

    @property
    def now(self) -> Callable[[], float]: ...

    def routing(self) -> Routing: ...

    def watch_answers(self) -> None:
        """Begin to check for nodes that do not reply."""

    def send_again(self, singles: Sequence[E]) -> None:
        """Take back operations that were not sent."""

    def settle_failed(self, failed: list[tuple[E, KoinonError]]) -> None:
        """Take back operations that were sent and refused, with their errors."""


class Owner(Protocol):
    """The owner of connections, which they report to."""

    def on_leaving(self) -> None:
        """Note that the node is about to stop."""

    def on_lost(self, connection: Connection[Any]) -> None:
        """Note that the connection has ended."""


class Connection(asyncio.BufferedProtocol, Generic[E]):
    """A connection for reads, for writes, or for messages to one node. Belongs to one event
    loop.
    """

    def __init__(self, address: str, hello: bytes, owner: Owner, operations: Operations[E]) -> None:
        self._address = address
        self._hello = hello
        self._owner = owner
        self._operations: Operations[E] = operations
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader: Any = hiredis.Reader()
        self._buffer = bytearray(_BUFFER_BYTES)  # received bytes; the reader copies from it
        self._view = memoryview(self._buffer)
        self._queue: deque[E] = deque()  # not sent yet
        self._waiting: deque[E] = deque()  # in flight, in the order of their replies
        self._flush_due = False
        self._paused = False  # the transport's buffer is full
        self._retired = False  # nothing is sent any more; the connection ends after the last reply
        # while operations are in flight: when the first was sent, or bytes last arrived
        self._silent_since = 0.0
        self.last_request: RequestId | None = None  # of the operation that was sent last
        # the node refused a write as late that was in time: the clocks differ
        self._is_behind = False
        self._asked_at = 0.0  # when the first command, KOINON.HELLO, was sent
        self._clock: NodeClock | None = None  # the node's clock, once KOINON.HELLO has succeeded
        self.opened: asyncio.Future[bool] = self._loop.create_future()
        """Resolves to True if the node has accepted this client, else to False."""
        self.lost = asyncio.Event()
        """Set once the socket is closed, or if there was none."""

    @property
    def alive(self) -> bool:
        """True while operations may be added."""
        return self._transport is not None and not self._retired

    def is_outdated(self) -> bool:
        """Return whether a new connection should replace this one, because the node's clock is no
        longer known well enough.
        """
        clock = self._clock
        return clock is not None and (self._is_behind or clock.is_old(self._operations.now()))

    @property
    def load(self) -> int:
        """The number of operations that are queued or in flight."""
        return len(self._waiting) + len(self._queue)

    @property
    def peer(self) -> tuple[int, Any]:
        """The address family and the address of the peer."""
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        return sock.family, self._transport.get_extra_info("peername")

    @property
    def silence_s(self) -> float:
        """Return for how many seconds the node has sent nothing while operations are in flight."""
        return self._operations.now() - self._silent_since if self._waiting else 0.0

    def overdue(self) -> bool:
        """Return whether a read has waited so long that it should be sent to another node."""
        now = self._operations.now()
        return any(
            not single.write
            and now - single.sent_at
            >= attempt_timeout_s(max(1.0, single.deadline - single.sent_at), write=False)
            for single in self._waiting
        )

    # --- sending --------------------------------------------------------------------------------

    def add(self, single: E) -> None:
        """Send an operation at the end of this turn of the loop, with the others added in it."""
        self._queue.append(single)
        self._flush_soon()

    def take_queued(self) -> list[E]:
        """Remove and return the operations that were not sent, for another connection."""
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
            return  # queued operations end with the client
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
        return self._view  # TLS reads slices of it, and slices of a bytearray would be copies

    def buffer_updated(self, nbytes: int) -> None:
        self._silent_since = self._operations.now()
        failed: list[tuple[E, KoinonError]] = []
        try:
            self._reader.feed(self._buffer, 0, nbytes)
            self._take_replies(failed)
        except (hiredis.ProtocolError, ValueError) as error:
            self._settle(failed)
            self.lose(f"{self._address} sent an invalid reply: {error}")
            return
        self._settle(failed)
        if self._retired and not self._waiting:
            self._end()
        elif self._queue:
            self._flush_soon()

    def _take_replies(self, failed: list[tuple[E, KoinonError]]) -> None:
        """End the operations whose replies are complete; append the failed ones to ``failed``."""
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
                raise ValueError("a reply without a command")
            elif kind is hiredis.ReplyError:
                # the conversion may raise, so the operation keeps its place until then
                error = error_of(str(reply))
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
        """Send nothing more, and close once every sent operation is answered or its deadline has
        passed: data still in the kernel then never arrives.
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
        """Return whether the operation is in flight on this connection."""
        return single in self._waiting

    def _cut_if_open(self) -> None:
        if self._transport is not None:
            self.lose(f"{self._address}: no reply in time")

    def _end(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            if transport.can_write_eof():
                transport.write_eof()  # a forked child may hold the socket open
            transport.close()

    def lose(self, reason: str) -> None:
        """Abort the connection: operations in flight end with an unknown fate, queued ones are sent
        again elsewhere.
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
        """Abort the connection without ending its operations: the caller decides about them."""
        if not self.opened.done():
            self.opened.set_result(False)
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
