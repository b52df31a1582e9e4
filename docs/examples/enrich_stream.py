"""Enriches a Kafka-partitioned stream from the store, each partition from its own node.

    python docs/examples/enrich_stream.py [--coordinators HOST:PORT] [--clicks 200000]

docs/co-partitioning.md explains it. Without --coordinators a cluster is started for it. There is no
Kafka broker: the topic is a directory of Parquet files, one for each partition of the topic, with
the columns that Spark's Kafka source has (key, value, partition).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import koinon
from koinon.ingest.session import spark_session
from koinon.local import Setup
from koinon.spark import partition_id
from koinon_proto.partitioner import partitioner

PARTITIONS = 24
USERS = 10_000
USER_KEY = "cast(concat('user/', id) as binary)"
TOPIC = "key binary, value binary, partition int"
ENRICHED = "key binary, value binary, partition int, nodes_asked int"


def store_users(spark: SparkSession, coordinators: str) -> None:
    """Write every user's record, under a key that the topic's messages have too."""
    users = spark.range(USERS).selectExpr(
        f"{USER_KEY} as key",
        "cast(to_json(named_struct('user', id, 'country', "
        "element_at(array('gr', 'it', 'tr'), cast(id % 3 + 1 as int)))) as binary) as value",
    )
    users.write.format("koinon").option("coordinators", coordinators).mode("append").save()


def make_topic(spark: SparkSession, coordinators: str, clicks: int, directory: Path) -> None:
    """Write messages as a producer with Kafka's default partitioner would have placed them."""
    messages = spark.range(clicks).selectExpr(
        f"{USER_KEY.replace('id', f'(id * 7919) % {USERS}')} as key",
        "cast(concat('click ', id) as binary) as value",
    )
    placed = messages.withColumn("partition", partition_id("key", coordinators=coordinators))
    placed.repartitionByRange(PARTITIONS, "partition").write.parquet(str(directory))


def enricher(coordinators: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for ``mapInArrow`` that adds the user's record to each message."""

    def enrich(batches: Iterator[Any]) -> Iterator[Any]:
        with koinon.connect(coordinators) as client:
            for batch in batches:
                for part in by_partition(batch):
                    yield enriched(client, part)

    return enrich


def by_partition(batch: Any) -> Iterator[Any]:
    """Yield the messages of a batch, one partition of the topic after the other."""
    partitions = batch.column("partition")
    for number in partitions.unique():
        yield batch.filter(pc.equal(partitions, number))


def enriched(client: koinon.Client, messages: Any) -> Any:
    """Return messages of one partition with the records of their users, in one call to one node."""
    keys = messages.column("key").to_pylist()
    distinct = list(dict.fromkeys(keys))
    found = dict(zip(distinct, client.get_many(distinct), strict=True))
    users = [json.loads(found[key] or b"null") for key in keys]
    values = [
        json.dumps({"click": value.decode(), "user": user}).encode()
        for value, user in zip(messages.column("value").to_pylist(), users, strict=True)
    ]
    return pa.record_batch(
        {
            "key": messages.column("key"),
            "value": pa.array(values, pa.binary()),
            "partition": messages.column("partition"),
            "nodes_asked": pa.array([nodes_of(client, distinct)] * len(keys), pa.int32()),
        }
    )


def nodes_of(client: koinon.Client, keys: list[bytes]) -> int:
    """Return how many nodes own these keys."""
    table = client.table()
    known = partitioner(table.cluster.partitioner, table.cluster.partition_count)
    return len({table.rows[number].primary for number in known.partitions_of(keys)})


def enrich_stream(
    spark: SparkSession, coordinators: str, topic: Path, directory: Path
) -> DataFrame:
    """Run the stream over all messages of the topic; return the enriched messages."""
    messages = spark.readStream.schema(TOPIC).parquet(str(topic))
    query = (
        messages.mapInArrow(enricher(coordinators), ENRICHED)
        .writeStream.format("parquet")
        .option("path", str(directory / "enriched"))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return spark.read.parquet(str(directory / "enriched"))


def run(coordinators: str, clicks: int) -> int:
    """Run the example; return 0 if every message was enriched from one node."""
    with tempfile.TemporaryDirectory() as scratch, spark_session() as spark:
        topic = Path(scratch) / "topic"
        store_users(spark, coordinators)
        make_topic(spark, coordinators, clicks, topic)
        made = enrich_stream(spark, coordinators, topic, Path(scratch))
        text = made.value.cast("string")
        unknown = f.count_if(text.contains('"user": null'))
        rows, most, without = made.agg(f.count("*"), f.max("nodes_asked"), unknown).collect()[0]
        print(f"{rows:,} messages of {PARTITIONS} partitions are enriched, {without} had no user")
        print(f"each lookup of a partition's messages asked {most} node")
        print(made.select(text).collect()[0][0])
        return 0 if (rows, most, without) == (clicks, 1, 0) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--coordinators", help="a cluster with as many partitions as the topic")
    parser.add_argument("--clicks", type=int, default=200_000)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        coordinators = options.coordinators
        if coordinators is None:
            flags = ["--partitions", str(PARTITIONS)]
            cluster = stack.enter_context(koinon.LocalCluster(setup=Setup(coordinator_flags=flags)))
            coordinators = cluster.coordinators
        return run(coordinators, options.clicks)


if __name__ == "__main__":
    raise SystemExit(main())
