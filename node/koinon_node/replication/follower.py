"""The node as a follower: one stream to each primary of which it keeps copies.

Owns the set of streams and their shared state. primary_stream.py runs one stream, catch_up.py pulls
records for a copy that is behind, applier.py writes them. The rules of catching up (11, 12, 14, 16)
hold here, and the follower's half of taking over (4): a copy follows the newest row's primary and
no other node, and repairs its own tail before it states its position.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import numpy as np

from koinon_node.config import Limits
from koinon_node.core.replication import replica_sync as core
from koinon_node.core.replication.copies import CopyState
from koinon_node.core.replication.openings import Progress, reported
from koinon_node.core.replication.replica_sync import Stage
from koinon_node.ports import Peers
from koinon_node.replication.applier import Applier
from koinon_node.replication.primary_stream import Link
from koinon_node.replication.stream_context import StreamContext
from koinon_node.replication.tombstone_purge import BackupPurge
from koinon_node.state import NodeState
from koinon_node.storage.index_sweeper import IndexSweeper
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_node.storage.writer import Writer
from koinon_proto.contract.table import NodeNumber, Table
from koinon_proto.process.rounds import next_round

_LOOK_S = 0.2  # between two checks whether the disk hangs


class Follower:
    """Keeps a stream to each primary that this node follows. For the event loop only."""

    def __init__(
        self,
        local: LocalReplicas,
        state: NodeState,
        writer: Writer,
        peers: Peers,
        limits: Limits,
        random: random.Random,
    ) -> None:
        self.applier = Applier(local, writer, limits)
        dirty = np.flatnonzero(local.copies.states & np.uint8(CopyState.DIRTY_TAIL))
        self._links: dict[NodeNumber, Link] = {}  # the streams, by primary
        self._context = StreamContext(
            state=state,
            store=local.store,
            applier=self.applier,
            copies=local.copies,
            journal=local.journal,
            peers=peers,
            links=self._links,
            group_bytes=limits.group_bytes,
            clock=state.monotonic,
            random=random,
            uncovered=set(dirty.tolist()),
        )
        self._purge = IndexSweeper(BackupPurge(self._context, writer).look)
        self._group: asyncio.TaskGroup | None = None  # of the streams; None before ``run``
        self._wanted = core.Wanted()
        self._disk = local.disk
        self._leaves = self._hangs = False  # the node is about to stop; its disk hung at last look

    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        """Follow the newest table's rows. Work for rows that have changed has ended when this
        returns. Without a confirmed registration this node follows no primary: if its disk had been
        set back, nobody would notice that it lacks records which it said to hold.
        """
        context = self._context
        if self._leaves:  # existing streams stay until the stop, and no new ones begin
            return
        if context.node_epoch != node_epoch or context.number != number:
            for link in self._links.values():  # a stream belongs to one registration
                link.stop()
            self._links.clear()
        context.table, context.number, context.node_epoch = table, number, node_epoch
        confirmed = node_epoch if context.state.confirmed(node_epoch) else 0
        wants = self._wanted.of(table, number, confirmed, context.copies)
        for primary, link in list(self._links.items()):
            node = table.nodes[primary] if primary in wants else None
            known = link.node
            if node is None or (node.address, node.node_epoch) != (known.address, known.node_epoch):
                link.stop()
                del self._links[primary]
        for primary, partitions in wants.items():
            if primary not in self._links:
                self._links[primary] = Link(context, table.nodes[primary])
                if self._hangs:
                    self._links[primary].leave()
                if self._group is not None:
                    self._links[primary].start(self._group)
            self._links[primary].update(partitions)
        context.changed.set()
        context.wake()

    def look_again(self) -> None:
        """Follow what may be followed now that a copy of the past is erased."""
        context = self._context
        if context.table is not None:
            self.on_table(context.table, context.number, context.node_epoch)

    def leave(self) -> None:
        """Ask all primaries to remove this node from in_sync, since it is about to stop, and open
        no more streams. It acknowledges their writes until they have done so.
        """
        self._leaves = True
        for link in self._links.values():
            link.leave()

    async def run(self) -> None:
        """Follow until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for link in self._links.values():
                    link.start(group)
                group.create_task(self._purge.run())
                group.create_task(self._leave_while_disk_hangs())
        finally:
            self._group = None

    async def _leave_while_disk_hangs(self) -> None:
        """While the disk hangs, ask all primaries at once to remove this node from in_sync, for
        idle partitions too: else the next write of each would wait for it. Runs until cancelled.
        """
        while True:
            await next_round(_LOOK_S)
            if self._hangs == self._disk.hangs or self._leaves:
                continue
            self._hangs = self._disk.hangs
            for link in self._links.values():
                if self._hangs:
                    link.leave()
                else:
                    link.stay()

    @property
    def bytes_pulled(self) -> int:
        """Bytes of records pulled from primaries since the start."""
        return self._context.bytes_pulled

    def stages(self) -> Counter[Stage]:
        """Return the number of followed partitions by stage."""
        found: Counter[Stage] = Counter()
        for link in self._links.values():
            for (_, stage), count in link.following.index.counts.items():
                found[stage] += count
        return found

    def progress(self) -> list[Progress]:
        """Return the progress of copies on their way that are not in sync by the table."""
        following = (link.following for link in self._links.values())
        some = (one for one in following if one.index.has_some_not_in_sync)
        return reported(f for one in some for f in one.partitions.values())
