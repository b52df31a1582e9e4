"""Frames of a replication stream, and how a connection of the Redis port becomes one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koinon_node.grpc import replication_service as service
from koinon_node.ports import PeerLostError
from koinon_proto.contract.access import Permissions
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    PermissionDeniedError,
    UnsupportedVersionError,
)
from koinon_proto.contract.table import MAX_MESSAGE_BYTES
from koinon_proto.security.authentication import StandingCaller, open_gate
from koinon_proto.security.authorization import ANYBODY, Caller
from koinon_proto.security.names import Kind, Principal
from koinon_proto.server import framed_stream
from koinon_proto.server.framed_stream import FramedStream
from koinon_proto.v1 import replication_pb2
from tests.kit.waiting import until
from tests.node.kit.resp_client import RespClient, typed
from tests.node.replication.test_streams import ack, batch, hello, with_pair

Request = replication_pb2.FollowRequest
_Stream = FramedStream[replication_pb2.FollowResponse, Request]


class NotedTransport:
    """Takes what is written, and is told nothing by a kernel."""

    def __init__(self) -> None:
        self.written = b""
        self.reads = True
        self.aborted = self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.written += b"".join(parts)

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


def with_stream(use: Callable[[_Stream, NotedTransport], Awaitable[None]]) -> None:
    async def run() -> None:
        stream: _Stream = FramedStream(Request.FromString, "peer")
        transport: Any = NotedTransport()
        stream.connection_made(transport)
        await use(stream, transport)
        stream.close()

    asyncio.run(run())


def frame(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return struct.pack("<I", len(data)) + data


@pytest.mark.parametrize("step", [1, 3, 7, 1_000_000])
def test_messages_come_whole_and_in_order_however_their_bytes_arrive(step: int) -> None:
    sent = [ack(1), Request(), hello(cluster_id="c" * 70_000), ack(2), ack(3)]
    data = b"".join(frame(message) for message in sent)

    async def use(stream: _Stream, transport: NotedTransport) -> None:
        if step == 1:
            pieces = [data[:20], *(data[i : i + 1] for i in range(20, 60)), data[60:]]
        else:
            pieces = [data[i : i + step] for i in range(0, len(data), step)]
        for piece in pieces:
            stream.data_received(piece)
        # A frame without bytes is a sign of life.
        for wanted in (ack(1), sent[2], ack(2), ack(3)):
            assert await stream.receive() == wanted

    with_stream(use)


def test_frame_that_comes_in_tiny_pieces_takes_no_more_memory_than_it_has() -> None:
    data = frame(hello(cluster_id="c" * 500_000))

    async def use(stream: _Stream, transport: NotedTransport) -> None:
        tracemalloc.start()
        try:
            for at in range(0, len(data) - 2, 2):
                stream.data_received(data[at : at + 2])
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 2 * len(data)

    with_stream(use)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MAX_MESSAGE_BYTES + 1),
        struct.pack("<I", 0x8000_0000 | (MAX_MESSAGE_BYTES + 1)),
        struct.pack("<I", 3) + b"\xff\xff\xff",
    ],
)
def test_bytes_that_are_no_message_are_refused_after_those_before_them(data: bytes) -> None:
    async def use(stream: _Stream, transport: NotedTransport) -> None:
        stream.data_received(frame(ack(1)) + data)
        assert await stream.receive() == ack(1)
        for _ in range(2):
            with pytest.raises(InvalidArgumentError):
                await stream.receive()
        assert not transport.reads

    with_stream(use)


def test_messages_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed_stream, "_RECEIVED_BYTES_MAX", 10_000)
    message = hello(cluster_id="c" * 6_000)

    async def use(stream: _Stream, transport: NotedTransport) -> None:
        stream.data_received(frame(message))
        assert transport.reads
        stream.data_received(frame(message))
        assert not transport.reads
        await stream.receive()
        assert not transport.reads
        await stream.receive()
        assert transport.reads

    with_stream(use)


def test_silence_ends_a_stream_unless_this_process_stood_still_itself() -> None:
    async def use(stream: _Stream, transport: NotedTransport) -> None:
        now = asyncio.get_running_loop().time()
        stream._heard_at = now - 100
        stream._tick(now - 10)  # it was due long ago
        assert not transport.aborted
        assert transport.written == struct.pack("<I", 0) * (stream._sent_at >= now)
        stream._heard_at = now - 100
        stream._tick(now)
        assert transport.aborted
        with pytest.raises(PeerLostError, match="nothing heard"):
            await stream.receive()
        with pytest.raises(PeerLostError):
            stream.send(batch(1))

    with_stream(use)


def test_stream_that_is_closed_says_why_and_is_cut_if_that_does_not_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framed_stream, "_FAREWELL_S", 0.01)

    async def use(stream: _Stream, transport: NotedTransport) -> None:
        stream.close(UnsupportedVersionError(what="x", version=2, supported=1))
        other: _Stream = FramedStream(Request.FromString, "peer")
        there: Any = NotedTransport()
        other.connection_made(there)
        other.data_received(transport.written)
        with pytest.raises(UnsupportedVersionError):
            await other.receive()
        assert transport.closed
        await until(lambda: transport.aborted, "it is cut")
        other.close()

    with_stream(use)


def test_stream_that_is_ending_already_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the other side's last byte, while ours do not leave."""
    monkeypatch.setattr(framed_stream, "_FAREWELL_S", 0.01)

    async def use(stream: _Stream, transport: NotedTransport) -> None:
        transport.closed = True
        stream.close(UnsupportedVersionError(what="x", version=2, supported=1))
        await until(lambda: transport.aborted, "it is cut")
        assert transport.written == b""

    with_stream(use)


def test_small_messages_that_nobody_takes_count_what_they_take_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framed_stream, "_RECEIVED_BYTES_MAX", 10_000)

    async def use(stream: _Stream, transport: NotedTransport) -> None:
        stream.data_received(frame(ack(1)) * 100)
        assert not transport.reads
        for _ in range(100):
            await stream.receive()
        assert transport.reads

    with_stream(use)


def replies(client: RespClient) -> None:
    while True:
        assert client.reply() == b"OK"


# --- becoming a stream -------------------------------------------------------------------------


def test_follow_command_refuses_other_versions_and_what_was_sent_before_its_answer(
    tmp_path: Path,
) -> None:
    async def use(both: Any) -> None:
        def ask() -> None:
            client = RespClient(both.node.redis_address)
            error, _ = typed(client.call("KOINON.FOLLOW", 2))
            assert type(error) is UnsupportedVersionError
            client.send("KOINON.FOLLOW", 1)
            assert client.reply() == b"OK"
            client.socket.close()
            hasty = RespClient(both.node.redis_address)
            hasty.send_bytes(b"*2\r\n$13\r\nKOINON.FOLLOW\r\n$1\r\n1\r\n*1\r\n$4\r\nPING\r\n")
            with pytest.raises(ConnectionError):
                replies(hasty)

        await asyncio.to_thread(ask)
        assert both.primary.ends == []

    with_pair(tmp_path, use)


@pytest.mark.parametrize("before", [b"*", b"*3\r\n$3\r\nSET\r\n", b"+"])
def test_connection_with_bytes_before_the_answer_is_cut(tmp_path: Path, before: bytes) -> None:
    async def use(both: Any) -> None:
        def ask() -> None:
            client = RespClient(both.node.redis_address)
            client.send_bytes(b"*2\r\n$13\r\nKOINON.FOLLOW\r\n$1\r\n1\r\n" + before)
            with contextlib.suppress(OSError):
                client.reply()
                client.send_bytes(frame(hello()))
                client.socket.shutdown(socket.SHUT_WR)
                while client.socket.recv(1_000):
                    pass

        await asyncio.to_thread(ask)
        assert both.primary.ends == []

    with_pair(tmp_path, use)


def test_connection_that_became_a_stream_holds_nothing_of_the_redis_ports_room(
    tmp_path: Path,
) -> None:
    async def use(both: Any) -> None:
        def ask() -> None:
            client = RespClient(both.node.redis_address)
            begun = b"*2\r\n$3\r\nGET\r\n$70000\r\n" + bytes(60_000)
            client.send_bytes(b"*2\r\n$13\r\nKOINON.FOLLOW\r\n$1\r\n1\r\n" + begun)
            with pytest.raises(ConnectionError):
                replies(client)

        await asyncio.to_thread(ask)
        assert both.listener.budget.held_bytes == 0

    with_pair(tmp_path, use)


def test_stranger_is_held_to_the_size_of_a_hello(tmp_path: Path) -> None:
    async def use(both: Any) -> None:
        for size, ends in ((16 * 1024, False), (16 * 1024 + 1, True)):
            stream = both.service.take_follower(StandingCaller(), "ipv4:127.0.0.1:1")
            transport: Any = NotedTransport()
            stream.connection_made(transport)
            stream.data_received(struct.pack("<I", size))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert transport.reads is not ends
            stream.close()
        # Who has said hello may send more.
        stream = both.service.take_follower(StandingCaller(), "ipv4:127.0.0.1:1")
        transport = NotedTransport()
        stream.connection_made(transport)
        stream.data_received(frame(hello()) + struct.pack("<I", MAX_MESSAGE_BYTES))
        await until(lambda: both.primary.ends, "it is served")
        assert transport.reads
        stream.close()

    with_pair(tmp_path, use)


def test_stranger_who_has_waited_longest_gives_way_and_all_do_when_the_node_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_WAITING_FOR_HELLO_MAX", 2)

    async def use(both: Any) -> None:
        transports: list[Any] = []
        for _ in range(4):
            stream = both.service.take_follower(StandingCaller(), "ipv4:127.0.0.1:1")
            transports.append(NotedTransport())
            stream.connection_made(transports[-1])
        await until(lambda: transports[1].closed, "room is made")
        assert [transport.closed for transport in transports] == [True, True, False, False]
        both.service.close()
        assert all(transport.closed for transport in transports)

    with_pair(tmp_path, use)


def test_data_port_that_does_not_welcome_followers_is_named(tmp_path: Path) -> None:
    async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n1\r\n")
        writer.write(b"-ERR unknown command 'KOINON.FOLLOW'\r\n")
        await reader.read()
        writer.close()

    async def use(both: Any) -> None:
        server = await asyncio.start_server(strange, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for node, reason in (
            (replace(both.node, redis_address=address), "unknown command"),
            (replace(both.node, redis_address="127.0.0.1:1"), "127.0.0.1:1"),
        ):
            with pytest.raises(PeerLostError, match=reason):
                await both.peers.follow(node)
        server.close()

    with_pair(tmp_path, use)


def test_stream_ends_once_its_caller_may_have_it_no_more(tmp_path: Path) -> None:
    callers: list[Caller | KoinonError] = [ANYBODY]
    gate = open_gate()

    class FoundAnew(StandingCaller):
        def is_stale(self, version: Any, now_s: float) -> bool:
            return True

    def find_caller() -> Caller:
        if isinstance(callers[-1], KoinonError):
            raise callers[-1]
        return callers[-1]

    async def use(both: Any) -> None:
        for now in (
            PermissionDeniedError(principal="node n2", action="follow", what="x"),
            Caller(Principal(Kind.COORDINATOR, "c1"), Permissions.NONE),
        ):
            callers.append(ANYBODY)
            stream = both.service.take_follower(FoundAnew(gate, find_caller), "ipv4:127.0.0.1:1")
            transport: Any = NotedTransport()
            stream.connection_made(transport)
            stream.data_received(frame(hello()))
            await until(lambda: both.primary.ends, "it is served")
            both.service.look_at_callers(gate.version, gate.now())
            assert not transport.closed
            callers.append(now)
            both.service.look_at_callers(gate.version, gate.now())
            assert transport.closed
            both.primary.ends.clear()

    with_pair(tmp_path, use)
