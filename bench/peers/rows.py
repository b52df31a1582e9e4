"""The compared work: the calls of each row, made for some seconds.

A row is a stream of calls (a method of ``clients.Face``, its arguments, the number of its records),
made one after the other, by threads, or by asyncio tasks. Keys are drawn evenly from ``KEYS``
records of 100 bytes. YCSB's workloads draw by its zipfian distribution (constant 0.99, scrambled):
A (half updates), B (5 % updates), C (reads), D (5 % inserts, reads of the newest), E (5 % inserts,
short ranges) and F (half read-modify-writes). A range of E is one batch of 1 to 20 neighbouring
numbers, since no order of keys spans the partitions of Koinon or the slots of Redis.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from bench.measuring import VALUE
from bench.peers.clients import Face

KEYS = 20_000
LARGE_KEYS = 64
LARGE = b"L" * 100_000
BATCH = 1_000
# numbers of asyncio tasks; the table has 64 and 256, the plot all
CONCURRENCY = (1, 4, 16, 64, 256)
TASKS = 64
THREADS = 16
RANGE_MAX = 20
ZIPF = 0.99
DRAWS = 1 << 16
YCSB_WRITES = {"a": 0.5, "b": 0.05, "c": 0.0, "d": 0.05, "e": 0.05, "f": 0.5}

Calls = Iterator[tuple[str, tuple[Any, ...], int]]
"""A method's name, its arguments, and the number of records that count. A stream is resumed only
once its last call was acknowledged.
"""


@dataclass
class Outcome:
    """Records of one run, its seconds, and the seconds of each call."""

    rows: int = 0
    seconds: float = 0.0
    latencies: array[float] = field(default_factory=lambda: array("d"))


Row = Callable[[Face, float], Outcome]


def key_of(number: int) -> bytes:
    return b"user%012d" % number


def large_key_of(number: int) -> bytes:
    return b"large%06d" % number


def fill(face: Face) -> None:
    """Write the records that the rows read."""
    for first in range(0, KEYS, BATCH):
        face.put_many([(key_of(n), VALUE) for n in range(first, first + BATCH)])
    for number in range(LARGE_KEYS):
        face.put(large_key_of(number), LARGE)


# --- streams of calls ----------------------------------------------------------------------------


def _single(method: str, choice: random.Random) -> Calls:
    # Keys are drawn beforehand: drawing one costs as much as a quarter of a call.
    more = (VALUE,) if method == "put" else ()
    calls = [(method, (key_of(choice.randrange(KEYS)), *more), 1) for _ in range(1 << 14)]
    return itertools.cycle(calls)


def _large(method: str, choice: random.Random) -> Calls:
    more = (LARGE,) if method == "put" else ()
    while True:
        yield method, (large_key_of(choice.randrange(LARGE_KEYS)), *more), 1


def _batch(method: str, choice: random.Random) -> Calls:
    while True:
        keys = [key_of(n) for n in choice.sample(range(KEYS), BATCH)]
        yield method, ([(k, VALUE) for k in keys] if method == "put_many" else keys,), BATCH


@cache
def _draws(seed: int) -> list[int]:
    """Return ranks drawn by the zipfian distribution."""
    weights = list(itertools.accumulate((n + 1) ** -ZIPF for n in range(KEYS)))
    return random.Random(seed).choices(range(KEYS), cum_weights=weights, k=DRAWS)


@cache
def _places() -> list[int]:
    places = list(range(KEYS))
    random.Random(6).shuffle(places)
    return places


class _Ycsb:
    """One run of a workload; its streams share the newest inserted record."""

    def __init__(self, workload: str) -> None:
        self._workload = workload
        self._next = itertools.count(KEYS)
        self._newest = KEYS - 1

    def calls(self, choice: random.Random) -> Calls:
        inserts, draws = self._workload in "de", _draws(7 if self._workload == "d" else 5)
        first, places = choice.randrange(DRAWS), _places()
        for at in itertools.count(first):
            drawn = draws[at % DRAWS]
            number = max(0, self._newest - drawn) if self._workload == "d" else places[drawn]
            if choice.random() >= YCSB_WRITES[self._workload]:
                if self._workload == "e":
                    numbers = range(number, number + choice.randint(1, RANGE_MAX))
                    yield "get_many", ([key_of(n) for n in numbers],), 1
                else:
                    yield "get", (key_of(number),), 1
            elif inserts:
                inserted = next(self._next)
                yield "put", (key_of(inserted), VALUE), 1
                self._newest = max(self._newest, inserted)
            else:
                if self._workload == "f":
                    yield "get", (key_of(number),), 0
                yield "put", (key_of(number), VALUE), 1


# --- callers -------------------------------------------------------------------------------------


def _check(method: str, found: Any) -> None:
    missed = found is None if method == "get" else method == "get_many" and None in found[:1]
    if missed:
        raise RuntimeError("a record that was written is not there")


def _repeat(face: Face, calls: Calls, until: float, outcome: Outcome) -> None:
    clock = time.perf_counter
    for method, arguments, rows in calls:
        if (began := clock()) >= until:
            return
        _check(method, getattr(face, method)(*arguments))
        outcome.latencies.append(clock() - began)
        outcome.rows += rows


async def _repeat_async(face: Face, calls: Calls, until: float, outcome: Outcome) -> None:
    clock = time.perf_counter
    for method, arguments, rows in calls:
        if (began := clock()) >= until:
            return
        _check(method, await getattr(face, f"a{method}")(*arguments))
        outcome.latencies.append(clock() - began)
        outcome.rows += rows


Stream = Callable[[random.Random], Calls]


def _threads(count: int, stream: Stream) -> Row:
    """Return the row of ``count`` threads of one client; for one, of the calling thread alone."""

    def run(face: Face, seconds: float) -> Outcome:
        parts = [Outcome() for _ in range(count)]
        streams = [stream(random.Random(n)) for n in range(count)]
        began = time.perf_counter()
        works = [
            partial(_repeat, face, calls, began + seconds, part)
            for calls, part in zip(streams, parts, strict=True)
        ]
        threads = [threading.Thread(target=work) for work in works[1:]]
        for thread in threads:
            thread.start()
        works[0]()
        for thread in threads:
            thread.join()
        return _joined(parts, began)

    return run


def _joined(parts: list[Outcome], began: float) -> Outcome:
    whole = Outcome(rows=sum(part.rows for part in parts), seconds=time.perf_counter() - began)
    for part in parts:
        whole.latencies.extend(part.latencies)
    return whole


_RUNNER = asyncio.Runner()
"""The event loop of all rows: gRPC's poller belongs to the process, and calls back into earlier
loops.
"""


def _tasks(count: int, stream_of: Callable[[], Stream]) -> Row:
    """Return the row of ``count`` tasks of one client, each with one call in flight."""

    async def all_of_them(face: Face, seconds: float) -> Outcome:
        await face.aopen()
        try:
            parts, stream = [Outcome() for _ in range(count)], stream_of()
            streams = [stream(random.Random(n)) for n in range(count)]
            began = time.perf_counter()
            pairs = zip(streams, parts, strict=True)
            await asyncio.gather(*(_repeat_async(face, c, began + seconds, p) for c, p in pairs))
            return _joined(parts, began)
        finally:
            await face.aclose()

    return lambda face, seconds: _RUNNER.run(all_of_them(face, seconds))


def _scan(face: Face, seconds: float) -> Outcome:
    """Scan pages of 1,000, again from the beginning after the last."""
    outcome, began = Outcome(), time.perf_counter()
    until = began + seconds
    while time.perf_counter() < until:
        for _ in face.scan():
            outcome.rows += 1
            if not outcome.rows % BATCH and time.perf_counter() > until:
                break
    outcome.seconds = time.perf_counter() - began
    return outcome


def _always(stream: Stream) -> Callable[[], Stream]:
    return lambda: stream


def _ycsb(workload: str) -> Row:
    return _tasks(TASKS, lambda: _Ycsb(workload).calls)


def _rows() -> Iterator[tuple[str, Row]]:
    for method in ("get", "put"):
        single, batch = partial(_single, method), partial(_batch, f"{method}_many")
        yield method, _threads(1, single)
        yield f"threads{THREADS}-{method}", _threads(THREADS, single)
        for count in CONCURRENCY:
            yield f"tasks{count}-{method}", _tasks(count, _always(single))
        yield f"batch-{method}", _threads(1, batch)
        yield f"batch4-{method}", _tasks(4, _always(batch))
        yield f"large-{method}", _threads(1, partial(_large, method))
    yield "scan", _scan
    for workload in YCSB_WRITES:
        yield f"ycsb-{workload}", _ycsb(workload)


ROWS: dict[str, Row] = dict(_rows())
DEFAULT = tuple(name for name in ROWS if not name.startswith(("tasks1-", "tasks4-", "tasks16-")))
