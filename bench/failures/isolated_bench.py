"""Measures how long writes fail after a failure, each process on a network of its own.

    python -m bench.failures.isolated_bench [--runs 3] [--only cut,kill,kill-two,stop]

Three coordinators and four nodes with three replicas, each process in a network namespace, as in a
container (``hosts.py``). Packets to a process that is gone vanish, so connections to it do not end.
From the moment of the failure on, one write after the other goes to every partition that has two
copies left. A partition's figure is the longest time that a write to it took. The bench prints the
median and the worst partition of each run, and the slowest single operation of other clients.

    cut         a node is taken off the network
    kill        a node is killed, its host with it
    kill-two    two nodes of the four at once
    stop        a node is asked to end (SIGTERM)
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass

from koinon import aio
from koinon_proto.contract.errors import KoinonError

from .failover_bench import probe_keys
from .hosts import HostCluster, is_possible
from .runs import FailureRun, options_of, tell

KINDS = ("cut", "kill", "kill-two", "stop")
QUIET_S = 1.5
WATCHED_S = {"cut": 6.0, "kill": 6.0, "kill-two": 12.0, "stop": 6.0}
PROBE_TIMEOUT_MS = 20_000
PROBE_PAUSE_S = 0.25


@dataclass(kw_only=True)
class Run(FailureRun):
    """The figures of one failure: seconds without a write, over partitions."""

    victims: list[str]
    partitions: int
    median_led_s: float  # over the partitions that the failed nodes led


class Probes:
    """Writes to each partition, one write after the other; notes the longest time of each."""

    def __init__(self, client: aio.AsyncClient) -> None:
        self._client = client
        self.longest_s: defaultdict[int, float] = defaultdict(float)
        self.failed = 0

    async def run(self, partition_id: int, key: bytes, until: float) -> None:
        while time.monotonic() < until:
            began_at = time.monotonic()
            try:
                await self._client.put(
                    key, b"%f" % began_at, retry_unknown=True, timeout_ms=PROBE_TIMEOUT_MS
                )
            except KoinonError:
                self.failed += 1
            took_s = time.monotonic() - began_at
            self.longest_s[partition_id] = max(self.longest_s[partition_id], took_s)
            await asyncio.sleep(PROBE_PAUSE_S)


async def one_run(cluster: HostCluster, kind: str, index: int) -> Run:
    """Cause the failure; return what clients noticed."""
    names = cluster.node_names
    victims = [names[(index + n) % len(names)] for n in range(2 if kind == "kill-two" else 1)]
    table = cluster.status().table
    assert table is not None
    numbers = {n.number for n in table.nodes.values() if n.node_id in victims}
    ids = [row.partition_id for row in table.rows if len(set(row.replicas) - numbers) >= 2]
    led = [p for p in ids if table.rows[p].primary in numbers]
    keys = probe_keys(table)
    async with await aio.connect(cluster.coordinators) as client:
        probes = Probes(client)
        until = time.monotonic() + QUIET_S + WATCHED_S[kind]
        tasks = [asyncio.create_task(probes.run(p, keys[p], until)) for p in ids]
        await asyncio.sleep(QUIET_S)
        probes.longest_s.clear()
        for victim in victims:
            act = {"cut": cluster.cut, "stop": cluster.terminate}.get(kind, cluster.kill)
            await asyncio.to_thread(act, victim)
        await asyncio.gather(*tasks)
    return Run(
        kind=kind,
        victims=victims,
        partitions=len(ids),
        median_led_s=statistics.median([probes.longest_s[p] for p in led] or [0.0]),
        worst_s=max(probes.longest_s.values()),
        failed=probes.failed,
    )


def restore(cluster: HostCluster, run: Run) -> None:
    """Bring all processes back, and give partitions back to the nodes that led them."""
    for victim in run.victims:
        if run.kind == "cut":
            cluster.connect(victim)
        else:
            cluster.wait_ended(victim)
            cluster.start(victim)
    cluster.wait_in_sync()
    cluster.restore_primaries()


def main() -> int:
    """Print the figures."""
    options = options_of(__doc__, KINDS)
    if not is_possible():
        print("network namespaces cannot be made here: root and iproute2 are needed")
        return 0
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    with HostCluster() as cluster:
        cluster.restore_primaries()
        for kind in options.only.split(","):
            for index in range(options.runs):
                run = asyncio.run(one_run(cluster, kind, index))
                runs[kind].append(run)
                print(
                    f"  {kind} {','.join(run.victims)}: median of led {run.median_led_s:.2f} s, "
                    f"worst of {run.partitions} partitions {run.worst_s:.2f} s, "
                    f"{run.failed} failed",
                    file=sys.stderr,
                    flush=True,
                )
                restore(cluster, run)
    tell(runs, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
