"""Koinon as a data source of Apache Spark: bulk loads and bulk reads, directly at the partitions'
owners.

>>> from koinon.spark import register
>>> register(spark)
>>> orders.write.format("koinon").option("coordinators", "127.0.0.1:7400") \
...     .option("keyColumn", "o_orderkey").option("valueEncoding", "json").mode("append").save()
>>> spark.read.format("koinon").option("coordinators", "127.0.0.1:7400").load()

Needs ``pip install 'koinon[spark]'`` wherever Python runs: on the driver and on the executors.
docs/spark.md lists the options; ``koinon.spark.encoding.keys`` makes keys from columns,
``koinon.spark.encoding.values`` makes values from rows.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from koinon.spark.datasource import KoinonDataSource as KoinonDataSource
    from koinon.spark.datasource import count as count
    from koinon.spark.datasource import register as register
    from koinon.spark.encoding.keys import key_bytes as key_bytes
    from koinon.spark.lookups import lookup as lookup
    from koinon.spark.udf import partition_id as partition_id

_HOMES = {
    "KoinonDataSource": "koinon.spark.datasource",
    "count": "koinon.spark.datasource",
    "register": "koinon.spark.datasource",
    "key_bytes": "koinon.spark.encoding.keys",
    "lookup": "koinon.spark.lookups",
    "partition_id": "koinon.spark.udf",
}

__all__ = ["KoinonDataSource", "count", "register", "key_bytes", "lookup", "partition_id"]


def __getattr__(name: str) -> Any:
    """Import a name on first use: the pure modules then work without Spark."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] in ("pyspark", "pyarrow"):
            raise ModuleNotFoundError(
                f"{__name__}.{name} needs {missing.name}: pip install 'koinon[spark]'",
                name=missing.name,
            ) from missing
        raise
