"""Raft messages between members: a stream to each peer (``peer_stream``) and one from each.

A transport delivers each message at most a few times, in any order, or not at all; Raft needs no
more. It does promise bounds (a full queue drops its oldest message) and identity: a message is
passed on only if its sender's hello was right, the member listens to the sender, and the sender
still has the data directory with which it was first seen. Nothing is kept of other senders, and no
connection is made to them.

Every member keeps a stream to every other member of its configuration, even without messages, and
repeats its hello on it. So all pairs, also of followers, know each other's data directories before
an election depends on them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from koinon_coordinator.core.raft import Message
from koinon_coordinator.raft.errors import MemberStoppedError
from koinon_coordinator.raft.message_codec import MalformedMessageError, from_proto
from koinon_coordinator.raft.peer_stream import (
    RAFT_PROTOCOL_VERSION,
    Common,
    PeerStream,
    RaftEndpoint,
    TransportConfig,
)
from koinon_proto.contract.addresses import NAME_CHARS_MAX, is_address
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.security.transport import PLAIN, Dialing
from koinon_proto.server.framed_stream import FramedStream, PeerLostError
from koinon_proto.v1.raft_pb2 import RaftBatch, RaftExchangeReply

LEARNED_ADDRESSES_MAX = 16

PeerBatches = FramedStream[RaftExchangeReply, RaftBatch]

log = logging.getLogger(__name__)


class RaftTransport(Protocol):
    """A member's way to its peers."""

    def attach(self, endpoint: RaftEndpoint) -> None:
        """Begin to deliver messages to `endpoint`."""
        ...

    def set_peers(self, addresses: Mapping[str, str]) -> None:
        """Set the addresses of all other members. A member that is no longer among them can still
        be answered for a while: a leader that is being removed needs the answers.
        """
        ...

    def send(self, messages: Sequence[Message]) -> None:
        """Send the messages whose receivers can be reached; never blocks."""
        ...

    def open_streams(self) -> int:
        """Return the number of open streams to peers."""
        ...

    async def close(self) -> None: ...


class StreamRaftTransport:
    """Both directions of the streams. The process's peer port hands over the streams from peers."""

    def __init__(self, dialing: Dialing = PLAIN, config: TransportConfig | None = None) -> None:
        self._common = Common(dialing, config or TransportConfig())
        self.counters = self._common.counters
        self._endpoint: RaftEndpoint | None = None
        self._configured: dict[str, str] = {}  # member -> address, of the newest configuration
        self._learned: dict[str, str] = {}  # addresses of others, by their hellos, oldest first
        self._peers: dict[str, PeerStream] = {}  # the streams from here, by member
        self._taken: dict[str, asyncio.Timeout] = {}  # ends the stream from each sender

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

    def open_streams(self) -> int:
        return sum(peer.is_open for peer in self._peers.values())

    def _open(self, member_id: str, address: str) -> PeerStream:
        assert self._endpoint is not None
        peer = PeerStream(member_id, address, self._endpoint, self._common)
        self._peers[member_id] = peer
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
        """Note the address of a member that no configuration names yet."""
        if address and member_id not in self._configured:
            self._learned.pop(member_id, None)
            self._learned[member_id] = address
            while len(self._learned) > LEARNED_ADDRESSES_MAX:
                self._forget(next(iter(self._learned)))

    def _forget(self, member_id: str) -> None:
        """Forget a member that no configuration names."""
        del self._learned[member_id]
        self._common.heard_at.pop(member_id, None)
        peer = self._peers.pop(member_id, None)
        if peer is not None:
            peer.stop()
        stream = self._taken.get(member_id)
        if stream is not None:
            _end_now(stream)

    # -- streams from peers

    async def serve_stream(self, stream: PeerBatches, peer: str) -> None:
        """Read one peer's stream until it ends; ``peer`` is the peer's address.

        Raises:
            KoinonError: it ends with that.
        """
        try:
            reply = await self._serve(stream, await stream.receive(), peer)
        except PeerLostError:
            return
        stream.send(reply)

    async def _serve(self, stream: PeerBatches, opening: RaftBatch, peer: str) -> RaftExchangeReply:
        refusal = await self._refused(opening, peer)
        if refusal is not None:
            return refusal
        sender = opening.hello.member_id
        try:
            async with asyncio.timeout(None) as end:
                with self._taking(sender, end):
                    return await self._take(sender, opening, stream, peer)
        except TimeoutError:
            raise UnavailableError(reason=f"another stream of {sender} is taken") from None

    @contextlib.contextmanager
    def _taking(self, sender: str, end: asyncio.Timeout) -> Iterator[None]:
        """Keep only the newest stream of each sender, which has abandoned its earlier one. Streams
        of senders that no configuration names yet are limited to a few.
        """
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
                self._common.heard_at.pop(sender, None)

    async def _take(
        self, sender: str, batch: RaftBatch, stream: PeerBatches, peer: str
    ) -> RaftExchangeReply:
        """Pass on the stream's messages, from the batch with the first hello on."""
        while True:
            endpoint = self._running_endpoint()
            if batch.HasField("hello"):
                self._learn_address(sender, batch.hello.address)
            self._common.heard_at[sender] = asyncio.get_running_loop().time()
            try:
                messages = [from_proto(m, sender, endpoint.member_id) for m in batch.messages]
            except MalformedMessageError as error:
                self.counters["malformed_messages"] += 1
                log.warning("stream refused peer=%s error=%s", peer, error)
                return RaftExchangeReply(
                    refusal=RaftExchangeReply.REFUSAL_MALFORMED, detail=str(error)
                )
            endpoint.on_messages(messages)
            batch = await stream.receive()
            if batch.HasField("hello"):
                refusal = await self._refused(batch, peer, sender)
                if refusal is not None:
                    return refusal

    def _running_endpoint(self) -> RaftEndpoint:
        if self._endpoint is None:
            raise UnavailableError(reason="not running")
        return self._endpoint

    async def _refused(
        self, batch: RaftBatch, peer: str, sender: str = ""
    ) -> RaftExchangeReply | None:
        """Return why the hello in `batch`, of a new stream or of `sender`'s, is refused; None if it
        is not.
        """
        try:
            refusal = await self._refusal(batch, self._running_endpoint(), sender)
        except MemberStoppedError as error:
            raise UnavailableError(reason=str(error)) from error
        if refusal is not None:
            log.warning("stream refused peer=%s why=%s", peer, refusal.detail)
        return refusal

    async def _refusal(
        self, batch: RaftBatch, endpoint: RaftEndpoint, sender: str
    ) -> RaftExchangeReply | None:
        """Return why the stream of this hello is refused or ended; None if it is not."""
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


def _malformed(batch: RaftBatch, sender: str) -> str:
    """Return the fault of the batch's hello, or "". `sender`: the stream's sender; "": a new
    stream.
    """
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
    """Let the timeout expire now."""
    if not stream.expired():
        stream.reschedule(asyncio.get_running_loop().time())
