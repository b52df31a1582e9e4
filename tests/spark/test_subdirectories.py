"""Files in plain subdirectories are loaded, by whichever reader."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from koinon.ingest.files import have_columns_in_names, local_files, read, rows_of
from koinon.ingest.opened_rows import open_rows
from koinon.ingest.settings import Settings
from koinon.spark.writing.planning import MALFORMED
from koinon_proto.contract.errors import InvalidArgumentError

SETTINGS = Settings(coordinators="127.0.0.1:9", key="id", encoding="json")


def test_files_of_subdirectories_are_read_by_spark_as_by_arrow(
    spark: SparkSession, tmp_path: Path
) -> None:
    for name in ("a.parquet", "sub/b.parquet"):
        file = tmp_path / "plain" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": pa.array(range(10))}), file)
    paths = [str(tmp_path / "plain")]
    frame, _ = read(spark, paths, "parquet", keep_malformed=False)
    assert frame.count() == rows_of(spark, paths, "parquet") == 20
    rows = open_rows(spark, paths, "parquet", SETTINGS, conf={}, keep_malformed=False)
    assert rows.parts is not None
    read_by_tasks = {groups.path for part in rows.parts for groups in part.pieces}
    assert len(read_by_tasks) == len(local_files(paths)) == 2


def test_csv_of_subdirectories_is_read_and_days_stay_columns(
    spark: SparkSession, tmp_path: Path
) -> None:
    for name in ("plain/a.csv", "plain/sub/b.csv", "days/day=1/a.csv", "days/day=2/b.csv"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("id,n\n1,2\n")
    plain, _ = read(spark, [str(tmp_path / "plain")], "csv", keep_malformed=False)
    assert plain.count() == 2
    assert not have_columns_in_names([str(tmp_path / "plain")])
    assert have_columns_in_names([str(tmp_path / "days")])
    days, _ = read(spark, [str(tmp_path / "days")], "csv", keep_malformed=False)
    assert sorted(row.day for row in days.collect()) == [1, 2]


def test_csv_that_spark_reads_keeps_every_byte(spark: SparkSession, tmp_path: Path) -> None:
    for day, text in (("day=a b", "Müünchen ż\ufffd"), ("day=ż", "é")):
        file = tmp_path / "days" / day / "a.csv"
        file.parent.mkdir(parents=True)
        file.write_text(f"\ufeffid,ż.ó,n\n1,{text},7\n", encoding="utf-8")
    paths, typed = [str(tmp_path / "days")], ["n"]
    frame, _ = read(spark, paths, "csv", keep_malformed=False, typed=typed)
    assert [kind for _, kind in frame.dtypes] == ["string", "string", "int", "string"]
    rows = sorted(map(tuple, frame.collect()))
    assert rows == [("1", "Müünchen ż\ufffd", 7, "a b"), ("1", "é", 7, "ż")]
    file.write_bytes(b"id,z\n1,M\xfcnchen,7\n2,M\xfcnchen\n")
    frame, bad = read(spark, [str(file)], "csv", keep_malformed=True)
    (row,) = frame.selectExpr("cast(z as binary) z").collect()
    assert bytes(row.z) == b"M\xfcnchen"
    (row,) = bad.selectExpr("id", f"cast({MALFORMED} as binary) text").collect()
    assert bytes(row.text) == b"1,M\xfcnchen,7"
    file.write_bytes(b"id,\xfc\n1,2\n")
    with pytest.raises(InvalidArgumentError, match="in a header row is not UTF-8"):
        read(spark, [str(file)], "csv", keep_malformed=False)


def test_tables_elsewhere_with_removed_files_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "table" / "metadata").mkdir(parents=True)
    (tmp_path / "table" / "metadata" / "1.metadata.json").touch()
    uri = [f"file://{tmp_path}/table"]
    with pytest.raises(InvalidArgumentError, match="is a table of Iceberg"):
        open_rows(spark, uri, "parquet", SETTINGS, conf={}, keep_malformed=False)
