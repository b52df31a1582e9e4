"""``partition_id``: a column's partition in the cluster, for a DataFrame that is to be partitioned
like it. With ``murmur2`` and Kafka's number of partitions it is what Kafka's default partitioner
gives to the same key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as spark_functions

from koinon.spark.cluster import Cluster
from koinon.spark.encoding.keys import encode_keys
from koinon_proto.partitioner import partitioner as partitioner_of

COORDINATORS_TIMEOUT_S = 20.0
functions: Any = spark_functions


def partition_id(
    col: Column | str,
    *,
    coordinators: str | None = None,
    partition_count: int = 1024,
    partitioner: str = "murmur2",
    key_encoding: str = "binary",
) -> Column:
    """Return an int column: the partition of each key, null for null. Vectorised. On Spark 4.0
    it needs pandas, and a column of integers must not hold nulls.

    Args:
        col: binary, a string or an integer, as option ``keyColumn`` takes them.
        coordinators: ``host:port,…``: count and partitioner are the cluster's, asked for now.
        partition_count: 1 to 65,536; with ``crc16`` a power of two up to 16,384.
        partitioner: ``murmur2``, ``md5`` or ``crc16``.
        key_encoding: of integers, as option ``keyEncoding``.

    Raises:
        ConfigurationError: no such partitioner, or a count out of range.
        UnavailableError: no coordinator answered.
    """
    if coordinators is not None:
        with Cluster(coordinators, timeout_s=COORDINATORS_TIMEOUT_S) as cluster:
            config = cluster.routing().table.cluster
        partition_count, partitioner = config.partition_count, config.partitioner
    partitioner_of(partitioner, partition_count)  # complain now, not in a task

    def of_arrow(keys: pa.Array) -> pa.Array:
        return _partition_ids(keys, partitioner, partition_count, key_encoding)

    made: Column
    if hasattr(functions, "arrow_udf"):
        made = functions.arrow_udf(of_arrow, "int")(col)
    else:
        made = functions.pandas_udf(_of_pandas(of_arrow), "int")(col)
    return made


def _of_pandas(of_arrow: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function for Spark 4.0, which has no Arrow functions."""
    import pandas as pd

    def of_pandas(keys: Any) -> Any:
        return pd.Series(of_arrow(pa.Array.from_pandas(keys)).to_pandas(), dtype="Int32")

    of_pandas.__annotations__ = {"keys": pd.Series, "return": pd.Series}
    return of_pandas


def _partition_ids(keys: Any, name: str, count: int, encoding: str) -> Any:
    encoded = encode_keys([keys], encoding)
    nulls = encoded.is_null().to_numpy(zero_copy_only=False) if encoded.null_count else None
    if nulls is not None:
        encoded = encoded.fill_null(b"")
    found = partitioner_of(name, count).partitions_of_arrow(encoded)
    return pa.array(found.astype(np.int32), mask=nulls)
