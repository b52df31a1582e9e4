"""One client process on a cluster of one node and of three, compared with bare py-lmdb.

    python -m bench.clients.cluster_bench [--seconds 3] [--nodes 1 3] [--json]

Every figure is rows (or operations) per second; "of bare" is the ratio to the same kind of
operation on py-lmdb alone, measured just before in the same run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from bench.node.bare import bare_rates
from koinon.cli.benchmark import run
from koinon.local import LocalCluster


def measure(nodes: int, seconds: float) -> dict[str, Any]:
    """Return ``koinon.cli.benchmark``'s report on a fresh local cluster, with the bare rates."""
    with tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch:
        bare_put, bare_get = bare_rates(Path(scratch) / "bare")
    with LocalCluster(nodes=nodes, coordinators=1) as cluster:
        report = run(cluster.coordinators, seconds)
    return {**report, "bare": {"put": bare_put, "get": bare_get}}


def show(report: dict[str, Any]) -> None:
    """Print one report."""
    bare = report["bare"]
    print(f"{report['nodes']} node(s), one client process")
    print(f"  {'bare py-lmdb put / get':<22} {bare['put']:>10,.0f} / {bare['get']:,.0f} rows/s")
    for name, measured in report["measures"].items():
        ratio = measured["rows_per_s"] / bare["put" if "put" in name else "get"]
        latency = ""
        if measured["p50_ms"] is not None:
            latency = f"  p50 {measured['p50_ms']:.2f} ms  p99 {measured['p99_ms']:.2f} ms"
        print(f"  {name:<22} {measured['rows_per_s']:>10,.0f}/s  {ratio:.3f} of bare{latency}")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each step")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--json", action="store_true", help="one JSON object a cluster size")
    options = parser.parse_args()
    for nodes in options.nodes:
        report = measure(nodes, options.seconds)
        if options.json:
            print(json.dumps(report))
        else:
            show(report)


if __name__ == "__main__":
    main()
