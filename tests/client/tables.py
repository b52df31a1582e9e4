"""Tables and refusals for tests of the core."""

from __future__ import annotations

from koinon_proto.contract.errors import NotPrimaryError
from koinon_proto.contract.table import (
    ClusterConfig,
    NodeId,
    NodeInfo,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
    PartitionStatus,
    TableUpdate,
)

PARTITIONS = 16


def update(
    owners: dict[int, int] | None = None,
    *,
    version: int = 1,
    epoch: int = 1,
    nodes: int = 3,
    cluster_id: str = "one",
    base: int = 0,
) -> TableUpdate:
    """Return a table whose partition p belongs to node ``owners[p]``, else to p mod nodes + 1."""
    wanted = {p: p % nodes + 1 for p in range(PARTITIONS)} if not base else {}
    wanted |= owners or {}
    return TableUpdate(
        cluster=ClusterConfig(
            cluster_id=cluster_id,
            partitioner="murmur2",
            partition_count=PARTITIONS,
            replication_factor=1,
            min_in_sync=1,
            bootstrap_nodes=1,
            max_value_bytes=1000,
        ),
        base_version=base,
        table_version=version,
        nodes=tuple(node(n, version) for n in range(1, nodes + 1)),
        rows=tuple(
            PartitionRow(
                partition_id=PartitionId(p),
                replicas=(NodeNumber(owner),),
                in_sync=(NodeNumber(owner),),
                primary=NodeNumber(owner),
                primary_epoch=epoch,
                partition_epoch=epoch,
                status=PartitionStatus.ONLINE if owner else PartitionStatus.OFFLINE,
                changed_at=version,
            )
            for p, owner in wanted.items()
        ),
    )


def node(number: int, version: int) -> NodeInfo:
    return NodeInfo(
        number=NodeNumber(number),
        node_id=NodeId(f"n{number}"),
        address=f"host{number}:1",
        rack="",
        node_epoch=1,
        status=NodeStatus.ACTIVE,
        store_id=f"s{number}",
        changed_at=version,
    )


def not_primary(
    partition_id: int, owner: int = 2, *, epoch: int = 2, version: int = 2
) -> NotPrimaryError:
    return NotPrimaryError(
        partition_id=partition_id,
        primary=f"n{owner}" if owner else "",
        primary_address=f"host{owner}:1" if owner else "",
        primary_epoch=epoch,
        table_version=version,
    )
