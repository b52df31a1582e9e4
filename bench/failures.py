"""Benchmarks of failures as clients notice them: kills, cuts, stops, and too little CPU."""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.figures import Figure
from bench.measuring import percentile
from koinon import aio
from koinon.local import LocalCluster, Setup
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import Table
from koinon_proto.partitioner import partitioner
from tests.checkers.linearizability import check
from tests.checkers.load import FULL_PAUSE_S, RecordedLoad
from tests.checkers.steady import SteadyLoad
from tests.integration.copies import is_settled
from tests.integration.hosts import HostCluster, available
from tests.integration.rolling import restart, restore_primaries, wait_well

PROBE_TIMEOUT_MS = 20_000
PAUSE_S, QUIET_S, WATCHED_S = 0.25, 1.5, 6.0
IN_SYNC_S = 60.0
PROBES = 8
BUSY = "import sys; sys.stdin.readline()\nwhile True: pass"  # begins when it reads a line
LOG_EVENTS = {  # the event of a log line, by the phrase that the line begins with
    "leaders": re.compile(r"leader serves "),
    "campaigns": re.compile(r"role changed .*role=candidate"),
    "fences": re.compile(r"node fenced "),
    "lost leases": re.compile(r"lease lost"),
}


def probe_keys(table: Table) -> dict[int, bytes]:
    """Return one key of every partition."""
    config = table.cluster
    partition_of = partitioner(config.partitioner, config.partition_count).partition_of
    found: dict[int, bytes] = {}
    number = 0
    while len(found) < config.partition_count:
        key = b"probe/%d" % number
        found.setdefault(partition_of(key), key)
        number += 1
    return found


# --- kills ---------------------------------------------------------------------------------------


def kills(*, runs: int = 10) -> Iterator[Figure]:
    """Measure the seconds without writes after kill -9 of one of three nodes, under load.

    From the kill on, one write to every partition is tried until it succeeds. At the end every
    acknowledged write is read back, and the history is checked for linearizability; raises
    AssertionError if either fails.
    """
    with LocalCluster(nodes=3, coordinators=3) as cluster:
        _wait_in_sync(cluster)
        with (
            RecordedLoad(cluster.client, pause_s=FULL_PAUSE_S) as load,
            asyncio.Runner() as runner,
        ):
            client = runner.run(aio.connect(cluster.coordinators))
            for index in range(runs):
                time.sleep(QUIET_S)
                victim = cluster.node_names[index % 3]
                times = runner.run(_kill(cluster, client, victim))
                yield Figure("first write after kill -9", "last partition", max(times), "s")
                middle = statistics.median(times)
                yield Figure("first write after kill -9", "median partition", middle, "s")
                cluster.restart(victim)
                _wait_in_sync(cluster)
            runner.run(client.close())
        with cluster.client() as reader:
            lost = load.lost(reader)
    violations = check(load.history)
    yield Figure("acknowledged writes", "all", len(load.acknowledged))
    assert not lost, f"{len(lost)} acknowledged writes are lost"
    assert not violations, violations[:5]


async def _kill(cluster: LocalCluster, client: aio.AsyncClient, victim: str) -> list[float]:
    table = cluster.status().table
    assert table is not None
    await asyncio.to_thread(cluster.kill, victim)
    killed_at = time.monotonic()

    async def probe(key: bytes) -> float:
        await client.put(key, b"", retry_unknown=True, timeout_ms=PROBE_TIMEOUT_MS)
        return time.monotonic() - killed_at

    return list(await asyncio.gather(*map(probe, probe_keys(table).values())))


def _wait_in_sync(cluster: LocalCluster) -> None:
    cluster.wait_for(is_settled, timeout_s=IN_SYNC_S, what="every copy in sync")


# --- hosts ---------------------------------------------------------------------------------------


def isolated(
    *, runs: int = 3, kinds: tuple[str, ...] = ("cut", "kill", "kill-two", "stop")
) -> Iterator[Figure]:
    """Measure the seconds without writes after a failure, with a network namespace per process.

    Packets to a dead process vanish, so connections to it do not end. One write after the other
    goes to every partition that keeps two copies; its figure is the longest of them.
    """
    if not available():
        raise SystemExit("network namespaces cannot be made here: root and iproute2 are needed")
    with (
        tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch,
        HostCluster(Path(scratch), nodes=4, partitions=1024) as cluster,
        asyncio.Runner() as runner,
    ):
        cluster.wait_for(is_settled, "every copy in sync", IN_SYNC_S)
        for kind in kinds:
            for index in range(runs):
                names = cluster.node_names
                count = 2 if kind == "kill-two" else 1
                victims = [names[(index + n) % len(names)] for n in range(count)]
                longest = runner.run(_fail(cluster, kind, victims))
                yield Figure(f"{kind}, longest write", "worst partition", max(longest), "s")
                middle = statistics.median(longest)
                yield Figure(f"{kind}, longest write", "median partition", middle, "s")
                for victim in victims:
                    cluster.hosts.rejoin(victim)
                    if kind != "cut":
                        cluster.kill(victim)  # processes that were asked to stop ended long ago
                        cluster.start(victim)
                cluster.wait_for(is_settled, "every copy in sync", IN_SYNC_S)


async def _fail(cluster: HostCluster, kind: str, victims: list[str]) -> list[float]:
    """Cause the failure; return the longest duration of a write to each partition."""
    table = cluster.status().table
    assert table is not None
    numbers = {node.number for node in table.nodes.values() if node.node_id in victims}
    ids = [row.partition_id for row in table.rows if len(set(row.replicas) - numbers) >= 2]
    keys, longest = probe_keys(table), defaultdict[int, float](float)
    until = time.monotonic() + QUIET_S + WATCHED_S * len(victims)

    async def probe(partition_id: int) -> None:
        while (began_at := time.monotonic()) < until:
            await client.put(
                keys[partition_id], b"", retry_unknown=True, timeout_ms=PROBE_TIMEOUT_MS
            )
            took = time.monotonic() - began_at
            longest[partition_id] = max(longest[partition_id], took)
            await asyncio.sleep(PAUSE_S)

    async with await aio.connect(cluster.coordinators) as client, asyncio.TaskGroup() as probes:
        for partition_id in ids:
            probes.create_task(probe(partition_id))
        await asyncio.sleep(QUIET_S)
        longest.clear()
        for victim in victims:
            if kind != "stop":
                cluster.hosts.isolate(victim)
            if kind != "cut":
                await asyncio.to_thread(
                    cluster.terminate if kind == "stop" else cluster.kill, victim
                )
    return list(longest.values())


# --- stops ---------------------------------------------------------------------------------------


def stops(*, rounds: int = 3, replicas: int = 3) -> Iterator[Figure]:
    """Run operations during a rolling restart of all processes by SIGTERM, including the leader.

    Raises AssertionError if an operation failed, or returned an impossible result.
    """
    with (
        LocalCluster(nodes=3, coordinators=3, setup=Setup(replication_factor=replicas)) as cluster,
        cluster.admin() as admin,
        SteadyLoad(cluster) as load,
    ):
        wait_well(cluster)
        for _ in range(rounds):
            for name in (*cluster.node_names, *cluster.coordinator_names, "leader"):
                time.sleep(QUIET_S)
                restarted = (cluster.leader() or "c1") if name == "leader" else name
                kind = "leader" if restarted == cluster.leader() else "member"
                kind = "node" if name.startswith("n") else kind
                what = restart(cluster, restarted)
                yield Figure("end after SIGTERM", kind, what.ended_at - what.stop_at, "s")
                found = load.between(what.stop_at, what.well_at)
                took = [one.seconds * 1000 for one in found]
                yield Figure("operations, p99", kind, percentile(took, 0.99), "ms")
                yield Figure("operations, worst", kind, max(took, default=0.0), "ms")
            restore_primaries(cluster, admin)
        load.judge()


# --- too little CPU ------------------------------------------------------------------------------


def starved(*, seconds: float = 60.0, busy: int = 8, nodes: int = 4) -> Iterator[Figure]:
    """Count changes of leader and fences, and measure latencies, beside busy loops.

    Nothing fails: every change of leader, every fence and every lost lease is a mistake. Linux may
    share CPU by session, so each loop and each server has one of its own, as in a container. Raises
    AssertionError if a node was fenced, or leaders changed more often than once a minute.
    """
    with _busy_loops(busy) as loops, LocalCluster(nodes=nodes, coordinators=3) as cluster:
        _wait_in_sync(cluster)
        begin = log_sizes(cluster)
        for loop in loops:
            assert loop.stdin is not None
            loop.stdin.write(b"go\n")
            loop.stdin.flush()
        took, failed = asyncio.run(_probes(cluster, seconds))
        events = count_events(cluster, begin)
    for share in (50, 99, 100):
        yield Figure(f"operations, p{share}", "all", percentile(took, share / 100), "s")
    yield Figure("failed operations", "all", failed)
    for event, count in events.items():
        yield Figure(event, "all", count)
    assert not events["fences"], "a node was fenced though nothing had failed"
    assert events["leaders"] <= max(1.0, seconds / 60), "leaders changed though nothing had failed"


def log_sizes(cluster: LocalCluster) -> dict[str, int]:
    """Return the size of each member's log in bytes."""
    return {name: cluster.log_path(name).stat().st_size for name in cluster.names}


def count_events(cluster: LocalCluster, begin: dict[str, int]) -> dict[str, int]:
    """Count the events in the members' logs from these positions on."""
    found: Counter[str] = Counter(dict.fromkeys(LOG_EVENTS, 0))
    for name in cluster.names:
        with cluster.log_path(name).open("rb") as log:
            log.seek(begin[name])
            for line in log.read().decode(errors="replace").splitlines():
                found.update(event for event, told in LOG_EVENTS.items() if told.search(line))
    return dict(found)


@contextmanager
def _busy_loops(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-c", BUSY]
    loops = [
        subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        for _ in range(count)
    ]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def _probes(cluster: LocalCluster, seconds: float) -> tuple[list[float], int]:
    """Write and read a few keys; return the seconds of each operation, and the number that
    failed.
    """
    took, failed = list[float](), 0
    async with await aio.connect(cluster.coordinators) as client:
        until = time.monotonic() + seconds

        async def probe(key: bytes) -> None:
            nonlocal failed
            number = 0
            while (began_at := time.monotonic()) < until:
                number += 1
                try:
                    if number % 2:
                        await client.put(key, b"%d" % number, timeout_ms=3 * PROBE_TIMEOUT_MS)
                    else:
                        await client.get(key, timeout_ms=3 * PROBE_TIMEOUT_MS)
                except KoinonError:
                    failed += 1
                took.append(time.monotonic() - began_at)
                await asyncio.sleep(PAUSE_S / 5)

        await asyncio.gather(*(probe(b"starved/%d" % n) for n in range(PROBES)))
    return took, failed
