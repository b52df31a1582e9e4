"""Tests of Parquet files that tasks read themselves: which files, in which parts, as what."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from koinon.ingest.opened_rows import Part, packed
from koinon.ingest.row_groups import GroupReader, Groups, groups_of
from koinon.sources import row_batches
from koinon_proto.contract.errors import InvalidArgumentError

pa = pytest.importorskip("pyarrow", reason="the cli extra is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="the cli extra is not installed")


def write(path: Path, rows: int = 10, *, each: int = 10, **columns: Any) -> Path:
    given = columns or {"id": pa.array(range(rows)), "name": pa.array(["n"] * rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(given), path, row_group_size=each)
    return path


def parts(*paths: Path, tasks: int = 2) -> list[Any] | None:
    found = groups_of(paths)
    if found is None:
        return None
    return [part.pieces for part in packed(found.reader, found.sizes, tasks)]


def rows_of(pieces: Any, names: list[str]) -> list[dict[str, Any]]:
    batches = Part(GroupReader({}), pieces).batches(names)
    return [row for batch in batches for row in batch.to_pylist()]


def test_parts_hold_every_row_group_once_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koinon.ingest.opened_rows.PART_BYTES_MIN", 1)
    a, b = write(tmp_path / "a.parquet", 80), write(tmp_path / "b.parquet", 40)
    assert parts(a, tasks=2) == [(Groups(str(a), 0, 4),), (Groups(str(a), 4, 8),)]
    found = parts(a, b, tasks=5)
    assert found is not None
    assert 4 <= len(found) <= 6
    groups = [(one.path, n) for part in found for one in part for n in range(one.first, one.end)]
    assert groups == [(str(a), n) for n in range(8)] + [(str(b), n) for n in range(4)]
    rows = [row["id"] for part in found for row in rows_of(part, ["id"])]
    assert rows == [*range(80), *range(40)]


def test_small_files_share_a_part_and_one_may_be_empty(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.parquet") for n in range(3)]
    assert parts(*files) == [tuple(Groups(str(file), 0, 1) for file in files)]
    empty = {"id": pa.array([], pa.int64()), "name": pa.array([], pa.string())}
    found = parts(write(tmp_path / "none" / "a.parquet", **empty))
    assert found is not None
    assert [row for part in found for row in rows_of(part, ["id"])] == []


def test_files_with_dates_of_the_other_calendar_are_left_to_spark(tmp_path: Path) -> None:
    fine, old = write(tmp_path / "a.parquet"), tmp_path / "old.parquet"
    table = pq.read_table(fine).replace_schema_metadata({"org.apache.spark.legacyDateTime": ""})
    pq.write_table(table, old)
    assert parts(fine, old) is None
    older = pq.read_table(fine).replace_schema_metadata({"org.apache.spark.version": "2.4.8"})
    pq.write_table(older, old)
    assert parts(old) is None
    pq.write_table(older.replace_schema_metadata({"org.apache.spark.version": "4.0.1"}), old)
    assert parts(old) is not None


def test_columns_of_all_files_are_read_and_those_that_do_not_agree_are_refused(
    tmp_path: Path,
) -> None:
    first = write(tmp_path / "1.parquet", id=pa.array(["e:1"]), n=pa.array([1], pa.int8()))
    second = write(
        tmp_path / "2.parquet", id=pa.array(["e:2"]), city=pa.array(["Oslo"]), n=pa.array([1 << 40])
    )
    found = groups_of([first, second])
    assert found is not None
    assert found.fields == {"id": "string", "n": "long", "city": "string"}
    batches = list(Part(found.reader, tuple(found.sizes)).batches(["id", "city", "n"]))
    assert [str(batch.schema.field("city").type) for batch in batches] == ["string", "string"]
    assert [row for batch in batches for row in batch.to_pylist()] == [
        {"id": "e:1", "city": None, "n": 1},
        {"id": "e:2", "city": "Oslo", "n": 1 << 40},
    ]
    third = write(tmp_path / "3.parquet", id=pa.array([1]))
    told = f"{third}: column 'id' has type int64, but string in {first}"
    with pytest.raises(InvalidArgumentError, match=re.escape(told)):
        groups_of([first, second, third])


def test_columns_with_dots_in_their_names_come_in_batches_as_large_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_batches, "BATCH_BYTES", 20_000)
    texts = pa.array([f"text {n}" for n in range(5_000)])
    inner = pa.StructArray.from_arrays([texts], ["c.d"])
    rows = []
    for name, column in (("a", texts), ("a.b", texts), ("s.t", inner)):
        pq.write_table(pa.table([column], [name]), tmp_path / "a.parquet")
        found = groups_of([tmp_path / "a.parquet"])
        assert found is not None
        batches = Part(found.reader, tuple(found.sizes)).batches([name])
        rows.append(next(batches).num_rows)
    assert rows[0] == rows[1]
    assert all(100 < first < 2_500 for first in rows)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(write(tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(InvalidArgumentError, match=re.escape(f"{torn}: ")):
        groups_of([torn])
    wait = write(tmp_path / "wait.parquet", wait=pa.array([timedelta(1)]))
    with pytest.raises(
        InvalidArgumentError, match=r"wait\.parquet: column 'wait' of type duration"
    ):
        groups_of([wait])


def test_types_are_named_as_spark_names_those_of_the_same_values(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet",
        view=pa.array(["x", None], pa.string_view()),
        large=pa.array([b"y", b""], pa.large_binary()),
        price=pa.array([Decimal("1.20"), None], pa.decimal128(15, 2)),
        day=pa.array([date(2024, 1, 31), None], pa.date32()),
        least=pa.array([-1, None], pa.int8()),
        unsigned=pa.array([1, None], pa.uint32()),
        at=pa.array([0, None], pa.timestamp("ns", "UTC")),
        local=pa.array([0, None], pa.timestamp("ms")),
        noon=pa.array([12, None], pa.time64("us")),
        list=pa.array([[1], None]),
        map=pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int8())),
        struct=pa.array([{"a": True}, None]),
    )
    found = groups_of([path])
    assert found is not None
    fields = found.fields
    nested = {name: fields.pop(name)["type"] for name in ("list", "map", "struct")}
    assert nested == {"list": "array", "map": "map", "struct": "struct"}
    assert fields == {
        "view": "string",
        "large": "binary",
        "price": "decimal(15,2)",
        "day": "date",
        "least": "byte",
        "unsigned": "long",
        "at": "timestamp",
        "local": "timestamp_ntz",
        "noon": "string",
    }
    (batch,) = Part(found.reader, tuple(found.sizes)).batches(["least", "view", "large"])
    assert list(map(str, batch.schema.types)) == ["int8", "string", "binary"]


def test_module_needs_no_spark() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import sys, koinon.ingest.job; print('pyspark' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "False"
