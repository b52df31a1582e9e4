"""``partition_id`` gives what the store and Kafka's default partitioner give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kafka.partitioner.default import DefaultPartitioner

from koinon.spark import partition_id
from koinon.spark.encoding.keys import key_bytes
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.partitioner import partitioner
from tests.spark.fake_loads import LoadsCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GOLDEN = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
"""Of Kafka's own tests: murmur2 as a signed number."""


class Topic:
    """Kafka's metadata as the partitioner asks for it: one topic, all of it available."""

    def __init__(self, partitions: int) -> None:
        self._partitions = set(range(partitions))

    def topics(self) -> set[str]:
        return {"topic"}

    def partitions_for_topic(self, _topic: str) -> set[int]:
        return self._partitions

    available_partitions_for_topic = partitions_for_topic


def of_kafka(key: bytes, count: int) -> int:
    found: int = DefaultPartitioner().partition("topic", None, key, None, None, Topic(count))
    return found


def column(df: Any, *args: Any, **options: Any) -> list[int | None]:
    return [row[0] for row in df.select(partition_id(*args, **options)).collect()]


def test_partition_id_equals_kafkas_partitioner(spark: SparkSession) -> None:
    keys = [b"", *GOLDEN, *(b"key-%d" % i * (i % 5) for i in range(500)), bytes(range(256))]
    df = spark.createDataFrame([(bytearray(key),) for key in keys], "k binary")
    for count in (1, 12, 1_024):
        expected = [of_kafka(key, count) for key in keys]
        assert column(df, df.k, partition_count=count) == expected
    golden = [(signed & 0x7FFFFFFF) % 100 for signed in GOLDEN.values()]
    assert column(df, "k", partition_count=100)[1:4] == golden


def test_partition_id_of_strings_and_integers_is_that_of_their_keys(spark: SparkSession) -> None:
    df = spark.sql("select id, concat('é', id) t from range(100)")
    store = partitioner("murmur2", 1_024)
    numbers = [store.partition_of(key_bytes(i)) for i in range(100)]
    assert column(df, "id") == numbers
    texts = [store.partition_of(f"é{i}".encode()) for i in range(100)]
    assert column(df, "t") == texts
    as_text = [store.partition_of(b"%d" % i) for i in range(100)]
    assert column(df, "id", key_encoding="text") == as_text


def test_partition_id_of_null_is_null(spark: SparkSession) -> None:
    df = spark.sql("select if(id = 1, null, cast(id as string)) t from range(3)")
    found = column(df, "t")
    assert found[1] is None
    assert None not in (found[0], found[2])


def test_partition_id_takes_count_and_partitioner_from_the_cluster(
    spark: SparkSession, fake: LoadsCluster
) -> None:
    df = spark.sql("select cast(id as string) t from range(50)")
    expected = [fake.partitioner.partition_of(b"%d" % i) for i in range(50)]
    assert column(df, "t", coordinators=fake.seeds) == expected


def test_partition_id_complains_at_once() -> None:
    with pytest.raises(ConfigurationError):
        partition_id("k", partition_count=0)
    with pytest.raises(ConfigurationError):
        partition_id("k", partitioner="crc32")
