"""Rows as JSON objects, column by column: each becomes an array of texts, and those are joined."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from koinon.spark.encoding import arrays
from koinon.spark.encoding.arrays import U8Array
from koinon.spark.encoding.plain import plain_values
from koinon_proto.contract.arrow import binary_scalar
from koinon_proto.contract.errors import InvalidArgumentError

_QUOTE, _NULL = binary_scalar(b'"'), binary_scalar(b"null")
_TIMESTAMP_CHARS: Final = len("2024-01-31 12:00:00.000000")


def _escapes() -> tuple[U8Array, U8Array]:
    """Return how many bytes each byte takes in a string, and which they are (256 x 6)."""
    lengths = np.ones(256, np.uint8)
    texts = np.zeros((256, 6), np.uint8)
    texts[:, 0] = np.arange(256)
    for byte in (*range(32), ord('"'), ord("\\")):
        text = json.dumps(chr(byte))[1:-1].encode()
        lengths[byte] = len(text)
        texts[byte, : len(text)] = np.frombuffer(text, np.uint8)
    return lengths, texts


_ESCAPED_LENGTHS, _ESCAPED = _escapes()


def encode_json(batch: Any) -> Any:
    """Return the rows of a record batch as a ``binary`` array of JSON objects, in UTF-8.

    Raises:
        InvalidArgumentError: a column has a type that JSON has no form for.
    """
    if not batch.num_columns:
        return pa.array([b"{}"] * batch.num_rows, pa.binary())
    parts: list[Any] = []
    before = b"{"
    for field, column in zip(batch.schema, batch.columns, strict=True):
        before += json.dumps(field.name, ensure_ascii=False).encode() + b":"
        text, quoted = _texts(column, field.name)
        if column.null_count:
            text = arrays.join(_QUOTE, text, _QUOTE) if quoted else text
            text, quoted = pc.if_else(pc.is_valid(column), text, _NULL), False
        quote = b'"' if quoted else b""
        parts += [binary_scalar(before + quote), text]
        before = quote + b","
    return arrays.join(*parts, binary_scalar(before[:-1] + b"}"))


def _texts(column: Any, name: str) -> tuple[Any, bool]:
    """Return the texts of a column (anything where it is null), and whether they lack quotes."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return _text(column), False
    if pa.types.is_floating(kind):
        return _floats(column), False
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _escaped(_text(column)), True
    if pa.types.is_decimal(kind) or pa.types.is_date(kind):
        return _text(column), True
    if pa.types.is_timestamp(kind):
        return iso_timestamps(column), True
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        texts = [b64encode(value) for value in _text(column).to_pylist()]
        return pa.array(texts, pa.binary()), True
    if pa.types.is_nested(kind):
        values = plain_values(column, json=True)
        return pa.array([_dumped(value) for value in values], pa.binary()), False
    raise InvalidArgumentError(
        field=f"column {name!r}", reason=f"type {kind} has no form in JSON; cast it to a string"
    )


def _text(column: Any) -> Any:
    """Return the column as bytes of text, empty for null."""
    kind = column.type
    if not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        column = column.cast(pa.string() if not pa.types.is_large_binary(kind) else pa.binary())
    column = column.cast(pa.binary())
    return pc.fill_null(column, b"") if column.null_count else column


def _dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        errors="surrogatepass"
    )


def _floats(column: Any) -> Any:
    text = _text(column)
    if bool(pc.all(pc.fill_null(pc.is_finite(column), True)).as_py()):
        return text
    for theirs, ours in ((b"nan", b'"NaN"'), (b"inf", b'"Infinity"'), (b"-inf", b'"-Infinity"')):
        text = pc.if_else(pc.equal(text, binary_scalar(theirs)), binary_scalar(ours), text)
    return text


def _escaped(text: Any) -> Any:
    """Return strings with what JSON wants escaped, without quotes."""
    data = arrays.contents_of(text)
    if not ((data < 32) | (data == ord('"')) | (data == ord("\\"))).any():
        return text
    offsets = arrays.offsets_of(text).astype(np.int64) - int(arrays.offsets_of(text)[0])
    lengths = _ESCAPED_LENGTHS[data]
    ends = np.zeros(len(data) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    out = np.empty(int(ends[-1]), np.uint8)
    for at in range(int(lengths.max())):  # the at-th byte of every character's text
        longer = np.flatnonzero(lengths > at)
        out[ends[longer] + at] = _ESCAPED[data[longer], at]
    return arrays.from_offsets(ends[offsets], out)


def iso_timestamps(column: Any) -> Any:
    """Return timestamps as ISO 8601 texts with six digits, ``Z`` after instants; any text for
    null.
    """
    micros = pc.cast(column, pa.timestamp("us", column.type.tz)).view(pa.int64())
    if micros.null_count:
        micros = pc.fill_null(micros, 0)
    text = micros.view(pa.timestamp("us")).cast(pa.string()).cast(pa.binary())
    offsets, data = arrays.offsets_of(text), arrays.contents_of(text).copy()
    if len(data) == _TIMESTAMP_CHARS * len(text):
        data.reshape(len(text), _TIMESTAMP_CHARS)[:, 10] = ord("T")
    else:  # years of more than four digits
        data[data == ord(" ")] = ord("T")
    text = arrays.from_offsets(offsets - offsets[0], data)
    return arrays.join(text, binary_scalar(b"Z")) if column.type.tz else text
