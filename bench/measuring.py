"""Measurements that several scenarios share: percentiles, CPU of processes, bare LMDB and disk."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import lmdb

from bench.figures import Figure
from koinon import aio
from koinon.local import LocalCluster

PARTITIONS = 1024
READ_ROWS = 1_000
GROUP_ROWS = 8_000
GROUPS = 12
VALUE = b"v" * 100
STEADY_PER_S = 200
CLIENT_TASKS, CLIENT_KEYS, CLIENT_PAUSE_S = 8, 20_000, 0.01


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; 0.0 for no values."""
    ordered = sorted(values)
    return ordered[int((len(ordered) - 1) * share)] if ordered else 0.0


def latencies(row: str, column: str, values_ms: Sequence[float]) -> Iterator[Figure]:
    """Yield p50 and p99 of latencies in milliseconds."""
    for share in (50, 99):
        yield Figure(f"{row} p{share}", column, percentile(values_ms, share / 100), "ms")


def steadily(operation: Callable[[int], object], seconds: float) -> list[float]:
    """Call ``operation`` 200 times a second; return each call's milliseconds since it was due."""
    took, began = [], time.perf_counter()
    for turn in range(int(seconds * STEADY_PER_S)):
        due = began + turn / STEADY_PER_S
        time.sleep(max(0.0, due - time.perf_counter()))
        operation(turn)
        took.append((time.perf_counter() - due) * 1e3)
    return took


def seconds_of(work: Callable[[], object], times: int = 1) -> list[float]:
    """Return the seconds of each of ``times`` calls."""
    spans = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spans.append(time.perf_counter() - began)
    return spans


def family(pid: int) -> list[int]:
    """Return the process and all its children."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU seconds that these processes and their children have used."""
    ticks: int = os.sysconf("SC_CLK_TCK")
    used = 0
    for parent in pids:
        for pid in family(parent):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used += int(fields[11]) + int(fields[12])
    return used / ticks


def resident_mb(pid: int) -> float:
    """Return the process's resident memory in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def node_pids(cluster: LocalCluster) -> list[int]:
    """Return the process ids of the running nodes."""
    return [pid for name in cluster.node_names if (pid := cluster.pid(name)) is not None]


def bare_lmdb(directory: Path) -> tuple[float, float]:
    """Measure (durable put, get) rows/s of py-lmdb alone: sorted groups of 8,000 rows with one sync
    each, and reads of 1,000 sorted keys; 16-byte keys, 100-byte values.
    """
    rng = random.Random(7)
    groups = [
        sorted((n % PARTITIONS).to_bytes(2, "big") + b"user%012d" % n for n in numbers)
        for numbers in (rng.sample(range(10**9), GROUP_ROWS) for _ in range(GROUPS))
    ]
    record = bytes(9 + len(VALUE))
    with lmdb.open(str(directory), map_size=4 << 30, max_dbs=1, meminit=False) as env:
        began = time.perf_counter()
        for group in groups:
            with env.begin(write=True) as txn:
                txn.cursor().putmulti([(key, record) for key in group])
        written = time.perf_counter()
        for group in groups:
            for at in range(0, GROUP_ROWS, READ_ROWS):
                with env.begin() as txn:
                    txn.cursor().getmulti(group[at : at + READ_ROWS])
        read = time.perf_counter()
    rows = GROUPS * GROUP_ROWS
    return rows / (written - began), rows / (read - written)


def bare_syncs(directory: Path, size: int, seconds: float) -> list[float]:
    """Measure the milliseconds of each bare pwrite and fdatasync of ``size`` bytes, one at a
    time.
    """
    path, room = directory / "floor", 16 << 20
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        os.write(descriptor, bytes(room))
        os.fsync(descriptor)
        data, took, at = os.urandom(size), [], 0
        until = time.perf_counter() + seconds
        while (start := time.perf_counter()) < until:
            os.pwrite(descriptor, data, at)
            os.fdatasync(descriptor)
            took.append((time.perf_counter() - start) * 1e3)
            at = (at + size) % (room - size)
    finally:
        os.close(descriptor)
        path.unlink()
    return took


@contextmanager
def steady_clients(coordinators: str) -> Iterator[dict[str, list[float]]]:
    """Get and put single records steadily, in a process of its own, during the block; afterwards
    the yielded dict has the milliseconds of each, by kind.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_clients, args=(coordinators, theirs), daemon=True)
    process.start()
    assert ours.recv() == "ready"
    spans: dict[str, list[float]] = {}
    yield spans
    ours.send("end")
    spans.update(ours.recv())
    process.join()


def _run_clients(coordinators: str, orders: Connection) -> None:
    orders.send(asyncio.run(_clients(coordinators, orders)))


async def _clients(coordinators: str, orders: Connection) -> dict[str, list[float]]:
    spans: dict[str, list[float]] = {"get": [], "put": []}

    async def work(number: int) -> None:
        choice = random.Random(number)
        while not end.done():
            key = b"steady/%d" % choice.randrange(CLIENT_KEYS)
            kind = "put" if choice.random() < 0.5 else "get"
            began = time.perf_counter()
            await (client.put(key, VALUE) if kind == "put" else client.get(key))
            spans[kind].append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(CLIENT_PAUSE_S)

    async with await aio.connect(coordinators, timeout_ms=30_000) as client:
        await client.put_many([(b"steady/%d" % n, VALUE) for n in range(CLIENT_KEYS)])
        orders.send("ready")
        end = asyncio.create_task(asyncio.to_thread(orders.recv))
        await asyncio.gather(*map(work, range(CLIENT_TASKS)))
    return spans
