"""Tables and refusals for tests of the core."""

from __future__ import annotations

from koinon_proto.contract.errors import NotPrimaryError
from koinon_proto.contract.table import (
    NodeInfo,
    PartitionStatus,
    TableUpdate,
)
from tests.kit.tables import config_of, node_of, row_of

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
        cluster=config_of(PARTITIONS, cluster_id=cluster_id, max_value_bytes=1000),
        base_version=base,
        table_version=version,
        nodes=tuple(node(n, version) for n in range(1, nodes + 1)),
        rows=tuple(
            row_of(
                p,
                owner,
                primary_epoch=epoch,
                partition_epoch=epoch,
                status=PartitionStatus.ONLINE if owner else PartitionStatus.OFFLINE,
                changed_at=version,
            )
            for p, owner in wanted.items()
        ),
    )


def node(number: int, version: int) -> NodeInfo:
    return node_of(number, address=f"host{number}:1", changed_at=version)


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
