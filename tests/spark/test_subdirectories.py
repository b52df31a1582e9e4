"""Files in plain subdirectories are loaded, by whichever reader."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from koinon.ingest.files import local_files, read, rows_of
from koinon.ingest.row_groups import fields_of, parts_of


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
    parts = parts_of(
        paths, fields_of(frame.schema), kind="parquet", master="local[2]", conf={}, tasks=2
    )
    assert parts is not None
    assert len({groups.path for part in parts for groups in part}) == len(local_files(paths)) == 2


def test_csv_of_subdirectories_is_read_and_days_stay_columns(
    spark: SparkSession, tmp_path: Path
) -> None:
    for name in ("plain/a.csv", "plain/sub/b.csv", "days/day=1/a.csv", "days/day=2/b.csv"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("id,n\n1,2\n")
    plain, _ = read(spark, [str(tmp_path / "plain")], "csv", keep_malformed=False)
    assert plain.count() == 2
    days, _ = read(spark, [str(tmp_path / "days")], "csv", keep_malformed=False)
    assert sorted(row.day for row in days.collect()) == [1, 2]
