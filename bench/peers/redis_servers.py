"""Redis servers to compare with: one, or a cluster, for the length of a ``with`` block.

They run in temporary directories on free ports of this machine, without snapshots, and end with the
program, whatever ends it.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bench.peers.servers import PeerServers
from koinon.local.files import choose_addresses

SLOTS = 16_384
READY_S = 20.0
POLL_S = 0.05
AFTER_FAILOVER_MS = 60_000  # so long that no server counts as dead because the machine is busy

Sync = Literal["", "everysec", "always"]
"""When the append-only file is synced; '': there is none, nothing is on disk."""


def missing() -> str:
    """Return what this machine lacks for Redis; '' if it lacks nothing."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (Debian's package redis-server)"
    try:
        import redis  # noqa: F401
    except ImportError:
        return "the package redis is not installed (pip install redis)"
    return ""


class RedisServers(PeerServers):
    """One server, or a cluster of so many primaries, each with ``replicas`` replicas."""

    def __init__(self, servers: int = 1, *, replicas: int = 0, sync: Sync = "everysec") -> None:
        super().__init__("redis")
        self.addresses: list[tuple[str, int]] = []  # of the primaries
        self._primaries = servers
        self._count = servers * (1 + replicas)
        self._sync = sync

    def records(self) -> int:
        """Return the number of keys, over all primaries."""
        return sum(self._ask(address).dbsize() for address in self.addresses)

    def _start(self, directory: Path) -> None:
        chosen = [a.rpartition(":") for a in choose_addresses(2 * self._count, 0)]
        ports = [int(port) for _, _, port in chosen]
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
            self._until(partial(self._answers, address), f"{address} answers")
        if self._count > 1:
            self._join()

    def _join(self) -> None:
        """Make the servers one cluster: the first are primaries, each with its share of the slots,
        the others follow them in turn.
        """
        share = -(-SLOTS // self._primaries)
        primaries = self.addresses[: self._primaries]
        for number, address in enumerate(primaries):
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
        for number, address in enumerate(self.addresses[self._primaries :]):
            followed = self._ask(primaries[number % self._primaries])
            name = followed.execute_command("CLUSTER MYID")
            self._until(
                partial(self._take_primary, address, name), f"{address} knows whom to follow"
            )
        for address in self.addresses[self._primaries :]:
            self._until(partial(self._follows, address), f"{address} follows")
        self.addresses = primaries

    def _take_primary(self, address: tuple[str, int], primary: Any) -> bool:
        import redis

        with contextlib.suppress(redis.ResponseError):  # it has not heard of the primary yet
            return bool(self._ask(address).execute_command("CLUSTER REPLICATE", primary))
        return False

    def _follows(self, address: tuple[str, int]) -> bool:
        return bool(self._ask(address).info("replication").get("master_link_status") == "up")

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
                raise TimeoutError(f"it did not come to this: {what}\n{self._log_tails()}")
            time.sleep(POLL_S)
