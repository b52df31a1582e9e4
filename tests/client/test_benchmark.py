"""A benchmark of a cluster that fails meanwhile."""

from __future__ import annotations

import pytest

import koinon
from koinon.cli import benchmark
from koinon_proto.contract.errors import StorageFullError
from tests.client.kit.fake_cluster import FakeCluster


def test_error_in_a_thread_of_a_benchmark_ends_it(cluster: FakeCluster) -> None:
    refused = StorageFullError(node_id="n1", reason="full")
    for node in cluster.nodes:
        node.refuse = lambda _partition: refused
    with (
        koinon.connect(cluster.seeds, timeout_ms=20_000) as client,
        pytest.raises(StorageFullError),
    ):
        benchmark._threads(client, [b"a", b"b"], 60.0, 2)
