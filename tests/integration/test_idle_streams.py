"""Calls that are opened and never sent take no other call's place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from koinon.client import Client
from koinon.local import LocalCluster
from tests.integration.copies import epochs

STREAMS = 1_500
SECONDS_OF_HEARTBEATS = 3.0


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("/koinon.v1.TableService/GetTable", lambda cluster: cluster.address(cluster.leader())),
        ("/koinon.v1.KeyValue/Get", lambda cluster: cluster.address("n1")),
    ],
    ids=["coordinator", "node"],
)
def test_idle_streams_on_a_server_fence_nobody_and_refuse_nobody(
    cluster: LocalCluster, client: Client, method: str, target: Callable[[LocalCluster], str]
) -> None:
    before = cluster.status()

    async def hold_streams_open() -> None:
        async with grpc.aio.insecure_channel(target(cluster)) as channel:
            call: Any = channel.stream_unary(method)
            streams = [call() for _ in range(STREAMS)]  # headers go out; no message ever does
            await asyncio.to_thread(write_for_a_while)
            assert not any(stream.done() for stream in streams[:100])

    def write_for_a_while() -> None:

        until = time.monotonic() + SECONDS_OF_HEARTBEATS
        row = 0
        while time.monotonic() < until:
            client.put(b"streams:%d" % row, b"v")
            row += 1

    asyncio.run(hold_streams_open())
    after = cluster.status()
    assert epochs(after) == epochs(before), "a node was fenced"
