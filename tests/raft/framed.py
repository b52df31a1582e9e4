"""A peer port for the Raft transport of a test."""

from __future__ import annotations

from koinon_coordinator.raft import RAFT_COMMAND, StreamRaftTransport
from koinon_coordinator.services.peer_port import FramedMethod, PeerPort
from koinon_proto.security.authentication import open_gate
from koinon_proto.security.transport import Listening
from koinon_proto.v1.raft_pb2 import RaftBatch

MIB = 1 << 20


async def peer_port(transport: StreamRaftTransport, address: str = "127.0.0.1:0") -> PeerPort:
    """Return a port, begun, at which the transport takes streams; its hellos name it."""
    method = FramedMethod(
        path="/koinon.v1.Raft/Exchange",
        parse=RaftBatch.FromString,
        serve=transport.take_frames,
        first_bytes_max=16 << 10,
        message_bytes_max=8 * MIB,
    )
    port = PeerPort({RAFT_COMMAND: method}, Listening(), open_gate())
    await port.start(address)
    transport.peer_port = port.port
    return port
