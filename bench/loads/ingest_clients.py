"""Clients beside a load: steady single gets and puts, until standard input closes.

    python -m bench.loads.ingest_clients COORDINATORS

It runs as a process of its own. First it writes its keys and prints ``ready``. At the end it prints
one JSON object: how many gets and puts there were, and their p50, p99 and longest, in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from typing import Any

from koinon import aio

TASKS = 8
KEYS = 20_000
PAUSE_S = 0.01
VALUE = b"x" * 100
TIMEOUT_MS = 30_000


class Clients:
    """Starts that process, which measures for the length of a ``with`` block."""

    def __init__(self, coordinators: str) -> None:
        self.report: dict[str, Any] = {}
        self._command = [sys.executable, "-m", "bench.loads.ingest_clients", coordinators]

    def __enter__(self) -> Clients:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            self._process.kill()
            raise RuntimeError("the clients' process did not start")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        said, _ = self._process.communicate()
        if error is None:
            self.report = json.loads(said)


def key_of(number: int) -> bytes:
    return b"bench/%d" % number


async def measure(coordinators: str, until: asyncio.Event) -> dict[str, list[float]]:
    """Return the latencies of gets and puts, in seconds."""
    spans: dict[str, list[float]] = {"get": [], "put": []}

    async def work(number: int) -> None:
        choice = random.Random(number)
        while not until.is_set():
            key = key_of(choice.randrange(KEYS))
            kind = "put" if choice.random() < 0.5 else "get"
            began = time.perf_counter()
            if kind == "put":
                await client.put(key, VALUE)
            else:
                await client.get(key)
            spans[kind].append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)

    async with await aio.connect(coordinators, timeout_ms=TIMEOUT_MS) as client:
        await client.put_many([(key_of(number), VALUE) for number in range(KEYS)])
        print("ready", flush=True)
        await asyncio.gather(*map(work, range(TASKS)))
    return spans


async def run(coordinators: str) -> dict[str, Any]:
    """Measure until standard input closes."""
    until = asyncio.Event()
    measuring = asyncio.create_task(measure(coordinators, until))
    await asyncio.to_thread(sys.stdin.read)
    until.set()
    return {kind: summary(spans) for kind, spans in (await measuring).items()}


def summary(spans_s: list[float]) -> dict[str, float]:
    """Return how many there were, and percentiles in milliseconds."""
    ordered = sorted(spans_s) or [0.0]
    return {
        "operations": len(spans_s),
        "p50_ms": ordered[len(ordered) // 2] * 1e3,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
        "longest_ms": ordered[-1] * 1e3,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1]))))
