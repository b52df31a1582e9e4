"""State that a follower's streams to all primaries share: limits of openings, passes and writes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from koinon_node.core.pacing import TokenBucket, page_bytes
from koinon_node.core.replication.copies import Copies
from koinon_node.core.replication.openings import SettledBound, choose_openings, on_the_way
from koinon_node.core.replication.replica_sync import Followed, Rank, ReplicaSync
from koinon_node.core.writes.recent_writes import RecentWrites
from koinon_node.ports import Peers
from koinon_node.replication.applier import Applier
from koinon_node.state import NodeState
from koinon_node.storage.store import Store
from koinon_proto.contract.table import NO_NODE, NodeInfo, NodeNumber, Table
from koinon_proto.contract.versions import NODE_PROTOCOL_VERSION
from koinon_proto.v1 import replication_pb2 as wire

PAGE_BYTES = 2 * 1024 * 1024
_PACE_STEP_S = 0.25  # the longest wait between two checks of the pace
_PASSES = {Rank.IN_SYNC: 16, Rank.SETTLED: 4, Rank.ADDING: 12}  # that may pull at once


class SupersededError(Exception):
    """This node does not follow the partition in this epoch any more."""


class OpensPartitions(Protocol):
    """The part of a stream to one primary that the streams to other primaries use."""

    node: NodeInfo  # the primary
    following: ReplicaSync  # the partitions followed there

    def wake(self) -> None:
        """Have the stream check again which partitions it may open."""


@dataclass(kw_only=True, eq=False)
class StreamContext:
    """The state shared by the streams to all primaries. ``Follower`` makes it."""

    state: NodeState
    store: Store
    applier: Applier
    copies: Copies
    journal: RecentWrites
    peers: Peers
    links: Mapping[NodeNumber, OpensPartitions]  # streams by primary, which Follower changes
    group_bytes: int  # the most kept-back rows that one transaction stores
    clock: Callable[[], float]
    random: random.Random
    table: Table | None = None  # the newest; this and the next two are set by Follower.on_table
    number: NodeNumber = NO_NODE  # this node's
    node_epoch: int = 0  # this node's; 0: not registered
    tail_epochs: dict[int, int] = field(default_factory=dict)  # partition -> epoch of its tail
    uncovered: set[int] = field(default_factory=set)  # partitions whose journal is incomplete
    bucket: TokenBucket = field(default_factory=TokenBucket)  # paces copies that moves add
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set with each table
    passes: dict[Rank, asyncio.Semaphore] = field(
        default_factory=lambda: {rank: asyncio.Semaphore(n) for rank, n in _PASSES.items()}
    )
    settled_bound: SettledBound = field(default_factory=SettledBound)
    logged_full_at: float = float("-inf")  # when a full store was logged last
    bytes_pulled: int = 0  # since the start

    @property
    def cluster_id(self) -> str:
        return self.table.cluster.cluster_id if self.table is not None else ""

    def hello(self, primary: NodeNumber) -> wire.FollowHello:
        """Build the first message of a stream to that primary."""
        return wire.FollowHello(
            protocol_version=NODE_PROTOCOL_VERSION,
            cluster_id=self.cluster_id,
            node_number=self.number,
            node_epoch=self.node_epoch,
            to_node_number=primary,
            registration_id=self.state.registration_id,
        )

    def openings(self, link: OpensPartitions) -> list[Followed]:
        """Return the partitions that the stream may open now."""
        counts = on_the_way(other.following for other in self.links.values())
        paused = self.table is not None and self.table.moves.paused
        return choose_openings(
            link.following,
            counts,
            self.clock(),
            settled_most=self.settled_bound.most,
            paused=paused,
        )

    def wake(self) -> None:
        """Have all streams check again which partitions they may open."""
        for link in self.links.values():
            link.wake()

    def current(self, partition_id: int, primary: NodeNumber, primary_epoch: int) -> bool:
        """Return whether the newest row makes this node a follower of that primary and epoch."""
        served = self.state.served
        table = served.table
        if served.node_epoch != self.node_epoch or table is None:
            return False
        if table is self.table:
            return True
        row = table.rows[partition_id]
        return row.primary == primary and row.primary_epoch == primary_epoch

    async def allow_page(self, followed: Followed) -> int:
        """Wait until the copy may pull its next page; return the page's size in bytes. Copies that
        a move adds are paced, and may be paused.
        """
        while followed.want.rank is Rank.ADDING and self.table is not None:
            moves = self.table.moves
            if moves.paused:
                self.changed.clear()
                await self.changed.wait()
                continue
            wait_s = self.bucket.wait_s(moves.bytes_per_second, self.clock())
            if not wait_s:
                size = page_bytes(moves.bytes_per_second, PAGE_BYTES)
                self.bucket.spend(size)
                return size
            await asyncio.sleep(min(wait_s, _PACE_STEP_S))
        return PAGE_BYTES

    def spend(self, followed: Followed, size: int) -> None:
        if followed.want.rank is Rank.ADDING:
            self.bucket.spend(size)
