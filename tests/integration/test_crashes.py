"""kill -9 and SIGSTOP of every kind of process, under load: nothing acknowledged is ever lost.

The shared cluster keeps three replicas: when a node goes, others take over. What is different with
one replica, where a partition waits for its node, is tested on clusters of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from koinon.client import Client
from koinon.driver.rpc.channels import OPTIONS
from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus
from koinon_proto.contract import errors
from koinon_proto.contract.table import NO_NODE, NodeStatus, PartitionStatus, Table
from koinon_proto.partitioner import partitioner
from koinon_proto.server import rpc
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc
from tests.conftest import ClusterFactory
from tests.integration.copies import (
    assert_copies_are_identical,
    is_settled,
    number_of,
    table_of,
)
from tests.integration.rolling import restore_primaries
from tests.integration.workload import Workload
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until

RIDE_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 120.0
SILENT_S = 1.0


@pytest.fixture(autouse=True)
def whole(cluster: LocalCluster) -> Iterator[None]:
    """Every test leaves the shared cluster whole, each partition with the primary that it had."""
    yield
    for name in cluster.names:
        cluster.resume(name)
        if cluster.pid(name) is None:
            cluster.restart(name)
    cluster.wait_ready()
    wait_settled(cluster)
    with Admin(cluster.coordinators) as admin:
        restore_primaries(cluster, admin)


def wait_settled(cluster: LocalCluster) -> ClusterStatus:
    return cluster.wait_for(is_settled, timeout_s=SETTLE_TIMEOUT_S, what="all are in sync")


def partitions_of(table: Table, node_id: str) -> dict[int, int]:
    """The partitions whose primary the node is, each with its epoch."""
    number = number_of(table, node_id)
    return {r.partition_id: r.primary_epoch for r in table.rows if r.primary == number}


def wait_for_fence(cluster: LocalCluster, name: str, partitions: Iterable[int]) -> None:
    """Wait until the node is fenced, and others serve these partitions (or none can)."""

    def is_fenced(status: ClusterStatus) -> bool:
        table = table_of(status)
        number = number_of(table, name)
        return table.nodes[number].status is NodeStatus.FENCED and all(
            row.status is PartitionStatus.ONLINE
            if set(row.replicas) != {number}
            else row.status is PartitionStatus.OFFLINE and row.primary == NO_NODE
            for row in (table.rows[p] for p in partitions)
        )

    cluster.wait_for(
        lambda s: s.is_leader and is_fenced(s), timeout_s=RIDE_TIMEOUT_S, what=f"{name} is fenced"
    )


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
        with grpc.insecure_channel(node.address, OPTIONS) as channel:
            get: Any = kv_pb2_grpc.KeyValueStub(channel).Get
            request = kv_pb2.GetRequest(key=keys[number])
            wait_until(
                lambda get=get, request=request: isinstance(  # type: ignore[misc]
                    _refusal(get.future(request, timeout=5)), errors.LeaseExpiredError
                ),
                timeout_s=RIDE_TIMEOUT_S,
            )


def test_coordinators_killed_one_after_the_other_clients_see_no_error(
    make_cluster: ClusterFactory,
) -> None:
    """Leases are long: on a machine that does much else an election may outlast the usual ones."""
    flags = ["--lease-ms", "5000", "--session-timeout-ms", "8000"]
    cluster = make_cluster(coordinators=3, nodes=3, setup=Setup(coordinator_flags=flags))
    cluster.start()
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
    with cluster.client() as client:
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
            load.wait_for_progress()  # without it
        cluster.restart("n2")
        cluster.wait_ready()
        load.wait_for_progress()
    assert load.refused == {}
    assert len(load.unknown) < 10 * 200, "only what was in flight may be unknown"
    load.check(client)
    assert_copies_are_identical(wait_settled(cluster))


@pytest.fixture(scope="module")
def lone_copies() -> Iterator[LocalCluster]:
    """Two nodes, each with the only copies of what it leads."""
    with running_cluster(nodes=2, coordinators=1, setup=Setup(replication_factor=1)) as cluster:
        yield cluster


def test_node_with_the_only_replicas_is_waited_for(lone_copies: LocalCluster) -> None:
    mine = partitions_of(table_of(lone_copies.wait_ready()), "n2")
    with Workload(lone_copies, "one-replica") as load:
        load.wait_for_progress()
        lone_copies.kill("n2")
        wait_for_fence(lone_copies, "n2", mine)
        lone_copies.restart("n2")
        lone_copies.wait_ready()
        load.wait_for_progress()
    assert load.refused == {}
    with lone_copies.client() as client:
        load.check(client)


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.long)])
def test_everything_killed_at_once_has_every_acknowledged_write_afterwards(
    cluster: LocalCluster, rounds: int
) -> None:
    random_source = random.Random(7)
    before = cluster.wait_ready()
    for number in range(rounds):
        with Workload(cluster, f"everything-{rounds}-{number}") as load:
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
    """Others lead what it led, and have newer values, while it still believes that it leads."""
    with frozen(cluster, client, "n3") as (keys, calls):
        with cluster.client(timeout_ms=60_000) as newcomer:  # who knows only who leads now
            newcomer.put_many([(key, b"new") for key in keys]).raise_for_errors()
        cluster.resume("n3")
        for call in calls:
            assert isinstance(_refusal(call), errors.LeaseExpiredError | errors.NotPrimaryError)
    assert client.get_many(keys) == [b"new"] * len(keys)
    assert_copies_are_identical(wait_settled(cluster))


def test_frozen_node_with_the_only_replicas_serves_only_in_new_epochs(
    lone_copies: LocalCluster,
) -> None:
    lone_copies.wait_ready()
    with lone_copies.client() as client:
        before = partitions_of(client.table(), "n2")
        with frozen(lone_copies, client, "n2") as (keys, calls):
            with pytest.raises(errors.UnavailableError):
                client.get(keys[0], timeout_ms=500)
            lone_copies.resume("n2")
            refusal = _refusal(calls[0])
        assert isinstance(refusal, errors.LeaseExpiredError | errors.PartitionOfflineError)
        rows = table_of(lone_copies.wait_ready()).rows
        assert all(rows[partition].primary_epoch > epoch for partition, epoch in before.items())
        assert client.get_many(keys) == [b"old"] * len(keys)


@contextmanager
def frozen(
    cluster: LocalCluster, client: Client, name: str
) -> Iterator[tuple[list[bytes], list[Any]]]:
    """Freeze the node until it is fenced; yields keys that it led, and reads of them that wait in
    its socket.
    """
    mine = partitions_of(client.table(), name)
    keys = [b"frozen/%d" % n for n in range(60)]
    client.put_many([(key, b"old") for key in keys]).raise_for_errors()
    with grpc.insecure_channel(cluster.address(name), OPTIONS) as channel:
        stub: Any = kv_pb2_grpc.KeyValueStub(channel)
        owned = [key for key in keys if _serves(stub, key)]
        assert owned
        cluster.pause(name)
        wait_for_fence(cluster, name, mine)
        calls = [stub.Get.future(kv_pb2.GetRequest(key=key), timeout=120) for key in owned]
        with pytest.raises(grpc.RpcError) as unanswered:  # sent after the others: they are there
            stub.Get(kv_pb2.GetRequest(key=owned[0]), timeout=SILENT_S)
        assert unanswered.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        yield owned, calls


def _serves(stub: Any, key: bytes) -> bool:
    try:
        return bool(stub.Get(kv_pb2.GetRequest(key=key), timeout=5).found)
    except grpc.RpcError:
        return False


def _refusal(call: Any) -> errors.KoinonError | None:
    """The typed error that a call ended with; None if it was served."""
    failure = call.exception()
    return rpc.error_of(failure) if failure is not None else None
