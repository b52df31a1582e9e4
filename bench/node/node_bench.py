"""One node, one client process: batches of 1,000 rows in flight, compared with bare py-lmdb.

    python -m bench.node.node_bench [--seconds 4] [--in-flight 8]

Starts one coordinator and one node as processes of their own in a temporary directory. Keys have
16 bytes, values 100. Figures are rows/s. The ratio compares them with a loop of sorted ``putmulti``
(``getmulti``) in this process, without any server: it shows the cost of the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from bench.node.bare import PARTITIONS, bare_rates
from koinon_proto.partitioner import partitioner
from koinon_proto.server.rpc import CHANNEL_OPTIONS
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.addresses import free_addresses

ROWS = 1000
VALUE = bytes(100)
READY_TIMEOUT_S = 20.0


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[str]:
    """Run one coordinator and one node; yield the node's address."""
    coordinator, node = free_addresses(2)
    common = ["--log-level", "WARNING", "--data"]
    commands = (
        f"koinon_coordinator --id c1 --listen {coordinator} --members c1={coordinator}",
        f"koinon_node --id n1 --listen {node} --coordinators {coordinator}",
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *command.split(), *common, str(directory / command.split()[2])]
        )
        for command in commands
    ]
    try:
        wait_until_served(node)
        yield node
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(10)


def wait_until_served(address: str) -> None:
    """Wait until the node serves a partition."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = kv_pb2_grpc.KeyValueStub(channel)
        while True:
            try:
                stub.Get(kv_pb2.GetRequest(key=b"ready?"), timeout=1)
            except grpc.RpcError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return


def batches(count: int, seed: int) -> list[kv_pb2.BatchWriteRequest]:
    """Return batches of random rows."""
    rng, split = random.Random(seed), partitioner("murmur2", PARTITIONS)
    made = []
    for _ in range(count):
        keys = [b"user%012d" % n for n in rng.sample(range(10**9), ROWS)]
        made.append(
            kv_pb2.BatchWriteRequest(
                keys=keys, values=[VALUE] * ROWS, partition_ids=split.partitions_of(keys).tolist()
            )
        )
    return made


async def rate(
    call: Callable[[Any], Awaitable[Any]], requests: Sequence[Any], in_flight: int, seconds: float
) -> tuple[float, float, float]:
    """Return (rows/s, median and worst latency in ms) with this many calls in flight."""
    latencies: list[float] = []
    started = time.perf_counter()

    async def worker(number: int) -> None:
        index = number
        while time.perf_counter() - started < seconds:
            sent = time.perf_counter()
            await call(requests[index % len(requests)])
            latencies.append(time.perf_counter() - sent)
            index += in_flight

    await asyncio.gather(*(worker(number) for number in range(in_flight)))
    elapsed = time.perf_counter() - started
    latencies.sort()
    middle = latencies[len(latencies) // 2]
    return len(latencies) * ROWS / elapsed, middle * 1e3, latencies[-1] * 1e3


async def measure(
    address: str, in_flight: int, seconds: float
) -> dict[str, tuple[float, float, float]]:
    """Return the figures by name."""
    writes = batches(int(100 * seconds), seed=1)
    reads = [
        kv_pb2.BatchGetRequest(keys=batch.keys, partition_ids=batch.partition_ids)
        for batch in writes[:100]
    ]
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = kv_pb2_grpc.KeyValueStub(channel)
        figures = {"put": await rate(stub.BatchWrite, writes, in_flight, seconds)}
        for batch in writes[:100]:
            await stub.BatchWrite(batch)
        figures["get"] = await rate(stub.BatchGet, reads, in_flight, seconds)
        mixed = await asyncio.gather(
            rate(stub.BatchWrite, writes, in_flight, seconds),
            rate(stub.BatchGet, reads, in_flight, seconds),
        )
        figures["put (mixed)"], figures["get (mixed)"] = mixed
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--address", default="", help="of a node that runs already")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="koinon-bench-"))
    try:
        bare_put, bare_get = bare_rates(directory / "bare")
        print(f"bare py-lmdb      put {bare_put:>10,.0f}   get {bare_get:>10,.0f} rows/s")
        running = contextlib.nullcontext(options.address) if options.address else cluster(directory)
        with running as address:
            figures = asyncio.run(measure(address, options.in_flight, options.seconds))
        for name, (rows, middle, worst) in figures.items():
            ratio = rows / (bare_put if name.startswith("put") else bare_get)
            print(
                f"{name:<12} {rows:>10,.0f} rows/s   {ratio:.2f} of bare   "
                f"median {middle:.1f} ms   worst {worst:.1f} ms"
            )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
