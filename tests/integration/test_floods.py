"""Floods of bytes at each door: the memory stays in its bound, the node keeps its lease, others are
served.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from koinon.local import LocalCluster, Ports, Setup
from koinon_node.resp.memory_budget import BUDGET_BYTES, MIB, STRANGERS_BYTES
from tests.fuzz.campaign import Beside, Watch
from tests.integration.floods import ATTACKS
from tests.kit.waiting import wait_until
from tests.node.kit.resp_client import RespClient
from tests.scraping import scrape

GROWTH_BYTES_MAX = BUDGET_BYTES + 96 * MIB  # some of it is the allocator's
HEADERS_BYTES_MAX = 4096 * MIB  # what happens to be parsed at once has no bound (docs/bounds.md)
SECONDS = 3.0
FLAGS = ["--partitions", "16"]
OPERATIONS_MIN = 10
OF_GRPC = ("header_blocks", "blocks_of_small_headers", "endless_continuation")


@pytest.fixture(scope="module")
def flooded() -> Iterator[Flooded]:
    with LocalCluster(
        coordinators=1, nodes=3, setup=Setup(coordinator_flags=FLAGS), ports=Ports(metrics=True)
    ) as cluster:
        beside = Beside(cluster)
        yield Flooded(cluster, beside)
        beside.close()


@dataclass(frozen=True)
class Flooded:
    """A cluster, and a client that goes on beside all floods."""

    cluster: LocalCluster
    beside: Beside


def resident_bytes(pid: int | None) -> int:
    """Return a process's memory, but for that of files."""
    _, resident, of_files = map(int, Path(f"/proc/{pid}/statm").read_text().split()[:3])
    return (resident - of_files) * 4096


def _operations_a_second(beside: Beside) -> float:
    """Return the rate of a tenth of a second."""
    before, began = beside.operations, time.monotonic()
    time.sleep(0.1)
    return (beside.operations - before) / (time.monotonic() - began)


class Peak:
    """The most memory that a process had."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self.before = self.most = resident_bytes(pid)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopping.wait(0.01):
            self.most = max(self.most, resident_bytes(self._pid))

    def grown(self) -> int:
        """End, and return by how much it had grown."""
        self._stopping.set()
        self._thread.join()
        return self.most - self.before


@contextmanager
def watched(
    flooded: Flooded,
    member: str,
    growth_bytes_max: int = GROWTH_BYTES_MAX,
    operations_min: int = OPERATIONS_MIN,
) -> Iterator[None]:
    """See that within this time the member's memory stays in its bound, no process stops or is
    fenced, and a client beside is served.
    """
    watch, beside = Watch(flooded.cluster), flooded.beside
    watch.check()
    wait_until(lambda: _operations_a_second(beside) > OPERATIONS_MIN, "no flood goes on")
    before, peak = beside.operations, Peak(flooded.cluster.pid(member))
    yield
    grown, operations = peak.grown(), beside.operations - before
    print(f"grown by {grown / MIB:.0f} MiB, {operations} operations beside")
    assert not beside.failures, beside.failures[:3]
    assert operations >= operations_min
    assert grown < growth_bytes_max, f"{grown / MIB:.0f} MiB"
    watch.check()


def led_key(cluster: LocalCluster, node: str) -> str:
    with RespClient(cluster.redis_address(node)) as client:
        return next(
            key
            for key in (f"flood{number}" for number in range(1_000))
            if client.call("SET", key, "1") == b"OK"
        )


def flood(name: str, address: str, connections: int, seconds: float, key: str = "k") -> None:
    with flooding(name, address, connections, seconds, key) as process:
        assert process.wait() == 0


@contextmanager
def flooding(
    name: str, address: str, connections: int, seconds: float, key: str = "k"
) -> Iterator[subprocess.Popen[bytes]]:
    arguments = [name, address, str(connections), str(seconds), key]
    command = [sys.executable, "-m", "tests.integration.floods", *arguments]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


SHORT = ("sets_without_reading",)
REDIS = [
    name if name in SHORT else pytest.param(name, marks=pytest.mark.long)
    for name in ATTACKS
    if name not in OF_GRPC and name != "stranger_by_tls"
]


@pytest.mark.parametrize("name", REDIS)
def test_flood_at_the_redis_port_is_held_in_bounds(flooded: Flooded, name: str) -> None:
    cluster = flooded.cluster
    key, before = led_key(cluster, "n1"), _log_lines(cluster)
    with watched(flooded, "n1"):
        flood(name, cluster.redis_address("n1"), 40, SECONDS, key)
        held = scrape(cluster.metrics_address("n1")).sum("koinon_redis_held_bytes")
        assert held <= GROWTH_BYTES_MAX
    assert _log_lines(cluster) - before < 200


GRPC = [
    (name, member)
    if (name, member) == ("header_blocks", "c1")
    else pytest.param(name, member, marks=pytest.mark.long)
    for name in OF_GRPC
    for member in ("n1", "c1")
]


@pytest.mark.parametrize(("name", "member"), GRPC)
def test_flood_of_header_blocks_costs_no_lease_and_fills_no_log(
    flooded: Flooded, name: str, member: str
) -> None:
    cluster = flooded.cluster
    before = _log_lines(cluster)
    with watched(flooded, member, HEADERS_BYTES_MAX, operations_min=1):
        flood(name, cluster.address(member), 10, SECONDS)
    assert _log_lines(cluster) - before < 200


@pytest.mark.long
def test_strangers_by_tls_hold_their_share_and_no_more() -> None:
    with LocalCluster(
        coordinators=1, nodes=1, tls=True, setup=Setup(coordinator_flags=FLAGS)
    ) as cluster:
        watch, peak = Watch(cluster), Peak(cluster.pid("n1"))
        watch.check()
        log = cluster.log_path("n1")
        with flooding("stranger_by_tls", cluster.redis_address("n1"), 500, 120.0):
            wait_until(lambda: "they hold most" in log.read_text(), timeout_s=110.0)
            time.sleep(1.0)
        grown = peak.grown()
        assert grown < STRANGERS_BYTES + 64 * MIB, f"{grown / MIB:.0f} MiB"
        watch.check()


def _log_lines(cluster: LocalCluster) -> int:
    return len(cluster.log_path("n1").read_text(errors="replace").splitlines())
