"""The parts of a node that reads, scans, writes and expiry share, and the bounds of all reads."""

from __future__ import annotations

import numpy as np

from koinon_node.config import Limits
from koinon_node.core.formats import records
from koinon_node.core.formats.records import U32Array
from koinon_node.core.writes.pending_writes import PendingWrites
from koinon_node.partition.batches import ReadAnswer
from koinon_node.partition.traffic import Traffic
from koinon_node.replication.replicator import Replicator
from koinon_node.state import NodeState
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_node.storage.writer import Writer
from koinon_proto.contract.errors import ResourceExhaustedError
from koinon_proto.server import admission


class ServingContext:
    """The store, the way of writes to disk and followers, and the counters of clients' requests."""

    def __init__(
        self,
        local: LocalReplicas,
        state: NodeState,
        writer: Writer,
        replicator: Replicator,
        limits: Limits,
    ) -> None:
        self.state = state
        self.store = local.store
        self.writer = writer
        self.replicator = replicator
        self.limits = limits
        self.clock = state.wall  # the Unix time by which records expire on this node
        self.pending = local.pending
        self.primaries = local.primaries
        self.traffic = Traffic()
        self.budget = ReadBudget(limits)
        self.claims = MergeWaits(self.pending, replicator, len(self.primaries.epochs))


class ReadBudget:
    """Bounds the rows being read, and the bytes of unfinished answers in memory, over all reads
    together. A read that runs alone may exceed both.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rows = 0
        self._bytes = 0

    def take_rows(self, count: int) -> None:
        """Count so many rows as being read, until they are released."""
        if self._rows and self._rows + count > self._limits.reading_rows:
            raise ResourceExhaustedError(
                resource="rows being read", limit=self._limits.reading_rows
            )
        self._rows += count

    def release(self, rows: int, size: int = 0) -> None:
        """Release the rows of a read that has ended, and the bytes of its answer."""
        self._rows -= rows
        self._bytes -= size

    def hold(self, answer: ReadAnswer, size: int) -> None:
        """Count the bytes of an unfinished answer against the bound of all answers."""
        others = self._bytes - answer.held_bytes
        self._bytes += size
        answer.held_bytes += size
        admission.hold(size)
        if others and self._bytes > self._limits.reading_bytes:
            raise ResourceExhaustedError(
                resource="bytes being read", limit=self._limits.reading_bytes
            )


class MergeWaits:
    """The operations that wait until merge steps of bulk loads release their partitions."""

    def __init__(
        self, pending: PendingWrites, replicator: Replicator, partition_count: int
    ) -> None:
        self._pending = pending
        self._replicator = replicator
        # The number of operations that wait for each partition. While any waits, the merge
        # scheduler begins no step there, so that the wait ends.
        self.waits = np.zeros(partition_count, np.int32)

    async def released(self, partition_ids: U32Array) -> None:
        """Wait until no merge step is under way in these partitions. During a step this process
        does not know the partition's records, so a caller that decides on a record decides right
        after this wait. (An unconditional write needs no wait: it joins a later group than the
        step.)

        Raises:
            UnavailableError: a step did not end in time.
        """
        if not self._pending.claimed:
            return
        ids = np.unique(partition_ids)
        prefixes = {records.prefix_of(p) for p in ids.tolist()}
        self.waits[ids] += 1
        try:
            while groups := self._pending.claiming(prefixes):
                await self._replicator.groups_done(groups, ids)
        finally:
            self.waits[ids] -= 1
