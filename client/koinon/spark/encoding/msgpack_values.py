"""Encodes rows as MessagePack maps, column by column.

Parts that have one width in a batch (names, numbers, the heads of strings) become columns of a byte
matrix; the strings themselves lie between such matrices. Each row is joined from a few parts. A
head takes the width that the batch's longest string needs, an integer the width of its column:
valid MessagePack, though not the shortest.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from koinon.spark.encoding import arrays
from koinon.spark.encoding.arrays import U8Array
from koinon.spark.encoding.calendar_texts import COUNTS_PER_SECOND
from koinon.spark.encoding.json_values import iso_dates, iso_times, iso_timestamps, plain_decimals
from koinon.spark.encoding.plain import plain_values
from koinon.spark.encoding.plain_types import plain_batch
from koinon_proto.contract.arrow import binary_scalar
from koinon_proto.contract.errors import InvalidArgumentError

NIL: Final = b"\xc0"
_NIL_SCALAR = binary_scalar(NIL)
_INT_HEADS: Final = {8: 0xD0, 16: 0xD1, 32: 0xD2, 64: 0xD3}
_UINT_HEADS: Final = {8: 0xCC, 16: 0xCD, 32: 0xCE, 64: 0xCF}
_FLOAT_HEADS: Final = {32: 0xCA, 64: 0xCB}
_TIMESTAMP_64, _TIMESTAMP_96 = b"\xd7\xff", b"\xc7\x0c\xff"
_SECONDS_BITS: Final = 34

Fixed = bytes | U8Array
"""The same bytes for every row, or a matrix with a row for each."""


def encode_msgpack(batch: Any) -> Any:
    """Encode the rows of a record batch as MessagePack maps, a ``binary`` array.

    Raises:
        InvalidArgumentError: a column has a type without a MessagePack form.
    """
    batch, rows = plain_batch(batch), batch.num_rows
    fixed: list[Fixed] = [_map_head(batch.num_columns)]
    parts: list[Any] = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        fixed.append(_text_head(len(field.name.encode())) + field.name.encode())
        head, tail = _encoded(column, field.name)
        if column.null_count:
            whole = _matrix_array(head, rows)
            whole = whole if tail is None else arrays.join(whole, tail)
            tail = pc.if_else(pc.is_valid(column), whole, _NIL_SCALAR)
            head = []
        fixed += head
        if tail is not None:
            parts += [_matrix_array(fixed, rows), tail]
            fixed = []
    if fixed:
        parts.append(_matrix_array(fixed, rows))
    return arrays.join(*parts)


def _matrix_array(fixed: list[Fixed], rows: int) -> Any:
    """Join the parts side by side as an array."""
    widths = [len(part) if isinstance(part, bytes) else part.shape[1] for part in fixed]
    matrix = np.empty((rows, sum(widths)), np.uint8)
    at = 0
    for part, width in zip(fixed, widths, strict=True):
        matrix[:, at : at + width] = (
            np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part
        )
        at += width
    return arrays.from_matrix(matrix)


def _encoded(column: Any, name: str) -> tuple[list[Fixed], Any]:
    """Encode a column's values as parts of fixed width and, if necessary, one of variable width;
    undefined where the column is null.
    """
    kind = column.type
    if pa.types.is_integer(kind):
        heads, letter = (
            (_INT_HEADS, "i") if pa.types.is_signed_integer(kind) else (_UINT_HEADS, "u")
        )
        return [bytes((heads[kind.bit_width],)), _big_endian(column, letter)], None
    if pa.types.is_floating(kind):
        return [bytes((_FLOAT_HEADS[kind.bit_width],)), _big_endian(column, "f")], None
    if pa.types.is_boolean(kind):
        bits = arrays.numbers_of(column.cast(pa.int8()), np.uint8)
        return [(bits + np.uint8(0xC2)).reshape(-1, 1)], None
    if pa.types.is_timestamp(kind) and kind.tz:
        return _timestamps(column), None
    if pa.types.is_binary(kind):
        return _with_heads(_filled(column), _bin_heads)
    if (text := _text_of(column)) is not None:
        return _with_heads(text, _text_heads)
    if pa.types.is_nested(kind):
        _check_keys(kind, name)
        return [], _packed(column)
    raise InvalidArgumentError(
        field=f"column {name!r}",
        reason=f"type {kind} has no form in MessagePack; cast it to a string",
    )


def _text_of(column: Any) -> Any:
    """Return the texts of a column (undefined where it is null); None if its type has no text
    form.
    """
    kind = column.type
    if pa.types.is_string(kind):
        return _filled(column.cast(pa.binary()))
    if pa.types.is_date(kind):
        return iso_dates(column)
    if pa.types.is_decimal(kind):
        return plain_decimals(column)
    if pa.types.is_time(kind):
        return iso_times(column)
    return iso_timestamps(column) if pa.types.is_timestamp(kind) else None


def _filled(column: Any) -> Any:
    return pc.fill_null(column, b"") if column.null_count else column


def _check_keys(kind: Any, name: str) -> None:
    """Refuse maps whose keys are arrays, maps or structs: few programs could read them."""
    if pa.types.is_map(kind) and pa.types.is_nested(kind.key_type):
        raise InvalidArgumentError(
            field=f"column {name!r}",
            reason=f"a map's key of type {kind.key_type} has no form in MessagePack",
        )
    for at in range(kind.num_fields):
        if pa.types.is_nested(kind.field(at).type):
            _check_keys(kind.field(at).type, name)


def _packed(column: Any) -> Any:
    import msgpack

    values = [msgpack.packb(value, strict_types=True) for value in plain_values(column, json=False)]
    return pa.array(values, pa.binary())


def _big_endian(column: Any, letter: str) -> U8Array:
    width = column.type.bit_width // 8
    numbers = arrays.numbers_of(column, f"{letter}{width}").astype(f">{letter}{width}")
    return numbers.view(np.uint8).reshape(len(column), width)


def _timestamps(column: Any) -> list[Fixed]:
    """Encode instants in the shortest format of extension type -1 that fits all of them."""
    per_second = COUNTS_PER_SECOND[column.type.unit]
    counts = arrays.numbers_of(column.view(pa.int64()), np.int64)
    seconds, rest = np.divmod(counts, per_second)
    nanos = (rest * (1_000_000_000 // per_second)).astype(np.uint64)
    rows = len(seconds)
    if not rows or (seconds.min() >= 0 and seconds.max() < 1 << _SECONDS_BITS):
        packed = (nanos << np.uint64(_SECONDS_BITS)) | seconds.view(np.uint64)
        return [_TIMESTAMP_64, packed.astype(">u8").view(np.uint8).reshape(rows, 8)]
    return [
        _TIMESTAMP_96,
        nanos.astype(">u4").view(np.uint8).reshape(rows, 4),
        seconds.astype(">i8").view(np.uint8).reshape(rows, 8),
    ]


# --- heads --------------------------------------------------------------------------------------


def _map_head(entries: int) -> bytes:
    if entries < 16:
        return bytes((0x80 | entries,))
    if entries < 1 << 16:
        return b"\xde" + entries.to_bytes(2, "big")
    return b"\xdf" + entries.to_bytes(4, "big")


def _text_head(length: int) -> bytes:
    head, width = _text_heads(length)
    if not width:
        return bytes((head | length,))
    return bytes((head,)) + length.to_bytes(width, "big")


def _text_heads(longest: int) -> tuple[int, int]:
    """Return the first byte of a string and the number of length bytes after it (0: the length is
    in the first byte).
    """
    if longest < 32:
        return 0xA0, 0
    return _wide_heads(longest, 0xD9)


def _bin_heads(longest: int) -> tuple[int, int]:
    return _wide_heads(longest, 0xC4)


def _wide_heads(longest: int, first: int) -> tuple[int, int]:
    if longest < 1 << 8:
        return first, 1
    return (first + 1, 2) if longest < 1 << 16 else (first + 2, 4)


def _with_heads(values: Any, heads: Any) -> tuple[list[Fixed], Any]:
    lengths = arrays.lengths_of(values)
    head, width = heads(int(lengths.max()) if len(lengths) else 0)
    if not width:
        return [(lengths.astype(np.uint8) | np.uint8(head)).reshape(-1, 1)], values
    column = lengths.astype(f">u{width}").view(np.uint8).reshape(len(lengths), width)
    return [bytes((head,)), column], values
