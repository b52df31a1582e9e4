"""Shows whether the cluster keeps its leader and its nodes when CPU is short.

    python -m bench.failures.starved_bench [--seconds 60] [--busy 8] [--stall-ms 0]

Three coordinators and the nodes share the machine with busy loops, which never wait. Linux may
share CPU out by session, so each loop and each server has one of its own, like a container. Some
schedulers prefer processes that wake up; then busy loops starve no process. So with ``--stall-ms``
each process may also run only now and then. Nothing really fails in all that time: every change of
leader, every fence and every lost lease is a mistake. Probes write and read a few keys meanwhile,
to show what clients notice. Exit code 1 means that a node was fenced, or that leaders changed more
often than once a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from koinon import aio
from koinon.local import LocalCluster
from koinon_proto.contract.errors import KoinonError

from .failover_bench import wait_in_sync

PROBES = 8
PROBE_PAUSE_S = 0.05
PROBE_TIMEOUT_MS = 60_000
RUNS_S = (0.02, 0.2)  # how long a stalled process runs between two stalls
LOOP = "import sys; sys.stdin.readline()\nwhile True: pass"  # begins when it gets a line
EVENTS = {  # the event of a log line, by the phrase that the line begins with
    "leaders": re.compile(r"leader serves "),
    "campaigns": re.compile(r"role changed .*role=candidate"),
    "fences": re.compile(r"node fenced "),
    "leases_lost": re.compile(r"lease lost"),
    "stepped_down": re.compile(r"leadership ended "),
}


@dataclass(kw_only=True)
class Report:
    """The events and client operations while the busy loops ran; times in seconds."""

    seconds: float = 0.0
    load_average: float = 0.0
    events: dict[str, int] = field(default_factory=dict)
    terms: int = 0  # by how much the term rose
    operations: int = 0
    failed: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    worst_s: float = 0.0

    @property
    def is_steady(self) -> bool:
        """Return whether the cluster was steady although slow: no fence, few changes of leader."""
        minutes = max(1.0, self.seconds / 60)
        return not self.events["fences"] and self.events["leaders"] <= minutes


@contextmanager
def busy_loops(count: int) -> Iterator[Callable[[], None]]:
    """Run ``count`` processes. They become busy once the yielded function is called."""
    command = [sys.executable, "-c", LOOP]
    loops = [
        subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(count)
    ]

    def begin() -> None:
        for loop in loops:
            assert loop.stdin is not None
            loop.stdin.write("go\n")
            loop.stdin.flush()

    try:
        yield begin
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


async def stall(cluster: LocalCluster, name: str, longest_s: float) -> None:
    """Let the process run only now and then, until cancelled, like a process without CPU."""
    if not longest_s:
        return
    try:
        while True:
            await asyncio.sleep(random.uniform(*RUNS_S))
            cluster.pause(name)
            await asyncio.sleep(random.uniform(0.0, longest_s))
            cluster.resume(name)
    finally:
        cluster.resume(name)


def count_events(cluster: LocalCluster, begin: dict[str, int]) -> dict[str, int]:
    """Count the events in the members' logs from these positions on."""
    found: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
    for name in cluster.names:
        with cluster.log_path(name).open("rb") as log:
            log.seek(begin[name])
            for line in log.read().decode(errors="replace").splitlines():
                found.update(event for event, told in EVENTS.items() if told.search(line))
    return dict(found)


async def probe(client: aio.AsyncClient, key: bytes, until: float, seconds: list[float]) -> int:
    """Write and read the key until then; note how long each took; count the failures."""
    failed = number = 0
    while time.monotonic() < until:
        began_at = time.monotonic()
        number += 1
        try:
            if number % 2:
                await client.put(key, b"%d" % number, timeout_ms=PROBE_TIMEOUT_MS)
            else:
                await client.get(key, timeout_ms=PROBE_TIMEOUT_MS)
        except KoinonError:
            failed += 1
        seconds.append(time.monotonic() - began_at)
        await asyncio.sleep(PROBE_PAUSE_S)
    return failed


async def all_probes(
    cluster: LocalCluster, starve: Callable[[], None], stall_s: float, report: Report
) -> None:
    """Probe once the loops have begun."""
    seconds: list[float] = []
    keys = [b"starved/%d" % n for n in range(PROBES)]
    async with await aio.connect(cluster.coordinators) as client:
        await asyncio.gather(*(client.put(key, b"") for key in keys))
        begin = {name: cluster.log_path(name).stat().st_size for name in cluster.names}
        starve()
        stalls = [asyncio.create_task(stall(cluster, name, stall_s)) for name in cluster.names]
        until = time.monotonic() + report.seconds
        report.failed = sum(
            await asyncio.gather(*(probe(client, key, until, seconds) for key in keys))
        )
        for task in stalls:
            task.cancel()
        await asyncio.gather(*stalls, return_exceptions=True)
        report.load_average = os.getloadavg()[0]
        report.events = count_events(cluster, begin)
    seconds.sort()
    report.operations = len(seconds)
    report.p50_s = statistics.median(seconds)
    report.p99_s = seconds[int(0.99 * len(seconds))]
    report.worst_s = seconds[-1]


def measure(nodes: int, busy: int, stall_s: float, seconds: float, data: str | None) -> Report:
    """Return what happened to a fresh cluster."""
    report = Report(seconds=seconds)
    with busy_loops(busy) as starve, LocalCluster(data, nodes=nodes, coordinators=3) as cluster:
        wait_in_sync(cluster)
        term = cluster.status().term
        asyncio.run(all_probes(cluster, starve, stall_s, report))
        report.terms = cluster.status().term - term
    return report


def main() -> int:
    """Print the figures; 1 if the cluster was not steady."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--busy", type=int, default=8)
    parser.add_argument("--stall-ms", type=float, default=0.0, help="longest pause of a process")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--data", help="a directory for the cluster, kept with its logs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    stall_s = options.stall_ms / 1000
    report = measure(options.nodes, options.busy, stall_s, options.seconds, options.data)
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        told = ", ".join(f"{count} {name}" for name, count in report.events.items())
        print(
            f"{report.seconds:.0f} s beside {options.busy} busy loops, stalls to {stall_s:g} s "
            f"(load {report.load_average:.0f}): {told}; terms +{report.terms}\n"
            f"{report.operations:,} operations, {report.failed} failed; "
            f"p50 {report.p50_s:.3f} s, p99 {report.p99_s:.3f} s, worst {report.worst_s:.2f} s"
        )
    return 0 if report.is_steady else 1


if __name__ == "__main__":
    sys.exit(main())
