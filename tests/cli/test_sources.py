"""Reading rows out of files: formats, bad rows, their numbers."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from koinon.cli.data import delimited
from koinon.cli.data import slabs as slab_module
from koinon.cli.data.delimited import lines_of
from koinon.cli.data.slabs import BadRow
from koinon.cli.data.sources import format_of, open_source
from koinon_proto.contract.errors import InvalidArgumentError


def read(path: Path, key: str, value: str | None = None) -> tuple[dict[bytes, bytes], list[BadRow]]:
    rows: dict[bytes, bytes] = {}
    bad: list[BadRow] = []
    for slab in open_source(path, format_of(path, None), key, value):
        rows.update(zip(slab.keys, slab.values, strict=True))
        bad += slab.bad
    return rows, bad


def test_csv_whole_row_becomes_json_with_cells_as_written(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,zip,text\n1,007,"two\nlines"\n2,,plain\n')
    rows, bad = read(path, "id")
    assert [json.loads(value) for value in rows.values()] == [
        {"id": "1", "zip": "007", "text": "two\nlines"},
        {"id": "2", "zip": "", "text": "plain"},
    ]
    assert bad == []


def test_csv_value_column_keeps_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"\xef\xbb\xbfid\tbody\n1\t\xff\xfe\n")
    assert read(path, "id", "body") == ({b"1": b"\xff\xfe"}, [])


def test_csv_bad_rows_are_named_by_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,v\n1,a\n2\n,c\n4,d\n" + "k" * 501 + ",e\n6,f,g\n")
    rows, bad = read(path, "id", "v")
    assert rows == {b"1": b"a", b"4": b"d"}
    assert [(row.row, row.reason) for row in bad] == [
        (2, "1 columns instead of 2"),
        (3, "the key is empty"),
        (5, "the key has 501 bytes, the limit is 500"),
        (6, "3 columns instead of 2"),
    ]


@pytest.mark.parametrize("value", ["v", None])
@pytest.mark.parametrize(
    ("content", "good", "row"),
    [
        ('id,v\n1,"abc\n2,3\n', [], 1),
        ('id,v\n1,a\n"2,b\n3,c\n', [b"1"], 2),
        ('id,v\n1,a\n2\n"3,b\n4,c', [b"1"], 3),
        ('id,v,w\n1,a,b\n2,c,"d\n3,e,f\n', [b"1"], 2),
        ('id,v\n1,a\n2,"', [b"1"], 2),
    ],
)
def test_csv_quote_that_is_never_closed_is_a_bad_row(
    tmp_path: Path, content: str, good: list[bytes], row: int, value: str | None
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    rows, bad = read(path, "id", value)
    assert list(rows) == good
    assert [(b.row, b.reason) for b in bad][-1] == (row, "a quote is never closed")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_csv_rows_are_found_by_line_as_arrow_reads_them(tmp_path: Path, newline: str) -> None:
    rows = [
        "id,v,w",
        '1,"two',
        'lines, ""quoted"", and',
        '",x',
        "",
        ',an empty key,"',
        'open, closed"',
        '2,a "quote" in a cell,"',
        '"',
        '3,"",""',
        '4,"""",x',
        "too,few",
        ',"a ""b"" c"d,',
        'last,"never closed,',
        "x",
    ]
    path = tmp_path / "a.csv"
    path.write_bytes(newline.join(rows).encode())
    good, bad = read(path, "id", "v")
    assert list(good) == [b"1", b"2", b"3", b"4"]
    assert [row.row for row in bad] == [2, 6, 7, 8]
    assert lines_of(path, [row.row for row in bad], ",") == {2: 6, 6: 12, 7: 13, 8: 14}


def test_json_bad_lines_are_named_by_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n\n\n{"id": null}\nnonsense\n')
    _, bad = read(path, "id")
    assert [(row.row, row.line) for row in bad] == [(2, 4), (3, 5)]


@pytest.mark.parametrize("block", [1 << 20, 3_000])
@pytest.mark.parametrize("value", ["v", None])
def test_csv_position_is_that_of_the_rows_not_of_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, block: int
) -> None:
    monkeypatch.setattr(slab_module, "SLAB_ROWS", 100)
    monkeypatch.setattr(delimited, "CSV_BLOCK_BYTES", block)
    path = tmp_path / "a.csv"
    path.write_text("id,v\n" + "".join(f"{n:04},{n:04}\n" for n in range(1000)))
    slabs = list(open_source(path, "csv", "id", value))
    positions = [slab.position / path.stat().st_size for slab in slabs if slab.keys]
    assert positions == pytest.approx([n / 10 for n in range(1, 11)], abs=0.02)


def test_csv_quotes_inside_a_cell_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,v\n1,5" disk\n2,"a ""b"', newline="")
    assert read(path, "id", "v") == ({b"1": b'5" disk', b"2": b'a "b'}, [])


@pytest.mark.parametrize("text", ["\xff", "e"])
def test_csv_of_malformed_rows_comes_in_bounded_slabs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(slab_module, "SLAB_ROWS", 1_000)
    monkeypatch.setattr(delimited, "CSV_BLOCK_BYTES", 4_096)
    path = tmp_path / "a.csv"
    path.write_text(
        "id,v\n" + f"1,{text},3\n" * 50_000 + "2,b\n" + f"1,{text},3\n" * 950, "latin-1"
    )
    slabs = open_source(path, "csv", "id", "v")
    first = next(slabs)
    assert first.position < path.stat().st_size, "most of the file is not read yet"
    found = [first, *slabs]
    assert max(len(slab.bad) for slab in found) == 1_000
    numbers = [b.row for slab in found for b in slab.bad]
    assert numbers == [*range(1, 50_001), *range(50_002, 50_952)]
    assert [key for slab in found for key in slab.keys] == [b"2"]


@pytest.mark.parametrize("rows", range(20, 60))
def test_csv_without_a_last_newline_is_read_wherever_its_blocks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(delimited, "CSV_BLOCK_BYTES", 128)
    path = tmp_path / "a.csv"
    path.write_text("id,v\n" + "\n".join(f"k{n:03},{'v' * 30}{n % 7}" for n in range(rows)))
    found, bad = read(path, "id", "v")
    assert (len(found), bad) == (rows, [])


def test_json_lines_are_read_from_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)
    lines = "".join(f'{{"id": "k{n}"}}\n' for n in range(12_000))
    writing = threading.Thread(target=path.write_text, args=(lines,))
    writing.start()
    found, bad = read(path, "id")
    writing.join()
    assert (len(found), bad) == (12_000, [])


def test_csv_without_rows_yields_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,v\n")
    assert read(path, "id") == ({}, [])


def test_json_lines_gzipped_keeps_the_line_and_counts_bad_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    lines = ['{"id": 7, "v": null}', "oops", "[1]", '{"v": 1}', '{"id": "x", "v": {"a": [1]}}']
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    rows, bad = read(path, "id")
    assert rows == {b"7": lines[0].encode(), b"x": lines[4].encode()}
    assert [row.row for row in bad] == [2, 3, 4]
    rows, bad = read(path, "id", "v")
    assert rows == {b"x": b'{"a":[1]}'}
    assert "the value is null" in {row.reason for row in bad}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id":"b\\ud800"}', "surrogate"),
        (b'{"id":{"a":"\\udfff"}}', "surrogate"),
        (b"[" * 100_000, "nested"),
        (b'{"id":' + b"[" * 100_000, "nested"),
        (b'{"id":' + b"9" * 5_000 + b"}", "not JSON"),
        (b'{"id":"\xff"}', "not JSON"),
    ],
)
def test_json_line_that_cannot_be_taken_leaves_its_neighbours(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id":"a"}\n' + line + b'\n{"id":"c"}\n')
    rows, bad = read(path, "id")
    assert list(rows) == [b"a", b"c"]
    assert [row.row for row in bad] == [2]
    assert reason in bad[0].reason


def test_json_lines_begin_after_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf{"id":"a"}\n{"id":"b"}\n'))
    assert read(path, "id") == ({b"a": b'{"id":"a"}', b"b": b'{"id":"b"}'}, [])


def test_numbers_that_json_has_none_for_become_words(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    numbers = [float("nan"), float("inf"), float("-inf"), 1.5]
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "n": numbers, "l": [[n] for n in numbers]}), path)
    rows, bad = read(path, "id")
    assert [json.loads(value, parse_constant=pytest.fail) for value in rows.values()] == [
        {"id": 1, "n": "NaN", "l": ["NaN"]},
        {"id": 2, "n": "Infinity", "l": ["Infinity"]},
        {"id": 3, "n": "-Infinity", "l": ["-Infinity"]},
        {"id": 4, "n": 1.5, "l": [1.5]},
    ]
    assert bad == []
    assert list(read(path, "id", "n")[0].values()) == [
        b'"NaN"',
        b'"Infinity"',
        b'"-Infinity"',
        b"1.5",
    ]


def test_parquet_columns_of_any_type_become_keys_and_values(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, None, 3], "b": [b"\xff", b"x", b""]}), path)
    rows, bad = read(path, "id", "b")
    assert rows == {b"1": b"\xff", b"3": b""}
    assert [row.row for row in bad] == [2]
    rows, _ = read(path, "id")
    assert json.loads(rows[b"1"]) == {"id": 1, "b": {"base64": "/w=="}}


def test_slabs_are_bounded_and_report_their_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module, "SLAB_ROWS", 10)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"id":{n}}}\n' for n in range(95)))
    slabs = list(open_source(path, "jsonl", "id", None))
    assert [len(slab.keys) for slab in slabs] == [10] * 9 + [5]
    assert slabs[-1].position == path.stat().st_size
    path.write_text("oops\n" * 95)
    slabs = list(open_source(path, "jsonl", "id", None))
    assert [len(slab.bad) for slab in slabs] == [10] * 9 + [5]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "x,y\n1,2\n"),
        ("a.parquet", "not parquet"),
        ("a.csv", ""),
        ("a.csv", "id,v\r1,a\r"),
        ("a.csv", "PK\0\1"),
    ],
)
def test_unusable_file_is_refused_by_name_or_reason(
    tmp_path: Path, name: str, content: str
) -> None:
    path = tmp_path / name
    path.write_text(content, newline="")
    with pytest.raises(InvalidArgumentError):
        read(path, "id")


def test_format_unknown_suffix_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="--format"):
        format_of(Path("data.bin"), None)
    assert format_of(Path("data.bin"), "csv") == "csv"
    assert format_of(Path("DATA.CSV.GZ"), None) == "csv"


def test_csv_malformed_row_that_is_no_text_is_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module, "SLAB_ROWS", 2)
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,v\n1,a\n2,\xff,c\n3,\xfe\xc3\xa9\n4\n5,e\n")
    rows, bad = read(path, "id", "v")
    assert rows == {b"1": b"a", b"3": b"\xfe\xc3\xa9", b"5": b"e"}
    assert [row.row for row in bad] == [2, 4]
    assert capfd.readouterr().err == ""


def test_oversized_value_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,v\n1,abc\n2,abcd\n")
    (slab,) = open_source(path, "csv", "id", "v", 3)
    assert slab.keys == [b"1"]
    assert [(b.row, b.reason) for b in slab.bad] == [(2, "the value has 4 bytes, the limit is 3")]


@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.gz"])
def test_truncated_gzip_names_the_file(tmp_path: Path, name: str) -> None:
    lines = "".join(f'{{"id":"{i}"}}\n' for i in range(5000)) if "json" in name else "id\n1\n" * 9
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines.encode())[:-12])
    with pytest.raises(InvalidArgumentError, match=rf"{name}: truncated or damaged"):
        read(path, "id")


def test_repeated_column_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,v,v\n1,a,b\n")
    with pytest.raises(InvalidArgumentError, match="more than one column named 'v'"):
        read(path, "id")
