"""Compares a writer on a thread with the writer process, each beside a loop that serves reads.

    python -m bench.node.storage_bench [--seconds 3]

py-lmdb takes and drops the GIL at every row, and the event loop of a node needs it all the time.
Both writers get the same groups: 8 batches of 1,000 rows (16 B keys, 100 B values), one
transaction, one fsync. Meanwhile the loop reads batches of 1,000 keys. "stall" is the longest delay
of a timer.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import random
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from koinon_node.storage.environment import DATA_DB, DATABASES
from koinon_node.storage.store import Store
from koinon_node.store_config import StoreConfig
from tests.node.kit.groups import lone_writer

ROWS, BATCHES = 1000, 8
RECORD = bytes(109)
Put = Callable[[list[bytes]], Awaitable[None]]


class ThreadWriter:
    """The alternative: group commit on a thread of this process."""

    def __init__(self, store: Store) -> None:
        self._env = store.env
        self._database = store.env.open_db(DATABASES[DATA_DB].encode())
        self._queue: queue.SimpleQueue[tuple[list[bytes], asyncio.Future[None]]]
        self._queue = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, keys: list[bytes]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._queue.put((keys, future))
        return future

    def _run(self) -> None:
        while True:
            waiting = [self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get())
            keys = sorted({key for batch, _ in waiting for key in batch})
            with self._env.begin(write=True) as txn:
                txn.cursor(self._database).putmulti([(key, RECORD) for key in keys])
            futures = [future for _, future in waiting]
            self._loop.call_soon_threadsafe(_resolve, futures)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def batches(count: int) -> list[list[bytes]]:
    rng = random.Random(3)
    return [
        [(n % 1024).to_bytes(2, "big") + b"user%012d" % n for n in rng.sample(range(10**9), ROWS)]
        for _ in range(count)
    ]


async def measure(store: Store, put: Put, seconds: float) -> tuple[float, float, float]:
    """Return (rows written/s, rows read/s, worst stall in ms)."""
    work = batches(200)
    written = read = 0
    stall = 0.0
    end = time.perf_counter() + seconds

    async def write(number: int) -> None:
        nonlocal written
        while time.perf_counter() < end:
            await put(work[number % len(work)])
            written += ROWS
            number += BATCHES

    async def serve() -> None:
        nonlocal read
        while time.perf_counter() < end:
            store.get_many(work[read // ROWS % BATCHES])
            read += ROWS
            await asyncio.sleep(0)

    async def watch() -> None:
        nonlocal stall
        while (started := time.perf_counter()) < end:
            await asyncio.sleep(0.001)
            stall = max(stall, time.perf_counter() - started - 0.001)

    await asyncio.gather(serve(), watch(), *(write(number) for number in range(BATCHES)))
    return written / seconds, read / seconds, stall * 1e3


async def run(kind: str, seconds: float) -> tuple[float, float, float]:
    """Measure one kind of writer on a fresh store."""
    with tempfile.TemporaryDirectory(prefix="koinon-bench-") as directory:
        store = Store(StoreConfig(directory=Path(directory), map_size_bytes=8 << 30))
        if kind == "thread":
            result = await measure(store, ThreadWriter(store).put, seconds)
            await asyncio.sleep(0.2)  # the thread's last group
            store.close(clean=False)
            return result
        writer = lone_writer(store, print)
        await writer.start()
        values: list[bytes | None] = [RECORD] * ROWS

        async def put(keys: list[bytes]) -> None:
            await writer.submit(((DATA_DB, keys, values),), ROWS, 0)

        result = await measure(store, put, seconds)
        store.close(clean=await writer.stop())
        return result


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    for kind, interval in (("thread", 0.005), ("thread", 0.0005), ("process", 0.005)):
        sys.setswitchinterval(interval)
        written, read, stall = asyncio.run(run(kind, options.seconds))
        print(
            f"{kind:<8} switch interval {interval * 1e3:>4.1f} ms   "
            f"written {written:>9,.0f}/s   read {read:>11,.0f}/s   stall {stall:.1f} ms"
        )


if __name__ == "__main__":
    main()
