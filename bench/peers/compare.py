"""Compares all systems in turn: a round runs every row on every system, so that other load of the
machine affects all alike.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.figures import Aim, Figure
from bench.measuring import bare_lmdb, bare_syncs, percentile
from bench.peers import echoes, servers
from bench.peers.rows import DEFAULT, LARGE, ROWS
from bench.peers.systems import DEFAULT as ALL
from bench.peers.systems import SYSTEMS
from bench.peers.worker import Worker

SPIN = "import os\nos.nice(19)\nwhile True: pass"
C_CONNECTIONS, C_PIPELINES, C_KEYS, C_REQUESTS = 50, (1, 32), 10_000, 100_000
C_ROUNDS = 3
SYNCED_BYTES = 180  # a record of 100 bytes in the log


def _ratio(row: str, ours: str, peer: str, bound: float) -> Aim:
    return Aim(row, ours, bound, (row, peer))


AIMS = (
    _ratio("get", "k1", "redis", 1.4),
    Aim("get, CPU of client", "k1", 0.4, ("get, CPU of client", "redis"), at_most=True),
    _ratio("get", "guest", "redis", 0.8),
    _ratio("put", "k1", "aof", 1.0),
    _ratio("threads16-get", "k1", "aof", 2.5),
    _ratio("threads16-put", "k1", "aof", 1.5),
    _ratio("tasks64-get", "k1", "aof", 2.5),
    _ratio("tasks64-put", "k1", "aof", 2.0),
    _ratio("tasks64-put", "k3", "etcd", 4.0),
    *(_ratio(row, "k3", "wait", 1.0) for row in ("tasks64-put", "put", "batch-put")),
    *(_ratio(row, "k3", "etcd", 1.0) for row in ("put", "batch-put")),
    _ratio("batch-get", "k1", "redis", 5.0),
    _ratio("batch4-get", "k1", "redis", 7.0),
    _ratio("scan", "k1", "etcd", 1.5),
    _ratio("large-get", "k1", "redis", 0.6),
    _ratio("large-put", "k1", "aof", 0.6),
    _ratio("redis-benchmark get", "k1", "redis", 0.6),
    _ratio("redis-benchmark set", "k1", "aof", 0.5),
    _ratio("redis-benchmark get -P 32", "k1", "redis", 0.2),
)


def measure(
    *,
    rows: tuple[str, ...] = DEFAULT,
    systems: tuple[str, ...] = ALL,
    rounds: int = 5,
    seconds: float = 2.0,
    awake: bool = False,
    floors: bool = True,
    from_c: bool = True,
) -> Iterator[Figure]:
    """Measure the same work on Koinon, Redis and etcd, any client's floors, redis-benchmark."""
    for name in (*rows, *systems):
        if name not in ROWS and name not in SYSTEMS:
            raise SystemExit(f"no row or system {name!r}: {', '.join((*ROWS, *SYSTEMS))}")
    with ExitStack() as stack:
        workers = _start(systems, stack)
        if awake:
            stack.enter_context(_spinning())
        for number in range(rounds):
            for row in rows:
                # each round begins with another worker, so that none always follows the same one
                turn = number % len(workers) if workers else 0
                for worker in workers[turn:] + workers[:turn]:
                    yield from _figures(row, worker, seconds)
    if floors:
        yield from floor_figures(seconds)
    if from_c:
        yield from _redis_benchmark()


def _start(names: Sequence[str], stack: ExitStack) -> list[Worker]:
    """Start servers and clients; print what this machine lacks for the others."""
    running: dict[str, servers.Running] = {}
    workers = []
    for system in (SYSTEMS[name] for name in names):
        if lacks := servers.missing(system.servers):
            print(f"no {system.name}: {lacks}", file=sys.stderr)
            continue
        print(f"{system.name}: an acknowledged put outlives by {system.durability}")
        fresh = system.servers not in running
        if fresh:
            running[system.servers] = servers.start(system.servers, stack)
        worker = Worker(system, running[system.servers])
        stack.callback(worker.close)
        workers.append(worker)
        if fresh and (error := worker.tell(fill=True).get("error")):
            raise RuntimeError(f"{system.name} cannot be filled: {error}")
    return workers


def _figures(row: str, worker: Worker, seconds: float) -> Iterator[Figure]:
    said, name = worker.tell(row=row, seconds=seconds), worker.system.name
    if "error" in said:
        print(f"{row} by {name}: {said['error']}", file=sys.stderr)
        return
    if row.startswith("large"):
        yield Figure(row, name, said["rows_per_s"] * len(LARGE) / 1e6, "MB/s")
    else:
        yield Figure(row, name, said["rows_per_s"], "/s")
    for what in ("p50", "p99"):
        if said[f"{what}_ms"]:
            yield Figure(f"{row}, {what}", name, said[f"{what}_ms"], "ms")
    if row in ("get", "put"):
        for what in ("client", "server"):
            used = said[f"{what}_cpu_s"] / max(said["rows"], 1)
            yield Figure(f"{row}, CPU of {what}", name, used * 1e6, "us")


@contextmanager
def _spinning() -> Iterator[None]:
    """Keep every core from sleeping, by busy processes of the lowest priority."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def floor_figures(seconds: float) -> Iterator[Figure]:
    """Yield the floors that no client can beat: bare echoes, bare LMDB, bare syncs."""
    for kind in echoes.KINDS:
        yield Figure(f"echo by {kind}", "floor", echoes.rate(kind, seconds), "/s")
    with tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch:
        put, get = bare_lmdb(Path(scratch))
        yield Figure("py-lmdb put, 8,000 rows a sync", "floor", put, "rows/s")
        yield Figure("py-lmdb get", "floor", get, "rows/s")
        took = bare_syncs(Path(scratch), SYNCED_BYTES, seconds)
        yield Figure("pwrite and fdatasync", "floor", 1e3 / percentile(took, 0.5), "/s")


def _redis_benchmark() -> Iterator[Figure]:
    """Yield the rates of redis-benchmark, a client in C, with one server of each system."""
    if shutil.which("redis-benchmark") is None:
        print("no redis-benchmark: install Debian's package redis-tools", file=sys.stderr)
        return
    with ExitStack() as stack:
        places = {
            "k1": servers.koinon_redis_address(stack),
            "redis": stack.enter_context(servers.RedisServers(1, sync="")).addresses[0],
            "aof": stack.enter_context(servers.RedisServers(1, sync="always")).addresses[0],
        }
        for _ in range(C_ROUNDS):
            for pipeline in C_PIPELINES:
                for what in ("set", "get"):
                    row = f"redis-benchmark {what}" + (f" -P {pipeline}" if pipeline > 1 else "")
                    for name, (host, port) in places.items():
                        fewer = 10 if what == "set" and name != "redis" else 1  # each put is synced
                        command = ["redis-benchmark", "-h", host, "-p", str(port), "--csv"]
                        command += ["-c", str(C_CONNECTIONS), "-n", str(C_REQUESTS // fewer)]
                        command += ["-d", "100", "-r", str(C_KEYS), "-t", what, "-P", str(pipeline)]
                        yield Figure(row, name, _rate_of(command, what), "/s")


def _rate_of(command: list[str], what: str) -> float:
    ended: Any = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rates = [row for row in csv.reader(ended.stdout.splitlines()) if row[0] == what.upper()]
    return float(rates[0][1])
