"""``partition_id``: a column with the partition of each key in a keyspace, for partitioning a
DataFrame alike. With ``murmur2`` and Kafka's number of partitions it equals Kafka's default
partitioner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as spark_functions

from koinon.spark.cluster import cluster_of, opened
from koinon.spark.encoding.keys import encode_keys
from koinon.spark.options import cluster_options
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.partitioner import Partitioner, sure_partitioner
from koinon_proto.partitioner import partitioner as make_partitioner

TIMEOUT = "20s"
"""The timeout of a coordinator's answer to ``partition_id``."""
functions: Any = spark_functions


def partition_id(
    col: Column | str,
    *,
    coordinators: str | None = None,
    keyspace: str = "",
    partition_count: int = 1024,
    partitioner: str = "murmur2",
    key_encoding: str = "binary",
    tls_bundle: str = "",
    token_file: str = "",
) -> Column:
    """Return an int column: the partition of each key, null for null. Vectorised. On Spark 4.0 it
    needs pandas, and a column of integers must not hold nulls.

    Args:
        col: binary, a string or an integer, as in option ``keyColumn``.
        coordinators: ``host:port,…``: use the cluster's number of partitions and partitioner,
            requested now.
        keyspace: with ``coordinators``: the keyspace whose settings are used; by default
            ``default``.
        partition_count: 1 to 65,536; with ``crc16`` a power of two up to 16,384.
        partitioner: ``murmur2``, ``md5`` or ``crc16``; with a router as in ``murmur2(until:2f)``.
        key_encoding: of integers, as in option ``keyEncoding``.
        tls_bundle, token_file: with ``coordinators``: as in options ``tlsBundle`` and
            ``tokenFile``.

    Raises:
        ConfigurationError: no such partitioner, a count out of range, or a keyspace without
            coordinators.
        UnknownKeyspaceError: there is no such keyspace.
        PartitionerMismatchError: the cluster's partitioner gives other results here. (If it does so
            in a task, the task fails with it.)
        UnavailableError: no coordinator answered.
    """
    if coordinators is not None:
        given = {"coordinators": coordinators, "keyspace": keyspace, "timeout": TIMEOUT}
        given |= {"tlsBundle": tls_bundle, "tokenFile": token_file}
        with cluster_of(opened(cluster_options(given))) as cluster:
            known = cluster.target().partitioner
    elif keyspace:
        raise ConfigurationError(reason="keyspace: say by coordinators of which cluster")
    else:
        known = make_partitioner(partitioner, partition_count)  # raise now, not in a task
    name, count, base, fingerprint = (
        known.name,
        known.partition_count,
        known.base,
        known.fingerprint,
    )

    def of_arrow(keys: pa.Array) -> pa.Array:
        chosen = sure_partitioner(name, count, fingerprint, base)
        return _partition_ids(keys, chosen, key_encoding)

    made: Column
    if hasattr(functions, "arrow_udf"):
        made = functions.arrow_udf(of_arrow, "int")(col)
    else:
        made = functions.pandas_udf(_of_pandas(of_arrow), "int")(col)
    return made


def _of_pandas(of_arrow: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the function for Spark 4.0, which has no Arrow functions."""
    import pandas as pd

    def of_pandas(keys: Any) -> Any:
        return pd.Series(of_arrow(pa.Array.from_pandas(keys)).to_pandas(), dtype="Int32")

    of_pandas.__annotations__ = {"keys": pd.Series, "return": pd.Series}
    return of_pandas


def _partition_ids(keys: Any, known: Partitioner, encoding: str) -> Any:
    encoded = encode_keys([keys], encoding)
    nulls = encoded.is_null().to_numpy(zero_copy_only=False) if encoded.null_count else None
    if nulls is not None:
        encoded = encoded.fill_null(b"")
    found = known.partitions_of_arrow(encoded)
    return pa.array(found.astype(np.int32), mask=nulls)
