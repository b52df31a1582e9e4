"""Helpers that tests of the clients share."""

from __future__ import annotations

from typing import Any

import pytest

from koinon.core.retry import RetryPolicy
from koinon_proto.contract.errors import LeaseExpiredError
from tests.client.kit.fake_cluster import PARTITIONS, FakeCluster, FakeNode
from tests.client.kit.fake_resp import FakeResp

ONLY_GRPC = pytest.mark.parametrize("cluster", ["grpc"], indirect=True)
"""For tests of what is peculiar to gRPC."""
ONLY_RESP = pytest.mark.parametrize("cluster", ["resp"], indirect=True)
"""For tests of what is peculiar to RESP."""
ALL = range(PARTITIONS)
LEASE = LeaseExpiredError(node_id="n1")


def keys_of(cluster: FakeCluster, node: FakeNode, count: int = 1) -> list[bytes]:
    """Return keys whose partitions a node leads."""
    found = []
    for i in range(10_000):
        key = b"key%d" % i
        if cluster.table.rows[cluster.partitioner.partition_of(key)].primary == node.number:
            found.append(key)
            if len(found) == count:
                break
    return found


def resp_of(node: FakeNode) -> FakeResp:
    """Return the node's listener."""
    assert node.resp is not None
    return node.resp


def engine_of(client: Any) -> Any:
    return client.wrapped._connected if hasattr(client, "wrapped") else client._engine


class ThreeTimesMore(RetryPolicy):
    """Soon, three times; then past the deadline, so that no attempt is under way when it passes."""

    def backoff_s(self, attempt: int, *, changing_hands: bool = False) -> float:
        return 0.01 if attempt < 3 else 60.0
