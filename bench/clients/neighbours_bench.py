"""The cost of a keyspace at twice its limit to clients of another one, on nodes of its own.

    python -m bench.clients.neighbours_bench [--rounds 5] [--seconds 5] [--json]

Two keyspaces of one cluster, one copy: "public" on a node without a pool, "own" on the node of a
pool. Each node, with a client of its keyspace, is kept on a core of its own, so that what they
share is the coordinator, the disk and the memory. The public keyspace gets half of what its clients
write without a limit, and these go on wanting all of it. Operations of the other client, a get and
a put in turn, come at a steady rate, and their times count from when each was due. Rounds without
and with the public clients alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles

import koinon
from koinon import aio
from koinon.local import LocalCluster
from koinon_proto.contract.table import PartitionStatus, Table
from tests.kit.waiting import wait_until
from tests.node.kit.support import NodeProcess

OWN, PUBLIC = "own", "public"
RATE = 200  # operations a second of the client that is timed
TASKS = 64
VALUE = b"v" * 100


def keep_on(core: int, *process_ids: int) -> None:
    """Keep processes, and all their threads and children, on one core."""
    for process_id in process_ids:
        for task in Path(f"/proc/{process_id}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})
            children = (task / "children").read_text().split()
            keep_on(core, *map(int, children))


def ask_much(coordinators: str, core: int, orders: Connection) -> None:
    """Write as much as is let in, from each order of so many seconds on; answer with the count."""
    os.sched_setaffinity(0, {core})

    async def write(client: koinon.AsyncKeyspaceClient, task: int, until: float) -> int:
        done = 0
        while time.monotonic() < until:
            try:
                await client.put(b"%d:%d" % (task, done % 1000), VALUE, timeout_ms=1_000)
                done += 1
            except koinon.QuotaExceededError:
                continue
        return done

    async def work() -> None:
        async with aio.connect(coordinators) as root:
            client = await root.keyspace(PUBLIC)
            while seconds := await asyncio.to_thread(orders.recv):
                until = time.monotonic() + seconds
                counts = await asyncio.gather(*(write(client, n, until) for n in range(TASKS)))
                orders.send(sum(counts))

    asyncio.run(work())


def timed(client: koinon.Client | koinon.KeyspaceClient, seconds: float) -> list[float]:
    """Return the milliseconds of each operation, counted from when it was due."""
    took, began = [], time.perf_counter()
    for turn in range(int(seconds * RATE)):
        due = began + turn / RATE
        time.sleep(max(0.0, due - time.perf_counter()))
        key = b"key:%d" % (turn % 1000)
        if turn % 2:
            client.get(key)
        else:
            client.put(key, VALUE)
        took.append((time.perf_counter() - due) * 1e3)
    return took


def p99(took: list[float]) -> float:
    return quantiles(took, n=100)[98]


def run(cluster: LocalCluster, rounds: int, seconds: float) -> dict[str, float]:
    """Return medians over the rounds: p50 and p99 in milliseconds, and the others' rates."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(
        target=ask_much, args=(cluster.coordinators, 0, theirs)
    )
    other.start()

    def ask(duration: float) -> float:
        ours.send(duration)
        return float(ours.recv()) / duration

    with cluster.client() as client, cluster.admin() as admin:
        own = client.keyspace(OWN)
        timed(own, 1.0)
        wanted = ask(seconds)
        admin.keyspaces.alter(PUBLIC, max_rows_per_s=max(1, int(wanted / 2)))
        alone, beside, rates = list[list[float]](), list[list[float]](), list[float]()
        ask(1.0)  # what the limit lets in at once is used up
        for _ in range(rounds):
            alone.append(timed(own, seconds))
            ours.send(seconds)
            beside.append(timed(own, seconds))
            rates.append(float(ours.recv()) / seconds)
    ours.send(0)
    other.join()
    return {
        "wanted_per_s": wanted,
        "let_in_per_s": median(rates),
        "p50_alone_ms": median(median(took) for took in alone),
        "p50_beside_ms": median(median(took) for took in beside),
        "p99_alone_ms": median(map(p99, alone)),
        "p99_beside_ms": median(map(p99, beside)),
        "p99_ratio": median(p99(b) / p99(a) for a, b in zip(alone, beside, strict=True)),
    }


def table_of(cluster: LocalCluster) -> Table:
    table = cluster.status().table
    assert table is not None
    return table


def is_online(table: Table) -> bool:
    return all(row.status is PartitionStatus.ONLINE for row in table.rows)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--seconds", type=float, default=5.0)
    flags.add_argument("--json", action="store_true")
    given = flags.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch,
        LocalCluster(nodes=1, coordinators=1) as cluster,
    ):
        node = NodeProcess(
            Path(scratch) / "data", cluster.coordinators, "--pool", OWN, node_id="own1"
        )
        try:
            with cluster.admin() as admin:
                wait_until(lambda: len(table_of(cluster).nodes) == 2, "the node has registered")
                for name, pool in ((OWN, OWN), (PUBLIC, "")):
                    admin.keyspaces.create(name, replication_factor=1, pool=pool)

            wait_until(lambda: is_online(table_of(cluster)), "all partitions are online")
            keep_on(0, *(pid for n in cluster.node_names if (pid := cluster.pid(n))))
            keep_on(1, node.process.pid, os.getpid())
            found = run(cluster, given.rounds, given.seconds)
        finally:
            node.close()
    if given.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:16} {value:10.2f}")


if __name__ == "__main__":
    main()
