"""The partition table in the form of Redis Cluster: slots, and the nodes that serve them.

Each node that leads partitions is a master. Replicas are not shown, since a node leads some
partitions and backs up others, which Redis Cluster cannot express. The slots of a partition without
a primary, or whose primary has no Redis port for the keyspace, are uncovered. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha1
from itertools import groupby
from typing import NamedTuple

from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import SLOT_COUNT, NodeInfo, NodeStatus, PartitionStatus, Table


class SlotRange(NamedTuple):
    """The slots from ``first`` to ``last``, both included, of one node."""

    first: int
    last: int
    node: NodeInfo


def cluster_node_id(table: Table, node: NodeInfo) -> str:
    """Return the id of a node for Redis clients: 40 hexadecimal digits."""
    name = f"{table.cluster.cluster_id}/{node.node_id}"
    return sha1(name.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Topology:
    """The slots of a keyspace with the partitioner crc16, by one table."""

    table: Table
    keyspace: Keyspace

    @cached_property
    def ranges(self) -> list[SlotRange]:
        """The ranges of served slots, ascending; adjacent slots of one node are one range."""
        return list(self._ranges())

    def _ranges(self) -> Iterator[SlotRange]:
        size = SLOT_COUNT // self.keyspace.partition_count
        owners = ((p, self._owner(p)) for p in self.keyspace.partition_ids)
        for number, run in groupby(owners, key=lambda owner: owner[1]):
            places = [p - self.keyspace.base for p, _ in run]
            if number is not None:
                first, last = places[0] * size, (places[-1] + 1) * size - 1
                yield SlotRange(first, last, self.table.nodes[number])

    def _owner(self, partition_id: int) -> int | None:
        row = self.table.rows[partition_id]
        primary = self.table.nodes.get(row.primary)
        if row.status is PartitionStatus.OFFLINE or primary is None or not self.address_of(primary):
            return None
        return primary.number

    def address_of(self, node: NodeInfo) -> str:
        """Return the node's address for Redis clients of this keyspace; '' if it has none."""
        return node.redis_address_in(self.keyspace.name)

    @cached_property
    def ranges_of(self) -> dict[int, list[SlotRange]]:
        """The ranges by node number, including nodes that serve no slot."""
        found: dict[int, list[SlotRange]] = {node.number: [] for node in self.nodes}
        for span in self.ranges:
            found.setdefault(span.node.number, []).append(span)
        return found

    @cached_property
    def nodes(self) -> list[NodeInfo]:
        """The members with a Redis address in this keyspace."""
        return [
            node
            for node in self.table.nodes.values()
            if self.address_of(node) and node.status is not NodeStatus.LEFT
        ]

    @cached_property
    def covered(self) -> int:
        """The number of served slots."""
        return sum(span.last - span.first + 1 for span in self.ranges)

    @cached_property
    def epoch(self) -> int:
        """A number that rises with every change of the slots."""
        return self.table.table_version
