"""``count``: how many records a keyspace has, for less than it costs to read their keys. Spark
tells a data source in Python no columns, so that ``DataFrame.count()`` reads values.
"""

from __future__ import annotations

from pyspark.sql import SparkSession


def count(spark: SparkSession, *, coordinators: str, prefix: str = "", **options: str) -> int:
    """Return how many records there are whose keys begin with ``prefix``. Each that is there
    throughout counts once; one that has expired or is deleted does not, whether or not its room is
    free yet.

    Args:
        coordinators: ``host:port,…``.
        options: further options of reads: ``keyspace``, ``timeout``, ``tlsBundle``, ``tokenFile``.

    Raises:
        ConfigurationError: from the query, as Spark tells of it: an option is wrong.
    """
    reader = spark.read.format("koinon").options(coordinators=coordinators, counts="true")
    if prefix:
        reader = reader.option("prefix", prefix)
    counted = reader.options(**options).load().agg({"rows": "sum"}).first()
    return int(counted[0] or 0) if counted is not None else 0
