"""``lookup``: adds to each row of a DataFrame the value that its key has in the cluster. Tasks ask
the owners for the keys of a batch of rows, in batches; nothing is scanned or shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, StructField, StructType

from koinon.client import connect
from koinon.core.quantities import parse_duration_ms
from koinon.spark.encoding.keys import encode_keys
from koinon.spark.options import KEY_ENCODINGS
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.table import MAX_KEY_BYTES

KEYS_PER_CALL: Final = 10_000


def lookup(
    df: DataFrame,
    *,
    on: str | Sequence[str],
    coordinators: str,
    key_encoding: str = "binary",
    value: str = "value",
    timeout: str = "2m",
) -> DataFrame:
    """Return the DataFrame with one more binary column: the value of the row's key, or null where
    there is no such record. Rows stay in their partitions. Equal keys of a batch are asked for
    once. It is no snapshot: each value is read when its row is.

    Args:
        on: the column, or columns, that make the key, as option ``keyColumn`` takes them.
        coordinators: ``host:port,…``.
        key_encoding: of integers, as option ``keyEncoding``.
        value: the name of the new column.
        timeout: how long a batch of keys is retried: ``30s``, ``2m``.

    Raises:
        ConfigurationError: no such column, a column named ``value`` that exists, or a bad argument.
        KoinonError: from the query: as ``Client.get_many``.
    """
    columns = (on,) if isinstance(on, str) else tuple(on)
    missing = [name for name in columns if name not in df.columns]
    if missing or not columns:
        raise ConfigurationError(reason=f"on: no column {missing or ''} among {df.columns}")
    if value in df.columns:
        raise ConfigurationError(reason=f"value: there is a column {value!r} already")
    if key_encoding not in KEY_ENCODINGS:
        raise ConfigurationError(reason=f"key_encoding: is none of {', '.join(KEY_ENCODINGS)}")
    timeout_ms = parse_duration_ms(timeout)

    def look_up(batches: Iterator[Any]) -> Iterator[Any]:
        with connect(coordinators, timeout_ms=timeout_ms) as client:
            for batch in batches:
                keys = encode_keys([batch.column(name) for name in columns], key_encoding)
                found = values_of(keys, client.get_many)
                yield pa.RecordBatch.from_arrays(
                    [*batch.columns, found], names=[*batch.schema.names, value]
                )

    schema = StructType([*df.schema.fields, StructField(value, BinaryType())])
    return df.mapInArrow(look_up, schema)


def values_of(keys: Any, get_many: Callable[[Sequence[bytes]], Sequence[bytes | None]]) -> Any:
    """Return the value of each key (a ``binary`` array); null for null, for what no key can be, and
    where there is no record.
    """
    coded = keys.dictionary_encode()
    distinct = coded.dictionary.to_pylist()
    wanted = [key for key in distinct if 0 < len(key) <= MAX_KEY_BYTES]
    found: dict[bytes, bytes | None] = {}
    for at in range(0, len(wanted), KEYS_PER_CALL):
        some = wanted[at : at + KEYS_PER_CALL]
        found.update(zip(some, get_many(some), strict=True))
    values = pa.array([found.get(key) for key in distinct], pa.binary())
    return values.take(coded.indices)
