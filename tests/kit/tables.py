"""Tables of partitions, of plain values; what a test is about is given by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from koinon_proto.contract.table import (
    ClusterConfig,
    NodeId,
    NodeInfo,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
    PartitionStatus,
    Table,
)


def config_of(partitions: int, **fields: Any) -> ClusterConfig:
    """Return the configuration of a cluster with one copy of each partition."""
    given: dict[str, Any] = {
        "cluster_id": "c",
        "partitioner": "murmur2",
        "replication_factor": 1,
        "min_in_sync": 1,
        "bootstrap_nodes": 1,
        "max_value_bytes": 1 << 20,
    }
    return ClusterConfig(partition_count=partitions, **given | fields)


def node_of(number: int, **fields: Any) -> NodeInfo:
    """Return an active node n1, n2, …"""
    given: dict[str, Any] = {
        "node_id": NodeId(f"n{number}"),
        "address": f"127.0.0.1:{number}",
        "rack": "",
        "node_epoch": 1,
        "status": NodeStatus.ACTIVE,
        "store_id": f"s{number}",
        "changed_at": 1,
    }
    return NodeInfo(number=NodeNumber(number), **given | fields)


def row_of(partition_id: int, *replicas: int, **fields: Any) -> PartitionRow:
    """Return a served row; the replicas are in sync, and the first of them leads."""
    held = tuple(map(NodeNumber, replicas))
    given: dict[str, Any] = {
        "in_sync": held,
        "primary": held[0],
        "primary_epoch": 1,
        "partition_epoch": 1,
        "status": PartitionStatus.ONLINE,
        "changed_at": 1,
    }
    return PartitionRow(partition_id=PartitionId(partition_id), replicas=held, **given | fields)


def table_with(
    rows: Iterable[PartitionRow],
    nodes: Iterable[NodeInfo],
    *,
    version: int = 1,
    config: ClusterConfig | None = None,
    **fields: Any,
) -> Table:
    """Return a table; its configuration is ``config_of`` as many partitions if none is given."""
    listed: Sequence[PartitionRow] = tuple(rows)
    return Table(
        cluster=config or config_of(len(listed)),
        table_version=version,
        nodes={node.number: node for node in nodes},
        rows=tuple(listed),
        **fields,
    )
