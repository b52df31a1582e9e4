"""Copies of partitions on real processes: a node dies, one joins, one leaves; from the shell."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from koinon.client import Client
from koinon.local import LocalCluster, Setup
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.health import is_short, problems
from koinon_proto.contract.errors import KoinonError, UnknownFateError
from koinon_proto.partitioner import partitioner
from tests.kit.clusters import running_cluster
from tests.kit.forked import Forked
from tests.kit.waiting import wait_until

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL: dict[str, Any] = {
    "coordinators": 1,
    "setup": Setup(coordinator_flags=["--partitions", "64"]),
}
FAILOVER_S_MAX = 18.0  # of a busy machine; less than a call may take


def all_in_sync(status: ClusterStatus) -> bool:
    assert status.table is not None
    return status.ready and not any(map(is_short, status.table.rows))


@pytest.fixture
def admin(forked: Forked) -> Run:
    """Runs ``koinon admin ARGUMENTS`` of a cluster to its end."""

    def run(cluster: LocalCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
        return forked.koinon("admin", *arguments, "--coordinators", cluster.coordinators)

    return run


@contextmanager
def writing(client: Client) -> Iterator[dict[bytes, bytes]]:
    """Write single records inside the block; yields those that were acknowledged."""
    acknowledged: dict[bytes, bytes] = {}
    errors: list[KoinonError] = []
    stop = threading.Event()

    def run() -> None:
        number = 0
        while not stop.wait(0.002):
            number += 1
            key, value = b"live/%d" % number, b"value %d" % number
            try:
                client.put(key, value, timeout_ms=20_000)
                acknowledged[key] = value
            except UnknownFateError:
                pass
            except KoinonError as error:
                errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield acknowledged
    finally:
        stop.set()
        thread.join()
    assert not errors


def check(client: Client, rows: dict[bytes, bytes]) -> None:
    assert client.get_many(list(rows)) == list(rows.values())


def keys_of_each_partition(cluster: LocalCluster) -> dict[int, bytes]:
    status = cluster.status()
    assert status.table is not None
    config = status.table.cluster
    chosen = partitioner(config.partitioner, config.partition_count)
    found: dict[int, bytes] = {}
    number = 0
    while len(found) < config.partition_count:
        number += 1
        found.setdefault(chosen.partition_of(b"key%d" % number), b"key%d" % number)
    return found


def test_three_nodes_keep_three_copies_and_outlive_one_of_them(
    admin: Run,
) -> None:
    with running_cluster(**SMALL) as cluster, cluster.client(timeout_ms=20_000) as client:
        table = cluster.wait_for(all_in_sync, timeout_s=90, what="all in sync").table
        assert table is not None
        assert table.cluster.replication_factor == 3
        assert all(len(row.replicas) == 3 for row in table.rows)
        rows = {b"row%d" % n: b"%d" % n for n in range(5_000)}
        client.put_many(rows).raise_for_errors()
        keys = keys_of_each_partition(cluster)
        with writing(client) as acknowledged:
            cluster.kill("n2")
            killed_at = time.monotonic()
            for key in keys.values():
                client.put(key, b"again", retry_unknown=True)
            seconds = time.monotonic() - killed_at
            assert seconds < FAILOVER_S_MAX
            check(client, rows)
            assert any("n2" in problem for problem in problems(cluster.status()))
            cluster.restart("n2")
            cluster.wait_for(all_in_sync, timeout_s=120, what="n2 has caught up")
        check(client, acknowledged)
        verified = admin(cluster, "verify")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert "64 partitions identical in 192 copies" in verified.stdout


def test_fourth_node_joins_and_first_one_leaves_under_writes(
    admin: Run,
) -> None:
    with running_cluster(**SMALL) as cluster, cluster.client(timeout_ms=20_000) as client:
        rows = {b"row%d" % n: b"%d" % n for n in range(5_000)}
        client.put_many(rows).raise_for_errors()
        with writing(client) as acknowledged:
            name = cluster.add_node()
            cluster.wait_ready()
            nodes = json.loads(admin(cluster, "nodes", "--json").stdout)
            assert {n["id"]: n["replicas"] for n in nodes} == {
                "n1": 64,
                "n2": 64,
                "n3": 64,
                name: 0,
            }
            moved = admin(cluster, "rebalance", "--yes", "--wait")
            assert moved.returncode == 0, moved.stdout + moved.stderr
            nodes = json.loads(admin(cluster, "nodes", "--json").stdout)
            assert {n["replicas"] for n in nodes} == {48}
            drained = admin(cluster, "drain", "n1", "--yes", "--wait")
            assert drained.returncode == 0, drained.stdout + drained.stderr
            removed = admin(cluster, "remove", "n1", "--yes")
            assert removed.returncode == 0, removed.stderr
            cluster.remove_node("n1")
        check(client, rows)
        check(client, acknowledged)
        cluster.wait_for(all_in_sync, timeout_s=90, what="all in sync")
        verified = admin(cluster, "verify", "--json")
        assert verified.returncode == 0, verified.stderr
        assert json.loads(verified.stdout)["identical"] == 64
        wait_until(
            lambda: json.loads(admin(cluster, "status", "--json").stdout)["ok"], "all is well"
        )
