"""Encodes whole rows as values: ``json`` or ``msgpack``, both readable by any client.

A value is one object, respectively map, of all columns of the row by name, in their order:

=================== ================================== ==========================================
column              json                               msgpack
=================== ================================== ==========================================
null                null                               nil
boolean             true, false                        true, false
integers            number                             int of the column's width
float, double       number with a point or exponent;   float 32, float 64 (within arrays,
                    "NaN", "Infinity", "-Infinity"     structs and maps: float 64)
decimal             string: "12.30"                    str: "12.30"
string              string                             str
binary              string: base64                     bin
date                string: "2024-01-31"               str: "2024-01-31"
timestamp           string: UTC, six digits,           ext of type -1, the format's own timestamp
                    "2024-01-31T12:00:00.000000Z"
timestamp_ntz       the same without Z                 str: the same without Z
time                string: "12:00:00.000000"          str: "12:00:00.000000"
array, struct, map  array, object, object (keys as     array, map, map
                    strings)
=================== ================================== ==========================================

Timestamps and times that have nanoseconds have nine digits. Unsigned integers are numbers, half
floats floats; a type's large, view, dictionary and fixed-size layouts have the form of the type
(``plain_types.py``). Durations and intervals have none.

A map's keys may not be arrays, maps or structs. Strings are UTF-8: rows with others are refused
(``faults.py``). Both encoders work column by column; binary columns in JSON, and arrays, structs
and maps in MessagePack take a slow path, row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from koinon.spark.encoding.json_values import encode_json, encode_texts
from koinon.spark.encoding.msgpack_values import encode_msgpack
from koinon.spark.encoding.plain_types import plain_type

ENCODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "json": encode_json,
    "msgpack": encode_msgpack,
}
"""The encoders by name: each returns a ``binary`` array with one value for each row of a record
batch.
"""


def encode_column(column: Any, name: str) -> Any:
    """Encode a value column as a ``binary`` array: strings and bytes unchanged, anything else as in
    the table above for JSON, without quotes around a text.

    Raises:
        InvalidArgumentError: the column has a type without a JSON form.
    """
    kind = plain_type(column.type)
    return encode_texts(column if column.type == kind else column.cast(kind), name)
