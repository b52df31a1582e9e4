"""A workload that measures the throughput and latency of one client process on a running cluster.

Keys begin with ``bench:`` and are deleted at the end. Figures are rows (or operations) per second;
latencies are milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

from koinon import aio
from koinon.aio import AsyncClient
from koinon.client import Client, connect

KEYS = 20_000
VALUE_BYTES = 100
BATCH_KEYS = 1_000
READERS = 4
TASKS = 64
THREADS = (1, 16)
STEPS = 9
TIMEOUT_MS = 20_000

ConnectAsync = Callable[[], Awaitable[AsyncClient]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One figure. The latencies are of single operations, in the steps that measure them."""

    rows_per_s: float
    p50_ms: float | None = None
    p99_ms: float | None = None


@dataclass(kw_only=True)
class Report:
    """The results of ``measure``, by the name of the step."""

    keys: int = KEYS
    value_bytes: int = VALUE_BYTES
    nodes: int = 0
    measures: dict[str, Measure] = field(default_factory=dict)


def measure(
    coordinators: str | Sequence[str],
    seconds: float = 3.0,
    progress: Callable[[str], None] = lambda _step: None,
    *,
    timeout_ms: int = TIMEOUT_MS,
) -> Report:
    """Measure for about ``seconds`` in each step.

    Args:
        progress: called with the name of each of the ``STEPS`` steps before it begins.
    """
    report = Report()
    keys = [b"bench:" + os.urandom(5).hex().encode() for _ in range(KEYS)]
    with connect(coordinators, timeout_ms=timeout_ms) as client:
        report.nodes = len({row.primary for row in client.table().rows} - {0})
        try:
            connect_async = partial(aio.connect, coordinators, timeout_ms=timeout_ms)
            _run_steps(client, connect_async, keys, seconds, progress, report)
        finally:
            client.delete_many(keys)
    return report


def _run_steps(
    client: Client,
    connect_async: ConnectAsync,
    keys: list[bytes],
    seconds: float,
    progress: Callable[[str], None],
    report: Report,
) -> None:
    value = os.urandom(VALUE_BYTES)

    def step(name: str, work: Callable[[], Measure]) -> None:
        progress(name)
        report.measures[name] = work()

    step("put_many", lambda: _put_many(client, keys, value, seconds))
    step("get_many_1000", lambda: _get_many(client, keys, seconds))
    step(
        f"get_many_1000_x{READERS}",
        lambda: asyncio.run(_get_many_side_by_side(connect_async, keys, seconds)),
    )

    async def put(shared: AsyncClient, key: bytes) -> None:
        await shared.put(key, value)

    tasks = partial(_tasks, connect_async, keys, seconds)
    step(f"async_get_{TASKS}", lambda: asyncio.run(tasks(AsyncClient.get)))
    step(f"async_put_{TASKS}", lambda: asyncio.run(tasks(put)))
    for threads in THREADS:
        step(f"get_{threads}_threads", partial(_threads, client, keys, seconds, threads))
    step("put_1_thread", lambda: _put_one_by_one(client, keys, value, seconds))
    step("scan", lambda: _scan(client, seconds))


def _put_many(client: Client, keys: list[bytes], value: bytes, seconds: float) -> Measure:
    """Measure durable puts, with as many batches in flight as the client allows."""
    rows, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        result = client.put_many([(key, value) for key in keys])
        result.raise_for_errors()
        rows += result.applied
    return Measure(rows_per_s=rows / took)


def _get_many(client: Client, keys: list[bytes], seconds: float) -> Measure:
    batches = [keys[a : a + BATCH_KEYS] for a in range(0, len(keys), BATCH_KEYS)]
    rows, began, spans = 0, time.perf_counter(), []
    for batch in cycle(batches):
        start = time.perf_counter()
        if start - began > seconds:
            break
        rows += len(client.get_many(batch))
        spans.append(time.perf_counter() - start)
    return _measure(rows, time.perf_counter() - began, spans)


async def _get_many_side_by_side(
    connect_async: ConnectAsync, keys: list[bytes], seconds: float
) -> Measure:
    batches = cycle([keys[a : a + BATCH_KEYS] for a in range(0, len(keys), BATCH_KEYS)])
    rows, spans = 0, []

    async def work(client: AsyncClient, until: float) -> None:
        nonlocal rows
        for batch in batches:
            start = time.perf_counter()
            if start > until:
                return
            found = await client.get_many(batch)
            rows += len(found)
            spans.append(time.perf_counter() - start)

    async with await connect_async() as client:
        await client.get_many(keys[:100])  # warm-up: the connections are open from here on
        began = time.perf_counter()
        await asyncio.gather(*[work(client, began + seconds) for _ in range(READERS)])
        return _measure(rows, time.perf_counter() - began, spans)


async def _tasks(
    connect_async: ConnectAsync,
    keys: list[bytes],
    seconds: float,
    single: Callable[[AsyncClient, bytes], Awaitable[object]],
) -> Measure:
    spans: list[float] = []

    async def work(client: AsyncClient, mine: list[bytes], until: float) -> None:
        for key in cycle(mine):
            start = time.perf_counter()
            if start > until:
                return
            await single(client, key)
            spans.append(time.perf_counter() - start)

    async with await connect_async() as client:
        await client.get_many(keys[:100])  # warm-up: the connections are open from here on
        began = time.perf_counter()
        await asyncio.gather(
            *[work(client, keys[task::TASKS], began + seconds) for task in range(TASKS)]
        )
        return _measure(len(spans), time.perf_counter() - began, spans)


def _threads(client: Client, keys: list[bytes], seconds: float, threads: int) -> Measure:
    spans: list[float] = []
    failures: list[Exception] = []
    until = time.perf_counter() + seconds

    def work(mine: list[bytes]) -> None:
        for key in cycle(mine):
            start = time.perf_counter()
            if start > until or failures:
                return
            try:
                client.get(key)
            except Exception as error:
                failures.append(error)
                return
            spans.append(time.perf_counter() - start)

    workers = [threading.Thread(target=work, args=(keys[n::threads],)) for n in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return _measure(len(spans), time.perf_counter() - began, spans)


def _put_one_by_one(client: Client, keys: list[bytes], value: bytes, seconds: float) -> Measure:
    spans: list[float] = []
    began = time.perf_counter()
    for key in cycle(keys):
        start = time.perf_counter()
        if start - began > seconds:
            break
        client.put(key, value)
        spans.append(time.perf_counter() - start)
    return _measure(len(spans), time.perf_counter() - began, spans)


def _scan(client: Client, seconds: float) -> Measure:
    rows, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        rows += sum(1 for _ in client.scan(prefix=b"bench:"))
    return Measure(rows_per_s=rows / took)


def _measure(rows: int, took_s: float, spans_s: list[float]) -> Measure:
    if len(spans_s) < 2:
        return Measure(rows_per_s=rows / took_s)
    cuts = statistics.quantiles(spans_s, n=100)
    return Measure(rows_per_s=rows / took_s, p50_ms=cuts[49] * 1e3, p99_ms=cuts[98] * 1e3)
