"""The journal: the most recently written keys of all partitions, led or followed, in a bounded
ring.

It answers "which keys of this partition were written after this sequence?" without a scan, for a
follower that was away for a moment and for the tail of a deposed primary. It answers only if it has
all of them: not if entries were overwritten in the ring, or are older than this process. Keys are
entered before or when their records are queued.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from koinon_node.core.formats.records import NO_SEQUENCE, U32Array, U64Array

_NOBODY = np.uint32(2**32 - 1)
ROWS_MAX = 200_000


class RecentWrites:
    """A ring of the recently written keys. For partition p it is complete above ``floors[p]``: at
    first the copy's ``complete_through``, or NO_SEQUENCE for a copy with a dirty tail
    (``Copies.journal_floors``).

    At first a floor is what the copy is complete through; it is above all sequences where a copy
    has a dirty tail (``Copies.journal_floors``).
    """

    def __init__(self, floors: U64Array, rows_max: int = ROWS_MAX) -> None:
        self._floors = floors.copy()
        self._rows_max = rows_max
        # Three columns by slot of the ring: an entry's partition, sequence and key. Unused slots
        # take no memory yet.
        self._partitions = np.zeros(rows_max, np.uint32)
        self._sequences = np.zeros(rows_max, np.uint64)
        self._keys: list[bytes] = []  # of the slots below ``_used``
        self._next = 0  # the slot to be overwritten next
        self._used = 0  # the slots below this one have entries

    def append(self, partition_ids: U32Array, sequences: U64Array, keys: Sequence[bytes]) -> None:
        """Enter data keys with the sequences of their writes."""
        if len(keys) == 1:  # a single put: slices cost five times as much
            self._append_one(partition_ids.item(), sequences.item(), keys[0])
            return
        size = self._rows_max
        start = 0
        while start < len(keys):
            rows = min(len(keys) - start, size - self._next)
            place, part = slice(self._next, self._next + rows), slice(start, start + rows)
            self._forget(place)
            self._partitions[place] = partition_ids[part]
            self._sequences[place] = sequences[part]
            self._keys[place] = keys[part]
            self._used = max(self._used, self._next + rows)
            self._next = (self._next + rows) % size
            start += rows

    def _append_one(self, partition_id: int, sequence: int, key: bytes) -> None:
        place = self._next
        if place < self._used:
            before = self._partitions[place]
            if before != _NOBODY:
                self._floors[before] = max(self._floors[before], self._sequences[place])
            self._keys[place] = key
        else:
            self._keys.append(key)
            self._used += 1
        self._partitions[place], self._sequences[place] = partition_id, sequence
        self._next = (place + 1) % self._rows_max

    def _forget(self, place: slice) -> None:
        place = slice(place.start, min(place.stop, self._used))
        used = self._partitions[place] != _NOBODY
        if used.any():
            np.maximum.at(self._floors, self._partitions[place][used], self._sequences[place][used])

    def since(self, partition_id: int, after: int) -> list[bytes] | None:
        """Return the data keys of the partition written above ``after``, each once, sorted; None if
        some of them may be unknown.
        """
        if after < int(self._floors[partition_id]):
            return None
        used = self._used
        mine = self._partitions[:used] == partition_id
        rows = np.flatnonzero(mine & (self._sequences[:used] > after))
        return sorted({self._keys[row] for row in rows.tolist()})

    def above(
        self, partition_ids: U32Array, sequences: U64Array
    ) -> tuple[set[bytes], frozenset[int]]:
        """Return the data keys written in each of these partitions above its sequence, and the
        partitions of which some keys may be unknown.
        """
        known = sequences >= self._floors[partition_ids]
        bounds = np.full(len(self._floors), NO_SEQUENCE, np.uint64)
        bounds[partition_ids[known]] = sequences[known]
        used = np.flatnonzero(self._partitions[: self._used] != _NOBODY)
        rows = used[self._sequences[used] > bounds[self._partitions[used]]]
        keys = {self._keys[row] for row in rows.tolist()}
        return keys, frozenset(partition_ids[~known].tolist())

    def reset(self, partition_id: int, floor: int) -> None:
        """Drop the entries of a partition whose records were replaced by other means; it is covered
        above ``floor`` from now on.
        """
        entries = self._partitions[: self._used]
        entries[entries == partition_id] = _NOBODY
        self._floors[partition_id] = floor
