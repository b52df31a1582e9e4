"""Sorts rows in (partition, key) order, mostly without comparing whole keys.

Each row gets a number built from the partition and the key's bytes, most significant first. A byte
column takes as few bits as its range in this lot needs (none where all keys agree, as in common
prefixes), while 64 bits have room. Sorting these numbers sorts the rows; only rows with equal
numbers are sorted again, by whole keys. Rows with equal keys keep their order.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from koinon.spark.encoding import arrays
from koinon.spark.encoding.arrays import I64Array, U8Array, U64Array

BYTES_LOOKED_AT: Final = 64
"""The bytes of a key, after the common prefix, that numbers are built from; rows that agree in all
of them are compared by whole keys.
"""


def sort_rows(partition_ids: npt.NDArray[np.uint32], keys: Any) -> I64Array:
    """Return the row numbers in (partition, key, row) order. ``keys``: a ``binary`` array."""
    rows = len(partition_ids)
    if rows < 2:
        return np.arange(rows, dtype=np.int64)
    numbers, exact = _numbers(partition_ids, arrays.bytes_of(keys), arrays.offsets_of(keys))
    order: I64Array = np.argsort(numbers)
    ranked = numbers[order]
    same = ranked[1:] == ranked[:-1]
    if same.any():
        _settle_ties(order, same, keys, exact)
    return order


def _numbers(
    partition_ids: npt.NDArray[np.uint32], data: U8Array, offsets: arrays.I32Array
) -> tuple[U64Array, bool]:
    """Return the numbers, and whether rows with equal numbers have equal keys."""
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    shortest, longest = int(lengths.min()), int(lengths.max())
    first = int(partition_ids.min())
    spread = int(partition_ids.max()) - first
    numbers = (partition_ids - np.uint32(first)).astype(np.uint64)
    bits_left = 64 - spread.bit_length()
    begin = _common_prefix(data, starts, shortest)
    end = min(longest, begin + BYTES_LOOKED_AT)
    for at in range(begin, end):
        column = _column(data, starts, lengths, at, whole=at < shortest)
        low, high = int(column.min()), int(column.max())
        bits = (high - low).bit_length()
        if bits > bits_left:
            return numbers, False
        if bits:
            numbers <<= np.uint64(bits)
            numbers |= (column - column.dtype.type(low)).astype(np.uint64)
            bits_left -= bits
    return numbers, longest == end


def _common_prefix(data: U8Array, starts: I64Array, shortest: int) -> int:
    """Return the length of a common prefix of all keys, a multiple of 8 bytes."""
    if shortest < 8:
        return 0
    words = np.ndarray((data.size - 7,), "<u8", data, 0, (1,))  # at every byte, overlapping
    for at in range(0, shortest - 7, 8):
        column = words[starts + at]
        if (column != column[0]).any():
            return at
    return shortest - shortest % 8


def _column(
    data: U8Array, starts: I64Array, lengths: I64Array, at: int, *, whole: bool
) -> npt.NDArray[Any]:
    """Return byte ``at`` of every key. Unless all keys are that long (``whole``), return the byte
    plus one, and 0 for shorter keys, so that a key sorts before its extensions.
    """
    if whole:
        return data[starts + at]
    column = np.zeros(len(starts), np.uint16)
    longer = np.flatnonzero(lengths > at)
    column[longer] = data[starts[longer] + at].astype(np.uint16) + np.uint16(1)
    return column


def _settle_ties(order: I64Array, same: arrays.BoolArray, keys: Any, exact: bool) -> None:
    """Sort the rows with equal numbers by their keys, then by row, in place."""
    tied = np.zeros(len(order), np.bool_)
    tied[1:] = same
    begins = tied.copy()
    tied[:-1] |= same
    places = np.flatnonzero(tied)
    groups = np.cumsum(~begins)[places]
    rows = order[places]
    if exact:
        order[places] = rows[np.lexsort((rows, groups))]
        return
    by_row = np.argsort(rows)
    table = pa.table(
        {"group": groups[by_row], "key": keys.take(pa.array(rows[by_row])), "row": rows[by_row]}
    )
    ascending = [(name, "ascending") for name in table.column_names]
    settled = pc.sort_indices(table, ascending).to_numpy()
    order[places] = rows[by_row][settled]
