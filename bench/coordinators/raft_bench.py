"""Figures of the coordinator's Raft: three member processes on this machine, with real disks.

    python -m bench.coordinators.raft_bench [--seconds 5] [--failovers 10] [--json]

It prints durable proposals per second at 1, 16 and 64 concurrent proposers (inside the leader's
process; commands of 100 bytes). It also prints the time from `kill -9` of the leader until a new
one accepts proposals, and how many acknowledged entries were lost meanwhile. It fails if any were
lost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.raft.processes import Cluster

COMMAND_BYTES = 100
TARGETS = {1: 500, 16: 5_000, 64: 15_000}


def measure_throughput(cluster: Cluster, seconds: float) -> dict[str, float]:
    """Return proposals per second by number of concurrent proposers."""
    rates = {}
    for proposers in TARGETS:
        leader = cluster.wait_for_leader()
        leader.call("load", proposers=proposers, seconds=0.5, size=COMMAND_BYTES, tag="warm")
        result = leader.call(
            "load", proposers=proposers, seconds=seconds, size=COMMAND_BYTES, tag="rate"
        )
        rates[str(proposers)] = round(result["acknowledged"] / result["seconds"], 1)
    return rates


def measure_failover(cluster: Cluster, rounds: int) -> dict[str, Any]:
    """Kill the leader under load, again and again; count what was acknowledged and then lost."""
    times_s: list[float] = []
    acknowledged: set[str] = set()
    for turn in range(rounds):
        leader = cluster.wait_for_leader()
        load = leader.begin(
            "load", proposers=16, seconds=30, size=COMMAND_BYTES, tag=f"t{turn}-", report=True
        )
        leader.wait_for_progress(200)
        killed_at = cluster.clock()
        leader.kill()
        acknowledged |= load.acknowledged_so_far()
        successor = cluster.wait_for_leader(timeout_s=30)
        successor.call("propose", command=f"after-{turn}")
        times_s.append(cluster.clock() - killed_at)
        acknowledged.add(f"after-{turn}")
        leader.start()
    cluster.wait_for_leader().call("barrier")
    applied = set(cluster.wait_for_leader().call("dump"))
    lost = acknowledged - applied
    return {
        "rounds": rounds,
        "median_s": round(statistics.median(times_s), 3),
        "max_s": round(max(times_s), 3),
        "acknowledged": len(acknowledged),
        "lost": len(lost),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=5.0, help="per number of proposers")
    parser.add_argument("--failovers", type=int, default=10)
    parser.add_argument("--data-dir", type=Path, help="where to put the data (default: a new one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=options.data_dir) as scratch,
        Cluster(Path(scratch), size=3) as cluster,
    ):
        rates = measure_throughput(cluster, options.seconds)
        failover = measure_failover(cluster, options.failovers)
    if options.json:
        print(json.dumps({"proposals_per_second": rates, "failover": failover}))
    else:
        for proposers, rate in rates.items():
            print(f"{proposers:>3} proposers: {rate:>10,.0f} durable proposals/s")
        print(
            f"failover after kill -9: median {failover['median_s']} s, max {failover['max_s']} s "
            f"({failover['rounds']} rounds); lost {failover['lost']} of "
            f"{failover['acknowledged']} acknowledged entries"
        )
    return 1 if failover["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
