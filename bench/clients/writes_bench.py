"""Durable writes of a cluster whose stores hold millions of records, with and without the log.

    python -m bench.clients.writes_bench [--records 1000000] [--replicas 1 3] [--seconds 5]
        [--rounds 1]

One client process; keys of 16 bytes and values of 100 bytes, overwritten at random. Both clusters
run in one go, one after the other, so that their ratio is of the same machine at about the same
time. It stands with what is aimed at below each pair. How these writes compare with etcd and Redis
is a matter of ``bench.peers`` (rows put, tasks64-put, batch-put; systems k3, etcd, wait).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from statistics import quantiles

import koinon.aio
from koinon.client import Client
from koinon.local import LocalCluster

VALUE = os.urandom(100)
FILL_ROWS = 20_000
ALONE, TASKS = "one after the other", "64 tasks"
BATCHES, FLYING_BATCHES = "batches of 1,000, one in flight", "batches of 1,000, four in flight"
LEAST_RATIOS = {
    1: {TASKS: 4.0, BATCHES: 3.0, FLYING_BATCHES: 3.0},
    3: {ALONE: 2.5, TASKS: 2.5, BATCHES: 2.5},
}
"""What the log is to gain, by copies: rows a second, of those without it."""
Call = Callable[[random.Random], Awaitable[object]]


def key_of(number: int) -> bytes:
    return b"key:%012d" % number


def fill(cluster: LocalCluster, records: int) -> float:
    """Write all records; return rows/s."""
    began = time.perf_counter()
    with cluster.client(timeout_ms=60_000) as client:
        for first in range(0, records, FILL_ROWS):
            numbers = range(first, min(first + FILL_ROWS, records))
            client.put_many([(key_of(n), VALUE) for n in numbers]).raise_for_errors()
    return records / (time.perf_counter() - began)


def alone(client: Client, records: int, seconds: float) -> list[float]:
    """Put one row after the other; return the seconds of each."""
    rng, took = random.Random(1), []
    end = time.perf_counter() + seconds
    while (at := time.perf_counter()) < end:
        client.put(key_of(rng.randrange(records)), VALUE)
        took.append(time.perf_counter() - at)
    return took


async def together(callers: int, call: Call, seconds: float) -> list[float]:
    """Have so many tasks call again and again; return the seconds of each call."""
    took: list[float] = []
    end = time.perf_counter() + seconds

    async def work(seed: int) -> None:
        rng = random.Random(seed)
        while (at := time.perf_counter()) < end:
            await call(rng)
            took.append(time.perf_counter() - at)

    await asyncio.gather(*(work(seed) for seed in range(callers)))
    return took


async def batches(cluster: LocalCluster, records: int, seconds: float) -> dict[str, float]:
    """Print what tasks and batches came to; return their rows a second."""
    client = await koinon.aio.connect(cluster.coordinators, timeout_ms=60_000)
    found = {}

    async def one(rng: random.Random) -> None:
        await client.put(key_of(rng.randrange(records)), VALUE)

    async def many(rng: random.Random) -> None:
        rows = [(key_of(rng.randrange(records)), VALUE) for _ in range(1_000)]
        (await client.put_many(rows)).raise_for_errors()

    try:
        for name, callers, rows, call in (
            (TASKS, 64, 1, one),
            (BATCHES, 1, 1_000, many),
            (FLYING_BATCHES, 4, 1_000, many),
        ):
            took = await together(callers, call, seconds)
            found[name] = show(name, took, seconds, rows)
    finally:
        await client.close()
    return found


def show(name: str, took: list[float], seconds: float, rows: int) -> float:
    """Print the rate and its latencies; return the rows a second."""
    marks = [mark * 1e3 for mark in quantiles(took, n=100)] if len(took) > 1 else [0.0] * 99
    rate = len(took) * rows / seconds
    print(
        f"    {name:33} {rate:10,.0f} rows/s  p50 {marks[49]:8.2f}  p99 {marks[98]:8.1f} ms",
        flush=True,
    )
    return rate


def measure(mode: str, replicas: int, records: int, seconds: float) -> dict[str, float]:
    """Print what a cluster does; return the rows a second by what was done."""
    flags = ["--replication-factor", str(replicas)]
    with LocalCluster(
        nodes=replicas,
        coordinators=1,
        coordinator_flags=flags,
        node_flags=["--write-ahead-log", mode],
    ) as cluster:
        rate = fill(cluster, records)
        print(f"log {mode}, {replicas} copies, {records:,} records: filled at {rate:,.0f} rows/s")
        with cluster.client(timeout_ms=60_000) as client:
            lone = show(ALONE, alone(client, records, seconds), seconds, 1)
        return {ALONE: lone} | asyncio.run(batches(cluster, records, seconds))


def compare(replicas: int, without: dict[str, float], logged: dict[str, float]) -> None:
    """Print how many times as fast the log is, beside what is aimed at."""
    print(f"with the log, of without, {replicas} copies")
    for name, rate in logged.items():
        ratio = rate / without[name] if without[name] else float("inf")
        least = LEAST_RATIOS.get(replicas, {}).get(name)
        aim = f"at least {least}: {'holds' if ratio >= least else 'missed'}" if least else ""
        print(f"    {name:33} {ratio:10.2f}  {aim}".rstrip(), flush=True)


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--records", type=int, default=1_000_000)
    flags.add_argument("--replicas", type=int, nargs="+", default=[1, 3])
    flags.add_argument("--seconds", type=float, default=5.0, help="of each step")
    flags.add_argument("--rounds", type=int, default=1)
    given = flags.parse_args()
    for replicas in given.replicas:
        for _ in range(given.rounds):
            without, logged = (
                measure(mode, replicas, given.records, given.seconds) for mode in ("off", "on")
            )
            compare(replicas, without, logged)


if __name__ == "__main__":
    main()
