"""Runs the benchmarks in turn: ``python -m bench``, or ``make bench``. It takes some seven minutes.

``--long`` adds the benchmarks of moves, failover, stops, metrics, many partitions and what a
cluster costs at rest: some 26 more.
``move_bench`` stores 1 GB three times and moves it (it needs some 10 GB of disk, and frees them at
the end). ``failover_bench`` kills ten nodes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

NAMES = (
    "clients.partitioner_bench",
    "clients.router_bench",
    "coordinators.planner_bench",
    "coordinators.raft_bench",
    "node.node_bench",
    "clients.cluster_bench",
    "loads.ingest_bench",
)
LONG_NAMES = (
    "moves.move_bench",
    "failures.failover_bench",
    "failures.graceful_bench",
    "node.metrics_bench",
    "coordinators.partitions_bench",
    "coordinators.rest_bench",
)


def main() -> int:
    """Run each as a process of its own; return how many failed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--long", action="store_true", help="also " + " and ".join(LONG_NAMES))
    options = parser.parse_args()
    failed = 0
    for name in (*NAMES, *(LONG_NAMES if options.long else ())):
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", f"bench.{name}"]
        failed += subprocess.run(command, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
