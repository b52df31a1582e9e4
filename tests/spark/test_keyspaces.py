"""Spark in keyspaces of a cluster of real processes: each job stays in the one that it names."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from koinon.client import Client
from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon.spark import count, lookup, partition_id
from koinon.spark.datasource import KoinonDataSource, Partitions, Staged
from koinon.spark.writing.jobs import Commit
from koinon.spark.writing.tasks import run_task
from koinon_proto.contract.bulk_loads import StreamBatch
from koinon_proto.contract.errors import ConfigurationError, UnknownKeyspaceError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.partitioner import partitioner_of
from tests.kit.waiting import wait_until
from tests.spark.helpers import batch_of, pairs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ROWS = 300
PLACED = {"partition_count": 6, "partitioner": "md5(until:2f)"}
"""Of a keyspace that is unlike ``default`` in all that places keys."""
STREAM_S = 200.0


@dataclass
class Spaces:
    """Makes keyspaces in the cluster."""

    admin: Admin

    def make(self, name: str, **settings: Any) -> Keyspace:
        return self.admin.keyspaces.create(name, **{"partition_count": 4, **settings}).keyspace

    def replace(self, name: str) -> None:
        """Drop a keyspace, and create another of its name."""
        self.admin.keyspaces.drop(name)
        self.make(name)


@pytest.fixture
def spaces(cluster: LocalCluster) -> Iterator[Spaces]:
    """Keyspaces for a test: those that it makes are dropped after it, for the cluster is shared."""
    with Admin(cluster.coordinators, timeout_ms=30_000) as admin:
        yield Spaces(admin)
        for keyspace in list(_known(admin)):
            if keyspace.keyspace_id:
                admin.keyspaces.drop(keyspace.name)
        wait_until(lambda: len(_known(admin).all) == 1)


def _known(admin: Admin) -> Any:
    table = admin.status().table
    assert table is not None
    return table.keyspaces


def rows_of(spark: SparkSession, name: str, number: int = ROWS) -> DataFrame:
    """The same keys for every name, each with a value that has the name."""
    return spark.range(0, number, numPartitions=2).selectExpr(
        "concat('apart/', id % 3, '/', lpad(id, 4, '0')) key", f"concat('{name}', id) value"
    )


def expected(name: str, number: int = ROWS) -> dict[bytes, bytes]:
    return {b"apart/%d/%04d" % (n % 3, n): f"{name}{n}".encode() for n in range(number)}


def write(df: DataFrame, where: str, mode: str = "append", **options: str) -> None:
    df.write.format("koinon").options(coordinators=where, **options).mode(mode).save()


def read(spark: SparkSession, where: str, **options: str) -> DataFrame:
    return spark.read.format("koinon").options(coordinators=where, **options).load()


def as_dict(df: DataFrame) -> dict[bytes, bytes]:
    return {bytes(row.key): bytes(row.value) for row in df.collect()}


def stored(client: Client, name: str) -> dict[bytes, bytes]:
    return {entry.key: entry.value for entry in client.keyspace(name).scan()}


def test_same_keys_stay_apart_in_every_operation(
    spark: SparkSession, cluster: LocalCluster, client: Client, spaces: Spaces
) -> None:
    where = cluster.coordinators
    made = spaces.make("rides", **PLACED)
    spaces.make("plain")
    rides = {"keyspace": "rides"}
    by_url = f"koinon://{where}/plain"
    client.put_many(expected("default"))
    write(rows_of(spark, "rides"), where, **rides)
    write(rows_of(spark, "plain"), by_url)
    assert as_dict(read(spark, where, prefix="apart/")) == expected("default")
    assert as_dict(read(spark, where, **rides)) == expected("rides") == stored(client, "rides")
    assert as_dict(read(spark, by_url)) == expected("plain") == stored(client, "plain")

    shown = read(spark, where, metadata="true", **rides)
    of_key = partition_id("key", coordinators=where, keyspace="rides")
    ids = shown.select("_partition_id", of_key).distinct().collect()
    assert {row[0] for row in ids} == {row[1] for row in ids} <= set(made.partition_ids)
    assert len(ids) == len({row[0] for row in ids})
    few = {"keys": "apart/1/0001,apart/2/0002,none", "metadata": "true"}
    found = read(spark, where, **few, **rides)
    assert as_dict(found) == {b"apart/1/0001": b"rides1", b"apart/2/0002": b"rides2"}
    assert {row._partition_id for row in found.collect()} <= set(made.partition_ids)
    looked = lookup(found.select("key"), on="key", coordinators=where, keyspace="plain")
    assert as_dict(looked) == {b"apart/1/0001": b"plain1", b"apart/2/0002": b"plain2"}

    write(rows_of(spark, "new", 30), where, "overwrite", **rides)
    write(rows_of(spark, "none", 0), by_url, "overwrite", prefix="apart/1/")
    assert count(spark, coordinators=where, keyspace="rides") == 30
    assert count(spark, coordinators=by_url) == ROWS - ROWS // 3
    assert count(spark, coordinators=where, prefix="apart/") == ROWS
    assert stored(client, "rides") == expected("new", 30)
    (numbers,) = read(spark, where, counts="true", **rides).agg({"*": "count"}).collect()
    assert numbers[0] == made.partition_count
    descriptions = [(load.keyspace, load.rows) for load in spaces.admin.loads()][-4:]
    assert descriptions == [("rides", ROWS), ("plain", ROWS), ("rides", 30), ("plain", 0)]


def test_prefix_asks_one_partition_by_the_keyspaces_router_and_its_value_limit_holds(
    spark: SparkSession, cluster: LocalCluster, spaces: Spaces
) -> None:
    where = cluster.coordinators
    made = spaces.make("rides", max_value_bytes=8, **PLACED)
    options = {"keyspace": "rides", "prefix": "apart/"}
    write(rows_of(spark, "v"), where, "overwrite", **options)
    read_back = read(spark, where, **options)
    assert read_back.rdd.getNumPartitions() == 1
    assert as_dict(read_back) == expected("v")
    source = KoinonDataSource({"coordinators": where, **options})
    (only,) = source.reader(_schema()).partitions()
    assert isinstance(only, Partitions)
    assert only.partition_ids == (partitioner_of(made).partition_of(b"apart/"),)
    assert only.partition_ids[0] in made.partition_ids
    with pytest.raises(Exception, match="column value: value of more than 8 bytes"):
        write(rows_of(spark, "too long "), where, keyspace="rides")


def test_unknown_keyspace_is_told_with_what_to_do(
    spark: SparkSession, cluster: LocalCluster
) -> None:
    where = cluster.coordinators
    given: dict[str, Any] = {"coordinators": where, "keyspace": "none"}
    keys = rows_of(spark, "v").select("key")
    attempts: list[Callable[[], object]] = [
        lambda: write(rows_of(spark, "v"), where, keyspace="none"),
        lambda: write(rows_of(spark, "v"), f"koinon://{where}/none"),
        lambda: read(spark, where, keyspace="none").collect(),
        lambda: count(spark, **given),
        lambda: lookup(keys, on="key", **given),
        lambda: partition_id("key", **given),
    ]
    for attempt in attempts:
        with pytest.raises(Exception, match="keyspace 'none'") as caught:
            attempt()
        assert "keyspace 'none' has been dropped, or was never created" in str(caught.value)
        assert "koinon admin keyspaces" in str(caught.value)
    with pytest.raises(ConfigurationError, match="keyspace: say by coordinators"):
        partition_id("key", keyspace="rides")


# --- a keyspace that is dropped, and created again under its name, is another ------------------


def test_keyspace_replaced_after_planning_is_not_touched(
    cluster: LocalCluster, client: Client, spaces: Spaces
) -> None:
    spaces.make("again")
    given = {"coordinators": cluster.coordinators, "keyspace": "again"}
    client.keyspace("again").put(b"key-000001", b"old")
    source = KoinonDataSource(given)
    only_key = KoinonDataSource({**given, "keys": "key-000001"})
    readers = [source.reader(_schema()), only_key.reader(_schema())]
    planned = [reader.partitions()[0] for reader in readers]
    append, over = (source.writer(_schema(), overwrite) for overwrite in (False, True))
    assert len(list(readers[1].read(planned[1]))) == 1
    empty = run_task(over.job, 0, [])  # it opens no load
    spaces.replace("again")
    other = client.keyspace("again")
    other.put(b"key-000001", b"new")
    for reader, partition in zip(readers, planned, strict=True):
        with pytest.raises(UnknownKeyspaceError, match="keyspace 'again'"):
            list(reader.read(partition))
    with pytest.raises(UnknownKeyspaceError, match="keyspace 'again'"):
        run_task(append.job, 0, [batch_of(pairs(0, 5))])
    with pytest.raises(UnknownKeyspaceError, match="keyspace 'again'"):
        Commit(job=over.job, reports=[empty], out=io.StringIO()).run()
    assert [(entry.key, entry.value) for entry in other.scan()] == [(b"key-000001", b"new")]


@pytest.mark.long  # the test above tries it without jobs, test_ingest with one
def test_keyspace_replaced_while_a_job_runs_fails_it(
    spark: SparkSession, cluster: LocalCluster, client: Client, spaces: Spaces
) -> None:
    """The task's first rows come after the keyspace has been replaced, in the task itself."""
    spaces.make("again")
    where = cluster.coordinators

    def replaced_first(batches: Iterator[Any]) -> Iterator[Any]:
        with Admin(where, timeout_ms=30_000) as admin:
            admin.keyspaces.drop("again")
            admin.keyspaces.create("again", partition_count=4)
        yield from batches

    df = rows_of(spark, "v").coalesce(1)
    late = df.mapInArrow(replaced_first, df.schema)
    with pytest.raises(Exception, match="UnknownKeyspaceError: keyspace 'again'"):
        write(late, where, keyspace="again")
    with pytest.raises(Exception, match="UnknownKeyspaceError: keyspace 'again'"):
        write(late, where, "overwrite", keyspace="again")
    assert stored(client, "again") == {}
    assert not any(load.state.name in ("OPEN", "MERGING") for load in spaces.admin.loads())


def test_stream_writes_into_its_keyspace_and_fails_once_that_is_dropped(
    spark: SparkSession, cluster: LocalCluster, client: Client, spaces: Spaces, tmp_path: Path
) -> None:
    spaces.make("again")
    folder = tmp_path / "source"
    folder.mkdir()

    def feed(name: str) -> None:
        (tmp_path / name).write_text(json.dumps({"key": f"apart/{name}", "value": name}))
        (tmp_path / name).rename(folder / f"{name}.json")

    feed("a")
    with _streaming(spark, folder, tmp_path, cluster.coordinators) as query:
        wait_until(lambda: stored(client, "again") == {b"apart/a": b"a"})
        wait_until(lambda: not query.status["isTriggerActive"])
        spaces.admin.keyspaces.drop("again")
        feed("b")
        with pytest.raises(Exception, match="UnknownKeyspaceError: keyspace 'again'"):
            query.awaitTermination(STREAM_S)
    assert client.get(b"apart/a") is None


def test_micro_batch_is_committed_in_the_keyspace_that_it_was_planned_for(
    cluster: LocalCluster, client: Client, spaces: Spaces
) -> None:
    """Spark commits with a data source of its own, made after the keyspace was replaced: without
    rows, an overwrite would empty the new one.
    """
    spaces.make("again")
    owned = {"keyspace": "again", "ownKeyspace": "true"}
    source = KoinonDataSource({"coordinators": cluster.coordinators, **owned})
    planned = source.streamWriter(_schema(), overwrite=True)
    report = replace(run_task(planned.job, 0, []), stream_batch=StreamBatch("q", 0))
    spaces.replace("again")
    client.keyspace("again").put(b"k", b"kept")
    committing = source.streamWriter(_schema(), overwrite=True)
    with pytest.raises(UnknownKeyspaceError, match="keyspace 'again'"):
        committing.commit([Staged(report)], 0)
    assert stored(client, "again") == {b"k": b"kept"}


@contextmanager
def _streaming(spark: SparkSession, folder: Path, scratch: Path, where: str) -> Iterator[Any]:
    query = (
        spark.readStream.schema("key string, value string")
        .json(str(folder))
        .writeStream.format("koinon")
        .options(coordinators=where, keyspace="again")
        .option("checkpointLocation", str(scratch / "checkpoint"))
        .start()
    )
    try:
        yield query
    finally:
        query.stop()


def _schema() -> StructType:
    from pyspark.sql.types import BinaryType, StructField, StructType

    return StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])
