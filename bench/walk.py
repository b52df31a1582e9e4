"""Benchmarks of a single operation's cost at the servers: CPU, function calls, and modules."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from bench.figures import Aim, Figure
from bench.measuring import VALUE, cpu_s
from koinon.client import Client
from koinon.local import LocalCluster, Setup, servers
from koinon_proto.partitioner import partitioner_of

AIMS = (
    Aim("put, CPU of all servers", "1 copy", 200, at_most=True),
    Aim("put, CPU of all servers", "3 copies", 1_200, at_most=True),
    Aim("put, calls of the primary", "1 copy", 110, at_most=True),
    Aim("put, modules of the primary", "1 copy", 20, at_most=True),
    Aim("get, calls of the primary", "1 copy", 35, at_most=True),
    Aim("get, modules of the primary", "1 copy", 12, at_most=True),
)
TREE = Path(__file__).resolve().parents[1]
COUNTED = 500  # operations whose calls are counted
RARE = 0.5  # calls per operation: rarer calls do not belong to every operation
KEYS = [b"walk:%d" % n for n in range(20_000)]


def measure(
    *, copies: tuple[int, ...] = (1, 3), seconds: float = 3.0, calls: bool = False
) -> Iterator[Figure]:
    """Measure CPU, calls and modules of a single put and a single get; ``calls``: print them."""
    for count in copies:
        column = "1 copy" if count == 1 else f"{count} copies"
        with _cluster(count) as cluster, cluster.client() as client:
            client.put_many(dict.fromkeys(KEYS, VALUE))
            for name, operation in _operations(client).items():
                for figure in _cpu(cluster, operation, seconds):
                    yield Figure(f"{name}, {figure.row}", column, figure.value, figure.unit)
        counted = _counted(count, calls=calls)
        yield from (Figure(row, column, value) for row, value in counted)


def _operations(client: Client) -> dict[str, Callable[[bytes], object]]:
    return {"put": lambda key: client.put(key, VALUE), "get": client.get}


@contextmanager
def _cluster(copies: int) -> Iterator[LocalCluster]:
    flags = ("--replication-factor", str(copies))
    with LocalCluster(
        nodes=copies, coordinators=1, setup=Setup(coordinator_flags=flags)
    ) as cluster:
        yield cluster


def _cpu(
    cluster: LocalCluster, operation: Callable[[bytes], object], seconds: float
) -> Iterator[Figure]:
    """Yield the rate of the operation, and the CPU of all servers for each."""
    pids = [pid for name in cluster.names if (pid := cluster.pid(name)) is not None]
    before, began, done = cpu_s(pids), time.monotonic(), 0
    while time.monotonic() < began + seconds:
        for key in KEYS[done % len(KEYS) :][:100]:
            operation(key)
        done += 100
    took, used = time.monotonic() - began, cpu_s(pids) - before
    yield Figure("rate", "", done / took, "1/s")
    yield Figure("CPU of all servers", "", 1e6 * used / done, "us")


def _counted(copies: int, *, calls: bool) -> Iterator[tuple[str, float]]:
    """Yield the calls and modules of the primary and of a follower, for an operation of one key."""
    with tempfile.TemporaryDirectory(prefix="koinon-walk-") as scratch:
        paths = {"PYTHONPATH": str(TREE), "KOINON_WALK": scratch}
        walked = {"node": "bench.walked_node"}
        with (
            patch.dict(os.environ, paths),
            patch.dict(servers.MODULES, walked),
            _cluster(copies) as cluster,
            cluster.client() as client,
        ):
            client.put_many(dict.fromkeys(KEYS, VALUE))
            key = _led_by(client, "n1")
            roles = {"the primary": "n1"} | ({"a follower": "n2"} if copies > 1 else {})
            pids = {role: pid for role, name in roles.items() if (pid := cluster.pid(name))}
            for name, operation in _operations(client).items():
                operation(key)
                _signal(pids, signal.SIGUSR1)
                for _ in range(COUNTED):
                    operation(key)
                _signal(pids, signal.SIGUSR2)
                for role, pid in pids.items():
                    found = _read(Path(scratch, f"{pid}.json"))
                    often = {f: n / COUNTED for f, n in found.items() if n / COUNTED >= RARE}
                    if calls:
                        print(*(f"{n:8.2f} {name} {role} {f}" for f, n in often.items()), sep="\n")
                    yield f"{name}, calls of {role}", sum(often.values())
                    yield f"{name}, modules of {role}", len({f.partition(":")[0] for f in often})


def _signal(pids: dict[str, int], number: int) -> None:
    for pid in pids.values():
        os.kill(pid, number)


def _led_by(client: Client, node_id: str) -> bytes:
    """Return a key whose primary is the node."""
    table = client.table()
    partition_of = partitioner_of(table.keyspaces.default).partition_of
    nodes = ((key, table.primary_of(partition_of(key))) for key in KEYS)
    return next(key for key, node in nodes if node is not None and node.node_id == node_id)


def _read(target: Path) -> dict[str, int]:
    while not target.exists():
        time.sleep(0.05)
    found: dict[str, int] = json.loads(target.read_text())
    target.unlink()
    return found
