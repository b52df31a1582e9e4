"""The cost of a cluster without clients: three coordinators and three nodes at rest.

    python -m bench.coordinators.rest_bench [--partitions 1024] [--seconds 30] [--threads]
        [--keep] [--json]

For each process (a node's writer process is one of its own): CPU as a share of one core, how often
its threads woke up a second, and its resident memory. CPU time means something beside other work
too, but each wake-up costs more where the caches are cold. ``--threads`` shows each thread;
``--keep`` leaves the cluster running until a line comes on stdin, for a profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from koinon.local import LocalCluster

QUIET_S = 10.0
READY_TIMEOUT_S = 120.0
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Spent:
    """The use of one thread since it began."""

    cpu_ns: int
    wakeups: int


Key = tuple[str, int, str]
"""A process's name, the thread's id and its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The cost of one process or thread: percent of one core, wake-ups a second, resident MB."""

    cpu_percent: float
    wakeups: float
    resident_mb: float


def main() -> int:
    """Start a cluster, let it come to rest, watch it, print what it used."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.coordinators.rest_bench", description=__doc__
    )
    parser.add_argument("--partitions", type=int, default=1_024)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--threads", action="store_true", help="show each thread")
    parser.add_argument("--keep", action="store_true", help="run on until a line comes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    flags = ("--partitions", str(options.partitions))
    with closing(LocalCluster(nodes=3, coordinators=3, coordinator_flags=flags)) as cluster:
        cluster.start()
        cluster.wait_ready(READY_TIMEOUT_S)
        time.sleep(QUIET_S)
        pids = dict(_processes(cluster))
        costs = watch(pids, options.seconds, by_thread=options.threads)
        if options.json:
            found = {name: [c.cpu_percent, c.wakeups, c.resident_mb] for name, c in costs.items()}
            print(json.dumps({"partitions": options.partitions, "processes": found}))
        else:
            show(costs, options.partitions)
        if options.keep:
            print(pids, "leader:", cluster.leader(), flush=True)
            sys.stdin.readline()
    return 0


def watch(pids: dict[str, int], seconds: float, *, by_thread: bool) -> dict[str, Cost]:
    """Return what each process used meanwhile, or each thread, and all together."""
    before, began_at = _spent(pids), time.monotonic()
    time.sleep(seconds)
    after, took_s = _spent(pids), time.monotonic() - began_at
    memory = {name: _resident_mb(pid) for name, pid in pids.items()}
    used: dict[str, Spent] = {}
    for key, now in after.items():
        then = before.get(key, Spent(0, 0))
        name = f"{key[0]} {key[2]} {key[1]}" if by_thread else key[0]
        so_far = used.get(name, Spent(0, 0))
        used[name] = Spent(
            so_far.cpu_ns + now.cpu_ns - then.cpu_ns, so_far.wakeups + now.wakeups - then.wakeups
        )
    costs = {
        name: Cost(
            cpu_percent=100 * spent.cpu_ns / _NS / took_s,
            wakeups=spent.wakeups / took_s,
            resident_mb=memory.get(name, 0.0),
        )
        for name, spent in used.items()
    }
    costs["all"] = Cost(
        cpu_percent=sum(cost.cpu_percent for cost in costs.values()),
        wakeups=sum(cost.wakeups for cost in costs.values()),
        resident_mb=sum(memory.values()),
    )
    return costs


def show(costs: dict[str, Cost], partitions: int) -> None:
    """Print a line for each."""
    load = os.getloadavg()[0]
    print(f"{partitions} partitions at rest, load average {load:.1f}")
    for name, cost in costs.items():
        memory = f"{cost.resident_mb:8.1f} MB" if cost.resident_mb else ""
        print(
            f"{name:28} {cost.cpu_percent:6.2f} % of a core {cost.wakeups:7.1f} wake-ups/s {memory}"
        )
    sys.stdout.flush()


def _processes(cluster: LocalCluster) -> Iterator[tuple[str, int]]:
    for name in cluster.names:
        pid = cluster.pid(name)
        assert pid is not None
        yield name, pid
        for number, child in enumerate(_children(pid)):
            yield f"{name} child {number}", child


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return sorted(found)


def _spent(pids: dict[str, int]) -> dict[Key, Spent]:
    found: dict[Key, Spent] = {}
    for name, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                cpu_ns = int((task / "schedstat").read_text().split()[0])
                status = (task / "status").read_text()
            except OSError:
                continue  # the thread has ended
            wakeups = _field(status, "voluntary_ctxt_switches")
            comm = (task / "comm").read_text().strip()
            found[name, int(task.name), comm] = Spent(cpu_ns, wakeups)
    return found


def _resident_mb(pid: int) -> float:
    return _field(Path(f"/proc/{pid}/status").read_text(), "VmRSS") / 1024


def _field(status: str, name: str) -> int:
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
