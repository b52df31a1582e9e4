"""Raft messages between members over gRPC: one stream to each peer, nothing promised.

A transport delivers each message at most a few times, in any order, or not at all; Raft needs no
more. What it does promise is bounds (a full queue drops its oldest message) and identity: a
message is passed on only if its sender's hello was right, the member listens to it, and its data
directory is the one that this member first knew it by. Of all others nothing is kept, and no
connection is made for them.

Every member keeps a stream to every other one of its configuration, even with nothing to say, and
repeats its hello on it. So all pairs know each other's data directories, those of followers too,
before an election depends on that.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from koinon_coordinator.core.raft import AppendRequest, Message, SnapshotChunk
from koinon_coordinator.raft.config import BATCH_ROOM_BYTES
from koinon_coordinator.raft.errors import MemberStoppedError
from koinon_coordinator.raft.message_codec import MalformedMessageError, from_proto, to_proto
from koinon_proto.contract.addresses import NAME_CHARS_MAX, is_address
from koinon_proto.contract.errors import (
    ConfigurationError,
    ResourceExhaustedError,
    UnavailableError,
)
from koinon_proto.security.names import member_name
from koinon_proto.security.transport import PLAIN, Dialing
from koinon_proto.server.rpc import COMMON_OPTIONS, typed_stream
from koinon_proto.v1 import raft_pb2_grpc
from koinon_proto.v1.raft_pb2 import RaftBatch, RaftExchangeReply, RaftHello

RAFT_PROTOCOL_VERSION = 1
LEARNED_ADDRESSES_MAX = 16
STREAMS_WAITING_MAX = 64
"""For their hello, which a member sends at once: beyond that the longest waiting one is ended."""
HELLO_TIMEOUT_S = 5.0
_MESSAGE_OVERHEAD_BYTES = 64

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


class RaftTransport(Protocol):
    """A member's way to its peers."""

    def attach(self, endpoint: RaftEndpoint) -> None:
        """Begin to deliver to `endpoint`."""
        ...

    def set_peers(self, addresses: Mapping[str, str]) -> None:
        """Take the addresses of all other members. A member that is no longer among them can still
        be answered for a while: a leader that is being removed needs the answers."""
        ...

    def send(self, messages: Sequence[Message]) -> None:
        """Send what can be sent; never blocks."""
        ...

    async def close(self) -> None: ...


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
    hello_interval_ms: int = 2000  # who was a stranger at the first hello may be a member by now

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


class GrpcRaftTransport(raft_pb2_grpc.RaftServicer):
    """Both sides of the streams. Mount it on the process's server with `add_to_server`."""

    def __init__(self, dialing: Dialing = PLAIN, config: TransportConfig | None = None) -> None:
        self._dialing = dialing
        self._config = config or TransportConfig()
        self._endpoint: RaftEndpoint | None = None
        self._configured: dict[str, str] = {}  # addresses by member, by the newest configuration
        self._learned: dict[str, str] = {}  # addresses of others, by their hellos, oldest first
        self._peers: dict[str, _PeerStream] = {}  # the streams from here, by member
        self._heard_at: dict[str, float] = {}  # by member: the last batch, loop time
        self._waiting: dict[int, asyncio.Timeout] = {}  # streams for their hello, the oldest first
        self._taken: dict[str, asyncio.Timeout] = {}  # the stream of each sender
        self.counters: Counter[str] = Counter()

    def add_to_server(self, server: Any) -> None:
        raft_pb2_grpc.add_RaftServicer_to_server(self, server)

    # -- RaftTransport

    def attach(self, endpoint: RaftEndpoint) -> None:
        self._endpoint = endpoint

    def set_peers(self, addresses: Mapping[str, str]) -> None:
        assert self._endpoint is not None
        own_id = self._endpoint.member_id
        before, self._configured = self._configured, dict(addresses)
        self._configured.pop(own_id, None)
        for member_id, address in before.items():
            self._learn_address(member_id, address)
        for member_id, peer in list(self._peers.items()):
            if self._address_of(member_id) != peer.address:
                del self._peers[member_id]
                peer.stop()
            else:
                peer.keep(member_id in self._configured)
        for member_id, address in self._configured.items():
            if member_id not in self._peers:
                self._open(member_id, address).keep(True)

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            peer = self._peers.get(message.to)
            if peer is None:
                address = self._address_of(message.to)
                if address is None:
                    continue
                peer = self._open(message.to, address)
            peer.enqueue(message)

    def _open(self, member_id: str, address: str) -> "_PeerStream":
        assert self._endpoint is not None
        peer = self._peers[member_id] = _PeerStream(
            member_id,
            address,
            self._endpoint,
            self._dialing,
            self._config,
            self._heard_at,
            self.counters,
        )
        return peer

    async def close(self) -> None:
        self._endpoint = None
        peers = list(self._peers.values())
        self._peers.clear()
        for peer in peers:
            peer.stop()
        await asyncio.gather(*(peer.ended() for peer in peers))

    def _address_of(self, member_id: str) -> str | None:
        return self._configured.get(member_id) or self._learned.get(member_id)

    def _learn_address(self, member_id: str, address: str) -> None:
        """Note where a member that no configuration names yet can be answered."""
        if address and member_id not in self._configured:
            self._learned.pop(member_id, None)
            self._learned[member_id] = address
            while len(self._learned) > LEARNED_ADDRESSES_MAX:
                self._forget(next(iter(self._learned)))

    def _forget(self, member_id: str) -> None:
        """Keep nothing of a member that no configuration names."""
        del self._learned[member_id]
        self._heard_at.pop(member_id, None)
        peer = self._peers.pop(member_id, None)
        if peer is not None:
            peer.stop()
        stream = self._taken.get(member_id)
        if stream is not None:
            _end_now(stream)

    # -- the service

    @typed_stream
    async def Exchange(  # noqa: N802 (the generated servicer's name)
        self, batches: AsyncIterator[RaftBatch], context: Any
    ) -> RaftExchangeReply:
        """Take one peer's stream until it ends."""
        batches = aiter(batches)
        opening = await self._first(batches)
        if opening is None:
            return RaftExchangeReply()
        refusal = await self._refused(opening, context)
        if refusal is not None:
            return refusal
        sender = opening.hello.member_id
        try:
            async with asyncio.timeout(None) as end:
                with self._taking(sender, end):
                    return await self._take(sender, opening, batches, context)
        except TimeoutError:
            raise UnavailableError(reason=f"another stream of {sender} is taken") from None

    async def _first(self, batches: AsyncIterator[RaftBatch]) -> RaftBatch | None:
        """Return what the stream begins with; None if it just ends."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S) as end:
                self._waiting[id(end)] = end
                if len(self._waiting) > STREAMS_WAITING_MAX:
                    _end_now(next(iter(self._waiting.values())))
                try:
                    return await anext(batches, None)
                finally:
                    del self._waiting[id(end)]
        except TimeoutError:
            raise ResourceExhaustedError(
                resource="streams without a hello", limit=STREAMS_WAITING_MAX
            ) from None

    @contextlib.contextmanager
    def _taking(self, sender: str, end: asyncio.Timeout) -> Iterator[None]:
        """Take one stream of each sender, the newest: it has given up the one before. Of senders
        that no configuration names yet there are few."""
        before = self._taken.pop(sender, None)
        if before is not None:
            _end_now(before)
        self._taken[sender] = end
        strangers = [s for s in self._taken if s not in self._configured]
        if len(strangers) > LEARNED_ADDRESSES_MAX:
            _end_now(self._taken.pop(strangers[0]))
        try:
            yield
        finally:
            if self._taken.get(sender) is end:
                del self._taken[sender]
            if sender not in self._taken and sender not in self._configured:
                self._heard_at.pop(sender, None)

    async def _take(
        self, sender: str, batch: RaftBatch, batches: AsyncIterator[RaftBatch], context: Any
    ) -> RaftExchangeReply:
        """Pass on what comes, from the batch with the first hello on."""
        while True:
            endpoint = self._running_endpoint()
            if batch.HasField("hello"):
                self._learn_address(sender, batch.hello.address)
            self._heard_at[sender] = asyncio.get_running_loop().time()
            try:
                messages = [from_proto(m, sender, endpoint.member_id) for m in batch.messages]
            except MalformedMessageError as error:
                self.counters["malformed_messages"] += 1
                log.warning("stream refused peer=%s error=%s", context.peer(), error)
                return RaftExchangeReply(
                    refusal=RaftExchangeReply.REFUSAL_MALFORMED, detail=str(error)
                )
            endpoint.on_messages(messages)
            following = await anext(batches, None)
            if following is None:
                return RaftExchangeReply()
            batch = following
            if batch.HasField("hello"):
                refusal = await self._refused(batch, context, sender)
                if refusal is not None:
                    return refusal

    def _running_endpoint(self) -> RaftEndpoint:
        if self._endpoint is None:
            raise UnavailableError(reason="not running")
        return self._endpoint

    async def _refused(
        self, batch: RaftBatch, context: Any, sender: str = ""
    ) -> RaftExchangeReply | None:
        """Return why the hello in `batch` is refused, of a new stream or of `sender`'s, or None."""
        try:
            refusal = await self._refusal(batch, self._running_endpoint(), sender)
        except MemberStoppedError as error:
            raise UnavailableError(reason=str(error)) from error
        if refusal is not None:
            log.warning("stream refused peer=%s why=%s", context.peer(), refusal.detail)
        return refusal

    async def _refusal(
        self, batch: RaftBatch, endpoint: RaftEndpoint, sender: str
    ) -> RaftExchangeReply | None:
        """Return why the stream of this hello is not taken, or taken no longer, or None."""
        hello = batch.hello
        reply = RaftExchangeReply
        malformed = _malformed(batch, sender)
        if malformed:
            return reply(refusal=reply.REFUSAL_MALFORMED, detail=malformed)
        if hello.protocol_version != RAFT_PROTOCOL_VERSION:
            detail = (
                f"protocol version {hello.protocol_version} is not known here "
                f"(this member speaks {RAFT_PROTOCOL_VERSION})"
            )
            return reply(refusal=reply.REFUSAL_VERSION, detail=detail)
        if hello.group and endpoint.group and hello.group != endpoint.group:
            detail = f"this is group {endpoint.group!r}, not {hello.group!r}"
            return reply(refusal=reply.REFUSAL_GROUP, detail=detail, group=endpoint.group)
        if hello.receiver_id != endpoint.member_id:
            detail = f"this is member {endpoint.member_id!r}, not {hello.receiver_id!r}"
            return reply(refusal=reply.REFUSAL_RECEIVER, detail=detail)
        if not endpoint.listens_to(hello.member_id, hello.group):
            detail = f"{hello.member_id!r} is not in the configuration of {endpoint.member_id!r}"
            return reply(refusal=reply.REFUSAL_NOT_MEMBER, detail=detail, group=endpoint.group)
        if not await endpoint.is_known_store(hello.member_id, hello.store_id):
            detail = f"member {hello.member_id!r} is known by another data directory"
            return reply(refusal=reply.REFUSAL_STORE_CHANGED, detail=detail, group=endpoint.group)
        return None


class _PeerStream:
    """The stream to one peer: a bounded queue, and a task that connects and writes."""

    def __init__(
        self,
        member_id: str,
        address: str,
        endpoint: RaftEndpoint,
        dialing: Dialing,
        config: TransportConfig,
        heard_at: Mapping[str, float],
        counters: Counter[str],
    ) -> None:
        self.address = address
        self._member_id = member_id
        self._endpoint = endpoint
        self._dialing = dialing
        self._config = config
        self._heard_at = heard_at
        self._counters = counters
        self._queue: deque[tuple[Message, int]] = deque()  # with their sizes, oldest first
        self._queued_bytes = 0
        self._sent_at = self._unanswered_since = 0.0  # loop time; see ``_require_answers``
        self._is_kept = False  # whether the stream is open even while nothing is queued
        self._wake = asyncio.Event()  # set when there is something to write, or the call ended
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"raft-stream-{member_id}"
        )

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

    def stop(self) -> None:
        self._task.cancel()

    async def ended(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        backoff_ms = float(self._config.reconnect_backoff_min_ms)
        while True:
            while not self._queue and not self._is_kept:
                self._wake.clear()
                await self._wake.wait()
            began_at = asyncio.get_running_loop().time()
            is_refused = False
            try:
                is_refused = await self._session()
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
                log.debug("stream ended peer=%s error=%r", self._member_id, error)
            except TimeoutError:
                log.debug("stream silent peer=%s", self._member_id)
            self._counters["stream_ends"] += 1
            self._queue.clear()
            self._queued_bytes = 0
            if asyncio.get_running_loop().time() - began_at > self._config.silence_ms / 1000:
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
        """Write until either side ends the stream; return whether it was refused."""
        loop = asyncio.get_running_loop()
        hello_s = self._config.hello_interval_ms / 1000
        options = (*COMMON_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        name = member_name(self._member_id)
        async with self._dialing.aio_channel(self.address, name, options) as channel:
            stub = raft_pb2_grpc.RaftStub(channel)
            call = stub.Exchange()
            call.add_done_callback(lambda _: self._wake.set())
            hello_due_at, timer = loop.time(), None
            self._sent_at = 0.0
            try:
                while not call.done():
                    if loop.time() >= hello_due_at:
                        await self._write(call, RaftBatch(hello=self._hello()))
                        hello_due_at = loop.time() + hello_s
                        timer = loop.call_at(hello_due_at, self._wake.set)
                    elif self._queue:
                        await self._write(call, self._take_batch())
                        self._require_answers(loop.time())
                    else:
                        self._wake.clear()
                        await self._wake.wait()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                if not call.done():
                    raise
            finally:
                if timer is not None:
                    timer.cancel()
                if not call.done():
                    call.cancel()
            return self._on_reply(await call)

    async def _write(self, call: Any, batch: RaftBatch) -> None:
        async with asyncio.timeout(self._config.silence_ms / 1000):
            await call.write(batch)

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
        """Give up a connection on which a peer that is written to never answers: it may be dead
        in a way that TCP notices only after many seconds. A stream that was idle is no evidence:
        followers may have had nothing to say to each other for weeks."""
        silence_s = self._config.silence_ms / 1000
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


def _malformed(batch: RaftBatch, sender: str) -> str:
    """Return what is wrong with the batch's hello, or "". `sender`: whose stream it is; "": new."""
    hello = batch.hello
    if not batch.HasField("hello") or not hello.member_id or not hello.store_id:
        return "a stream begins with a hello"
    names = (hello.member_id, hello.store_id, hello.group, hello.receiver_id)
    if max(map(len, names)) > NAME_CHARS_MAX:
        return f"a name in the hello is longer than {NAME_CHARS_MAX} characters"
    if hello.address and not is_address(hello.address):
        return "the hello's address is not host:port"
    if sender and hello.member_id != sender:
        return "a stream has one sender"
    return ""


def _end_now(stream: asyncio.Timeout) -> None:
    """End what the time-out is around."""
    if not stream.expired():
        stream.reschedule(asyncio.get_running_loop().time())


def _size_bytes(message: Message) -> int:
    if isinstance(message, AppendRequest):
        return _MESSAGE_OVERHEAD_BYTES + sum(entry.size_bytes for entry in message.entries)
    if isinstance(message, SnapshotChunk):
        return _MESSAGE_OVERHEAD_BYTES + len(message.data)
    return _MESSAGE_OVERHEAD_BYTES
