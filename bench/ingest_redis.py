"""Loads Redis from Spark for comparison: as users do it, and as fast as we could.

Servers run in temporary directories on free ports, with an append-only file that is synced every
second and without snapshots. A job takes a DataFrame of two binary columns, key and value.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from koinon.local.files import choose_addresses
from koinon.local.processes import Guardian, ManagedProcess, wait_stopped

SLOTS = 16_384
PIPELINE_ROWS = 1_000
MSET_ROWS = 1_000
MSETS_IN_FLIGHT = 4
READY_S = 20.0
STOP_S = 10.0
POLL_S = 0.05
AFTER_FAILOVER_MS = 60_000  # so long that no server counts as dead because the machine is busy


def missing() -> str:
    """Return what this machine lacks for the comparison; '' if it lacks nothing."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (Debian's package redis-server)"
    try:
        import redis  # noqa: F401
    except ImportError:
        return "the package redis is not installed (pip install redis)"
    return ""


class RedisServers:
    """One server, or a cluster of several, for the length of a ``with`` block."""

    def __init__(self, servers: int = 1) -> None:
        self.addresses: list[tuple[str, int]] = []
        self._count = servers
        self._processes: list[ManagedProcess] = []
        self._guardian: Guardian | None = None
        self._directory: Path | None = None

    def __enter__(self) -> RedisServers:
        self._directory = Path(tempfile.mkdtemp(prefix="koinon-bench-redis-"))
        self._guardian = Guardian()
        self._guardian.remove(self._directory)
        try:
            self._start(self._directory)
            if self._count > 1:
                self._join()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the servers and delete what they wrote."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGTERM)
        for process in wait_stopped(self._processes, STOP_S):
            process.signal(signal.SIGKILL)
        wait_stopped(self._processes, STOP_S)
        if self._guardian is not None:
            self._guardian.close()

    def records(self) -> int:
        """How many keys there are, over all servers."""
        return sum(self._ask(address).dbsize() for address in self.addresses)

    def _start(self, directory: Path) -> None:
        chosen = [a.rpartition(":") for a in choose_addresses(2 * self._count, 0)]
        ports = [int(port) for _, _, port in chosen]
        for number, port in enumerate(ports[: self._count]):
            home = directory / f"r{number + 1}"
            home.mkdir()
            argv = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home)]
            argv += ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"]
            if self._count > 1:
                argv += ["--cluster-enabled", "yes", "--cluster-port"]
                argv += [str(ports[self._count + number])]
                argv += ["--cluster-node-timeout", str(AFTER_FAILOVER_MS)]
            process = ManagedProcess(f"r{number + 1}", argv, home / "log")
            self._processes.append(process)
            identity = process.start(os.environ)
            assert self._guardian is not None
            if identity is not None:
                self._guardian.watch(identity)
            self.addresses.append(("127.0.0.1", port))
        for address in self.addresses:
            self._until(partial(self._answers, address), f"{address} answers")

    def _join(self) -> None:
        """Make the servers one cluster, each with its share of the slots."""
        share = -(-SLOTS // self._count)
        for number, address in enumerate(self.addresses):
            first = number * share
            last = min(first + share, SLOTS) - 1
            self._ask(address).execute_command("CLUSTER ADDSLOTSRANGE", first, last)
        bus = [
            str(self._ask(address).config_get("cluster-port")["cluster-port"])
            for address in self.addresses
        ]
        for (host, port), bus_port in zip(self.addresses[1:], bus[1:], strict=True):
            first_one = self._ask(self.addresses[0])
            first_one.execute_command("CLUSTER MEET", host, port, bus_port)
        for address in self.addresses:
            self._until(partial(self._is_joined, address), "the Redis cluster is up")

    def _answers(self, address: tuple[str, int]) -> bool:
        return bool(self._ask(address).ping())

    def _is_joined(self, address: tuple[str, int]) -> bool:
        return bool(self._ask(address).cluster("INFO")["cluster_state"] == "ok")

    @staticmethod
    def _ask(address: tuple[str, int]) -> Any:
        import redis

        return redis.Redis(*address)

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        import redis

        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(redis.ConnectionError, redis.BusyLoadingError):
                if holds():
                    return
            if time.monotonic() > deadline:
                tails = "\n".join(process.log_tail(5) for process in self._processes)
                raise TimeoutError(f"it did not come to this: {what}\n{tails}")
            time.sleep(POLL_S)


def load_by_pipelines(frame: Any, host: str, port: int) -> None:
    """The usual job: each partition's rows, one by one, into pipelines of the cluster's client."""

    def write(rows: Iterable[Any]) -> None:
        from redis.cluster import RedisCluster

        with RedisCluster(host=host, port=port) as client:
            pipeline = client.pipeline()
            waiting = 0
            for row in rows:
                pipeline.set(bytes(row.key), bytes(row.value))
                waiting += 1
                if waiting == PIPELINE_ROWS:
                    pipeline.execute()
                    waiting = 0
            pipeline.execute()

    frame.foreachPartition(write)


def load_by_arrow(frame: Any, host: str, port: int) -> None:
    """The fastest job that we could write: it turns Arrow batches into MSETs of 1,000 rows, and
    sends several of them to one server before it reads the first answer.
    """

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        import redis

        connection: Any = redis.Connection(host=host, port=port)  # type: ignore[no-untyped-call]
        connection.connect()
        in_flight = 0
        try:
            for batch in batches:
                keys, values = batch.column(0).to_pylist(), batch.column(1).to_pylist()
                for start in range(0, len(keys), MSET_ROWS):
                    pairs: list[bytes] = [b"MSET"] * (2 * len(keys[start : start + MSET_ROWS]) + 1)
                    pairs[1::2] = keys[start : start + MSET_ROWS]
                    pairs[2::2] = values[start : start + MSET_ROWS]
                    connection.send_packed_command(_packed(pairs))
                    in_flight += 1
                    if in_flight == MSETS_IN_FLIGHT:
                        connection.read_response()
                        in_flight -= 1
                yield batch.slice(0, 0)
            while in_flight:
                connection.read_response()
                in_flight -= 1
        finally:
            connection.disconnect()

    frame.mapInArrow(write, frame.schema).count()


def _packed(arguments: list[bytes]) -> list[bytes]:
    """Return a command in the server's protocol: each argument behind its length."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        parts += (b"$%d\r\n" % len(argument), argument, b"\r\n")
    return [b"".join(parts)]
