"""The placement of partitions on nodes at bootstrap.

Goals: the primaries are spread evenly (counts within 1); the backups of one node's primaries are
spread over the other nodes, so that its load scatters when it dies; the replicas of a partition
are in distinct racks.

Constraints: every partition has exactly ``replication_factor`` distinct nodes; racks repeat only
where there are fewer racks than replicas. Pure and deterministic.

Algorithm (the rules of Kafka's replica placer): the nodes are put in one ring. With racks, the
ring alternates between them: one node of each rack in turn, racks and nodes in ascending order.
The first replica of partition ``p`` is the ring's node ``p mod n``, so first replicas go
round-robin. The others are at growing distances from the first; the distance begins at 1 and grows
by one (by one round of racks, with racks) at each full turn of the ring. A candidate in a rack that
the partition already has is skipped while another rack is still free, and so is a node that it
already has.

Worked example, 5 nodes without racks, 3 replicas:

    turn 0, shift 0:  p0 → 0,1,2   p1 → 1,2,3   p2 → 2,3,4   p3 → 3,4,0   p4 → 4,0,1
    turn 1, shift 1:  p5 → 0,2,3   p6 → 1,3,4   p7 → 2,4,0   p8 → 3,0,1   p9 → 4,1,2

Six nodes racked {0:r1, 1:r3, 2:r3, 3:r2, 4:r2, 5:r1} stand in the ring as 0,3,1,5,4,2 (r1, r2, r3,
r1, r2, r3): p0 → 0,3,1, p1 → 3,1,5, …, and p6, where the shift grows by the three racks, → 0,4,2.

Counts of all replicas (not only of first ones) are within 1 when the partition count is a multiple
of the node count and racks are of equal size; else a node may have up to ``replication_factor``
more than another. Unequal racks are filled unequally: distinct racks go first. Nodes' weights are
not looked at: a rebalance evens them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from koinon_proto.contract.errors import ConfigurationError

Node = TypeVar("Node", bound=int)


def place(
    racks: Mapping[Node, str],
    *,
    partition_count: int,
    replication_factor: int,
    start_index: int = 0,
    shift: int = 0,
) -> tuple[tuple[Node, ...], ...]:
    """Return the replicas of each partition, first = preferred primary.

    ``racks`` has the rack of every node ("" counts as a rack like any other).

    Raises:
        ConfigurationError: there are fewer nodes than replicas wanted, or a count below 1.
    """
    if partition_count < 1 or replication_factor < 1:
        raise ConfigurationError(
            reason=f"partition_count {partition_count} and replication_factor "
            f"{replication_factor} must both be at least 1"
        )
    if replication_factor > len(racks):
        raise ConfigurationError(
            reason=f"replication_factor {replication_factor} is above the number of nodes, "
            f"{len(racks)}"
        )
    ring = rack_alternated(racks)
    return tuple(
        _replicas(ring, racks, start_index + p, shift + p // len(ring), replication_factor)
        for p in range(partition_count)
    )


def rack_alternated(racks: Mapping[Node, str]) -> list[Node]:
    """Return the nodes in ring order: one of each rack in turn, while the racks last."""
    by_rack: dict[str, list[Node]] = {}
    for node in sorted(racks):
        by_rack.setdefault(racks[node], []).append(node)
    columns = [by_rack[rack] for rack in sorted(by_rack)]
    rounds = max((len(nodes) for nodes in columns), default=0)
    return [nodes[i] for i in range(rounds) for nodes in columns if i < len(nodes)]


def _replicas(
    ring: list[Node], racks: Mapping[Node, str], first: int, shift: int, count: int
) -> tuple[Node, ...]:
    size = len(ring)
    rack_count = len(set(racks.values()))
    chosen = [ring[first % size]]
    used_racks = {racks[chosen[0]]}
    step = shift * rack_count
    while len(chosen) < count:
        node = ring[(first + 1 + step % (size - 1)) % size]
        step += 1
        rack_is_free = racks[node] not in used_racks or len(used_racks) == rack_count
        if rack_is_free and node not in chosen:
            chosen.append(node)
            used_racks.add(racks[node])
    return tuple(chosen)
