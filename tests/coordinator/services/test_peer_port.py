"""The peer port: who is let in, what is refused, and what bounds it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from koinon_coordinator.services import peer_port
from koinon_coordinator.services.cluster_services import (
    MembershipService,
    heartbeat_in,
)
from koinon_coordinator.services.peer_port import FramedMethod, PeerPort, Stream
from koinon_proto.contract.cluster_errors import NodeFencedError
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    UnavailableError,
)
from koinon_proto.security.authentication import open_gate
from koinon_proto.security.method_permissions import HEARTBEATS
from koinon_proto.security.transport import PLAIN, Listening
from koinon_proto.server.framed_greeting import (
    FIRST_HEARTBEAT_BYTES_MAX,
    HEARTBEATS_COMMAND,
    NOT_KNOWN,
    WELCOME,
    greet,
)
from koinon_proto.server.framed_stream import HEAD, FramedStream, PeerLostError
from koinon_proto.server.requests import method_of
from koinon_proto.v1.membership_pb2 import HeartbeatRequest, HeartbeatResponse
from tests.kit.waiting import run, until

Serve = Callable[[Stream, str], Awaitable[None]]


async def echo(stream: Stream, peer: str) -> None:
    while True:
        request = await stream.receive()
        stream.send(HeartbeatResponse(call_number=request.call_number))


def with_port(
    test: Callable[[PeerPort], Awaitable[None]], serve: Serve = echo, path: str = ""
) -> None:
    async def whole() -> None:
        method = FramedMethod(
            path=path or HEARTBEATS,
            parse=heartbeat_in,
            serve=serve,
            first_bytes_max=FIRST_HEARTBEAT_BYTES_MAX,
            message_bytes_max=FIRST_HEARTBEAT_BYTES_MAX,
        )
        port = PeerPort({HEARTBEATS_COMMAND: method}, Listening(), open_gate())
        await port.start("127.0.0.1:0")
        try:
            await test(port)
        finally:
            await port.stop()

    run(whole)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(port: PeerPort, data: bytes = b"") -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(data)
    return reader, writer


async def answer(port: PeerPort, data: bytes) -> bytes:
    """Return all that comes back until the port closes the connection."""
    reader, writer = await connect(port, data)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def stream_to(port: PeerPort) -> FramedStream[HeartbeatRequest, HeartbeatResponse]:
    stream: FramedStream[HeartbeatRequest, HeartbeatResponse]
    stream = FramedStream(HeartbeatResponse.FromString, "port")
    address = f"127.0.0.1:{port.port}"
    assert await greet(PLAIN, stream, address, "", HEARTBEATS_COMMAND, 60.0) == WELCOME
    return stream


def beat(node_id: str = "n1", number: int = 0) -> HeartbeatRequest:
    return HeartbeatRequest(node_id=node_id, call_number=number)


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 65,
        b"\x16\x03\x01" + b"\0" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        HEARTBEATS_COMMAND + b"\0\0\0\0",  # sent before the answer
        b"\r\n\r\n",
        b"y" * 100_000,
    ],
)
def test_what_is_no_command_closes_the_connection_without_an_answer(data: bytes) -> None:
    async def test(port: PeerPort) -> None:
        assert await answer(port, data) == b""
        stream = await stream_to(port)  # and others are served
        stream.send(beat(number=1))
        assert (await stream.receive()).call_number == 1

    with_port(test)


@pytest.mark.parametrize("command", [b"KOINON.RAFT 1\r\n", b"KOINON.HEARTBEATS 2\r\n", b"PING\r\n"])
def test_command_that_is_not_known_is_refused_by_name(command: bytes) -> None:
    async def test(port: PeerPort) -> None:
        assert await answer(port, command) == NOT_KNOWN + b"\r\n"

    with_port(test)


def test_command_may_come_in_pieces() -> None:
    async def test(port: PeerPort) -> None:
        reader, writer = await connect(port)
        for n in range(len(HEARTBEATS_COMMAND)):
            writer.write(HEARTBEATS_COMMAND[n : n + 1])
            await writer.drain()
            await asyncio.sleep(0)
        assert await reader.readline() == b"+OK\r\n"
        writer.close()

    with_port(test)


def test_connections_without_a_command_are_few_and_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_port, "WAITING_MAX", 3)

    async def test(port: PeerPort) -> None:
        first = await connect(port, b"KOINON")
        await until(lambda: len(port._greetings) == 1)
        kept = []
        for count in (2, 3, 3):
            kept.append(await connect(port))
            await until(lambda count=count: len(port._greetings) == count)  # type: ignore[misc]
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await first[0].readexactly(1)
        monkeypatch.setattr(peer_port, "GREETING_S_MAX", 0.01)
        assert await answer(port, b"KOINON") == b""
        assert len(kept) == 3

    with_port(test)


def test_streams_without_a_message_are_few_and_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_port, "WAITING_MAX", 2)

    async def test(port: PeerPort) -> None:
        streams = [await stream_to(port) for _ in range(3)]
        with pytest.raises(UnavailableError, match="too many"):
            await streams[0].receive()
        assert port.streams() == {"Membership/Heartbeat": 0}
        streams[1].send(beat(number=7))
        assert (await streams[1].receive()).call_number == 7
        assert port.streams() == {"Membership/Heartbeat": 1}
        monkeypatch.setattr(peer_port, "GREETING_S_MAX", 0.01)
        late = await stream_to(port)
        with pytest.raises(UnavailableError, match="in time"):
            await late.receive()

    with_port(test)


def test_streams_have_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_port, "STREAMS_MAX", 4)  # two of them for one host

    async def test(port: PeerPort) -> None:
        streams = [await stream_to(port) for _ in range(3)]
        for stream in streams[:2]:
            stream.send(beat(number=1))
            await stream.receive()
        streams[2].send(beat())
        with pytest.raises(KoinonError, match="streams of the peer port"):
            await streams[2].receive()
        streams[0].close()
        await until(lambda: port._places.taken == 1, "its place is free")
        again = await stream_to(port)
        again.send(beat(number=2))
        assert (await again.receive()).call_number == 2

    with_port(test)


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(3) + b"\xff\xff\xff",
        HEAD.pack(FIRST_HEARTBEAT_BYTES_MAX + 1),
        HEAD.pack(0x7FFF_FFFF),
        HEAD.pack(len(_ := HeartbeatRequest(node_epoch=1 << 63).SerializeToString())) + _,
    ],
)
def test_frame_that_makes_no_sense_ends_the_stream_with_the_reason(data: bytes) -> None:
    async def test(port: PeerPort) -> None:
        stream = await stream_to(port)
        assert stream._transport is not None
        stream._transport.write(data)
        with pytest.raises(InvalidArgumentError):
            await stream.receive()
        await until(lambda: not port._streams, "the port has forgotten it")

    with_port(test)


def test_handler_that_fails_ends_its_stream_alone() -> None:
    async def fail(stream: Stream, peer: str) -> None:
        if (await stream.receive()).call_number == 1:
            raise RuntimeError("broken")
        stream.send(HeartbeatResponse(call_number=2))
        await stream.receive()

    async def test(port: PeerPort) -> None:
        one, other = await stream_to(port), await stream_to(port)
        one.send(beat(number=1))
        with pytest.raises(KoinonError, match="broken"):
            await one.receive()
        other.send(beat(number=2))
        assert (await other.receive()).call_number == 2

    with_port(test, fail)


def test_port_that_stops_ends_its_streams_and_is_free() -> None:
    async def test(port: PeerPort) -> None:
        stream = await stream_to(port)
        stream.send(beat(number=1))
        await stream.receive()
        waiting = await connect(port)
        await until(lambda: port._greetings, "it is there")
        number = port.port
        await port.stop()
        assert port.port == 0
        with pytest.raises((UnavailableError, PeerLostError)):
            await stream.receive()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await waiting[0].readexactly(1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", number)

    with_port(test)


# --- heartbeats ----------------------------------------------------------------------------------


class Played(MembershipService):
    """Answers as it is told."""

    def __init__(self) -> None:
        self._trust_host = lambda peer: self.trusted.append(peer)
        self.trusted: list[str] = []
        self.answers: list[Any] = []
        self.heard: list[HeartbeatRequest] = []

    async def _heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        self.heard.append(request)
        found = self.answers.pop(0)
        if isinstance(found, KoinonError):
            raise found
        return HeartbeatResponse(lease_ms=found, call_number=request.call_number)


def test_heartbeats_of_a_stream_are_answered_in_turn_and_counted() -> None:
    played = Played()
    played.answers = [1, 2, NodeFencedError(node_id="n1", node_epoch=1, current_node_epoch=2)]
    method = method_of(MembershipService, "Heartbeat")
    before = dict(method.outcomes)

    async def test(port: PeerPort) -> None:
        stream = await stream_to(port)
        for number in (1, 2, 3):
            stream.send(beat(number=number))
        for number in (1, 2):
            found = await stream.receive()
            assert (found.lease_ms, found.call_number) == (number, number)
        with pytest.raises(NodeFencedError):
            await stream.receive()
        assert [request.call_number for request in played.heard] == [1, 2, 3]
        assert len(played.trusted) == 2

    with_port(test, played.serve_heartbeats)
    assert method.outcomes["ok"] == before.get("ok", 0) + 2
    assert method.outcomes["node_fenced"] == before.get("node_fenced", 0) + 1
    assert method.in_progress == 0


def test_stream_of_heartbeats_is_of_one_node() -> None:
    played = Played()
    played.answers = [1, 2]

    async def test(port: PeerPort) -> None:
        stream = await stream_to(port)
        stream.send(beat("n1"))
        await stream.receive()
        stream.send(beat("n2"))
        with pytest.raises(InvalidArgumentError, match="one sender"):
            await stream.receive()
        assert len(played.heard) == 1

    with_port(test, played.serve_heartbeats)
