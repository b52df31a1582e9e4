"""Header blocks without calls: their connections are told from those with large messages."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_coordinator.config import DATA_LANE
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_MESSAGE_BYTES
from koinon_proto.server.connections import (
    Endpoint,
    Received,
    endpoint_of,
    peer_name,
    received_by_port,
    reset_connections,
)
from koinon_proto.server.header_floods import (
    ALLOWED_BYTES,
    METADATA_BYTES_MAX,
    SILENT_BYTES,
    WINDOWS_BYTES,
    FloodWatch,
    Round,
    has_continuations,
)
from koinon_proto.v1 import kv_pb2
from tests.integration.floods import Flood, blocks_of_small_headers, frame, header_blocks
from tests.kit.waiting import until
from tests.proto.guard_samples import GET, TALK, serving

HERE: Endpoint = (ipaddress.IPv4Address("10.0.0.7"), 4_711)
SIZE = 1 << 20


def suspects(now: Received, *, read: list[int]) -> bool:
    counted = Round({HERE: Received(SIZE, SIZE)})
    for size in read:
        counted.count(HERE, size)
    grown = Received(SIZE + now.bytes, SIZE + now.sent_bytes)
    return HERE in counted.suspects({HERE: grown})


def test_bytes_beyond_the_allowance_that_nothing_explains_are_suspect() -> None:
    assert not suspects(Received(ALLOWED_BYTES), read=[])
    assert suspects(Received(ALLOWED_BYTES + 1), read=[])
    assert not suspects(Received(SIZE), read=[SIZE])
    assert suspects(Received(2 * SIZE), read=[SIZE])
    assert not suspects(Received(100 * 400), read=[0] * 100)
    assert suspects(Received(100 * 4_000), read=[0] * 100)


def test_flow_control_of_a_reader_of_large_answers_is_not_suspect() -> None:
    assert not suspects(Received(200_000, 300 * SIZE), read=[])
    assert suspects(Received(200_000, SIZE), read=[])


def test_calls_that_have_reached_python_allow_for_all_windows_and_their_messages() -> None:
    counted = Round({})
    assert counted.most(HERE, 0) == SILENT_BYTES
    assert counted.most(HERE, 2) == WINDOWS_BYTES + 2 * MAX_MESSAGE_BYTES
    counted.count(HERE, 1)
    assert counted.most(HERE, 0) == WINDOWS_BYTES


@given(st.binary(max_size=100), st.integers(1, 300), st.integers(1, 1 << 30), st.binary())
def test_continuations_are_found_wherever_they_begin(
    before: bytes, size: int, stream: int, after: bytes
) -> None:
    first = frame(9, 0, stream, bytes(size))
    last = frame(9, 4, stream, b"")
    assert has_continuations(before + first + last + after)
    other = frame(9, 4, stream + 1, b"")
    assert not has_continuations(first + other)
    assert not has_continuations(first)
    assert not has_continuations(frame(1, 0, stream, b"x" * size) + frame(0, 1, stream, b"y"))


async def test_a_server_resets_what_floods_and_keeps_what_sends_large_messages() -> None:
    async with serving(DATA_LANE) as (guarding, sample, channel):
        await _flooded_beside_large_messages(guarding.floods, sample.address, channel)


async def _flooded_beside_large_messages(watch: FloodWatch, address: str, channel: Any) -> None:
    attack = Flood(address, 60.0, "")
    threads = [
        threading.Thread(target=kind, args=(attack,), daemon=True)
        for kind in (header_blocks, blocks_of_small_headers)
    ]
    sent = kv_pb2.GetRequest(key=bytes(SIZE)).SerializeToString()
    talk = channel.stream_stream(TALK)()
    await talk.write(sent)
    assert len(await talk.read()) >= SIZE  # so the connection is there before the flood
    for thread in threads:
        thread.start()
    try:
        while watch.closed < 4:
            assert len(await channel.unary_unary(GET)(sent)) >= SIZE
            await talk.write(sent)
            assert len(await talk.read()) >= SIZE
    finally:
        attack.until = 0.0
        await talk.done_writing()
        for thread in threads:
            await asyncio.to_thread(thread.join)


class Context:
    """A call's context, of a connection that is really there."""

    def __init__(self, peer: str, size: int) -> None:
        self._peer, self._size = peer, size

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-long", "a" * (self._size - len("x-long"))),)


async def test_a_call_with_too_much_metadata_is_refused_and_its_connection_reset() -> None:
    watch = FloodWatch(dict)
    watch.start()
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    taken, address = listener.accept()
    with listener, client, taken:
        watch.check(Context(peer_name(address), METADATA_BYTES_MAX))
        with pytest.raises(InvalidArgumentError, match="16385 bytes"):
            watch.check(Context(peer_name(address), METADATA_BYTES_MAX + 1))
        client.settimeout(30.0)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(client.recv, 1) == b""
    await until(lambda: watch.closed == 1)
    watch.stop()


async def test_the_kernels_counts_are_those_of_the_connection() -> None:
    async with serving(DATA_LANE) as (_, sample, channel):
        port = int(sample.address.rpartition(":")[2])
        await channel.unary_unary(GET)(kv_pb2.GetRequest(key=bytes(SIZE)).SerializeToString())
        (received,) = received_by_port({port}).values()
        assert SIZE < received.bytes < 2 * SIZE
        await until(lambda: next(iter(received_by_port({port}).values())).sent_bytes > SIZE)


def test_a_closed_connection_is_reset_and_no_descriptor_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        taken, address = listener.accept()
        client.sendall(bytes(1_000))
        before = _descriptors()
        place = endpoint_of(peer_name(address))
        assert place is not None
        assert reset_connections({place}) == 1
        assert reset_connections({place}) == 0
        assert _descriptors() == before
        with taken, client:
            with contextlib.suppress(OSError):
                assert taken.recv(1_000) == b""  # what was received is dropped
            client.settimeout(10.0)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""


def _descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_names_of_peers() -> None:
    assert endpoint_of("ipv4:10.0.0.7:4711") == HERE
    assert endpoint_of("ipv6:%5B::1%5D:7") == (ipaddress.IPv6Address("::1"), 7)
    assert endpoint_of("unix:/x") is None
