"""A node's memory beside clients that send much at once, and clients that take nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from koinon.local import LocalCluster
from koinon_proto.v1 import kv_pb2
from tests.integration.copies import epochs
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until

VALUE = b"v" * 1_000_000
KEYS = [b"big:%d" % n for n in range(14)]
BOUND_MIB = 700
"""Above what a node has without them; it took 2,800 and 2,100 once."""

STOPPED_READER = """
import asyncio, sys, grpc
from koinon_proto.partitioner import partitioner
from koinon_proto.v1 import kv_pb2

async def main():
    keys = [b"big:%d" % n for n in range(14)]
    partition_ids = partitioner("murmur2", 1024).partitions_of(keys).tolist()
    request = kv_pb2.BatchGetRequest(keys=keys, partition_ids=partition_ids).SerializeToString()
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        ask = channel.unary_unary("/koinon.v1.KeyValue/BatchGet")
        calls = [ask(request) for _ in range(200)]
        await asyncio.sleep(0.05)
        print("asked", flush=True)
        await asyncio.gather(*calls)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with running_cluster(nodes=1, coordinators=1) as cluster:
        yield cluster


def resident_mib(cluster: LocalCluster) -> int:
    lines = Path(f"/proc/{cluster.pid('n1')}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024


async def test_many_large_calls_on_one_connection_are_bounded_and_their_memory_is_given_back(
    cluster: LocalCluster,
) -> None:
    before = resident_mib(cluster)
    request = kv_pb2.BatchWriteRequest(keys=[b"k"], values=[bytes(19 << 20)], partition_ids=[0])
    body = request.SerializeToString()
    peak = 0

    options = (("grpc.max_send_message_length", -1),)
    async with grpc.aio.insecure_channel(cluster.address("n1"), options=options) as channel:
        write: Any = channel.unary_unary("/koinon.v1.KeyValue/BatchWrite")
        calls = [asyncio.ensure_future(refused(write(body, timeout=120))) for _ in range(40)]
        while not all(call.done() for call in calls):
            peak = max(peak, resident_mib(cluster))
            await asyncio.sleep(0.02)
        codes = {await call for call in calls}
        assert codes == {grpc.StatusCode.INVALID_ARGUMENT}  # none is lost: they waited
    assert peak < before + BOUND_MIB
    wait_until(lambda: resident_mib(cluster) < before + 250, "its memory is given back")


async def refused(call: grpc.aio.UnaryUnaryCall[bytes, bytes]) -> grpc.StatusCode:
    with contextlib.suppress(grpc.RpcError):
        await call
    return await call.code()


def test_one_who_takes_no_answers_holds_its_own_share_and_others_go_on(
    cluster: LocalCluster,
) -> None:
    client = cluster.client()
    for key in KEYS:
        client.put(key, VALUE)
    before, status = resident_mib(cluster), cluster.status()
    reader = subprocess.Popen(
        [sys.executable, "-c", STOPPED_READER, cluster.address("n1")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert reader.stdout is not None
        reader.stdout.readline()
        os.kill(reader.pid, signal.SIGSTOP)
        peak = 0
        for n in range(100):
            client.put(b"beside:%d" % n, b"v")
            assert client.get(KEYS[n % len(KEYS)]) == VALUE
            peak = max(peak, resident_mib(cluster))
    finally:
        reader.kill()
        reader.wait()
    assert peak < before + BOUND_MIB
    assert epochs(cluster.status()) == epochs(status), "a node was fenced"
    client.close()


async def test_members_go_on_while_strangers_fill_the_places_of_the_control_calls(
    cluster: LocalCluster,
) -> None:
    before = cluster.status()
    client = cluster.client()

    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [
        grpc.aio.insecure_channel(cluster.address("c1"), options=options) for _ in range(150)
    ]
    calls: list[Any] = [
        channel.stream_unary("/koinon.v1.Membership/Register")()  # no message ever comes
        for channel in channels
        for _ in range(3)
    ]
    end, written = time.monotonic() + 4, 0
    while time.monotonic() < end or written < 50:
        await asyncio.to_thread(client.put, b"on:%d" % written, b"v")
        written += 1
    for call in calls:
        call.cancel()
    for channel in channels:
        await channel.close()
    found = written
    assert found >= 50
    assert epochs(cluster.status()) == epochs(before), "a node was fenced"
    client.close()
