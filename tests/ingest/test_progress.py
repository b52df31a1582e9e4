"""Tests of the progress of a load, as one view after the other shows it."""

from __future__ import annotations

from typing import Any

import pytest

from koinon.ingest.progress import LoadTracker, Phase
from koinon.operate.loads_client import LoadMode, LoadState, LoadView


def view(state: LoadState, **fields: int) -> LoadView:
    known: dict[str, Any] = {
        "partitions": 0,
        "partitions_merged": 0,
        "rows": 0,
        "bytes": 0,
        **fields,
    }
    return LoadView(
        load_id=7,
        job_id="job",
        state=state,
        mode=LoadMode.APPEND,
        prefix=b"",
        stream_batch=None,
        description="",
        idle_ms=0,
        timeout_ms=1000,
        reason="",
        owner="",
        **{**known, **fields},
    )


def test_phases_follow_the_load_and_the_tasks() -> None:
    tracker = LoadTracker(rows_total=100)
    tracker.start(0.0)
    assert tracker.update(None, 1.0).phase is Phase.STARTING
    assert tracker.update(view(LoadState.OPEN), 2.0).phase is Phase.STAGING
    staged = view(LoadState.OPEN, rows=100)
    assert tracker.update(staged, 4.0, tasks_ended=True).phase is Phase.PREPARING
    merging = view(LoadState.MERGING, rows=100, partitions=8)
    assert tracker.update(merging, 5.0).phase is Phase.MERGING
    assert tracker.update(view(LoadState.DONE, rows=100), 8.0).phase is Phase.DONE
    assert tracker.seconds(8.5) == {
        Phase.STARTING: 2.0,
        Phase.STAGING: 2.0,
        Phase.PREPARING: 1.0,
        Phase.MERGING: 3.0,
        Phase.DONE: 0.5,
    }


def test_rate_and_time_left_while_rows_are_staged() -> None:
    tracker = LoadTracker(rows_total=1000)
    tracker.start(0.0)
    tracker.update(view(LoadState.OPEN), 10.0)
    snapshot = tracker.update(view(LoadState.OPEN, rows=200), 12.0)
    assert (snapshot.rows, snapshot.share) == (200, 0.2)
    assert snapshot.rows_per_second == 100
    assert snapshot.seconds_left == pytest.approx(8.0)


def test_time_left_is_unknown_without_a_total() -> None:
    tracker = LoadTracker()
    tracker.start(0.0)
    tracker.update(view(LoadState.OPEN), 1.0)
    snapshot = tracker.update(view(LoadState.OPEN, rows=50), 2.0)
    assert (snapshot.share, snapshot.seconds_left) == (None, None)
    assert snapshot.rows_per_second == 50


def test_rate_stands_still_once_all_is_staged() -> None:
    tracker = LoadTracker(rows_total=100)
    tracker.start(0.0)
    tracker.update(view(LoadState.OPEN), 1.0)
    tracker.update(view(LoadState.OPEN, rows=100), 3.0, tasks_ended=True)
    later = tracker.update(view(LoadState.MERGING, rows=100, partitions=4), 9.0)
    assert later.rows_per_second == 50


def test_merge_counts_partitions_and_its_own_pace() -> None:
    tracker = LoadTracker(rows_total=100)
    tracker.start(0.0)
    tracker.update(view(LoadState.OPEN, rows=100), 1.0)
    tracker.update(view(LoadState.MERGING, rows=100, partitions=8), 20.0)
    merged = view(LoadState.MERGING, rows=100, partitions=8, partitions_merged=6)
    snapshot = tracker.update(merged, 23.0)
    assert snapshot.share == 0.75
    assert snapshot.seconds_left == pytest.approx(1.0)


def test_rows_of_attempts_that_ran_twice_do_not_exceed_the_whole() -> None:
    tracker = LoadTracker(rows_total=100)
    tracker.start(0.0)
    assert tracker.update(view(LoadState.OPEN, rows=150), 1.0).share == 1.0


def test_silent_coordinators_change_nothing() -> None:
    tracker = LoadTracker(rows_total=100)
    tracker.start(0.0)
    tracker.update(view(LoadState.OPEN, rows=40), 1.0)
    silent = tracker.update(None, 2.0)
    assert (silent.phase, silent.rows) == (Phase.STAGING, 40)
