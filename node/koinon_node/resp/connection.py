"""One connection: executes its commands in their order, and sends the replies in that order.

A run of consecutive writes (of one durability) is one batch, and so is a run of reads that have to
be waited for; the next command is looked at once these are answered. So a client sees what it wrote
before, and what it reads is not what it wrote after.

Nothing is unbounded: while commands wait the socket is not read; while the client does not read its
replies nothing is executed; what is left (a command that is coming in, replies that do not leave)
is counted, and the listener closes who holds most where all hold too much.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from operator import itemgetter
from time import perf_counter
from typing import Any, Protocol, cast

from koinon_node.resp import errors, wire
from koinon_node.resp.commands import rules, transactions
from koinon_node.resp.commands.table import (
    Arguments,
    Call,
    Outcome,
    Read,
    Spec,
    Switch,
    Write,
    find,
    first_key,
)
from koinon_node.resp.served_keyspace import ServedKeyspace
from koinon_node.resp.service import RUN_BYTES, Answer, RedisService
from koinon_node.resp.session import Session
from koinon_proto.contract import request_ids
from koinon_proto.contract.errors import (
    InternalError,
    KoinonError,
    NotPrimaryError,
    UnknownKeyspaceError,
)
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.contract.request_ids import Handling
from koinon_proto.security.audit import Audit
from koinon_proto.security.authentication import Authenticator
from koinon_proto.security.trust import verified_chain
from koinon_proto.server import requests
from koinon_proto.server.connections import peer_name
from koinon_proto.server.requests import Method

log = logging.getLogger(__name__)

COMMAND_BYTES_MAX = 17 * 1024 * 1024
STRANGERS_BYTES_MAX = 512 * 1024
"""Of one command before the client has authenticated: enough for a token."""
OUTPUT_BYTES = 1024 * 1024
"""Replies that wait to leave; beyond it nothing is executed."""
_BACKED_UP_BYTES = 64 * 1024  # from here on they are counted
_TURN_RUNS, _TURN_BYTES = 16, 256 * 1024
_COUNTED_BYTES = 16 * 1024  # of a command that is coming in
_READS_FIRST, _READS_MAX = 16, 256
_RUN_MAX = 1_024
_NAME_BYTES_SHOWN = 128
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 60, 10, 3

Pending = tuple[Spec, Outcome]
_first = itemgetter(0)


def _not_known(_session: Session, arguments: Arguments) -> Outcome:
    name = ascii(arguments[0][:_NAME_BYTES_SHOWN].decode("utf-8", "replace"))
    return wire.error(f"ERR unknown command {name}")


_NOT_KNOWN = Spec("unknown", -1, _not_known, errors.guest, Method("Redis", "unknown", stream=False))


class Owner(Protocol):
    """The keeper of all connections."""

    service: RedisService
    gate: Authenticator
    audit: Audit

    def opened(self, connection: Connection) -> bool:
        """Return whether it may stay."""

    def closed(self, connection: Connection) -> None:
        """Note that the connection is gone."""

    def not_understood(self) -> None:
        """Note that a connection sent something that is no command."""

    def holds(self, connection: Connection, size: int) -> None:
        """Note that it holds so many bytes now that no client's command bounds."""


class Connection(asyncio.Protocol):
    """A client's connection: commands that wait, the one under way, replies. Event loop only."""

    def __init__(self, owner: Owner, number: int, port_keyspace: str = DEFAULT) -> None:
        self._owner = owner
        self._number = number
        self._port_keyspace = port_keyspace
        self._loop = asyncio.get_running_loop()
        self._reader = wire.CommandReader(STRANGERS_BYTES_MAX)
        self.is_known = False  # who this is; once known, it counts as known
        self._waiting: deque[Arguments] = deque()
        self._looked_at: Pending | None = None  # the next: taken from those, and not executed
        self._under_way: Sequence[Pending] = ()  # that a reply is waited for
        self._began = 0.0
        self._reads_at_once = _READS_FIRST
        self._is_paused = False  # the socket is not read
        self._is_backed_up = False  # replies do not leave
        self._goes_on_later = False
        self._switch: Switch | None = None  # once a command has asked for it
        self._task: asyncio.Task[None] | None = None
        self._is_at_end = False  # the client sends no more
        self._last_words = b""  # what is told before it is closed
        self.held_bytes = 0  # the owner's
        self.is_closing = False  # once what is under way is answered

    # --- the transport's -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BACKED_UP_BYTES)
        _probe_when_idle(transport.get_extra_info("socket"))
        peer = peer_name(transport.get_extra_info("peername"))
        tls = transport.get_extra_info("ssl_object")
        self.session = Session(
            self._owner.service,
            self._number,
            peer,
            self._tell,
            None if tls is None else self._owner.gate,
            b"" if tls is None else tls.getpeercert(binary_form=True) or b"",
            b"" if tls is None else verified_chain(tls),
            self._owner.audit,
            self._port_keyspace,
        )
        if not self._owner.opened(self):
            self._transport.write(wire.error("ERR max number of clients reached"))
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if not self.is_known and self.session.is_known:
            self.is_known, self._reader.limit = True, COMMAND_BYTES_MAX
        try:
            commands = self._reader.feed(data)
        except wire.ProtocolError as error:
            self._owner.not_understood()
            log.debug("not the Redis protocol peer=%s error=%s", self.session.peer, error)
            self._last_words = wire.error(f"ERR Protocol error: {error}")
            self._forget_what_waits()
            self.finish()
            return
        if commands:
            self._waiting += commands
            if not self._under_way and not self._goes_on_later:
                self._go_on()
        self._count_held()

    def pause_writing(self) -> None:
        self._is_backed_up = True
        self._count_held()

    def resume_writing(self) -> None:
        self._is_backed_up = False
        self._count_held()
        if not self._under_way and not self._goes_on_later:
            self._go_on()

    def eof_received(self) -> bool:
        self._is_at_end = True
        if not self._under_way and not self._goes_on_later:
            self._go_on()
        # What has come is answered first; TLS ends both ways at once.
        return self._transport.get_extra_info("ssl_object") is None

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_what_waits()
        self.is_closing = True
        if self._task is not None:
            self._task.cancel()
        self.session.end()
        self._owner.closed(self)

    # --- the owner's -----------------------------------------------------------------------

    def finish(self) -> None:
        """Close once what is under way is answered; execute nothing more."""
        self.is_closing = True
        if not self._under_way:
            self._close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    @property
    def _is_full(self) -> bool:
        """True while so many replies have not left that nothing more is executed."""
        return self._is_backed_up and self._transport.get_write_buffer_size() >= OUTPUT_BYTES

    # --- inside ----------------------------------------------------------------------------

    def _tell(self, message: bytes) -> None:
        """Send what answers no command: between two replies, so that it splits none."""
        if not self._transport.is_closing():
            self._transport.write(message)

    def _close(self) -> None:
        """All that was begun is answered: close."""
        if self._last_words:
            self._transport.write(self._last_words)
            self._last_words = b""
        self._transport.close()

    def _forget_what_waits(self) -> None:
        """Execute none of it."""
        self._waiting.clear()
        if self._looked_at is not None:
            outcome, self._looked_at = self._looked_at[1], None
            if asyncio.iscoroutine(outcome):
                outcome.close()

    def _go_on(self) -> None:
        """Execute what waits until something has to be waited for, in turns with others."""
        try:
            self._execute_turn()
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        """A defect: which reply is whose is not known any more. Others' commands go on."""
        log.exception("connection closed: a reply could not be made peer=%s", self.session.peer)
        self.abort()

    def _execute_turn(self) -> None:
        self._goes_on_later = False
        replies: list[bytes] = []
        size = count = 0
        while not (self.is_closing or self._is_full or self._under_way):
            pending = self._next()
            if pending is None:
                break
            reply = self._execute(pending)
            if reply is None:
                break
            replies.append(reply)
            size, count = size + len(reply), count + 1
            if self._switch is not None:
                break
            if self.session.closing and self._looked_at is None:
                self.is_closing = True
            elif count >= _TURN_RUNS or size >= _TURN_BYTES:
                self._goes_on_later = True
                self._loop.call_soon(self._resume)
                break
        if replies:
            self._transport.write(b"".join(replies) if len(replies) > 1 else replies[0])
        if self._switch is not None:
            self._hand_over(self._switch.begin())
            return
        nothing_waits = not self._waiting and self._looked_at is None
        if not self._under_way and (self.is_closing or (self._is_at_end and nothing_waits)):
            self._close()
        self._pause_or_read()
        if self._is_backed_up or self.held_bytes or self.session.held_bytes:
            self._count_held()

    def _hand_over(self, protocol: asyncio.Protocol) -> None:
        """Have another protocol take the connection, of which nothing is under way."""
        self.is_closing = True
        self.session.end()
        self._owner.closed(self)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._waiting or self._reader.has_begun:  # sent before the reply: they are no frames
            self._transport.abort()
        elif self._is_paused:
            self._transport.resume_reading()

    def _resume(self) -> None:
        if not self._transport.is_closing():
            self._go_on()

    def _pause_or_read(self) -> None:
        """Read the socket only while nothing waits."""
        wanted = bool(self._waiting) or self._looked_at is not None or self._is_full
        if wanted != self._is_paused and not self._transport.is_closing():
            self._is_paused = wanted
            if wanted:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _next(self) -> Pending | None:
        """Take the next command, and have its handler say what is to be done."""
        if self._looked_at is not None:
            pending, self._looked_at = self._looked_at, None
            return pending
        if not self._waiting:
            return None
        arguments = self._waiting.popleft()
        spec = find(arguments[0]) or _NOT_KNOWN
        session = self.session
        if not spec.takes(len(arguments)):
            session.spoil_transaction()
            text = f"ERR wrong number of arguments for '{spec.name.lower()}' command"
            return spec, wire.error(text)
        try:
            if session.gate is None:
                self._owner.gate.unidentified["redis"] += 1
            elif "no_auth" not in spec.flags:
                session.check_known()
                rules.check(spec, arguments, session)
            if spec.keys[0]:
                _ = session.served  # found out here, where it may be refused
            queueing = session.transaction
            if spec is _NOT_KNOWN:
                session.spoil_transaction()
            elif queueing is not None and spec.name not in transactions.AT_ONCE:
                queued = transactions.queue(session, queueing, spec, arguments)
                self._ended(spec, 0.0)
                return spec, queued
            return spec, spec.handler(session, arguments)
        except KoinonError as error:
            session.spoil_transaction()
            return spec, self._failed(spec, error, "")
        except Exception as error:
            session.spoil_transaction()
            log.exception("a command failed command=%s", spec.name)
            return spec, self._failed(spec, InternalError(reason=str(error)), "")

    def _execute(self, pending: Pending) -> bytes | None:
        """Return the reply; None if it has to be waited for."""
        spec, outcome = pending
        if type(outcome) is bytes:
            return outcome
        if type(outcome) is Switch:
            self._switch = outcome
            self._ended(spec, 0.0)
            return wire.OK
        self._began = perf_counter()
        if type(outcome) is Read:
            return self._execute_reads(pending)
        if type(outcome) is Write:
            served = self.session.served  # a command behind the run may enter another keyspace
            self._under_way = self._run_of(pending, self._room_beside(served, outcome))
            writes = [cast(Write, write) for _, write in self._under_way]
            self._owner.service.write(served, writes, self._answered)
        else:
            self._under_way = (pending,)
            work = outcome.begin() if type(outcome) is Call else outcome
            self._begin(self._await(cast(Coroutine[Any, Any, bytes], work)))
        return None

    def _execute_reads(self, first: Pending) -> bytes | None:
        """Return the replies of this read and of those after it; None if one has to be waited
        for. As many go along as their replies were large lately.
        """
        served = self.session.served  # as in ``_execute``
        run = self._run_of(first, lambda other: type(other) is Read, self._reads_at_once)
        reads = [cast(Read, read) for _, read in run]
        keys = [key for read in reads for key in read.keys]
        is_small = len(keys) <= _READS_MAX
        found = self._owner.service.read_now(served, keys) if is_small else None
        if found is None:
            self._under_way = run
            self._begin(self._read(served, reads))
            return None
        if len(found) == len(reads):
            replies = [read.reply((record,)) for read, record in zip(reads, found, strict=True)]
        else:
            records = iter(found)
            replies = [read.reply(list(islice(records, len(read.keys)))) for read in reads]
        elapsed_s = perf_counter() - self._began
        for spec, some in groupby(run, _first):
            self._ended(spec, elapsed_s, count=len(list(some)))
        reply = b"".join(replies) if len(replies) > 1 else replies[0]
        fitting = len(run) * _TURN_BYTES // max(len(reply), 1)
        self._reads_at_once = max(1, min(2 * self._reads_at_once, fitting, _READS_MAX))
        return reply

    def _run_of(
        self, first: Pending, goes_along: Callable[[Outcome], bool], most: int = _RUN_MAX
    ) -> list[Pending]:
        """Return the command and those after it that may go along."""
        run = [first]
        while len(run) < most and (pending := self._next()) is not None:
            if not goes_along(pending[1]):
                self._looked_at = pending
                break
            run.append(pending)
        return run

    def _room_beside(self, served: ServedKeyspace, write: Write) -> Callable[[Outcome], bool]:
        """Return what says of the writes that follow, one by one, whether they go along."""
        weigh, durability = self._owner.service.weigh, write.durability
        left = RUN_BYTES - weigh(served, write)

        def goes_along(other: Outcome) -> bool:
            nonlocal left
            if type(other) is not Write or other.durability is not durability:
                return False
            left -= weigh(served, other)
            return left >= 0

        return goes_along

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(work)

    async def _read(self, served: ServedKeyspace, reads: Sequence[Read]) -> None:
        answers: Sequence[Answer]
        try:
            answers = await self._owner.service.read(served, reads)
        except Exception as error:
            log.exception("a read failed keys=%d", len(reads))
            answers = [InternalError(reason=str(error))] * len(reads)
        self._answered(answers)

    async def _await(self, work: Coroutine[Any, Any, bytes]) -> None:
        answer: Answer
        try:
            answer = await work
        except KoinonError as error:
            answer = error
        except Exception as error:
            log.exception("a command failed command=%s", self._under_way[0][0].name)
            answer = InternalError(reason=str(error))
        self._answered((answer,))

    def _answered(self, answers: Sequence[Answer]) -> None:
        """Take the answers to what was under way. Raises nothing: others come after it."""
        try:
            self._reply(answers)
        except Exception:
            self._give_up()

    def _reply(self, answers: Sequence[Answer]) -> None:
        elapsed_s = perf_counter() - self._began
        run, self._under_way, self._task = self._under_way, (), None
        replies: list[bytes] = []
        for (spec, outcome), answer in zip(run, answers, strict=True):
            request_id = getattr(outcome, "request_id", "")
            if isinstance(answer, KoinonError):
                answer = self._failed(spec, answer, request_id, elapsed_s, first_key(outcome))
            else:
                self._ended(spec, elapsed_s, request_id=request_id)
            replies.append(answer)
        if self._transport.is_closing():
            return
        self._transport.write(b"".join(replies))
        if self.session.closing and self._looked_at is None:
            self.is_closing = True
        self._go_on()

    def _failed(
        self,
        spec: Spec,
        error: KoinonError,
        request_id: str,
        elapsed_s: float = 0.0,
        key: bytes | None = None,
    ) -> bytes:
        request_id = request_id or request_ids.fresh()
        self._ended(spec, elapsed_s, errors.outcome_of(error), request_id, error=error)
        if log.isEnabledFor(logging.DEBUG):
            with _handling(request_id):
                log.debug(
                    "request refused method=%s error=%s peer=%s",
                    spec.method.path,
                    error,
                    self.session.peer,
                )
        session, moved_to = self.session, ""
        if isinstance(error, NotPrimaryError) and key:
            moved_to = session.served.moved_to(key)
        elif isinstance(error, UnknownKeyspaceError) and spec.fail is errors.guest:
            session.closing |= session.is_bound  # on a new connection the name may be another's
        return spec.fail(error, request_id, moved_to)

    def _ended(
        self,
        spec: Spec,
        elapsed_s: float,
        outcome: str = requests.OK,
        request_id: str = "",
        count: int = 1,
        error: KoinonError | None = None,
    ) -> None:
        spec.method.ended(elapsed_s, outcome, count)
        self.session.note(spec, outcome, request_id, count, error)
        slow = requests.slow
        if elapsed_s >= slow.after_s and slow.may_log():
            with _handling(request_id):
                log.warning(
                    "slow request method=%s took_ms=%.1f outcome=%s peer=%s unlogged=%d",
                    spec.method.path,
                    1000 * elapsed_s,
                    outcome,
                    self.session.peer,
                    slow.take_unlogged(),
                )

    def _count_held(self) -> None:
        if self._switch is not None:  # what is held belongs to another protocol, or to none
            return
        size = self._reader.held_bytes if self._reader.held_bytes >= _COUNTED_BYTES else 0
        if self._is_backed_up:
            size += self._transport.get_write_buffer_size()
        if (queued := self.session.held_bytes) >= _COUNTED_BYTES:
            size += queued
        if size != self.held_bytes:
            self._owner.holds(self, size)


@contextmanager
def _handling(request_id: str) -> Iterator[None]:
    """Let every line that is logged inside have this request id."""
    before = request_ids.handling.set(Handling(request_id))
    try:
        yield
    finally:
        request_ids.handling.reset(before)


def _probe_when_idle(sock: socket.socket) -> None:
    """Find out when a peer is gone that does not say so."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (
        (socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, _KEEPALIVE_PROBES),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, seconds)
