"""Runs real node processes beside a scripted coordinator, and speaks to them."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc

from koinon_node.config import Limits
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from koinon_node.storage.writer_process import GROUP, LENGTHS
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.errors import KoinonError
from koinon_proto.partitioner import partitioner
from koinon_proto.server.rpc import CHANNEL_OPTIONS, error_of
from koinon_proto.v1 import kv_pb2_grpc, loads_pb2_grpc, table_pb2_grpc
from tests.kit.addresses import free_address
from tests.kit.waiting import wait_until
from tests.node.kit.groups import lone_writer
from tests.node.kit.scripted_coordinator import ScriptedCoordinator

MIB = 1024 * 1024
PARTITIONS = 16
WAIT_S = 60.0  # on a machine that does much else too
Answer = TypeVar("Answer")


def partitions_of(keys: list[bytes]) -> list[int]:
    found: list[int] = partitioner("murmur2", PARTITIONS).partitions_of(keys).tolist()
    return found


def refusal(call: Callable[[], Any]) -> KoinonError:
    """Return the typed error that the call is refused with."""
    try:
        answer = call()
    except grpc.RpcError as failure:
        error = error_of(failure)
        if error is None:
            raise
        return error
    raise AssertionError(f"answered: {answer}")


class NodeProcess:
    """One node process and stubs to it."""

    def __init__(self, data: Path, coordinators: str, *flags: str, node_id: str = "n1") -> None:
        self.data = data
        self.address = free_address()
        self._errors = data.parent / f"{data.name}-{self.address.rpartition(':')[2]}.log"
        where = ["--id", node_id, "--listen", self.address, "--data", str(data)]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "koinon_node",
                    *where,
                    "--coordinators",
                    coordinators,
                    *flags,
                ],
                stderr=errors,
            )
        self.channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.kv: Any = kv_pb2_grpc.KeyValueStub(self.channel)
        self.bulk: Any = loads_pb2_grpc.BulkStub(self.channel)
        self.table: Any = table_pb2_grpc.TableServiceStub(self.channel)

    def errors(self) -> str:
        return self._errors.read_text()

    def stop(self) -> int:
        """Stop it clean; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.kill()


@contextlib.contextmanager
def running_node(
    data: Path, coordinator: ScriptedCoordinator, *flags: str
) -> Iterator[NodeProcess]:
    """Run a node until it hosts what the coordinator gave it."""
    before = len(coordinator.registrations)
    node = NodeProcess(data, coordinator.address, *flags)

    def hosts_or_ended() -> bool:
        hosts = len(coordinator.registrations) > before and coordinator.hosted_all()
        return hosts or node.process.poll() is not None

    try:
        wait_until(hosts_or_ended, "the node hosts its partitions")
        assert node.process.poll() is None, node.errors()
        yield node
    finally:
        node.close()


def config_of(directory: Path, map_size_bytes: int = 64 * MIB, **changes: object) -> StoreConfig:
    return StoreConfig(directory=directory, map_size_bytes=map_size_bytes, **changes)  # type: ignore[arg-type]


def framed(*group: Any) -> bytes:
    """Return the frame in which the writer process gets a group."""
    body = marshal.dumps((GROUP, group))
    return LENGTHS.pack(len(body), 0) + body


def with_writer(
    config: StoreConfig,
    use: Callable[[Writer, Store], Awaitable[Answer]],
    limits: Limits | None = None,
) -> Answer:
    """Open a store with its writer process, use them on a loop, close them clean."""

    async def run() -> Answer:
        lost: list[str] = []
        store = Store(config)
        writer = lone_writer(store, lost.append, limits)
        await writer.start()
        try:
            return await use(writer, store)
        finally:
            store.close(clean=await writer.stop())

    return asyncio.run(run())
