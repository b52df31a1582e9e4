"""The partition table as Redis Cluster's clients see it: slots, and the nodes that serve them.

Each node that leads partitions is a master; there are no replicas to see, since a node leads some
partitions and backs up others, for which clients of Redis have no word. A partition that no node
leads, or whose node does not speak the protocol in the keyspace, leaves its slots uncovered. Pure.
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
    """From ``first`` to ``last``, both included."""

    first: int
    last: int
    node: NodeInfo


def cluster_node_id(table: Table, node: NodeInfo) -> str:
    """Return the name of a node among clients of Redis: 40 hexadecimal digits."""
    name = f"{table.cluster.cluster_id}/{node.node_id}"
    return sha1(name.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Topology:
    """The slots of a keyspace whose partitioner is crc16, as one table gives them to nodes."""

    table: Table
    keyspace: Keyspace

    @cached_property
    def ranges(self) -> list[SlotRange]:
        """The slots that are served, ascending; neighbours of one node are one range."""
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
        """Return where the node serves clients of Redis in this keyspace; '': nowhere."""
        return node.redis_address_in(self.keyspace.name)

    @cached_property
    def ranges_of(self) -> dict[int, list[SlotRange]]:
        """The same by the number of the node; of nodes that serve none, too."""
        found: dict[int, list[SlotRange]] = {node.number: [] for node in self.nodes}
        for span in self.ranges:
            found.setdefault(span.node.number, []).append(span)
        return found

    @cached_property
    def nodes(self) -> list[NodeInfo]:
        """The members that speak the protocol in this keyspace."""
        return [
            node
            for node in self.table.nodes.values()
            if self.address_of(node) and node.status is not NodeStatus.LEFT
        ]

    @cached_property
    def covered(self) -> int:
        """The number of slots that are served."""
        return sum(span.last - span.first + 1 for span in self.ranges)

    @cached_property
    def epoch(self) -> int:
        """A number that rises with every change of what is served."""
        return self.table.table_version
