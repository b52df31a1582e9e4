"""Processes that are neither dead nor alive: what they held goes to others, and comes back."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from functools import partial

import pytest

from koinon.client import Client
from koinon.local import LocalCluster, Setup
from koinon.operate.cluster_status import ClusterStatus
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeStatus
from tests.integration.standing import loop_stands_still
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until

KEYS = [b"key:%d" % number for number in range(64)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Each test waits until whom it has stopped is back."""
    with running_cluster(setup=Setup(coordinator_flags=("--partitions", "64"))) as made:
        try:
            with loop_stands_still(pid_of(made, "n1")):
                pass
        except OSError as error:
            if error.errno != errno.EPERM:
                raise
            pytest.skip("this machine lets nobody trace a process")
        yield made


def pid_of(cluster: LocalCluster, name: str) -> int:
    pid = cluster.pid(name)
    assert pid is not None
    return pid


def is_written(client: Client, value: bytes) -> bool:
    try:
        for key in KEYS:
            client.put(key, value, timeout_ms=1_000)
    except KoinonError:
        return False
    return True


def is_back(status: ClusterStatus, name: str) -> bool:
    """Tell whether the node is there again, and every copy is in sync."""
    assert status.table is not None
    node = next(n for n in status.table.nodes.values() if n.node_id == name)
    rows = status.table.rows
    return node.status is NodeStatus.ACTIVE and all(len(row.in_sync) == 3 for row in rows)


def test_node_whose_event_loop_hangs_is_led_by_others_and_comes_back(cluster: LocalCluster) -> None:
    with cluster.client() as client:
        wait_until(lambda: is_written(client, b"before"))
        with loop_stands_still(pid_of(cluster, "n1")):
            began = time.monotonic()
            wait_until(lambda: is_written(client, b"meanwhile"), "others lead")
            assert time.monotonic() - began > 1.0  # not by a stall that is legal
        assert client.get_many(KEYS) == [b"meanwhile"] * len(KEYS)
        cluster.wait_for(partial(is_back, name="n1"), timeout_s=90.0, what="n1 is back")
        wait_until(lambda: is_written(client, b"after"))
    assert "event loop does not turn: gives up its lease" in cluster.log_path("n1").read_text()


def test_coordinators_leader_whose_event_loop_hangs_is_replaced(cluster: LocalCluster) -> None:
    hung = cluster.leader()
    assert hung is not None
    with cluster.client() as client:
        with loop_stands_still(pid_of(cluster, hung)):
            wait_until(lambda: cluster.leader() not in (None, hung), "another leads")
            cluster.kill("n3")  # a fence needs a leader that can commit
            wait_until(lambda: is_written(client, b"meanwhile"), "others lead")
        cluster.restart("n3")
        cluster.wait_for(partial(is_back, name="n3"), timeout_s=90.0, what="n3 is back")
        wait_until(lambda: is_written(client, b"after"))
