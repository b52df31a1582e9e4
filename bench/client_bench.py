"""Print what one client process gets out of a running cluster.

python bench/client_bench.py --coordinators 127.0.0.1:7400 [--seconds 3]
"""

from __future__ import annotations

import argparse
import json

from koinon.benchmark import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinators", required=True, help="host:port,host:port")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each step")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    report = run(options.coordinators, options.seconds)
    if options.json:
        print(json.dumps(report))
        return
    print(
        f"{report['nodes']} nodes, {report['keys']} keys, values of {report['value_bytes']} bytes"
    )
    for name, measure in report["measures"].items():
        latency = ""
        if measure["p50_ms"] is not None:
            latency = f"  p50 {measure['p50_ms']:7.2f} ms  p99 {measure['p99_ms']:7.2f} ms"
        print(f"{name:>16} {measure['rows_per_s']:>12,.0f} rows/s{latency}")


if __name__ == "__main__":
    main()
