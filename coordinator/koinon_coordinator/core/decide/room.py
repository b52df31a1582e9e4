"""The room of each node for replicas, and the bytes of each partition. Pure.

The facts are soft state of the leader: the last reports of nodes in heartbeats. A new leader knows
a node's facts with its first heartbeat. Sizes of partitions are estimates: nodes count their keys
and values in the background (``koinon_node.storage.sizes``), and a node's counts are scaled to the
used bytes of its store, so that indexes and half-filled pages count too.

Part of a node's map stays free. A plan fills at most ``PLAN_FILL_MAX``: an overwrite needs new
pages before the old ones are free, random keys leave pages half filled, the log in front of the
store must always find room in the store, and clients write while replicas are copied. Status warns
at about the same fill. A move may start up to ``START_FILL_MAX``: a plan that fits may exchange
replicas between nodes, and each node gets one before it loses another. On the disk as much stays
free as status demands of a disk that is not full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from koinon_coordinator.core.cluster.commands import Move
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.admin_requests import all_rows
from koinon_coordinator.core.decide.copy_progress import ProgressOf
from koinon_coordinator.core.planning.model import UNBOUNDED
from koinon_coordinator.core.planning.plan_builder import megabytes
from koinon_proto.contract.table import NodeNumber, PartitionId

PLAN_FILL_MAX = 0.85
START_FILL_MAX = 0.9
DISK_KEPT_SHARE = 0.05
DISK_KEPT_BYTES_MAX = 4 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUse:
    """A node's store and disk, in bytes, by its last heartbeat. ``map_bytes`` 0: the node reported
    no bound. ``counted`` are the bytes of keys and values by partition, ``counted_bytes`` their
    sum.
    """

    used_bytes: int = 0
    map_bytes: int = 0
    reusable_bytes: int = 0  # free inside the store's file: reused before the file grows
    disk_free_bytes: int = 0
    disk_bytes: int = 0  # 0: unknown
    counted: Mapping[int, int] = field(default_factory=dict)
    counted_bytes: int = 0

    def left(self, fill_max: float) -> tuple[int, str]:
        """Return the bytes that may be added until the map or the disk reaches its limit, and the
        name of that limit. ``fill_max``: the greatest share of the map that may be used.
        """
        if not self.map_bytes:
            return UNBOUNDED, ""
        by_map = int(fill_max * self.map_bytes) - self.used_bytes
        limit = f"{fill_max:.0%} of its --map-size-bytes, {megabytes(self.map_bytes)}"
        if not self.disk_bytes:
            return by_map, limit
        kept = min(int(DISK_KEPT_SHARE * self.disk_bytes), DISK_KEPT_BYTES_MAX)
        by_disk = self.disk_free_bytes + self.reusable_bytes - kept
        if by_disk < by_map:
            return by_disk, f"its disk has {megabytes(self.disk_free_bytes)} free"
        return by_map, limit


UseOf = Mapping[NodeNumber, NodeUse]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """A move that adds a replica to a node without room for it. In bytes."""

    node: NodeNumber
    needs_bytes: int
    has_bytes: int
    limit: str


class Room:
    """The nodes' room at one moment, from the state and the nodes' last reports."""

    def __init__(self, state: ClusterState, uses: UseOf, progress: ProgressOf) -> None:
        self._state = state
        self._uses = uses
        self.progress = progress

    def is_known(self, number: NodeNumber) -> bool:
        """Return whether this leader has a report of the node."""
        return number in self._uses

    def size(self, partition_id: PartitionId) -> int:
        """Return the estimated bytes of a replica of the partition in a store: the largest of the
        in-sync replicas, since nodes count at different times. Nodes that have counted nothing yet
        are used only if no other node has reported.
        """
        row = self._state.row(partition_id)
        if row is None:
            return 0
        heard = {n: self._uses[n] for n in row.in_sync or row.replicas if n in self._uses}
        counted = [
            int(use.counted.get(partition_id, 0) * max(1.0, use.used_bytes / use.counted_bytes))
            for use in heard.values()
            if use.counted_bytes
        ]
        averages = (use.used_bytes // max(1, self._replicas[n]) for n, use in heard.items())
        return max(counted or averages, default=0)

    @cached_property
    def for_plans(self) -> dict[NodeNumber, tuple[int, str]]:
        """Each reporting node's room after all moves, and the limiting bound."""
        coming = self._coming(self._state.moves.values())
        return {
            number: (left - coming[number], limit)
            for number, use in self._uses.items()
            for left, limit in (use.left(PLAN_FILL_MAX),)
        }

    def _coming(self, moves: Iterable[Move]) -> Counter[NodeNumber]:
        """Return the bytes that the moves add to each node, less the bytes that they remove."""
        coming: Counter[NodeNumber] = Counter()
        for move in moves:
            size = self.size(move.partition_id)
            for number in self._copied_to(move):
                coming[number] += self._still_to_come(move, number, size)
            for number in move.removed:
                coming[number] -= size
        return coming

    @cached_property
    def left_for_starts(self) -> dict[NodeNumber, int]:
        """Each reporting node's room for moves that start now, beside running moves. ``reserve``
        reduces it.
        """
        left = {number: use.left(START_FILL_MAX)[0] for number, use in self._uses.items()}
        for move in self._state.moves.values():
            if move.running:
                size = self.size(move.partition_id)
                for number in self._copied_to(move):
                    if number in left:
                        left[number] -= self._still_to_come(move, number, size)
        return left

    def reserve(self, move: Move) -> None:
        """Reserve the room of a queued move that starts now."""
        size = self.size(move.partition_id)
        for number in self._copied_to(move):
            if number in self.left_for_starts:
                self.left_for_starts[number] -= size

    def shortage(self, move: Move) -> Shortage | None:
        """Return the room that a queued or running move lacks, or None."""
        size = self.size(move.partition_id)
        for number in self._copied_to(move):
            use = self._uses.get(number)
            if use is None:
                continue
            if move.running:  # its room was reserved when it started
                needs = self._still_to_come(move, number, size)
                has, limit = use.left(1.0)
            else:
                needs, limit = size, use.left(START_FILL_MAX)[1]
                has = self.left_for_starts[number]
            if needs > has:
                return Shortage(node=number, needs_bytes=needs, has_bytes=max(0, has), limit=limit)
        return None

    def _copied_to(self, move: Move) -> Sequence[NodeNumber]:
        """Return the nodes that still copy the partition for the move, or will."""
        row = self._state.row(move.partition_id)
        if row is None:
            return []
        if move.running:
            return [n for n in row.adding if n not in row.in_sync]
        return move.added

    def _still_to_come(self, move: Move, number: NodeNumber, size: int) -> int:
        done = self.progress.get(number, {}).get(move.partition_id)
        return size if done is None else max(0, size - done.bytes)

    @cached_property
    def _replicas(self) -> Counter[NodeNumber]:
        return Counter(number for row in all_rows(self._state) for number in row.replicas)
