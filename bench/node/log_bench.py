"""Durable writes with and without the write-ahead log, inside a node: message in, answer out.

    python -m bench.node.log_bench [--records 1000000] [--seconds 5] [--only callers steady restart]

One store of so many records (16 B keys in 1,024 partitions, 100 B values), overwritten at random.
Each row is a number of callers that each put a batch of so many rows and wait until it is durable.
"bytes a row" is what this process and its writer process had written to the disk. "floor" is a bare
pwrite and fdatasync of as many bytes, one caller, on the same disk.

"steady" puts one row at a time, so many a second whatever the answers take (an open loop), while
the writer process takes the log over. "restart" opens the store that a node has left that was
killed with SIGKILL while it was given more than its store can take over.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles

import numpy as np

from koinon_node.core import records
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from koinon_node.store_config import StoreConfig
from tests.node.kit.groups import lone_writer

PARTITIONS = 1024
VALUE = os.urandom(100)
CALLERS = ((1, 1), (64, 1), (1, 1_000), (4, 1_000))
LEAST_RATIO = {(64, 1): 4.0, (1, 1_000): 3.0, (4, 1_000): 3.0}
"""What the log is to gain, by callers and rows a batch: rows a second, of those without it."""
MOST_OVER_FLOOR_S = 150e-6
MOST_BYTES_A_ROW = 8_000
MOST_STEADY_P99_S, MOST_STEADY_FLOORS = 10e-3, 2
MOST_RESTART_S = 3.0
STEADY_A_SECOND = 1_000
PARTS = ("callers", "steady", "restart")
FILL_S = 5.0


def key_of(number: int) -> bytes:
    return records.head_of(number % PARTITIONS) + b"key:%012d" % number


def written_bytes(*process_ids: int) -> int:
    total = 0
    for process_id in process_ids:
        lines = Path(f"/proc/{process_id}/io").read_text(encoding="ascii").splitlines()
        total += int(next(line for line in lines if line.startswith("write_bytes")).split()[1])
    return total


def fill(directory: Path, count: int) -> None:
    with Store(StoreConfig(directory=directory)) as store:
        keys = sorted(map(key_of, range(count)))
        with store.env.begin(write=True) as txn, txn.cursor(store.databases[DATA_DB]) as cursor:
            record = records.encode_record(1, VALUE, 0)
            cursor.putmulti([(key, record) for key in keys], append=True)


async def put(writer: Writer, numbers: list[int], sequence: int) -> None:
    record = records.encode_record(sequence, VALUE, 0)
    keys = list(map(key_of, numbers))
    partitions = np.unique(np.array([n % PARTITIONS for n in numbers], np.uint32))
    progress = records.progress_keys(partitions)
    ends = np.full(len(partitions), sequence, np.uint64)
    positions = records.encode_progress(ends, np.zeros(len(partitions), np.uint64))
    await writer.submit(
        ((DATA_DB, keys, [record] * len(keys)), (PARTITIONS_DB, progress, list(positions))),
        len(keys),
        len(keys) * 125,
    )


async def measure(
    writer: Writer, count: int, callers: int, rows: int, seconds: float
) -> tuple[float, list[float], float]:
    """Return (rows a second, seconds of each batch, bytes written a row)."""
    took: list[float] = []
    ids = (os.getpid(), writer.process_id)
    before, began = written_bytes(*ids), time.perf_counter()

    async def call(seed: int) -> None:
        rng = random.Random(seed)
        sequence = 2
        while time.perf_counter() - began < seconds:
            numbers = [rng.randrange(count) for _ in range(rows)]
            at = time.perf_counter()
            await put(writer, numbers, sequence)
            took.append(time.perf_counter() - at)
            sequence += 1

    await asyncio.gather(*(call(seed) for seed in range(callers)))
    elapsed = time.perf_counter() - began
    written = written_bytes(*ids) - before
    return len(took) * rows / elapsed, took, written / (len(took) * rows)


def floor(directory: Path, size: int, seconds: float) -> list[float]:
    path = directory / "floor"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(descriptor, bytes(16 << 20))
    os.fsync(descriptor)
    data, took, at = os.urandom(size), [], 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        os.pwrite(descriptor, data, at)
        os.fdatasync(descriptor)
        took.append(time.perf_counter() - start)
        at = (at + size) % (15 << 20)
    os.close(descriptor)
    path.unlink()
    return took


def marks_of(took: list[float]) -> list[float]:
    """Return the percentiles 1 to 99 in seconds."""
    return quantiles(took, n=100) if len(took) > 1 else [took[0]] * 99


def show(name: str, took: list[float]) -> str:
    marks = marks_of(took)
    return f"{name} p50 {marks[49] * 1e3:7.2f} p99 {marks[98] * 1e3:7.1f} ms"


def bar(text: str, *, holds: bool) -> None:
    print(f"    aim: {text}: {'holds' if holds else 'missed'}", flush=True)


def compare_with_bars(
    callers: int, rows: int, base: list[float], took: list[float], ratio: float, written: float
) -> None:
    """Print what is aimed at for these callers, and whether the log reached it."""
    if (callers, rows) == (1, 1):
        over = marks_of(took)[49] - marks_of(base)[49]
        limit = MOST_OVER_FLOOR_S
        text = f"{over * 1e6:.0f} us above the floor's median, at most {limit * 1e6:.0f}"
        bar(text, holds=over <= limit)
    if least := LEAST_RATIO.get((callers, rows)):
        bar(f"{ratio:.2f} times the rate without the log, at least {least}", holds=ratio >= least)
    if rows == 1_000:
        most = MOST_BYTES_A_ROW
        bar(f"{written:,.0f} bytes a row, at most {most:,}", holds=written <= most)


async def compare(directory: Path, count: int, seconds: float, rounds: int) -> None:
    for callers, rows in CALLERS:
        for _ in range(rounds):
            base = floor(directory, 180 * rows, min(seconds, 1.0))
            print(f"{callers:3} x {rows:5} rows: " + show("floor", base), flush=True)
            rates = []
            for logged in (False, True):
                lost: list[str] = []
                store = Store(StoreConfig(directory=directory, write_ahead_log=logged))
                writer = lone_writer(store, lost.append)
                await writer.start()
                rate, took, written = await measure(writer, count, callers, rows, seconds)
                began = time.perf_counter()
                store.close(clean=await writer.stop())
                rates.append(rate)
                print(
                    f"    {'log' if logged else 'direct':7} {rate:9,.0f} rows/s  {show('', took)}"
                    f"  {written:8,.0f} bytes a row, stopped in "
                    f"{time.perf_counter() - began:.2f} s",
                    flush=True,
                )
                assert not lost, lost
            ratio = rates[1] / rates[0]
            print(f"    ratio {ratio:.2f}", flush=True)
            compare_with_bars(callers, rows, base, took, ratio, written)


async def steady(directory: Path, count: int, seconds: float) -> None:
    """Print the times of puts that come at a steady rate, counted from when each was due."""
    base = floor(directory, 180, 1.0)
    print(f"{STEADY_A_SECOND} puts a second: " + show("floor", base))
    store = Store(StoreConfig(directory=directory, write_ahead_log=True))
    writer = lone_writer(store, lambda reason: None)
    await writer.start()
    rng, took, calls = random.Random(1), list[float](), set[asyncio.Task[None]]()

    async def call(due: float, sequence: int) -> None:
        await put(writer, [rng.randrange(count)], sequence)
        took.append(time.perf_counter() - due)

    began = time.perf_counter()
    for turn in range(int(seconds * STEADY_A_SECOND)):
        due = began + turn / STEADY_A_SECOND
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        calls.add(task := asyncio.ensure_future(call(due, 2 + turn)))
        task.add_done_callback(calls.discard)
    await asyncio.gather(*calls)
    store.close(clean=await writer.stop())
    print(f"    {len(took)} puts {show('', took)}, slowest {max(took) * 1e3:.1f} ms", flush=True)
    p99, most = marks_of(took)[98], max(MOST_STEADY_P99_S, MOST_STEADY_FLOORS * marks_of(base)[98])
    bar(f"p99 {p99 * 1e3:.1f} ms, at most {most * 1e3:.1f}", holds=p99 <= most)


async def fill_overlay(directory: Path, count: int, out: Connection) -> None:
    """Put more than the store can take over, tell how many rows it lacks, and go on for ever."""
    store = Store(StoreConfig(directory=directory, write_ahead_log=True))
    writer = lone_writer(store, lambda reason: None)
    await writer.start()
    filling = asyncio.ensure_future(measure(writer, count, 4, 1_000, FILL_S + 60))
    await asyncio.sleep(FILL_S)
    out.send((writer.process_id, store.overlay.rows))
    await filling


def run_fill_overlay(directory: Path, count: int, out: Connection) -> None:
    asyncio.run(fill_overlay(directory, count, out))


def restart(directory: Path, count: int) -> None:
    """Print how long a store takes to open after ``kill -9`` under full load."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=run_fill_overlay, args=(directory, count, theirs))
    child.start()
    writer_id, rows = ours.recv()
    child.kill()
    os.kill(writer_id, signal.SIGKILL)
    child.join()
    began = time.perf_counter()
    with Store(StoreConfig(directory=directory, write_ahead_log=True)):
        took = time.perf_counter() - began
    print(f"killed with {rows:,} rows not in the store: opened in {took:.2f} s", flush=True)
    bar(f"{took:.2f} s, at most {MOST_RESTART_S}", holds=took <= MOST_RESTART_S)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--records", type=int, default=1_000_000)
    flags.add_argument("--seconds", type=float, default=5.0)
    flags.add_argument("--rounds", type=int, default=1)
    flags.add_argument("--directory", type=Path, default=None)
    flags.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    given = flags.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        directory = Path(name) / "data"
        fill(directory, given.records)
        if "callers" in given.only:
            asyncio.run(compare(directory, given.records, given.seconds, given.rounds))
        for _ in range(given.rounds):
            if "steady" in given.only:
                asyncio.run(steady(directory, given.records, given.seconds))
            if "restart" in given.only:
                restart(directory, given.records)


if __name__ == "__main__":
    main()
