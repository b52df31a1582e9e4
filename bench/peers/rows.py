"""The rows of the table: what each does to a system, through its face, for so many seconds.

``ROWS`` has them by name, in the order of the table. Keys are drawn evenly from ``KEYS`` records of
100 bytes, but for YCSB's workloads, which draw by its zipfian distribution (constant 0.99,
scrambled). Those are A (half updates), B (5 % updates), C (reads), D (5 % inserts, reads of the
newest), E (5 % inserts, short ranges) and F (half read-modify-writes), by 64 asyncio tasks. A range
of E is one batch of 1 to 20 neighbouring numbers: no order of keys spans the partitions of Koinon,
or the slots of Redis.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

from bench.peers.clients import Face

KEYS = 20_000
VALUE = b"v" * 100
LARGE_KEYS = 64
LARGE = b"L" * 100_000
BATCH = 1_000
CONCURRENCY = (1, 4, 16, 64, 256)
"""Asyncio tasks; 64 and 256 are in the table, all in the plot."""
TASKS = 64
THREADS = 16
RANGE_MAX = 20
ZIPF = 0.99
DRAWS = 1 << 16


@dataclass
class Outcome:
    """The figures of one run of a row."""

    rows: int = 0  # records read or written
    seconds: float = 0.0
    latencies: array[float] = field(default_factory=lambda: array("d"))  # of calls, in seconds


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


# --- blocking ------------------------------------------------------------------------------------


def _timed(call: Callable[[], int], until: float, outcome: Outcome) -> None:
    """Call until the time has come; ``call`` returns the rows that it was about."""
    clock = time.perf_counter
    while (began := clock()) < until:
        outcome.rows += call()
        outcome.latencies.append(clock() - began)


def _sequential(call_of: Callable[[Face, random.Random], Callable[[], int]]) -> Row:
    def run(face: Face, seconds: float) -> Outcome:
        outcome, began = Outcome(), time.perf_counter()
        _timed(call_of(face, random.Random(1)), began + seconds, outcome)
        outcome.seconds = time.perf_counter() - began
        return outcome

    return run


def _threads(call_of: Callable[[Face, random.Random], Callable[[], int]]) -> Row:
    def run(face: Face, seconds: float) -> Outcome:
        parts = [Outcome() for _ in range(THREADS)]
        began = time.perf_counter()
        threads = [
            threading.Thread(
                target=_timed, args=(call_of(face, random.Random(n)), began + seconds, part)
            )
            for n, part in enumerate(parts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return _joined(parts, began)

    return run


def _joined(parts: list[Outcome], began: float) -> Outcome:
    whole = Outcome(rows=sum(part.rows for part in parts), seconds=time.perf_counter() - began)
    for part in parts:
        whole.latencies.extend(part.latencies)
    return whole


def _get(face: Face, choice: random.Random) -> Callable[[], int]:
    keys, get = _drawn(choice), face.get

    def call() -> int:
        assert get(next(keys)) is not None
        return 1

    return call


def _put(face: Face, choice: random.Random) -> Callable[[], int]:
    keys, put = _drawn(choice), face.put

    def call() -> int:
        put(next(keys), VALUE)
        return 1

    return call


def _get_large(face: Face, choice: random.Random) -> Callable[[], int]:
    def call() -> int:
        value = face.get(large_key_of(choice.randrange(LARGE_KEYS)))
        assert value is not None
        assert len(value) == len(LARGE)
        return 1

    return call


def _put_large(face: Face, choice: random.Random) -> Callable[[], int]:
    def call() -> int:
        face.put(large_key_of(choice.randrange(LARGE_KEYS)), LARGE)
        return 1

    return call


def _get_batch(face: Face, choice: random.Random) -> Callable[[], int]:
    def call() -> int:
        values = face.get_many(_batch(choice))
        assert None not in values
        return len(values)

    return call


def _put_batch(face: Face, choice: random.Random) -> Callable[[], int]:
    def call() -> int:
        face.put_many([(key, VALUE) for key in _batch(choice)])
        return BATCH

    return call


def _scan(face: Face, seconds: float) -> Outcome:
    """Pages of 1,000, again from the beginning when all is read."""
    outcome, began = Outcome(), time.perf_counter()
    until = began + seconds
    while time.perf_counter() < until:
        for _ in face.scan():
            outcome.rows += 1
            if not outcome.rows % BATCH and time.perf_counter() > until:
                break
    outcome.seconds = time.perf_counter() - began
    return outcome


def _drawn(choice: random.Random) -> Iterator[bytes]:
    """Keys drawn evenly, made beforehand: drawing one costs as much as a quarter of a call."""
    return itertools.cycle([key_of(choice.randrange(KEYS)) for _ in range(1 << 14)])


def _batch(choice: random.Random) -> list[bytes]:
    return [key_of(n) for n in choice.sample(range(KEYS), BATCH)]


# --- asyncio -------------------------------------------------------------------------------------

Work = Callable[[], Awaitable[int]]

_RUNNER = asyncio.Runner()
"""One loop for all rows: gRPC's poller is the process's, and calls back into loops it has seen."""


def _tasks(count: int, work_of: Callable[[Face, random.Random], Work]) -> Row:
    """Return the row of ``count`` tasks of one client, each with one call under way."""

    async def repeat(work: Work, until: float, outcome: Outcome) -> None:
        clock = time.perf_counter
        while (began := clock()) < until:
            outcome.rows += await work()
            outcome.latencies.append(clock() - began)

    async def all_of_them(face: Face, seconds: float) -> Outcome:
        await face.aopen()
        try:
            parts = [Outcome() for _ in range(count)]
            works = [work_of(face, random.Random(n)) for n in range(count)]
            began = time.perf_counter()
            await asyncio.gather(
                *(
                    repeat(work, began + seconds, part)
                    for work, part in zip(works, parts, strict=True)
                )
            )
            return _joined(parts, began)
        finally:
            await face.aclose()

    def run(face: Face, seconds: float) -> Outcome:
        return _RUNNER.run(all_of_them(face, seconds))

    return run


def _aget(face: Face, choice: random.Random) -> Work:
    keys = _drawn(choice)

    async def work() -> int:
        assert await face.aget(next(keys)) is not None
        return 1

    return work


def _aput(face: Face, choice: random.Random) -> Work:
    keys = _drawn(choice)

    async def work() -> int:
        await face.aput(next(keys), VALUE)
        return 1

    return work


def _aget_batch(face: Face, choice: random.Random) -> Work:
    async def work() -> int:
        return len(await face.aget_many(_batch(choice)))

    return work


def _aput_batch(face: Face, choice: random.Random) -> Work:
    async def work() -> int:
        await face.aput_many([(key, VALUE) for key in _batch(choice)])
        return BATCH

    return work


# --- YCSB ----------------------------------------------------------------------------------------


@cache
def _zipfian() -> list[int]:
    """Return draws from all records by the zipfian distribution, the most wanted ones anywhere."""
    weights = list(itertools.accumulate((n + 1) ** -ZIPF for n in range(KEYS)))
    drawn = random.Random(5).choices(range(KEYS), cum_weights=weights, k=DRAWS)
    places = list(range(KEYS))
    random.Random(6).shuffle(places)
    return [places[rank] for rank in drawn]


@cache
def _ranks() -> list[int]:
    """Return draws of how far from the newest record, by the same distribution."""
    weights = list(itertools.accumulate((n + 1) ** -ZIPF for n in range(KEYS)))
    return random.Random(7).choices(range(KEYS), cum_weights=weights, k=DRAWS)


def _from(draws: list[int], first: int) -> Iterator[int]:
    """Yield the draws in a circle, from one of them on."""
    return (draws[at % len(draws)] for at in itertools.count(first))


def _ycsb(workload: str) -> Row:
    writes = {"a": 0.5, "b": 0.05, "c": 0.0, "d": 0.05, "e": 0.05, "f": 0.5}[workload]

    def run(face: Face, seconds: float) -> Outcome:
        draws = _ranks() if workload == "d" else _zipfian()
        newest = itertools.count(KEYS)
        inserted = [KEYS - 1]  # the newest that was acknowledged

        def work_of(face: Face, choice: random.Random) -> Work:
            mine = _from(draws, choice.randrange(DRAWS))

            async def insert() -> int:
                number = next(newest)
                await face.aput(key_of(number), VALUE)
                inserted[0] = max(inserted[0], number)
                return 1

            async def read() -> int:
                number = next(mine)
                if workload == "d":
                    number = max(0, inserted[0] - number)
                if workload == "e":
                    numbers = range(number, number + choice.randint(1, RANGE_MAX))
                    await face.aget_many([key_of(n) for n in numbers])
                else:
                    await face.aget(key_of(number))
                return 1

            async def write() -> int:
                if workload in "de":
                    return await insert()
                key = key_of(next(mine))
                if workload == "f":
                    await face.aget(key)
                await face.aput(key, VALUE)
                return 1

            async def work() -> int:
                return await (write() if choice.random() < writes else read())

            return work

        return _tasks(TASKS, work_of)(face, seconds)

    return run


ROWS: dict[str, Row] = {
    "get": _sequential(_get),
    "put": _sequential(_put),
    "threads16-get": _threads(_get),
    "threads16-put": _threads(_put),
    **{f"tasks{n}-get": _tasks(n, _aget) for n in CONCURRENCY},
    **{f"tasks{n}-put": _tasks(n, _aput) for n in CONCURRENCY},
    "batch-get": _sequential(_get_batch),
    "batch-put": _sequential(_put_batch),
    "batch4-get": _tasks(4, _aget_batch),
    "batch4-put": _tasks(4, _aput_batch),
    "scan": _scan,
    "large-get": _sequential(_get_large),
    "large-put": _sequential(_put_large),
    **{f"ycsb-{workload}": _ycsb(workload) for workload in "abcdef"},
}
PLOTTED = tuple(f"tasks{n}-{what}" for what in ("get", "put") for n in CONCURRENCY)
DEFAULT = tuple(name for name in ROWS if not name.startswith(("tasks1-", "tasks4-", "tasks16-")))
