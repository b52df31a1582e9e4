"""Benchmarks of a client beside others: ten thousand connections, and a keyspace at its limit."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import koinon
from bench.figures import Figure
from bench.measuring import VALUE, latencies, resident_mb, steadily
from koinon import aio
from koinon.local import LocalCluster
from koinon_proto.contract.table import PartitionStatus, Table
from tests.kit.waiting import wait_until
from tests.node.kit.support import NodeProcess

IDLE, NOW_AND_THEN, GARBAGE = 5_000, 4_500, 500
EVERY_S = 10.0
AT_ONCE = 200  # limit of connections that are being opened at once
GARBAGE_BYTES, GARBAGE_PAUSE_S = 200, 0.05
GET = b"*2\r\n$3\r\nGET\r\n$5\r\nkey:1\r\n"
PING = b"*1\r\n$4\r\nPING\r\n"
OWN, PUBLIC = "own", "public"
TASKS = 64


def _mixed(client: koinon.Client | koinon.KeyspaceClient) -> Callable[[int], object]:
    """Return a function that alternates between a get and a put."""

    def operation(turn: int) -> object:
        key = b"key:%d" % (turn % 1000)
        return client.get(key) if turn % 2 else client.put(key, VALUE)

    return operation


@contextmanager
def _beside(work: Callable[..., Any], *arguments: Any) -> Iterator[Connection]:
    """Run ``work`` in a process of its own, which answers each order sent to it; order 0 ends
    it.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(*arguments, theirs))
    process.start()
    try:
        yield ours
    finally:
        ours.send(0)
        process.join()


# --- connections ---------------------------------------------------------------------------------


def connections(*, rounds: int = 3, seconds: float = 5.0) -> Iterator[Figure]:
    """Measure a client's latencies and a node's memory beside 10,000 connections at its Redis port.

    5,000 are idle, 4,500 get a key every ten seconds, and 500 send garbage and reconnect as soon as
    they are closed. Needs 12,000 open files (``ulimit -n``).
    """
    with LocalCluster(nodes=1, coordinators=1) as cluster, cluster.client() as client:
        (name,) = cluster.node_names
        node, operation = cluster.pid(name), _mixed(client)
        assert node is not None
        client.put(b"key:1", VALUE)
        steadily(operation, 1.0)
        for _ in range(rounds):
            yield from latencies("get or put", "alone", steadily(operation, seconds))
        yield Figure("memory of the node", "alone", resident_mb(node), "MB")
        with _beside(_hold, cluster.redis_address(name)) as holder:
            counts = {"open": 0}
            while counts["open"] < IDLE + NOW_AND_THEN:
                holder.send(True)
                counts = holder.recv()
                steadily(operation, 0.5)
            for _ in range(rounds):
                yield from latencies("get or put", "beside", steadily(operation, seconds))
            holder.send(True)
            after = holder.recv()
            yield Figure("memory of the node", "beside", resident_mb(node), "MB")
        for what in ("gets", "garbage"):
            rate = (after[what] - counts[what]) / (rounds * seconds)
            yield Figure(f"{what} of the others", "beside", rate, "/s")
        yield Figure("idle connections that were closed", "beside", after["closed"])


def _hold(address: str, orders: Connection) -> None:
    """Hold all connections until the order to end; answer each order with the counts so far."""
    host, _, port = address.rpartition(":")
    counts = {"open": 0, "closed": 0, "gets": 0, "garbage": 0}

    async def run() -> None:
        opening, rng = asyncio.Semaphore(AT_ONCE), random.Random(1)
        kinds = [_guest] * NOW_AND_THEN + [_idle] * IDLE + [_stranger] * GARBAGE
        holding = asyncio.gather(
            *(kind(lambda: asyncio.open_connection(host, int(port)), opening, rng, counts)
              for kind in kinds)
        )  # fmt: skip
        while await asyncio.to_thread(orders.recv):
            orders.send(dict(counts))
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)

    asyncio.run(run())


async def _opened(open_: Any, opening: asyncio.Semaphore, counts: dict[str, int]) -> Any:
    async with opening:
        reader, writer = await open_()
        writer.write(PING)
        await reader.readline()
    counts["open"] += 1
    return reader, writer


async def _idle(open_: Any, opening: Any, _rng: random.Random, counts: dict[str, int]) -> None:
    reader, _writer = await _opened(open_, opening, counts)
    await reader.read()
    counts["closed"] += 1


async def _guest(open_: Any, opening: Any, rng: random.Random, counts: dict[str, int]) -> None:
    reader, writer = await _opened(open_, opening, counts)
    while True:
        await asyncio.sleep(EVERY_S * rng.uniform(0.5, 1.5))
        writer.write(GET)
        await reader.readline()
        await reader.readline()
        counts["gets"] += 1


async def _stranger(open_: Any, opening: Any, rng: random.Random, counts: dict[str, int]) -> None:
    while True:
        with contextlib.suppress(OSError):
            async with opening:
                reader, writer = await open_()
            writer.write(rng.randbytes(GARBAGE_BYTES))
            await reader.read()
            writer.close()
            counts["garbage"] += 1
        await asyncio.sleep(GARBAGE_PAUSE_S)


# --- keyspaces -----------------------------------------------------------------------------------


def keyspaces(*, rounds: int = 5, seconds: float = 5.0) -> Iterator[Figure]:
    """Measure a client of a keyspace in its own pool, beside one that tries twice its limit.

    Each node, with a client of its keyspace, is kept on a core of its own: they share only the
    coordinator, the disk and the memory. Rounds without and with the other clients alternate.
    """
    with (
        tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch,
        LocalCluster(nodes=1, coordinators=1) as cluster,
        cluster.admin() as admin,
        contextlib.closing(
            NodeProcess(Path(scratch) / "n", cluster.coordinators, "--pool", OWN, node_id="own1")
        ) as node,
    ):
        wait_until(lambda: len(_table(cluster).nodes) == 2, "the node has registered")
        for name, pool in ((OWN, OWN), (PUBLIC, "")):
            admin.keyspaces.create(name, replication_factor=1, pool=pool)
        wait_until(lambda: _is_online(_table(cluster)), "all partitions are online")
        _keep_on(0, *(pid for name in cluster.node_names if (pid := cluster.pid(name))))
        _keep_on(1, node.process.pid, os.getpid())
        with cluster.client() as client, _beside(_want_all, cluster.coordinators, 0) as others:
            own = _mixed(client.keyspace(OWN))
            steadily(own, 1.0)
            others.send(seconds)
            wanted = others.recv() / seconds
            yield Figure("writes of the others", "wanted", wanted, "/s")
            admin.keyspaces.alter(PUBLIC, max_rows_per_s=max(1, int(wanted / 2)))
            others.send(1.0)  # use up the burst that the limit admits at once
            others.recv()
            for _ in range(rounds):
                yield from latencies("get or put", "alone", steadily(own, seconds))
                others.send(seconds)
                yield from latencies("get or put", "beside", steadily(own, seconds))
                yield Figure("writes of the others", "beside", others.recv() / seconds, "/s")


def _keep_on(core: int, *pids: int) -> None:
    """Keep processes, and all their threads and children, on one core."""
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})
            _keep_on(core, *map(int, (task / "children").read_text().split()))


def _want_all(coordinators: str, core: int, orders: Connection) -> None:
    """Write as much as is admitted, for the seconds of each order; answer with the count."""
    os.sched_setaffinity(0, {core})

    async def write(client: koinon.AsyncKeyspaceClient, task: int, until: float) -> int:
        done = 0
        while time.monotonic() < until:
            with contextlib.suppress(koinon.QuotaExceededError):
                await client.put(b"%d:%d" % (task, done % 1000), VALUE, timeout_ms=1_000)
                done += 1
        return done

    async def work() -> None:
        async with aio.connect(coordinators) as root:
            client = await root.keyspace(PUBLIC)
            while seconds := await asyncio.to_thread(orders.recv):
                until = time.monotonic() + seconds
                counts = await asyncio.gather(*(write(client, n, until) for n in range(TASKS)))
                orders.send(sum(counts))

    asyncio.run(work())


def _table(cluster: LocalCluster) -> Table:
    table = cluster.status().table
    assert table is not None
    return table


def _is_online(table: Table) -> bool:
    return all(row.status is PartitionStatus.ONLINE for row in table.rows)
