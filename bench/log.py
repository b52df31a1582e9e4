"""Benchmarks of durable writes inside a node, with and without the write-ahead log, from message to
answer.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from bench.figures import Aim, Figure
from bench.measuring import PARTITIONS, bare_syncs, latencies
from koinon_node.core.formats import records
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from koinon_node.store_config import StoreConfig
from tests.node.kit.groups import lone_writer

VALUE = os.urandom(100)
ROW_BYTES = 180  # of a record in the log
CALLERS = ((1, 1), (64, 1), (1, 1_000), (4, 1_000))
STEADY_A_SECOND = 1_000
FILL_S = 5.0
AIMS = (
    *(
        Aim(row, "log", bound, (row, "direct"))
        for row, bound in (("64 x 1", 4.0), ("1 x 1000", 3.0), ("4 x 1000", 3.0))
    ),
    *(Aim(f"{row}, bytes a row", "log", 8_000, at_most=True) for row in ("1 x 1000", "4 x 1000")),
    Aim("steady p99", "log", 10.0, at_most=True),
    Aim("start after kill -9", "log", 3.0, at_most=True),
)


def measure(*, stored: int = 1_000_000, seconds: float = 5.0) -> Iterator[Figure]:
    """Measure durable writes inside one node with the log and without, beside bare syncs.

    "64 x 1" is 64 callers that each put a batch of one row and wait until it is durable. Each
    overwrites random records of one store. "steady" puts one row at a time, a thousand a second
    whatever the latency. "start" opens the store of a node that was killed while it was given more
    writes than its store can take over.
    """
    with tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch:
        directory = Path(scratch) / "data"
        _fill(directory, stored)
        for callers, rows in CALLERS:
            row = f"{callers} x {rows}"
            floor = bare_syncs(directory, ROW_BYTES * rows, min(seconds, 1.0))
            yield from latencies(row, "bare sync", floor)
            for column in ("direct", "log"):
                yield from asyncio.run(_callers(directory, stored, row, column, seconds))
        yield from asyncio.run(_steady(directory, stored, seconds))
        yield _start(directory, stored)


def _key(number: int) -> bytes:
    return records.head_of(number % PARTITIONS) + b"key:%012d" % number


def _fill(directory: Path, count: int) -> None:
    with Store(StoreConfig(directory=directory)) as store:
        keys = sorted(map(_key, range(count)))
        with store.env.begin(write=True) as txn, txn.cursor(store.databases[DATA_DB]) as cursor:
            record = records.encode_record(1, VALUE, 0)
            cursor.putmulti([(key, record) for key in keys], append=True)


@asynccontextmanager
async def _writer(directory: Path, *, logged: bool = True) -> AsyncIterator[tuple[Store, Writer]]:
    store = Store(StoreConfig(directory=directory, write_ahead_log=logged))
    lost: list[str] = []
    writer = lone_writer(store, lost.append)
    await writer.start()
    yield store, writer
    store.close(clean=await writer.stop())
    assert not lost, lost


async def _put(writer: Writer, numbers: list[int], sequence: int) -> None:
    record = records.encode_record(sequence, VALUE, 0)
    keys = list(map(_key, numbers))
    partitions = np.unique(np.array([n % PARTITIONS for n in numbers], np.uint32))
    progress = records.progress_keys(partitions)
    ends = np.full(len(partitions), sequence, np.uint64)
    positions = records.encode_progress(ends, np.zeros(len(partitions), np.uint64))
    await writer.submit(
        ((DATA_DB, keys, [record] * len(keys)), (PARTITIONS_DB, progress, list(positions))),
        len(keys),
        len(keys) * 125,
    )


async def _put_on(writer: Writer, count: int, rows: int, seed: int, until: float) -> list[float]:
    """Put batches until the time ``until``; return the milliseconds of each."""
    rng, took, sequence = random.Random(seed), list[float](), 2
    while (at := time.perf_counter()) < until:
        await _put(writer, [rng.randrange(count) for _ in range(rows)], sequence)
        took.append((time.perf_counter() - at) * 1e3)
        sequence += 1
    return took


def _written(*pids: int) -> int:
    """Return the bytes that these processes had written to the disk."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/io").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


async def _callers(
    directory: Path, count: int, row: str, column: str, seconds: float
) -> list[Figure]:
    callers, _, rows = row.partition(" x ")
    async with _writer(directory, logged=column == "log") as (_, writer):
        pids = (os.getpid(), writer.process_id)
        before, began = _written(*pids), time.perf_counter()
        puts = (_put_on(writer, count, int(rows), n, began + seconds) for n in range(int(callers)))
        took = [ms for calls in await asyncio.gather(*puts) for ms in calls]
        elapsed, written = time.perf_counter() - began, _written(*pids) - before
    done = len(took) * int(rows)
    return [
        Figure(row, column, done / elapsed, "rows/s"),
        *latencies(row, column, took),
        Figure(f"{row}, bytes a row", column, written / done),
    ]


async def _steady(directory: Path, count: int, seconds: float) -> list[Figure]:
    """Return the latencies of puts at a steady rate, counted from when each was due."""
    rng, took = random.Random(1), list[float]()
    async with _writer(directory) as (_, writer), asyncio.TaskGroup() as calls:

        async def call(due: float, sequence: int) -> None:
            await _put(writer, [rng.randrange(count)], sequence)
            took.append((time.perf_counter() - due) * 1e3)

        began = time.perf_counter()
        for turn in range(int(seconds * STEADY_A_SECOND)):
            due = began + turn / STEADY_A_SECOND
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            calls.create_task(call(due, 2 + turn))
    return [*latencies("steady", "log", took), Figure("steady, slowest", "log", max(took), "ms")]


async def _overfill(directory: Path, count: int, out: Connection) -> None:
    """Put more rows than the store can take over; send the number of rows that it lacks, and
    go on.
    """
    async with _writer(directory) as (store, writer):
        until = time.perf_counter() + FILL_S + 60
        filling = asyncio.gather(*(_put_on(writer, count, 1_000, n, until) for n in range(4)))
        await asyncio.sleep(FILL_S)
        out.send((writer.process_id, store.overlay.rows))
        await filling


def _run_overfill(directory: Path, count: int, out: Connection) -> None:
    asyncio.run(_overfill(directory, count, out))


def _start(directory: Path, count: int) -> Figure:
    """Measure how long a store takes to open after ``kill -9`` under full load."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_run_overfill, args=(directory, count, theirs))
    child.start()
    writer_id, _ = ours.recv()
    child.kill()
    os.kill(writer_id, signal.SIGKILL)
    child.join()
    began = time.perf_counter()
    with Store(StoreConfig(directory=directory, write_ahead_log=True)):
        return Figure("start after kill -9", "log", time.perf_counter() - began, "s")
