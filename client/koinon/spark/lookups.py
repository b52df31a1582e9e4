"""``lookup``: adds to each row of a DataFrame the value of its key in the cluster. Tasks read the
keys of a batch of rows from their owners, in batches, without scan or shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, StructField, StructType

from koinon.spark.cluster import client_of, opened
from koinon.spark.encoding.keys import encode_keys
from koinon.spark.key_steps import KeySteps
from koinon.spark.options import KEY_ENCODINGS, cluster_options
from koinon.spark.writing.planning import find_column
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.table import MAX_KEY_BYTES

KEYS_PER_CALL: Final = 10_000
PIECE_BYTES: Final = 64 * 1024 * 1024
"""The limit on the values' bytes in one record batch of the result; a larger value stands alone."""

GetMany = Callable[[Sequence[bytes]], Sequence[bytes | None]]


def lookup(
    df: DataFrame,
    *,
    on: str | Sequence[str],
    coordinators: str,
    key_encoding: str = "binary",
    value: str = "value",
    timeout: str = "2m",
    keyspace: str = "",
    tls_bundle: str = "",
    token_file: str = "",
) -> DataFrame:
    """Return the DataFrame with one more binary column: the value of the row's key, or null if
    there is no record. Rows stay in their partitions. Equal keys in one step (as many as their
    values take about 64 MiB) are read once. This is no snapshot: each value is read when its row
    is.

    Args:
        on: the column, or columns, of the key, as in option ``keyColumn``: by their exact names, or
            else ignoring case.
        coordinators: ``host:port,…``.
        key_encoding: of integers, as in option ``keyEncoding``.
        value: the name of the new column.
        timeout: how long a batch of keys is retried: ``30s``, ``2m``.
        keyspace: the keyspace of the keys; by default ``default``.
        tls_bundle, token_file: paths on the driver and on every executor, as in options
            ``tlsBundle`` and ``tokenFile``.

    Raises:
        ConfigurationError: no such column, ``value`` exists already, or an invalid argument.
        UnknownKeyspaceError: there is no such keyspace. The query raises it too, once the keyspace
            has been dropped.
        KoinonError: raised by the query, as by ``Client.get_many``.
    """
    columns = _key_columns(on, df.columns)
    if value.lower() in map(str.lower, df.columns):
        raise ConfigurationError(reason=f"value: there is a column {value!r} already")
    if key_encoding not in KEY_ENCODINGS:
        raise ConfigurationError(reason=f"key_encoding: is none of {', '.join(KEY_ENCODINGS)}")
    given = {"coordinators": coordinators, "keyspace": keyspace, "timeout": timeout}
    given |= {"tlsBundle": tls_bundle, "tokenFile": token_file}
    options = cluster_options(given)
    options.dialing()  # raise now, not in a task
    options = opened(options)

    def look_up(batches: Iterator[Any]) -> Iterator[Any]:
        steps = KeySteps(KEYS_PER_CALL)
        with client_of(options) as client:
            for batch in batches:
                keys = encode_keys([batch.column(at) for at in columns], key_encoding)
                at = 0
                for found in values_of(keys, client.get_many, steps):
                    rows = batch.slice(at, len(found))
                    at += len(found)
                    yield pa.RecordBatch.from_arrays(
                        [*rows.columns, found], names=[*batch.schema.names, value]
                    )

    schema = StructType([*df.schema.fields, StructField(value, BinaryType())])
    return df.mapInArrow(look_up, schema)


def _key_columns(on: str | Sequence[str], columns: Sequence[str]) -> list[int]:
    """Return the places of the columns that make the key."""
    named = (on,) if isinstance(on, str) else tuple(on)
    if not named:
        raise ConfigurationError(reason="on: name the column, or the columns, of the key")
    return [find_column("on", name, columns) for name in named]


def values_of(keys: Any, get_many: GetMany, steps: KeySteps) -> Iterator[Any]:
    """Yield the value of each key (a ``binary`` array), in arrays of about ``PIECE_BYTES`` at most;
    null for a null or invalid key, and for a key without a record.
    """
    at = 0
    while at < len(keys):
        some = keys.slice(at, steps.keys)
        at += len(some)
        yield from _values_at_once(some, get_many, steps)


def _values_at_once(keys: Any, get_many: GetMany, steps: KeySteps) -> Iterator[Any]:
    coded = keys.dictionary_encode()
    distinct = coded.dictionary.to_pylist()
    wanted = [key for key in distinct if 0 < len(key) <= MAX_KEY_BYTES]
    found = dict(zip(wanted, get_many(wanted), strict=True)) if wanted else {}
    steps.took(len(keys), sum(len(value or b"") for value in found.values()))
    values = [found.get(key) for key in distinct]
    places = coded.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)
    values.append(None)  # of null keys
    sizes = np.fromiter((len(value or b"") for value in values), np.int64, len(values))[places]
    for first, end in _pieces(sizes):
        yield pa.array([values[place] for place in places[first:end]], pa.binary())


def _pieces(sizes: np.ndarray[Any, np.dtype[np.int64]]) -> Iterator[tuple[int, int]]:
    """Yield row ranges ``[first, end)`` within the size limit; each has one row at least."""
    ends, first = np.cumsum(sizes), 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        end = int(np.searchsorted(ends, before + PIECE_BYTES, side="right"))
        end = max(end, first + 1)
        yield first, end
        first = end
