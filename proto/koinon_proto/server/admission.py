"""Admission of calls: decides when a call's message is received, by the memory that earlier calls
still hold.

gRPC receives a message once its handler asks for it; until then the sender may not send more than
a window of some 64 KiB. So a call that has to wait costs next to nothing, and what a server holds
is decided here: a message that is being received counts as the largest one, from then on as what
it has, and the answer counts until it has left, which a caller who does not read can put off.

All of it is counted for each connection, for each host (an address, or the /64 of an IPv6 one) and
for all together, each with a limit of its own: one that fills its share waits alone. The first
call of a connection passes its host's limit, and has a quarter more room than the others.

Calls are in one of two lanes that share nothing, the data's and the control's. A connection that
has proven to be a member's (``trust``) waits for none but itself, so that heartbeats go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from time import monotonic
from typing import Any

from koinon_proto.contract.errors import ResourceExhaustedError, UnavailableError
from koinon_proto.contract.table import MAX_MESSAGE_BYTES
from koinon_proto.server.connections import host_of

log = logging.getLogger(__name__)

REPLY_BYTES = 64 * 1024
"""The bytes that an answer counts as before it is known, if its method says nothing else."""
_TRUST_S = 60.0
_TRUSTED_MAX = 4_096
_RECEIVE_S = 30.0
_LEAVE_S, _CONTENDED_LEAVE_S = 60.0, 10.0
_LOG_S = 60.0  # the refusals of places are logged at most so often
_FIRST_MORE = 1.25
"""Of the limit of all, for a connection that has nothing else under way."""


class Refusal(Enum):
    """The reason why a call was not served, or was cut short."""

    WAITING = "waiting"  # too many wait
    SLOW_REQUEST = "slow_request"  # its message did not come in time
    ANSWERS = "answers"  # answers that have not left hold enough
    STUCK_ANSWER = "stuck_answer"  # its connection, which takes no answers, was closed


@dataclass(frozen=True, kw_only=True)
class Share:
    """The limits for the calls under way of one connection, one host, or a whole lane."""

    calls: int
    request_bytes: int
    reply_bytes: int


@dataclass(frozen=True, kw_only=True)
class LaneLimits:
    """The limits of a lane. ``waiting`` calls may wait at once, half of them a host's. A message
    counts as ``message_bytes``, the largest, while it is being received: how long it is shows at
    its end only.
    """

    connection: Share
    host: Share
    all: Share
    waiting: int = 2_048
    message_bytes: int = MAX_MESSAGE_BYTES
    patience_s: float = 2.0
    """The time that a message may take to come while other connections wait."""


class _Use:
    """The calls and bytes that a connection, a host or a lane has under way."""

    __slots__ = ("calls", "limit", "reply_bytes", "request_bytes", "waiting")

    def __init__(self, limit: Share) -> None:
        self.limit = limit
        self.calls = 0
        self.waiting = 0
        self.request_bytes = 0
        self.reply_bytes = 0

    def has_room(self, request_bytes: int, reply_bytes: int, more: float = 1.0) -> bool:
        """Return whether a call fits into the limits, or into ``more`` times these."""
        limit = self.limit
        return (
            self.calls < limit.calls * more
            and self.request_bytes + request_bytes <= max(limit.request_bytes * more, request_bytes)
            and self.reply_bytes + reply_bytes <= max(limit.reply_bytes * more, reply_bytes)
        )


class _Connection(_Use):
    __slots__ = ("host", "host_name", "peer", "waiters")

    def __init__(self, peer: str, host_name: str, host: _Use, limit: Share) -> None:
        super().__init__(limit)
        self.peer = peer
        self.host_name = host_name
        self.host = host
        self.waiters: deque[Call] = deque()


class Call:
    """One call and the memory that it holds. ``ended`` releases it, in whatever state the call
    is.
    """

    __slots__ = (
        *("_admitted", "_connection", "_held_bytes", "_is_counted", "_lane", "_reply_bytes"),
        *("_reply_reserved", "_request_bytes", "began", "is_cut", "task"),
    )

    def __init__(self, lane: Lane, connection: _Connection, reply_reserved: int) -> None:
        self._lane = lane
        self._connection = connection
        self._reply_reserved = reply_reserved
        self._admitted: asyncio.Future[None] | None = None  # while it waits
        self._is_counted = False  # among the calls, and with the bytes below
        self._request_bytes = 0
        self._reply_bytes = 0  # the greater of what is reserved and what is held
        self._held_bytes = 0
        self.began = 0.0
        """The time at which the message began to be received; then, at which the answer began to
        leave.
        """
        self.task: asyncio.Task[Any] | None = None
        self.is_cut = False
        """Its task is cancelled because the message did not come in time."""

    @property
    def peer(self) -> str:
        return self._connection.peer

    def admit(self) -> bool:
        """Return whether the call's message may be received right now."""
        connection = self._connection
        if connection.waiters or not self._lane.has_room(connection, self._reply_reserved):
            return False
        self._take()
        return True

    async def admitted(self) -> None:
        """Wait until the call's message may be received.

        Raises:
            ResourceExhaustedError: too many wait already.
        """
        if self.admit():
            return
        self._lane.queue(self)
        self._admitted = asyncio.get_running_loop().create_future()
        await self._admitted

    def received(self, size: int) -> None:
        """Note that the message has arrived, with ``size`` bytes."""
        self._lane.receiving.pop(self, None)
        self._change(size - self._request_bytes, 0)
        self._lane.seen(size)

    def hold(self, size: int) -> None:
        """Count ``size`` more bytes that are held for the answer, until this has left.

        Raises:
            ResourceExhaustedError: its connection, its host or all together hold enough.
        """
        connection, own, every = self._connection, self._reply_bytes, self._lane.all
        more = max(self._held_bytes + size - own, 0)
        uses = [(connection, "connection", 1.0), (connection.host, "host", 1.0), (every, "", 1.0)]
        if connection.reply_bytes == own:
            uses = [(every, "", _FIRST_MORE)]
        for use, whose, factor in uses:
            limit = int(use.limit.reply_bytes * factor)
            if use.reply_bytes > own and use.reply_bytes + more > limit:
                self._lane.refusals[Refusal.ANSWERS] += 1
                of = f" of one {whose}" if whose else ""
                raise ResourceExhaustedError(
                    resource=f"bytes of answers{of} that have not left", limit=limit
                )
        self._held_bytes += size
        self._change(0, more)
        self._lane.seen(size)

    def replied(self, size: int) -> None:
        """Note that the answer, of ``size`` bytes, is made and being sent."""
        self._change(-self._request_bytes, size - self._reply_bytes)
        self.began = self._lane.now()
        self._lane.leaving[self] = None
        self._lane.seen(size)

    def streams(self) -> None:
        """Note that the call goes on as a stream, with limits of its own: it holds no memory
        here.
        """
        self.ended()

    def trust(self) -> None:
        """Note that the connection is a member's: it waits for no other connection from now on."""
        self._lane.trust(self._connection)

    def is_from_member_host(self) -> bool:
        """Return whether a member has spoken from its host lately."""
        return self._lane.is_trusted(self._connection.host_name)

    def ended(self, _context: object = None) -> None:
        """Note the call's end: its answer has left or never will."""
        lane = self._lane
        lane.receiving.pop(self, None)
        lane.leaving.pop(self, None)
        if self._is_counted:
            self._is_counted = False
            self._count(-1, -self._request_bytes, -self._reply_bytes)
            self._request_bytes = self._reply_bytes = 0
        elif self._admitted is not None:
            self._admitted = None
            lane.unqueue(self)
        if lane.waiting:
            lane.wake()

    def _take(self) -> None:
        self._is_counted = True
        self._request_bytes, self._reply_bytes = self._lane.message_bytes, self._reply_reserved
        self._count(1, self._request_bytes, self._reply_bytes)
        self.began = self._lane.now()
        self._lane.receiving[self] = None

    def grant(self) -> None:
        """Admit the call: it waits no more."""
        admitted, self._admitted = self._admitted, None
        self._take()
        if admitted is not None and not admitted.done():
            admitted.set_result(None)

    def _change(self, request_bytes: int, reply_bytes: int) -> None:
        if not self._is_counted:
            return
        self._request_bytes += request_bytes
        self._reply_bytes += reply_bytes
        self._count(0, request_bytes, reply_bytes)
        if self._lane.waiting and (request_bytes < 0 or reply_bytes < 0):
            self._lane.wake()

    def _count(self, calls: int, request_bytes: int, reply_bytes: int) -> None:
        connection = self._connection
        for use in (connection, connection.host, self._lane.all):
            use.calls += calls
            use.request_bytes += request_bytes
            use.reply_bytes += reply_bytes

    @property
    def reply_reserved(self) -> int:
        return self._reply_reserved

    @property
    def connection(self) -> _Connection:
        return self._connection


class Lane:
    """The calls of one lane. All methods belong to the event loop's thread."""

    def __init__(self, limits: LaneLimits, now: Callable[[], float] = monotonic) -> None:
        self.limits = limits
        self.refusals = dict.fromkeys(Refusal, 0)
        """The number of times that each has happened."""
        self.message_bytes = limits.message_bytes
        self.now = now
        self.all = _Use(limits.all)
        self.receiving: dict[Call, None] = {}  # the oldest first
        self.leaving: dict[Call, None] = {}  # the same
        self.waiting = 0
        self.large_bytes = 0
        """The bytes of large messages and answers since this was last set to 0."""
        self._connections: dict[str, _Connection] = {}
        self._hosts: dict[str, _Use] = {}
        self._queue: OrderedDict[_Connection, None] = OrderedDict()  # those with waiters, in turn
        self._trusted: dict[str, float] = {}  # connections and hosts: until when

    def call(self, peer: str, reply_bytes: int = REPLY_BYTES) -> Call:
        """Return a new call of this connection, whose answer counts as ``reply_bytes`` at first."""
        connection = self._connections.get(peer)
        if connection is None:
            name = host_of(peer)
            host = self._hosts.get(name)
            if host is None:
                host = self._hosts[name] = _Use(self.limits.host)
            connection = _Connection(peer, name, host, self.limits.connection)
            self._connections[peer] = connection
        return Call(self, connection, reply_bytes)

    def has_room(self, connection: _Connection, reply_bytes: int) -> bool:
        size = self.message_bytes
        if not connection.has_room(size, reply_bytes):
            return False
        if self._trusted and self.is_trusted(connection.peer):
            return True
        if not connection.calls:
            return self.all.has_room(size, reply_bytes, _FIRST_MORE)
        return connection.host.has_room(size, reply_bytes) and self.all.has_room(size, reply_bytes)

    def queue(self, call: Call) -> None:
        """Queue the call behind the others of its connection.

        Raises:
            ResourceExhaustedError: too many wait already.
        """
        connection = call.connection
        for waiting, limit in (
            (self.waiting, self.limits.waiting),
            (connection.host.waiting, self.limits.waiting // 2),
        ):
            if waiting >= limit:
                self.refusals[Refusal.WAITING] += 1
                raise ResourceExhaustedError(resource="calls that wait", limit=limit)
        connection.waiters.append(call)
        self._queue[connection] = None
        self.waiting += 1
        connection.host.waiting += 1

    def unqueue(self, call: Call) -> None:
        connection = call.connection
        connection.waiters.remove(call)
        self._left_queue(connection)

    def wake(self) -> None:
        """Admit waiting calls while there is room, a call of each connection in turn."""
        passed = 0
        if not self._trusted and not self.all.has_room(self.message_bytes, 0):
            return
        while passed < len(self._queue):
            connection = next(iter(self._queue))
            self._queue.move_to_end(connection)
            call = connection.waiters[0]
            if self.has_room(connection, call.reply_reserved):
                connection.waiters.popleft()
                self._left_queue(connection)
                call.grant()
                passed = 0
            else:
                passed += 1

    def _left_queue(self, connection: _Connection) -> None:
        self.waiting -= 1
        connection.host.waiting -= 1
        if not connection.waiters:
            del self._queue[connection]

    def peers_calling(self) -> list[str]:
        """Return the peers of the calls that wait, or whose messages are being received. For any
        thread.
        """
        waiting = [connection.peer for connection in list(self._queue)]
        return [*waiting, *(call.peer for call in list(self.receiving))]

    def forget_idle(self) -> None:
        """Forget connections and hosts without calls."""
        for peer, connection in list(self._connections.items()):
            if not (connection.calls or connection.waiters):
                del self._connections[peer]
        for name, host in list(self._hosts.items()):
            if not (host.calls or host.waiting):
                del self._hosts[name]

    def trust_host(self, peer: str) -> None:
        """Note that a member has used a connection other than gRPC's from the peer's host."""
        self._trust(host_of(peer))

    def trust(self, connection: _Connection) -> None:
        self._trust(connection.peer, connection.host_name)

    def _trust(self, *names: str) -> None:
        until = self.now() + _TRUST_S
        for name in names:
            self._trusted.pop(name, None)
            self._trusted[name] = until
        while len(self._trusted) > _TRUSTED_MAX:
            del self._trusted[next(iter(self._trusted))]

    def is_trusted(self, name: str) -> bool:
        """Return whether a member has spoken on this connection, or from this host, lately."""
        return self._trusted.get(name, 0.0) > self.now()

    def seen(self, size: int) -> None:
        """Note a message or an answer of ``size`` bytes."""
        if size > REPLY_BYTES:
            self.large_bytes += size

    def cut_slow(self) -> None:
        """Cancel the tasks of calls whose messages have not come in time: soon, if connections
        other than theirs wait.
        """
        now, queue = self.now(), self._queue
        for call in self.receiving:
            since_s = now - call.began
            if since_s < self.limits.patience_s:
                break
            others_wait = len(queue) > (call.connection in queue)
            if (others_wait or since_s >= _RECEIVE_S) and call.task and not call.is_cut:
                call.is_cut = True
                self.refusals[Refusal.SLOW_REQUEST] += 1
                call.task.cancel()

    def stuck_peer(self) -> str | None:
        """Return a connection that has not taken an answer for so long that it never will, of these
        the one with the most; if room is short, that is sooner said.
        """
        is_short = self.all.reply_bytes > self.all.limit.reply_bytes // 2
        before = self.now() - (_CONTENDED_LEAVE_S if is_short else _LEAVE_S)
        stuck = [call.connection for call in self.leaving if call.began <= before]
        return max(stuck, key=lambda connection: connection.reply_bytes).peer if stuck else None


class Places:
    """A limited number of streams: in all, per host and per connection. The last places
    (``reserved``) are for callers from a member's host.
    """

    def __init__(
        self, resource: str, *, places: int, host: int, connection: int, reserved: int = 0
    ) -> None:
        self._resource = resource
        self._places, self._host, self._connection = places, host, connection
        self._reserved = reserved
        self._taken: dict[str, int] = {}  # by connection, by host, and '': all
        self._logged_at = -_LOG_S

    @property
    def taken(self) -> int:
        """Return how many are taken."""
        return self._taken.get("", 0)

    @contextlib.contextmanager
    def place(self, peer: str) -> Iterator[None]:
        """Hold a place.

        Raises:
            ResourceExhaustedError: the connection, the host, or all together have enough.
        """
        host = host_of(peer)
        call = handling.get()
        is_member = call is not None and call.is_from_member_host()
        for name, limit in (
            (peer, self._connection),
            (host, self._host),
            ("", self._places - (0 if is_member else self._reserved)),
        ):
            if self._taken.get(name, 0) >= limit:
                if monotonic() - self._logged_at >= _LOG_S:
                    self._logged_at = monotonic()
                    log.warning(
                        "no place resource=%r limit=%d of=%s", self._resource, limit, name or "all"
                    )
                raise ResourceExhaustedError(resource=self._resource, limit=limit)
        names = (peer, host, "")
        for name in names:
            self._taken[name] = self._taken.get(name, 0) + 1
        try:
            yield
        finally:
            for name in names:
                self._taken[name] -= 1
                if not self._taken[name]:
                    del self._taken[name]


handling: ContextVar[Call | None] = ContextVar("koinon_admitted", default=None)
"""The call that this task handles."""


def hold(size: int) -> None:
    """Count bytes that the current call holds for its answer; see Call.hold. Does nothing outside
    of calls.
    """
    call = handling.get()
    if call is not None:
        call.hold(size)


def trust() -> None:
    """Note that the current call has proven to be a member's; see Call.trust."""
    call = handling.get()
    if call is not None:
        call.trust()


def wait_apart() -> None:
    """Note that the current call waits for news, with limits of its own; see Call.streams."""
    call = handling.get()
    if call is not None:
        call.streams()


def too_slow() -> UnavailableError:
    """Return the error for a caller whose message did not arrive in time."""
    return UnavailableError(reason="the request did not arrive in time; nothing was done")
