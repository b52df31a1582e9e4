"""kill -9 and SIGSTOP of every kind of process, under load: nothing acknowledged is ever lost."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import pytest

from koinon.admin import ClusterStatus
from koinon.client import Client
from koinon.local import LocalCluster
from koinon_proto import errors, rpc
from koinon_proto.partitioner import partitioner
from koinon_proto.table import PartitionStatus, Table
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc
from tests.client.helpers import wait_until
from tests.integration.workload import Workload

RIDE_TIMEOUT_S = 30.0
SILENT_S = 5.0


@pytest.fixture(autouse=True)
def whole(cluster: LocalCluster) -> Iterator[None]:
    """Every test leaves the shared cluster whole."""
    yield
    for name in cluster.names:
        cluster.resume(name)
        if cluster.pid(name) is None:
            cluster.restart(name)
    cluster.wait_ready()


def partitions_of(table: Table, node_id: str) -> dict[int, int]:
    """The partitions whose primary the node is, each with its epoch."""
    number = next(n.number for n in table.nodes.values() if n.node_id == node_id)
    return {r.partition_id: r.primary_epoch for r in table.rows if r.primary == number}


def wait_for_fence(cluster: LocalCluster, name: str, partitions: Iterable[int]) -> None:
    def is_fenced(status: ClusterStatus) -> bool:
        rows = table_of(status).rows
        return all(rows[p].status is PartitionStatus.OFFLINE for p in partitions)

    cluster.wait_for(
        lambda s: s.is_leader and is_fenced(s), timeout_s=RIDE_TIMEOUT_S, what=f"{name} is fenced"
    )


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


def wait_for_leases_to_end(table: Table) -> None:
    """Wait until every node refuses to serve what is its own."""
    part = partitioner(table.cluster.partitioner, table.cluster.partition_count)
    keys = {table.rows[part.partition_of(k)].primary: k for k in [b"%d" % n for n in range(100)]}
    for number, node in table.nodes.items():
        with grpc.insecure_channel(node.address, rpc.CHANNEL_OPTIONS) as channel:
            get: Any = kv_pb2_grpc.KeyValueStub(channel).Get  # type: ignore[no-untyped-call]
            request = kv_pb2.GetRequest(key=keys[number])
            wait_until(
                lambda get=get, request=request: isinstance(  # type: ignore[misc]
                    _refusal(get.future(request, timeout=5)), errors.LeaseExpiredError
                ),
                timeout_s=RIDE_TIMEOUT_S,
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
        wait_for_leases_to_end(table_of(before))
        for name in cluster.coordinator_names:
            cluster.restart(name)
        status = cluster.wait_ready()
        load.wait_for_progress()
    assert load.refused == {}
    load.check(client)
    assert table_of(status).cluster.cluster_id == table_of(before).cluster.cluster_id
    assert table_of(status).table_version >= table_of(before).table_version


@pytest.mark.parametrize("fenced", [False, True], ids=["at-once", "after-its-fence"])
def test_node_killed_under_load_rides_through_its_restart(
    cluster: LocalCluster, client: Client, fenced: bool
) -> None:
    mine = partitions_of(client.table(), "n2")
    with Workload(cluster, f"node-{fenced}") as load:
        load.wait_for_progress()
        cluster.kill("n2")
        if fenced:
            wait_for_fence(cluster, "n2", mine)
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
    mine = partitions_of(client.table(), "n3")
    keys = [b"frozen/%d" % n for n in range(60)]
    client.put_many([(key, b"old") for key in keys]).raise_for_errors()
    channel = grpc.insecure_channel(cluster.address("n3"), rpc.CHANNEL_OPTIONS)
    stub: Any = kv_pb2_grpc.KeyValueStub(channel)  # type: ignore[no-untyped-call]
    owned = [key for key in keys if _serves(stub, key)]
    assert owned
    cluster.pause("n3")
    wait_for_fence(cluster, "n3", mine)
    with pytest.raises(errors.UnavailableError):
        client.get(owned[0], timeout_ms=500)
    calls = [stub.Get.future(kv_pb2.GetRequest(key=key), timeout=30) for key in owned]
    with pytest.raises(grpc.RpcError) as unanswered:  # sent after the others: they are there, too
        stub.Get(kv_pb2.GetRequest(key=owned[0]), timeout=SILENT_S)
    assert unanswered.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
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


def _refusal(call: Any) -> errors.KoinonError | None:
    """The typed error that a call ended with; None if it was served."""
    failure = call.exception()
    return rpc.error_of(failure) if failure is not None else None
