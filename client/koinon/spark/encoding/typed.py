"""Decodes values that hold whole rows into typed columns: those of ``values.py``, and other JSON
objects or MessagePack maps. Only the requested fields are decoded; a field that a row lacks is
null. One value is always one row: a value that holds no row, several rows, or a field of another
type is malformed as a whole.

JSON goes column by column through Arrow's reader. Values that Arrow cannot read (numbers as
``"NaN"``, maps, malformed values) go row by row, as MessagePack does.
"""

from __future__ import annotations

import json
import re
import uuid
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from koinon.spark.encoding import arrays
from koinon.spark.encoding.calendar_texts import days_of, micros_of
from koinon.spark.options import DROPMALFORMED, FAILFAST
from koinon_proto.contract.arrow import binary_scalar
from koinon_proto.contract.errors import ConfigurationError, InvalidArgumentError

_LINE_END = binary_scalar(b"\n")
_MICROS_CHARS_MAX: Final = len("2024-01-31T12:00:00.000000Z")
_BLOCK_BYTES_MIN: Final = 1024 * 1024
_REASON_CHARS_MAX: Final = 300
_TEXT: Final = pa.string()

_TYPES: Final[dict[str, Any]] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
"""Arrow types by Spark types as its schema writes them in JSON; decimals and nested types are
handled separately.
"""
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
_SIZED_TEXT: Final = re.compile(r"(?:var)?char\(\d+\)|string collate .*")

Convert = Callable[[Any], Any]
"""Converts a parsed value for Arrow. Raises any exception if the value has another type."""


@dataclass(frozen=True, kw_only=True)
class RowForm:
    """The rules for decoding a value into a row.

    ``fields``: an Arrow schema. ``encoding``: ``json`` or ``msgpack``. ``mode``: a malformed value
    becomes a row of nulls (PERMISSIVE), no row (DROPMALFORMED) or ends the read (FAILFAST).
    ``corrupt``: the Arrow field, string or binary, for a malformed value; null for other rows.
    """

    fields: Any
    encoding: str
    mode: str = FAILFAST
    corrupt: Any = None


# --- schemas --------------------------------------------------------------------------------------


def field_of(name: str, kind: Any, *, nullable: bool = True) -> Any:
    """Return the Arrow field of a column; ``kind``: its type as Spark's schema writes it in JSON.

    Raises:
        ConfigurationError: rows cannot be decoded into this type.
    """
    made = _arrow_type(kind)
    if made is None:
        shown = kind if isinstance(kind, str) else kind.get("type")
        raise ConfigurationError(
            reason=f"column {name!r} of type {shown} is not read from rows; read the column value, "
            "and use from_json(value.cast('string'), …)"
        )
    return pa.field(name, made, nullable=nullable)


def _arrow_type(kind: Any) -> Any:
    """Return the Arrow type, or None if there is none."""
    if isinstance(kind, str):
        if decimal := _DECIMAL.fullmatch(kind):
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        return _TEXT if _SIZED_TEXT.fullmatch(kind) else _TYPES.get(kind)
    if kind["type"] == "struct":
        parts = [(f["name"], _arrow_type(f["type"]), f["nullable"]) for f in kind["fields"]]
    elif kind["type"] == "array":
        parts = [("element", _arrow_type(kind["elementType"]), kind["containsNull"])]
    elif kind["type"] == "map":
        parts = [("key", _arrow_type(kind["keyType"]), False)]
        parts += [("value", _arrow_type(kind["valueType"]), kind["valueContainsNull"])]
    else:
        return None
    if any(made is None for _, made, _ in parts):
        return None
    fields = [pa.field(name, made, nullable=nullable) for name, made, nullable in parts]
    if kind["type"] == "struct":
        return pa.struct(fields)
    return pa.list_(fields[0]) if kind["type"] == "array" else pa.map_(*fields)


# --- rows -----------------------------------------------------------------------------------------


def decode_rows(keys: Any, values: Any, form: RowForm) -> tuple[dict[str, Any], Any]:
    """Decode the rows in ``values``; return their columns by name, and the numbers of the decoded
    rows (None: all). ``keys`` and ``values``: ``binary`` arrays.

    Raises:
        InvalidArgumentError: mode FAILFAST, and a value is malformed; the error names its key.
    """
    if form.encoding == "json":
        with suppress(pa.ArrowException):  # Arrow's error does not name the row
            columns = dict(zip(form.fields.names, _decode_json(values, form.fields), strict=True))
            if form.corrupt is not None:
                columns[form.corrupt.name] = pa.nulls(len(values), form.corrupt.type)
            return columns, None
    return _decode_one_by_one(keys, values, form)


def _decode_one_by_one(keys: Any, values: Any, form: RowForm) -> tuple[dict[str, Any], Any]:
    parse = _PARSERS[form.encoding]
    converts = {field.name: _converting(field) for field in form.fields}
    made: dict[str, list[Any]] = {name: [] for name in converts}
    kept, corrupt = [], []
    for at, value in enumerate(values.to_pylist()):
        row: Mapping[str, Any] = {}
        malformed = None
        try:
            row = _converted(parse(value), converts)
        except Exception as error:  # any exception of a parser
            if form.mode == FAILFAST:
                reason = f"the value of key {keys[at].as_py()!r}: {str(error)[:_REASON_CHARS_MAX]}"
                raise InvalidArgumentError(field="valueEncoding", reason=reason) from error
            if form.mode == DROPMALFORMED:
                continue
            malformed = value
        kept.append(at)
        corrupt.append(malformed)
        for name, column in made.items():
            column.append(row.get(name))
    columns = {field.name: pa.array(made[field.name], field.type) for field in form.fields}
    if form.corrupt is not None:
        columns[form.corrupt.name] = _corrupt_column(corrupt, form.corrupt.type)
    return columns, None if len(kept) == len(values) else pa.array(kept, pa.int64())


def _converted(row: Any, converts: Mapping[str, Convert]) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise TypeError(f"a {type(row).__name__}, not a row")
    return {name: convert(row.get(name)) for name, convert in converts.items()}


def _corrupt_column(values: Sequence[bytes | None], kind: Any) -> Any:
    if pa.types.is_string(kind):
        texts = [v if v is None else v.decode(errors="backslashreplace") for v in values]
        return pa.array(texts, kind)
    return pa.array(values, kind)


def _parse_json(value: bytes) -> Any:
    return json.loads(value.decode())  # for bytes json guesses the encoding


def _parse_msgpack(value: bytes) -> Any:
    import msgpack

    return msgpack.unpackb(value, strict_map_key=False)


_PARSERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "json": _parse_json,
    "msgpack": _parse_msgpack,
}


# --- JSON, column by column -----------------------------------------------------------------------


def _decode_json(values: Any, fields: Any) -> list[Any]:
    """Decode JSON objects into columns.

    Raises:
        ArrowException: a value is malformed, or has a form that only ``_decode_one_by_one``
            supports.
    """
    if not len(values):
        return [pa.array([], field.type) for field in fields]
    if any(pa.types.is_nested(field.type) and not _is_plain(field.type) for field in fields):
        raise pa.ArrowInvalid("items with no type of JSON's own")
    row_number = uuid.uuid4().hex[:12]  # random: no stored value contains it
    data = arrays.contents_of(_numbered(values, row_number))
    as_text = [
        field.with_type(field.type if _is_plain(field.type) else _TEXT).with_nullable(True)
        for field in fields
    ]
    table = pyarrow.json.read_json(
        pa.BufferReader(pa.py_buffer(data)),
        read_options=pyarrow.json.ReadOptions(
            use_threads=False, block_size=max(_BLOCK_BYTES_MIN, data.size)
        ),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=pa.schema([pa.field(row_number, pa.int64()), *as_text]),
            unexpected_field_behavior="ignore",
        ),
    )
    if not table.column(row_number).combine_chunks().equals(pa.array(range(len(values)))):
        raise pa.ArrowInvalid("a value that is not one row")
    columns = [
        _from_text(table.column(field.name).combine_chunks(), field.type) for field in fields
    ]
    for field, column in zip(fields, columns, strict=True):
        column.validate(full=True)  # strings are UTF-8
        if _lacks(column, field):
            raise pa.ArrowInvalid("null in a field that is NOT NULL")
    return columns


def _numbered(values: Any, name: str) -> Any:
    """Return the objects as lines, each with its row number as its first field. The numbers of the
    objects that Arrow reads then show which value each belongs to, and whether a value had several.
    """
    offsets, data = arrays.offsets_of(values), arrays.bytes_of(values)
    lengths = arrays.lengths_of(values)
    if values.null_count or lengths.min() < 3:
        raise pa.ArrowInvalid("a value without a field")
    begins = offsets[:-1]
    if (data[begins] != ord("{")).any() or (data[begins + 1] == ord("}")).any():
        raise pa.ArrowInvalid("a value that does not begin as an object with fields")
    numbers = pa.array(np.arange(len(values))).cast(_TEXT).cast(pa.binary())
    before, after = binary_scalar(f'{{"{name}":'.encode()), binary_scalar(b",")
    fields = pc.binary_replace_slice(values, 0, 1, b"")
    return arrays.join(before, numbers, after, fields, _LINE_END)


def _is_plain(kind: Any) -> bool:
    """Return whether JSON itself has the type, or it is a list or struct of such types."""
    if pa.types.is_list(kind) or pa.types.is_struct(kind):
        return all(_is_plain(kind.field(at).type) for at in range(kind.num_fields))
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
    )


def _lacks(column: Any, field: Any) -> bool:
    """Return whether a column has a null where its field, or a nested one, is NOT NULL."""
    if column.null_count:
        if not field.nullable:
            return True
        column = column.filter(column.is_valid())
    kind = field.type
    parts: Sequence[Any] = ()
    if pa.types.is_struct(kind):
        parts = column.flatten()
    elif pa.types.is_list(kind):
        parts = (column.flatten(),)
    return any(_lacks(part, kind.field(at)) for at, part in enumerate(parts))


def _from_text(column: Any, kind: Any) -> Any:
    if column.type == kind:
        return column
    if pa.types.is_binary(kind):
        texts = column.to_pylist()
        return pa.array([None if text is None else _bytes(text) for text in texts], kind)
    if pa.types.is_timestamp(kind) and pa.types.is_string(column.type):
        column = _in_micros(column)
    return column.cast(kind)


def _bytes(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:  # binascii.Error is a ValueError
        raise pa.ArrowInvalid(f"{text[:40]!r} is no base64") from error


def _in_micros(texts: Any) -> Any:
    """Cut timestamps' texts to microseconds, as Spark does."""
    long = pc.greater(pc.binary_length(texts), _MICROS_CHARS_MAX)
    if not pc.any(long).as_py():
        return texts
    return pc.replace_substring_regex(texts, r"(\.\d{6})\d+", r"\1")


# --- values, one by one ---------------------------------------------------------------------------


def _converting(field: Any) -> Convert:
    """Return the function that converts a field's parsed value, or None, for Arrow."""
    convert, name, kind = _conversion(field.type), field.name, field.type

    def converted(value: Any) -> Any:
        if value is None:
            if not field.nullable:
                raise ValueError(f"field {name!r} is NOT NULL, and is null or missing")
            return None
        try:
            return convert(value)
        except Exception as error:  # any exception of a conversion
            raise ValueError(f"field {name!r} is no {kind}: {error}") from error

    return converted


def _conversion(kind: Any) -> Convert:
    if pa.types.is_nested(kind):
        return _nested_conversion(kind)
    if pa.types.is_decimal(kind):
        return lambda value: pa.scalar(Decimal(str(value)), kind).as_py()
    if pa.types.is_floating(kind):
        return _as_float
    if pa.types.is_integer(kind):
        return lambda value: pa.scalar(value, kind).as_py()
    if pa.types.is_binary(kind):
        return lambda value: value if isinstance(value, bytes) else _bytes(value)
    if pa.types.is_date(kind):
        return lambda value: pa.scalar(days_of(value), pa.int32()).as_py()
    if pa.types.is_timestamp(kind):
        return lambda value: _micros(value, kind)
    return lambda value: pa.scalar(value, kind).as_py()


def _nested_conversion(kind: Any) -> Convert:
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        converts = {field.name: _converting(field) for field in fields}
        return lambda value: _converted(value, converts)
    if pa.types.is_map(kind):
        of_key, of_item = _converting(kind.key_field), _converting(kind.item_field)
        parse = _KEY_PARSERS.get(str(kind.key_type), lambda key: key)
        return lambda value: [
            (of_key(parse(key) if isinstance(key, str) else key), of_item(item))
            for key, item in _mapping(value)
        ]
    of_item = _converting(kind.value_field)
    return lambda value: [of_item(item) for item in _sequence(value)]


_KEY_PARSERS: Final[Mapping[str, Convert]] = {
    "bool": json.loads,
    **dict.fromkeys(("int8", "int16", "int32", "int64"), int),
}
"""Conversions for maps' keys, which are texts in JSON."""


def _mapping(value: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__}")
    return iter(value.items())


def _sequence(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__}")
    return value


def _micros(value: Any, kind: Any) -> int:
    """Return the microseconds since 1970 of a timestamp: a text, or MessagePack's own type."""
    if isinstance(value, str):
        try:
            count = micros_of(value, zoned=bool(kind.tz))
        except ValueError:
            count = _from_text(pa.array([value], _TEXT), kind).cast(pa.int64())[0].as_py()
    else:
        import msgpack

        if not isinstance(value, msgpack.Timestamp):
            raise TypeError(f"a {type(value).__name__}")
        count = value.seconds * 1_000_000 + value.nanoseconds // 1000
    return int(pa.scalar(count, pa.int64()).as_py())


def _as_float(value: Any) -> float:
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        raise ValueError(f"{value[:40]!r} is no number")
    return float(value)
