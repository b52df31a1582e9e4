"""Checks that a running cluster has lost nothing, and that its replicas hold the same."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import grpc

from koinon.driver.rpc.channels import OPTIONS
from koinon.local import LocalCluster
from koinon.operate.cluster_status import ClusterStatus
from koinon_proto.contract.table import NodeNumber, NodeStatus, Table
from koinon_proto.v1 import replication_pb2, replication_pb2_grpc
from tests.checkers.linearizability import check
from tests.checkers.load import RecordedLoad

TIMEOUT_S = 90.0
POLL_S = 0.1


def table_of(status: ClusterStatus) -> Table:
    assert status.table is not None
    return status.table


def number_of(table: Table, name: str) -> NodeNumber:
    """Return the number of the node with this id."""
    return next(n.number for n in table.nodes.values() if n.node_id == name)


def is_fenced(table: Table, name: str) -> bool:
    return table.nodes[number_of(table, name)].status is NodeStatus.FENCED


def held_by(table: Table, name: str) -> int:
    """Return of how many partitions the node is a replica."""
    return sum(number_of(table, name) in row.replicas for row in table.rows)


def led_by(table: Table, name: str) -> int:
    """Return of how many partitions the node is the primary."""
    return sum(row.primary == number_of(table, name) for row in table.rows)


def is_settled(status: ClusterStatus) -> bool:
    """Tell whether all partitions are served, all replicas are in sync, and none is to move."""
    return (
        status.is_leader
        and status.ready
        and all(
            set(row.in_sync) == set(row.replicas) and not row.adding and not row.removing
            for row in table_of(status).rows
        )
    )


def checksums(
    table: Table, partition_ids: Iterable[int] | None = None
) -> dict[int, dict[NodeNumber, replication_pb2.CopyChecksum]]:
    """Return, by partition and node, what each replica of each partition holds. ``partition_ids``:
    of these; None: of all.
    """
    asked = range(len(table.rows)) if partition_ids is None else partition_ids
    rows = [table.rows[partition_id] for partition_id in asked]
    found: dict[int, dict[NodeNumber, replication_pb2.CopyChecksum]] = {}
    for number, node in table.nodes.items():
        held = [row.partition_id for row in rows if number in row.replicas]
        if not held:
            continue
        with grpc.insecure_channel(node.address, options=OPTIONS) as channel:
            stub = replication_pb2_grpc.ReplicationStub(channel)
            request = replication_pb2.ChecksumsRequest(partition_ids=held)
            for copy in stub.Checksums(request, timeout=TIMEOUT_S).copies:
                found.setdefault(copy.partition_id, {})[number] = copy
    return found


def epochs(status: ClusterStatus) -> tuple[dict[str, int], list[int]]:
    """Return the nodes' epochs and the primaries', which change if somebody is fenced or deposed.
    Who is in sync may change: a follower that is starved for longer than the replica time-out is
    left out for a while.
    """
    table = table_of(status)
    nodes = {str(node.node_id): node.node_epoch for node in table.nodes.values()}
    return nodes, [row.primary_epoch for row in table.rows]


def differing(table: Table, partition_ids: Iterable[int] | None = None) -> list[int]:
    """Return the partitions of which two replicas are not the same."""
    return [
        partition_id
        for partition_id, copies in checksums(table, partition_ids).items()
        if len({(c.usable, c.complete_through, c.records, c.digest) for c in copies.values()}) > 1
    ]


def assert_copies_are_identical(status: ClusterStatus, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until each partition's replicas have been seen to be the same; fail if never.

    What differs is asked for again, and only that: replicas purge tombstones each for themselves,
    partition after partition, and looking at all of them takes longer than that goes on by.
    """
    assert status.table is not None
    deadline = time.monotonic() + timeout_s
    left: list[int] | None = None
    while left := differing(status.table, left):
        assert time.monotonic() < deadline, f"{len(left)} partitions differ: {left[:10]}"
        time.sleep(POLL_S)


def judge(cluster: LocalCluster, load: RecordedLoad, rows: Mapping[bytes, bytes] = {}) -> None:
    """Check that nothing acknowledged is lost, of the load and of these rows, that nothing stale
    was read, and that all replicas are the same.
    """
    status = cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="nothing is under way")
    with cluster.client() as client:
        assert load.lost(client) == []
        assert client.get_many(list(rows)) == list(rows.values())
    assert [str(v) for v in check(load.history)] == []
    assert_copies_are_identical(status)
