"""The cost of ten thousand connections at a node's Redis port: to other clients, and in memory.

    python -m bench.clients.connections_bench [--rounds 3] [--seconds 5] [--json]

A process of its own holds the connections: 5,000 guests that have said something once and are idle,
4,500 that each get a key every ten seconds, and 500 that send garbage and come again as soon as
they are closed. A client gets and puts in turn at a steady rate, and its times count from when each
was due: before the others come, and beside them. Needs 12,000 open files (``ulimit -n``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from bench.clients.neighbours_bench import p99, timed
from koinon.local import LocalCluster

IDLE, NOW_AND_THEN, GARBAGE = 5_000, 4_500, 500
EVERY_S = 10.0
AT_ONCE = 200  # connections that are being opened
GARBAGE_BYTES, GARBAGE_PAUSE_S = 200, 0.05
GET = b"*2\r\n$3\r\nGET\r\n$5\r\nkey:1\r\n"
PING = b"*1\r\n$4\r\nPING\r\n"


async def hold(host: str, port: int, counts: dict[str, int]) -> None:
    """Open all connections, and keep them busy; sets ``open`` when all are there."""
    opening = asyncio.Semaphore(AT_ONCE)
    rng = random.Random(1)

    async def guest(every_s: float | None) -> None:
        async with opening:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(PING)
            await reader.readline()
        counts["open"] += 1
        if every_s is None:
            await reader.read()
            counts["closed"] += 1
        while every_s is not None:
            await asyncio.sleep(every_s * rng.uniform(0.5, 1.5))
            writer.write(GET)
            if (await reader.readline()).startswith(b"$-1"):
                continue
            await reader.readline()
            counts["gets"] += 1

    async def stranger() -> None:
        while True:
            with contextlib.suppress(OSError):
                async with opening:
                    reader, writer = await asyncio.open_connection(host, port)
                writer.write(rng.randbytes(GARBAGE_BYTES))
                await reader.read()
                writer.close()
                counts["garbage"] += 1
            await asyncio.sleep(GARBAGE_PAUSE_S)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(IDLE):
            tasks.create_task(guest(None))
        for _ in range(NOW_AND_THEN):
            tasks.create_task(guest(EVERY_S))
        for _ in range(GARBAGE):
            tasks.create_task(stranger())


def run_holder(address: str, orders: Connection) -> None:
    """Hold connections until told to end; answer each order with what has happened."""
    host, _, port = address.rpartition(":")
    counts = {"open": 0, "closed": 0, "gets": 0, "garbage": 0}

    async def run() -> None:
        holding = asyncio.ensure_future(hold(host, int(port), counts))
        while await asyncio.to_thread(orders.recv):
            orders.send(dict(counts))
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)

    asyncio.run(run())


def resident_mb(process_id: int) -> float:
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--seconds", type=float, default=5.0)
    flags.add_argument("--json", action="store_true")
    given = flags.parse_args()
    with LocalCluster(nodes=1, coordinators=1) as cluster, cluster.client() as client:
        (name,) = cluster.node_names
        node = cluster.pid(name)
        assert node is not None
        client.put(b"key:1", b"v")
        timed(client, 1.0)
        alone = [timed(client, given.seconds) for _ in range(given.rounds)]
        memory = resident_mb(node)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        holder = context.Process(target=run_holder, args=(cluster.redis_address(name), theirs))
        holder.start()
        counts = {"open": 0}
        while counts["open"] < IDLE + NOW_AND_THEN:
            ours.send(True)
            counts = ours.recv()
            timed(client, 0.5)
        beside = [timed(client, given.seconds) for _ in range(given.rounds)]
        ours.send(True)
        after, peak = ours.recv(), resident_mb(node)
        ours.send(False)
        holder.join()
    seconds = given.rounds * given.seconds
    found = {
        "p50_alone_ms": median(map(median, alone)),
        "p50_beside_ms": median(map(median, beside)),
        "p99_alone_ms": median(map(p99, alone)),
        "p99_beside_ms": median(map(p99, beside)),
        "node_alone_mb": memory,
        "node_beside_mb": peak,
        "gets_per_s": (after["gets"] - counts["gets"]) / seconds,
        "garbage_per_s": (after["garbage"] - counts["garbage"]) / seconds,
        "closed": after["closed"],
    }
    if given.json:
        print(json.dumps(found))
    else:
        for what, value in found.items():
            print(f"{what:16} {value:10.2f}")


if __name__ == "__main__":
    main()
