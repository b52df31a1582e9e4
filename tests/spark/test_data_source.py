"""The data source in a real Spark, over a fake cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from koinon.spark import count, datasource, register
from koinon.spark.datasource import PUSHDOWN, KoinonReader
from koinon.spark.encoding.keys import key_bytes
from koinon.spark.options import read_options
from koinon_proto.contract.bulk_loads import LoadState
from tests.spark.fake_loads import LoadsCluster
from tests.spark.helpers import record_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def write(df: DataFrame, fake: LoadsCluster, mode: str = "append", **options: str) -> None:
    given = {"coordinators": fake.seeds, "timeout": "5s", **options}
    df.write.format("koinon").options(**given).mode(mode).save()


def read(spark: SparkSession, fake: LoadsCluster, **options: str) -> DataFrame:
    return spark.read.format("koinon").options(coordinators=fake.seeds, **options).load()


def failure(df: DataFrame, fake: LoadsCluster, mode: str = "append", **options: str) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 -- Spark's own, by version
        write(df, fake, mode, **options)
    return str(caught.value)


def test_write_and_read_back_a_data_frame(spark: SparkSession, fake: LoadsCluster) -> None:
    df = spark.range(0, 3_000, numPartitions=3).selectExpr(
        "concat('key-', id) key", "concat('v', id) value"
    )
    write(df, fake)
    expected = {f"key-{i}".encode(): f"v{i}".encode() for i in range(3_000)}
    assert fake.values() == expected
    assert len(fake.only_load().attempts) == 3
    back = read(spark, fake)
    assert back.schema.simpleString() == "struct<key:binary,value:binary>"
    assert {bytes(row.key): bytes(row.value) for row in back.collect()} == expected


def test_write_whole_rows_of_every_type(spark: SparkSession, fake: LoadsCluster) -> None:
    df = spark.sql(
        "select id, cast(id as int) i, cast(id as short) sh, cast(id as byte) by, "
        "cast(id as float) f, cast(id as double) d, cast(1.5 as decimal(15,2)) price, "
        "date'2024-01-31' day, timestamp'2024-01-31 12:00:00Z' at, "
        "timestamp_ntz'2024-01-31 12:00:00' local, true yes, 'te\"xt' t, cast('b' as binary) b, "
        "array(1, 2) a, map('k', 1) m, named_struct('x', 1, 'y', 'z') s, "
        "cast(null as string) nothing from range(5)"
    )
    write(df, fake, keyColumn="id", valueEncoding="json")
    row = json.loads(fake.values()[key_bytes(3)])
    assert row == {
        "id": 3,
        "i": 3,
        "sh": 3,
        "by": 3,
        "f": 3,
        "d": 3,
        "price": "1.50",
        "day": "2024-01-31",
        "at": "2024-01-31T12:00:00.000000Z",
        "local": "2024-01-31T12:00:00.000000",
        "yes": True,
        "t": 'te"xt',
        "b": "Yg==",
        "a": [1, 2],
        "m": {"k": 1},
        "s": {"x": 1, "y": "z"},
        "nothing": None,
    }
    write(df, fake, "overwrite", keyColumn="t, id", valueEncoding="msgpack")
    unpacked = msgpack.unpackb(fake.values()[key_bytes('te"xt', 3)], timestamp=3)
    assert unpacked["at"].isoformat() == "2024-01-31T12:00:00+00:00"
    assert (unpacked["b"], unpacked["s"], unpacked["d"]) == (b"b", {"x": 1, "y": "z"}, 3.0)


def test_overwrite_replaces_and_a_prefix_bounds_it(spark: SparkSession, fake: LoadsCluster) -> None:
    fake.write(b"a:old", b"1", 0)
    fake.write(b"b:old", b"2", 0)
    write(spark.sql("select 'a:new' key, 'x' value"), fake, "overwrite", prefix="a:")
    assert fake.values() == {b"a:new": b"x", b"b:old": b"2"}
    write(spark.sql("select 'c' key, 'y' value"), fake, "overwrite")
    assert fake.values() == {b"c": b"y"}
    write(spark.sql("select 'c' key, 'y' value where false"), fake, "overwrite")
    assert fake.values() == {}


def test_append_without_rows_changes_nothing(spark: SparkSession, fake: LoadsCluster) -> None:
    write(spark.sql("select 'c' key, 'y' value where false"), fake)
    assert fake.loads == {}


def test_write_mistakes_are_named_before_any_row_is_visible(
    spark: SparkSession, fake: LoadsCluster
) -> None:
    df = spark.sql("select 'a' id, 'x' name")
    null_key = spark.sql("select cast(null as string) key, 'x' value union all select 'k', 'v'")
    twice = spark.sql("select 'same' key, id value from range(3)").selectExpr(
        "key", "cast(value as string) value"
    )
    for text, told in (
        (failure(df, fake), "option keyColumn: is required; the columns are id, name"),
        (failure(df, fake, keyColum="id"), "unknown; did you mean keyColumn?"),
        (failure(df, fake, keyColumn="idd", valueColumn="name"), "did you mean 'id'?"),
        (failure(null_key, fake), "column key: null key in 1 row"),
        (failure(twice, fake), "2 rows have the key of another row, such as 'same'"),
    ):
        assert told in text
    assert fake.values() == {}
    assert {load.state for load in fake.loads.values()} <= {LoadState.ABORTED}
    with pytest.raises(Exception, match=r"option coordinators: 127\.0\.0\.1:1: ") as unreachable:
        df.write.format("koinon").options(
            coordinators="127.0.0.1:1", timeout="300ms", keyColumn="id", valueColumn="name"
        ).mode("append").save()
    assert "not served within 0.3 s" in str(unreachable.value)


def test_write_order_by_leaves_the_greatest(spark: SparkSession, fake: LoadsCluster) -> None:
    df = spark.range(0, 100, numPartitions=4).selectExpr(
        "cast(id % 10 as string) k", "cast(id as string) v", "id at"
    )
    write(df, fake, keyColumn="k", valueColumn="v", orderBy="at")
    assert fake.values() == {b"%d" % i: b"%d" % (90 + i) for i in range(10)}


def test_write_bad_rows_are_set_aside(
    spark: SparkSession, fake: LoadsCluster, tmp_path: Path
) -> None:
    df = spark.sql("select if(id = 3, null, id) k, cast(id as string) v from range(10)")
    write(df, fake, keyColumn="k", valueColumn="v", badRecordsPath=str(tmp_path))
    assert len(fake.values()) == 9
    (line,) = [
        line for path in tmp_path.glob("*/*.jsonl") for line in path.read_text().splitlines()
    ]
    assert json.loads(line)["row"] == {"k": None, "v": "3"}


def test_write_strings_that_are_not_utf8_are_refused_or_set_aside(
    spark: SparkSession, fake: LoadsCluster, tmp_path: Path
) -> None:
    bad = "if(id = 3, cast(X'ffc328' as string), 'é')"
    df = spark.sql(f"select id k, {bad} t, array({bad}) a from range(10)")
    for encoding in ("json", "msgpack"):
        given = {"keyColumn": "k", "valueEncoding": encoding}
        text = failure(df, fake, **given)
        assert "column t: string that is not valid UTF-8 in 1 row (row " in text
        assert fake.values() == {}
    write(df, fake, **given, badRecordsPath=str(tmp_path))
    assert len(fake.values()) == 9
    (path,) = tmp_path.glob("*/*.jsonl")
    assert json.loads(path.read_text()) == {
        "column": "t",
        "reason": "string that is not valid UTF-8",
        "row": {"k": 3, "t": r"\xff\xc3(", "a": [r"\xff\xc3("]},
    }


def test_write_that_fails_in_a_task_leaves_nothing(spark: SparkSession, fake: LoadsCluster) -> None:
    df = spark.range(0, 1_000, numPartitions=4).selectExpr(
        "cast(id as string) key",
        "if(id = 999, raise_error('boom'), cast(id as string)) value",
    )
    assert "boom" in failure(df, fake)
    assert fake.values() == {}
    assert all(load.state is LoadState.ABORTED for load in fake.loads.values())


# --- reading ------------------------------------------------------------------------------------


@pytest.fixture
def filled(fake: LoadsCluster) -> LoadsCluster:
    for i in range(300):
        fake.write(b"key-%03d" % i, b"v%d" % i, 0)
    return fake


def test_read_counts_keys_without_values(spark: SparkSession, filled: LoadsCluster) -> None:
    keys = read(spark, filled, keysOnly="true")
    assert keys.columns == ["key"]
    assert keys.count() == 300
    assert read(spark, filled, prefix="key-00").count() == 10


def test_read_counts_are_of_each_partition(spark: SparkSession, filled: LoadsCluster) -> None:
    counts = read(spark, filled, counts="true")
    assert counts.schema.simpleString() == "struct<partition_id:int,rows:bigint>"
    part = filled.partitioner.partition_of
    found = {row.partition_id: row.rows for row in counts.collect()}
    assert len(found) == filled.partitioner.partition_count
    assert {p: n for p, n in found.items() if n} == Counter(map(part, filled.store))
    (few,) = read(spark, filled, counts="true", prefix="key-00").agg({"rows": "sum"}).collect()
    assert few[0] == 10
    with pytest.raises(Exception, match="there is no column 'key' among partition_id, rows"):
        spark.read.format("koinon").options(coordinators=filled.seeds, counts="true").schema(
            "key binary"
        ).load().collect()


def test_count_is_of_a_prefix_or_of_all(spark: SparkSession, filled: LoadsCluster) -> None:
    assert count(spark, coordinators=filled.seeds) == 300
    assert count(spark, coordinators=filled.seeds, prefix="key-00", timeout="5s") == 10
    assert count(spark, coordinators=filled.seeds, prefix="none") == 0
    with pytest.raises(Exception, match="option tineout: unknown; did you mean timeout"):
        count(spark, coordinators=filled.seeds, tineout="5s")


def test_read_of_typed_columns_gives_back_the_rows_that_were_written(
    spark: SparkSession, filled: LoadsCluster
) -> None:
    orders = spark.createDataFrame(
        [(n, f"o{n}", Decimal(n), [n, 1]) for n in range(50)],
        "id long, name string, price decimal(12,2), items array<long>",
    )
    for encoding in ("json", "msgpack"):
        given = {"coordinators": filled.seeds, "valueEncoding": encoding}
        written = orders.write.format("koinon").options(**given, keyColumn="id")
        written.mode("overwrite").save()
        reader = spark.read.format("koinon").options(**given).schema(orders.schema)
        assert sorted(reader.load().collect()) == orders.collect()
        few = reader.load().filter("price >= 48").select("name")
        assert sorted(row.name for row in few.collect()) == ["o48", "o49"]


def test_read_metadata_columns(spark: SparkSession, filled: LoadsCluster) -> None:
    df = read(spark, filled, metadata="true")
    assert [field.simpleString() for field in df.schema.fields] == [
        "key:binary",
        "value:binary",
        "_partition_id:int",
        "_version:bigint",
        "_expires_at:timestamp",
    ]
    rows = df.where("_expires_at is null and _version > 0").collect()
    part = filled.partitioner.partition_of
    assert {(bytes(row.key), row._partition_id) for row in rows} == {
        (key, part(key)) for key in filled.store
    }


def test_read_schema_picks_columns_and_refuses_others(
    spark: SparkSession, filled: LoadsCluster
) -> None:
    source = spark.read.format("koinon").option("coordinators", filled.seeds)
    picked = source.schema("_version long not null, key binary not null").load()
    assert picked.columns == ["_version", "key"]
    assert picked.count() == 300
    for schema, told in (
        ("kee binary", "there is no column 'kee'"),
        ("key string", "column 'key' has type binary, not string"),
    ):
        with pytest.raises(Exception, match=told):
            source.schema(schema).load().collect()


def test_read_of_keys_asks_for_those_only(spark: SparkSession, filled: LoadsCluster) -> None:
    few = read(spark, filled, keys="key-007,key-299,none,key-007")
    one = read(spark, filled, keysHex=b"key-001".hex() + "," + "00" * 501)
    assert sorted(bytes(row.value) for row in few.collect()) == [b"v299", b"v7"]
    assert few.count() == 2
    assert [bytes(row.value) for row in one.collect()] == [b"v1"]
    assert read(spark, filled, keys="key-001", prefix="other").collect() == []
    assert read(spark, filled, keys="").collect() == []
    assert filled.count("ReadColumns") == 0


@pytest.mark.parametrize("pushed", ["true", "false"])
def test_read_filters_of_one_query_do_not_reach_another(
    spark: SparkSession, filled: LoadsCluster, pushed: str
) -> None:
    before = spark.conf.get(PUSHDOWN, None)
    spark.conf.set(PUSHDOWN, pushed)
    try:
        df = read(spark, filled)
        one, other = (df.where(f"key = cast('key-00{n}' as binary)") for n in (1, 2))
        few = df.where(df.key.isin(bytearray(b"key-007"), bytearray(b"none"), bytearray()))
        assert [bytes(row.value) for row in one.collect()] == [b"v1"]
        assert df.count() == 300
        assert sorted(bytes(row.value) for row in one.union(other).collect()) == [b"v1", b"v2"]
        assert [bytes(row.value) for row in few.collect()] == [b"v7"]
        assert one.where("key = cast('key-002' as binary)").collect() == []
        assert df.join(one, "key").count() == 1
        assert len(df.collect()) == 300
    finally:
        if before is not None:
            spark.conf.set(PUSHDOWN, before)


def test_reader_takes_the_filters_that_name_keys_where_spark_keeps_scans_apart(
    fake: LoadsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = pytest.importorskip("pyspark.sql.datasource")
    if not hasattr(filters, "EqualTo"):
        pytest.skip("Spark 4.0 pushes no filters down")
    key = ("key",)
    equal, few = filters.EqualTo(key, b"a"), filters.In(key, (b"a", b"b"))
    others = [filters.EqualTo(("value",), b"a"), filters.GreaterThan(key, b"a")]
    reader = KoinonReader(read_options({"coordinators": fake.seeds}), record_columns("key"))
    assert datasource.SCANS_APART or reader.pushFilters([equal]) == [equal]
    monkeypatch.setattr(datasource, "SCANS_APART", True)
    assert reader.pushFilters([few, *others]) == others
    assert reader.keys == frozenset((b"a", b"b"))
    assert reader.pushFilters([equal]) == []
    assert reader.keys == frozenset((b"a",))


def test_sql_reads_and_writes_by_a_view_and_refuses_tables(
    spark: SparkSession, filled: LoadsCluster
) -> None:
    using = f"USING koinon OPTIONS (coordinators '{filled.seeds}')"
    spark.sql(f"CREATE TEMPORARY VIEW records {using}")
    try:
        spark.sql("INSERT INTO records VALUES (X'61', X'62')")
        found = spark.sql("SELECT value FROM records WHERE key = X'61'").collect()
        assert [bytes(row.value) for row in found] == [b"b"]
        (counted,) = spark.sql("SELECT count(*) FROM records").collect()
        assert counted[0] == 301
    finally:
        spark.catalog.dropTempView("records")
    with pytest.raises(Exception, match="CREATE TABLE cannot use koinon"):
        spark.sql(f"CREATE TABLE records {using}")


def test_tables_that_spark_would_make_are_refused_and_nothing_is_written(
    spark: SparkSession, filled: LoadsCluster
) -> None:
    before = filled.values()
    df = spark.sql("select 'k' key, 'v' value")
    for frame, mode in ((df, "overwrite"), (df, "append"), (df.filter("false"), "error")):
        writer = frame.write.format("koinon").options(coordinators=filled.seeds).mode(mode)
        with pytest.raises(Exception, match="saveAsTable and writeTo make tables"):
            writer.saveAsTable("records")
    new = df.writeTo("records").using("koinon").option("coordinators", filled.seeds)
    with pytest.raises(Exception, match="saveAsTable and writeTo make tables"):
        new.createOrReplace()
    assert filled.values() == before
    assert not spark.catalog.tableExists("records")


def test_thread_that_registers_writes(spark: SparkSession, fake: LoadsCluster) -> None:
    df = spark.sql("select 'k' key, 'v' value")

    def work() -> None:
        register(spark)
        write(df, fake)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    assert fake.values() == {b"k": b"v"}


def test_read_mistakes_are_named(spark: SparkSession, fake: LoadsCluster) -> None:
    for options, told in (
        ({"keyOnly": "true"}, "did you mean keysOnly?"),
        ({"ttl": "1s"}, "option ttl: is an option of writes only"),
    ):
        with pytest.raises(Exception, match=told):
            read(spark, fake, **options).collect()


# --- registration -------------------------------------------------------------------------------


def test_package_for_registration_offers_the_data_source() -> None:
    import pyspark_koinon
    from koinon.spark import KoinonDataSource

    assert pyspark_koinon.DefaultSource is KoinonDataSource


def test_import_of_koinon_brings_neither_spark_nor_arrow() -> None:
    script = (
        "import sys, koinon, koinon.spark, koinon.spark.encoding.keys, koinon.spark.options\n"
        "from koinon.spark import key_bytes\n"
        "key_bytes(1)\n"
        "assert not {'pyspark', 'pyarrow'} & {m.split('.')[0] for m in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_format_is_found_without_registration(spark: SparkSession, filled: LoadsCluster) -> None:
    """Spark looks for sources on its Python path once a session: a new one here knows of it."""
    fresh: Any = spark.newSession()
    source = fresh.read.format("koinon").option("coordinators", filled.seeds)
    assert source.load().count() == 300
