"""Values that hold whole rows, back as typed columns: what ``values.py`` writes, and other JSON
objects or MessagePack maps. Only the fields that are asked for are made; one that a row lacks is
null.

JSON goes column by column through Arrow's reader. What that cannot read (numbers as ``"NaN"``,
damaged values) goes row by row, as MessagePack does, and names the key that cannot be read.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.json

from koinon.spark.encoding import arrays
from koinon_proto.contract.arrow import binary_scalar
from koinon_proto.contract.errors import ConfigurationError, InvalidArgumentError

_LINE_END = binary_scalar(b"\n")
_BLOCK_BYTES_MIN: Final = 1024 * 1024


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
"""By types as Spark's schema writes them in JSON; decimals and lists are beside them."""
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")


def fields_of(columns: Sequence[tuple[str, Any]]) -> Any:
    """Return the Arrow schema of columns: their names, and types as Spark's schema writes them.

    Raises:
        ConfigurationError: a column has a type that is not read from rows.
    """
    return pa.schema([pa.field(name, _arrow_type(name, kind)) for name, kind in columns])


def _arrow_type(name: str, kind: Any) -> Any:
    if isinstance(kind, dict) and kind.get("type") == "array":
        items = _TYPES.get(str(kind["elementType"]))
        if items is not None and _is_plain(items):
            return pa.list_(pa.field("element", items, nullable=kind["containsNull"]))
    elif isinstance(kind, str) and kind in _TYPES:
        return _TYPES[kind]
    elif isinstance(kind, str) and (decimal := _DECIMAL.fullmatch(kind)):
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    shown = kind if isinstance(kind, str) else kind.get("type")
    raise ConfigurationError(
        reason=f"column {name!r} of type {shown} is not read from rows; read the column value, and "
        "use from_json(value.cast('string'), …)"
    )


def decode_rows(keys: Any, values: Any, fields: Any, encoding: str) -> list[Any]:
    """Return the columns ``fields`` (an Arrow schema) of rows in these ``binary`` arrays.

    Raises:
        InvalidArgumentError: a value is no such row, or a field has another type; it names the key.
    """
    if encoding == "json":
        try:
            return _decode_json(values, fields)
        except pa.ArrowException:
            pass  # it does not say of which row
    return _decode_one_by_one(keys, values, fields, _PARSERS[encoding])


def _is_plain(kind: Any) -> bool:
    """True for types that JSON has itself."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
    )


def _decode_json(values: Any, fields: Any) -> list[Any]:
    lines = arrays.join(values, _LINE_END)
    data = arrays.contents_of(lines)
    if not len(data):
        return [pa.array([], field.type) for field in fields]
    as_text = [
        field if _is_plain(field.type) or pa.types.is_list(field.type) else field.with_type(_TEXT)
        for field in fields
    ]
    if data.size != int(arrays.lengths_of(values).sum()) + len(values):
        raise pa.ArrowInvalid("a null value")
    table = pyarrow.json.read_json(
        pa.BufferReader(pa.py_buffer(data)),
        read_options=pyarrow.json.ReadOptions(
            use_threads=False, block_size=max(_BLOCK_BYTES_MIN, data.size)
        ),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=pa.schema(as_text), unexpected_field_behavior="ignore"
        ),
    )
    if table.num_rows != len(values):  # Arrow skips empty lines
        raise pa.ArrowInvalid("a value that is no row")
    columns = (table.column(field.name).combine_chunks() for field in fields)
    return [_from_text(column, field.type) for column, field in zip(columns, fields, strict=True)]


_TEXT: Final = pa.string()


def _from_text(column: Any, kind: Any) -> Any:
    if column.type == kind:
        return column
    if pa.types.is_binary(kind):
        return pa.array([None if t is None else b64decode(t) for t in column.to_pylist()], kind)
    return column.cast(kind)


def _decode_one_by_one(
    keys: Any, values: Any, fields: Any, parse: Callable[[bytes], Any]
) -> list[Any]:
    rows = []
    for place, value in enumerate(values):
        try:
            row = parse(value.as_py())
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}, not a row")
        except Exception as error:  # whatever a parser meets
            raise _unreadable(keys, place, str(error)) from error
        rows.append(row)
    return [_column(keys, field, [row.get(field.name) for row in rows]) for field in fields]


def _column(keys: Any, field: Any, values: Sequence[Any]) -> Any:
    convert = _conversion(field.type)
    made = []
    for place, value in enumerate(values):
        try:
            made.append(None if value is None else convert(value))
            if pa.types.is_nested(field.type):
                pa.scalar(made[-1], field.type)
        except Exception as error:  # a field of another type
            reason = f"field {field.name!r} is no {field.type}: {error}"
            raise _unreadable(keys, place, reason) from error
    try:
        return pa.array(made, field.type)
    except pa.ArrowException as error:
        raise _unreadable(keys, 0, f"or one after it: field {field.name!r}: {error}") from error


def _conversion(kind: Any) -> Callable[[Any], Any]:
    if pa.types.is_decimal(kind):
        return Decimal
    if pa.types.is_floating(kind):
        return _as_float
    if pa.types.is_binary(kind):
        return lambda value: value if isinstance(value, bytes) else b64decode(value)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return lambda value: pa.scalar(value).cast(kind)
    return lambda value: pa.scalar(value, kind)


def _as_float(value: Any) -> float:
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        raise ValueError(f"{value[:40]!r} is no number")
    return float(value)


def _parse_msgpack(value: bytes) -> Any:
    import msgpack

    return msgpack.unpackb(value, timestamp=3, strict_map_key=False)


_PARSERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "json": json.loads,
    "msgpack": _parse_msgpack,
}


def _unreadable(keys: Any, place: int, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        field="valueEncoding", reason=f"the value of key {keys[place].as_py()!r}: {reason[:300]}"
    )
