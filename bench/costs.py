"""Calibration of load: the CPU that a node spends on each kind of work, by row and by kilobyte.

``koinon_node.partition.load`` counts what clients ask in these costs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import koinon
from bench.figures import Figure
from bench.measuring import VALUE, cpu_s
from koinon.local import LocalCluster

KEYS = 20_000
BATCH = 1_000
THREADS = 8
LARGE = 64 * 1024
SETTLE_S = 1.5  # the store takes over what the log holds

Work = Callable[[koinon.Client, random.Random], int]
"""One request; returns its rows."""


def _key(number: int) -> bytes:
    return b"cost/%08d" % number


def _get(client: koinon.Client, rng: random.Random) -> int:
    client.get(_key(rng.randrange(KEYS)))
    return 1


def _put(client: koinon.Client, rng: random.Random) -> int:
    client.put(_key(rng.randrange(KEYS)), VALUE)
    return 1


def _get_many(client: koinon.Client, rng: random.Random) -> int:
    return len(client.get_many([_key(rng.randrange(KEYS)) for _ in range(BATCH)]))


def _put_many(client: koinon.Client, rng: random.Random) -> int:
    rows = {_key(rng.randrange(KEYS)): VALUE for _ in range(BATCH)}
    client.put_many(rows).raise_for_errors()
    return len(rows)


def _scan(client: koinon.Client, _rng: random.Random) -> int:
    return sum(1 for _ in client.scan(prefix=b"cost/"))


def _get_large(client: koinon.Client, rng: random.Random) -> int:
    client.get(b"large/%d" % rng.randrange(16))
    return 1


def _put_large(client: koinon.Client, rng: random.Random) -> int:
    client.put(b"large/%d" % rng.randrange(16), rng.randbytes(1024) * 64)
    return 1


WORK: dict[str, Work] = {
    "get": _get,
    "get of a batch": _get_many,
    "row of a scan": _scan,
    "put": _put,
    "put of a batch": _put_many,
    "get of 64 KiB": _get_large,
    "put of 64 KiB": _put_large,
}


def measure(*, seconds: float = 4.0) -> Iterator[Figure]:
    """Measure the CPU of a lone node, of a primary and of its follower, by kind of work.

    Eight threads send lone requests, two send batches. ``seconds``: of each kind.
    """
    for nodes in (1, 2):
        with LocalCluster(nodes=nodes, coordinators=1) as cluster, cluster.client() as client:
            client.put_many({_key(n): VALUE for n in range(KEYS)}).raise_for_errors()
            client.put_many({b"large/%d" % n: bytes(LARGE) for n in range(16)})
            pids = [cluster.pid(name) for name in cluster.node_names]
            for name, work in WORK.items():
                if nodes == 2 and not name.startswith("put"):
                    continue
                spent, rows, idle = _spent(client, work, [p for p in pids if p], seconds)
                column = "alone" if nodes == 1 else "both of two"
                yield Figure(name, column, (spent - idle) / max(1, rows) * 1e6, "µs")
                yield Figure(f"{name}, rows", column, rows / seconds, "rows/s")


def _spent(
    client: koinon.Client, work: Work, pids: list[int], seconds: float
) -> tuple[float, int, float]:
    """Return the nodes' CPU seconds, the rows, and the CPU that idle nodes use in that time."""
    time.sleep(SETTLE_S)
    before = cpu_s(pids)
    time.sleep(SETTLE_S)
    idle_per_s = (cpu_s(pids) - before) / SETTLE_S
    before, until = cpu_s(pids), time.monotonic() + seconds

    def run(seed: int) -> int:
        rng, rows = random.Random(seed), 0
        while time.monotonic() < until:
            rows += work(client, rng)
        return rows

    threads = 2 if work in (_get_many, _put_many, _scan) else THREADS
    began = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        rows = sum(pool.map(run, range(threads)))
    time.sleep(SETTLE_S)
    return cpu_s(pids) - before, rows, idle_per_s * (time.monotonic() - began)
