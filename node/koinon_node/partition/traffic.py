"""Counts clients' requests to the partitions led here: always, and by key while an operator asks.

Counters are columns by partition over the whole life of the process; for a rate, look
twice. One thread writes them, any may read them: an entry is never torn, and never decreases.
Batches are counted some at a time, since what a step over one costs is mostly getting at its code
and data: the event loop's thread sees all after ``flush``, others what was there a second ago.

Keys are sampled only while a ``KeySampler`` is there. It takes about every n-th row, n such that it
takes no more than some 20,000 rows a second, and keeps a bounded number of keys: of those that come
seldom it forgets all, of the others it counts too few by at most what it says.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from koinon_node.core.formats.records import BoolArray, U32Array
from koinon_proto.contract.errors import ResourceExhaustedError

I64Array = npt.NDArray[np.int64]

SAMPLERS_MAX = 4
KEYS_KEPT = 8_192
SLOT_S = 0.05
SLOT_ROWS = 1_000
_ALL_PARTITIONS = 65_536
_SIZED_ROWS = 16  # of a larger batch that is read
_TURN = 7_919  # a prime, so that the turn of every block comes
_FLUSH_ROWS = 16_384
_FLUSH_BATCHES = 64
_ONE = np.int64(1)


class RankBy(IntEnum):
    """The measures of heat; numbers are those of the wire."""

    ROWS = 0
    READS = 1
    WRITES = 2
    BYTES = 3


class Counts:
    """Rows and bytes (of keys and values) by partition id."""

    def __init__(self, reads: I64Array, writes: I64Array, read: I64Array, written: I64Array):
        self.reads = reads
        self.writes = writes
        self.read_bytes = read
        self.written_bytes = written

    def copy(self) -> Counts:
        """Return them as they are now."""
        columns = (self.reads, self.writes, self.read_bytes, self.written_bytes)
        return Counts(*(column.copy() for column in columns))

    def heat(self, by: RankBy) -> I64Array:
        """Return what partitions are ranked by."""
        if by is RankBy.READS:
            return self.reads
        if by is RankBy.WRITES:
            return self.writes
        if by is RankBy.BYTES:
            return self.read_bytes + self.written_bytes
        return self.reads + self.writes


_Read = tuple[U32Array, slice, int, list[int], list[int]]
"""A batch that was read: its partitions, one block of its rows, of how many, and the sizes of that
block's values and keys. They lie side by side in memory; each block's turn comes equally often, and
it stands for all. (A plain tuple: making a named one took longer than the rest.)
"""


class Traffic(Counts):
    """Counters since the process began. Only what was served as primary counts: rows that were
    refused do not, nor does what replicas send one another. The methods belong to one thread.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(*(np.zeros(_ALL_PARTITIONS, np.int64) for _ in range(4)))
        self._now = now
        self._began = now()
        self._turn = 0
        self.rows_read = self.rows_written = 0  # of all kinds, refused ones too
        self._read: list[_Read] = []
        self._written: list[tuple[U32Array, I64Array]] = []
        self._rows = 0  # of batches that are yet to be counted
        self._samplers: tuple[KeySampler, ...] = ()

    def elapsed_s(self) -> float:
        """Return for how long there has been counting."""
        return self._now() - self._began

    def count_read(self, partition_id: int, key: bytes, size: int) -> None:
        """Count a row that was read, with a value of so many bytes."""
        self.reads[partition_id] += _ONE
        self.read_bytes[partition_id] += np.int64(len(key) + size)
        if self._samplers:
            for sampler in self._samplers:
                sampler.reads.offer(np.array((partition_id,), np.uint32), (key,))

    def count_reads(
        self, partition_ids: U32Array, keys: Sequence[bytes], values: Sequence[bytes]
    ) -> None:
        """Rows were read, one a key. Of more than 16 at once, the sizes of some stand for all."""
        rows = len(keys)
        if rows == 1:
            p = partition_ids.item()
            self.reads[p] += _ONE
            self.read_bytes[p] += np.int64(len(keys[0]) + len(values[0]))
        elif rows:
            blocks = -(-rows // _SIZED_ROWS)
            self._turn += _TURN
            start = self._turn % blocks * _SIZED_ROWS
            some = slice(start, start + _SIZED_ROWS)
            sizes = list(map(len, values[some])), list(map(len, keys[some]))
            self._read.append((partition_ids, some, blocks, *sizes))
            self._queued(rows)
        for sampler in self._samplers:
            sampler.reads.offer(partition_ids, keys)

    def count_write(self, partition_id: int, key: bytes, size: int) -> None:
        """Count a row that was written, of so many bytes."""
        self.writes[partition_id] += _ONE
        self.written_bytes[partition_id] += np.int64(size)
        for sampler in self._samplers:
            sampler.writes.offer(np.array((partition_id,), np.uint32), (key,))

    def count_writes(self, partition_ids: U32Array, keys: Sequence[bytes], sizes: I64Array) -> None:
        """Rows were written or deleted, one a key, of these bytes."""
        if len(keys) == 1:
            p = partition_ids.item()
            self.writes[p] += _ONE
            self.written_bytes[p] += sizes[0]
        else:
            self._written.append((partition_ids, sizes))
            self._queued(len(keys))
        for sampler in self._samplers:
            sampler.writes.offer(partition_ids, keys)

    def count_scan(self, partition_id: int, rows: int, size: int) -> None:
        """A scan has read rows of the partition. Their keys are not sampled."""
        self.reads[partition_id] += np.int64(rows)
        self.read_bytes[partition_id] += np.int64(size)

    def count_merge(self, partition_id: int, rows: int, size: int) -> None:
        """A bulk load has written rows into the partition. Their keys are not sampled."""
        self.writes[partition_id] += np.int64(rows)
        self.written_bytes[partition_id] += np.int64(size)

    def _queued(self, rows: int) -> None:
        self._rows += rows
        if self._rows >= _FLUSH_ROWS or len(self._read) + len(self._written) >= _FLUSH_BATCHES:
            self.flush()

    def flush(self) -> None:
        """Count the batches that are yet to be counted."""
        read, written = self._read, self._written
        self._read, self._written, self._rows = [], [], 0
        if read:
            batches, some, blocks, of_values, of_keys = zip(*read, strict=True)
            np.add.at(self.reads, np.concatenate(batches).astype(np.intp), _ONE)
            sized = [ids[part] for ids, part in zip(batches, some, strict=True)]
            sizes = np.array([*itertools.chain.from_iterable(of_values)], np.int64)
            sizes += np.array([*itertools.chain.from_iterable(of_keys)], np.int64)
            sizes *= np.repeat(blocks, list(map(len, sized)))
            np.add.at(self.read_bytes, np.concatenate(sized).astype(np.intp), sizes)
        if written:
            whole = np.concatenate([ids for ids, _ in written]).astype(np.intp)
            np.add.at(self.writes, whole, _ONE)
            np.add.at(self.written_bytes, whole, np.concatenate([sizes for _, sizes in written]))

    @contextlib.contextmanager
    def sampling(self, wanted: Collection[int] = ()) -> Iterator[KeySampler]:
        """Sample keys of these partitions (none named: of all) while the context lasts.

        Raises:
            ResourceExhaustedError: SAMPLERS_MAX are at work.
        """
        if len(self._samplers) >= SAMPLERS_MAX:
            raise ResourceExhaustedError(resource="samplings under way", limit=SAMPLERS_MAX)
        sampler = KeySampler(wanted, self._now)
        self._samplers += (sampler,)
        try:
            yield sampler
        finally:
            self._samplers = tuple(s for s in self._samplers if s is not sampler)


def since(before: Counts, after: Counts) -> Counts:
    """Return what was counted in between."""
    return Counts(
        after.reads - before.reads,
        after.writes - before.writes,
        after.read_bytes - before.read_bytes,
        after.written_bytes - before.written_bytes,
    )


def hottest(heat: I64Array, wanted: Collection[int], partitions_max: int) -> list[int]:
    """Return the partitions with the most heat, the hottest first; only of ``wanted``, if any."""
    ids = np.array(sorted(wanted), np.int64) if wanted else np.flatnonzero(heat)
    ranked = ids[np.argsort(-heat[ids], kind="stable")]
    found: list[int] = ranked[:partitions_max].tolist()
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledKey:
    """A key, and about how many rows with it were read and written meanwhile."""

    partition_id: int
    key: bytes
    reads: int
    writes: int


class KeySampler:
    """Samples of the keys that are read and written."""

    def __init__(self, wanted: Collection[int], now: Callable[[], float]) -> None:
        mask: BoolArray | None = None
        if wanted:
            mask = np.zeros(_ALL_PARTITIONS, np.bool_)
            mask[list(wanted)] = True
        self.reads = KeyCounts(mask, now)
        self.writes = KeyCounts(mask, now)

    def hottest(self, partition_ids: Collection[int], keys_max: int) -> list[SampledKey]:
        """Return up to ``keys_max`` keys a partition by reads and as many by writes."""
        chosen: set[tuple[int, bytes]] = set()
        for side in (self.reads, self.writes):
            chosen |= side.hottest(frozenset(partition_ids), keys_max)
        return [
            SampledKey(
                partition_id=p,
                key=key,
                reads=self.reads.counts.get((p, key), 0),
                writes=self.writes.counts.get((p, key), 0),
            )
            for p, key in sorted(chosen)
        ]


class KeyCounts:
    """About how often each key came, by its partition: keyspaces may have the same keys. A row that
    is taken stands for all that were passed over.

    Keys are kept as by Misra and Gries ("Finding repeated elements", 1982), many at a time: when
    there are twice too many, what the one at the bound has is taken from all, and who has nothing
    left is forgotten.
    """

    def __init__(self, wanted: BoolArray | None, now: Callable[[], float]) -> None:
        self._wanted = wanted
        self._now = now
        self._random = random.Random()
        self._slot_end = 0.0
        self._slot_offered = 0
        self._every = 1
        self.counts: dict[tuple[int, bytes], int] = {}
        self.offered = 0  # rows of wanted partitions
        self.taken = 0
        self.missed_max = 0  # by so many may any count be too small

    def offer(self, partition_ids: U32Array, keys: Sequence[bytes]) -> None:
        """Take every n-th of these rows."""
        if self._wanted is not None:
            rows = np.flatnonzero(self._wanted[partition_ids]).tolist()
            if not rows:
                return
            if len(rows) < len(keys):
                keys = [keys[row] for row in rows]
                partition_ids = partition_ids[rows]
        every = self._pace(len(keys))
        if every > 1:
            some = slice(self._random.randrange(every), None, every)
            keys, partition_ids = keys[some], partition_ids[some]
        counts = self.counts
        for place in zip(partition_ids.tolist(), keys, strict=True):
            counts[place] = counts.get(place, 0) + every
        self.taken += len(keys)
        if len(counts) > 2 * KEYS_KEPT:
            self._forget()

    def _pace(self, rows: int) -> int:
        """Return n, by how many rows came in the slot before, and in this one so far."""
        self.offered += rows
        now = self._now()
        if now >= self._slot_end:
            self._every = -(-self._slot_offered // SLOT_ROWS)
            self._slot_offered, self._slot_end = 0, now + SLOT_S
        self._slot_offered += rows
        return max(1, self._every, -(-self._slot_offered // SLOT_ROWS))

    def _forget(self) -> None:
        bound = heapq.nlargest(KEYS_KEPT + 1, self.counts.values())[-1]
        self.missed_max += bound
        self.counts = {key: n - bound for key, n in self.counts.items() if n > bound}

    def hottest(self, partition_ids: frozenset[int], keys_max: int) -> set[tuple[int, bytes]]:
        """Return (partition, key) of those with the greatest counts in each partition."""
        by_partition: dict[int, list[tuple[int, bytes]]] = {p: [] for p in partition_ids}
        for place in self.counts:
            if place[0] in by_partition:
                by_partition[place[0]].append(place)
        return {
            place
            for held in by_partition.values()
            for place in heapq.nlargest(keys_max, held, key=self.counts.__getitem__)
        }
