"""Reading rows out of files: formats, bad rows, their numbers."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from koinon.sources import delimited, row_batches, text_files
from koinon.sources import slabs as slab_module
from koinon.sources.delimited import lines_of
from koinon.sources.opening import format_of, open_source, pieces_of, read_piece
from koinon.sources.slabs import BadRow, SlabMaker
from koinon.sources.taken import Taken
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
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1.5",
    ]


def test_parquet_columns_of_any_type_become_keys_and_values(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, None, 3], "b": [b"\xff", b"x", b""]}), path)
    rows, bad = read(path, "id", "b")
    assert rows == {b"1": b"\xff", b"3": b""}
    assert [row.row for row in bad] == [2]
    rows, _ = read(path, "id")
    assert json.loads(rows[b"1"]) == {"id": 1, "b": "/w=="}


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


@pytest.mark.parametrize(
    ("header", "names"),
    [
        (b'id,"long\nname"\n', ["id", "long\nname"]),
        (b"id,v,,\n", ["id", "v", "_c2", "_c3"]),
        (b"\r\n\nid,v\n", ["id", "v"]),
        (b"\xef\xbb\xbfid, v\r\n", ["id", " v"]),
        (b'\xef\xbb\xbf"id","a ""b"""\n', ["id", 'a "b"']),
    ],
)
def test_csv_header_is_read_as_rows_are(tmp_path: Path, header: bytes, names: list[str]) -> None:
    path = tmp_path / "a.csv"
    row = b",".join([b"1"] * len(names)) + b"\n"
    path.write_bytes(header + row + b"too,many" + row)
    rows, bad = read(path, "id")
    assert [list(json.loads(value)) for value in rows.values()] == [names]
    assert [row.row for row in bad] == [2]
    assert lines_of(path, [2], ",") == {2: header.count(b"\n") + 2}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("id,v\n1,a\n".encode("utf-16"), "a.csv: it is UTF-16 or UTF-32; make it UTF-8"),
        ("id,v\n1,a\n".encode("utf-16-be"), "a.csv: its header row cannot be read: it is no text"),
        (b'id,"v\n1,a\n', "a quote is never closed"),
        (b"id, v\n1,a\n", "a.csv has no column 'v'; it has 'id', ' v'"),
        (b"id,M\xfcnchen\n1,a\n", "a.csv: .*UTF8"),
    ],
)
def test_csv_header_that_cannot_be_read_is_told(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=told):
        read(path, "id", "v")


def test_csv_whole_rows_that_are_not_utf_8_are_bad(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,name\n1,x\n2,M\xfcnchen\n")
    rows, bad = read(path, "id")
    assert list(rows) == [b"1"]
    assert [(b.row, b.reason) for b in bad] == [(2, "column 'name' is not UTF-8")]
    assert read(path, "id", "name")[0] == {b"1": b"x", b"2": b"M\xfcnchen"}


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".zst"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_compressed_text_is_read(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"a.{kind}{suffix}"
    text = b"id,n\n1,2\n" if kind == "csv" else b'{"id":"1","n":"2"}\n'
    if suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as out:
            out.write(text)
    else:
        how = {"": lambda same: same, ".gz": gzip.compress, ".bz2": bz2.compress}
        path.write_bytes(how[suffix](text))
    assert read(path, "id") == ({b"1": b'{"id":"1","n":"2"}'}, [])


@pytest.mark.parametrize("header", [b"id,v", b"id,v\n", b"id,v\r\n", b'"id","v"', b"\n\nid,v"])
def test_a_file_of_only_a_header_has_no_rows(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(header)
    assert read(path, "id") == ({}, [])
    assert pieces_of(path, "csv", 1 << 20) == []


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_pieces_are_cut_without_a_long_line_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for module, name in ((text_files, "_COUNTED_BYTES"), (delimited, "LINE_BYTES_MAX")):
        monkeypatch.setattr(module, name, 1_000_000)
    path = tmp_path / f"a.{kind}"
    with path.open("wb") as file:
        file.write(b"id\nx\n" if kind == "csv" else b"{}\n")
        file.truncate(40_000_000)
    tracemalloc.start()
    try:
        assert pieces_of(path, kind, 1_000)[-1].end == 40_000_000
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "line",
    [
        b'{"id":1,"v":NaN}',
        b'{"id":1,"v":[-Infinity]}',
        b'{"id":1,"v":"\xed\xa0\x80"}',  # half of a surrogate pair, as if it were a character
        b'\xef\xbb\xbf{"id":1}',  # within the file
        '{"id":1}'.encode("utf-16-be"),
    ],
)
def test_a_line_that_is_not_json_in_utf8_is_a_bad_row(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id":0}\n' + line + b"\n")
    rows, bad = read(path, "id")
    assert rows == {b"0": b'{"id":0}'}
    assert [row.row for row in bad] == [2]


@pytest.mark.parametrize("wanted", [1, 40, 1 << 20])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_pieces_of_a_file_hold_every_row_once(tmp_path: Path, kind: str, wanted: int) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "csv":
        rows = [f'k{n},"two\nlines, ""{n}"""\n' for n in range(50)] + ["too,many,cells\n"]
        path.write_text("id,v\n" + "".join(rows))
    else:
        path.write_text("".join(f'{{"id":"k{n}"}}\n\n' for n in range(50)) + "oops\n")
    pieces = pieces_of(path, kind, wanted)
    assert (len(pieces) > 1) == (wanted < 1 << 20)
    keys, bad = [], 0
    for piece in pieces:
        for slab in read_piece(piece, kind, Taken(key=("id",)), SlabMaker()):
            keys += slab.keys
            bad += len(slab.bad)
    assert keys == [b"k%d" % n for n in range(50)]
    assert bad == 1


def test_row_batches_are_bounded_by_the_bytes_that_rows_have_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are alike take next to nothing in the file."""
    monkeypatch.setattr(row_batches, "BATCH_BYTES", 1_000_000)
    path, rows = tmp_path / "a.parquet", 400
    alike, doc = [None, *["x" * 50_000] * (rows - 1)], pa.struct([("t", pa.string())])
    table = pa.table(
        {
            "id": pa.array(range(rows)),
            "text": pa.array(alike),
            "list": pa.array([None if text is None else [text, text] for text in alike]),
            "map": pa.array(
                [None if text is None else [("k", text)] for text in alike],
                pa.map_(pa.string(), pa.string()),
            ),
            "struct": pa.array([{"t": text} for text in alike], doc),
            "fixed": pa.array([b"y" * 50_000] * rows, pa.binary(50_000)),
        }
    )
    pq.write_table(table, path, row_group_size=150)
    assert path.stat().st_size < 1_000_000
    for names in (*([name] for name in table.schema.names[1:]), table.schema.names):
        batches = list(row_batches.batches_of(path, range(3), names, {}))
        assert max(batch.nbytes for batch in batches) < 1_500_000
        assert pa.Table.from_batches(batches).equals(table.select(names).cast(batches[0].schema))
    (small,) = row_batches.batches_of(path, [0], ["id"], {})
    assert len(small) == 150


def test_row_batches_of_values_that_share_what_is_before_them_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_batches, "BATCH_BYTES", 1_000_000)
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{'x' * 50_000}{n}" for n in range(400)]})
    pq.write_table(table, path, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})
    assert path.stat().st_size < 1_000_000
    batches = list(row_batches.batches_of(path, [0], ["text"], {}))
    assert max(batch.nbytes for batch in batches) < 1_500_000
    assert pa.Table.from_batches(batches).equals(table)


def test_json_lines_that_are_utf_16_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id":"a"}\n', encoding="utf-16")
    with pytest.raises(InvalidArgumentError, match="it is UTF-16"):
        read(path, "id")


def test_nanoseconds_are_read_without_pandas(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": ["a"], "at": pa.array([5], pa.timestamp("ns"))}), path)
    program = (
        "import sys; sys.modules['pandas'] = None\n"
        "from pathlib import Path; from koinon.sources.opening import open_source\n"
        "(slab,) = open_source(Path(sys.argv[1]), 'parquet', 'at', 'id'); print(slab.keys)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[b'1970-01-01T00:00:00.000000005']"
