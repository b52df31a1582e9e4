"""A stream of messages between servers over a socket: each message in a frame of its own.

A frame is a number of 32 bits, little-endian, and as many bytes: the message. With the highest bit
set they are the error (v1.Error) that the stream ends with; a frame without bytes is a sign of
life. A follower asks for a replication stream at a node's Redis port by ``KOINON.FOLLOW``, as
replicas of Redis do by PSYNC; coordinators and nodes ask for theirs at a coordinator's peer port.
Frames are sent once there is the answer ``+OK`` (``framed_greeting``).

gRPC would do all of this, at ten times the processor time for a small message: its own threads take
each one from and to the event loop.

An end that has nothing to send gives a sign of life each second. An end that hears nothing for some
seconds takes the other one for lost: a connection that is cut in silence, or leads to a process
that hangs, ends here long before TCP gives it up.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from koinon_proto.contract import convert
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError, UnavailableError
from koinon_proto.contract.table import MAX_MESSAGE_BYTES
from koinon_proto.process.rounds import until_round_s
from koinon_proto.v1 import errors_pb2

Out = TypeVar("Out", bound=Message)
In = TypeVar("In", bound=Message)

HEAD = struct.Struct("<I")
IS_END = 0x8000_0000
SIGN_OF_LIFE = HEAD.pack(0)
_SIGN_EVERY_S, _SILENCE_S_MAX = 1.0, 4.0
_QUIET_S = 0.8 * _SIGN_EVERY_S  # rounds are not exactly as far apart
_LATE_S = 0.5  # this process itself stood still: what has come meanwhile was not looked at
_FAREWELL_S = 1.0  # what is queued, the reason too, may leave before a stream that ends is cut
_RECEIVED_BYTES_MAX = 4 * 1024 * 1024
"""Of messages that were received and not taken, where a stream has no bound of its own."""
_MESSAGE_BYTES = 256  # what a message takes in memory beside its bytes


@dataclass(kw_only=True, eq=False)
class PeerLostError(KoinonError):
    """The other process cannot be reached, or the stream to it has ended; begin again."""

    reason: str


class FramedStream(asyncio.Protocol, Generic[Out, In]):
    """One end of a stream (a node's ports.Stream). ``parse`` makes a message of its bytes, and
    raises a KoinonError for one that makes no sense. The first message has no more than
    ``first_bytes_max``, others no more than ``message_bytes_max``. The socket is not read while
    more than ``received_bytes_max`` wait. For the event loop only.
    """

    def __init__(
        self,
        parse: Callable[[bytes], In],
        peer: str,
        first_bytes_max: int = MAX_MESSAGE_BYTES,
        message_bytes_max: int = MAX_MESSAGE_BYTES,
        received_bytes_max: int = 0,
    ) -> None:
        self._parse = parse
        self._peer = peer
        self._size_max = first_bytes_max  # of the message that comes next
        self._message_bytes_max = message_bytes_max
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._partial = bytearray()  # a frame that is coming in
        self._partial_wants = 0  # as far as is known, the bytes that it has in all
        self._received: deque[tuple[In, int]] = deque()  # not taken, each with its size
        self._received_bytes = 0
        self._received_bytes_max = received_bytes_max or _RECEIVED_BYTES_MAX
        self._arrival: asyncio.Future[None] | None = None  # what ``receive`` waits for
        self._lost: KoinonError | None = None  # what ``receive`` raises once all is taken
        self._is_paused = False  # the socket is not read
        self.is_backed_up = False  # what was sent does not leave: wait until ``drained``
        self._room: asyncio.Future[None] | None = None  # what ``drained`` waits for
        self._heard_at = self._sent_at = 0.0
        self._ticking: asyncio.TimerHandle | None = None

    # --- a node's ports.Stream ------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, message: Out) -> None:
        self.send_encoded((message.SerializeToString(),))

    def send_encoded(self, parts: Sequence[bytes]) -> None:
        if self._lost is not None or self._transport is None:
            raise PeerLostError(reason=str(self._lost or f"no connection to {self._peer}"))
        self._transport.writelines((HEAD.pack(sum(map(len, parts))), *parts))
        self._sent_at = self._loop.time()

    async def connected(self) -> None:
        """See a node's ports.FollowerEnd: a framed stream is connected from the beginning."""

    async def receive(self) -> In:
        while not self._received:
            if self._lost is not None:
                raise self._lost
            self._arrival = self._loop.create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        message, size = self._received.popleft()
        self._received_bytes -= size
        if self._is_paused and self._received_bytes < self._received_bytes_max // 2:
            self._read_on()
        return message

    async def drained(self) -> None:
        """Return once what was sent has left this process, but for some ten KB, or is lost. One
        caller at a time.
        """
        while self.is_backed_up and self._lost is None:
            self._room = self._loop.create_future()
            try:
                await self._room
            finally:
                self._room = None

    def close(self, error: KoinonError | None = None) -> None:
        transport, self._transport = self._transport, None
        self._received.clear()
        self._lose(PeerLostError(reason="closed here"))
        if transport is None:
            return
        if error is not None and not transport.is_closing():
            data = convert.error_to_proto(error).SerializeToString()
            transport.writelines((HEAD.pack(IS_END | len(data)), data))
        transport.close()
        self._loop.call_later(_FAREWELL_S, transport.abort)

    # --- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._lost is not None:
            self._transport.abort()
            return
        self._heard_at = self._sent_at = self._loop.time()
        self._tick_later()

    def data_received(self, data: bytes | bytearray) -> None:
        self._heard_at = self._loop.time()
        if self._partial:
            self._partial += data
            if len(self._partial) < self._partial_wants:
                return
            data, self._partial = self._partial, bytearray()
        view = memoryview(data)
        at, end, wants = 0, len(data), HEAD.size
        while self._lost is None and end - at >= HEAD.size:
            (head,) = HEAD.unpack_from(data, at)
            size = head & ~IS_END
            if size > self._size_max:
                reason = f"a frame has more than {self._size_max} bytes"
                self._fail(InvalidArgumentError(field="message", reason=reason))
                return
            body, wants = at + HEAD.size, HEAD.size + size
            if end - at < wants:
                break
            at, wants = at + wants, HEAD.size
            if head & IS_END:
                self._ended(bytes(view[body:at]))
            elif size:
                self._take(bytes(view[body:at]))
        if at < end:
            self._partial += view[at:]
            self._partial_wants = wants

    def pause_writing(self) -> None:
        self.is_backed_up = True

    def resume_writing(self) -> None:
        self.is_backed_up = False
        _wake(self._room)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lose(PeerLostError(reason=f"{self._peer}: {error or 'the stream has ended'}"))

    # --- inside --------------------------------------------------------------------------------

    def put_back(self, message: In) -> None:
        """Have ``receive`` return a message again."""
        self._received.appendleft((message, 0))

    def _take(self, data: bytes) -> None:
        try:
            message = self._parse(data)
        except DecodeError as error:
            self._fail(InvalidArgumentError(field="message", reason=f"cannot be read: {error}"))
            return
        except KoinonError as error:
            self._fail(error)
            return
        self._size_max = self._message_bytes_max
        size = len(data) + _MESSAGE_BYTES
        self._received.append((message, size))
        self._received_bytes += size
        _wake(self._arrival)
        if self._received_bytes > self._received_bytes_max and not self._is_paused:
            self._is_paused = True
            if self._transport is not None:
                self._transport.pause_reading()

    def _ended(self, data: bytes) -> None:
        """Note the error with which the other end has ended the stream."""
        try:
            error = convert.error_from_proto(errors_pb2.Error.FromString(data))
        except DecodeError:
            error = UnavailableError(reason=f"{self._peer} ended the stream")
        self._fail(error)

    def _fail(self, error: KoinonError) -> None:
        """Accept nothing more: ``receive`` raises this error. The caller closes."""
        self._lose(error)
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _lose(self, error: KoinonError) -> None:
        self._lost = self._lost or error
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        _wake(self._arrival)
        _wake(self._room)

    def _read_on(self) -> None:
        self._is_paused = False
        self._heard_at = self._loop.time()
        if self._transport is not None and self._lost is None:
            self._transport.resume_reading()

    def _tick_later(self) -> None:
        now = self._loop.time()
        due = now + until_round_s(now, _SIGN_EVERY_S)
        self._ticking = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        now = self._loop.time()
        if now - due > _LATE_S or self._is_paused:
            self._heard_at = now
        if now - self._heard_at > _SILENCE_S_MAX:
            transport, self._transport = self._transport, None
            reason = f"{self._peer}: nothing heard for {_SILENCE_S_MAX:.0f} s"
            self._lose(PeerLostError(reason=reason))
            if transport is not None:
                transport.abort()
            return
        if now - self._sent_at > _QUIET_S and self._transport is not None:
            self._transport.write(SIGN_OF_LIFE)
            self._sent_at = now
        self._tick_later()


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
