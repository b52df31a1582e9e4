"""redis-benchmark, a client in C, against one server of each system: the server's own speed.

    python -m bench.peers.from_c [--rounds 3] [--requests 100000]

50 connections, 100-byte values, 10,000 keys; with and without pipelines of 32.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
from contextlib import ExitStack
from typing import Any

from bench.peers import redis_servers
from koinon.local import LocalCluster

CONNECTIONS = 50
PIPELINE = 32
KEYS = 10_000
WRITES_SHARE = 10  # so many times fewer writes than reads: they are synced
TIMEOUT_S = 300.0

Address = tuple[str, int]


def missing() -> str:
    """Return what this machine lacks; '' if it lacks nothing."""
    if shutil.which("redis-benchmark") is None:
        return "redis-benchmark is not installed (Debian's package redis-tools)"
    return redis_servers.missing()


def koinon_door(stack: ExitStack) -> Address | None:
    """Return where a cluster of one node speaks the Redis protocol; None where it does not."""
    cluster = stack.enter_context(LocalCluster(nodes=1, coordinators=1))
    with cluster.client() as client:
        (node,) = client.table().nodes.values()
    address = getattr(node, "redis_address", "")
    host, _, port = address.rpartition(":")
    return (host, int(port)) if address else None


def run(address: Address, what: str, requests: int, pipeline: int) -> float | None:
    """Return requests per second; None if the server does not know the command."""
    host, port = address
    command = ["redis-benchmark", "-h", host, "-p", str(port), "-c", str(CONNECTIONS), "--csv"]
    command += ["-n", str(requests), "-d", "100", "-r", str(KEYS), "-t", what, "-P", str(pipeline)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    rows = [row for row in csv.reader(ended.stdout.splitlines()) if row[0] == what.upper()]
    failed = ended.returncode or not rows or "rror" in ended.stderr
    return None if failed else float(rows[0][1])


def measure(rounds: int, requests: int) -> dict[str, dict[str, list[float]]]:
    """Return the rates of all rounds by row and server."""
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        redis = stack.enter_context(redis_servers.RedisServers(1, sync=""))
        aof = stack.enter_context(redis_servers.RedisServers(1, sync="always"))
        servers: dict[str, Address] = {"redis": redis.addresses[0], "aof": aof.addresses[0]}
        if (door := koinon_door(stack)) is not None:
            servers["koinon"] = door
        for _ in range(rounds):
            for pipeline in (1, PIPELINE):
                for what in ("set", "get"):
                    row = found.setdefault(f"{what} -P {pipeline}", {})
                    for name, address in servers.items():
                        share = WRITES_SHARE if what == "set" and name != "redis" else 1
                        rate = run(address, what, requests // share, pipeline)
                        if rate is not None:
                            row.setdefault(name, []).append(rate)
    return found


def show(found: dict[str, dict[str, list[float]]]) -> None:
    """Print medians; Koinon's beside what it is compared with."""
    print(f"redis-benchmark -c {CONNECTIONS}, one server, requests/s")
    print(f"{'':<12}{'Koinon':>12}{'Redis':>12}{'always':>12}{'ratio':>9}{'bar':>7}")
    bars = {"get -P 1": ("redis", 0.6), "set -P 1": ("aof", 0.5), "get -P 32": ("redis", 0.2)}
    for row, rates in found.items():
        medians = {name: statistics.median(values) for name, values in rates.items()}
        cells = "".join(
            f"{medians[name]:>12,.0f}" if name in medians else f"{'-':>12}"
            for name in ("koinon", "redis", "aof")
        )
        peer, bar = bars.get(row, ("aof", None))
        if "koinon" in medians and peer in medians:
            cells += f"{medians['koinon'] / medians[peer]:>8.2f}x"
            cells += "" if bar is None else f"{bar:>6.1f}x"
        print(f"{row:<12}{cells}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if lacks := missing():
        parser.exit(1, f"{lacks}\n")
    found: dict[str, Any] = measure(options.rounds, options.requests)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
