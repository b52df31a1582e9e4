"""Column values as unsigned numbers that sort like them; they decide which of two rows of one key
stays.

Integers, dates and timestamps sort by their value, floats by IEEE order (-0.0 equals 0.0; NaN is
the greatest, as in Spark), booleans with false first. Null is the least of all.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from koinon.spark.encoding import arrays
from koinon.spark.encoding.arrays import U64Array
from koinon_proto.contract.errors import InvalidArgumentError

_SIGN: Final = np.uint64(1 << 63)
_ALL: Final = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


def orders_of(column: Any, name: str) -> U64Array:
    """Return a number for each row.

    Raises:
        InvalidArgumentError: the column has a type that has no such number.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        numbers = _of_floats(arrays.numbers_of(column, np.float64))
    else:
        numbers = _of_integers(_integers(column, name))
    if column.null_count:
        numbers[np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))] = 0
    return numbers


def _integers(column: Any, name: str) -> arrays.I64Array:
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif pa.types.is_date32(kind):
        column = column.view(pa.int32())
    elif pa.types.is_timestamp(kind):
        column = column.view(pa.int64())
    elif not pa.types.is_integer(kind):
        raise InvalidArgumentError(
            field="orderBy",
            reason=f"column {name!r} of type {kind} gives no order; "
            "use a number, a date or a timestamp",
        )
    numbers: arrays.I64Array = arrays.numbers_of(column, np.int64)
    return numbers


def _of_integers(numbers: arrays.I64Array) -> U64Array:
    flipped: U64Array = numbers.view(np.uint64) ^ _SIGN
    return np.maximum(flipped, np.uint64(1))  # 0 is null's


def _of_floats(numbers: Any) -> U64Array:
    bits: U64Array = (numbers + 0.0).view(np.uint64)  # -0.0 + 0.0 is 0.0
    ordered = np.where(bits & _SIGN, bits ^ _ALL, bits | _SIGN)
    return np.where(np.isnan(numbers), _ALL, ordered)
