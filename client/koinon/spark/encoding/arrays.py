"""Conversions between binary Arrow arrays and the NumPy arrays of their buffers, without copies."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from koinon_proto.contract import arrow

U8Array: TypeAlias = npt.NDArray[np.uint8]
I32Array: TypeAlias = npt.NDArray[np.int32]
I64Array: TypeAlias = npt.NDArray[np.int64]
U64Array: TypeAlias = npt.NDArray[np.uint64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

_STORED = {
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64")},
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
}
EMPTY = arrow.binary_scalar(b"")


def bytes_of(array: Any) -> U8Array:
    """Return all bytes of the buffer behind a binary array's values."""
    buffer = array.buffers()[-1]
    return np.frombuffer(buffer, np.uint8) if buffer is not None else np.empty(0, np.uint8)


def offsets_of(array: Any) -> I32Array:
    """Return the offsets of a ``binary`` array into its ``bytes_of``, one more than rows."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(1, np.int32)
    return np.frombuffer(buffer, np.int32, len(array) + 1, 4 * array.offset)


def lengths_of(array: Any) -> I32Array:
    """Return the length in bytes of each value of a ``binary`` array; 0 for null."""
    lengths: I32Array = np.diff(offsets_of(array))
    return lengths


def contents_of(array: Any) -> U8Array:
    """Return the bytes of a ``binary`` array's own values, joined, including any behind nulls."""
    offsets = offsets_of(array)
    return bytes_of(array)[int(offsets[0]) : int(offsets[-1])]


def from_offsets(offsets: npt.NDArray[np.integer[Any]], data: Any) -> Any:
    """Build a ``binary`` array without nulls from offsets into ``data`` (any buffer)."""
    narrow = np.ascontiguousarray(offsets, np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(offsets) - 1, [None, pa.py_buffer(narrow), pa.py_buffer(data)], 0
    )


def from_matrix(matrix: U8Array) -> Any:
    """Build a ``binary`` array whose values are the rows of a matrix."""
    rows, width = matrix.shape
    return from_offsets(
        np.arange(rows + 1, dtype=np.int32) * np.int32(width), np.ascontiguousarray(matrix)
    )


def i32_array(numbers: I32Array) -> Any:
    """Build an int32 array without nulls."""
    return pa.Array.from_buffers(
        pa.int32(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))]
    )


def numbers_of(array: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the values of a numeric array, 0 for null."""
    filled = pc.fill_null(array, 0) if array.null_count else array
    stored = _STORED.get(str(filled.type))
    if stored is None or not len(filled):
        numbers: npt.NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    else:
        data = filled.buffers()[1]
        numbers = np.frombuffer(data, stored, len(filled), filled.offset * stored.itemsize)
    return numbers.astype(dtype, copy=False)


def masked(array: Any, like: Any) -> Any:
    """Return the array with nulls where ``like`` has them."""
    if not like.null_count:
        return array
    return pc.if_else(pc.is_valid(like), array, pa.scalar(None, array.type))


def join(*parts: Any) -> Any:
    """Join the parts (binary arrays, or scalars for every row) row by row; null if any part is."""
    return pc.binary_join_element_wise(*parts, EMPTY)
