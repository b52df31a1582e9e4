"""Rows that cannot be stored are found, named and counted, and refused or set aside."""

from __future__ import annotations

import base64
import datetime as dt
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from koinon.spark.encoding.faults import Fault, Limits, Refusing, SettingAside, find_faults, without
from koinon.spark.encoding.values import ENCODERS
from koinon_proto.contract.errors import InvalidArgumentError

LIMITS = Limits(key_name="k", value_name="v", max_value_bytes=10)
ROOMY = Limits(key_name="k", value_name="v", max_value_bytes=1 << 20)


def found(
    keys: list[bytes | None], values: list[bytes | None], limits: Limits = LIMITS
) -> list[tuple[str, str, list[int]]]:
    faults = find_faults(pa.array(keys, pa.binary()), pa.array(values, pa.binary()), limits)
    return [(fault.column, fault.reason, fault.rows.tolist()) for fault in faults]


def test_faults_of_good_rows_are_none() -> None:
    assert found([b"k", b"x" * 500], [b"", b"v" * 10]) == []
    assert found([], []) == []


def test_faults_each_kind_is_found_once_a_row() -> None:
    keys = [None, b"", b"x" * 501, b"a", b"b", b"c", None]
    values = [b"v", b"v", b"v", None, b"v" * 11, b"v", None]
    assert found(keys, values) == [
        ("k", "null key", [0, 6]),
        ("k", "empty key", [1]),
        ("k", "key of more than 500 bytes", [2]),
        ("v", "null value", [3]),
        ("v", "value of more than 10 bytes", [4]),
    ]


def test_faults_keys_outside_the_prefix_are_found() -> None:
    limits = Limits(key_name="k", value_name="v", max_value_bytes=10, prefix=b"\x80\x00")
    keys = [b"\x80\x00a", b"\x80", b"b", None]
    assert found(keys, [b"v"] * 4, limits) == [
        ("k", "null key", [3]),
        ("k", r"key outside the prefix b'\x80\x00' that is overwritten", [1, 2]),
    ]


def test_faults_values_beyond_a_chunk_are_found_whatever_the_cluster_allows() -> None:
    limits = Limits(key_name="k", value_name="v", max_value_bytes=1 << 30)
    assert limits.value_bytes_max < 8 << 20


def text_of(*strings: bytes | None) -> Any:
    """Return a string column of any bytes, as Spark has them."""
    return pa.array(strings, pa.binary()).view(pa.string())


def test_faults_strings_that_are_not_utf8_are_found_wherever_they_are() -> None:
    bad, good = b"\xff\xc3(", "é".encode()
    offsets = pa.array([0, 2, 3, 4, 4], pa.int32())
    rows = pa.RecordBatch.from_pydict(
        {
            "t": text_of(good, bad, None, good),
            "a": pa.ListArray.from_arrays(offsets, text_of(good, bad, bad, None)),
            "s": pa.StructArray.from_arrays([text_of(good, good, good, bad)], names=["x"]),
        }
    )
    for encode in ENCODERS.values():  # what is refused later does not stop them
        values = encode(rows)
        whole = find_faults(pa.array([b"k"] * 4), values, ROOMY, rows)
        assert [(fault.column, fault.rows.tolist()) for fault in whole] == [
            ("t", [1]),
            ("a", [0]),
            ("s", [3]),
        ]
        sliced = find_faults(pa.array([b"k"] * 2), values.slice(2, 2), ROOMY, rows.slice(2, 2))
        assert [(fault.column, fault.rows.tolist()) for fault in sliced] == [("s", [1])]
        gone = np.array([True, False, False, True])  # only their keys are stored
        left = find_faults(pa.array([b"k"] * 4), values, ROOMY, rows, deleted=gone)
        assert [fault.column for fault in left] == ["t"]
    with pytest.raises(InvalidArgumentError) as caught:
        Refusing().take(rows, whole, 10)
    text = str(caught.value)
    assert "column t: string that is not valid UTF-8 in 1 row (row 11: " in text
    assert r'"t": "\\xff\\xc3("' in text
    assert r'"a": ["é", "\\xff\\xc3("]' in text


def test_without_leaves_the_good_rows() -> None:
    faults = find_faults(pa.array([b"a", b"", None, b"d"]), pa.array([b"v"] * 4), LIMITS)
    assert without(faults, 4).to_pylist() == [0, 3]


def batch() -> Any:
    return pa.RecordBatch.from_pydict(
        {
            "k": pa.array([b"fine", None, b"", b"\xff" * 501], pa.binary()),
            "at": pa.array([dt.date(2024, 1, day) for day in (1, 2, 3, 4)]),
        }
    )


def faults() -> list[Fault]:
    return find_faults(batch().column(0), pa.array([b"v"] * 4), LIMITS)


def test_refusing_names_the_column_counts_rows_and_shows_some() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Refusing().take(batch(), faults(), rows_before=100)
    text = str(caught.value)
    assert text.startswith("column k: null key in 1 row (row 101: ")
    assert '{"k": null, "at": "2024-01-02"}' in text
    assert "empty key in 1 row (row 102: " in text
    assert "of the 104 rows that this task has read so far" in text
    assert "badRecordsPath" in text
    assert len(text) < 1_000


def test_setting_aside_writes_whole_rows_as_json_lines(tmp_path: Path) -> None:
    aside = SettingAside(str(tmp_path), "job/task-1.jsonl")
    aside.take(batch(), faults(), 0)
    aside.take(batch(), faults()[:1], 4)
    aside.close()
    lines = (tmp_path / "job" / "task-1.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(r["column"], r["reason"]) for r in records] == [
        ("k", "null key"),
        ("k", "empty key"),
        ("k", "key of more than 500 bytes"),
        ("k", "null key"),
    ]
    assert records[0]["row"] == {"k": None, "at": "2024-01-02"}
    assert base64.b64decode(records[2]["row"]["k"]) == b"\xff" * 501


def test_setting_aside_takes_uris(tmp_path: Path) -> None:
    aside = SettingAside(tmp_path.as_uri(), "task.jsonl")
    aside.take(batch(), faults()[:1], 0)
    aside.close()
    assert (tmp_path / "task.jsonl").exists()


def test_setting_aside_nothing_makes_no_file_and_a_failed_task_leaves_none(tmp_path: Path) -> None:
    SettingAside(str(tmp_path), "a.jsonl").close()
    failed = SettingAside(str(tmp_path), "b.jsonl")
    failed.take(batch(), faults(), 0)
    failed.discard()
    assert list(tmp_path.iterdir()) == []
