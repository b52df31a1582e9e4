"""A guarded server, and callers that misbehave."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from koinon_proto.contract.errors import InvalidArgumentError, UnavailableError
from koinon_proto.process.logs import LinesPerSecond
from koinon_proto.server import admission, aio_server, guard, rpc
from koinon_proto.server.admission import LaneLimits, Share
from koinon_proto.server.aio_server import GuardedServer
from koinon_proto.server.guard import Guard
from koinon_proto.server.rpc import error_of
from koinon_proto.v1 import kv_pb2, table_pb2
from tests.kit.waiting import until
from tests.proto.guard_samples import GET, PAGE, TALK, WATCH, Served, serving

_SHARE = Share(calls=64, request_bytes=40, reply_bytes=20 << 20)
LIMITS = LaneLimits(
    connection=_SHARE, host=_SHARE, all=_SHARE, message_bytes=20, patience_s=0.2, waiting=8
)
MALFORMED = b"\x0a\xff\xff"


@pytest.fixture
@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    """A guarded server, its service and a channel to it."""
    async with serving(LIMITS) as parts:
        yield parts


async def refusal(call: Awaitable[Any]) -> Any:
    with pytest.raises(grpc.RpcError) as failure:
        await call
    return error_of(failure.value)


def held(guarding: Guard) -> tuple[int, ...]:
    every = guarding.data.all
    return every.calls, every.request_bytes, every.reply_bytes


async def test_methods_of_each_kind_are_answered_and_leave_nothing(served: Served) -> None:
    guarding, _, channel = served
    sent, got = kv_pb2.GetRequest(key=b"k").SerializeToString(), kv_pb2.GetResponse.FromString
    assert got(await channel.unary_unary(GET)(sent)).value == b"k"
    assert [got(m).value async for m in channel.unary_stream(WATCH)(sent)] == [b"k"]
    talk = channel.stream_stream(TALK)()
    for _ in range(3):
        await talk.write(sent)
        assert got(await talk.read()).value == b"k"
    await talk.done_writing()
    assert await talk.read() is grpc.aio.EOF
    unknown = channel.unary_unary("/koinon.v1.Sample/Nothing")(sent)
    with pytest.raises(grpc.RpcError, match="Method not found"):
        await unknown
    await until(lambda: held(guarding) == (0, 0, 0))


async def test_malformed_messages_are_refused_by_type_and_few_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    few = LinesPerSecond(2)
    few._second = math.inf  # that lasts as long as the test takes
    monkeypatch.setattr(guard, "_malformed", few)
    wrong_text = (
        table_pb2.GetTableRequest(cluster_id="abc").SerializeToString().replace(b"b", b"\xff")
    )

    guarding, _, channel = served
    with caplog.at_level(logging.WARNING):
        parse = guard._parser("/koinon.v1.T/T", table_pb2.GetTableRequest.FromString)
        with pytest.raises(InvalidArgumentError):
            parse(wrong_text, _Peer())
        for _ in range(5):
            call = channel.unary_unary(GET)(MALFORMED)
            error = await refusal(call)
            assert isinstance(error, InvalidArgumentError), error
            assert error.field == "request"
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        watch = channel.unary_stream(WATCH)(MALFORMED)
        assert isinstance(await refusal(watch.read()), InvalidArgumentError)
        talk = channel.stream_stream(TALK)()
        await talk.write(kv_pb2.GetRequest(key=b"k").SerializeToString())
        await talk.read()
        await talk.write(MALFORMED)
        assert isinstance(await refusal(talk.read()), InvalidArgumentError)
        nothing = channel.stream_unary(GET)(iter(()))
        assert isinstance(await refusal(nothing), InvalidArgumentError)
        no_watch = channel.stream_stream(WATCH)(iter(()))
        assert isinstance(await refusal(no_watch.read()), InvalidArgumentError)
        await until(lambda: held(guarding) == (0, 0, 0))
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 2
    assert not any(record.exc_info for record in lines)
    assert {record.msg.partition(" method")[0] for record in lines} == {"malformed request"}


class _Peer:
    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


async def test_a_message_that_does_not_come_holds_up_its_own_connection_and_is_cut_off_for_others(
    served: Served,
) -> None:
    guarding, sample, channel = served
    idle = [channel.stream_unary(GET)() for _ in range(2)]
    await until(lambda: guarding.data.all.calls == 2)
    for call in idle:
        assert not call.done()
    more = channel.stream_unary(GET)()
    await until(lambda: guarding.data.waiting == 1)
    options = (*rpc.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(sample.address, options=options) as other:
        get: Any = other.unary_unary(GET)
        await get(kv_pb2.GetRequest(key=b"k").SerializeToString())
    refused = await asyncio.gather(*(refusal(call) for call in idle))
    assert all(isinstance(error, UnavailableError) for error in refused)
    more.cancel()
    await until(lambda: held(guarding) == (0, 0, 0))


async def test_answers_count_until_they_have_left_and_one_who_takes_none_is_closed(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.setattr(admission, "_CONTENDED_LEAVE_S", 1.0)

    guarding, sample, channel = served
    port = sample.address.rpartition(":")[2]
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    writer.write(_http2_calls(PAGE.encode(), 3))  # its window is 64 KiB, and it never opens it
    await until(lambda: len(guarding.data.leaving) == 2)
    assert held(guarding)[2] >= 16 << 20
    await until(lambda: sample.done == 1)  # the third was refused
    assert len(await channel.unary_unary(PAGE)(b"")) > 8 << 20  # others go on
    await until(lambda: sample.done == 4)
    assert await reader.read() is not None  # to the end: it was closed
    await until(lambda: held(guarding) == (0, 0, 0))
    writer.close()


@pytest.mark.parametrize("path", [b"/\xff\xfe", b"/koinon.v1.Sample/\xc3", b"\xff", b""])
async def test_a_path_that_is_no_text_is_answered_and_stops_nobody(
    path: bytes, served: Served
) -> None:
    _, sample, channel = served
    reader, writer = await asyncio.open_connection(*sample.address.split(":"))
    writer.write(_http2_calls(path, 3))
    assert len(await reader.read(1)) == 1
    sent = kv_pb2.GetRequest(key=b"k").SerializeToString()
    for _ in range(3):
        await channel.unary_unary(GET)(sent)
        with pytest.raises(grpc.RpcError, match="Method not found"):
            await channel.unary_unary("/koinon.v1.Sample/Nothing")(sent)
    writer.close()


@pytest.mark.parametrize("has_hook", [True, False])
async def test_server_on_a_grpcio_without_the_hook_for_unknown_methods_warns_once(
    has_hook: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_hook:
        monkeypatch.setattr(aio_server, "_HOOKS", ("_a_hook_that_grpc_does_not_have",))
    await GuardedServer(Guard(LIMITS, LIMITS), rpc.SERVER_OPTIONS).stop(None)
    warned = [r.message for r in caplog.records if r.name == aio_server.__name__]
    assert len(warned) == (0 if has_hook else 1)
    assert all(grpc.__version__ in message for message in warned)


def _http2_calls(path: bytes, count: int) -> bytes:
    """Return the bytes of a connection with so many calls, each with an empty message."""
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"")
    headers = b"".join(
        b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"x"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )
    for stream in range(1, 2 * count, 2):
        sent += _frame(1, 4, stream, headers) + _frame(0, 1, stream, bytes(5))
    return sent


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )
