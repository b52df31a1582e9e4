"""Every benchmark in turn: ``python -m bench``, or ``make bench``. Some five minutes."""

from __future__ import annotations

import subprocess
import sys

NAMES = ("partitioner_bench", "planner_bench", "raft_bench", "node_bench", "cluster_bench")


def main() -> int:
    """Run each as a process of its own; return how many failed."""
    failed = 0
    for name in NAMES:
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", f"bench.{name}"]
        failed += subprocess.run(command, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
