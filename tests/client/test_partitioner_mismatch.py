"""A client whose partitioner answers otherwise than the cluster's is refused before it asks a node
for anything, whichever interface it comes by.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import koinon
from koinon_proto.partitioner import partitioner
from tests.client.conftest import Connect
from tests.client.kit.fake_cluster import FakeCluster

OTHER = b"\x5a" * 32


def with_partitioner(cluster: FakeCluster, name: str, fingerprint: bytes) -> None:
    config = replace(cluster.table.cluster, partitioner=name, partitioner_fingerprint=fingerprint)
    cluster.table = cluster.served_table = replace(cluster.table, cluster=config)


@pytest.mark.parametrize("name", ["murmur2", "md5(until:2f)"])
def test_client_that_would_place_keys_otherwise_is_refused_with_both_fingerprints(
    cluster: FakeCluster, connect: Connect, name: str
) -> None:
    with_partitioner(cluster, name, OTHER)
    with pytest.raises(koinon.PartitionerMismatchError) as caught:
        connect(cluster.seeds, timeout_ms=5_000).put(b"k", b"v")
    assert caught.value.cluster_fingerprint == OTHER.hex()
    assert caught.value.own_fingerprint == partitioner(name, 8).fingerprint.hex()
    assert name in str(caught.value)
    assert cluster.applied == []


def test_scan_by_a_prefix_with_the_routing_bytes_is_one_call_in_key_order(
    cluster: FakeCluster, connect: Connect
) -> None:
    known = partitioner("murmur2(until:2f)", cluster.partitioner.partition_count)
    cluster.partitioner = known
    with_partitioner(cluster, known.name, known.fingerprint)
    keys = [b"city%d/%03d" % (city, n) for n in range(100) for city in range(3)]
    for node in cluster.nodes:
        node.page_rows_max = 1_000
    for key in reversed(keys):
        cluster.write(key, b"v", 0)
    client = connect(cluster.seeds)
    cluster.reset_counts()
    found = [entry.key for entry in client.scan(prefix=b"city1/")]
    assert found == [key for key in keys if key.startswith(b"city1/")]
    assert cluster.count("Scan") == 1
    descending = [entry.key for entry in client.scan(prefix=b"city1/0", reverse=True)]
    assert descending == found[::-1]
    assert cluster.count("Scan") == 2
    across = {entry.key for entry in client.scan(prefix=b"city")}
    assert across == set(keys)
    assert cluster.count("Scan") > 3


def test_client_that_does_not_know_the_router_is_refused(
    cluster: FakeCluster, connect: Connect
) -> None:
    with_partitioner(cluster, "murmur2(theirs:1)", OTHER)
    with pytest.raises(koinon.ConfigurationError, match=r"theirs:1.*koinon\.routers"):
        connect(cluster.seeds, timeout_ms=5_000).put(b"k", b"v")
    assert cluster.applied == []
