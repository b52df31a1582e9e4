"""Micro-batches of a real Spark stream are applied exactly once, over a fake cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from koinon_proto.contract.bulk_loads import LoadState
from tests.spark.fake_loads import LoadsCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
