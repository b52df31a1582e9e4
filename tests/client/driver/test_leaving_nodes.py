"""A server that stops cuts off no call of those who attend it, however many are on their way."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import grpc
import pytest

from koinon.driver.rpc.node_link import Link
from koinon_node.partition.graceful_drain import GracefulDrain
from koinon_proto.contract.errors import NotSentError
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.waiting import until

CALLERS = 30
ANSWERED = 10 * CALLERS  # before it leaves
WORK_S = 0.002
ANSWER = kv_pb2.BatchWriteResponse.__name__


class Server(kv_pb2_grpc.KeyValueServicer):
    """Answers every write, as long as gRPC lets it."""

    def __init__(self) -> None:
        self.graceful_drain = GracefulDrain()

    async def BatchWrite(self, request: Any, context: Any) -> Any:  # noqa: N802
        await asyncio.sleep(WORK_S)
        return kv_pb2.BatchWriteResponse()

    async def Attend(self, request: Any, context: Any) -> None:  # noqa: N802
        await self.graceful_drain.serve(context, 0)


@pytest.mark.parametrize("_", range(5))
async def test_server_that_leaves_answers_all_that_was_sent_and_lets_nobody_in(_: int) -> None:
    server, service = grpc.aio.server(), Server()
    cast(Any, kv_pb2_grpc.add_KeyValueServicer_to_server)(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = Link(f"127.0.0.1:{port}")
    assert await link.connect()
    outcomes: Counter[str] = Counter()

    async def call_until_it_leaves() -> None:
        while True:
            reply = await link.call("batch_write", kv_pb2.BatchWriteRequest(), 60.0, write=True)
            outcomes[type(reply).__name__] += 1
            if isinstance(reply, NotSentError):
                return

    callers = [asyncio.create_task(call_until_it_leaves()) for _ in range(CALLERS)]
    await until(lambda: outcomes[ANSWER] > ANSWERED, "writes are answered")
    await service.graceful_drain.end(least_s=0.0, most_s=60.0)
    assert not await link.connect()
    await server.stop(60.0)
    await asyncio.gather(*callers)
    await link.close()
    assert outcomes.keys() == {ANSWER, NotSentError.__name__}
    assert outcomes[NotSentError.__name__] == CALLERS
