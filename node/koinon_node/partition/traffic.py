"""Counts clients' requests by partition, and by key while an operator samples.

Counters are columns by partition since the process began; a rate is the difference of two readings.
One thread writes them and any thread may read them: an entry is never torn, and never decreases.
Batches are counted several at a time, which costs less CPU. The event loop's thread sees exact
counters after ``flush``; other threads may see them a second late.

Keys are sampled only while a ``KeySampler`` exists. It samples every n-th row, with n such that it
takes at most about 20,000 rows a second, and keeps a bounded number of keys: it forgets rare keys,
and its count of a frequent key is too small by at most ``missed_max``.
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
_SIZED_ROWS = 16  # the rows of a larger read batch whose sizes are summed
_TURN = 7_919  # a prime step from block to block, so that every block is summed at times
_FLUSH_ROWS = 16_384
_FLUSH_BATCHES = 64
_ONE = np.int64(1)


class RankBy(IntEnum):
    """The measures of heat, with their numbers on the wire."""

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
        """Return a copy of the counters."""
        columns = (self.reads, self.writes, self.read_bytes, self.written_bytes)
        return Counts(*(column.copy() for column in columns))

    def heat(self, by: RankBy) -> I64Array:
        """Return the column of this measure."""
        if by is RankBy.READS:
            return self.reads
        if by is RankBy.WRITES:
            return self.writes
        if by is RankBy.BYTES:
            return self.read_bytes + self.written_bytes
        return self.reads + self.writes


_Read = tuple[U32Array, slice, int, list[int], list[int]]
"""A read batch: its partitions, one block of its rows, the number of blocks, and the sizes of the
block's values and keys. The block stands for the whole batch; every block is chosen equally often.
(A plain tuple, since creating a named one took longer than the rest.)
"""


class Traffic(Counts):
    """Counters since the process began. Only rows that this node served as primary count, not
    refused rows or replication. All methods belong to one thread.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(*(np.zeros(_ALL_PARTITIONS, np.int64) for _ in range(4)))
        self._now = now
        self._began = now()
        # Of the rows above, those that came with others: in a batch, a scan, a merge step. Each of
        # them costs a fraction of a row that came alone.
        self.joined_reads = np.zeros(_ALL_PARTITIONS, np.int64)
        self.joined_writes = np.zeros(_ALL_PARTITIONS, np.int64)
        self._turn = 0
        self.rows_read = self.rows_written = 0  # including refused rows
        self._read: list[_Read] = []
        self._written: list[tuple[U32Array, I64Array]] = []
        self._rows = 0  # of batches that wait to be counted
        self._samplers: tuple[KeySampler, ...] = ()

    def elapsed_s(self) -> float:
        """Return the seconds since counting began."""
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
        """Count rows that were read, one per key. Of more than 16 rows, a block of 16 gives the
        average size.
        """
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
        """Count rows that were written or deleted, one per key, with their bytes."""
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
        """Count rows that a scan read. Their keys are not sampled."""
        self.reads[partition_id] += np.int64(rows)
        self.joined_reads[partition_id] += np.int64(rows)
        self.read_bytes[partition_id] += np.int64(size)

    def count_merge(self, partition_id: int, rows: int, size: int) -> None:
        """Count rows that a bulk load wrote. Their keys are not sampled."""
        self.writes[partition_id] += np.int64(rows)
        self.joined_writes[partition_id] += np.int64(rows)
        self.written_bytes[partition_id] += np.int64(size)

    def _queued(self, rows: int) -> None:
        self._rows += rows
        if self._rows >= _FLUSH_ROWS or len(self._read) + len(self._written) >= _FLUSH_BATCHES:
            self.flush()

    def flush(self) -> None:
        """Count the waiting batches."""
        read, written = self._read, self._written
        self._read, self._written, self._rows = [], [], 0
        if read:
            batches, some, blocks, of_values, of_keys = zip(*read, strict=True)
            rows = np.concatenate(batches).astype(np.intp)
            np.add.at(self.reads, rows, _ONE)
            np.add.at(self.joined_reads, rows, _ONE)
            sized = [ids[part] for ids, part in zip(batches, some, strict=True)]
            sizes = np.array([*itertools.chain.from_iterable(of_values)], np.int64)
            sizes += np.array([*itertools.chain.from_iterable(of_keys)], np.int64)
            sizes *= np.repeat(blocks, list(map(len, sized)))
            np.add.at(self.read_bytes, np.concatenate(sized).astype(np.intp), sizes)
        if written:
            whole = np.concatenate([ids for ids, _ in written]).astype(np.intp)
            np.add.at(self.writes, whole, _ONE)
            np.add.at(self.joined_writes, whole, _ONE)
            np.add.at(self.written_bytes, whole, np.concatenate([sizes for _, sizes in written]))

    @contextlib.contextmanager
    def sampling(self, wanted: Collection[int] = ()) -> Iterator[KeySampler]:
        """Sample keys of the partitions ``wanted`` (empty: of all) while the context lasts.

        Raises:
            ResourceExhaustedError: SAMPLERS_MAX samplers exist.
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
    """Return the difference of two readings."""
    return Counts(
        after.reads - before.reads,
        after.writes - before.writes,
        after.read_bytes - before.read_bytes,
        after.written_bytes - before.written_bytes,
    )


def hottest(heat: I64Array, wanted: Collection[int], partitions_max: int) -> list[int]:
    """Return the partitions with the most heat, the hottest first; only of ``wanted`` unless that
    is empty.
    """
    ids = np.array(sorted(wanted), np.int64) if wanted else np.flatnonzero(heat)
    ranked = ids[np.argsort(-heat[ids], kind="stable")]
    found: list[int] = ranked[:partitions_max].tolist()
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledKey:
    """A key, with estimates of the rows that read and wrote it."""

    partition_id: int
    key: bytes
    reads: int
    writes: int


class KeySampler:
    """Samples of the keys in reads and writes."""

    def __init__(self, wanted: Collection[int], now: Callable[[], float]) -> None:
        mask: BoolArray | None = None
        if wanted:
            mask = np.zeros(_ALL_PARTITIONS, np.bool_)
            mask[list(wanted)] = True
        self.reads = KeyCounts(mask, now)
        self.writes = KeyCounts(mask, now)

    def hottest(self, partition_ids: Collection[int], keys_max: int) -> list[SampledKey]:
        """Return up to ``keys_max`` keys per partition by reads, and as many by writes."""
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
    """Estimates how often each (partition, key) came. A sampled row counts for the n - 1 rows that
    were skipped as well.

    The algorithm is by Misra and Gries ("Finding repeated elements", 1982), in batches: when there
    are twice too many keys, the count of the key at the bound is subtracted from all counts, and
    keys without a positive count are forgotten.
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
        self.missed_max = 0  # the most by which any count is too small

    def offer(self, partition_ids: U32Array, keys: Sequence[bytes]) -> None:
        """Sample every n-th of these rows."""
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
        """Return n, from the number of rows in the last time slot and in this one so far."""
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
        """Return the (partition, key) pairs with the greatest counts in each partition."""
        by_partition: dict[int, list[tuple[int, bytes]]] = {p: [] for p in partition_ids}
        for place in self.counts:
            if place[0] in by_partition:
                by_partition[place[0]].append(place)
        return {
            place
            for held in by_partition.values()
            for place in heapq.nlargest(keys_max, held, key=self.counts.__getitem__)
        }
