"""A member's stream goes over to frames, back to gRPC where they are lost, and to frames again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from koinon_coordinator.core.raft import HeartbeatReply
from koinon_coordinator.raft import StreamRaftTransport, TransportConfig, peer_stream
from koinon_coordinator.services.peer_port import PeerPort
from koinon_proto.server import framed_stream
from tests.kit.addresses import free_address
from tests.kit.waiting import run, until

from .framed import peer_port
from .test_transport import Endpoint, reply

FRAMES = {"frames": 1, "grpc": 0}
GRPC = {"frames": 0, "grpc": 1}
PATIENT = TransportConfig(hello_interval_ms=20, frames_silence_ms=60_000)


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_stream, "_FRAMES_AGAIN_S_MIN", 0.02)
    monkeypatch.setattr(peer_stream, "_FRAMES_AGAIN_S_MAX", 0.1)


class Member:
    """A transport with its endpoint, its server, and perhaps a peer port."""

    def __init__(self, name: str, config: TransportConfig) -> None:
        self.transport = StreamRaftTransport(config=config)
        self.endpoint = Endpoint(name, free_address(), "store")
        self.port: PeerPort | None = None
        self._server: Any = None

    async def start(self, *, has_port: bool = True, address: str = "127.0.0.1:0") -> None:
        if has_port:
            self.port = await peer_port(self.transport, address)
        self.transport.attach(self.endpoint)
        self._server = grpc.aio.server()
        self.transport.add_to_server(self._server)
        self._server.add_insecure_port(self.endpoint.address)
        await self._server.start()

    async def stop(self) -> None:
        await self.transport.close()
        if self.port is not None:
            await self.port.stop()
        if self._server is not None:
            await self._server.stop(0)

    def knows(self, other: Member) -> None:
        self.transport.set_peers({other.endpoint.member_id: other.endpoint.address})

    async def reaches(self, other: Member, n: int) -> None:
        """Say it again and again, as Raft does, until it has come."""
        message: HeartbeatReply = reply(self.endpoint.member_id, other.endpoint.member_id, n)

        def came() -> bool:
            self.transport.send([message])
            return message in other.endpoint.received

        await until(came, f"message {n} to come")


@asynccontextmanager
async def two(
    config: TransportConfig = PATIENT, *, has_port: bool = True
) -> AsyncIterator[tuple[Member, Member]]:
    """Two members that know one another; ``has_port`` is of b."""
    a, b = Member("a", config), Member("b", config)
    await a.start()
    await b.start(has_port=has_port)
    a.knows(b)
    b.knows(a)
    try:
        yield a, b
    finally:
        await a.stop()
        await b.stop()


def with_two(
    test: Callable[[Member, Member], Awaitable[None]],
    config: TransportConfig = PATIENT,
    *,
    has_port: bool = True,
) -> None:
    async def whole() -> None:
        async with two(config, has_port=has_port) as (a, b):
            await test(a, b)

    run(whole)


def test_streams_go_over_to_frames() -> None:
    async def test(a: Member, b: Member) -> None:
        await until(lambda: a.transport.streams() == b.transport.streams() == FRAMES, "frames")
        await a.reaches(b, 1)
        await b.reaches(a, 2)
        assert b.port is not None
        await until(lambda: b.port.streams() == {"Raft/Exchange": 1}, "it is counted")  # type: ignore[union-attr]

    with_two(test)


@pytest.mark.parametrize("count", [10, 4_000])
def test_messages_in_frames_keep_their_order(count: int) -> None:
    """Also where they are more than the sockets hold. A stream may be lost with what is under way:
    then all are sent again.
    """

    async def test(a: Member, b: Member) -> None:
        await until(lambda: a.transport.streams() == FRAMES, "frames")
        sent: list[HeartbeatReply] = []
        ends, attempt = -1, 0

        def came() -> bool:
            nonlocal ends, attempt, sent
            if ends != a.transport.counters["stream_ends"]:
                ends, attempt = a.transport.counters["stream_ends"], attempt + 1
                sent = [reply("a", "b", 10_000 * attempt + n) for n in range(count)]
                a.transport.send(sent)
            return sent[-1] in b.endpoint.received

        await until(came, "the last one to come")
        of_attempt = [m for m in b.endpoint.received if m.round_id // 10_000 == attempt]
        assert of_attempt == sent

    with_two(test)


def test_peer_without_a_port_is_reached_by_grpc_and_reaches_by_frames() -> None:
    async def test(a: Member, b: Member) -> None:
        await until(lambda: b.transport.streams() == FRAMES, "b goes over")
        await a.reaches(b, 1)
        await b.reaches(a, 2)
        assert a.transport.streams() == GRPC

    with_two(test, has_port=False)


def test_frames_that_are_lost_bring_the_stream_back_to_grpc_and_over_again() -> None:
    """The port goes, and comes back as another one, which the next hello names."""

    async def test(a: Member, b: Member) -> None:
        await until(lambda: a.transport.streams() == FRAMES, "frames")
        assert b.port is not None
        await b.port.stop()
        await until(lambda: a.transport.streams() == GRPC, "a is back at gRPC")
        await a.reaches(b, 1)
        b.port = await peer_port(b.transport)
        b.transport._peers["a"]._own_port = b.port.port
        await until(lambda: a.transport.streams() == FRAMES, "frames again")
        await a.reaches(b, 2)

    with_two(test)


def test_port_where_another_service_answers_is_left_alone() -> None:
    async def test() -> None:
        asked = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.readline() == b"KOINON.RAFT 1\r\n"
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            writer.close()
            asked.set()

        other = await asyncio.start_server(answer, "127.0.0.1", 0)
        a, b = Member("a", PATIENT), Member("b", PATIENT)
        await a.start()
        b.transport.peer_port = other.sockets[0].getsockname()[1]
        await b.start(has_port=False)
        a.knows(b)
        b.knows(a)
        await asked.wait()
        await a.reaches(b, 1)
        assert a.transport.streams() == GRPC
        await a.stop()
        await b.stop()
        other.close()

    run(test)


class Pipe:
    """Carries connections to a port, or holds what comes, as a network does that is cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.goes = asyncio.Event()
        self.goes.set()
        self._server: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner = await asyncio.open_connection("127.0.0.1", self._port)
        for source, target in ((reader, inner), (inner_reader, writer)):
            task = asyncio.ensure_future(self._copy(source, target))
            self._tasks.add(task)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(65_536):
                await self.goes.wait()
                target.write(piece)
        except OSError:
            pass
        finally:
            target.close()

    def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()


def test_frames_that_are_not_answered_bring_both_members_back_to_grpc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that writes notices that it hears nothing; the other one follows it to gRPC."""
    monkeypatch.setattr(framed_stream, "_SILENCE_S_MAX", 600.0)

    async def test() -> None:
        config = TransportConfig(hello_interval_ms=20, frames_silence_ms=200)
        a, b = Member("a", config), Member("b", PATIENT)
        await a.start()
        await b.start()
        assert a.port is not None
        assert b.port is not None
        pipes = [Pipe(a.port.port), Pipe(b.port.port)]
        a.transport.peer_port, b.transport.peer_port = [await pipe.start() for pipe in pipes]
        a.knows(b)
        b.knows(a)
        await until(lambda: a.transport.streams() == b.transport.streams() == FRAMES, "frames")
        for pipe in pipes:
            pipe.goes.clear()
        await a.reaches(b, 1)  # by gRPC
        await b.reaches(a, 2)
        for pipe in pipes:
            pipe.goes.set()
        for member in (a, b):
            await member.stop()
        for pipe in pipes:
            pipe.close()

    run(test)


def test_member_that_stops_closes_its_streams_of_frames() -> None:
    async def test() -> None:
        async with two() as (a, b):
            await until(lambda: a.transport.streams() == b.transport.streams() == FRAMES, "frames")
            assert b.port is not None
            await a.transport.close()
            await until(lambda: b.port.streams() == {"Raft/Exchange": 0}, "b sees the end")  # type: ignore[union-attr]

    run(test)
