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
    "partitioner_bench",
    "router_bench",
    "planner_bench",
    "raft_bench",
    "node_bench",
    "cluster_bench",
    "ingest_bench",
)
LONG_NAMES = (
    "move_bench",
    "failover_bench",
    "graceful_bench",
    "metrics_bench",
    "partitions_bench",
    "rest_bench",
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
