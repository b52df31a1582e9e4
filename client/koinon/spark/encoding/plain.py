"""Arrow values as plain Python ones: nested ones of MessagePack, row by row, and whole rows that
are shown because they cannot be stored.

Structs become dicts by field name, lists lists, maps dicts. What has no plain form of its own takes
the text that the fast path gives it.
"""

from __future__ import annotations

import datetime
import decimal
from base64 import b64encode
from typing import Any

import pyarrow as pa


def plain_values(column: Any, *, json: bool) -> list[Any]:
    """Return the values of a column. ``json``: only what JSON has, keys of maps as text. Bytes of
    a string that are not UTF-8 are told as ``\\xff``.
    """
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [_told(scalar) for scalar in column]
    return [_plain(value, column.type, json) for value in values]


def _told(scalar: Any) -> Any:
    """Return what ``as_py`` does, of any string."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar, (pa.StringScalar, pa.LargeStringScalar)):
        return scalar.as_buffer().to_pybytes().decode(errors="backslashreplace")
    if isinstance(scalar, pa.StructScalar):
        return {name: _told(scalar[at]) for at, name in enumerate(scalar)}
    if isinstance(scalar, pa.MapScalar):
        return [(_told(entry[0]), _told(entry[1])) for entry in scalar.values]
    if isinstance(scalar, (pa.ListScalar, pa.LargeListScalar)):
        return [_told(item) for item in scalar.values]
    return scalar.as_py()


def _plain(value: Any, kind: Any, json: bool) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type, json) for field in kind}
    if pa.types.is_map(kind):
        return {
            _key(_plain(k, kind.key_type, json), json): _plain(v, kind.item_type, json)
            for k, v in (value.items() if isinstance(value, dict) else value)
        }
    if isinstance(value, list):
        return [_plain(item, kind.value_type, json) for item in value]
    return _leaf(value, json)


def _key(key: Any, json: bool) -> Any:
    if isinstance(key, (list, dict)):
        key = str(key)
    if not json or isinstance(key, str):
        return key
    return str(key).lower() if isinstance(key, bool) else str(key)


def _leaf(value: Any, json: bool) -> Any:
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            return value.isoformat(timespec="microseconds")
        instant = value.astimezone(datetime.UTC)
        if not json:
            return instant
        return instant.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if json and isinstance(value, bytes):
        return b64encode(value).decode()
    if json and isinstance(value, float):
        return json_float(value)
    return value


def json_float(value: float) -> float | str:
    """Return what JSON has for a float: text for those that it has no number for."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return value
