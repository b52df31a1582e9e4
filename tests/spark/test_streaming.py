"""Micro-batches of a real Spark stream are applied exactly once, over a fake cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as spark_functions

from koinon_proto.contract.bulk_loads import LoadState
from tests.spark.fake_loads import LoadsCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


f: Any = spark_functions
SCHEMA = "key string, value string"


class Stream:
    """A stream of JSON files into the cluster; each run takes what is there, a file a batch."""

    def __init__(self, spark: SparkSession, fake: LoadsCluster, folder: Path) -> None:
        self.spark = spark
        self.fake = fake
        self.source = folder / "source"
        self.checkpoint = folder / "checkpoint"
        self.source.mkdir()

    def feed(self, name: str, first: int, last: int) -> None:
        lines = [json.dumps({"key": f"{i}", "value": f"{name}{i}"}) for i in range(first, last)]
        (self.source / f"{name}.json").write_text("\n".join(lines))

    def run(self, timeout: str = "5s", schema: str = SCHEMA, **options: str) -> None:
        """Apply what has been fed. Raises Spark's error of a batch that fails."""
        stream = (
            self.spark.readStream.schema(schema)
            .option("maxFilesPerTrigger", 1)
            .json(str(self.source))
            .writeStream.format("koinon")
            .option("coordinators", self.fake.seeds)
            .option("timeout", timeout)
            .options(**options)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert stream.awaitTermination(200)
        finally:
            stream.stop()

    def forget_commit(self, batch: int) -> None:
        """Make Spark believe that it was killed before it noted a batch as done."""
        for path in (self.checkpoint / "commits").glob(f"*{batch}*"):
            path.unlink()


@pytest.fixture
def stream(spark: SparkSession, fake: LoadsCluster, tmp_path: Path) -> Stream:
    return Stream(spark, fake, tmp_path)


def test_stream_batches_are_loads_of_their_own(stream: Stream, fake: LoadsCluster) -> None:
    stream.feed("a", 0, 50)
    stream.feed("b", 50, 100)
    stream.run()
    expected = {b"%d" % i: b"%s%d" % (b"a" if i < 50 else b"b", i) for i in range(100)}
    assert fake.values() == expected
    batches = [load.batch for load in fake.loads.values()]
    assert [batch.batch_id for batch in batches if batch] == [0, 1]
    assert len({batch.query_id for batch in batches if batch}) == 1


def test_stream_batch_that_is_replayed_changes_nothing(stream: Stream, fake: LoadsCluster) -> None:
    stream.feed("a", 0, 10)
    stream.run()
    fake.write(b"3", b"written since", 0)
    stream.forget_commit(0)
    stream.feed("b", 10, 20)
    stream.run()
    assert fake.values()[b"3"] == b"written since"
    assert fake.values()[b"15"] == b"b15"
    assert len(fake.loads) == 2


def test_stream_batch_that_fails_is_whole_in_the_next_run(
    stream: Stream, fake: LoadsCluster
) -> None:
    stream.feed("a", 0, 10)
    fake.move(range(16), 0)
    with pytest.raises(Exception, match="not served within 1 s"):
        stream.run("1s")
    assert fake.values() == {}
    fake.move(range(16), 1)
    stream.run()
    assert fake.values() == {b"%d" % i: b"a%d" % i for i in range(10)}
    done = [load for load in fake.loads.values() if load.state is LoadState.DONE]
    assert len(done) == 1


def test_stream_batch_that_deletes_is_applied_once(stream: Stream, fake: LoadsCluster) -> None:
    fake.write(b"gone", b"before", 0)
    rows = [{"key": "gone", "gone": True}, {"key": "brief", "value": "v", "lives": 3_600_000}]
    (stream.source / "a.json").write_text("\n".join(map(json.dumps, rows)))
    options = {"keyColumn": "key", "valueColumn": "value"}
    options |= {"ttlColumn": "lives", "deleteColumn": "gone"}
    changes = f"{SCHEMA}, lives long, gone boolean"
    stream.run(schema=changes, **options)
    assert fake.values() == {b"brief": b"v"}
    assert fake.store[b"brief"][2] > 0
    fake.write(b"gone", b"written since", 0)
    stream.forget_commit(0)
    stream.run(schema=changes, **options)
    assert fake.values() == {b"brief": b"v", b"gone": b"written since"}


def counts(spark: SparkSession, stream: Stream, mode: str) -> Any:
    lines = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    kinds = lines.json(str(stream.source)).groupBy(f.concat(f.lit("n:"), "value").alias("key"))
    counted = kinds.agg(f.count("*").cast("string").alias("value"))
    writer = counted.writeStream.outputMode(mode).trigger(availableNow=True)
    return writer.option("checkpointLocation", str(stream.checkpoint))


def finish(query: Any) -> None:
    try:
        assert query.awaitTermination(200)
    finally:
        query.stop()


def test_stream_in_complete_mode_replaces_what_the_query_owns_and_nothing_else(
    spark: SparkSession, stream: Stream, fake: LoadsCluster
) -> None:
    fake.write(b"other", b"kept", 0)
    fake.write(b"n:old", b"of an earlier query", 0)
    for name in ("a", "b"):
        rows = [{"key": f"{i}", "value": f"v{i % 2}"} for i in range(4)]
        (stream.source / f"{name}.json").write_text("\n".join(map(json.dumps, rows)))
    writer = counts(spark, stream, "complete").format("koinon").option("coordinators", fake.seeds)
    with pytest.raises(Exception, match="output mode complete replaces at each batch all keys"):
        finish(writer.start())
    assert fake.values() == {b"other": b"kept", b"n:old": b"of an earlier query"}
    finish(writer.option("prefix", "n:").start())
    assert fake.values() == {b"other": b"kept", b"n:v0": b"4", b"n:v1": b"4"}
    stream.forget_commit(1)
    finish(writer.option("prefix", "").option("ownKeyspace", "true").start())
    assert len(fake.loads) == 2, "the last batch had been applied"
    (stream.source / "c.json").write_text(json.dumps({"key": "1", "value": "v1"}))
    finish(writer.start())
    assert fake.values() == {b"n:v0": b"4", b"n:v1": b"5"}


def test_stream_in_update_mode_upserts_by_batch_writes_that_count_once(
    spark: SparkSession, stream: Stream, fake: LoadsCluster
) -> None:
    fake.write(b"other", b"kept", 0)
    given = {"coordinators": fake.seeds, "txnAppId": "counts"}

    def upsert(batch: DataFrame, number: int) -> None:
        writer = batch.write.format("koinon").options(**given, txnVersion=str(number))
        writer.mode("append").save()

    stream.feed("a", 0, 3)
    finish(counts(spark, stream, "update").foreachBatch(upsert).start())
    expected = {b"other": b"kept", **{b"n:a%d" % i: b"1" for i in range(3)}}
    assert fake.values() == expected
    fake.write(b"n:a1", b"written since", 0)
    stream.forget_commit(0)
    finish(counts(spark, stream, "update").foreachBatch(upsert).start())
    assert fake.values() == {**expected, b"n:a1": b"written since"}
    stream.feed("b", 3, 5)
    finish(counts(spark, stream, "update").foreachBatch(upsert).start())
    assert fake.values().keys() == {*expected, b"n:b3", b"n:b4"}
