"""Turns rows in any order into chunks of one partition each, sorted by key. Without network or
Spark.

Rows are buffered up to a limit of bytes, then hashed and sorted as one lot, and cut into chunks
lazily: while some chunks are in flight, the next are packed. A chunk
(``koinon_proto.contract.columns``) has up to ``CHUNK_BYTES``, unless a single row is larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from koinon.spark.encoding import arrays
from koinon.spark.encoding.arrays import I64Array, U64Array
from koinon.spark.writing.sorting import sort_rows
from koinon_proto.contract import arrow, columns
from koinon_proto.partitioner import Partitioner

CHUNK_BYTES: Final = 256 * 1024
GATHERED_BYTES: Final = 4 * 1024 * 1024
"""The limit of bytes whose rows are reordered at once."""
ROW_BYTES: Final = 16
"""The bytes of a row beside key and value: their lengths, and its order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Packed rows of one partition."""

    partition_id: int
    rows: int
    data: bytes


class Batcher:
    """Buffers rows and cuts chunks. ``rows_of`` counts all rows so far by partition id."""

    def __init__(self, partitioner: Partitioner, *, memory_bytes: int, expires_at_ms: int) -> None:
        self._partitioner = partitioner
        self._memory_bytes = memory_bytes
        self._expires_at_ms = expires_at_ms
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._orders: list[U64Array] = []
        self._expiries: list[U64Array] = []
        self._buffered = 0  # bytes, as encoded
        self.rows_of: I64Array = np.zeros(partitioner.partition_ids.stop, np.int64)
        self.bytes = 0
        """Bytes of keys and values so far."""

    @property
    def full(self) -> bool:
        """True when ``chunks`` must be called before more rows are added."""
        return self._buffered >= self._memory_bytes

    def add(
        self, keys: Any, values: Any, orders: U64Array | None, expiries: U64Array | None = None
    ) -> None:
        """Buffer rows: ``binary`` arrays without nulls. ``orders`` must be given in every call or
        in none, and so must ``expiries``.
        """
        if not len(keys):
            return
        size = int(arrays.lengths_of(keys).sum()) + int(arrays.lengths_of(values).sum())
        self._keys.append(keys)
        self._values.append(values)
        if orders is not None:
            self._orders.append(orders)
        if expiries is not None:
            self._expiries.append(expiries)
        self._buffered += size + ROW_BYTES * len(keys)
        self.bytes += size

    def chunks(self) -> Iterator[Chunk]:
        """Cut all buffered rows into chunks, in (partition, key) order, and empty the buffer."""
        if not self._keys:
            return
        keys, values = pa.concat_arrays(self._keys), pa.concat_arrays(self._values)
        orders = np.concatenate(self._orders) if self._orders else None
        expiries = np.concatenate(self._expiries) if self._expiries else None
        self._keys, self._values, self._orders, self._expiries = [], [], [], []
        self._buffered = 0
        partition_ids = self._partitioner.partitions_of_arrow(keys)
        rows_of = np.bincount(partition_ids, minlength=len(self.rows_of))
        self.rows_of += rows_of
        order = sort_rows(partition_ids, keys)
        sizes = (arrays.lengths_of(keys) + arrays.lengths_of(values))[order]
        cuts = _cut(sizes.astype(np.int64) + ROW_BYTES, rows_of)
        for first, last in _gather(cuts):
            yield from self._packed(keys, values, orders, expiries, order, cuts[first : last + 1])

    def _packed(
        self,
        keys: Any,
        values: Any,
        orders: U64Array | None,
        expiries: U64Array | None,
        order: I64Array,
        cuts: list[Cut],
    ) -> Iterator[Chunk]:
        """Reorder the rows of some cuts, and pack each cut."""
        start = cuts[0].start
        rows = order[start : cuts[-1].stop]
        taken = arrow.indices(rows)
        key_column, value_column = _Column(keys.take(taken)), _Column(values.take(taken))
        order_column = None if orders is None else orders[rows]
        expiry_column = None if expiries is None else expiries[rows]
        for cut in cuts:
            a, b = cut.start - start, cut.stop - start
            data = columns.pack(
                key_column.lengths[a:b],
                key_column.part(a, b),
                value_column.lengths[a:b],
                value_column.part(a, b),
                orders=None if order_column is None else order_column[a:b],
                expiries=None if expiry_column is None else expiry_column[a:b],
                expires_at_ms=self._expires_at_ms,
            )
            yield Chunk(partition_id=cut.partition_id, rows=b - a, data=data)


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows ``start`` to ``stop`` of the sorted lot, which form one chunk."""

    partition_id: int
    start: int
    stop: int
    size: int


class _Column:
    """A ``binary`` array, for access to parts of it."""

    def __init__(self, array: Any) -> None:
        self._offsets = arrays.offsets_of(array)
        self._data = arrays.bytes_of(array).data
        self.lengths: npt.NDArray[np.uint32] = np.diff(self._offsets).astype(np.uint32)

    def part(self, first: int, last: int) -> memoryview:
        return self._data[int(self._offsets[first]) : int(self._offsets[last])]


def _cut(sizes: I64Array, rows_of: npt.NDArray[np.intp]) -> list[Cut]:
    """Return the bounds of the chunks. ``sizes``: bytes of each row, in (partition, key) order."""
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    partition_ids = np.flatnonzero(rows_of)
    bounds = np.concatenate(([0], np.cumsum(rows_of[partition_ids])))
    cuts = []
    for partition_id, start, stop in zip(
        partition_ids.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True
    ):
        while start < stop:
            limit = ends[start] + CHUNK_BYTES
            end = stop
            if ends[stop] > limit:
                end = max(start + 1, int(np.searchsorted(ends, limit, side="right")) - 1)
            cuts.append(Cut(partition_id, start, end, int(ends[end] - ends[start])))
            start = end
    return cuts


def _gather(cuts: list[Cut]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last cut of each group that is reordered at once."""
    first, size = 0, 0
    for at, cut in enumerate(cuts):
        size += cut.size
        if size >= GATHERED_BYTES or at == len(cuts) - 1:
            yield first, at
            first, size = at + 1, 0
