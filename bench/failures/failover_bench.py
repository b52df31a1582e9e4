"""The time without writes after ``kill -9`` of a node, with three replicas on three nodes.

    python -m bench.failures.failover_bench [--runs 10] [--json]

A node is killed under a steady client load. From that moment on, one write to every partition is
tried until it succeeds. A run's figure is the time until the last partition took its write. Then
the node is started again, and the next run waits until every replica is in sync. At the end every
acknowledged write of the load is read back, and its history is checked for linearizability, key by
key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field

from koinon import aio
from koinon.local import LocalCluster
from koinon_proto.contract.table import Table
from koinon_proto.partitioner import partitioner
from tests.checkers.linearizability import check
from tests.checkers.load import FULL_PAUSE_S, RecordedLoad

PROBE_TIMEOUT_MS = 15_000
BEFORE_KILL_S = 1.0
AFTER_RECOVERY_S = 0.5
IN_SYNC_TIMEOUT_S = 60.0


@dataclass(kw_only=True)
class Run:
    """The figures of one kill: seconds from the kill to a successful write, over all partitions."""

    victim: str
    last_s: float
    median_s: float
    led: int  # partitions that the victim led


@dataclass(kw_only=True)
class Report:
    """All runs, and the fate of the load's writes."""

    runs: list[Run] = field(default_factory=list)
    acknowledged: int = 0
    unknown: int = 0
    lost: int = 0
    operations: int = 0
    violations: list[str] = field(default_factory=list)


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


async def one_run(cluster: LocalCluster, client: aio.AsyncClient, victim: str) -> Run:
    """Kill the node; return the times at which the partitions took a write again."""
    table = cluster.status().table
    assert table is not None
    keys = list(probe_keys(table).values())
    number = next(n.number for n in table.nodes.values() if n.node_id == victim)
    led = sum(row.primary == number for row in table.rows)
    await asyncio.to_thread(cluster.kill, victim)
    killed_at = time.monotonic()

    async def probe(key: bytes) -> float:
        await client.put(key, b"%f" % killed_at, retry_unknown=True, timeout_ms=PROBE_TIMEOUT_MS)
        return time.monotonic() - killed_at

    times = await asyncio.gather(*map(probe, keys))
    return Run(victim=victim, last_s=max(times), median_s=statistics.median(times), led=led)


async def all_runs(cluster: LocalCluster, runs: int, report: Report) -> None:
    """Kill and restart nodes in turn."""
    client = await aio.connect(cluster.coordinators)
    try:
        for index in range(runs):
            await asyncio.sleep(BEFORE_KILL_S)
            run = await one_run(cluster, client, cluster.node_names[index % 3])
            report.runs.append(run)
            print(
                f"  {run.victim} (led {run.led}): all partitions write after {run.last_s:.2f} s",
                file=sys.stderr,
                flush=True,
            )
            await asyncio.sleep(AFTER_RECOVERY_S)
            cluster.restart(run.victim)
            await asyncio.to_thread(wait_in_sync, cluster)
    finally:
        await client.close()


def wait_in_sync(cluster: LocalCluster) -> None:
    """Wait until every replica of every partition is in sync."""
    cluster.wait_for(
        lambda s: (
            s.ready
            and s.table is not None
            and all(len(row.in_sync) == len(row.replicas) for row in s.table.rows)
        ),
        timeout_s=IN_SYNC_TIMEOUT_S,
        what="every replica in sync",
    )


def measure(runs: int) -> Report:
    """Return the figures of a fresh cluster."""
    report = Report()
    with LocalCluster(nodes=3, coordinators=3) as cluster:
        wait_in_sync(cluster)
        with RecordedLoad(cluster.client, pause_s=FULL_PAUSE_S) as load:
            asyncio.run(all_runs(cluster, runs, report))
        with cluster.client() as client:
            report.lost = len(load.lost(client))
    report.acknowledged = len(load.acknowledged)
    report.operations = len(load.history.operations())
    report.violations = [str(violation) for violation in check(load.history)]
    return report


def main() -> int:
    """Print the figures; 1 if anything was lost or violated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = measure(options.runs)
    seconds = [run.last_s for run in report.runs]
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        print(
            f"writes to all partitions succeed again after {statistics.median(seconds):.2f} s "
            f"(median of {len(seconds)}; best {min(seconds):.2f}, worst {max(seconds):.2f})\n"
            f"{report.acknowledged:,} acknowledged writes: {report.lost} lost; "
            f"{report.operations:,} recorded operations: {len(report.violations)} violations"
        )
        for violation in report.violations[:5]:
            print(violation)
    return 1 if report.lost or report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
