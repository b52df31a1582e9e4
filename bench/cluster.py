"""Benchmarks of one client process on a whole cluster, and of a cluster without clients."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from bench.figures import Figure
from bench.measuring import bare_lmdb, cpu_s, family, resident_mb
from koinon.cli import benchmark
from koinon.local import LocalCluster, Setup

READY_S = 120.0
QUIET_S = 10.0


def operations(*, seconds: float = 3.0, nodes: tuple[int, ...] = (1, 3)) -> Iterator[Figure]:
    """Measure one client's operations on clusters of one node and of three, beside bare py-lmdb."""
    for count in nodes:
        column = f"{count} nodes"
        with tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch:
            for name, rate in zip(("put", "get"), bare_lmdb(Path(scratch)), strict=True):
                yield Figure(f"bare py-lmdb {name}", column, rate, "rows/s")
        with LocalCluster(nodes=count, coordinators=1) as cluster:
            report = benchmark.measure(cluster.coordinators, seconds)
        for name, measured in report.measures.items():
            yield Figure(name, column, measured.rows_per_s, "rows/s")
            for share in ("p50", "p99"):
                if (value := getattr(measured, f"{share}_ms")) is not None:
                    yield Figure(f"{name} {share}", column, value, "ms")


def rest(*, partitions: int = 1024, seconds: float = 30.0) -> Iterator[Figure]:
    """Measure CPU, wake-ups and memory of three coordinators and three nodes without clients."""
    flags = ("--partitions", str(partitions))
    with closing(
        LocalCluster(nodes=3, coordinators=3, setup=Setup(coordinator_flags=flags))
    ) as cluster:
        cluster.start()
        cluster.wait_ready(READY_S)
        time.sleep(QUIET_S)
        pids = {name: pid for name in cluster.names if (pid := cluster.pid(name)) is not None}
        before = {name: (cpu_s([pid]), _wakeups(pid)) for name, pid in pids.items()}
        began = time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        totals = {"CPU, percent of a core": 0.0, "wake-ups a second": 0.0, "resident, MB": 0.0}
        for name, pid in pids.items():
            used, woken = before[name]
            values = (
                100 * (cpu_s([pid]) - used) / took,
                (_wakeups(pid) - woken) / took,
                sum(map(resident_mb, family(pid))),
            )
            for row, value in zip(totals, values, strict=True):
                totals[row] += value
                yield Figure(row, name, value)
        for row, value in totals.items():
            yield Figure(row, "all", value)


def _wakeups(pid: int) -> int:
    """Return how often threads of the process and of its children went to sleep."""
    found = 0
    for process in family(pid):
        for task in Path(f"/proc/{process}/task").iterdir():
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    found += int(line.split()[1])
    return found
