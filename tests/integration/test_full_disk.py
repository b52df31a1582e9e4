"""A full disk stops writes, not the node: it waits for room, whatever happens meanwhile.

The writer process gets a limit on the size of its files, which fails like a full disk.
"""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from koinon import StorageFullError
from koinon.client import Client
from koinon.local import LocalCluster
from koinon_proto.contract.errors import KoinonError
from tests.conftest import ClusterFactory
from tests.kit.waiting import wait_until

SMALL_BYTES = 64_000
VALUE = b"v" * 4_000


def writer_of(node_pid: int) -> int:
    """The pid of a node's writer process."""
    children = Path(f"/proc/{node_pid}/task").glob("*/children")
    pids = [int(pid) for listing in children for pid in listing.read_text().split()]
    (writer,) = [p for p in pids if b"writer_process" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return writer


def fill(client: Client) -> int:
    """Write until the disk is full; return how many rows were acknowledged."""
    rows = 0
    try:
        while True:
            client.put(b"fill:%d" % rows, VALUE)
            rows += 1
    except StorageFullError:
        return rows


def can_put(client: Client) -> bool:
    try:
        client.put(b"after", b"there is room", timeout_ms=1_000)
    except KoinonError:
        return False
    return True


@pytest.mark.parametrize("expiring", [False, True], ids=["fenced", "expiring"])
def test_node_with_a_full_disk_outlives_it_and_serves_again(
    make_cluster: ClusterFactory, expiring: bool
) -> None:
    cluster: LocalCluster = make_cluster(nodes=1, coordinators=1)
    cluster.start()
    cluster.wait_ready()
    with cluster.client() as client:
        if expiring:
            for row in range(100):
                client.put(b"expiring:%d" % row, VALUE, ttl_ms=300)
        data = cluster.member_dir("n1") / "data.mdb"
        node = cluster.pid("n1")
        assert node is not None
        writer = writer_of(node)
        unlimited = resource.prlimit(writer, resource.RLIMIT_FSIZE)
        limit = data.stat().st_size + SMALL_BYTES
        resource.prlimit(writer, resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        rows = fill(client)
        epoch = node_epoch(cluster)
        cluster.pause("n1")  # long enough to be fenced: it has to register and adopt without room
        wait_until(lambda: not any_online(cluster), "the node is fenced")
        cluster.resume("n1")
        wait_until(lambda: beyond(cluster, epoch), "the node has registered or waits for room")
        assert cluster.pid("n1") == node
        resource.prlimit(writer, resource.RLIMIT_FSIZE, unlimited)
        wait_until(lambda: can_put(client), "writes go on")
        assert client.get_many([b"fill:%d" % row for row in range(rows)]) == [VALUE] * rows
    assert cluster.pid("n1") == node


def node_epoch(cluster: LocalCluster) -> int:
    table = cluster.status().table
    assert table is not None
    return max(node.node_epoch for node in table.nodes.values())


def any_online(cluster: LocalCluster) -> bool:
    table = cluster.status().table
    return table is not None and any(row.primary for row in table.rows)


def beyond(cluster: LocalCluster, epoch: int) -> bool:
    """Tell whether the node got a new epoch, or says that it has no room to ask for one."""
    log = cluster.log_path("n1").read_text()
    return node_epoch(cluster) > epoch or "no room even for metadata" in log
