"""A write job over a fake cluster: all of its rows become readable, once, or none does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from koinon.operate.loads_client import LoadsClient
from koinon.spark.encoding.faults import SettingAside
from koinon.spark.writing import jobs
from koinon.spark.writing.tasks import run_task
from koinon_proto.contract.bulk_loads import LoadState, StreamBatch
from koinon_proto.contract.cluster_errors import LoadClosedError, LoadIncompleteError
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    LeaseExpiredError,
    NotPrimaryError,
    PartitionOfflineError,
    ResourceExhaustedError,
    StorageFullError,
    TableBehindError,
    UnavailableError,
    UnknownFateError,
)
from tests.kit.waiting import wait_until
from tests.spark.fake_loads import LoadsCluster, refuse_once
from tests.spark.helpers import batch_of, commit, make_job, pairs, run


def test_job_rows_are_readable_after_commit_and_not_before(fake: LoadsCluster) -> None:
    job = make_job(fake)
    reports = [run(job, 0, pairs(0, 500), pairs(500, 700)), run(job, 1, pairs(700, 1_000))]
    assert fake.values() == {}
    commit(job, *reports)
    assert fake.values() == dict(pairs(0, 1_000))
    assert fake.only_load().state is LoadState.DONE
    assert [report.rows for report in reports] == [700, 300]


def test_job_attempts_that_are_not_committed_leave_nothing(fake: LoadsCluster) -> None:
    job = make_job(fake)
    run(job, 0, pairs(0, 100, "lost"))
    run(job, 1, pairs(100, 200, "lost"))
    winners = [run(job, 0, pairs(0, 50)), run(job, 1, pairs(50, 100))]
    commit(job, *winners)
    assert fake.values() == dict(pairs(0, 100))


def test_job_commit_in_any_order_of_reports_names_attempts_by_task(fake: LoadsCluster) -> None:
    job = make_job(fake)
    first, second = run(job, 0, pairs(0, 10)), run(job, 1, pairs(10, 20))
    commit(job, second, first)
    assert fake.only_load().attempts == [first.attempt, second.attempt]


def test_job_without_rows_appends_nothing_and_opens_no_load(fake: LoadsCluster) -> None:
    job = make_job(fake)
    commit(job, run(job, 0), run(job, 1))
    assert fake.loads == {}


def test_job_tasks_without_rows_are_not_named_in_the_commit(fake: LoadsCluster) -> None:
    job = make_job(fake)
    full = run(job, 1, pairs(0, 10))
    commit(job, run(job, 0), full)
    assert fake.only_load().attempts == [full.attempt]


def test_job_overwrite_replaces_everything(fake: LoadsCluster) -> None:
    for key, value in pairs(0, 50, "old"):
        fake.write(key, value, 0)
    job = make_job(fake, overwrite=True)
    commit(job, run(job, 0, pairs(40, 60)))
    assert fake.values() == dict(pairs(40, 60))


def test_job_overwrite_without_rows_empties(fake: LoadsCluster) -> None:
    for key, value in pairs(0, 50, "old"):
        fake.write(key, value, 0)
    job = make_job(fake, overwrite=True)
    commit(job, run(job, 0))
    assert fake.values() == {}


def test_job_overwrite_of_a_prefix_leaves_the_others_and_refuses_rows_outside(
    fake: LoadsCluster,
) -> None:
    fake.write(b"a:old", b"1", 0)
    fake.write(b"b:old", b"2", 0)
    job = make_job(fake, overwrite=True, prefix="a:")
    with pytest.raises(InvalidArgumentError, match="key outside the prefix"):
        run(job, 0, [(b"a:new", b"3"), (b"b:new", b"4")])
    commit(job, run(job, 0, [(b"a:new", b"3")]))
    assert fake.values() == {b"a:new": b"3", b"b:old": b"2"}


# --- keys that repeat ---------------------------------------------------------------------------


def test_job_duplicates_without_order_fail_by_name_and_leave_nothing(fake: LoadsCluster) -> None:
    job = make_job(fake)
    first, second = run(job, 0, pairs(0, 100)), run(job, 1, [*pairs(98, 120), (b"\xff", b"v")])
    with pytest.raises(InvalidArgumentError) as caught:
        commit(job, first, second)
    text = str(caught.value)
    assert text.startswith("column key: 2 rows have the key of another row, such as ")
    assert "'key-000098'" in text
    assert "orderBy" in text
    assert fake.values() == {}
    assert fake.only_load().state is LoadState.ABORTED


def test_job_duplicates_with_order_leave_the_greatest(fake: LoadsCluster) -> None:
    fields = [("key", "binary"), ("value", "binary"), ("at", "long")]
    job = make_job(fake, fields=fields, keyColumn="key", valueColumn="value", orderBy="at")

    def batch(rows: list[tuple[bytes, bytes, int | None]]) -> pa.RecordBatch:
        keys, values, orders = zip(*rows, strict=True)
        return pa.RecordBatch.from_pydict(
            {
                "key": pa.array(keys, pa.binary()),
                "value": pa.array(values, pa.binary()),
                "at": pa.array(orders, pa.int64()),
            }
        )

    first = run_task(job, 0, [batch([(b"a", b"new", 7), (b"b", b"null", None), (b"c", b"1", 5)])])
    second = run_task(job, 1, [batch([(b"a", b"old", 3), (b"b", b"least", -9), (b"c", b"2", 5)])])
    commit(job, first, second)
    assert fake.values() == {b"a": b"new", b"b": b"least", b"c": b"2"}


def test_job_whose_commit_is_lost_with_the_coordinators_says_so(fake: LoadsCluster) -> None:
    job = make_job(fake)
    report = run(job, 0, pairs(0, 5))
    fake.after_commit = fake.loads.clear
    with pytest.raises(UnknownFateError, match="Write the rows again"):
        commit(job, report)


def test_job_whose_coordinators_vanish_after_the_commit_says_that_it_is_committed(
    fake: LoadsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(*_: object) -> None:
        raise UnavailableError(reason="not reachable")

    job = make_job(fake)
    report = run(job, 0, pairs(0, 5))
    fake.after_commit = lambda: monkeypatch.setattr(LoadsClient, "get", nobody)
    with pytest.raises(UnavailableError, match="is committed, and will be merged"):
        commit(job, report)


# --- bad rows -----------------------------------------------------------------------------------


def test_job_bad_rows_fail_the_task_by_column(fake: LoadsCluster) -> None:
    fake.limit_values(100)
    job = make_job(fake)
    with pytest.raises(InvalidArgumentError, match="column key: null key in 1 row"):
        run(job, 0, [*pairs(0, 5), (None, b"v")])
    with pytest.raises(InvalidArgumentError, match="column value: value of more than 100 bytes"):
        run(job, 0, [(b"k", b"v" * 101)])
    assert fake.values() == {}


def test_job_bad_rows_are_set_aside_and_the_others_written(
    fake: LoadsCluster, tmp_path: Path
) -> None:
    job = make_job(fake, badRecordsPath=str(tmp_path))
    good = run(job, 0, pairs(0, 5))
    bad = run(job, 1, [*pairs(5, 7), (None, b"no key"), (b"", b"empty")], pairs(7, 9))
    said = commit(job, good, bad)
    assert fake.values() == dict(pairs(0, 9))
    assert f"2 bad rows were set aside in {tmp_path}" in said
    (path,) = tmp_path.glob("*/*.jsonl")
    assert path.name.startswith("task-00001-")
    reasons = [json.loads(line)["reason"] for line in path.read_text().splitlines()]
    assert reasons == ["null key", "empty key"]


def test_job_bad_row_that_is_set_aside_alone_is_one_row(fake: LoadsCluster, tmp_path: Path) -> None:
    job = make_job(fake, badRecordsPath=str(tmp_path))
    said = commit(job, run(job, 0, [(None, b"no key"), *pairs(0, 1)]))
    assert f"1 bad row was set aside in {tmp_path}" in said


def test_job_task_fails_by_its_own_error_though_its_bad_rows_cannot_be_removed(
    fake: LoadsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(_: SettingAside) -> None:
        raise OSError("read-only file system")

    def batches() -> Iterator[pa.RecordBatch]:
        yield batch_of([(b"a", b"1"), (None, b"no key")])
        raise RuntimeError("the executor is told to stop")

    monkeypatch.setattr(SettingAside, "discard", stuck)
    job = make_job(fake, badRecordsPath=str(tmp_path))
    with pytest.raises(RuntimeError, match="told to stop"):
        run_task(job, 0, batches())
    assert not [one for one in threading.enumerate() if one.name.startswith("koinon-touch")]


def test_job_whole_rows_are_values_and_expire(fake: LoadsCluster) -> None:
    fields = [("id", "long"), ("name", "string")]
    job = make_job(fake, fields=fields, keyColumn="id", valueEncoding="json", ttl="1h")
    batch = pa.RecordBatch.from_pydict({"id": [7], "name": ["x"]})
    before = time.time_ns() // 1_000_000
    commit(job, run_task(job, 0, [batch]))
    ((key, (value, _, expires_at_ms)),) = fake.store.items()
    assert key == bytes.fromhex("8000000000000007")
    assert json.loads(value) == {"id": 7, "name": "x"}
    assert before + 3_600_000 <= expires_at_ms <= time.time_ns() // 1_000_000 + 3_600_000


# --- a cluster that refuses, moves and loses answers -------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        TableBehindError(table_version=1, required_version=2),
        LeaseExpiredError(node_id="n1"),
        PartitionOfflineError(partition_id=0, reason="x"),
        ResourceExhaustedError(resource="staging", limit=1),
        NotPrimaryError(
            partition_id=0, primary="", primary_address="", primary_epoch=0, table_version=0
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_job_partitions_refused_for_a_while_are_staged_again(
    fake: LoadsCluster, error: Exception
) -> None:
    for node in fake.nodes:
        node.refuse = refuse_once(error)  # type: ignore[arg-type]
    job = make_job(fake)
    commit(job, run(job, 0, pairs(0, 300)))
    assert fake.values() == dict(pairs(0, 300))


def test_job_follows_partitions_that_move_between_staging_and_commit(fake: LoadsCluster) -> None:
    job = make_job(fake)
    first = run(job, 0, pairs(0, 100))
    fake.move(range(16), owner=1)
    second = run(job, 1, pairs(100, 200))
    fake.move(range(16), owner=2, tell=False)
    commit(job, first, second)
    assert fake.values() == dict(pairs(0, 200))


def test_job_answers_that_are_lost_are_asked_for_again_under_the_same_numbers(
    fake: LoadsCluster,
) -> None:
    fake.lost_answers = {"Stage": 2, "Prepare": 2, "CommitLoad": 1}
    job = make_job(fake)
    commit(job, run(job, 0, pairs(0, 300)))
    assert not any(fake.lost_answers.values())
    assert fake.values() == dict(pairs(0, 300))


def test_job_load_that_is_aborted_meanwhile_fails_the_task_and_the_commit(
    fake: LoadsCluster,
) -> None:
    job = make_job(fake)
    report = run(job, 0, pairs(0, 10))
    fake.only_load().state = LoadState.ABORTED
    with pytest.raises(LoadClosedError, match="is aborted"):
        run(job, 1, pairs(10, 20))
    with pytest.raises(LoadClosedError, match="is aborted"):
        commit(job, report)
    assert fake.values() == {}


def test_job_late_task_of_a_committed_job_is_refused(fake: LoadsCluster) -> None:
    job = make_job(fake)
    commit(job, run(job, 0, pairs(0, 10)))
    with pytest.raises(LoadClosedError, match="is done"):
        run(job, 0, pairs(0, 10))


def test_job_a_full_store_ends_the_task_at_once(fake: LoadsCluster) -> None:
    for node in fake.nodes:
        node.refuse = lambda _p: StorageFullError(node_id="n1", reason="the disk is full")
    job = make_job(fake)
    with pytest.raises(StorageFullError):
        run(job, 0, pairs(0, 10))


def test_job_partitions_that_nobody_serves_end_the_task_in_time(fake: LoadsCluster) -> None:
    fake.move([0], owner=0)
    job = make_job(fake, timeout="300ms")
    with pytest.raises(UnavailableError, match=r"not served within 0\.3 s \(option timeout\)"):
        run(job, 0, pairs(0, 100))


def test_job_rows_missing_at_prepare_fail_the_commit_and_abort(fake: LoadsCluster) -> None:
    job = make_job(fake)
    report = run(job, 0, pairs(0, 100))
    load = fake.only_load()
    del load.chunks[next(iter(load.chunks))]
    with pytest.raises(LoadIncompleteError):
        commit(job, report)
    assert load.state is LoadState.ABORTED


def test_job_merge_that_stands_still_is_told_apart_from_a_failure(fake: LoadsCluster) -> None:
    fake.merge_stuck = True
    job = make_job(fake, mergeTimeout="200ms")
    report = run(job, 0, pairs(0, 10))
    with pytest.raises(UnavailableError, match="is committed, but its merge has not advanced"):
        commit(job, report)
    jobs.abort(job, [report], "failed")
    assert fake.only_load().state is LoadState.MERGING


def test_job_buffers_are_staged_as_they_fill_and_the_load_is_touched(
    fake: LoadsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koinon.spark.writing.load_keepalive.EVERY_S", 0.01)
    job = make_job(fake, memoryBytes="1MiB")
    value = b"x" * 10_000
    lots = [[(b"%d-%d" % (lot, i), value) for i in range(60)] for lot in range(10)]

    def batches() -> object:
        for lot in lots:
            yield batch_of(lot)
        wait_until(lambda: fake.only_load().touches > 1 and bool(fake.staged_bytes))

    report = run_task(job, 0, batches())  # type: ignore[arg-type]
    commit(job, report)
    assert len(fake.values()) == 600
    assert fake.count("OpenLoad") == 1


def test_job_load_is_touched_as_often_as_its_time_out_asks_for_until_it_is_committed(
    fake: LoadsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks may be over long before a large load is prepared."""
    monkeypatch.setattr("koinon.spark.writing.load_keepalive.TIMES_IN_TIMEOUT", 1_000)
    job = make_job(fake, loadTimeout="10s")
    report = run(job, 0, pairs(0, 10))
    before = fake.only_load().touches

    def until_touched(partition_id: int) -> KoinonError | None:
        touched = fake.only_load().touches >= before + 2
        return None if touched else PartitionOfflineError(partition_id=partition_id, reason="")

    for node in fake.nodes:
        node.refuse = until_touched
    commit(job, report)
    assert fake.values() == dict(pairs(0, 10))
    assert not [one for one in threading.enumerate() if one.name == "koinon-touch"]


def test_job_load_closed_under_a_task_that_sends_nothing_ends_it_by_its_touch(
    fake: LoadsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koinon.spark.writing.load_keepalive.EVERY_S", 0.01)
    job = make_job(fake, memoryBytes="1MiB")

    def batches() -> object:
        yield batch_of([(b"%d" % i, b"x" * 20_000) for i in range(60)])
        fake.only_load().state = LoadState.ABORTED
        wait_until(lambda: all(t.name != "koinon-touch" for t in threading.enumerate()))
        yield batch_of([(b"more", b"x")])

    with pytest.raises(LoadClosedError):
        run_task(job, 0, batches())  # type: ignore[arg-type]
    assert fake.count("Stage") == 0


def test_abort_leaves_nothing_and_may_be_repeated(fake: LoadsCluster) -> None:
    job = make_job(fake)
    report = run(job, 0, pairs(0, 10))
    jobs.abort(job, [report], "failed")
    jobs.abort(job, [], "failed")
    load = fake.only_load()
    assert (load.state, load.chunks, load.reason) == (LoadState.ABORTED, {}, "failed")


# --- micro-batches ------------------------------------------------------------------------------


def test_stream_batch_that_was_applied_is_dropped_and_succeeds(fake: LoadsCluster) -> None:
    batch = StreamBatch("q", 3)
    job = make_job(fake, stream_batch=batch, job_id="stream:q:3:run1")
    commit(job, run(job, 0, pairs(0, 10)))
    again = make_job(fake, stream_batch=batch, job_id="stream:q:3:run2")
    reports = [run(again, 0, pairs(0, 10, "other")), run(again, 1, pairs(10, 20))]
    assert all(report.applied and not report.rows for report in reports)
    commit(again, *reports)
    assert fake.values() == dict(pairs(0, 10))
    assert fake.count("CommitLoad") == 1


def test_stream_batch_that_is_being_merged_is_waited_for(fake: LoadsCluster) -> None:
    batch = StreamBatch("q", 3)
    first = make_job(fake, stream_batch=batch, job_id="stream:q:3:run1", mergeTimeout="100ms")
    fake.merge_stuck = True
    report = run(first, 0, pairs(0, 10))
    with pytest.raises(UnavailableError):
        commit(first, report)
    again = make_job(fake, stream_batch=batch, job_id="stream:q:3:run2")
    replayed = run(again, 0, pairs(0, 10, "other"))
    fake.merge_stuck = False
    commit(again, replayed)
    assert fake.values() == dict(pairs(0, 10))


def test_stream_batch_that_an_older_run_commits_meanwhile_is_that_runs(
    fake: LoadsCluster,
) -> None:
    batch = StreamBatch("q", 3)
    older = make_job(fake, stream_batch=batch, job_id="stream:q:3:run1")
    newer = make_job(fake, stream_batch=batch, job_id="stream:q:3:run2")
    report = run(older, 0, pairs(0, 10))
    first = run(newer, 0, pairs(0, 5, "newer"))
    commit(older, report)
    second = run(newer, 1, pairs(5, 10, "newer"))
    assert (first.applied, second.applied) == (False, True)
    commit(newer, first, second)
    assert fake.values() == dict(pairs(0, 10))


def test_stream_batch_after_a_killed_run_takes_over_its_load(fake: LoadsCluster) -> None:
    batch = StreamBatch("q", 3)
    killed = make_job(fake, stream_batch=batch, job_id="stream:q:3:run1")
    run(killed, 0, pairs(0, 10, "killed"))
    again = make_job(fake, stream_batch=batch, job_id="stream:q:3:run2")
    commit(again, run(again, 0, pairs(0, 10)))
    assert fake.values() == dict(pairs(0, 10))


def test_stream_batch_after_an_aborted_run_has_a_load_of_its_own(fake: LoadsCluster) -> None:
    batch = StreamBatch("q", 3)
    failed = make_job(fake, stream_batch=batch, job_id="stream:q:3:run1")
    jobs.abort(failed, [run(failed, 0, pairs(0, 10, "failed"))], "failed")
    again = make_job(fake, stream_batch=batch, job_id="stream:q:3:run2")
    commit(again, run(again, 0, pairs(0, 10)))
    assert fake.values() == dict(pairs(0, 10))
