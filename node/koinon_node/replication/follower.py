"""The node as a follower: one stream to each primary of which it keeps copies.

Owns which streams there are and what they share; primary_stream.py has the life of one, catch_up.py
what a copy that is behind pulls, applier.py what is written. Rules that hold here are those of
catching up (11, 12, 14, 16), and the follower's half of taking over (4): it follows the newest
row's primary and no other node, and its own tail is repaired before it says where it stands.
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

_LOOK_S = 0.2  # between two looks at whether the disk hangs


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
        """Follow the newest table's rows. Work for a row that says something else has ended when
        this returns. No primary is followed under a registration that is not confirmed: what this
        node said that it holds would not be missed if its disk were set back.
        """
        context = self._context
        if self._leaves:  # its streams stand until the end, and nothing new is begun
            return
        if context.node_epoch != node_epoch or context.number != number:
            for link in self._links.values():  # each stream says for which registration it is
                link.stop()
            self._links.clear()
        context.table, context.number, context.node_epoch = table, number, node_epoch
        confirmed = node_epoch if context.state.confirmed(node_epoch) else 0
        wants = self._wanted.of(
            table, number, confirmed, lambda p: context.copies.epochs_of(p).primary_epoch
        )
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

    def leave(self) -> None:
        """Have all primaries put this node out, which is about to stop, and follow no other any
        more. Until they have, their writes are acknowledged.
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
        """Have all primaries put this node out at once while its disk hangs, idle partitions too:
        else the next write of each waits for it. Until cancelled.
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
        """Bytes of records that were pulled from primaries."""
        return self._context.bytes_pulled

    def stages(self) -> Counter[Stage]:
        """Return how many partitions that are followed stand where."""
        found: Counter[Stage] = Counter()
        for link in self._links.values():
            for (_, stage), count in link.following.index.counts.items():
                found[stage] += count
        return found

    def progress(self) -> list[Progress]:
        """Return how far replicas have come that are on their way and not in sync by the table."""
        following = (link.following for link in self._links.values())
        some = (one for one in following if one.index.has_some_not_in_sync)
        return reported(f for one in some for f in one.partitions.values())
