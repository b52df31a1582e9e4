"""One connection: executes its commands and sends the replies, both in the commands' order.

A run of consecutive writes of one durability is one batch, and so is a run of reads that have to
wait. The next command starts only when the run is answered. So a read sees all earlier writes of
its client, and none of the later ones.

All memory is bounded: the socket is not read while too many commands wait or there is no room for
more; no command is executed while the client does not read its replies. Many clients send a whole
pipeline before they read a reply: while replies wait for the client, what it sends is kept as it
came. The budget of all connections (``memory_budget``) counts the bytes of commands and replies.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from itertools import groupby, islice
from operator import itemgetter
from time import perf_counter
from typing import Any, Protocol, cast

from koinon_node.resp import wire
from koinon_node.resp.command_outcomes import Pending, outcome_of
from koinon_node.resp.command_reader import ARGUMENT_BYTES, CommandReader
from koinon_node.resp.commands import accounting, transactions
from koinon_node.resp.memory_budget import MemoryBudget
from koinon_node.resp.outcomes import (
    Arguments,
    Call,
    Jointly,
    Outcome,
    Read,
    Switch,
    Write,
    first_key,
)
from koinon_node.resp.served_keyspace import ServedKeyspace
from koinon_node.resp.service import RUN_BYTES, Answer, PassesOn, RedisService
from koinon_node.resp.session import Peer, Session
from koinon_proto.contract.errors import InternalError, KoinonError, UnauthenticatedError
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.security.audit import Audit
from koinon_proto.security.authentication import Authenticator
from koinon_proto.security.trust import verified_chain
from koinon_proto.server.connections import peer_name, probe_when_idle

log = logging.getLogger(__name__)

COMMAND_BYTES_MAX = 17 * 1024 * 1024
STRANGERS_BYTES_MAX = 64 * 1024
"""The most bytes of a command before the client has authenticated: enough for a token."""
OUTPUT_BYTES = 1024 * 1024
"""Unsent bytes of replies above which no command is executed."""
READ_AHEAD_BYTES = 256 * 1024
"""Bytes of unanswered commands above which the socket is not read."""
_BACKED_UP_BYTES = 16 * 1024  # unsent bytes of replies from which the budget counts them
_TURN_RUNS, _TURN_BYTES = 16, 256 * 1024  # executed before other connections get a turn
_COUNTED_BYTES = 16 * 1024  # held bytes from which the budget counts a connection
_LARGE_BYTES = 64 * 1024  # an argument of this size needs room in the budget before it is read
_TLS_BYTES = 160 * 1024  # memory of TLS per connection; counted until the client is known
_LINGER_BYTES, _LINGER_S = 64 * 1024 * 1024, 5.0
"""Bytes and time after an error: input is discarded, so that the client can read the error."""
_READS_FIRST, _READS_MAX = 4, 256
_RUN_MAX = 1_024
_OBJECT_BYTES = 64  # memory of a piece of received data, beside its bytes

_first = itemgetter(0)


class Owner(Protocol):
    """The owner of all connections: the listener."""

    service: RedisService
    gate: Authenticator
    audit: Audit
    budget: MemoryBudget

    def opened(self, connection: Connection) -> bool:
        """Register the connection; return whether it may stay."""

    def closed(self, connection: Connection) -> None:
        """Unregister a connection that has ended."""

    def not_understood(self) -> None:
        """Count a connection that sent bytes which are no command."""


class Connection(asyncio.Protocol):
    """A client's connection: waiting commands, the commands under way, and replies. Belongs to the
    event loop.
    """

    def __init__(self, owner: Owner, number: int, port_keyspace: str = DEFAULT) -> None:
        self._owner = owner
        self._number = number
        self._port_keyspace = port_keyspace
        self._loop = asyncio.get_running_loop()
        self._reader = CommandReader(STRANGERS_BYTES_MAX, one_by_one=True)
        self.is_known = False  # True once the client has authenticated
        self._waiting: deque[Arguments] = deque()
        # Bytes of the commands that arrived since the connection was last idle: an upper bound of
        # the bytes that wait now.
        self._unanswered_bytes = 0
        self._kept: deque[bytes] = deque()  # received while replies waited for the client; unparsed
        self._kept_bytes = 0
        self._next_command: Pending | None = None  # parsed, not executed; the head of the queue
        self._under_way: Sequence[Pending] = ()  # commands being executed
        self._began = 0.0  # when the commands under way began (perf_counter)
        self._reads_at_once = _READS_FIRST  # GETs joined into one read; fewer after large replies
        self._is_paused = False  # reading from the socket is paused
        self._is_backed_up = False  # the transport's buffer is above its limit
        # A later turn of the loop is scheduled: until then no other call may execute commands.
        self._goes_on_later = False
        self._switch: Switch | None = None  # set by a command that changes the protocol
        self._task: asyncio.Task[None] | None = None
        self._is_at_end = False  # the client has sent its last byte
        self._error_before_close = b""  # the reply sent before the connection closes
        self._discarded_bytes = 0  # received after a refused command
        self._tls_bytes = 0  # memory of TLS, counted until the client has authenticated
        self._is_counted = False  # the budget of all connections counts its bytes
        self._has_room = True  # the budget has room for the incomplete argument
        self.is_closing = False  # close once the commands under way are answered; execute no more

    # --- called by the transport -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BACKED_UP_BYTES)
        probe_when_idle(transport.get_extra_info("socket"))
        tls = transport.get_extra_info("ssl_object")
        peer = Peer(
            number=self._number,
            address=peer_name(transport.get_extra_info("peername")),
            port_keyspace=self._port_keyspace,
            gate=None if tls is None else self._owner.gate,
            certificate=b"" if tls is None else tls.getpeercert(binary_form=True) or b"",
            chain=b"" if tls is None else verified_chain(tls),
        )
        self.session = Session(self._owner.service, peer, self._push, self._owner.audit)
        if not self._owner.opened(self):
            self._transport.write(wire.error("ERR max number of clients reached"))
            self._transport.close()
            return
        if tls is not None:
            self._tls_bytes = _TLS_BYTES
        self._notice_authentication()
        self._count_held()

    def data_received(self, data: bytes) -> None:
        if not self.is_known:
            self._notice_authentication()
        if self._reader.fault:
            self._discard_after_refusal(data)
        elif self._kept or (self._is_backed_up and self._is_full):
            self._keep(data)
        else:
            self._parse(data)

    def _keep(self, data: bytes) -> None:
        """Keep data unparsed until the client has read its replies."""
        self._kept.append(data)
        self._kept_bytes += len(data) + _OBJECT_BYTES
        self._count_held()
        self._pause_or_read()

    def _parse_kept(self) -> None:
        """Parse kept data up to the end of a command, once the client has read its replies."""
        while self._kept and not (
            self._transport.is_closing() or self._is_executing or self._is_backed_up
        ):
            data = self._kept.popleft()
            self._kept_bytes -= len(data) + _OBJECT_BYTES
            if self._reader.fault:
                self._discard_after_refusal(data)
            elif self._parse(data):
                return  # the end of the turn that executes the commands calls this again
        if self._is_at_end and not self._is_busy:
            self._execute_waiting()

    def _parse(self, data: bytes) -> bool:
        """Parse data and execute its commands; return whether there was one."""
        reader = self._reader
        taken = reader.held_bytes + len(data)
        commands = reader.feed(data)
        if commands:
            self._waiting += commands
            self._unanswered_bytes += taken + ARGUMENT_BYTES * sum(map(len, commands))
        if reader.fault:
            self._owner.not_understood()
            log.debug("not the Redis protocol peer=%s error=%s", self.session.peer, reader.fault)
            self._error_before_close = wire.error(f"ERR Protocol error: {reader.fault}")
            self._is_at_end = True  # earlier commands are still answered
        self._count_held()
        if (commands or reader.fault) and not self._under_way and not self._goes_on_later:
            self._execute_waiting()
        else:
            self._pause_or_read()
        if commands and reader.one_by_one and reader.has_begun:
            self._loop.call_soon(self._read_behind_command)
        return bool(commands)

    def pause_writing(self) -> None:
        self._is_backed_up = True
        self._count_held()

    def resume_writing(self) -> None:
        self._is_backed_up = False
        self._count_held()
        if not self._under_way and not self._goes_on_later:
            self._execute_waiting()

    def eof_received(self) -> bool:
        if self._reader.fault and self._discarded_bytes:
            return False  # all commands are answered: close
        while self._reader.one_by_one and (rest := self._reader.held_bytes):
            self._read_behind_command()
            if self._reader.held_bytes == rest:
                break
        self._is_at_end = True
        if not self._under_way and not self._goes_on_later:
            self._execute_waiting()
        # Received commands are answered first. (TLS closes both directions at once.)
        return self._transport.get_extra_info("ssl_object") is None

    def connection_lost(self, error: Exception | None) -> None:
        self._drop_waiting()
        self._unanswered_bytes = 0
        self.is_closing = True
        if self._task is not None:
            self._task.cancel()
        self.session.end()
        self._owner.closed(self)

    # --- called by the owner ---------------------------------------------------------------

    def finish(self) -> None:
        """Execute no more commands; close once the commands under way are answered."""
        self.is_closing = True
        if not self._under_way:
            self._close_transport()

    def close_if_refused(self) -> None:
        """If the client has lost its rights, answer or refuse its received commands, then close."""
        try:
            self.session.standing.current()
        except UnauthenticatedError:
            self.eof_received()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def read_on(self) -> None:
        """See memory_budget.Holder."""
        self._count_held()
        self._pause_or_read()

    @property
    def _is_full(self) -> bool:
        """True while too many replies are unsent to execute more commands. Only valid while the
        transport is backed up.
        """
        return self._transport.get_write_buffer_size() >= OUTPUT_BYTES

    @property
    def _is_busy(self) -> bool:
        """True while there are unanswered commands."""
        return bool(self._kept or self._is_executing)

    @property
    def _is_executing(self) -> bool:
        """True while there are parsed commands that are not answered."""
        return bool(self._under_way or self._waiting or self._next_command is not None)

    # --- internal --------------------------------------------------------------------------

    def _notice_authentication(self) -> None:
        """Lift the limits of strangers once the client has authenticated."""
        if self.session.is_known:
            self._owner.budget.become_known(self)
            self._reader.limit, self._reader.one_by_one = COMMAND_BYTES_MAX, False
            self._tls_bytes = 0

    def _read_behind_command(self) -> None:
        """Parse the data behind an unauthenticated client's command, which may have authenticated
        the client.
        """
        if not self._transport.is_closing():
            self.data_received(b"")

    def _discard_after_refusal(self, data: bytes) -> None:
        """Discard input after a refused command, so that the client can read the error. Too much
        input aborts the connection.
        """
        self._discarded_bytes += len(data)
        if self._discarded_bytes > _LINGER_BYTES or not self.is_known:
            self._transport.abort()

    def _push(self, message: bytes) -> None:
        """Send a push message between two replies."""
        if not self._transport.is_closing():
            self._transport.write(message)

    def _close_transport(self) -> None:
        """Close the connection, after a protocol error's reply. All commands under way are
        answered.
        """
        if not self._error_before_close:
            self._transport.close()
            return
        self._transport.write(self._error_before_close)
        self._error_before_close = b""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._loop.call_later(_LINGER_S, self._transport.abort)

    def _drop_waiting(self) -> None:
        """Drop the waiting commands."""
        self._waiting.clear()
        self._kept.clear()
        self._kept_bytes = 0
        if self._next_command is not None:
            outcome, self._next_command = self._next_command[1], None
            if asyncio.iscoroutine(outcome):
                outcome.close()

    def _execute_waiting(self) -> None:
        """Execute waiting commands until one has to wait for its reply. A long queue takes turns
        with other connections.
        """
        try:
            self._execute_turn()
        except Exception:
            self._abort_after_defect()

    def _abort_after_defect(self) -> None:
        """Abort the connection: after a defect, replies might go to the wrong commands. The caller
        continues with the other connections.
        """
        log.exception("connection closed: a reply could not be built peer=%s", self.session.peer)
        self.abort()

    def _execute_turn(self) -> None:
        self._goes_on_later = False
        replies: list[bytes] = []
        size = count = 0
        while not (self.is_closing or self._under_way or (self._is_backed_up and self._is_full)):
            pending = self._next()
            if pending is None:
                break
            reply = self._execute(pending)
            if reply is None:
                break
            replies.append(wire.in_resp3(reply) if self.session.resp3 else reply)
            size, count = size + len(reply), count + 1
            if self._switch is not None:
                break
            if self.session.closing and self._next_command is None:
                self.is_closing = True
            elif count >= _TURN_RUNS or size >= _TURN_BYTES:
                self._goes_on_later = True
                self._loop.call_soon(self._resume_turn)
                break
        if replies:
            self._transport.write(b"".join(replies) if len(replies) > 1 else replies[0])
        if self._switch is not None:
            self._hand_over(self._switch.begin())
        else:
            self._end_turn()

    def _end_turn(self) -> None:
        is_busy = self._is_busy
        if not self._under_way and (self.is_closing or (self._is_at_end and not is_busy)):
            self._close_transport()
        if not self._is_executing:
            self._unanswered_bytes = 0
            if self._kept and not self._is_backed_up:
                self._loop.call_soon(self._parse_kept)
        if self._is_counted or self._is_backed_up or self.session.held_bytes:
            self._count_held()
        self._pause_or_read()

    def _hand_over(self, protocol: asyncio.Protocol) -> None:
        """Give the transport to another protocol. No command of this connection is under way."""
        self.is_closing = True
        self.session.end()
        self._owner.closed(self)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._is_busy or self._reader.has_begun:  # bytes sent too early cannot be frames
            self._transport.abort()
        elif self._is_paused:
            self._transport.resume_reading()

    def _resume_turn(self) -> None:
        if not self._transport.is_closing():
            self._execute_waiting()

    def _pause_or_read(self) -> None:
        """Pause or resume reading from the socket, by the room for more data."""
        is_ahead = self._unanswered_bytes > READ_AHEAD_BYTES or self._owner.budget.is_short
        if self._is_backed_up and self._is_full:
            is_ahead = False  # what comes is kept, so that the client can end its pipeline
        elif self._kept:
            is_ahead = True
        wanted = not self._has_room or (is_ahead and self._is_busy)
        if wanted != self._is_paused and not self._transport.is_closing():
            self._is_paused = wanted
            if wanted:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _next(self) -> Pending | None:
        """Return the next command with its outcome, or with the reply of its refusal."""
        if self._next_command is not None:
            pending, self._next_command = self._next_command, None
            return pending
        if not self._waiting:
            return None
        return outcome_of(self.session, self._waiting.popleft(), self._owner.gate)

    def _execute(self, pending: Pending) -> bytes | None:
        """Execute the command; return its reply, or None if the reply comes later."""
        spec, outcome, _ = pending
        if type(outcome) is bytes:
            return outcome
        if type(outcome) is Switch:
            self._switch = outcome
            accounting.ended(self.session, spec, 0.0)
            return wire.OK
        self._began = perf_counter()
        if type(outcome) is Read:
            return self._execute_reads(pending)
        if type(outcome) is Write:
            served = (
                self.session.served
            )  # ``_run_of`` may parse a command that changes the keyspace
            goes_along = self._room_beside(served, outcome)
            self._under_way = self._run_of(pending, goes_along) if self._waiting else (pending,)
            writes = [cast(Write, write) for _, write, _ in self._under_way]
            self._owner.service.write(served, writes, self._answered)
        else:
            self._under_way = (pending,)
            work = outcome.begin() if type(outcome) is Call else outcome
            if type(outcome) is Jointly:
                work = transactions.carried_out(self.session, outcome)
            self._start_task(self._await_reply(cast(Coroutine[Any, Any, bytes], work)))
        return None

    def _execute_reads(self, first: Pending) -> bytes | None:
        """Execute this read and those after it; return their replies, or None if a reply comes
        later. The number of joined reads follows from the size of recent replies.
        """
        served = self.session.served  # as in ``_execute``
        run = self._run_of(first, lambda other: type(other) is Read, self._reads_at_once)
        reads = [cast(Read, read) for _, read, _ in run]
        keys = [key for read in reads for key in read.keys]
        is_small = len(keys) <= _READS_MAX
        found = self._owner.service.read_now(served, keys) if is_small else None
        if found is None:
            self._under_way = run
            self._start_task(self._read(served, reads))
            return None
        if len(found) == len(reads):
            replies = [read.reply((record,)) for read, record in zip(reads, found, strict=True)]
        else:
            records = iter(found)
            replies = [read.reply(list(islice(records, len(read.keys)))) for read in reads]
        elapsed_s = perf_counter() - self._began
        for spec, some in groupby(run, _first):
            accounting.ended(self.session, spec, elapsed_s, count=len(list(some)))
        reply = b"".join(replies) if len(replies) > 1 else replies[0]
        fitting = len(run) * _TURN_BYTES // max(len(reply), 1)
        self._reads_at_once = max(1, min(2 * self._reads_at_once, fitting, _READS_MAX))
        return reply

    def _run_of(
        self, first: Pending, goes_along: Callable[[Outcome], bool], most: int = _RUN_MAX
    ) -> list[Pending]:
        """Return the command and the following commands that ``goes_along`` accepts."""
        run = [first]
        while len(run) < most and (pending := self._next()) is not None:
            if not goes_along(pending[1]):
                self._next_command = pending
                break
            run.append(pending)
        return run

    def _room_beside(self, served: ServedKeyspace, write: Write) -> Callable[[Outcome], bool]:
        """Return a predicate: does the next write fit into RUN_BYTES beside the earlier ones?"""
        weigh, durability = self._owner.service.weigh, write.durability
        left = RUN_BYTES - weigh(served, write)

        def goes_along(other: Outcome) -> bool:
            nonlocal left
            if type(other) is not Write or other.durability is not durability:
                return False
            left -= weigh(served, other)
            return left >= 0

        return goes_along

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(work)

    async def _read(self, served: ServedKeyspace, reads: Sequence[Read]) -> None:
        answers: Sequence[Answer]
        try:
            answers = await self._owner.service.read(served, reads)
        except Exception as error:
            log.exception("a read failed keys=%d", len(reads))
            answers = [InternalError(reason=str(error))] * len(reads)
        self._answered(answers)

    async def _await_reply(self, work: Coroutine[Any, Any, bytes]) -> None:
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
        """Send the replies of the commands under way. Raises nothing, since the caller continues
        with other connections.
        """
        try:
            passing = self._owner.service.passing
            places = enumerate(zip(self._under_way, answers, strict=True))
            if passing is not None and (
                elsewhere := [at for at, (one, a) in places if passing.concerns(one[0], a)]
            ):
                self._start_task(self._pass_on(passing, [*answers], elsewhere))
                return
            self._reply(answers)
        except Exception:
            self._abort_after_defect()

    async def _pass_on(
        self, passing: PassesOn, answers: list[Answer], elsewhere: Sequence[int]
    ) -> None:
        """Have other nodes execute the commands at these indexes; then send all replies."""
        commands = [(self._under_way[at][0], self._under_way[at][2]) for at in elsewhere]
        try:
            passed = await passing.answers(self.session, commands)
            for at, answer in zip(elsewhere, passed, strict=True):
                answers[at] = answer
            replied = sum(len(answer) for answer in passed if isinstance(answer, bytes))
            fitting = len(self._under_way) * _TURN_BYTES // max(replied, 1)
            self._reads_at_once = max(1, min(self._reads_at_once, fitting))
            self._reply(answers)
        except Exception:
            self._abort_after_defect()

    def _reply(self, answers: Sequence[Answer]) -> None:
        elapsed_s = perf_counter() - self._began
        run, self._under_way, self._task = self._under_way, (), None
        replies: list[bytes] = []
        for (spec, outcome, _), answer in zip(run, answers, strict=True):
            request_id = getattr(outcome, "request_id", "")
            if isinstance(answer, KoinonError):
                key = first_key(outcome)
                answer = accounting.failed(self.session, spec, answer, request_id, elapsed_s, key)
            else:
                accounting.ended(self.session, spec, elapsed_s, request_id=request_id)
            replies.append(answer)
        if self._transport.is_closing():
            return
        reply = b"".join(replies)
        self._transport.write(wire.in_resp3(reply) if self.session.resp3 else reply)
        if self.session.closing and self._next_command is None:
            self.is_closing = True
        self._execute_waiting()

    def _count_held(self) -> None:
        if self._switch is not None or self._transport.is_closing():
            return  # the connection has ended, or has another protocol
        coming = self._reader.coming_bytes
        owed = self._tls_bytes + self._reader.held_bytes + self.session.held_bytes
        owed += self._kept_bytes
        if coming < _LARGE_BYTES:
            owed, coming = owed + coming, 0
        if self._is_backed_up:
            owed += self._transport.get_write_buffer_size()
        if self._unanswered_bytes + owed + coming >= _COUNTED_BYTES:
            self._is_counted = True
            budget = self._owner.budget
            self._has_room = budget.hold(self, self._unanswered_bytes, owed, coming)
        elif self._is_counted:
            self._is_counted, self._has_room = False, True
            self._owner.budget.release(self)
