"""A Raft transport that listens: a server that names its peer port, and that port."""

from __future__ import annotations

from typing import Any

import grpc

from koinon_coordinator.raft import RAFT_COMMAND, StreamRaftTransport
from koinon_coordinator.services.peer_port import FramedMethod, PeerPort
from koinon_proto.security.authentication import open_gate
from koinon_proto.security.method_permissions import RAFT_MESSAGES
from koinon_proto.security.transport import PLAIN, Listening
from koinon_proto.server.framed_greeting import WELCOME, greet
from koinon_proto.server.framed_stream import FramedStream
from koinon_proto.v1 import raft_pb2_grpc
from koinon_proto.v1.raft_pb2 import GetPeerPortResponse, RaftBatch, RaftExchangeReply

MIB = 1 << 20


class Listener(raft_pb2_grpc.RaftServicer):
    """From ``start`` to ``stop``. ``named_port`` is the number that it tells; 0: the port's own."""

    def __init__(self, transport: StreamRaftTransport, address: str) -> None:
        method = FramedMethod(
            path=RAFT_MESSAGES,
            parse=RaftBatch.FromString,
            serve=transport.serve_stream,
            first_bytes_max=16 << 10,
            message_bytes_max=8 * MIB,
        )
        self._methods = {RAFT_COMMAND: method}
        self._address = address
        self.port = PeerPort(self._methods, Listening(), open_gate())
        self.named_port = 0
        self.asked = 0  # how often for the port's number
        self._server: Any = None

    async def GetPeerPort(self, request: Any, context: Any) -> GetPeerPortResponse:  # noqa: N802
        self.asked += 1
        return GetPeerPortResponse(peer_port=self.named_port or self.port.port)

    async def start(self) -> Listener:
        await self.port.start("127.0.0.1:0")
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        raft_pb2_grpc.add_RaftServicer_to_server(self, self._server)
        self._server.add_insecure_port(self._address)
        await self._server.start()
        return self

    async def move_port(self) -> None:
        """Close the port, and listen at another one."""
        await self.port.stop()
        self.port = PeerPort(self._methods, Listening(), open_gate())
        await self.port.start("127.0.0.1:0")

    async def stop(self) -> None:
        await self.port.stop()
        await self._server.stop(0)


Stream = FramedStream[RaftBatch, RaftExchangeReply]


async def stream_to(port: int, *batches: RaftBatch) -> Stream:
    """Return a stream to the peer port, on which these batches were sent."""
    stream: Stream = FramedStream(RaftExchangeReply.FromString, "port")
    assert await greet(PLAIN, stream, f"127.0.0.1:{port}", "", RAFT_COMMAND, 60.0) == WELCOME
    for batch in batches:
        stream.send(batch)
    return stream


async def refusal_of(port: int, *batches: RaftBatch) -> RaftExchangeReply:
    """Return how the port ends a stream of these batches."""
    stream = await stream_to(port, *batches)
    try:
        return await stream.receive()
    finally:
        stream.close()
