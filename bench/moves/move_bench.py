"""A node joins a loaded cluster of three: how fast its share moves, and what clients notice.

    python -m bench.moves.move_bench [--megabytes 1024] [--value-bytes 1000] [--seconds 15] [--json]

Three nodes are loaded, a fourth joins, and the rebalance is timed without client load. The bare
loop (bare_copy.py) copies as many bytes three times: before there is a cluster, right before the
rebalance, and right after it. The rebalance is compared with the mean of the last two, because they
run under the same conditions. (A virtual machine's memory costs several times as much if it was
never used before. A copy that runs alone gets the memory that its own input has just freed.)

Then a fifth node joins, and the rebalance runs throttled to a quarter of its rate beside a steady
client load. The bench shows the clients' latencies before and during it. Bytes are those of keys
and values.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.moves.bare_copy import copy_rate
from koinon import aio
from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon.operate.moves import Plan, PlanKind, PlanRequest
from koinon_proto.partitioner import partitioner

REBALANCE = PlanRequest(kind=PlanKind.REBALANCE)
LOAD_BATCH = 20_000  # rows; a commit's price is by the pages that it touches
TASKS = 8
PAUSE_S = 0.01
POLL_S = 1.0  # an answer about hundreds of moves has a cost
TIMEOUT_S = 900.0


@dataclass(kw_only=True)
class Report:
    """Rates in bytes per second, latencies in milliseconds of single operations."""

    stored_bytes: int
    bare_rates: tuple[float, float, float]  # alone, right before the rebalance, right after it
    moved_bytes: int
    moved_s: float
    before_p50_ms: float
    before_p99_ms: float
    during_p50_ms: float
    during_p99_ms: float
    throttle: int
    throttled_rate: float

    @property
    def rate(self) -> float:
        return self.moved_bytes / self.moved_s

    @property
    def bare_rate(self) -> float:
        """The rate that the rebalance is compared with."""
        return (self.bare_rates[1] + self.bare_rates[2]) / 2


def tell(text: str) -> None:
    """Print the progress."""
    print(text, file=sys.stderr, flush=True)


def key_of(number: int) -> bytes:
    return b"move/%011d" % number


def load(cluster: LocalCluster, rows: int, value_bytes: int) -> None:
    """Fill the cluster."""
    fill = random.Random(7).randbytes(value_bytes)
    with cluster.client(timeout_ms=60_000) as client:
        began = time.monotonic()
        for start in range(0, rows, LOAD_BATCH):
            numbers = range(start, min(start + LOAD_BATCH, rows))
            batch = {key_of(n): b"%08d" % n + fill[8:] for n in numbers}
            result = client.put_many(batch, retry_unknown=True)
            assert not result.refused
            assert not result.unknown
        rate = rows / (time.monotonic() - began)
    tell(f"loaded {rows:,} rows of {value_bytes + 16} bytes at {rate:,.0f} rows/s")


def bytes_by_partition(cluster: LocalCluster, rows: int, row_bytes: int) -> dict[int, int]:
    """Return the bytes that each partition holds."""
    table = cluster.status().table
    assert table is not None
    known = partitioner(table.cluster.partitioner, table.cluster.partition_count)
    counts: Counter[int] = Counter()
    for start in range(0, rows, 100_000):
        keys = [key_of(n) for n in range(start, min(start + 100_000, rows))]
        counts.update(known.partitions_of(keys).tolist())
    return {partition: count * row_bytes for partition, count in counts.items()}


def wait_moved(admin: Admin) -> None:
    """Wait until no move is left."""
    deadline = time.monotonic() + TIMEOUT_S
    while admin.moves().moves:
        assert time.monotonic() < deadline, "the moves do not end"
        time.sleep(POLL_S)


def moved_bytes(plan: Plan, sizes: dict[int, int]) -> int:
    """Return the bytes that the plan copies."""
    return sum(len(move.added) * sizes[move.partition_id] for move in plan.moves)


async def client_load(coordinators: str, rows: int, until: asyncio.Event) -> list[float]:
    """Read and write single records steadily until told to stop; return the latencies in ms."""
    client = await aio.connect(coordinators, timeout_ms=30_000)
    latencies: list[float] = []

    async def work(number: int) -> None:
        choice = random.Random(number)
        while not until.is_set():
            key = key_of(choice.randrange(rows))
            began = time.perf_counter()
            if choice.random() < 0.5:
                await client.get(key)
            else:
                await client.put(key, bytes(100))
            latencies.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(PAUSE_S)

    try:
        await asyncio.gather(*map(work, range(TASKS)))
    finally:
        await client.close()
    return latencies


async def under_load(
    cluster: LocalCluster, admin: Admin, rows: int, seconds: float
) -> tuple[list[float], list[float], float]:
    """Return latencies before and during a rebalance, and how long the rebalance took."""
    stop = asyncio.Event()
    task = asyncio.ensure_future(client_load(cluster.coordinators, rows, stop))
    await asyncio.sleep(seconds)
    stop.set()
    before = await task
    stop = asyncio.Event()
    plan = admin.plan(REBALANCE)
    task = asyncio.ensure_future(client_load(cluster.coordinators, rows, stop))
    admin.execute(REBALANCE, plan.plan_id)
    began = time.monotonic()
    await asyncio.to_thread(wait_moved, admin)
    took = time.monotonic() - began
    stop.set()
    return before, await task, took


def measure(megabytes: int, value_bytes: int, seconds: float, log: str) -> Report:
    """Return the figures of a fresh cluster."""
    row_bytes = value_bytes + 16
    rows = megabytes * 1024 * 1024 // row_bytes
    moved_rows = rows * 3 // 4  # three copies on four nodes
    alone = bare(moved_rows, value_bytes)
    flags = ["--write-ahead-log", log]
    with LocalCluster(nodes=3, coordinators=1, node_flags=flags) as cluster:
        load(cluster, rows, value_bytes)
        sizes = bytes_by_partition(cluster, rows, row_bytes)
        with Admin(cluster.coordinators, timeout_ms=10_000) as admin:
            join(cluster)
            before_it = bare(moved_rows, value_bytes)
            plan = admin.plan(REBALANCE)
            began = time.monotonic()
            admin.execute(REBALANCE, plan.plan_id)
            wait_moved(admin)
            took = time.monotonic() - began
            moved = moved_bytes(plan, sizes)
            tell(f"{len(plan.moves)} moves, {moved / 1e6:,.0f} MB in {took:.1f} s")
            after_it = bare(moved_rows, value_bytes)
            join(cluster)
            throttle = int(moved / took / 4)
            admin.set_moves(bytes_per_second=throttle)
            second = moved_bytes(admin.plan(REBALANCE), sizes)
            before, during, slow = asyncio.run(under_load(cluster, admin, rows, seconds))
    return Report(
        stored_bytes=rows * row_bytes,
        bare_rates=(alone, before_it, after_it),
        moved_bytes=moved,
        moved_s=took,
        before_p50_ms=float(np.percentile(before, 50)),
        before_p99_ms=float(np.percentile(before, 99)),
        during_p50_ms=float(np.percentile(during, 50)),
        during_p99_ms=float(np.percentile(during, 99)),
        throttle=throttle,
        throttled_rate=second / slow,
    )


def bare(rows: int, value_bytes: int) -> float:
    """Return the rate of the bare loop now, in bytes per second."""
    with tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch:
        rate = copy_rate(Path(scratch), rows, value_bytes)
    tell(f"bare loop: {rate / 1e6:,.0f} MB/s")
    return rate


def join(cluster: LocalCluster) -> None:
    """Start one more node, and wait until it is registered."""
    count = len(cluster.node_names) + 1
    cluster.add_node()
    cluster.wait_for(
        lambda s: s.table is not None and len(s.table.nodes) == count and s.ready,
        timeout_s=30,
        what="the new node has joined",
    )


def show(report: Report) -> None:
    """Print the report."""
    print(
        f"stored {report.stored_bytes / 1e6:,.0f} MB (times the replicas)\n"
        f"rebalance to a fourth node, no client load: {report.rate / 1e6:,.1f} MB/s, "
        f"{report.rate / report.bare_rate:.2f} of the bare loop's {report.bare_rate / 1e6:,.1f} "
        f"then ({report.bare_rates[0] / 1e6:,.1f} before there was a cluster)\n"
        f"to a fifth node beside clients, throttled to {report.throttle / 1e6:,.1f} MB/s: "
        f"{report.throttled_rate / 1e6:,.1f} MB/s\n"
        f"client p50 / p99 before {report.before_p50_ms:.2f} / {report.before_p99_ms:.2f} ms, "
        f"during {report.during_p50_ms:.2f} / {report.during_p99_ms:.2f} ms: "
        f"p99 x {report.during_p99_ms / report.before_p99_ms:.2f}"
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--megabytes", type=int, default=1024, help="of keys and values, stored once"
    )
    parser.add_argument("--value-bytes", type=int, default=1000)
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of client load before the move"
    )
    parser.add_argument("--write-ahead-log", choices=("on", "off"), default="on")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = measure(
        options.megabytes, options.value_bytes, options.seconds, options.write_ahead_log
    )
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        show(report)


if __name__ == "__main__":
    main()
