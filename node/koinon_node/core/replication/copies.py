"""The copies of this store: what it durably holds of each partition, led here or not.

Invariants:
- ``complete_through[p]`` = S says: for every key of p, this copy holds what the lineage described
  by ``epochs[p].history`` held at S. It is stored in the same transaction as the records that make
  it true, and only ever counts what is durable.
- What an ``UNTRUSTED`` copy holds may have holes anywhere (rule 3): it is replaced by a snapshot
  before it counts again, unless it is the last that is left, and is made to lead.
- An ``UNUSABLE`` copy (a snapshot into it is under way, or its deletion) is no base for anything.
- ``DIRTY_TAIL``: records above ``complete_through`` may belong to another lineage; they are
  repaired before anything else is asked of the copy, unless it becomes the primary, whose tail is
  the truth.

State is held in columns over all partitions. The driver persists first, then changes it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag
from typing import NamedTuple

import numpy as np

from koinon_node.core.formats.records import NO_SEQUENCE, PartitionEpochs, U8Array, U64Array


class CopyState(IntFlag):
    """The faults of a copy; 0: none."""

    USABLE = 0
    UNUSABLE = 1
    DIRTY_TAIL = 2
    UNTRUSTED = 4


_NEVER_HERE = PartitionEpochs(primary_epoch=0)
NEEDS_SNAPSHOT = CopyState.UNUSABLE | CopyState.UNTRUSTED
STATES = tuple(map(CopyState, range(1 << len(CopyState))))
"""Each state by its number: to look one up is quicker than to make it, of thousands of copies."""


class Copy(NamedTuple):
    """One partition's copy, as read from the store."""

    complete_through: int
    purge_floor: int
    state: CopyState
    epochs: PartitionEpochs


class Copies:
    """One entry a partition; a partition that was never here is complete through 0."""

    def __init__(
        self,
        complete_through: U64Array,
        purge_floors: U64Array,
        states: U8Array,
        epochs: Mapping[int, PartitionEpochs],
    ) -> None:
        self.complete_through = complete_through
        self.purge_floors = purge_floors
        self.states = states
        self.epochs = dict(epochs)

    def epochs_of(self, partition_id: int) -> PartitionEpochs:
        return self.epochs.get(partition_id, _NEVER_HERE)

    def are_held(self, partition_ids: range) -> bool:
        """Return whether any of these is here, whole, in part, or half deleted."""
        span = slice(partition_ids.start, partition_ids.stop)
        return (
            bool(self.complete_through[span].any())
            or bool(self.states[span].any())
            or any(p in partition_ids for p in self.epochs)
        )

    def journal_floors(self) -> U64Array:
        """Return what a journal that begins now does not cover: all of a copy with a dirty tail."""
        dirty = (self.states & CopyState.DIRTY_TAIL) != 0
        return np.where(dirty, np.uint64(NO_SEQUENCE), self.complete_through)
