"""Tests of Parquet files that tasks read themselves: which files, in which parts, as what."""

from __future__ import annotations

import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from koinon.ingest.row_groups import Groups, Part, batches_of, parts_of

pa = pytest.importorskip("pyarrow", reason="the cli extra is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="the cli extra is not installed")

FIELDS = {"id": "long", "name": "string"}


def write(path: Path, rows: int = 10, *, each: int = 10, **columns: Any) -> Path:
    given = columns or {"id": pa.array(range(rows)), "name": pa.array(["n"] * rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(given), path, row_group_size=each)
    return path


def parts(*paths: Path | str, **how: Any) -> list[Part] | None:
    given = {"kind": "parquet", "master": "local[2]", "conf": {}, "tasks": 2, **how}
    fields = given.pop("fields", FIELDS)
    return parts_of([str(path) for path in paths], fields, **given)


def test_parts_hold_every_row_group_once_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koinon.ingest.row_groups.PART_BYTES_MIN", 1)
    a, b = write(tmp_path / "a.parquet", 80), write(tmp_path / "b.parquet", 40)
    assert parts(a, tasks=2) == [(Groups(str(a), 0, 4),), (Groups(str(a), 4, 8),)]
    found = parts(a, b, tasks=5)
    assert found is not None
    assert 4 <= len(found) <= 6
    groups = [(one.path, n) for part in found for one in part for n in range(one.first, one.end)]
    assert groups == [(str(a), n) for n in range(8)] + [(str(b), n) for n in range(4)]
    rows = [row for part in found for batch in batches_of(part, ["id"]) for row in batch[0]]
    assert [row.as_py() for row in rows] == [*range(80), *range(40)]


def test_small_files_share_a_part_and_one_may_be_empty(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.parquet") for n in range(3)]
    assert parts(*files) == [tuple(Groups(str(file), 0, 1) for file in files)]
    assert parts(tmp_path) == parts(*files)
    assert parts(tmp_path, files[0]) == parts(*files), "a file that is named twice is read once"
    empty = {"id": pa.array([], pa.int64()), "name": pa.array([], pa.string())}
    found = parts(write(tmp_path / "none" / "a.parquet", **empty))
    assert found is not None
    assert [batch for part in found for batch in batches_of(part, ["id"]) if len(batch)] == []


@pytest.mark.parametrize(
    "how",
    [
        {"kind": "orc"},
        {"master": "spark://elsewhere:7077"},
        {"conf": {"spark.sql.parquet.binaryAsString": "true"}},
        {"conf": {"spark.hadoop.fs.s3a.access.key": "k"}},
        {"fields": {**FIELDS, "day": "integer"}},
        {"fields": {"id": "integer", "name": "string"}},
        {"fields": {"ID": "long", "name": "string"}},
        {"fields": {"id": "long", "name": {"type": "array"}}},
    ],
)
def test_what_spark_might_read_otherwise_is_left_to_spark(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    path = write(tmp_path / "a.parquet")
    assert parts(path) is not None
    assert parts(path, **how) is None


def test_files_that_arrow_might_read_otherwise_are_left_to_spark(tmp_path: Path) -> None:
    fine = write(tmp_path / "a.parquet")
    assert parts(fine, "s3a://bucket/a.parquet") is None
    assert parts(write(tmp_path / "day=1" / "a.parquet")) is None
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(fine.read_bytes()[:-20])
    assert parts(fine, torn) is None
    old = tmp_path / "old.parquet"
    table = pq.read_table(fine).replace_schema_metadata({"org.apache.spark.legacyDateTime": ""})
    pq.write_table(table, old)
    assert parts(old) is None
    older = pq.read_table(fine).replace_schema_metadata({"org.apache.spark.version": "2.4.8"})
    pq.write_table(older, old)
    assert parts(old) is None
    pq.write_table(older.replace_schema_metadata({"org.apache.spark.version": "4.0.1"}), old)
    assert parts(old) is not None
    at = pa.array([0], pa.timestamp("us", "UTC"))
    instants = write(tmp_path / "at.parquet", at=at)
    assert parts(instants, fields={"at": "timestamp"}) is None
    unsigned = write(tmp_path / "u.parquet", n=pa.array([1], pa.uint32()))
    assert parts(unsigned, fields={"n": "long"}) is None


def test_batches_have_the_asked_columns_in_that_order_with_sparks_types(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet",
        view=pa.array(["x", None], pa.string_view()),
        large=pa.array([b"y", b""], pa.large_binary()),
        price=pa.array([Decimal("1.20"), None], pa.decimal128(15, 2)),
        day=pa.array([date(2024, 1, 31), None], pa.date32()),
        least=pa.array([-1, None], pa.int8()),
    )
    fields = {
        "view": "string",
        "large": "binary",
        "price": "decimal(15,2)",
        "day": "date",
        "least": "byte",
    }
    found = parts(path, fields=fields)
    assert found is not None
    assert parts(path, fields={**fields, "price": "decimal(15,3)"}) is None
    (batch,) = batches_of(found[0], ["least", "view", "large", "price", "day"])
    assert list(map(str, batch.schema.types)) == [
        "int8",
        "string",
        "binary",
        "decimal128(15, 2)",
        "date32[day]",
    ]
    assert batch.to_pylist()[0] == {
        "least": -1,
        "view": "x",
        "large": b"y",
        "price": Decimal("1.20"),
        "day": date(2024, 1, 31),
    }


def test_module_needs_no_spark() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import sys, koinon.ingest.job; print('pyspark' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "False"
