"""Garbage, floods and full load: refused in bounds, and no failover by mistake."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from koinon.client import Client
from koinon.driver.rpc.channels import OPTIONS
from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon_proto.contract import convert, errors
from koinon_proto.server import rpc
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc
from tests.conftest import ClusterFactory
from tests.integration.copies import epochs, is_settled
from tests.integration.rolling import PATIENT, restore_primaries
from tests.integration.workload import Workload

CONNECTIONS = 3_000
GARBAGE = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00" * 64,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff",
)
BURN_S = 6.0  # longer than a session
FLOOD_BATCHES = 12
FLOOD_ROWS = 60_000
REFUSED_WITHIN_S = 45.0  # less than a call may take
SETTLE_TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def primaries_return(cluster: LocalCluster) -> Iterator[None]:
    """Every test leaves the shared cluster as it was."""
    yield
    with Admin(cluster.coordinators) as admin:
        restore_primaries(cluster, admin)


@contextmanager
def strangers(addresses: list[str], count: int) -> Iterator[list[socket.socket]]:
    """Open connections that never speak the protocol: silent ones, and ones that send rubbish."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened: list[socket.socket] = []
    try:
        for number in range(min(count, hard // 2)):
            host, _, port = addresses[number % len(addresses)].rpartition(":")
            stranger = socket.create_connection((host, int(port)), timeout=10)
            opened.append(stranger)
            try:
                stranger.sendall(GARBAGE[number // len(addresses) % len(GARBAGE)])
            except OSError:
                continue  # the server has closed it already
        yield opened
    finally:
        for stranger in opened:
            stranger.close()


def test_thousands_of_strangers_leave_the_servers_serving(
    cluster: LocalCluster, client: Client
) -> None:
    before = cluster.wait_for(is_settled, timeout_s=SETTLE_TIMEOUT_S, what="nothing is under way")
    targets = [cluster.address("n1"), cluster.address(cluster.leader() or "c1")]
    with strangers(targets, CONNECTIONS):
        rows = [(b"strangers/%d" % n, b"v") for n in range(1000)]
        client.put_many(rows, timeout_ms=60_000).raise_for_errors()
        with cluster.client(timeout_ms=60_000) as newcomer:
            assert newcomer.get_many([key for key, _ in rows]) == [b"v"] * len(rows)
        after = cluster.status()
    assert epochs(after) == epochs(before)


@contextmanager
def stalled_disk(cluster: LocalCluster, name: str) -> Iterator[None]:
    """Freeze the node's writer process: to the node, a disk that does not answer."""
    pid = cluster.pid(name)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    writers = [int(c) for c in children if b"writer_process" in _command_line(c)]
    assert len(writers) == 1
    os.kill(writers[0], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(writers[0], signal.SIGCONT)


def _command_line(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_flood_of_writes_is_refused_at_once_and_what_was_taken_is_written(
    make_cluster: ClusterFactory,
) -> None:
    """Without a log: that would take the first 400,000 rows, whatever the store does."""
    cluster = make_cluster(
        nodes=1,
        coordinators=1,
        setup=Setup(node_flags=["--write-ahead-log", "off"], coordinator_flags=PATIENT),
    )
    cluster.start()
    cluster.wait_ready()
    with cluster.client() as client:
        flood(cluster, client)


def flood(cluster: LocalCluster, client: Client) -> None:
    requests = _flood_requests(client)
    channel = grpc.insecure_channel(cluster.address("n1"), OPTIONS)
    stub: Any = kv_pb2_grpc.KeyValueStub(channel)
    with stalled_disk(cluster, "n1"):
        calls = [stub.BatchWrite.future(request, timeout=120) for request in requests]
        began = time.monotonic()
        refusals = 0
        while refusals < FLOOD_BATCHES // 3:
            assert time.monotonic() - began < REFUSED_WITHIN_S
            refusals = sum(call.done() for call in calls)
            time.sleep(0.01)
        assert {_kind(call) for call in calls if call.done()} == {"resource_exhausted"}
        client.get(b"reads go on", timeout_ms=30_000)
    kinds = [_kind(call) for call in calls]
    assert set(kinds) == {"ok", "resource_exhausted"}
    client.put(b"after the flood", b"served", timeout_ms=60_000)
    channel.close()


def _flood_requests(client: Client) -> list[kv_pb2.BatchWriteRequest]:
    """Batches for n1 that are together far more than it takes at once."""
    table = client.table()
    number = table.by_id["n1"].number  # type: ignore[index]
    mine = [row.partition_id for row in table.rows if row.primary == number]
    partitioner = client._engine.routing().partitioner
    keys = [b"flood/%d" % n for n in range(FLOOD_ROWS * 4)]
    partitions = partitioner.partitions_of(keys).tolist()
    wanted = set(mine)
    rows = [(k, p) for k, p in zip(keys, partitions, strict=True) if p in wanted][:FLOOD_ROWS]
    request = kv_pb2.BatchWriteRequest(
        table_version=table.table_version,
        keys=[key for key, _ in rows],
        values=[b"v"] * len(rows),
        partition_ids=[partition for _, partition in rows],
    )
    return [request] * FLOOD_BATCHES


def _kind(call: Any) -> str:
    failure = call.exception()
    if failure is None:
        refusals = call.result().refusals
        return str(refusals[0].error.WhichOneof("kind")) if refusals else "ok"
    error = rpc.error_of(failure)
    assert isinstance(error, errors.KoinonError), failure
    return str(convert.error_to_proto(error).WhichOneof("kind"))


@pytest.mark.timeout(180)
def test_full_load_fences_no_node_and_elects_nobody(cluster: LocalCluster, client: Client) -> None:
    before = cluster.wait_for(is_settled, timeout_s=SETTLE_TIMEOUT_S, what="nothing is under way")
    burner = f"import time\nend = time.monotonic() + {BURN_S}\nwhile time.monotonic() < end: pass"
    burners = [subprocess.Popen([sys.executable, "-c", burner]) for _ in range(2)]
    value = b"x" * 200
    rows = 0
    deadline = time.monotonic() + BURN_S
    with Workload(cluster, "burn") as load:
        while time.monotonic() < deadline:
            batch = [(b"burn/%d" % n, value) for n in range(20_000)]
            client.put_many(batch, timeout_ms=30_000).raise_for_errors()
            rows += len(batch)
    for process in burners:
        process.wait(timeout=30)
    after = cluster.status()
    assert rows > 0
    assert load.errors == []
    assert after.term == before.term, "an election happened by mistake"
    assert epochs(after) == epochs(before), "a node was fenced, or a primary replaced, by mistake"
    cluster.wait_for(is_settled, timeout_s=SETTLE_TIMEOUT_S, what="who was late is in sync again")
