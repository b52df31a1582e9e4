"""A channel without gRPC's core: gRPC's protocol over asyncio and h2.

For forked children of processes that have used the core, where the core cannot run
(``koinon.driver.forks``). It implements the part of ``grpc.aio.Channel`` that ``Connection`` uses:
states, unary calls, and streams read one message at a time. It is slower than the core for
thousands of rows.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from koinon.driver.resets import reset_at_close
from koinon_proto.contract.table import MAX_MESSAGE_BYTES
from koinon_proto.security.names import ANY_SERVER
from koinon_proto.security.transport import PLAIN, Dialing

Code = grpc.StatusCode
State = grpc.ChannelConnectivity
Metadata = Sequence[tuple[str, str]]

_WINDOW_BYTES = 8 * 1024 * 1024  # flow-control windows: of a call, and of a connection
_FRAME_BYTES = 1024 * 1024
_CALLS_MAX = 200  # calls in flight; further ones wait. A server accepts 256 on a connection
_AGAIN_S = 0.2  # pause after a failed attempt to connect
_SILENT_MS = 15_000  # how long the kernel retransmits to a silent peer before it gives up
_CODES = {code.value[0]: code for code in Code}


class Channel:
    """The channel to one address; connects on request. Belongs to one event loop."""

    def __init__(self, address: str, dialing: Dialing = PLAIN, *, connect_s_max: float) -> None:
        self._address = address
        self._dialing = dialing
        self._connect_s_max = connect_s_max
        self._loop = asyncio.get_running_loop()
        self._state = State.IDLE
        self._changed = asyncio.Event()  # replaced with each change of the state
        self._connecting: asyncio.Task[None] | None = None
        self._connection: _Connection | None = None
        # connections that finish their calls and accept no more
        self._leaving: set[_Connection] = set()
        self._again_at = 0.0  # no attempt to connect before this time

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        begins = self._state is State.IDLE or (
            self._state is State.TRANSIENT_FAILURE and self._loop.time() >= self._again_at
        )
        if try_to_connect and begins:
            self._enter(State.CONNECTING)
            self._connecting = self._loop.create_task(self._connect())
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self._state is last:
            await self._changed.wait()

    def unary_unary(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: Any,
    ) -> Callable[..., Any]:
        async def call(request: Any, *, timeout: float, metadata: Metadata = ()) -> Any:
            begun: _Call | None = None
            try:
                async with asyncio.timeout(timeout):
                    begun = await self._begin(path, request_serializer(request), timeout, metadata)
                    answer = await begun.read()
                    await begun.read()  # the end of the stream: an error may follow the answer
            except TimeoutError:
                raise _failure(Code.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            finally:
                if begun is not None:
                    begun.cancel()  # cancel unless it has ended
            if answer is grpc.aio.EOF:
                raise _failure(Code.INTERNAL, "no answer")
            return response_deserializer(answer)

        return call

    def unary_stream(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: Any,
    ) -> Callable[..., Any]:
        def call(request: Any, *, metadata: Metadata = ()) -> _Answers:
            begun = self._begin(path, request_serializer(request), None, metadata)
            return _Answers(self._loop.create_task(begun), response_deserializer)

        return call

    async def close(self) -> None:
        """End every call in flight: its waiting caller is cancelled."""
        self._enter(State.SHUTDOWN)
        if self._connecting is not None:
            self._connecting.cancel()
        connection, self._connection = self._connection, None
        for one in (connection, *self._leaving):
            if one is not None:
                one.close()

    async def _connect(self) -> None:
        connection = _Connection(self._on_leaving, self._on_lost)
        try:
            async with asyncio.timeout(self._connect_s_max):
                await self._dialing.connect(lambda: connection, self._address, ANY_SERVER, "h2")
                await connection.ready.wait()
        except (OSError, TimeoutError):
            connection.close()
            self._fail()
        except BaseException:
            connection.close()
            raise
        else:
            if connection.lost or connection.leaving:
                self._fail()
            else:
                self._connection = connection
                self._enter(State.READY)

    def _fail(self) -> None:
        self._again_at = self._loop.time() + _AGAIN_S
        self._enter(State.TRANSIENT_FAILURE)

    def _on_leaving(self, connection: _Connection) -> None:
        self._leaving.add(connection)
        self._let_go(connection)

    def _on_lost(self, connection: _Connection) -> None:
        self._leaving.discard(connection)
        self._let_go(connection)

    def _let_go(self, connection: _Connection) -> None:
        if connection is self._connection:
            self._connection = None
            self._enter(State.IDLE)

    def _enter(self, state: grpc.ChannelConnectivity) -> None:
        if self._state is not State.SHUTDOWN:
            self._state = state
            self._changed.set()
            self._changed = asyncio.Event()

    async def _begin(
        self, path: str, message: bytes, timeout_s: float | None, metadata: Metadata
    ) -> _Call:
        if self._connection is None:
            raise _not_sent()
        headers = [
            (":method", "POST"),
            (":scheme", "https" if self._dialing.uses_tls else "http"),
            (":path", path),
            (":authority", self._address),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        if timeout_s is not None:
            headers.append(("grpc-timeout", f"{max(1, round(timeout_s * 1000))}m"))
        return await self._connection.begin(headers, message)


class _Call:
    """One call: the messages received, and how it ended."""

    def __init__(self, connection: _Connection, stream_id: int) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._received = bytearray()  # received bytes of messages, each after its length
        self._headers: dict[str, str] = {}
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the end
        self.error: BaseException | None = None  # the error that ended it
        self.ended = asyncio.Event()

    async def read(self) -> Any:
        """Return the next message, or ``grpc.aio.EOF``.

        Raises:
            grpc.aio.AioRpcError: the call failed.
            asyncio.CancelledError: the channel was closed.
        """
        message = await self._messages.get()
        if message is not None:
            return message
        self._messages.put_nowait(None)  # for the next read
        if self.error is not None:
            raise self.error
        return grpc.aio.EOF

    def cancel(self) -> None:
        if not self.ended.is_set():
            self._connection.reset(self._stream_id)
            self.end(_failure(Code.CANCELLED, "Locally cancelled by application!"))

    # --- from the connection --------------------------------------------------------------------

    def on_headers(self, headers: Sequence[tuple[str, str]]) -> None:
        self._headers.update(headers)

    def on_data(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= 5:
            length = int.from_bytes(received[1:5], "big")
            if received[0] or length > MAX_MESSAGE_BYTES:
                self._connection.reset(self._stream_id)
                self.end(_failure(Code.RESOURCE_EXHAUSTED, f"an answer of {length} bytes"))
                return
            if len(received) < 5 + length:
                return
            self._messages.put_nowait(bytes(received[5 : 5 + length]))
            del received[: 5 + length]

    def on_end(self) -> None:
        status = self._headers.get("grpc-status", "")
        code = _CODES.get(int(status), Code.UNKNOWN) if status.isdigit() else Code.UNKNOWN
        if code is Code.OK:
            self.end(None)
            return
        said = unquote(self._headers.get("grpc-message", f"HTTP {self._headers.get(':status')}"))
        self.end(_failure(code, said, self._headers))

    def end(self, error: BaseException | None) -> None:
        if not self.ended.is_set():
            self.error = error
            self.ended.set()
            self._messages.put_nowait(None)


class _Answers:
    """A stream that is read one message at a time, with the interface of ``grpc.aio``."""

    def __init__(
        self, begun: asyncio.Task[_Call], response_deserializer: Callable[[bytes], Any]
    ) -> None:
        self._begun = begun
        self._deserialize = response_deserializer

    async def read(self) -> Any:
        try:
            answer = await (await asyncio.shield(self._begun)).read()
        except grpc.aio.UsageError as error:
            raise _failure(Code.UNAVAILABLE, str(error)) from None
        return answer if answer is grpc.aio.EOF else self._deserialize(answer)

    def cancel(self) -> None:
        if not self._begun.done():
            self._begun.cancel()
        elif not self._begun.cancelled() and self._begun.exception() is None:
            self._begun.result().cancel()

    async def code(self) -> None:
        """Wait for the end of the call; ``read`` reports how it ended."""
        await asyncio.wait([self._begun])
        if not self._begun.cancelled() and self._begun.exception() is None:
            await self._begun.result().ended.wait()


class _Http(H2Connection):
    """An h2 connection that follows the standard after a GOAWAY: accepted calls continue. h2 itself
    treats GOAWAY as the end of the connection.
    """

    def _receive_goaway_frame(self, frame: Any) -> Any:
        state, unsent = self.state_machine.state, self.data_to_send()
        frames, events = super()._receive_goaway_frame(frame)
        self.state_machine.state = state
        self._data_to_send += unsent
        return frames, events


class _Connection(asyncio.Protocol):
    """One HTTP/2 connection."""

    def __init__(
        self, on_leaving: Callable[[_Connection], None], on_lost: Callable[[_Connection], None]
    ) -> None:
        self.ready = asyncio.Event()  # the peer has sent its settings, or is gone
        self.lost = False
        self.leaving = False  # the peer accepts no more calls
        self._on_leaving = on_leaving
        self._on_lost = on_lost
        self._http = _Http(config=H2Configuration(client_side=True, header_encoding="utf-8"))
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, _Call] = {}  # calls in flight, by stream id
        self._room = asyncio.Semaphore(_CALLS_MAX)
        self._window = asyncio.Event()  # replaced whenever the windows allow more to be sent

    async def begin(self, headers: list[tuple[str, str]], message: bytes) -> _Call:
        """Send a call's request.

        Raises:
            grpc.aio.UsageError: nothing was sent.
        """
        await self._room.acquire()
        if self.lost or self.leaving:
            self._room.release()
            raise _not_sent()
        stream_id = self._http.get_next_available_stream_id()
        call = self._calls[stream_id] = _Call(self, stream_id)
        self._http.send_headers(stream_id, headers)
        rest = memoryview(b"\0" + len(message).to_bytes(4, "big") + message)
        try:
            while rest and not call.ended.is_set():
                rest = rest[self._send(stream_id, rest) :]
                if rest:
                    await self._window.wait()
        except BaseException:
            call.cancel()
            raise
        if rest:  # the call ended before its request was sent completely
            self._tell_reset(stream_id)
        return call

    def _send(self, stream_id: int, rest: memoryview) -> int:
        """Send as much as flow control allows now; return the number of bytes."""
        http, sent = self._http, 0
        window = http.local_flow_control_window(stream_id)
        while sent < min(window, len(rest)):
            size = min(window - sent, len(rest) - sent, http.max_outbound_frame_size)
            last = sent + size == len(rest)
            http.send_data(stream_id, bytes(rest[sent : sent + size]), end_stream=last)
            sent += size
        self._flush()
        return sent

    def reset(self, stream_id: int) -> None:
        """Reset the stream: no caller waits for its answer any more."""
        if self._forget(stream_id) is not None:
            self._tell_reset(stream_id)

    def _tell_reset(self, stream_id: int) -> None:
        if not self.lost:
            with contextlib.suppress(ProtocolError):
                self._http.reset_stream(stream_id, ErrorCodes.CANCEL)
            self._flush()

    def _forget(self, stream_id: int) -> _Call | None:
        call = self._calls.pop(stream_id, None)
        if call is not None:
            self._room.release()
            if self.leaving and not self._calls and not self.lost:
                self._loop.call_soon(self._lose, "all calls are answered")
        return call

    def _flush(self) -> None:
        if self._transport is not None and (data := self._http.data_to_send()):
            self._transport.write(data)

    def close(self) -> None:
        """Abort the connection; callers that wait for an answer are cancelled."""
        self.lost = True
        self._on_window()
        for stream_id, call in list(self._calls.items()):
            self._forget(stream_id)
            call.end(asyncio.CancelledError())
        if self._transport is not None:
            self._transport.abort()

    # --- from the transport ---------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)
        reset_at_close(sock)
        self._http.initiate_connection()
        self._http.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW_BYTES,
                SettingCodes.MAX_FRAME_SIZE: _FRAME_BYTES,
                SettingCodes.ENABLE_PUSH: 0,
            }
        )
        self._http.increment_flow_control_window(_WINDOW_BYTES)
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._http.receive_data(data):
                self._take(event)
        except ProtocolError as error:
            self._lose(f"invalid HTTP/2: {error}")
        self._flush()

    def _take(self, event: Event) -> None:
        stream_id: int | None = getattr(event, "stream_id", None)
        call = self._calls.get(stream_id) if stream_id else None
        match event:
            case RemoteSettingsChanged():
                self.ready.set()
                self._on_window()
            case WindowUpdated():
                self._on_window()
            case ConnectionTerminated(last_stream_id=last):
                self._leave(last or 0)
            case DataReceived(data=data, flow_controlled_length=length, stream_id=stream):
                assert data is not None
                assert length is not None
                with contextlib.suppress(ProtocolError):  # the call was given up
                    self._http.acknowledge_received_data(length, stream)
                if call is not None:
                    call.on_data(data)
            case ResponseReceived(headers=headers) | TrailersReceived(headers=headers):
                if call is not None:
                    call.on_headers([(str(name), str(value)) for name, value in headers or ()])
            case StreamEnded(stream_id=stream):
                if call is not None:
                    self._forget(stream)
                    call.on_end()
            case StreamReset(stream_id=stream, error_code=code):
                if call is not None:
                    self._forget(stream)
                    call.end(_failure(Code.UNAVAILABLE, f"the call was cut off: {code}"))
            case _:
                pass

    def _leave(self, last_stream_id: int) -> None:
        """Send no more calls after a GOAWAY. Calls after this stream count as never sent."""
        self.leaving = True
        self.ready.set()
        for stream_id, call in list(self._calls.items()):
            if stream_id > last_stream_id:
                self._forget(stream_id)
                call.end(_not_sent())
        self._on_window()
        self._on_leaving(self)
        if not self._calls:
            self._lose("the other side closes it")

    def _on_window(self) -> None:
        self._window.set()
        self._window = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"the connection was lost{f': {exc}' if exc else ''}")

    def _lose(self, why: str) -> None:
        if self.lost:
            return
        self.lost = True
        self.ready.set()
        self._on_window()
        for stream_id, call in list(self._calls.items()):
            self._forget(stream_id)
            call.end(_failure(Code.UNAVAILABLE, why))
        if self._transport is not None:
            self._transport.close()
        self._on_lost(self)


def _not_sent() -> grpc.aio.UsageError:
    return grpc.aio.UsageError("there is no connection")


def _failure(
    code: grpc.StatusCode, details: str, headers: dict[str, str] | None = None
) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata()
    for name, value in (headers or {}).items():
        if name.endswith("-bin"):
            trailing.add(name, base64.b64decode(value + "=" * (-len(value) % 4)))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)
