"""A member's stream of messages to one peer, in frames over the peer's port for them.

To open it, the member asks the peer by gRPC for that port's number, and connects there. A lost
stream is reopened at once; if that fails, it is retried with backoff. A stream also counts as lost
if the peer answers nothing for ``silence_ms``, which is less than an election takes: a connection
may break without a sign. Messages that wait for a lost stream are dropped: Raft sends them again
if they still count.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from koinon_coordinator.core.raft import AppendRequest, Message, SnapshotChunk
from koinon_coordinator.raft.member_config import BATCH_ROOM_BYTES
from koinon_coordinator.raft.message_codec import to_proto
from koinon_proto.contract.bounds import check_reply
from koinon_proto.contract.errors import ConfigurationError, KoinonError
from koinon_proto.security.names import member_name
from koinon_proto.security.transport import Dialing
from koinon_proto.server.framed_greeting import WELCOME, greet
from koinon_proto.server.framed_stream import FramedStream, PeerLostError
from koinon_proto.server.rpc import COMMON_OPTIONS, status_text
from koinon_proto.v1 import raft_pb2_grpc
from koinon_proto.v1.raft_pb2 import GetPeerPortRequest, RaftBatch, RaftExchangeReply, RaftHello

RAFT_PROTOCOL_VERSION = 1
RAFT_COMMAND = b"KOINON.RAFT 1\r\n"
"""By it a member asks a peer port for a stream."""
_MESSAGE_OVERHEAD_BYTES = 64
_REPLY_BYTES_MAX = 16 * 1024
_CONNECT_S_MAX = 1.0  # for each step: to learn the port, and to be accepted there
_SILENCE_MS = 200

log = logging.getLogger(__name__)


class RaftEndpoint(Protocol):
    """The member that a transport serves."""

    @property
    def group(self) -> str:
        """The group's id; "" while this member does not know the id."""
        ...

    @property
    def member_id(self) -> str: ...

    @property
    def store_id(self) -> str: ...

    @property
    def address(self) -> str:
        """The address at which peers reach this member; "" while it is unknown."""
        ...

    def listens_to(self, member_id: str, group: str) -> bool:
        """Return whether messages count from a sender with this id and this group."""
        ...

    def on_messages(self, messages: Sequence[Message]) -> None: ...

    async def is_known_store(self, member_id: str, store_id: str) -> bool:
        """Return whether `member_id` is known by this store id. A member that is met for the first
        time is known by it from now on. Raises MemberStoppedError if the ids cannot be read.
        """
        ...

    def on_store_refused(self, refused_by: str) -> None:
        """Note that a peer knows this member by another data directory."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportConfig:
    """Limits and timeouts of the streams between members."""

    queue_messages_max: int = 4096
    queue_bytes_max: int = 32 << 20
    batch_bytes_max: int = 1 << 20
    batch_messages_max: int = 256
    reconnect_backoff_min_ms: int = 50
    reconnect_backoff_max_ms: int = 300
    silence_ms: int = _SILENCE_MS  # a peer that answers no message for so long is lost
    write_ms: int = 2000  # a peer that reads nothing for so long is lost
    hello_interval_ms: int = 2000  # a stranger at the first hello may be a member by now

    @classmethod
    def of(cls, heartbeat_interval_ms: int) -> "TransportConfig":
        """Return the configuration for this interval of the leader's heartbeats."""
        return cls(silence_ms=max(_SILENCE_MS, 5 * heartbeat_interval_ms // 2))

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


_Stream = FramedStream[RaftBatch, RaftExchangeReply]


@dataclass(frozen=True, slots=True)
class Common:
    """The settings and counters that all streams of one transport share."""

    dialing: Dialing
    config: TransportConfig
    heard_at: dict[str, float] = field(default_factory=dict)
    """By member: when its last batch came (loop time), on its own stream to this member."""
    counters: Counter[str] = field(default_factory=Counter)


class PeerStream:
    """The stream to one peer: a bounded queue, and a task that connects and writes."""

    def __init__(
        self, member_id: str, address: str, endpoint: RaftEndpoint, common: Common
    ) -> None:
        self.address = address
        self.is_open = False  # the peer has accepted the stream, which has not ended yet
        self._member_id = member_id
        self._name = member_name(member_id)  # in the peer's certificate
        self._endpoint = endpoint
        self._dialing = common.dialing
        self._config = common.config
        self._heard_at: Mapping[str, float] = common.heard_at
        self._counters = common.counters
        self._queue: deque[tuple[Message, int]] = deque()  # with their sizes, oldest first
        self._queued_bytes = 0
        self._sent_at = self._unanswered_since = 0.0  # loop time; see ``_require_answers``
        self._is_kept = False  # whether the stream is open even while nothing is queued
        self._why_closed = ""  # the logged reason why the last attempt to open it failed
        self._wake = asyncio.Event()  # set when there is something to do, or the stream has ended
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"raft-stream-{member_id}"
        )

    def enqueue(self, message: Message) -> None:
        """Send the message soon. If the queue is full, the oldest messages are dropped."""
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
        """Set whether the stream stays open while no message is queued."""
        self._is_kept = is_kept
        self._wake.set()

    def stop(self) -> None:
        self._task.cancel()

    async def ended(self) -> None:
        """Return once the task has ended, after ``stop``."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        """Open the stream and write to it, again and again, while it is needed."""
        loop = asyncio.get_running_loop()
        pause_ms = self._config.reconnect_backoff_min_ms
        while True:
            while not self._queue and not self._is_kept:
                self._wake.clear()
                await self._wake.wait()
            began_at = loop.time()
            try:
                stream = await self._open()
            except KoinonError as error:
                self._log_closed(str(error))
            else:
                self._why_closed = ""
                await self._write_on(stream)
            self._counters["stream_ends"] += 1
            self._queue.clear()
            self._queued_bytes = 0
            if loop.time() - began_at > _CONNECT_S_MAX + self._config.write_ms / 1000:
                pause_ms = self._config.reconnect_backoff_min_ms
                continue  # the stream was open for long: reopen it at once
            await asyncio.sleep(pause_ms / 1000 * random.uniform(0.7, 1.0))
            pause_ms = min(pause_ms * 2, self._config.reconnect_backoff_max_ms)

    def _log_closed(self, why: str) -> None:
        if why != self._why_closed:
            self._why_closed = why
            log.info("no stream to peer peer=%s reason=%s", self._member_id, ascii(why))

    # -- opening

    async def _open(self) -> _Stream:
        """Return the stream, once the peer has accepted it.

        Raises:
            KoinonError: the peer cannot be reached, or refuses the caller.
        """
        address = f"{self.address.rpartition(':')[0]}:{await self._peer_port()}"
        stream: _Stream = FramedStream(RaftExchangeReply.FromString, address, _REPLY_BYTES_MAX)
        answer = await greet(
            self._dialing, stream, address, self._name, RAFT_COMMAND, _CONNECT_S_MAX
        )
        if answer != WELCOME:
            raise PeerLostError(reason=f"peer port {address}: {answer.decode('utf-8', 'replace')}")
        return stream

    async def _peer_port(self) -> int:
        options = (*COMMON_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        async with self._dialing.aio_channel(self.address, self._name, options) as channel:
            stub: Any = raft_pb2_grpc.RaftStub(channel)
            try:
                reply = await stub.GetPeerPort(GetPeerPortRequest(), timeout=_CONNECT_S_MAX)
            except grpc.aio.AioRpcError as error:
                raise PeerLostError(reason=f"{self.address}: {status_text(error)}") from None
        check_reply(reply)
        return int(reply.peer_port)

    # -- writing

    async def _write_on(self, stream: _Stream) -> None:
        """Write the queued messages until the stream ends."""
        reply = asyncio.ensure_future(stream.receive())  # comes when the peer ends the stream
        reply.add_done_callback(lambda _: self._wake.set())
        self._sent_at = 0.0
        self.is_open = True
        try:
            with contextlib.suppress(PeerLostError):  # the reply, if there is one, says why
                await self._write_until(reply, stream)
            self._on_reply(await reply)
        except KoinonError as error:
            log.debug("stream ended peer=%s error=%r", self._member_id, error)
        except TimeoutError:
            log.debug("stream silent peer=%s", self._member_id)
        finally:
            self.is_open = False
            reply.cancel()
            stream.close()

    async def _write_until(
        self, reply: "asyncio.Future[RaftExchangeReply]", stream: _Stream
    ) -> None:
        loop, timer = asyncio.get_running_loop(), None
        hello_s = self._config.hello_interval_ms / 1000
        hello_due_at = loop.time()
        try:
            while not reply.done():
                if loop.time() >= hello_due_at:
                    await self._write(stream, RaftBatch(hello=self._hello()))
                    hello_due_at = loop.time() + hello_s
                    timer = loop.call_at(hello_due_at, self._wake.set)
                elif self._queue:
                    await self._write(stream, self._take_batch())
                    self._require_answers(loop.time())
                else:
                    self._wake.clear()
                    await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _write(self, stream: _Stream, batch: RaftBatch) -> None:
        stream.send(batch)
        if stream.is_backed_up:
            async with asyncio.timeout(self._config.write_ms / 1000):
                await stream.drained()

    def _hello(self) -> RaftHello:
        return RaftHello(
            protocol_version=RAFT_PROTOCOL_VERSION,
            group=self._endpoint.group,
            member_id=self._endpoint.member_id,
            store_id=self._endpoint.store_id,
            address=self._endpoint.address,
            receiver_id=self._member_id,
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

    def _require_answers(self, now: float) -> None:
        """Raise TimeoutError if the peer answers none of the messages: its connection may be dead
        in a way that TCP notices only after many seconds. An idle stream is no evidence: followers
        may have had no messages for each other for weeks.
        """
        silence_s = self._config.silence_ms / 1000
        was_idle = now - self._sent_at > silence_s
        self._sent_at = now
        if was_idle or self._heard_at.get(self._member_id, 0.0) >= self._unanswered_since:
            self._unanswered_since = now
        if now - self._unanswered_since > silence_s:
            raise TimeoutError

    def _on_reply(self, reply: RaftExchangeReply) -> None:
        """Note the reason for which the peer has ended the stream."""
        if reply.refusal == RaftExchangeReply.REFUSAL_UNSPECIFIED:
            return
        log.warning("stream refused by peer peer=%s why=%s", self._member_id, reply.detail)
        is_ours = self._endpoint.group in ("", reply.group)
        if reply.refusal == RaftExchangeReply.REFUSAL_STORE_CHANGED and is_ours:
            self._endpoint.on_store_refused(self._member_id)


def _size_bytes(message: Message) -> int:
    if isinstance(message, AppendRequest):
        return _MESSAGE_OVERHEAD_BYTES + sum(entry.size_bytes for entry in message.entries)
    if isinstance(message, SnapshotChunk):
        return _MESSAGE_OVERHEAD_BYTES + len(message.data)
    return _MESSAGE_OVERHEAD_BYTES
