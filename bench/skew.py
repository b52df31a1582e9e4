"""Benchmark of a rebalance by load: three nodes with a part of a core each, skewed traffic."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.figures import Aim, Figure
from bench.measuring import family, latencies
from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon.operate.judge.hotspots import READS, WRITES
from koinon.operate.plans import PlanBy, PlanKind, PlanRequest
from koinon.operate.traffic import TrafficClient
from koinon_proto.contract.table import Table
from koinon_proto.partitioner import partitioner

PARTITIONS, COPIES = 96, 2
EXPONENT = 1.1
VALUE = b"v" * 100
BY_LOAD = PlanRequest(kind=PlanKind.REBALANCE, by=PlanBy.LOAD, target_percent=110)
CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000
BEFORE, AFTER = "before", "after"
AIMS = (
    Aim("busiest node over the mean", AFTER, 1.2, at_most=True),
    Aim("get or put p99", AFTER, 0.5, ("get or put p99", BEFORE), at_most=True),
)


def measure(
    *, seconds: float = 15.0, warm_s: float = 40.0, core: float = 0.2, per_second: int = 400
) -> Iterator[Figure]:
    """Measure skew and latency under Zipf 1.1, before and after a rebalance by load.

    The hottest partitions are led by one node at first. ``core``: the part of a core of each node,
    by a control group (needs root and cgroup v1; else there is no limit). ``per_second``: the
    operations of all clients, which do not wait for one another. ``warm_s``: before the plan.
    """
    flags = ("--partitions", str(PARTITIONS), "--replication-factor", str(COPIES))
    setup = Setup(coordinator_flags=flags)
    with LocalCluster(nodes=3, coordinators=1, setup=setup) as cluster, _limited(cluster, core):
        table = cluster.status().table
        assert table is not None
        traffic = _Traffic(cluster, _ranked(table), per_second)
        with traffic, Admin(cluster.coordinators, timeout_ms=30_000) as admin:
            time.sleep(warm_s)
            yield from traffic.figures(BEFORE, seconds)
            plan = admin.plan(BY_LOAD)
            yield Figure("moves", "of leaders", sum(not m.added for m in plan.moves))
            yield Figure("moves", "with copies", sum(bool(m.added) for m in plan.moves))
            admin.execute(BY_LOAD, plan.plan_id)
            while admin.moves().moves:
                time.sleep(0.5)
            time.sleep(2.0)
            yield from traffic.figures(AFTER, seconds)


def _ranked(table: Table) -> list[bytes]:
    """Return a key of each partition, the hottest first: those that the first node leads."""
    known = partitioner(table.cluster.partitioner, table.cluster.partition_count)
    keys: dict[int, bytes] = {}
    number = 0
    while len(keys) < PARTITIONS:
        key = b"skew/%d" % number
        keys.setdefault(int(known.partitions_of([key])[0]), key)
        number += 1
    first = min(table.nodes)
    order = sorted(keys, key=lambda p: (table.rows[p].primary != first, p))
    return [keys[p] for p in order]


@contextmanager
def _limited(cluster: LocalCluster, core: float) -> Iterator[None]:
    """Limit each node to a part of a core, where that can be done."""
    groups = []
    for name in cluster.node_names:
        group, pid = CGROUPS / f"koinon-bench-{name}", cluster.pid(name)
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(core * PERIOD_US)))
            for process in family(pid or 0):
                (group / "cgroup.procs").write_text(str(process))
            groups.append(group)
    try:
        yield
    finally:
        for group in groups:
            for member in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (CGROUPS / "cgroup.procs").write_text(member)
            with contextlib.suppress(OSError):
                group.rmdir()


class _Traffic:
    """Clients that each send at a steady rate, whatever the answers take, and note latencies from
    when each operation was due.
    """

    CLIENTS = 8

    def __init__(self, cluster: LocalCluster, keys: list[bytes], per_second: int) -> None:
        self._cluster, self._keys, self._per_second = cluster, keys, per_second
        weights = 1 / np.arange(1, len(keys) + 1) ** EXPONENT
        self._weights = (weights / weights.sum()).tolist()
        self._took_ms: list[float] = []
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(seed,)) for seed in range(self.CLIENTS)
        ]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _send(self, seed: int) -> None:
        rng, pause_s = random.Random(seed), self.CLIENTS / self._per_second
        with self._cluster.client(timeout_ms=10_000) as client:
            due = time.perf_counter()
            while not self._ended.is_set():
                due = max(due + pause_s, time.perf_counter() - 1.0)
                time.sleep(max(0.0, due - time.perf_counter()))
                key = rng.choices(self._keys, self._weights)[0]
                if rng.random() < 0.2:
                    client.put(key, VALUE)
                else:
                    client.get(key)
                self._took_ms.append((time.perf_counter() - due) * 1e3)

    def figures(self, column: str, seconds: float) -> Iterator[Figure]:
        """Measure for so long."""
        with TrafficClient() as asking:
            rows, self._took_ms = self._rows(asking), []
            time.sleep(seconds)
            took_ms, rows = list(self._took_ms), self._rows(asking) - rows
        yield Figure("busiest node over the mean", column, float(rows.max() / rows.mean()))
        yield from latencies("get or put", column, took_ms)
        yield Figure("operations", column, len(took_ms) / seconds, "/s")

    def _rows(self, asking: TrafficClient) -> np.ndarray:
        table = self._cluster.status().table
        assert table is not None
        found = asking.counters(table, timeout_s=30.0).nodes
        return np.array([n.counts[[READS, WRITES]].sum() for _, n in sorted(found.items())])
