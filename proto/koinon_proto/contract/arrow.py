"""Arrow arrays made of buffers, and back, for what bulk loads do to whole columns.

pyarrow imports pandas, where that is installed, as soon as it is given Python values or asked for
NumPy arrays: 0.3 s of CPU in every process. So what nodes and Spark's workers do to every load
does neither, by these functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

I64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def binaries(offsets: I64Array, data: memoryview, start: int, end: int) -> Any:
    """Return rows of a column, whose bytes are not copied. ``data`` has less than 2 GiB."""
    narrow = offsets[start : end + 1].astype(np.int32)
    return pa.Array.from_buffers(
        pa.binary(), end - start, [None, pa.py_buffer(narrow), pa.py_buffer(data)]
    )


def binary_scalar(data: bytes) -> Any:
    """Return a scalar that stands for the same bytes in every row."""
    return binaries(np.array((0, len(data))), memoryview(data), 0, 1)[0]


def indices(numbers: I64Array) -> Any:
    """Return row numbers as an array, for ``take``."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


def truths(booleans: BoolArray) -> Any:
    """Return booleans as an array."""
    bits = np.packbits(booleans, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(booleans), [None, pa.py_buffer(bits)])


def numbers_of(found: Any) -> I64Array:
    """Return an array of 64-bit numbers without nulls."""
    return np.frombuffer(found.buffers()[1], np.int64, len(found), 8 * found.offset)


def truths_of(found: Any) -> BoolArray:
    """Return an array of booleans without nulls."""
    bits = np.frombuffer(found.buffers()[1], np.uint8)
    first = found.offset
    truths = np.unpackbits(bits, count=first + len(found), bitorder="little")[first:]
    return truths.view(np.bool_)
