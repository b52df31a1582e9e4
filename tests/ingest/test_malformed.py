"""A malformed row is named by its file and line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from koinon.ingest.failures import explained
from koinon.ingest.malformed import located


def told(paths: list[Path], kind: str, row: str) -> str:
    error = explained(RuntimeError(f"x\n[MALFORMED_CSV_RECORD] Malformed CSV record: {row}\n\tat"))
    return str(located(error, [str(path) for path in paths], kind)).splitlines()[0]


def test_row_of_csv_is_found_in_its_file(tmp_path: Path) -> None:
    fine, bad = tmp_path / "a.csv", tmp_path / "b.csv.gz"
    fine.write_text("id,name\n1,x\n")
    bad.write_bytes(gzip.compress(b"id,name\r\n1,x\r\ntoo,many,cells\r\n2,y\r\n"))
    assert told([tmp_path], "csv", "too,many,cells") == (
        f"a row is malformed: {bad} line 3: too,many,cells"
    )
    assert told([fine], "csv", "too,many,cells") == "a row is malformed: too,many,cells"


def test_long_row_is_found_by_how_it_begins(tmp_path: Path) -> None:
    path, row = tmp_path / "a.csv", "x," * 300
    path.write_text(f"id,name\n1,x\n{row}\n")
    assert f"{path} line 3: x,x" in told([path], "csv", row)


@pytest.mark.parametrize("line", ["{", "[1]", '{"a": 1} x'])
def test_line_that_is_no_object_is_found(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{line}\n')
    assert told([path], "jsonl", "[null]") == f"a row is malformed: {path} line 3"
