"""The guard in front of all services of a server: it finds out who calls, admits calls, reads their
messages, and has what may not be called, or cannot be read, refused by name.

It makes the handlers that a server registers (``aio_server``). Methods with one request are given
to gRPC as if they took a stream of them, which is the same on the wire; that way the handler runs
before the message is received, knows its peer, and asks for the message once ``admission`` lets it.
An interceptor could do the same, and would cost each call some 10 µs more.
gRPC says that a call is done once its answer has been written out, as far as the peer's flow
control let it, or can no more be written.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from koinon_proto.contract import request_ids
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError
from koinon_proto.process import memory
from koinon_proto.process.logs import LinesPerSecond
from koinon_proto.process.rounds import until_round_s
from koinon_proto.security import method_permissions
from koinon_proto.security.audit import NO_AUDIT, OK, Audit
from koinon_proto.security.authentication import (
    LOOK_EVERY_S,
    Authenticator,
    StandingCaller,
    Version,
    open_gate,
)
from koinon_proto.security.authorization import Caller, Concern, caller, concern
from koinon_proto.server import admission, requests, rpc
from koinon_proto.server.admission import Call, Lane, LaneLimits, Refusal
from koinon_proto.server.connections import Endpoint, close_connection, endpoint_of
from koinon_proto.server.header_floods import FloodWatch

log = logging.getLogger(__name__)

EOF = grpc.aio.EOF
_CONTROL = (
    *("/koinon.v1.Membership/", "/koinon.v1.Raft/", "/koinon.v1.Replication/"),
    *("/koinon.v1.Admin/", "/koinon.v1.TableService/WatchTable", "/grpc."),
)
"""The beginnings of the methods in the lane for control: members, operators, health checks."""
_BUSY_TICK_S = 0.1
_TRIM_ABOVE_BYTES = 64 << 20
_QUIET_BYTES = 4 << 20
_LINES_MAX = 5

_malformed = LinesPerSecond(_LINES_MAX)
Handle = Callable[[Any, Any], Awaitable[Any]]


class Guard:
    """Guards one server. ``reply_bytes`` is what an answer of a method counts as before it is
    known, where that may be much; ``kept_bytes`` of freed memory are kept after a peak.
    """

    def __init__(
        self,
        data: LaneLimits,
        control: LaneLimits,
        reply_bytes: dict[str, int] | None = None,
        kept_bytes: int = 0,
        gate: Authenticator | None = None,
        audit: Audit = NO_AUDIT,
    ) -> None:
        self._audit = audit
        self._gate = gate or open_gate()
        self.look_at_callers: list[Callable[[Version, float], None]] = [self._check_streams]
        """Called every ``LOOK_EVERY_S`` with the gate's version and time: each ends what is open
        and whose caller may no longer have it.
        """
        self._streams: dict[asyncio.Task[Any], _StreamContext] = {}  # under way
        self.data = Lane(data)
        self.control = Lane(control)
        self._reply_bytes = reply_bytes or {}
        self._kept_bytes = kept_bytes
        self._ticking: asyncio.TimerHandle | None = None
        self.floods = FloodWatch(self._receiving, kept_bytes)

    @property
    def gate(self) -> Authenticator:
        """The callers of this server."""
        return self._gate

    @property
    def lanes(self) -> dict[str, Lane]:
        """The lanes by their names."""
        return {"data": self.data, "control": self.control}

    def start(self) -> None:
        """Begin to watch for stuck calls and floods, on the running loop."""
        self._tick()
        self.floods.start()

    def stop(self) -> None:
        """Stop watching."""
        if self._ticking is not None:
            self._ticking.cancel()
        self.floods.stop()

    def _receiving(self) -> Counter[Endpoint]:
        """Return how many messages each connection may be sending. Called in another thread: it
        goes through copies, which are made in one step.
        """
        reading = [stream.peer() for stream in list(self._streams.values()) if stream.is_reading]
        calls = [peer for lane in self.lanes.values() for peer in lane.peers_calling()]
        return Counter(filter(None, map(endpoint_of, (*reading, *calls))))

    def guarded(self, path: str, handler: Any) -> Any:
        """Return the handler to register instead of this one; None for a method of the generated
        base, which this server does not serve.
        """
        lane = self.control if path.startswith(_CONTROL) else self.data
        handle = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        if not (inspect.iscoroutinefunction(handle) or inspect.isasyncgenfunction(handle)):
            return None
        if not handler.request_streaming and not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(self._unary(path, handler, lane))
        return grpc.stream_stream_rpc_method_handler(
            self._stream(path, handler, lane), response_serializer=handler.response_serializer
        )

    def _unary(self, path: str, handler: Any, lane: Lane) -> Handle:
        handle, serialize = handler.unary_unary, handler.response_serializer
        parse = _parser(path, handler.request_deserializer)
        reply_bytes = self._reply_bytes.get(path, admission.REPLY_BYTES)

        async def guarded(_: Any, context: Any) -> bytes:
            call = lane.call(context.peer(), reply_bytes)
            context.add_done_callback(call.ended)
            request, found = None, None
            if self._audit.is_on:
                concern.set(Concern())
            try:
                self.floods.check(context)
                found = self._gate.caller(context)
                rule = method_permissions.check(path, found)
                caller.set(found)
                if found.principal is None:
                    self._gate.unidentified["grpc"] += 1
                request = parse(await _received(call, context, self.floods), context)
                method_permissions.check_claim(rule, found, request)
                admission.handling.set(call)
                reply: bytes = serialize(await handle(request, context))
            except KoinonError as error:
                _count(path, error)
                self._note(path, found, context, rpc.code_of(error), error)
                await rpc.abort(context, error)
            except grpc.aio.AbortError as aborted:
                request = None
                self._note(path, found, context, context.code())
                raise _without_frames(aborted) from None
            call.replied(len(reply))
            self._note(path, found, context)
            return reply

        return guarded

    def _stream(self, path: str, handler: Any, lane: Lane) -> Handle:
        parse = _parser(path, handler.request_deserializer)
        handle = handler.stream_stream or handler.stream_unary or handler.unary_stream

        async def guarded(_: Any, context: Any) -> None:
            call = lane.call(context.peer())
            context.add_done_callback(call.ended)
            admission.handling.set(call)
            guarded_context = _StreamContext(path, context, call, parse, self)
            task = asyncio.current_task()
            assert task is not None
            self._streams[task] = guarded_context
            try:
                self.floods.check(context)
                found = guarded_context.check()
                caller.set(found)
                if found.principal is None:
                    self._gate.unidentified["grpc"] += 1
                if handler.request_streaming:
                    given: Any = _messages(guarded_context)
                else:
                    given = await guarded_context.read()
                    if given is EOF:
                        raise InvalidArgumentError(field="request", reason="there is none")
                answers = handle(given, guarded_context)
                if not inspect.isasyncgen(answers):
                    answers = _one(answers, handler.response_streaming)
                async for answer in answers:
                    await context.write(answer)
                self._note(path, guarded_context.caller, context)
            except grpc.aio.AbortError as aborted:
                self._note(path, guarded_context.caller, context, context.code())
                raise _without_frames(aborted) from None
            except KoinonError as error:
                _count(path, error)
                self._note(path, guarded_context.caller, context, rpc.code_of(error), error)
                await rpc.abort(context, error)
            except asyncio.CancelledError:
                if guarded_context.fault is None:
                    raise
                task.uncancel()
                _count(path, guarded_context.fault)
                self._note(
                    path, guarded_context.caller, context, rpc.code_of(guarded_context.fault)
                )
                await rpc.abort(context, guarded_context.fault)
            finally:
                del self._streams[task]

        return guarded

    def _note(
        self,
        path: str,
        found: Caller | None,
        context: Any,
        code: grpc.StatusCode = grpc.StatusCode.OK,
        error: Exception | None = None,
    ) -> None:
        """Write a call's end to the audit log, if it is to be noted. ``error`` None: the error with
        which the handler has ended the call.
        """
        audit = self._audit
        if not audit.is_on:
            return
        outcome = OK if code is grpc.StatusCode.OK else code.name.lower()
        if audit.wants(path, outcome):
            metadata = dict(context.invocation_metadata())
            request_id = request_ids.cleaned(str(metadata.get(request_ids.KEY, "")))
            who = found.name if found is not None else "nobody"
            error = error or rpc.error_of(context)
            audit.note(
                who, context.peer(), path, outcome, request_id, error, self._keyspace_concerned()
            )

    def _keyspace_concerned(self) -> str:
        """Return the name of the call's keyspace; '' if it is unknown."""
        noted = concern.get()
        if noted is None or noted.keyspace is None:
            return ""
        if isinstance(noted.keyspace, str):
            return noted.keyspace
        return self._gate.keyspace_name(noted.keyspace) or f"id:{noted.keyspace}"

    def _check_streams(self, version: Version, now_s: float) -> None:
        """End the streams of callers that have lost the permission."""
        for task, context in list(self._streams.items()):
            if context.standing.is_stale(version, now_s):
                try:
                    context.check()
                except KoinonError as error:
                    context.fault = error
                    task.cancel()

    def _tick(self) -> None:
        """Check for stuck calls and free memory, and schedule the next check."""
        version, now_s = self._gate.version, self._gate.now()
        for look in self.look_at_callers:
            look(version, now_s)
        lanes = self.lanes.values()
        tick_s = _BUSY_TICK_S if any(lane.waiting for lane in lanes) else LOOK_EVERY_S
        loop = asyncio.get_running_loop()
        self._ticking = loop.call_later(until_round_s(loop.time(), tick_s), self._tick)
        for lane in lanes:
            lane.cut_slow()
            lane.forget_idle()
            if (peer := lane.stuck_peer()) is not None:
                lane.refusals[Refusal.STUCK_ANSWER] += 1
                log.warning("connection closed: takes no answers peer=%s", peer)
                close_connection(peer)
        held = sum(lane.all.reply_bytes + lane.all.request_bytes for lane in lanes)
        large = sum(lane.large_bytes for lane in lanes)
        if large > _TRIM_ABOVE_BYTES and held < _QUIET_BYTES:
            for lane in lanes:
                lane.large_bytes = 0
            threading.Thread(target=memory.trim, args=(self._kept_bytes,), daemon=True).start()


class _StreamContext:
    """A stream's context whose first message has to be admitted like any other."""

    def __init__(
        self,
        path: str,
        context: Any,
        call: Call,
        parse: Callable[[Any, Any], Any],
        guard: Guard,
    ) -> None:
        gate, self._floods = guard.gate, guard.floods
        self.standing = StandingCaller(gate, lambda: gate.caller(context, stays=True))
        self._path = path
        self._context = context
        self._call = call
        self._parse = parse
        self._is_first = True
        self.is_reading = False  # a message that is not the first
        self.caller: Caller | None = None
        self._rule = method_permissions.Rule()
        self.fault: KoinonError | None = None  # why the caller may no longer have it

    def check(self) -> Caller:
        """Authenticate and authorize the caller; return it, or raise KoinonError."""
        self.caller = found = self.standing.current()
        self._rule = method_permissions.check(self._path, found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """Read as grpc.aio does; raise InvalidArgumentError for a message that cannot be read."""
        if not self._is_first:
            self.is_reading = True
            try:
                raw = await self._context.read()
            finally:
                self.is_reading = False
            if raw is EOF:
                return EOF
            self._floods.count(self._call.peer, len(raw))
            return self._parse(raw, self._context)
        self._is_first = False
        raw = await _received(self._call, self._context, self._floods)
        self._call.streams()
        if raw is EOF:
            return EOF
        message = self._parse(raw, self._context)
        if self.caller is not None:
            method_permissions.check_claim(self._rule, self.caller, message)
        return message


async def _received(call: Call, context: Any, floods: FloodWatch) -> Any:
    """Return the call's first message, unread, or EOF.

    Raises:
        ResourceExhaustedError: too many calls wait.
        UnavailableError: the message did not come in time.
    """
    if not call.admit():
        await call.admitted()
    call.task = asyncio.current_task()
    try:
        raw = await context.read()
    except asyncio.CancelledError:
        if not call.is_cut or call.task is None:
            raise
        call.task.uncancel()
        raise admission.too_slow() from None
    finally:
        call.task = None
    size = 0 if raw is EOF else len(raw)
    floods.count(call.peer, size)  # before it counts as received, for the watching thread
    call.received(size)
    return raw


async def _messages(context: _StreamContext) -> AsyncIterator[Any]:
    while (message := await context.read()) is not EOF:
        yield message


async def _one(answer: Awaitable[Any], is_stream: bool) -> AsyncIterator[Any]:
    """Await a handler that writes its answer itself, or returns it."""
    reply = await answer
    if not is_stream:
        yield reply


def _without_frames(aborted: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """Return the exception, without the frames that it came through. gRPC keeps it with the call,
    and the frames have the call: all that they hold, requests of 20 MB too, would stay until the
    next collection of garbage, which may be long after thousands of them.
    """
    aborted.__context__ = None
    return aborted.with_traceback(None)


def _parser(path: str, deserialize: Callable[[bytes], Any]) -> Callable[[Any, Any], Any]:
    """Return the function that parses a message's bytes into a request.

    It raises InvalidArgumentError for what is no such message, and logs it.
    """

    def parse(raw: Any, context: Any) -> Any:
        if raw is EOF:
            raise InvalidArgumentError(field="request", reason="there is none")
        try:
            return deserialize(raw)
        except Exception as error:  # whatever a parser meets
            raise _refused(path, context, str(error) or type(error).__name__) from None

    return parse


def _refused(path: str, context: Any, reason: str) -> InvalidArgumentError:
    if _malformed.may_log():
        log.warning(
            "malformed request method=%s peer=%s reason=%s unlogged=%d",
            path,
            context.peer(),
            reason,
            _malformed.take_unlogged(),
        )
    return InvalidArgumentError(field="request", reason=f"cannot be read: {reason}")


def _count(path: str, error: KoinonError) -> None:
    """Count a request that reached no handler."""
    if path.startswith("/koinon."):
        service, _, name = path.rpartition(".")[2].partition("/")
        method = requests.methods.get((service, name))
        if method is not None:
            outcome = rpc.outcome_of(error)
            method.outcomes[outcome] = method.outcomes.get(outcome, 0) + 1
