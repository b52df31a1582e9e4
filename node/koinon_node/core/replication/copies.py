"""The copies of partitions in this store: for each, how much it durably holds and its faults.

Invariants:
- ``complete_through[p]`` = S says: for every key of p, this copy holds what the lineage described
  by ``epochs[p].history`` held at S. It is stored in the same transaction as the records that make
  it true, and only ever counts what is durable.
- An ``UNTRUSTED`` copy may lack records anywhere (rule 3). A snapshot replaces it before it counts
  again, unless it is the last copy left and becomes the primary.
- An ``UNUSABLE`` copy is being replaced by a snapshot or deleted: nothing may be built on it.
- A copy of the past (``is_of_past``) holds rows of a keyspace that had the partition before the one
  that has it now, whatever its state is. It is erased before this node leads or follows.
- ``DIRTY_TAIL``: records above ``complete_through`` may belong to another lineage. They are
  repaired before the copy does anything else, unless the copy becomes the primary, whose tail is
  the lineage.

State is held in columns over all partitions. The driver persists first, then changes it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntFlag
from typing import NamedTuple

import numpy as np

from koinon_node.core.formats.records import NO_SEQUENCE, PartitionEpochs, U8Array, U64Array
from koinon_proto.contract.keyspaces import Keyspace, Keyspaces


class CopyState(IntFlag):
    """The faults of a copy, as flags; 0: no fault."""

    USABLE = 0
    UNUSABLE = 1
    DIRTY_TAIL = 2
    UNTRUSTED = 4


_NEVER_HERE = PartitionEpochs(primary_epoch=0)
NEEDS_SNAPSHOT = CopyState.UNUSABLE | CopyState.UNTRUSTED
STATES = tuple(map(CopyState, range(1 << len(CopyState))))
"""Each state by its number: looking one up is quicker than building it, for thousands of copies."""


class Copy(NamedTuple):
    """One partition's copy, as read from the store."""

    complete_through: int
    purge_floor: int
    state: CopyState
    epochs: PartitionEpochs


def is_of_past(epochs: PartitionEpochs, keyspace: Keyspace | None) -> bool:
    """Return whether a copy with these epochs is of a keyspace that had the partition before. The
    first row of a copy comes with an epoch, in one transaction; without one the copy is empty.
    """
    return keyspace is not None and 0 < epochs.primary_epoch < keyspace.first_epoch


class Copies:
    """The columns of all copies, with one entry per partition. A partition that was never held here
    is complete through 0.
    """

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
        """Return whether this store holds any part of any of these partitions."""
        span = slice(partition_ids.start, partition_ids.stop)
        return (
            bool(self.complete_through[span].any())
            or bool(self.states[span].any())
            or any(p in partition_ids for p in self.epochs)
        )

    def of_past(self, keyspaces: Keyspaces, partition_ids: Iterable[int]) -> list[int]:
        """Return those of the partitions whose copies here are of the past. A copy stays so until
        it is erased, whoever leads the partition.
        """
        return [p for p in partition_ids if is_of_past(self.epochs_of(p), keyspaces.of(p))]

    def journal_floors(self) -> U64Array:
        """Return for each partition the sequence from which a journal that begins now is complete.
        A copy with a dirty tail gets the greatest number: the journal says nothing of it.
        """
        dirty = (self.states & CopyState.DIRTY_TAIL) != 0
        return np.where(dirty, np.uint64(NO_SEQUENCE), self.complete_through)
