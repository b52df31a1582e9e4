"""Encodes rows as JSON objects, column by column: each column becomes an array of texts, and these
are joined. Items of arrays, maps and structs are columns, too, and are encoded alike.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from koinon.spark.encoding import arrays
from koinon.spark.encoding.arrays import BoolArray, U8Array
from koinon.spark.encoding.calendar_texts import date_text, timestamp_text
from koinon.spark.encoding.plain_types import plain_batch
from koinon_proto.contract.arrow import binary_scalar
from koinon_proto.contract.errors import InvalidArgumentError

_QUOTE, _NULL, _POINT_ZERO = binary_scalar(b'"'), binary_scalar(b"null"), binary_scalar(b".0")
_OPEN_LIST, _CLOSE_LIST = binary_scalar(b"["), binary_scalar(b"]")
_OPEN_OBJECT, _END_OF_KEY, _CLOSE_OBJECT = map(binary_scalar, (b"{", b'":', b"}"))
_PLAIN_SCALE_MAX: Final = 6  # of decimals that Arrow writes without exponents
_DATE_CHARS: Final = len("2024-01-31")
_TIMESTAMP_CHARS: Final = len("2024-01-31 12:00:00.000000")
_ENDS: Final = {"s": binary_scalar(b".000000"), "ms": binary_scalar(b"000")}
"""The digits that Arrow's texts of timestamps lack to six, by unit."""


def _escapes() -> tuple[U8Array, U8Array]:
    """Return the JSON escapes of all bytes: the length of each, and its characters (256 x 6)."""
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
    """Encode the rows of a record batch as JSON objects, a ``binary`` array of UTF-8. Strings are
    not checked: ``faults.py`` finds those that are not UTF-8.

    Raises:
        InvalidArgumentError: a column has a type without a JSON form.
    """
    plain = plain_batch(batch)
    return _objects(plain.schema, plain.columns, plain.num_rows, name="")


def encode_texts(column: Any, name: str) -> Any:
    """Encode each value of a column of a plain type: strings and bytes unchanged, anything else as
    its JSON text without quotes. Null stays null.

    Raises:
        InvalidArgumentError: the column has a type without a JSON form.
    """
    kind = column.type
    if pa.types.is_binary(kind):
        return column
    if pa.types.is_string(kind):
        return column.cast(pa.binary())
    text, _ = _texts(column, name)
    if pa.types.is_floating(kind):  # NaN and the infinities have quotes
        text = pc.replace_substring(text, b'"', b"")
    return arrays.masked(text, column)


def _objects(fields: Any, columns: Sequence[Any], rows: int, *, name: str) -> Any:
    """Return a JSON object for each row. ``name``: the column that these are the fields of, for
    errors.
    """
    if not columns:
        return pa.array([b"{}"] * rows, pa.binary())
    parts: list[Any] = []
    before = b"{"
    for field, column in zip(fields, columns, strict=True):
        before += json.dumps(field.name, ensure_ascii=False).encode() + b":"
        text, quoted = _texts(column, name or field.name)
        if column.null_count:
            text, quoted = _nulls_told(column, text, quoted), False
        quote = b'"' if quoted else b""
        parts += [binary_scalar(before + quote), text]
        before = quote + b","
    return arrays.join(*parts, binary_scalar(before[:-1] + b"}"))


def _nulls_told(column: Any, text: Any, quoted: bool) -> Any:
    """Return the complete texts of a column that has nulls, with ``null`` in their places."""
    text = arrays.join(_QUOTE, text, _QUOTE) if quoted else text
    return pc.if_else(pc.is_valid(column), text, _NULL)


def _texts(column: Any, name: str) -> tuple[Any, bool]:
    """Return the texts of a column (undefined where it is null), and whether they still need
    quotes.
    """
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return _text(column), False
    if pa.types.is_floating(kind):
        return _floats(column), False
    if pa.types.is_string(kind):
        return _escaped(_text(column)), True
    if pa.types.is_decimal(kind):
        return plain_decimals(column), True
    if pa.types.is_date(kind):
        return iso_dates(column), True
    if pa.types.is_time(kind):
        return iso_times(column), True
    if pa.types.is_timestamp(kind):
        return iso_timestamps(column), True
    if pa.types.is_binary(kind):
        texts = [b64encode(value) for value in _text(column).to_pylist()]
        return pa.array(texts, pa.binary()), True
    if pa.types.is_struct(kind):
        return _objects(kind, column.flatten(), len(column), name=name), False
    if pa.types.is_map(kind):
        return _maps(column, name), False
    if pa.types.is_list(kind):
        return _lists(column, name), False
    raise InvalidArgumentError(
        field=f"column {name!r}", reason=f"type {kind} has no form in JSON; cast it to a string"
    )


def _whole(column: Any, name: str) -> Any:
    """Return the complete texts of a column, with quotes; null stays null."""
    text, quoted = _texts(column, name)
    if column.null_count:
        return _nulls_told(column, text, quoted)
    return arrays.join(_QUOTE, text, _QUOTE) if quoted else text


def _lists(column: Any, name: str) -> Any:
    texts = _whole(items_of(column, column.values), name)
    return _joined(column, texts, _OPEN_LIST, _CLOSE_LIST)


def _maps(column: Any, name: str) -> Any:
    """Return maps as objects: the text of a key becomes a string."""
    kind = column.type.key_type
    if pa.types.is_nested(kind):
        raise InvalidArgumentError(
            field=f"column {name!r}", reason=f"a map's key of type {kind} has no form in JSON"
        )
    keys, items = (items_of(column, part) for part in (column.keys, column.items))
    text, quoted = _texts(keys, name)
    if not quoted:  # NaN and the infinities have quotes already
        text = pc.replace_substring(text, b'"', b"") if pa.types.is_floating(kind) else text
    entries = arrays.join(_QUOTE, text, _END_OF_KEY, _whole(items, name))
    return _joined(column, entries, _OPEN_OBJECT, _CLOSE_OBJECT)


def items_of(column: Any, part: Any) -> Any:
    """Return the items of a column's lists (or maps) from ``part``, which is the column's
    ``values``, ``keys`` or ``items``.
    """
    first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
    return part.slice(first, last - first)


def _joined(column: Any, items: Any, opening: Any, closing: Any) -> Any:
    """Return each list's items, as texts, joined by commas, in brackets."""
    offsets = arrays.numbers_of(column.offsets, np.int32)
    lists = pa.ListArray.from_arrays(arrays.i32_array(offsets - offsets[0]), items)
    return arrays.join(opening, pc.binary_join(lists, b","), closing)


def _text(column: Any) -> Any:
    """Return the column as bytes of text, empty for null."""
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.string()).cast(pa.binary())
    return pc.fill_null(column, b"") if column.null_count else column


def plain_decimals(column: Any) -> Any:
    """Return decimals as texts without exponents, empty for null."""
    text = _text(column)
    if 0 <= column.type.scale <= _PLAIN_SCALE_MAX:
        return text
    small = pc.match_substring(text, "E")
    if not pc.any(small).as_py():
        return text
    coded = text.filter(small).dictionary_encode()  # often all the same: 0E-18
    plain = [format(Decimal(some.decode()), "f").encode() for some in coded.dictionary.to_pylist()]
    return pc.replace_with_mask(text, small, pa.array(plain, pa.binary()).take(coded.indices))


def _floats(column: Any) -> Any:
    """Return floats as the shortest texts that parse to the same number of this width. They have a
    point or an exponent, so that a reader gets a float, and keep the sign of -0.0.
    """
    text = _text(column)
    whole = pc.invert(pc.match_substring_regex(text, "[.en]"))
    if pc.any(whole).as_py():
        text = pc.if_else(whole, arrays.join(text, _POINT_ZERO), text)
    if bool(pc.all(pc.fill_null(pc.is_finite(column), True)).as_py()):
        return text
    for theirs, ours in ((b"nan", b'"NaN"'), (b"inf", b'"Infinity"'), (b"-inf", b'"-Infinity"')):
        text = pc.if_else(pc.equal(text, binary_scalar(theirs)), binary_scalar(ours), text)
    return text


def _escaped(text: Any) -> Any:
    """Return strings with the escapes of JSON, without quotes."""
    data = arrays.contents_of(text)
    if not ((data < 32) | (data == ord('"')) | (data == ord("\\"))).any():
        return text
    offsets = arrays.offsets_of(text).astype(np.int64) - int(arrays.offsets_of(text)[0])
    lengths = _ESCAPED_LENGTHS[data]
    ends = np.zeros(len(data) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    out = np.empty(int(ends[-1]), np.uint8)
    for at in range(int(lengths.max())):  # byte number ``at`` of every character's text
        longer = np.flatnonzero(lengths > at)
        out[ends[longer] + at] = _ESCAPED[data[longer], at]
    return arrays.from_offsets(ends[offsets], out)


def iso_dates(column: Any) -> Any:
    """Return dates (32 bits) as ISO 8601 texts, empty for null."""
    text = _text(column)
    lengths = arrays.lengths_of(text)
    strange = (lengths != _DATE_CHARS) & (lengths != 0)
    return _replaced(text, strange, column.view(pa.int32()), date_text)


def iso_timestamps(column: Any) -> Any:
    """Return timestamps as ISO 8601 texts with six digits of fractions (nine for nanoseconds), with
    ``Z`` for instants; undefined for null.
    """
    unit = column.type.unit
    numbers = column.view(pa.int64())
    if numbers.null_count:
        numbers = pc.fill_null(numbers, 0)
    text = _short(numbers.view(pa.timestamp(unit)).cast(pa.string()), unit)
    if unit in _ENDS:
        text = arrays.join(text, _ENDS[unit])
    lengths = arrays.lengths_of(text)
    strange = (lengths != _TIMESTAMP_CHARS) & (lengths != _TIMESTAMP_CHARS + 3)
    text = _replaced(text, strange, numbers, lambda count: timestamp_text(count, unit))
    offsets, data = arrays.offsets_of(text), arrays.contents_of(text).copy()
    if len(data) == _TIMESTAMP_CHARS * len(text):
        data.reshape(len(text), _TIMESTAMP_CHARS)[:, 10] = ord("T")
    else:
        data[data == ord(" ")] = ord("T")
    text = arrays.from_offsets(offsets - offsets[0], data)
    return arrays.join(text, binary_scalar(b"Z")) if column.type.tz else text


def _replaced(text: Any, strange: BoolArray, numbers: Any, text_of: Callable[[int], str]) -> Any:
    """Return the texts with those of years before 0 and after 9999 replaced: Arrow writes these
    without a sign, or not at all.
    """
    if not strange.any():
        return text
    mask = pa.array(strange)
    texts = [text_of(number).encode() for number in numbers.filter(mask).to_pylist()]
    return pc.replace_with_mask(text, mask, pa.array(texts, pa.binary()))


def iso_times(column: Any) -> Any:
    """Return times of day as texts with six digits of fractions (nine for nanoseconds), empty for
    null.
    """
    unit = column.type.unit
    if unit != "ns":
        unit, column = "us", column.cast(pa.time64("us"))
    return _short(pc.fill_null(column.cast(pa.string()), ""), unit)


def _short(text: Any, unit: str) -> Any:
    """Return texts that end in fractions of a second as bytes. The last three digits of nanoseconds
    are dropped if they are zeros.
    """
    if unit == "ns":
        text = pc.replace_substring_regex(text, r"(\.\d{6})000$", r"\1")
    return text.cast(pa.binary())
