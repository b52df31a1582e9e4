"""The systems that are compared: how each is started, and what an acknowledged put of it outlives.

Systems that share servers, two transports of one cluster say, share them here too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers import etcd, redis_servers
from koinon.local import LocalCluster
from koinon.options import ClientOptions

NODES = 3


@dataclass(frozen=True, kw_only=True)
class System:
    """One column of the table."""

    name: str
    servers: str  # systems with the same servers share them
    kind: str  # of the client: a key of ``clients.KINDS``
    title: str
    durability: str
    options: dict[str, Any] = field(default_factory=dict)  # of the client
    missing: Callable[[], str] = lambda: ""


def _transport(name: str) -> dict[str, Any]:
    return {"transport": name} if has_transports() else {}


def has_transports() -> bool:
    """Return whether this build's client has a choice of transports."""
    return "transport" in {option.name for option in fields(ClientOptions)}


_KOINON_1 = "fsync on one node"
_KOINON_3 = "fsync on three nodes"
SYSTEMS = {
    system.name: system
    for system in (
        System(
            name="k1", servers="koinon-1", kind="koinon", title="Koinon, 1 copy",
            durability=_KOINON_1,
        ),
        System(
            name="k3", servers="koinon-3", kind="koinon", title="Koinon, 3 copies",
            durability=_KOINON_3,
        ),
        System(
            name="k1-grpc", servers="koinon-1", kind="koinon", title="Koinon, 1 copy, gRPC",
            durability=_KOINON_1, options=_transport("grpc"),
        ),
        System(
            name="k3-grpc", servers="koinon-3", kind="koinon", title="Koinon, 3 copies, gRPC",
            durability=_KOINON_3, options=_transport("grpc"),
        ),
        System(
            name="guest", servers="koinon-guest", kind="redis", title="redis-py on Koinon, 1 copy",
            durability=_KOINON_1,
        ),
        System(
            name="redis", servers="redis", kind="redis", title="Redis Cluster, no disk",
            durability="memory of one server", missing=redis_servers.missing,
        ),
        System(
            name="aof", servers="redis-aof", kind="redis", title="Redis Cluster, synced",
            durability="appendfsync always on one server", missing=redis_servers.missing,
        ),
        System(
            name="wait", servers="redis-wait", kind="redis", title="the same, replicas, WAIT 1",
            durability="the same, and memory of another", options={"wait": 1},
            missing=redis_servers.missing,
        ),
        System(
            name="etcd", servers="etcd", kind="etcd", title="etcd",
            durability="fsync on two of three servers", missing=etcd.missing,
        ),
    )
}  # fmt: skip
DEFAULT = ("k1", "k3", *(("k1-grpc", "k3-grpc") if has_transports() else ()), "guest", "redis",
           "aof", "wait", "etcd")  # fmt: skip


@dataclass(frozen=True)
class Servers:
    """Servers that run: the arguments of a client's class, and what to look at."""

    arguments: list[Any]
    pids: Callable[[], list[int]]


def start(servers: str, stack: ExitStack) -> Servers:
    """Start servers, which end with the stack."""
    if servers == "koinon-guest":
        cluster = LocalCluster(nodes=NODES, replication_factor=1, partitioner="crc16")
        cluster = stack.enter_context(cluster)
        host, _, port = cluster.redis_address(cluster.node_names[0]).rpartition(":")
        return Servers([host, int(port)], partial(node_pids, cluster))
    if servers.startswith("koinon"):
        copies = int(servers.rpartition("-")[2])
        cluster = stack.enter_context(LocalCluster(nodes=NODES, replication_factor=copies))
        return Servers([cluster.coordinators], partial(node_pids, cluster))
    if servers == "etcd":
        started = stack.enter_context(etcd.EtcdServers(NODES))
        return Servers([started.addresses], lambda: started.pids)
    sync: redis_servers.Sync = "" if servers == "redis" else "always"
    redis = stack.enter_context(
        redis_servers.RedisServers(NODES, replicas=int(servers == "redis-wait"), sync=sync)
    )
    return Servers(list(redis.addresses[0]), lambda: redis.pids)


def node_pids(cluster: LocalCluster) -> list[int]:
    """Return the processes of the nodes that run."""
    return [pid for name in cluster.node_names if (pid := cluster.pid(name)) is not None]


def cpu_s(pids: list[int]) -> float:
    """Return the CPU seconds that these processes, and their children, have used."""
    return sum(_cpu_s(pid) for parent in pids for pid in _family(parent))


def _family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found


def _cpu_s(pid: int) -> float:
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks: int = os.sysconf("SC_CLK_TCK")
    return (int(used[11]) + int(used[12])) / ticks


class Worker:
    """The client process of a system (``worker``)."""

    def __init__(self, system: System, servers: Servers) -> None:
        arguments = {"positional": servers.arguments, "named": system.options}
        self.system, self.servers = system, servers
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.worker", system.kind, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said()

    def tell(self, **told: Any) -> dict[str, Any]:
        """Have it do something; return what it says of that, with the servers' CPU seconds."""
        assert self._process.stdin is not None
        before = cpu_s(self.servers.pids())
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        said = self._said()
        return {**said, "server_cpu_s": cpu_s(self.servers.pids()) - before}

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client process of {self.system.name} has ended")
        said: dict[str, Any] = json.loads(line)
        return said

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
