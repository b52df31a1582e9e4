"""The peer port of a coordinator: streams of frames for other coordinators and for nodes.

A caller asks for the port's number by gRPC (``GetPeerPort``), sends one command here
(``KOINON.RAFT 1``, ``KOINON.HEARTBEATS 1``) and, once it has the answer ``+OK``, frames
(koinon_proto.server.framed_stream). gRPC itself would cost several times the processor time for a
small message.

Bounds: the connections without a command, or without a first message, are limited to a few, and
each is closed after some seconds; a connection that sends anything else is closed. The number of
streams is limited too; one host may have half of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.message import Message

from koinon_proto.contract.errors import (
    ConfigurationError,
    InternalError,
    KoinonError,
    UnavailableError,
)
from koinon_proto.process.logs import LinesPerSecond
from koinon_proto.security import method_permissions
from koinon_proto.security.audit import NO_AUDIT, Audit
from koinon_proto.security.authentication import Authenticator, StandingCaller, Version
from koinon_proto.security.authorization import caller
from koinon_proto.security.sockets import Server, serve_at_chosen
from koinon_proto.security.transport import Listening
from koinon_proto.security.trust import verified_chain
from koinon_proto.server import rpc
from koinon_proto.server.admission import Places
from koinon_proto.server.connections import peer_name
from koinon_proto.server.framed_greeting import END_OF_LINE, NOT_KNOWN, WELCOME
from koinon_proto.server.framed_stream import FramedStream, PeerLostError

log = logging.getLogger(__name__)

STREAMS_MAX = 512
WAITING_MAX = 128
"""Connections that have sent no command yet: beyond it the one that waits longest is closed. As
many have sent a command and no message."""
GREETING_S_MAX = 5.0
COMMAND_BYTES_MAX = 64
_CLOSED_S_MAX = 1.0

Stream = FramedStream[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FramedMethod:
    """A kind of stream. ``path`` names it in the table of permissions. ``parse`` makes a request
    of its bytes, and raises KoinonError for one that makes no sense. ``serve`` takes a stream, and
    its peer's name, until it ends; it raises KoinonError to end the stream with that.
    """

    path: str
    parse: Callable[[bytes], Message]
    serve: Callable[[Stream, str], Awaitable[None]]
    first_bytes_max: int
    message_bytes_max: int
    received_bytes_max: int = 0


class PeerPort:
    """Listens from ``start`` to ``stop``. ``methods`` are by the commands that ask for them, each
    with the end of its line. For the event loop only.
    """

    def __init__(
        self,
        methods: Mapping[bytes, FramedMethod],
        listening: Listening,
        gate: Authenticator,
        audit: Audit = NO_AUDIT,
    ) -> None:
        self._methods = {line.removesuffix(END_OF_LINE): m for line, m in methods.items()}
        self._listening = listening
        self._gate = gate
        self._audit = audit
        self._server: Server | None = None
        self._greetings: dict[_Greeting, None] = {}  # connections without a command, oldest first
        self._silent: dict[Stream, None] = {}  # streams without a message, oldest first
        self._streams: dict[Stream, tuple[FramedMethod, StandingCaller]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._places = Places(
            "streams of the peer port", places=STREAMS_MAX, host=STREAMS_MAX // 2, connection=1
        )
        self._refusals = LinesPerSecond(5)
        self.port = 0  # where this listens; 0: nowhere

    async def start(self, address: str) -> None:
        """Listen at ``host:port``; port 0 is one that the system chooses.

        Raises:
            ConfigurationError: it cannot be bound.
        """
        try:
            self._server, self.port = await serve_at_chosen(
                address, lambda: _Greeting(self), self._listening
            )
        except OSError as error:
            raise ConfigurationError(
                reason=f"peer-listen {address}: cannot be bound ({error.strerror or error})"
            ) from error

    async def stop(self) -> None:
        """Accept no more connections, and end all streams."""
        self.port = 0
        if self._server is not None:
            self._server.close()
        for greeting in list(self._greetings):
            greeting.abort()
        for stream in list(self._streams):
            stream.close(UnavailableError(reason="the coordinator is stopping"))
        if self._serving:
            await asyncio.wait(self._serving, timeout=_CLOSED_S_MAX)
        for task in self._serving:
            task.cancel()

    def streams(self) -> dict[str, int]:
        """Return the number of streams that have sent their first message, by method."""
        found = {method.path.rpartition(".")[2]: 0 for method in self._methods.values()}
        for stream, (method, _) in self._streams.items():
            found[method.path.rpartition(".")[2]] += stream not in self._silent
        return found

    def look_at_callers(self, version: Version, now_s: float) -> None:
        """End the streams of callers that have lost the permission."""
        for stream, (method, standing) in list(self._streams.items()):
            if standing.is_stale(version, now_s):
                try:
                    method_permissions.check(method.path, standing.current())
                except KoinonError as error:
                    stream.close(error)

    # --- what connections tell -----------------------------------------------------------------

    def opened(self, greeting: _Greeting) -> None:
        self._greetings[greeting] = None
        if len(self._greetings) > WAITING_MAX:
            next(iter(self._greetings)).abort()

    def closed(self, greeting: _Greeting) -> None:
        self._greetings.pop(greeting, None)

    def asked(self, line: bytes, transport: asyncio.Transport, peer: str) -> Stream | None:
        """Return the stream that the command asks for, or None: the answer was a refusal."""
        method = self._methods.get(line)
        if method is None:
            self._refuse(transport, NOT_KNOWN)
            return None
        standing = self._caller_of(transport)
        try:
            found = standing.current()
            method_permissions.check(method.path, found)
        except KoinonError as error:
            self._note_refusal(method, standing, peer, error)
            self._refuse(transport, b"-ERR " + ascii(str(error)).encode())
            return None
        if found.principal is None:
            self._gate.unidentified["frames"] += 1
        stream: Stream = FramedStream(
            method.parse,
            peer,
            method.first_bytes_max,
            method.message_bytes_max,
            method.received_bytes_max,
        )
        self._streams[stream] = method, standing
        task = asyncio.get_running_loop().create_task(self._serve(stream, method, standing, peer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return stream

    # --- inside --------------------------------------------------------------------------------

    def _caller_of(self, transport: asyncio.Transport) -> StandingCaller:
        tls: Any = transport.get_extra_info("ssl_object")
        if tls is None:
            return StandingCaller()
        certificate, chain = tls.getpeercert(binary_form=True), verified_chain(tls)
        return StandingCaller(
            self._gate,
            lambda: self._gate.who(certificate or None, lambda: "", chain, stays=True),
        )

    def _refuse(self, transport: asyncio.Transport, answer: bytes) -> None:
        transport.write(answer + END_OF_LINE)
        transport.close()

    def _note_refusal(
        self, method: FramedMethod, standing: StandingCaller, peer: str, error: KoinonError
    ) -> None:
        outcome, who = rpc.code_of(error).name.lower(), "nobody"
        with contextlib.suppress(KoinonError):
            who = standing.current().name
        if self._audit.wants(method.path, outcome):
            self._audit.note(who, peer, method.path, outcome, "", error)
        if self._refusals.may_log():
            log.warning(
                "stream refused at the peer port method=%s peer=%s error=%s unlogged=%d",
                method.path,
                peer,
                error,
                self._refusals.take_unlogged(),
            )

    async def _serve(
        self, stream: Stream, method: FramedMethod, standing: StandingCaller, peer: str
    ) -> None:
        ended_with: KoinonError | None = None
        try:
            found = standing.current()
            caller.set(found)
            first = await self._first_of(stream)
            method_permissions.check_claim(method_permissions.RULES[method.path], found, first)
            with self._places.place(peer):
                stream.put_back(first)
                await method.serve(stream, peer)
        except PeerLostError:
            pass
        except KoinonError as error:
            ended_with = error
            if rpc.code_of(error).name in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
                self._note_refusal(method, standing, peer, error)
        except Exception as error:
            log.exception("serving a stream failed method=%s", method.path)
            ended_with = InternalError(reason=f"{type(error).__name__}: {error}")
        finally:
            del self._streams[stream]
            stream.close(ended_with)

    async def _first_of(self, stream: Stream) -> Any:
        """Return the stream's first message. Streams that send none do not block others."""
        self._silent[stream] = None
        if len(self._silent) > WAITING_MAX:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.close(UnavailableError(reason="too many streams wait for a message"))
        try:
            async with asyncio.timeout(GREETING_S_MAX):
                return await stream.receive()
        except TimeoutError:
            raise UnavailableError(reason="no message came in time") from None
        finally:
            self._silent.pop(stream, None)


class _Greeting(asyncio.Protocol):
    """A connection whose command has not come yet; then a stream takes it over."""

    def __init__(self, port: PeerPort) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(GREETING_S_MAX, self._transport.abort)
        self._port.opened(self)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None:
            return
        self._received += data
        line, end, rest = self._received.partition(END_OF_LINE)
        if not end and len(self._received) <= COMMAND_BYTES_MAX:
            return
        if not end or rest or len(line) > COMMAND_BYTES_MAX:  # nothing is sent before the answer
            self.abort()
            return
        self._end()
        stream = self._port.asked(line, transport, peer_name(transport.get_extra_info("peername")))
        if stream is not None:
            transport.write(WELCOME + END_OF_LINE)
            transport.set_protocol(stream)
            stream.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def abort(self) -> None:
        """Close at once."""
        transport = self._transport
        self._end()
        if transport is not None:
            transport.abort()

    def _end(self) -> None:
        self._transport = None
        self._port.closed(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
