"""Servers of all systems on this machine, for the length of a ``with`` block.

They run in temporary directories on free ports, and end with the program in any case. The compared
part of etcd's API is built here from its published messages (api/etcdserverpb/rpc.proto,
mvccpb/kv.proto), without unused fields.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass

from bench.measuring import node_pids
from koinon.local import LocalCluster, Setup
from koinon.local.cluster_files import choose_addresses
from koinon.local.processes import Guardian, ManagedProcess, wait_stopped

NODES = 3
SLOTS = 16_384
READY_S = 20.0
STOP_S = 10.0
POLL_S = 0.05
AFTER_FAILOVER_MS = 60_000  # so long that Redis declares no server dead while the machine is busy
OPERATIONS_MAX = 2_000  # operations in an etcd transaction; a batch has 1,000

Address = tuple[str, int]
Sync = Literal["", "everysec", "always"]
"""When Redis syncs its append-only file; '': it has none, and nothing is on disk."""


@dataclass(frozen=True)
class Running:
    """Running servers: the arguments for a client's class, and the servers' processes."""

    arguments: list[Any]
    pids: Callable[[], list[int]]
    options: dict[str, Any] = field(default_factory=dict)


def missing(servers: str) -> str:
    """Return a message if the servers' program is not installed here; '' if it is."""
    program = servers.partition("-")[0]
    package = {"redis": "redis-server", "etcd": "etcd-server"}.get(program, "")
    command = {"redis": "redis-server", "etcd": "etcd"}.get(program, "")
    if command and shutil.which(command) is None:
        return f"{command} is not installed (Debian's package {package})"
    return ""


def start(servers: str, stack: ExitStack) -> Running:
    """Start servers, which end with the stack."""
    if servers == "etcd":
        etcd = stack.enter_context(EtcdServers(NODES))
        return Running([etcd.addresses], lambda: etcd.pids)
    if servers.startswith("redis"):
        sync: Sync = "" if servers == "redis" else "always"
        replicas = int(servers == "redis-wait")
        redis = stack.enter_context(RedisServers(NODES, replicas=replicas, sync=sync))
        return Running(list(redis.addresses[0]), lambda: redis.pids)
    kind = servers.partition("-")[2]
    copies = 3 if kind == "3" else 1
    cluster = stack.enter_context(
        LocalCluster(
            nodes=NODES,
            tls=kind == "tls",
            setup=Setup(
                replication_factor=copies, partitioner="crc16" if kind == "guest" else "murmur2"
            ),
        )
    )
    pids = partial(node_pids, cluster)
    if kind == "guest":
        return Running(list(_place(cluster.redis_address(cluster.node_names[0]))), pids)
    options = {"tls_bundle": str(cluster.tls_bundle)} if kind == "tls" else {}
    return Running([cluster.coordinators], pids, options)


def koinon_redis_address(stack: ExitStack) -> Address:
    """Start a cluster of one node; return its address for the Redis protocol."""
    cluster = stack.enter_context(LocalCluster(nodes=1, coordinators=1))
    return _place(cluster.redis_address(cluster.node_names[0]))


def _place(address: str) -> Address:
    host, _, port = address.rpartition(":")
    return host, int(port)


class PeerServers(ABC):
    """Servers of one system; ``system`` names their directory."""

    def __init__(self, system: str) -> None:
        self._system = system
        self._processes: list[ManagedProcess] = []
        self._guardian: Guardian | None = None

    @abstractmethod
    def _start(self, directory: Path) -> None:
        """Start the servers with ``_spawn``; return once they answer."""

    def _spawn(self, name: str, argv: list[str], log: Path) -> None:
        process = ManagedProcess(name, argv, log)
        self._processes.append(process)
        identity = process.start(os.environ)
        if identity is not None and self._guardian is not None:
            self._guardian.watch(identity)

    def __enter__(self) -> Self:
        directory = Path(tempfile.mkdtemp(prefix=f"koinon-bench-{self._system}-"))
        self._guardian = Guardian()
        self._guardian.remove(directory)
        try:
            self._start(directory)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGTERM)
        for process in wait_stopped(self._processes, STOP_S):
            process.signal(signal.SIGKILL)
        wait_stopped(self._processes, STOP_S)
        if self._guardian is not None:
            self._guardian.close()

    @property
    def pids(self) -> list[int]:
        """The servers' processes."""
        return [process.identity.pid for process in self._processes if process.identity]

    def _until(self, holds: Callable[[], bool], what: str, *not_yet: type[Exception]) -> None:
        """Wait until the condition holds; errors of the types in ``not_yet`` mean that it does not
        yet.
        """
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(*not_yet):
                if holds():
                    return
            if time.monotonic() > deadline:
                logs = "\n".join(process.log_tail(5) for process in self._processes)
                raise TimeoutError(f"not within {READY_S:g} s: {what}\n{logs}")
            time.sleep(POLL_S)


# --- Redis ---------------------------------------------------------------------------------------


class RedisServers(PeerServers):
    """One server, or a cluster of several primaries, each with ``replicas`` replicas."""

    def __init__(self, servers: int = 1, *, replicas: int = 0, sync: Sync = "everysec") -> None:
        super().__init__("redis")
        self.addresses: list[Address] = []  # number of primaries
        self._primaries = servers
        self._count = servers * (1 + replicas)
        self._sync = sync

    def records(self) -> int:
        """Return the number of keys of all primaries."""
        return sum(self._ask(address).dbsize() for address in self.addresses)

    def _start(self, directory: Path) -> None:
        ports = [_place(address)[1] for address in choose_addresses(2 * self._count, 0)]
        for number, port in enumerate(ports[: self._count]):
            home = directory / f"r{number + 1}"
            home.mkdir(mode=0o700)
            argv = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home)]
            argv += ["--repl-diskless-sync-delay", "0"]
            argv += ["--save", "", "--appendonly", "yes" if self._sync else "no"]
            if self._sync:
                argv += ["--appendfsync", self._sync]
            if self._count > 1:
                argv += ["--cluster-enabled", "yes", "--cluster-port"]
                argv += [str(ports[self._count + number])]
                argv += ["--cluster-node-timeout", str(AFTER_FAILOVER_MS)]
            self._spawn(f"r{number + 1}", argv, home / "log")
            self.addresses.append(("127.0.0.1", port))
        for address in self.addresses:
            self._wait(partial(self._answers, address), f"{address} answers")
        if self._count > 1:
            self._join(ports[self._count :])

    def _join(self, bus_ports: list[int]) -> None:
        """Form one cluster: the first servers are primaries, each with its share of the slots, and
        the others follow them in turn.
        """
        share = -(-SLOTS // self._primaries)
        primaries = self.addresses[: self._primaries]
        for first, address in zip(range(0, SLOTS, share), primaries, strict=True):
            last = min(first + share, SLOTS) - 1
            self._ask(address).execute_command("CLUSTER ADDSLOTSRANGE", first, last)
        for (host, port), bus_port in zip(self.addresses[1:], bus_ports[1:], strict=True):
            self._ask(primaries[0]).execute_command("CLUSTER MEET", host, port, bus_port)
        for address in self.addresses:
            self._wait(partial(self._is_joined, address), "the Redis cluster is up")
        for number, address in enumerate(self.addresses[self._primaries :]):
            name = self._ask(primaries[number % self._primaries]).execute_command("CLUSTER MYID")
            self._wait(partial(self._follows, address, name), f"{address} follows its primary")
        self.addresses = primaries

    def _answers(self, address: Address) -> bool:
        return bool(self._ask(address).ping())

    def _is_joined(self, address: Address) -> bool:
        return bool(self._ask(address).cluster("INFO")["cluster_state"] == "ok")

    def _follows(self, address: Address, primary: Any) -> bool:
        self._ask(address).execute_command("CLUSTER REPLICATE", primary)
        return bool(self._ask(address).info("replication").get("master_link_status") == "up")

    @staticmethod
    def _ask(address: Address) -> Any:
        import redis

        return redis.Redis(*address)

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        import redis

        self._until(holds, what, redis.ConnectionError, redis.ResponseError)


# --- etcd ----------------------------------------------------------------------------------------

_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {"bytes": _FIELD.TYPE_BYTES, "int64": _FIELD.TYPE_INT64}
_FIELDS: dict[str, tuple[tuple[str, int, str], ...]] = {  # (name, number, type) by message
    "KeyValue": (("key", 1, "bytes"), ("value", 5, "bytes")),
    "RangeRequest": (("key", 1, "bytes"), ("range_end", 2, "bytes"), ("limit", 3, "int64")),
    "RangeResponse": (("kvs", 2, "KeyValue*"),),
    "PutRequest": (("key", 1, "bytes"), ("value", 2, "bytes")),
    "PutResponse": (),
    # One of these two fields is set: on the wire that equals the oneof of the original.
    "RequestOp": (("request_range", 1, "RangeRequest"), ("request_put", 2, "PutRequest")),
    "ResponseOp": (("response_range", 1, "RangeResponse"), ("response_put", 2, "PutResponse")),
    "TxnRequest": (("success", 2, "RequestOp*"),),
    "TxnResponse": (("responses", 3, "ResponseOp*"),),
}


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="etcd.proto", package="bench", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            label = 3 if kind.endswith("*") else 1
            added = message.field.add(name=field_name, number=number, label=label)
            added.type = _TYPES.get(kind, _FIELD.TYPE_MESSAGE)
            if kind not in _TYPES:
                added.type_name = f".bench.{kind.rstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"bench.{name}")) for name in _FIELDS}


MESSAGES = _messages()


def stub(channel: Any) -> dict[str, Any]:
    """Return the calls of etcd's KV service on a channel, blocking or for asyncio, by name."""
    return {
        call: channel.unary_unary(
            f"/etcdserverpb.KV/{call}",
            request_serializer=MESSAGES[f"{call}Request"].SerializeToString,
            response_deserializer=MESSAGES[f"{call}Response"].FromString,
        )
        for call in ("Range", "Put", "Txn")
    }


class EtcdServers(PeerServers):
    """A cluster of several servers; ``addresses`` are those for clients."""

    def __init__(self, servers: int = 3) -> None:
        super().__init__("etcd")
        self._count = servers
        self.addresses: list[str] = []

    def _start(self, directory: Path) -> None:
        chosen = choose_addresses(2 * self._count, 0)
        self.addresses, peers = chosen[: self._count], chosen[self._count :]
        names = [f"e{n + 1}" for n in range(self._count)]
        cluster = ",".join(f"{name}=http://{peer}" for name, peer in zip(names, peers, strict=True))
        for name, address, peer in zip(names, self.addresses, peers, strict=True):
            argv = ["etcd", "--name", name, "--data-dir", str(directory / name)]
            argv += ["--listen-client-urls", f"http://{address}"]
            argv += ["--advertise-client-urls", f"http://{address}"]
            argv += ["--listen-peer-urls", f"http://{peer}"]
            argv += ["--initial-advertise-peer-urls", f"http://{peer}"]
            argv += ["--initial-cluster", cluster, "--max-txn-ops", str(OPERATIONS_MAX)]
            argv += ["--max-request-bytes", str(16 << 20), "--log-level", "error"]
            argv += ["--quota-backend-bytes", str(8 << 30), "--auto-compaction-retention", "1m"]
            self._spawn(name, argv, directory / f"{name}.log")
        for address in self.addresses:
            with grpc.insecure_channel(address) as channel:
                self._until(partial(self._answers, stub(channel)), "etcd answers", grpc.RpcError)

    @staticmethod
    def _answers(calls: dict[str, Any]) -> bool:
        calls["Range"](MESSAGES["RangeRequest"](key=b"?"), timeout=1.0)
        return True
