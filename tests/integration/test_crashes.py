"""kill -9 and SIGSTOP of every kind of process, under load: nothing acknowledged is ever lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from koinon.admin import ClusterStatus
from koinon.client import Client
from koinon.local_cluster import LocalCluster
from koinon_proto import errors, rpc
from koinon_proto.table import PartitionStatus, Table
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc
from tests.integration.workload import Workload

RIDE_TIMEOUT_S = 30.0
FREEZE_S = 10.0


@pytest.fixture(autouse=True)
def whole(cluster: LocalCluster) -> Iterator[None]:
    """Every test leaves the shared cluster whole."""
    yield
    for name in cluster.names:
        cluster.resume(name)
        if cluster.pid(name) is None:
            cluster.restart(name)
    cluster.wait_ready()


def table_of(status: ClusterStatus) -> Table:
    assert status.table is not None
    return status.table


def node_epochs(status: ClusterStatus) -> dict[str, int]:
    return {node.node_id: node.node_epoch for node in table_of(status).nodes.values()}


def wait_for_leader(cluster: LocalCluster, *, other_than: str = "") -> ClusterStatus:
    return cluster.wait_for(
        lambda s: s.is_leader and s.member_id != other_than,
        timeout_s=RIDE_TIMEOUT_S,
        what="a coordinator leads",
    )


def bring_back(cluster: LocalCluster, name: str) -> None:
    """Restart a coordinator and wait until it counts again: else the next kill takes the quorum."""
    cluster.restart(name)
    cluster.wait_for(
        lambda s: s.is_leader and all(c.active or c.leader for c in s.coordinators),
        timeout_s=RIDE_TIMEOUT_S,
        what=f"{name} follows",
    )


def test_coordinators_killed_one_after_the_other_clients_see_no_error(
    cluster: LocalCluster, client: Client
) -> None:
    before = cluster.wait_ready()
    with Workload(cluster, "one-by-one") as load:
        load.wait_for_progress()
        for _ in range(2):
            leader = wait_for_leader(cluster).member_id
            cluster.kill(leader)
            wait_for_leader(cluster, other_than=leader)
            load.wait_for_progress()
            bring_back(cluster, leader)
        follower = next(n for n in cluster.coordinator_names if n != cluster.leader())
        cluster.kill(follower)
        load.wait_for_progress()
        bring_back(cluster, follower)
        status = cluster.wait_ready()
    assert load.errors == []
    load.check(client)
    assert node_epochs(status) == node_epochs(before), "a node was fenced"


def test_all_coordinators_killed_clients_wait_and_lose_nothing(
    cluster: LocalCluster, client: Client
) -> None:
    before = cluster.wait_ready()
    with Workload(cluster, "all-coordinators") as load:
        load.wait_for_progress()
        for name in cluster.coordinator_names:
            cluster.kill(name)
        time.sleep(before.session_timeout_ms / 1000)  # leases run out: the nodes stop serving
        for name in cluster.coordinator_names:
            cluster.restart(name)
        status = cluster.wait_ready()
        load.wait_for_progress()
    assert load.refused == {}
    load.check(client)
    assert table_of(status).cluster.cluster_id == table_of(before).cluster.cluster_id
    assert table_of(status).table_version >= table_of(before).table_version


@pytest.mark.parametrize("pause_s", [0.0, 2.0], ids=["at-once", "after-its-fence"])
def test_node_killed_under_load_rides_through_its_restart(
    cluster: LocalCluster, client: Client, pause_s: float
) -> None:
    with Workload(cluster, f"node-{pause_s}") as load:
        load.wait_for_progress()
        cluster.kill("n2")
        threading.Event().wait(pause_s)
        cluster.restart("n2")
        cluster.wait_ready()
        load.wait_for_progress()
    assert load.refused == {}
    assert len(load.unknown) < 10 * 200, "only what was in flight may be unknown"
    load.check(client)


def test_everything_killed_at_once_has_every_acknowledged_write_afterwards(
    cluster: LocalCluster,
) -> None:
    random_source = random.Random(7)
    before = cluster.wait_ready()
    for round_number in range(3):
        with Workload(cluster, f"everything-{round_number}") as load:
            load.wait_for_progress(random_source.randrange(50, 2000))
            for name in random_source.sample(cluster.names, len(cluster.names)):
                cluster.kill(name)
            for name in cluster.names:
                cluster.restart(name)
            status = cluster.wait_ready()
        with cluster.client() as client:
            load.check(client)
        assert table_of(status).cluster.cluster_id == table_of(before).cluster.cluster_id
        assert table_of(status).table_version >= table_of(before).table_version
        before = status


def test_frozen_node_resumed_serves_nothing_under_its_old_lease(
    cluster: LocalCluster, client: Client
) -> None:
    table = client.table()
    number = table.by_id["n3"].number  # type: ignore[index]
    mine = {row.partition_id: row.primary_epoch for row in table.rows if row.primary == number}
    keys = [b"frozen/%d" % n for n in range(60)]
    client.put_many([(key, b"old") for key in keys]).raise_for_errors()
    channel = grpc.insecure_channel(cluster.address("n3"), rpc.CHANNEL_OPTIONS)
    stub: Any = kv_pb2_grpc.KeyValueStub(channel)  # type: ignore[no-untyped-call]
    owned = [key for key in keys if _serves(stub, key)]
    assert owned
    frozen_at = time.monotonic()
    cluster.pause("n3")
    cluster.wait_for(lambda s: s.is_leader and _offline(s, mine), timeout_s=10, what="n3 is fenced")
    with pytest.raises(errors.UnavailableError):
        client.get(owned[0], timeout_ms=500)
    calls = [stub.Get.future(kv_pb2.GetRequest(key=key), timeout=30) for key in owned]
    threading.Event().wait(max(0.0, FREEZE_S - (time.monotonic() - frozen_at)))
    cluster.resume("n3")
    assert isinstance(_refusal(calls[0]), errors.LeaseExpiredError | errors.PartitionOfflineError)
    status = cluster.wait_ready()
    rows = table_of(status).rows
    assert all(rows[partition].primary_epoch > epoch for partition, epoch in mine.items())
    assert client.get_many(keys) == [b"old"] * len(keys)
    channel.close()


def _serves(stub: Any, key: bytes) -> bool:
    try:
        return bool(stub.Get(kv_pb2.GetRequest(key=key), timeout=5).found)
    except grpc.RpcError:
        return False


def _offline(status: ClusterStatus, partitions: dict[Any, int]) -> bool:
    rows = table_of(status).rows
    return all(rows[p].status is PartitionStatus.OFFLINE for p in partitions)


def _refusal(call: Any) -> errors.KoinonError | None:
    failure = call.exception()
    assert failure is not None, "the resumed node served under its old lease"
    return rpc.error_of(failure)
