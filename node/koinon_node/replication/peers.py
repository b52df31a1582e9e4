"""A follower's connections to primaries: framed streams over their data ports, pages over gRPC.

The waiting side notices a hung or unreachable peer long before the connection ends: a primary by
missing acknowledgements, a follower by a table that names another primary. Keep-alive ends
connections that were cut silently: else a follower would wait on such a connection after the
network has healed, for as long as TCP backs off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from koinon_node.ports import FollowerEnd, PeerLostError
from koinon_proto.contract.bounds import check_reply
from koinon_proto.contract.table import NodeInfo, Table
from koinon_proto.security.names import node_name
from koinon_proto.security.transport import PLAIN, Dialing
from koinon_proto.server.framed_greeting import WELCOME, greet
from koinon_proto.server.framed_stream import FramedStream
from koinon_proto.server.rpc import CHANNEL_OPTIONS, error_of, status_text
from koinon_proto.v1 import replication_pb2, replication_pb2_grpc

_CONNECT_S_MAX = 1.0
_PAGE_TIMEOUT_S = 10.0
_RETIRED_CHANNEL_S = 30.0  # the grace for calls under way on a channel that is replaced

KEEPALIVE_MS = 2_000
_OPTIONS = (
    *(option for option in CHANNEL_OPTIONS if not option[0].startswith("grpc.keepalive")),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),  # 60 s otherwise, whatever the one above says
    ("grpc.http2.max_pings_without_data", 0),  # else pings stop after two on a silent stream
)

_FOLLOW = b"*2\r\n$13\r\nKOINON.FOLLOW\r\n$1\r\n1\r\n"
_Framed = FramedStream[replication_pb2.FollowRequest, replication_pb2.FollowResponse]


class NodePeers:
    """Implements ports.Peers. Keeps one channel per address while a node of the table has the
    address.
    """

    def __init__(self, dialing: Dialing = PLAIN) -> None:
        self._dialing = dialing
        self._channels: dict[str, tuple[int, grpc.aio.Channel]] = {}  # with the identity's version
        self._closing: set[asyncio.Task[None]] = set()

    async def follow(self, node: NodeInfo) -> FollowerEnd:
        """See ports.Peers."""
        address = node.redis_address
        stream: _Framed = FramedStream(_parsed, address)
        name = node_name(node.node_id)
        answer = await greet(self._dialing, stream, address, name, _FOLLOW, _CONNECT_S_MAX)
        if answer != WELCOME:
            text = answer.decode("utf-8", "replace")
            raise PeerLostError(reason=f"{node.node_id} at its data port {address!r}: {text}")
        return stream

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
            said = error_of(error)
            raise said or PeerLostError(reason=f"{node.address}: {status_text(error)}") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The channel was closed during the call: the node has left the table.
            raise PeerLostError(reason=f"{node.address} has left the table") from None

    def _channel(self, node: NodeInfo) -> grpc.aio.Channel:
        """Return the channel to the node. After a change of this node's identity it is a new
        channel, so that later connections use the new certificate.
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
