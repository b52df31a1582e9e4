"""A guarded server with a method of each kind, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc

from koinon_proto.server import admission, rpc
from koinon_proto.server.admission import LaneLimits
from koinon_proto.server.aio_server import GuardedServer
from koinon_proto.server.guard import Guard
from koinon_proto.v1 import kv_pb2

GET, PAGE, WATCH, TALK = (f"/koinon.v1.Sample/{name}" for name in ("Get", "Page", "Watch", "Talk"))


class Sample:
    """A service with a method of each kind."""

    def __init__(self) -> None:
        self.done = 0
        self.address = ""

    @rpc.typed_errors
    async def Get(self, request: kv_pb2.GetRequest, context: Any) -> kv_pb2.GetResponse:  # noqa: N802
        context.add_done_callback(self._on_done)
        return kv_pb2.GetResponse(value=request.key)

    @rpc.typed_errors
    async def Page(self, request: kv_pb2.GetRequest, context: Any) -> kv_pb2.GetResponse:  # noqa: N802
        context.add_done_callback(self._on_done)
        admission.hold(8 << 20)
        return kv_pb2.GetResponse(value=bytes(8 << 20))

    @rpc.typed_stream
    async def Watch(self, request: kv_pb2.GetRequest, context: Any) -> None:  # noqa: N802
        await context.write(kv_pb2.GetResponse(value=request.key))

    async def Talk(  # noqa: N802
        self, requests: AsyncIterator[kv_pb2.GetRequest], context: Any
    ) -> AsyncIterator[kv_pb2.GetResponse]:
        async for request in requests:
            yield kv_pb2.GetResponse(value=request.key)

    def _on_done(self, _: Any) -> None:
        self.done += 1


Served: TypeAlias = tuple[Guard, Sample, Any]


@asynccontextmanager
async def serving(limits: LaneLimits) -> AsyncIterator[Served]:
    """Yield a guarded server's guard, its service and a channel to it."""
    guarding, sample = Guard(limits, limits), Sample()
    server = GuardedServer(guarding, rpc.SERVER_OPTIONS)
    read, write = kv_pb2.GetRequest.FromString, kv_pb2.GetResponse.SerializeToString
    handlers = {
        "Get": grpc.unary_unary_rpc_method_handler(sample.Get, read, write),
        "Page": grpc.unary_unary_rpc_method_handler(sample.Page, read, write),
        "Watch": grpc.unary_stream_rpc_method_handler(sample.Watch, read, write),
        "Talk": grpc.stream_stream_rpc_method_handler(sample.Talk, read, write),
    }
    server.add_registered_method_handlers("koinon.v1.Sample", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    guarding.floods.ports.add(port)
    sample.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(
            sample.address, options=rpc.CHANNEL_OPTIONS
        ) as channel:
            yield guarding, sample, channel
    finally:
        await server.stop(None)
