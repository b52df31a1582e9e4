"""Rows that say when they expire, and rows that delete their keys: by columns."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from koinon.spark.writing.lifetimes import Lifetimes
from koinon.spark.writing.planning import RowPlan
from koinon.spark.writing.tasks import run_task
from koinon_proto.contract.columns import DELETED
from koinon_proto.contract.errors import InvalidArgumentError
from tests.spark.fake_loads import LoadsCluster
from tests.spark.helpers import commit, make_job

NOW_MS = 1_900_000_000_000
HOUR_MS = 3_600_000
LIFETIMES = Lifetimes(now_ms=NOW_MS, unnamed_ms=NOW_MS + 5, max_ttl_ms=HOUR_MS)
UTC_US = pa.timestamp("us", "UTC")
FIELDS: list[tuple[str, Any]] = [
    ("key", "binary"),
    ("value", "string"),
    ("lives", "long"),
    ("gone", "boolean"),
]
BOTH: dict[str, Any] = {"keyColumn": "key", "ttlColumn": "lives", "deleteColumn": "gone"}


def plan(*, ttl: bool = True, deletes: bool = False) -> RowPlan:
    names = ("lives",) * ttl + ("gone",) * deletes
    return RowPlan(
        names=names,
        key_columns=(),
        value_column=-1,
        order_column=-1,
        ttl_column=0 if ttl else -1,
        delete_column=len(names) - 1 if deletes else -1,
    )


def batch(lives: Any = None, gone: Any = None) -> Any:
    columns = {"lives": lives, "gone": gone}
    return pa.RecordBatch.from_pydict({k: v for k, v in columns.items() if v is not None})


def faults(rows: Any, of: RowPlan) -> list[tuple[list[int], str]]:
    found = [(np.flatnonzero(bad).tolist(), why) for bad, _, why in LIFETIMES.faults_of(rows, of)]
    return [(bad, why) for bad, why in found if bad]


# --- columns as expiries -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pa.int16(), pa.int32(), pa.int64()])
def test_integers_are_milliseconds_from_the_tasks_begin_and_null_is_as_the_option_says(
    kind: Any,
) -> None:
    rows = batch(pa.array([9, 1, None, 1_000], kind).slice(1))
    expiries = LIFETIMES.expiries_of(rows, plan())
    assert expiries is not None
    assert expiries.tolist() == [NOW_MS + 1, NOW_MS + 5, NOW_MS + 1_000]
    assert faults(rows, plan()) == []


def test_timestamps_are_when_rows_expire_also_long_ago() -> None:
    times = [NOW_MS * 1_000 + 7_999, None, 0, -(10**12)]
    rows = batch(pa.array(times, pa.int64()).cast(UTC_US))
    expiries = LIFETIMES.expiries_of(rows, plan())
    assert expiries is not None
    assert expiries.tolist() == [NOW_MS + 7, NOW_MS + 5, 1, 1]  # 0 would be never
    assert faults(rows, plan()) == []


def test_rows_that_delete_are_those_that_say_true() -> None:
    rows = batch(pa.array([1, 2, 3, 4], pa.int64()), pa.array([None, True, False, True]))
    sliced = rows.slice(1)
    for chosen, expected in (
        (rows, [NOW_MS + 1, DELETED, NOW_MS + 3, DELETED]),
        (sliced, [DELETED, NOW_MS + 3, DELETED]),
    ):
        expiries = LIFETIMES.expiries_of(chosen, plan(deletes=True))
        assert expiries is not None
        assert expiries.tolist() == expected


def test_deletes_alone_leave_the_other_rows_to_the_option_and_no_column_says_nothing() -> None:
    rows = batch(gone=pa.array([True, False]))
    expiries = LIFETIMES.expiries_of(rows, plan(ttl=False, deletes=True))
    assert expiries is not None
    assert expiries.tolist() == [DELETED, NOW_MS + 5]
    assert LIFETIMES.expiries_of(rows, plan(ttl=False)) is None


def test_times_that_are_none_or_too_long_are_faults_but_not_of_rows_that_delete() -> None:
    ttls = pa.array([0, -5, HOUR_MS, HOUR_MS + 1, 2**63 - 1, -(2**63), None, -1], pa.int64())
    too_little, too_much = "time to live that is not above 0 ms", "time to live of more than"
    assert faults(batch(ttls), plan()) == [
        ([0, 1, 5, 7], too_little),
        ([3, 4], f"{too_much} {HOUR_MS} ms"),
    ]
    gone = pa.array([False] * 7 + [True])
    assert faults(batch(ttls, gone), plan(deletes=True))[0][0] == [0, 1, 5]
    late = pa.array([(NOW_MS + HOUR_MS) * 1_000, (NOW_MS + HOUR_MS + 1) * 1_000], pa.int64())
    assert faults(batch(late.cast(UTC_US)), plan()) == [([1], f"{too_much} {HOUR_MS} ms")]


# --- jobs --------------------------------------------------------------------------------------


def rows_of(*rows: tuple[bytes, str | None, int | None, bool | None]) -> Any:
    columns = zip(*rows, strict=True)
    kinds = (pa.binary(), pa.string(), pa.int64(), pa.bool_())
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in FIELDS])


def test_job_writes_rows_with_times_to_live_and_deletes_keys(fake: LoadsCluster) -> None:
    for key in (b"gone", b"kept", b"old"):
        fake.write(key, b"before", 0)
    job = make_job(fake, fields=FIELDS, valueColumn="value", **BOTH)
    before_ms = time.time_ns() // 1_000_000
    report = run_task(
        job,
        0,
        [
            rows_of(
                (b"gone", None, None, True),
                (b"absent", "ignored", -7, True),
                (b"old", "new", HOUR_MS, False),
                (b"plain", "plain", None, None),
            )
        ],
    )
    assert (report.rows, report.bytes) == (4, 4 + 6 + 6 + 10)
    commit(job, report)
    assert fake.values() == {b"kept": b"before", b"old": b"new", b"plain": b"plain"}
    expires_ms = fake.store[b"old"][2]
    assert before_ms + HOUR_MS <= expires_ms <= time.time_ns() // 1_000_000 + HOUR_MS
    assert fake.store[b"plain"][2] == 0


def test_job_values_of_whole_rows_hold_neither_column(fake: LoadsCluster) -> None:
    job = make_job(fake, fields=FIELDS, valueEncoding="json", keyEncoding="text", **BOTH)
    report = run_task(job, 0, [rows_of((b"a", "1", 1_000, None), (b"b", "2", None, True))])
    commit(job, report)
    (value,) = fake.values().values()
    assert json.loads(value) == {"key": "YQ==", "value": "1"}


def test_job_of_a_put_and_a_delete_of_one_key_fails_or_the_greatest_stays(
    fake: LoadsCluster,
) -> None:
    fake.write(b"a", b"before", 0)
    given: dict[str, Any] = {"keyColumn": "key", "valueColumn": "value", "deleteColumn": "gone"}
    rows = rows_of((b"a", "put", 1, False), (b"a", None, 2, True), (b"b", None, 1, True))
    last = rows_of((b"b", "put", 2, False))
    job = make_job(fake, fields=FIELDS, **given)
    with pytest.raises(InvalidArgumentError, match="2 rows have the key of another row"):
        commit(job, run_task(job, 0, [rows]), run_task(job, 1, [last]))
    assert fake.values() == {b"a": b"before"}
    job = make_job(fake, fields=FIELDS, **given, orderBy="lives")
    commit(job, run_task(job, 0, [rows]), run_task(job, 1, [last]))
    assert fake.values() == {b"b": b"put"}


def test_job_refuses_a_time_to_live_by_column_and_row_or_sets_the_row_aside(
    fake: LoadsCluster, tmp_path: Path
) -> None:
    rows = rows_of((b"a", "1", 5_000, None), (b"b", "2", -1, None), (b"c", "\ud7ff", None, True))
    job = make_job(fake, fields=FIELDS, valueEncoding="json", **BOTH)
    with pytest.raises(InvalidArgumentError, match=r"not above 0 ms in 1 row \(row 1: ") as refused:
        run_task(job, 0, [rows])
    assert refused.value.field == "column lives"
    job = make_job(fake, fields=FIELDS, valueEncoding="json", badRecordsPath=str(tmp_path), **BOTH)
    report = run_task(job, 0, [rows])
    commit(job, report)
    assert (report.bad_rows, set(fake.values())) == (1, {b"a"})
    (kept,) = tmp_path.rglob("*.jsonl")
    assert json.loads(kept.read_text())["row"]["lives"] == -1


def test_job_takes_timestamps_in_any_zone(fake: LoadsCluster) -> None:
    at = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
    fields: list[tuple[str, Any]] = [*FIELDS[:2], ("lives", "timestamp")]
    job = make_job(fake, fields=fields, valueColumn="value", keyColumn="key", ttlColumn="lives")
    arrays = [pa.array([b"a"]), pa.array(["1"]), pa.array([at], pa.timestamp("us", "Asia/Tokyo"))]
    rows = pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in fields])
    commit(job, run_task(job, 0, [rows]))
    assert fake.store[b"a"][2] == int(at.timestamp()) * 1_000
