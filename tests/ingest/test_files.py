"""Tests of files to load: their format, and the number of rows that they say they hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from koinon.ingest import files
from koinon_proto.contract.errors import InvalidArgumentError


def touch(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return str(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.parquet", "parquet"),
        ("a.snappy.parquet", "parquet"),
        ("A.CSV", "csv"),
        ("a.csv.gz", "csv"),
        ("a.tsv", "tsv"),
        ("a.ndjson", "jsonl"),
        ("a.orc", "orc"),
    ],
)
def test_format_is_told_by_the_suffix(tmp_path: Path, name: str, kind: str) -> None:
    assert files.format_of([touch(tmp_path / name)], None) == kind


def test_format_of_a_directory_is_that_of_what_is_in_it(tmp_path: Path) -> None:
    touch(tmp_path / "events" / "day=1" / "part-0.parquet")
    touch(tmp_path / "events" / "_SUCCESS")
    touch(tmp_path / "events" / ".part-0.parquet.crc")
    assert files.format_of([str(tmp_path / "events")], None) == "parquet"
    assert files.format_of([str(tmp_path / "events" / "day=*")], None) == "parquet"


def test_format_of_remote_paths_needs_no_look(tmp_path: Path) -> None:
    assert files.format_of(["s3a://bucket/orders.parquet"], None) == "parquet"
    assert files.format_of(["s3a://bucket/orders"], "orc") == "orc"


def test_format_that_cannot_be_told_is_asked_for(tmp_path: Path) -> None:
    path = touch(tmp_path / "orders.data")
    with pytest.raises(InvalidArgumentError, match="say --format parquet, csv"):
        files.format_of([path], None)
    assert files.format_of([path], "csv") == "csv"
    with pytest.raises(InvalidArgumentError, match="xml"):
        files.format_of([path], "xml")


def test_formats_do_not_mix(tmp_path: Path) -> None:
    paths = [touch(tmp_path / "a.csv"), touch(tmp_path / "b.parquet")]
    with pytest.raises(InvalidArgumentError, match="one format at a time"):
        files.format_of(paths, None)


def test_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.csv", tmp_path / "gone*.csv"):
        with pytest.raises(FileNotFoundError) as raised:
            files.format_of([str(path)], "csv")
        assert raised.value.filename == str(path)


@pytest.mark.parametrize(
    ("marker", "kind"),
    [
        ("_delta_log/0.json", "delta"),
        (".hoodie/hoodie.properties", "hudi"),
        ("metadata/v1.metadata.json", "iceberg"),
    ],
)
def test_tables_with_removed_files_are_refused_by_their_kind(
    tmp_path: Path, marker: str, kind: str
) -> None:
    for name in (f"lake/table/{marker}", "lake/table/day=1/1.parquet", "plain/metadata/2.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    told = re.escape(f'spark.read.format("{kind}")')
    for path in ("lake", "lake/table", "lake/table/day=1", "lake/table/*/*.parquet", "l*e"):
        with pytest.raises(InvalidArgumentError, match=told):
            files.format_of([str(tmp_path / path)], None)
    for path in ("plain", "lake/table/day=1/1.parquet"):
        assert files.format_of([str(tmp_path / path)], None) == "parquet"


def test_rows_stand_in_the_files_of_columnar_formats(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import orc
    from pyarrow import parquet as pq

    table = pa.table({"k": list(range(7))})
    for part in (1, 2):
        pq.write_table(table, tmp_path / f"{part}.parquet")
        orc.write_table(table, tmp_path / f"{part}.orc")
    assert files.rows_of(None, [str(tmp_path / "*.parquet")], "parquet") == 14
    both = [str(tmp_path / "1.orc"), str(tmp_path / "2.orc")]
    assert files.rows_of(None, both, "orc") == 14
    assert files.rows_of(None, [str(tmp_path)], "csv") is None


def test_bad_rows_are_those_of_the_jobs_own_files(tmp_path: Path) -> None:
    for job, rows in (("spark-1", 2), ("spark-2", 5)):
        (tmp_path / job).mkdir()
        (tmp_path / job / "task-0.jsonl").write_text("{}\n" * rows)
    assert files.set_aside(str(tmp_path), "spark:1") == 2
    assert files.set_aside(str(tmp_path), "spark:3") == 0
    assert files.set_aside("s3a://bucket/bad", "spark:1") is None
