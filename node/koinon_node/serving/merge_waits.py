"""Has writes that look at what is there wait for the merge steps of bulk loads."""

from __future__ import annotations

import numpy as np

from koinon_node.core import records
from koinon_node.core.pending_writes import PendingWrites
from koinon_node.core.records import U32Array
from koinon_node.primary.replicator import Replicator


class MergeWaits:
    """The partitions that merge steps have claimed, and who waits for them."""

    def __init__(
        self, pending: PendingWrites, replicator: Replicator, partition_count: int
    ) -> None:
        self._pending = pending
        self._replicator = replicator
        self.waits = np.zeros(partition_count, np.int32)
        """The number of operations that wait for each partition; while any waits, no step is begun
        there.
        """

    async def released(self, partition_ids: U32Array) -> None:
        """Wait until no merge step is under way in these partitions: what they hold is not known
        here before. Whoever decides on it does so without a pause after this. (A write without
        conditions comes after the step in any case, in a later group.) While somebody ``waits``,
        no further step is begun there.
        """
        if not self._pending.claimed:
            return
        ids = np.unique(partition_ids)
        prefixes = {records.prefix_of(p) for p in ids.tolist()}
        self.waits[ids] += 1
        try:
            while groups := self._pending.claiming(prefixes):
                for group in groups:
                    await self._replicator.group_done(group, ids)
        finally:
            self.waits[ids] -= 1
