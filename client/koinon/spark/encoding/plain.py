"""Converts columns to lists of plain Python values: for nested columns of MessagePack, and for
showing whole rows that cannot be stored.

Structs become dicts by field name, lists lists, maps dicts. A value of a type that neither form
supports becomes its JSON text (``json_values.py``).
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pyarrow as pa

from koinon.spark.encoding.calendar_texts import COUNTS_PER_SECOND
from koinon.spark.encoding.json_values import encode_texts, items_of
from koinon.spark.encoding.plain_types import plain_type


def plain_values(column: Any, *, json: bool) -> list[Any]:
    """Return the values of a column. ``json``: only types that JSON has, with maps' keys as text;
    else instants become MessagePack's own timestamps. Bytes of a string that are not UTF-8 are
    shown as ``\xff``.
    """
    kind = plain_type(column.type)
    if column.type != kind:
        column = column.cast(kind)
    return [
        value if valid else None
        for value, valid in zip(_values(column, json), column.is_valid().to_pylist(), strict=True)
    ]


def _values(column: Any, json: bool) -> Iterable[Any]:
    """Yield the values of a column of a plain type; undefined where it is null."""
    kind = column.type
    if pa.types.is_struct(kind):
        if not kind.num_fields:
            return [{}] * len(column)
        names = [kind.field(at).name for at in range(kind.num_fields)]
        fields = [plain_values(field, json=json) for field in column.flatten()]
        return (dict(zip(names, values, strict=True)) for values in zip(*fields, strict=True))
    if pa.types.is_map(kind):
        keys = [_key(key, json) for key in plain_values(items_of(column, column.keys), json=json)]
        items = plain_values(items_of(column, column.items), json=json)
        return map(dict, _cut(column, list(zip(keys, items, strict=True))))
    if pa.types.is_list(kind):
        return _cut(column, plain_values(items_of(column, column.values), json=json))
    if pa.types.is_timestamp(kind) and kind.tz and not json:
        import msgpack

        per_second = COUNTS_PER_SECOND[kind.unit]
        counts = column.view(pa.int64()).fill_null(0).to_pylist()
        return [
            msgpack.Timestamp(count // per_second, count % per_second * (10**9 // per_second))
            for count in counts
        ]
    return _leaves(column, json)


def _leaves(column: Any, json: bool) -> list[Any]:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return list(column.to_pylist())
    if pa.types.is_floating(kind):
        numbers = column.to_pylist()
        return [json_float(number or 0.0) for number in numbers] if json else list(numbers)
    if pa.types.is_binary(kind):
        found = column.to_pylist()
        return [b64encode(value or b"").decode() for value in found] if json else list(found)
    # only in rows that are shown, since no encoding has a form for them
    if pa.types.is_duration(kind) or pa.types.is_interval(kind):
        return [str(value) for value in column.to_pylist()]
    texts = encode_texts(column, "").to_pylist()
    return [(text or b"").decode(errors="backslashreplace") for text in texts]


def _cut(column: Any, items: list[Any]) -> Iterable[list[Any]]:
    """Return the items of each list of a column; ``items``: the items of all lists, joined."""
    offsets = column.offsets.to_pylist()
    first = offsets[0]
    return (items[start - first : end - first] for start, end in pairwise(offsets))


def _key(key: Any, json: bool) -> Any:
    if isinstance(key, (list, dict)):
        key = str(key)
    if not json or isinstance(key, str):
        return key
    return str(key).lower() if isinstance(key, bool) else str(key)


def json_float(value: float) -> float | str:
    """Return the JSON form of a float: text for NaN and the infinities."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return value
