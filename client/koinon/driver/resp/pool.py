"""Sockets of one node and keyspace, on which threads themselves send operations and fetch pages of
scans, without a hop to the event loop.

Only operations that succeed end here. All others go to the engine: an unsent operation as if it had
never been here, a sent one with its error. A socket is used by one operation at a time. If its
state is in doubt (an incomplete reply, an interrupted thread), it is closed, since replies have no
numbers. No lock is held while an operation is in flight.
"""

from __future__ import annotations

import functools
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

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
from koinon.driver.resp.tls import TlsSocket
from koinon_proto.contract.errors import DeadlinePassedError, KoinonError, UnknownFateError
from koinon_proto.security.names import ANY_SERVER
from koinon_proto.security.transport import PLAIN, Dialing

T = TypeVar("T")

SOCKETS_MAX = 32
_SLICE_S = 0.5  # a wait; after each the engine checks whether the node is still there
_CONNECT_S_MAX = 0.25
_LEAST_S = 0.05  # the least time before a deadline; with less the engine takes the operation
_RECEIVE_BYTES = 16 * 1024
_RECEIVE_BYTES_MORE = 256 * 1024  # once a reply is known to be large
_FORGOTTEN_S = 1.0  # after the deadline of a socket's operation: its thread is no longer using it
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Pools:
    """The pools of a client. Threads find a pool by node and keyspace; ``on_late`` is called on the
    waiting thread when a reply is late.
    """

    def __init__(
        self,
        on_late: Callable[[], None],
        dialing: Dialing = PLAIN,
        *,
        sockets_max: int = SOCKETS_MAX,
    ) -> None:
        self.by_place: dict[tuple[str, int], Pool] = {}
        """By the node's address and the keyspace's id. A pool that has ended sends nothing."""
        self._dialing = dialing
        self._on_late = on_late
        self._sockets_max = sockets_max

    @property
    def in_use(self) -> int:
        """The number of operations in flight on threads' sockets."""
        return sum(pool.in_use for pool in list(self.by_place.values()))

    def open(self, address: str, keyspace_id: int, peer: tuple[int, Any], hello: bytes) -> Pool:
        pool = Pool(
            address, peer, hello, self._on_late, self._dialing, sockets_max=self._sockets_max
        )
        self.by_place[address, keyspace_id] = pool
        return pool

    def let_go(self) -> None:
        """In a forked child: close the descriptors, but leave the connections to the parent, which
        still uses them.
        """
        for pool in self.by_place.values():
            for one in pool.sockets:
                one.let_go()


class Pool:
    """Threads call ``send``; the loop ends the pool. Once ended it sends nothing more."""

    def __init__(
        self,
        address: str,
        peer: tuple[int, Any],
        hello: bytes,
        on_late: Callable[[], None],
        dialing: Dialing,
        *,
        sockets_max: int,
    ) -> None:
        self.dialing = dialing
        self._address = address
        self._peer = peer
        self._hello = hello
        self.on_late = on_late  # called on any thread when a reply is late
        self._idle: deque[Socket] = deque()  # the socket used last at the right end
        self._sockets_max = sockets_max
        self.sockets: set[Socket] = set()
        """The open sockets: idle, in use by a thread, or left behind by a thread that a signal
        handler has interrupted (``_close_forgotten``).
        """
        self._opening = (
            threading.RLock()
        )  # reentrant: a signal handler of the thread that holds it may call, too
        self._ended = False
        self.cut_because = ""  # why the sockets in use were cut, if they were

    @property
    def in_use(self) -> int:
        """The number of operations in flight on this pool's sockets."""
        return max(0, len(self.sockets) - len(self._idle))

    @property
    def silence_s(self) -> float:
        """Return for how many seconds the node has not replied to an operation that is late."""
        late = [one.late_since for one in list(self.sockets) if one.late_since]
        return time.monotonic() - min(late) if late else 0.0

    @property
    def last_request(self) -> RequestId | None:
        """The id of an operation that is late."""
        return next((one.request for one in list(self.sockets) if one.late_since), None)

    def send(
        self, single: PendingOperation | PendingMessage, routing: Routing
    ) -> KoinonError | None:
        """Send an operation and wait for its reply. Afterwards it has ended; or the error of its
        attempt is returned; or None if it was not sent.
        """
        left_s = single.deadline - time.monotonic()
        if left_s < _LEAST_S:
            return None
        usable = False
        held = self._take()
        try:
            if held is None:
                held = self._open(min(_CONNECT_S_MAX, left_s / 2))
                if held is None:
                    return None
            elif held.readable() or held.is_outdated():  # the node leaves, or is gone
                return None
            held.used_until = single.deadline
            error = held.exchange(single, routing, left_s)
            usable = held.usable
            return error
        finally:
            if usable and held is not None:
                self._idle.append(held)
                if self._ended:
                    self._close_idle()
            elif held is not None:
                self.sockets.discard(held)
                held.close()

    def _take(self) -> Socket | None:
        """Remove and return an idle socket; None: there is none, and the caller may open one."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _has_room(self) -> bool:
        """Return whether one more socket may be opened."""
        if len(self.sockets) >= self._sockets_max:
            self._close_forgotten()
        return len(self.sockets) < self._sockets_max

    def _close_forgotten(self) -> None:
        """Close sockets in use whose operation must have ended long ago: their threads were
        interrupted before they could return them.
        """
        before, idle = time.monotonic() - _FORGOTTEN_S, set(self._idle)
        for one in list(self.sockets):
            if one not in idle and one.used_until < before:
                self.sockets.discard(one)
                one.close()

    def _open(self, timeout_s: float) -> Socket | None:
        if self._ended:
            return None
        with self._opening:
            if not self._has_room():
                return None
            opened = Socket(self._address, self, self._peer[0])
            self.sockets.add(opened)
        stands = False
        try:
            stands = not self._ended and opened.connect(self._peer[1], self._hello, timeout_s)
        finally:
            if not stands:
                self.sockets.discard(opened)
                opened.close()
        return opened if stands else None

    # --- the end, from the loop -----------------------------------------------------------------

    def retire(self) -> None:
        """Close the idle sockets now, and the others as soon as their operations are answered."""
        self._ended = True
        self._close_idle()

    def cut(self, reason: str) -> None:
        """Close all sockets; operations in flight end with an unknown fate."""
        self.cut_because = reason
        self.retire()
        for one in list(self.sockets):
            one.shutdown()

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                idle = self._idle.pop()
                self.sockets.discard(idle)
                idle.close()


class Socket:
    """One connection for threads. While a thread uses it, other threads may call only
    ``shutdown``.
    """

    def __init__(self, address: str, pool: Pool, family: int) -> None:
        self.usable = False  # after a complete exchange: the socket may be used again
        self.used_until = time.monotonic()  # the deadline of its last operation
        # while a reply is late: when its command was sent (``time.monotonic``)
        self.late_since = 0.0
        self.request: RequestId | None = None  # of the operation that was sent last
        self._address = address
        self._pool = pool
        self._slice_s = 0.0  # the timeout that the kernel has for its system calls
        self._pushed = False  # the node has announced that it leaves
        self._clock: NodeClock | None = None  # the node's clock, once KOINON.HELLO has succeeded
        self._reader = hiredis.Reader()
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._wire: socket.socket | TlsSocket = self._socket  # the TLS layer, or the plain socket
        # held so that the descriptor is not reused while it is shut down
        self._closing = threading.Lock()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        self._poll = poll.poll

    def connect(self, peer: Any, hello: bytes, timeout_s: float) -> bool:
        """Connect and send KOINON.HELLO; return whether the node has accepted this client."""
        sock = self._socket
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            reset_at_close(sock)
            for option, value in _KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            self._wait_at_most(timeout_s)
            sock.connect(peer)
            if (context := self._pool.dialing.context()) is not None:
                self._wire = TlsSocket(sock, context, ANY_SERVER)
                self._wire.handshake()
            asked_at = time.monotonic()
            self._wire.send(hello)
            self._reader.feed(self._wire.recv(_RECEIVE_BYTES))
            welcome = self._reader.gets()
            self._wait_at_most(_SLICE_S)
        except (OSError, hiredis.ProtocolError):
            return False
        if type(welcome) is not bytes or self._reader.has_data():
            return False
        self._clock = of_welcome(welcome, asked_at)
        return True

    def is_outdated(self) -> bool:
        """Return whether the node's clock is no longer known well enough."""
        return self._clock is not None and self._clock.is_old(time.monotonic())

    def readable(self) -> bool:
        """Return whether an idle socket has something to read, or its end."""
        wire = self._wire
        return bool(self._poll(0)) or (type(wire) is TlsSocket and wire.holds)

    def exchange(
        self, single: PendingOperation | PendingMessage, routing: Routing, left_s: float
    ) -> KoinonError | None:
        """Send the operation's command and read its reply; results are those of ``Pool.send``."""
        self.usable = False
        request = single.request
        if request is None:
            request = single.request = RequestId()
        self.request = request
        buffers = resp.command(
            single, routing.table.table_version, request.next_call(), self._clock
        )
        sock = self._wire
        try:
            self._wait_at_most(min(_SLICE_S, left_s))
            sent = sock.send(buffers[0]) if len(buffers) == 1 else sock.sendmsg(buffers)
        except OSError:  # not a byte was sent
            return None
        single.sent, single.revision = True, routing.revision
        try:
            if sent < sum(map(len, buffers)):
                self._send_rest(single, memoryview(b"".join(buffers))[sent:])
            reply = self._receive(single)
            if type(reply) is hiredis.ReplyError:
                error = error_of(str(reply))
                # The node refused a write as late that was in time: the two clocks have drifted
                # apart.
                self.usable = not (self._leaves() or isinstance(error, DeadlinePassedError))
                return error
            single.result = resp.result_of(single, reply)
        except _OverdueError:
            return self._overdue(single)
        except (OSError, hiredis.ProtocolError, ValueError) as failure:
            return UnknownFateError(reason=self._pool.cut_because or f"{self._address}: {failure}")
        single.done = True
        self.usable = not self._leaves()
        return None

    def _leaves(self) -> bool:
        """Return whether a push message came with a reply: then nothing more is sent."""
        wire = self._wire
        held = type(wire) is TlsSocket and wire.holds
        return self._pushed or held or bool(self._reader.has_data())

    def _send_rest(self, single: PendingOperation | PendingMessage, rest: memoryview) -> None:
        while rest:
            sent = self._patiently(single, functools.partial(self._wire.send, rest))
            rest = rest[sent:]

    def _receive(self, single: PendingOperation | PendingMessage) -> Any:
        """Read and return the reply.

        Raises:
            OSError, hiredis.ProtocolError: the connection failed.
            _OverdueError: no reply came in time.
        """
        sock, reader = self._wire, self._reader
        try:
            received = sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            received = self._patiently(
                single, lambda: sock.recv(_RECEIVE_BYTES), waited_s=self._slice_s
            )
        while received:
            reader.feed(received)
            while type(reply := reader.gets()) is hiredis.PushNotification:
                self._pushed = True
            if reply is not False:
                return reply
            received = self._patiently(single, lambda: sock.recv(_RECEIVE_BYTES_MORE))
        raise ConnectionResetError("the connection was lost")

    def _patiently(
        self,
        single: PendingOperation | PendingMessage,
        call: Callable[[], T],
        *,
        waited_s: float = 0.0,
    ) -> T:
        """Repeat a call that times out after a slice of waiting, while the attempt has time. After
        a first slice the engine is told that the reply is late.

        Raises:
            _OverdueError: the time is over.
        """
        began = time.monotonic() - waited_s
        until = single.deadline
        if not single.write:
            until = began + attempt_timeout_s(until - began, write=False)
        try:
            while True:
                now = time.monotonic()
                if now >= until:
                    raise _OverdueError
                if now - began >= _SLICE_S:
                    self.late_since = began
                    self._pool.on_late()
                self._wait_at_most(min(_SLICE_S, until - now))
                with suppress(BlockingIOError):
                    return call()
        finally:
            self.late_since = 0.0

    def _overdue(self, single: PendingOperation | PendingMessage) -> KoinonError | None:
        if time.monotonic() < single.deadline:
            return UnknownFateError(reason=f"{self._address}: no reply in time")
        single.expire()
        return None

    def _wait_at_most(self, slice_s: float) -> None:
        """Set the kernel's timeout of this socket's system calls: Python's own timeouts cost
        another system call for each.
        """
        if slice_s != self._slice_s:
            self._slice_s = slice_s
            span = struct.pack("ll", *divmod(round(slice_s * 1e6) + 1, 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)

    def shutdown(self) -> None:
        """Wake the thread that waits on this socket: its connection counts as lost."""
        with self._closing, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def let_go(self) -> None:
        """Close the descriptor, but not the connection."""
        self._socket.close()

    def close(self) -> None:
        self.shutdown()  # a forked child may hold the socket open
        with self._closing:
            self._socket.close()


class _OverdueError(Exception):
    """An attempt has used up its time."""
