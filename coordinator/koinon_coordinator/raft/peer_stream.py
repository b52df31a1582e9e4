"""A member's stream to one peer: over gRPC, or in frames where the peer takes them.

It begins over gRPC, which always works. Where the peer has named its peer port, the stream is
opened there too, beside the one that is in use, and what follows is written in frames once the port
has welcomed it. Frames that are lost, or not answered for ``frames_silence_ms`` (less than an
election takes), bring the stream back to gRPC at once. The next try at frames comes later each time
that they do not last. A peer that comes back to gRPC itself is followed: its frames were lost, so
ours may be.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from koinon_coordinator.core.raft import AppendRequest, Message, SnapshotChunk
from koinon_coordinator.raft.config import BATCH_ROOM_BYTES
from koinon_coordinator.raft.message_codec import to_proto
from koinon_proto.contract.errors import ConfigurationError, KoinonError
from koinon_proto.security.names import member_name
from koinon_proto.security.transport import Dialing
from koinon_proto.server.framed_greeting import WELCOME, greet
from koinon_proto.server.framed_stream import FramedStream, PeerLostError
from koinon_proto.server.rpc import COMMON_OPTIONS
from koinon_proto.v1 import raft_pb2_grpc
from koinon_proto.v1.raft_pb2 import RaftBatch, RaftExchangeReply, RaftHello

RAFT_PROTOCOL_VERSION = 1
RAFT_COMMAND = b"KOINON.RAFT 1\r\n"
"""By it a member asks a peer port for a stream."""
_MESSAGE_OVERHEAD_BYTES = 64
_REPLY_BYTES_MAX = 16 * 1024
_CONNECT_S_MAX = 1.0
_FRAMES_SILENCE_MS = 200
_FRAMES_AGAIN_S_MIN, _FRAMES_AGAIN_S_MAX = 2.0, 60.0
_ENDED = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, KoinonError)
"""The ways in which a stream tells that it has ended."""

log = logging.getLogger(__name__)


class RaftEndpoint(Protocol):
    """The member that a transport serves."""

    @property
    def group(self) -> str:
        """The group's id; "" while this member does not know it."""
        ...

    @property
    def member_id(self) -> str: ...

    @property
    def store_id(self) -> str: ...

    @property
    def address(self) -> str:
        """Return where peers reach this member; "" while that is not known."""
        ...

    def listens_to(self, member_id: str, group: str) -> bool:
        """Return whether messages count of one that calls itself so, and its group so."""
        ...

    def on_messages(self, messages: Sequence[Message]) -> None: ...

    async def is_known_store(self, member_id: str, store_id: str) -> bool:
        """Return whether `member_id` is known by this store id; a member first seen is, from now
        on. Raises MemberStoppedError where that cannot be known.
        """
        ...

    def on_store_refused(self, refused_by: str) -> None:
        """A peer knows this member by another data directory."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportConfig:
    """Bounds and times of the streams between members."""

    queue_messages_max: int = 4096
    queue_bytes_max: int = 32 << 20
    batch_bytes_max: int = 1 << 20
    batch_messages_max: int = 256
    reconnect_backoff_min_ms: int = 50
    reconnect_backoff_max_ms: int = 300
    silence_ms: int = 2000  # a peer that is sent to and says nothing for so long: connect anew
    frames_silence_ms: int = _FRAMES_SILENCE_MS  # in frames: back to gRPC, before an election
    hello_interval_ms: int = 2000  # who was a stranger at the first hello may be a member by now

    @classmethod
    def of(cls, heartbeat_interval_ms: int) -> "TransportConfig":
        """Return the configuration of a member whose leader's heartbeats are so far apart."""
        return cls(frames_silence_ms=max(_FRAMES_SILENCE_MS, 5 * heartbeat_interval_ms // 2))

    def __post_init__(self) -> None:
        if not 0 < self.reconnect_backoff_min_ms <= self.reconnect_backoff_max_ms:
            raise ConfigurationError(
                reason=f"reconnect_backoff_min_ms={self.reconnect_backoff_min_ms} must be positive "
                f"and at most reconnect_backoff_max_ms={self.reconnect_backoff_max_ms}"
            )
        if self.batch_bytes_max >= BATCH_ROOM_BYTES:
            raise ConfigurationError(
                reason=f"batch_bytes_max={self.batch_bytes_max} must be below {BATCH_ROOM_BYTES}"
            )
        if self.batch_bytes_max > self.queue_bytes_max:
            raise ConfigurationError(
                reason=f"batch_bytes_max={self.batch_bytes_max} exceeds "
                f"queue_bytes_max={self.queue_bytes_max}"
            )


class PeerStream:
    """The stream to one peer: a bounded queue, and a task that connects and writes.

    ``own_port`` is this member's peer port, which its hellos name. ``heard_at`` says when each
    peer's last batch came (loop time).
    """

    def __init__(
        self,
        member_id: str,
        address: str,
        endpoint: RaftEndpoint,
        dialing: Dialing,
        config: TransportConfig,
        own_port: int,
        heard_at: Mapping[str, float],
        counters: Counter[str],
    ) -> None:
        self.address = address
        self._member_id = member_id
        self._endpoint = endpoint
        self._dialing = dialing
        self._config = config
        self._own_port = own_port
        self._heard_at = heard_at
        self._counters = counters
        self._queue: deque[tuple[Message, int]] = deque()  # with their sizes, oldest first
        self._queued_bytes = 0
        self._sent_at = self._unanswered_since = 0.0  # loop time; see ``_require_answers``
        self._is_kept = False  # whether the stream is open even while nothing is queued
        self._peer_port = 0  # where the peer takes frames; 0: nowhere, as far as is known
        self._opening: asyncio.Task[None] | None = None  # of a stream of frames, beside gRPC's
        self._opened: _Framed | None = None  # it stands: the next session is on it
        self._frames: _FramedCall | None = None  # while this session is one of frames
        self._frames_due_at = 0.0  # loop time; not tried before
        self._frames_again_s = _FRAMES_AGAIN_S_MIN  # after the next failure
        self._why_not_frames = ""  # as was logged last
        self._wake = asyncio.Event()  # set when there is something to do, or the call ended
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"raft-stream-{member_id}"
        )

    @property
    def is_framed(self) -> bool:
        """True while messages go in frames."""
        return self._frames is not None

    def enqueue(self, message: Message) -> None:
        size_bytes = _size_bytes(message)
        self._queue.append((message, size_bytes))
        self._queued_bytes += size_bytes
        while (
            len(self._queue) > self._config.queue_messages_max
            or self._queued_bytes > self._config.queue_bytes_max
        ):
            self._queued_bytes -= self._queue.popleft()[1]
            self._counters["dropped_queue_full"] += 1
        self._wake.set()

    def keep(self, is_kept: bool) -> None:
        """Say whether the stream is to be open even while there is nothing to say."""
        self._is_kept = is_kept
        self._wake.set()

    def frames_at(self, port: int) -> None:
        """Take note of the port at which the peer takes frames; 0: nowhere."""
        if port != self._peer_port:
            self._peer_port = port
            self._frames_due_at, self._frames_again_s = 0.0, _FRAMES_AGAIN_S_MIN
            self._wake.set()

    def follow_to_grpc(self) -> None:
        """The peer has opened its own stream over gRPC: do not wait to find out that frames are
        lost this way too.
        """
        if self._frames is not None:
            self._frames.cancel()

    def stop(self) -> None:
        self._task.cancel()
        if self._opening is not None:
            self._opening.cancel()
        if self._opened is not None:
            self._opened.close()

    async def ended(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        backoff_ms = float(self._config.reconnect_backoff_min_ms)
        while True:
            while not self._queue and not self._is_kept:
                self._wake.clear()
                await self._wake.wait()
            began_at, is_refused = loop.time(), False
            was_framed = self._opened is not None
            try:
                is_refused = await self._session()
            except _ENDED as error:
                log.debug("stream ended peer=%s error=%r", self._member_id, error)
            except TimeoutError:
                log.debug("stream silent peer=%s", self._member_id)
            if self._opened is not None:  # goes on in frames, with all that waits
                continue
            self._counters["stream_ends"] += 1
            if was_framed and not is_refused:  # goes on over gRPC at once, likewise
                if loop.time() - began_at > _FRAMES_AGAIN_S_MAX:
                    self._frames_again_s = _FRAMES_AGAIN_S_MIN
                self._frames_later("the stream was lost")
                continue
            self._queue.clear()
            self._queued_bytes = 0
            if loop.time() - began_at > self._config.silence_ms / 1000:
                backoff_ms = self._config.reconnect_backoff_min_ms
            await asyncio.sleep(backoff_ms / 1000 * random.uniform(0.7, 1.0))
            backoff_ms = min(backoff_ms * 2, self._config.reconnect_backoff_max_ms)
            if is_refused:
                await self._something_to_say(self._config.hello_interval_ms / 1000)

    async def _something_to_say(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._queue:
                    self._wake.clear()
                    await self._wake.wait()

    async def _session(self) -> bool:
        """Write until either side ends the stream, or one of frames stands beside that of gRPC;
        return whether it was refused.
        """
        framed, self._opened = self._opened, None
        if framed is not None:
            self._frames = _FramedCall(framed)
            self._why_not_frames = ""
            log.info("stream goes in frames peer=%s", self._member_id)
            try:
                return await self._write_on(self._frames, self._config.frames_silence_ms / 1000)
            finally:
                self._frames = None
        options = (*COMMON_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        name = member_name(self._member_id)
        async with self._dialing.aio_channel(self.address, name, options) as channel:
            call: Any = raft_pb2_grpc.RaftStub(channel)
            return await self._write_on(call.Exchange(), self._config.silence_ms / 1000)

    async def _write_on(self, call: Any, silence_s: float) -> bool:
        call.add_done_callback(lambda _: self._wake.set())
        self._sent_at = 0.0
        try:
            try:
                await self._write_until_over(call, silence_s)
            except PeerLostError:
                pass  # the answer, if there is one, says why
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                if not call.done():
                    raise
            return self._opened is None and self._on_reply(await call)
        finally:
            if not call.done():
                call.cancel()

    async def _write_until_over(self, call: Any, silence_s: float) -> None:
        loop, timer = asyncio.get_running_loop(), None
        hello_s = self._config.hello_interval_ms / 1000
        hello_due_at = loop.time()
        # Not sooner: the peer takes the newest stream, and might come to this one's hello later.
        frames_from = hello_due_at + hello_s
        try:
            while not call.done() and self._opened is None:
                if loop.time() >= frames_from:
                    self._look_for_frames(loop.time())
                if loop.time() >= hello_due_at:
                    await self._write(call, RaftBatch(hello=self._hello()))
                    hello_due_at = loop.time() + hello_s
                    timer = loop.call_at(hello_due_at, self._wake.set)
                elif self._queue:
                    await self._write(call, self._take_batch())
                    self._require_answers(loop.time(), silence_s)
                else:
                    self._wake.clear()
                    await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _write(self, call: Any, batch: RaftBatch) -> None:
        is_framed = isinstance(call, _FramedCall)
        if is_framed and call.send(batch):
            return
        async with asyncio.timeout(self._config.silence_ms / 1000):
            await (call.drained() if is_framed else call.write(batch))

    # -- frames

    def _look_for_frames(self, now: float) -> None:
        """Begin to open a stream of frames, if the peer lives, takes them, and it is time."""
        heard_at = self._heard_at.get(self._member_id, -_FRAMES_AGAIN_S_MAX)
        if (
            self._peer_port
            and self._frames is None
            and self._opening is None
            and now >= self._frames_due_at
            and now - heard_at < 2 * self._config.hello_interval_ms / 1000
        ):
            self._opening = asyncio.get_running_loop().create_task(self._open_frames())

    async def _open_frames(self) -> None:
        address = f"{self.address.rpartition(':')[0]}:{self._peer_port}"
        stream: _Framed = FramedStream(RaftExchangeReply.FromString, address, _REPLY_BYTES_MAX)
        name = member_name(self._member_id)
        answer = await greet(self._dialing, stream, address, name, RAFT_COMMAND, _CONNECT_S_MAX)
        self._opening = None
        if answer == WELCOME:
            self._opened = stream
            self._wake.set()
        else:
            self._frames_later(ascii(answer.decode("utf-8", "replace")))

    def _frames_later(self, why: str) -> None:
        self._frames_due_at = asyncio.get_running_loop().time() + self._frames_again_s
        self._frames_again_s = min(2 * self._frames_again_s, _FRAMES_AGAIN_S_MAX)
        if why != self._why_not_frames:
            self._why_not_frames = why
            log.info("stream goes over gRPC peer=%s reason=%s", self._member_id, why)

    # -- messages

    def _hello(self) -> RaftHello:
        return RaftHello(
            protocol_version=RAFT_PROTOCOL_VERSION,
            group=self._endpoint.group,
            member_id=self._endpoint.member_id,
            store_id=self._endpoint.store_id,
            address=self._endpoint.address,
            receiver_id=self._member_id,
            peer_port=self._own_port,
        )

    def _take_batch(self) -> RaftBatch:
        batch: list[Message] = []
        room_bytes = self._config.batch_bytes_max
        while self._queue and room_bytes > 0 and len(batch) < self._config.batch_messages_max:
            message, size_bytes = self._queue.popleft()
            self._queued_bytes -= size_bytes
            room_bytes -= size_bytes
            batch.append(message)
        return RaftBatch(messages=map(to_proto, batch))

    def _require_answers(self, now: float, silence_s: float) -> None:
        """Give up a connection on which a peer that is written to never answers: it may be dead
        in a way that TCP notices only after many seconds. A stream that was idle is no evidence:
        followers may have had nothing to say to each other for weeks."""
        was_idle = now - self._sent_at > silence_s
        self._sent_at = now
        if was_idle or self._heard_at.get(self._member_id, 0.0) >= self._unanswered_since:
            self._unanswered_since = now
        if now - self._unanswered_since > silence_s:
            raise TimeoutError

    def _on_reply(self, reply: RaftExchangeReply) -> bool:
        """Take note of how the peer ended the stream; return whether it refused it."""
        if reply.refusal == RaftExchangeReply.REFUSAL_UNSPECIFIED:
            return False
        log.warning("stream refused by peer peer=%s why=%s", self._member_id, reply.detail)
        is_ours = self._endpoint.group in ("", reply.group)
        if reply.refusal == RaftExchangeReply.REFUSAL_STORE_CHANGED and is_ours:
            self._endpoint.on_store_refused(self._member_id)
        return True


_Framed = FramedStream[RaftBatch, RaftExchangeReply]


class _FramedCall:
    """A stream of frames, with the names of a call of gRPC."""

    def __init__(self, stream: _Framed) -> None:
        self._stream = stream
        self._reply = asyncio.ensure_future(stream.receive())
        self._reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._reply.add_done_callback(callback)

    def done(self) -> bool:
        return self._reply.done()

    def cancel(self) -> None:
        self._stream.close()

    def send(self, batch: RaftBatch) -> bool:
        """Send the batch; return whether it leaves at once."""
        self._stream.send(batch)
        return not self._stream.is_backed_up

    async def drained(self) -> None:
        await self._stream.drained()

    def __await__(self) -> Generator[Any, None, RaftExchangeReply]:
        return self._reply.__await__()


def _size_bytes(message: Message) -> int:
    if isinstance(message, AppendRequest):
        return _MESSAGE_OVERHEAD_BYTES + sum(entry.size_bytes for entry in message.entries)
    if isinstance(message, SnapshotChunk):
        return _MESSAGE_OVERHEAD_BYTES + len(message.data)
    return _MESSAGE_OVERHEAD_BYTES
