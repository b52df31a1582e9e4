"""The greeting by which a connection becomes a stream of frames, on the side that asks for it.

The caller sends one command, and nothing more before the answer, a line: ``+OK`` and the connection
carries frames from there on, ``-`` and a reason and it is closed. All commands of the Redis port
are answered so, too.
"""

from __future__ import annotations

import asyncio
from typing import Any

from koinon_proto.security.transport import Dialing
from koinon_proto.server.framed_stream import FramedStream

WELCOME = b"+OK"
NOT_KNOWN = b"-ERR unknown command"
END_OF_LINE = b"\r\n"
HEARTBEATS_COMMAND = b"KOINON.HEARTBEATS 1" + END_OF_LINE
"""By it a node asks a coordinator's peer port for a stream."""
FIRST_HEARTBEAT_BYTES_MAX = 128 * 1024
"""Of the first heartbeat on a connection, which a stranger may have sent."""
_ANSWER_BYTES_MAX = 16 * 1024


async def greet(
    dialing: Dialing,
    stream: FramedStream[Any, Any],
    address: str,
    name: str,
    command: bytes,
    timeout_s: float,
) -> bytes:
    """Ask the server of that name (security.names) at the address for a stream; return its answer
    without the end of the line, or why there is none. ``stream`` has the connection if that is
    ``WELCOME``; else both are closed.
    """
    greeting = _Greeting(stream, command)
    try:
        async with asyncio.timeout(timeout_s):
            await dialing.connect(lambda: greeting, address, name)
            answer = await greeting.answer
    except (OSError, TimeoutError, ValueError) as error:  # the last: it is no address
        answer = str(error).encode() or b"no answer in time"
    except BaseException:
        stream.close()
        greeting.abort()
        raise
    if answer != WELCOME:
        stream.close()
        greeting.abort()
    return answer


class _Greeting(asyncio.Protocol):
    """Asks for a stream, and gives its connection to the stream once the server has agreed."""

    def __init__(self, stream: FramedStream[Any, Any], command: bytes) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """The server's, without the end of the line."""
        self._stream = stream
        self._command = command
        self._transport: asyncio.Transport | None = None
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._command)

    def data_received(self, data: bytes) -> None:
        if self.answer.done() or self._transport is None:
            return
        self._received += data
        answer, end, rest = self._received.partition(END_OF_LINE)
        if not end and len(self._received) < _ANSWER_BYTES_MAX:
            return
        if answer == WELCOME:
            transport, self._transport = self._transport, None
            transport.set_protocol(self._stream)
            self._stream.connection_made(transport)
            if rest:
                self._stream.data_received(rest)
        self.answer.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.answer.done():
            self.answer.set_result(str(error or "the connection was closed").encode())

    def abort(self) -> None:
        """Cut the connection, unless it is the stream's."""
        if self._transport is not None:
            self._transport.abort()
