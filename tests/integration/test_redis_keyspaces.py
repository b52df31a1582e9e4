"""Clients of Redis Cluster in a keyspace of their own, on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from redis.cluster import RedisCluster

from koinon.local import LocalCluster
from koinon_proto.contract.table import PartitionStatus, Table
from tests.kit.addresses import free_addresses
from tests.kit.waiting import wait_until
from tests.node.kit.support import NodeProcess

KEYSPACE = "slots"
KEYS = 100


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, coordinators=1) as made:
        yield made


@pytest.fixture(scope="module")
def ports(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The ports of the keyspace on the two nodes of its pool."""
    addresses = free_addresses(2)
    with ExitStack() as nodes:
        for number, address in enumerate(addresses):
            node = NodeProcess(
                tmp_path_factory.mktemp("slots") / "data",
                cluster.coordinators,
                *("--pool", KEYSPACE, "--redis-listen", f"{KEYSPACE}={address}"),
                node_id=f"slots{number}",
            )
            nodes.callback(node.close)
        wait_until(lambda: len(table_of(cluster).nodes) == 3, "the nodes have registered")
        with cluster.admin() as admin:
            admin.keyspaces.create(
                KEYSPACE,
                partition_count=16,
                partitioner="crc16",
                replication_factor=2,
                pool=KEYSPACE,
            )
        wait_until(lambda: is_online(table_of(cluster)), "the keyspace is online")
        yield addresses


def table_of(cluster: LocalCluster) -> Table:
    table = cluster.status().table
    assert table is not None
    return table


def is_online(table: Table) -> bool:
    ids = table.keyspaces.named(KEYSPACE).partition_ids
    return all(table.rows[p].status is PartitionStatus.ONLINE for p in ids)


def test_client_of_redis_cluster_finds_the_keyspace_on_every_node_by_its_ports(
    cluster: LocalCluster, ports: list[str]
) -> None:
    host, _, port = ports[0].rpartition(":")
    with RedisCluster(host=host, port=int(port)) as guest, cluster.client() as own:
        assert sorted(f"{node.host}:{node.port}" for node in guest.get_nodes()) == sorted(ports)
        for n in range(KEYS):
            guest.set(f"k{n}", n)
        assert [guest.get(f"k{n}") for n in range(KEYS)] == [b"%d" % n for n in range(KEYS)]
        assert len(set(guest.scan_iter())) == KEYS
        slots = own.keyspace(KEYSPACE)
        assert slots.get(b"k7") == b"7"
        assert own.get(b"k7") is None
        slots.put(b"k7", b"ours")
        assert guest.get("k7") == b"ours"
