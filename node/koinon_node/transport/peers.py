"""A follower's way to primaries: streams over their Redis ports or gRPC, and pages over gRPC.

A hung or unreachable peer is noticed by those who wait for it long before a connection is given up:
a primary by missing acknowledgements, a follower by a table that names another primary. Keep-alive
is there for connections that are cut in silence: until one is given up, a follower would wait on it
after the network has healed, for as long as TCP's back-off takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from koinon_node.ports import FOLLOW, FollowerEnd, PeerLostError
from koinon_node.transport.grpc_streams import GrpcFollowerStream, error_of_call, retrieved
from koinon_proto.contract.bounds import check_reply
from koinon_proto.contract.errors import KoinonError, NotPrimaryError, WrongClusterError
from koinon_proto.contract.table import NodeInfo, Table
from koinon_proto.security.names import node_name
from koinon_proto.security.transport import PLAIN, Dialing
from koinon_proto.server.framed_greeting import NOT_KNOWN, WELCOME, greet
from koinon_proto.server.framed_stream import FramedStream
from koinon_proto.server.rpc import CHANNEL_OPTIONS
from koinon_proto.v1 import replication_pb2, replication_pb2_grpc

log = logging.getLogger(__name__)

_CONNECT_S_MAX = 1.0
_PAGE_TIMEOUT_S = 10.0
_RETIRED_CHANNEL_S = 30.0  # what is under way may end by itself; streams are opened anew

KEEPALIVE_MS = 2_000
_OPTIONS = (
    *(option for option in CHANNEL_OPTIONS if not option[0].startswith("grpc.keepalive")),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),  # 60 s otherwise, whatever the one above says
    ("grpc.http2.max_pings_without_data", 0),  # or they end after two on a stream that is silent
)

_FOLLOW = b"*2\r\n$13\r\nKOINON.FOLLOW\r\n$1\r\n1\r\n"
_Framed = FramedStream[replication_pb2.FollowRequest, replication_pb2.FollowResponse]


class NodePeers:
    """ports.Peers. Keeps one channel per address, until no node of the table has it any more."""

    def __init__(self, dialing: Dialing = PLAIN) -> None:
        self._dialing = dialing
        self._channels: dict[str, tuple[int, grpc.aio.Channel]] = {}  # with the identity's version
        self._closing: set[asyncio.Task[None]] = set()
        # Redis ports of nodes, with the nodes' epochs: their builds do not know the command, or it
        # is another node that answers there.
        self._by_grpc_alone: set[tuple[str, int]] = set()
        self._told: dict[tuple[str, int], bytes] = {}  # of these: why, as was logged last

    def follow(self, node: NodeInfo) -> FollowerEnd:
        """See ports.Peers."""
        if node.redis_address and (node.redis_address, node.node_epoch) not in self._by_grpc_alone:
            return _OpeningStream(
                lambda: self._framed_or_grpc(node), lambda error: self._led_astray(node, error)
            )
        return self._follow_by_grpc(node)

    async def _framed_or_grpc(self, node: NodeInfo) -> FollowerEnd:
        """Return a stream over the node's Redis port, or over gRPC where none is to be had: gRPC
        then says why, if neither is.
        """
        stream: _Framed = FramedStream(_parsed, node.redis_address)
        address, name = node.redis_address, node_name(node.node_id)
        answer = await greet(self._dialing, stream, address, name, _FOLLOW, _CONNECT_S_MAX)
        if answer == WELCOME:
            return stream
        port = node.redis_address, node.node_epoch
        if answer.startswith(NOT_KNOWN):
            self._by_grpc_alone.add(port)
        if self._told.get(port) != answer:  # a node that is down is asked each second
            self._told[port] = answer
            log.info(
                "follows over gRPC node=%s redis=%s reason=%s",
                node.node_id,
                node.redis_address,
                ascii(answer.decode("utf-8", "replace")),
            )
        return self._follow_by_grpc(node)

    def _led_astray(self, node: NodeInfo, error: KoinonError) -> None:
        """Follow over gRPC only: it is another node that answers at the Redis port."""
        self._by_grpc_alone.add((node.redis_address, node.node_epoch))
        log.warning(
            "another node answers at the Redis port, follows over gRPC node=%s redis=%s reason=%s",
            node.node_id,
            node.redis_address,
            error,
        )

    def _follow_by_grpc(self, node: NodeInfo) -> FollowerEnd:
        call: Any = self._channel(node).stream_stream(
            FOLLOW,
            request_serializer=None,  # ends serialise what they send
            response_deserializer=replication_pb2.FollowResponse.FromString,
        )()
        return GrpcFollowerStream(call, node.address)

    async def read_page(
        self, node: NodeInfo, request: replication_pb2.ReadPageRequest
    ) -> replication_pb2.RecordPage:
        """See ports.Peers."""
        return await self._page(node, lambda stub: stub.ReadPage(request, timeout=_PAGE_TIMEOUT_S))

    async def read_keys(
        self, node: NodeInfo, request: replication_pb2.ReadKeysRequest
    ) -> replication_pb2.RecordPage:
        """See ports.Peers."""
        return await self._page(node, lambda stub: stub.ReadKeys(request, timeout=_PAGE_TIMEOUT_S))

    def on_table(self, table: Table) -> None:
        """Close the channels to nodes that have left the table."""
        known = {node.address for node in table.nodes.values()}
        for address in [a for a in self._channels if a not in known]:
            self._close_later(self._channels.pop(address)[1], 0.0)
        if self._by_grpc_alone or self._told:
            ports = {(node.redis_address, node.node_epoch) for node in table.nodes.values()}
            self._by_grpc_alone &= ports
            self._told = {port: why for port, why in self._told.items() if port in ports}

    async def close(self) -> None:
        for _, channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _page(self, node: NodeInfo, ask: Callable[[Any], Any]) -> replication_pb2.RecordPage:
        channel = self._channel(node)
        try:
            page: replication_pb2.RecordPage = await ask(
                replication_pb2_grpc.ReplicationStub(channel)
            )
            return page
        except grpc.RpcError as error:
            raise error_of_call(error, node.address) from None

    def _channel(self, node: NodeInfo) -> grpc.aio.Channel:
        """Return the channel to the node; a new one once this node's identity has changed, so that
        what connects again does so by the new one.
        """
        version, address = self._dialing.version, node.address
        known = self._channels.get(address)
        if known is None or known[0] != version:
            name = node_name(node.node_id)
            channel = self._dialing.aio_channel(address, name, _OPTIONS)
            self._channels[address] = version, channel
            if known is not None:
                self._close_later(known[1], _RETIRED_CHANNEL_S)
            return channel
        return known[1]

    def _close_later(self, channel: grpc.aio.Channel, grace_s: float) -> None:
        closing = asyncio.ensure_future(channel.close(grace_s))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _parsed(data: bytes) -> replication_pb2.FollowResponse:
    message = replication_pb2.FollowResponse.FromString(data)
    check_reply(message)
    return message


class _OpeningStream:
    """A follower's stream while it is opened, and from then on. What is sent meanwhile waits.
    ``led_astray`` is called when a stream of frames has led to another node than was asked for.
    """

    def __init__(
        self,
        opening: Callable[[], Awaitable[FollowerEnd]],
        led_astray: Callable[[KoinonError], None],
    ) -> None:
        self._led_astray = led_astray
        self._waiting: deque[replication_pb2.FollowRequest] = deque()
        self._stream: FollowerEnd | None = None  # once it is there
        self._opening = asyncio.ensure_future(self._open(opening))
        self._opening.add_done_callback(retrieved)

    async def _open(self, opening: Callable[[], Awaitable[FollowerEnd]]) -> FollowerEnd:
        stream = await opening()
        while self._waiting:
            stream.send(self._waiting.popleft())
        self._stream = stream
        return stream

    @property
    def queued_bytes(self) -> int:
        return self._stream.queued_bytes if self._stream is not None else 0

    def send(self, message: replication_pb2.FollowRequest) -> None:
        if self._stream is not None:
            self._stream.send(message)
        elif self._opening.done():
            raise PeerLostError(reason="the stream could not be opened")
        else:
            self._waiting.append(message)

    async def connected(self) -> None:
        await (await self._opened()).connected()

    async def receive(self) -> replication_pb2.FollowResponse:
        stream = await self._opened()
        try:
            return await stream.receive()
        except (NotPrimaryError, WrongClusterError) as error:  # what its hello was answered with
            if isinstance(stream, FramedStream):
                self._led_astray(error)
            raise

    async def _opened(self) -> FollowerEnd:
        if self._stream is None:
            try:
                return await asyncio.shield(self._opening)
            except asyncio.CancelledError:
                if not self._opening.cancelled():
                    raise
                raise PeerLostError(reason="closed here") from None
        return self._stream

    def close(self, error: KoinonError | None = None) -> None:
        if self._stream is not None:
            self._stream.close(error)
        else:
            self._opening.cancel()
