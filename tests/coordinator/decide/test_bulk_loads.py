"""Tests of a leader's decisions on bulk loads before it proposes, and of its own notes on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from koinon_coordinator.core.cluster import load_rules
from koinon_coordinator.core.cluster.commands import (
    AbortLoad,
    CommitLoad,
    OpenLoad,
    PartitionsMerged,
)
from koinon_coordinator.core.cluster.load_rules import ALREADY_APPLIED
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.load_requests import (
    Activity,
    LoadWish,
    decide_abort,
    decide_commit,
    decide_merged,
    decide_open,
    load_in,
)
from koinon_proto.contract.bulk_loads import LOAD_TIMEOUT_MS, LoadMode, LoadState, StreamBatch
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import (
    ClusterNotReadyError,
    InvalidArgumentError,
    PartitionOfflineError,
    ResourceExhaustedError,
)
from tests.coordinator.kit.load_states import (
    ABORTED,
    DONE,
    MERGING,
    OPEN,
    PARTITIONS,
    Log,
    abort_load,
    commit_load,
    merged,
    open_load,
    outcome,
    partitions,
)
from tests.coordinator.kit.support import fence

APPEND, OVERWRITE = int(LoadMode.APPEND), int(LoadMode.OVERWRITE)
PAUSE_S = 1.0


# --- decisions ----------------------------------------------------------------------------------


def test_open_decides_a_command_with_the_usual_timeout() -> None:
    wish = LoadWish(job_id="j", mode=OVERWRITE, prefix=b"p", description="d")
    assert decide_open(Log().state, wish) == OpenLoad(
        job_id="j",
        mode=LoadMode.OVERWRITE,
        prefix=b"p",
        description="d",
        timeout_ms=LOAD_TIMEOUT_MS,
    )


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        (LoadWish(job_id="", mode=APPEND), "job_id"),
        (LoadWish(job_id="j" * 129, mode=APPEND), "job_id"),
        (LoadWish(job_id="j\x1b[2J", mode=APPEND), "job_id"),
        (LoadWish(job_id="j", mode=0), "mode"),
        (LoadWish(job_id="j", mode=3), "mode"),
        (LoadWish(job_id="j", mode=APPEND, prefix=b"p"), "prefix"),
        (LoadWish(job_id="j", mode=OVERWRITE, prefix=b"p" * 501), "prefix"),
        (LoadWish(job_id="j", mode=APPEND, description="d" * 201), "description"),
        (LoadWish(job_id="j", mode=APPEND, timeout_ms=9_999), "timeout_ms"),
        (LoadWish(job_id="j", mode=APPEND, timeout_ms=1 << 40), "timeout_ms"),
        (
            LoadWish(job_id="j", mode=APPEND, stream_batch=StreamBatch("", 1)),
            "stream_batch.query_id",
        ),
        (
            LoadWish(job_id="j", mode=APPEND, stream_batch=StreamBatch("q\x1b", 1)),
            "stream_batch.query_id",
        ),
    ],
)
def test_open_with_a_bad_argument_is_refused_by_its_name(wish: LoadWish, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        decide_open(Log().state, wish)
    assert refused.value.field == field


def test_open_before_there_is_a_table_is_refused() -> None:
    with pytest.raises(ClusterNotReadyError):
        decide_open(ClusterState(), LoadWish(job_id="j", mode=APPEND))


def test_open_of_a_known_job_or_an_applied_batch_proposes_nothing() -> None:
    log = Log()
    load_id = log.in_state(DONE, batch=4)
    wish = LoadWish(job_id="job", mode=APPEND, stream_batch=StreamBatch("q", 4))
    assert decide_open(log.state, wish) == outcome(load_id, DONE)
    assert decide_open(log.state, replace(wish, job_id="another")) == ALREADY_APPLIED


def test_open_of_a_known_job_in_another_way_is_refused() -> None:
    log = Log()
    log.open()
    with pytest.raises(InvalidArgumentError, match="another job_id") as refused:
        decide_open(log.state, LoadWish(job_id="job", mode=OVERWRITE))
    assert refused.value.field == "job_id"


def test_open_of_too_many_loads_is_refused_with_the_limit() -> None:
    log = Log()
    for i in range(load_rules.ACTIVE_MAX):
        log.open(f"j{i}")
    with pytest.raises(ResourceExhaustedError) as refused:
        decide_open(log.state, LoadWish(job_id="more", mode=APPEND))
    assert refused.value.limit == load_rules.ACTIVE_MAX


@pytest.mark.parametrize(
    ("attempts", "partition_ids", "field"),
    [
        ((7, 7), (0,), "attempts"),
        ((0,), (0,), "attempts"),
        ((7,), (PARTITIONS,), "partition_ids"),
        ((), (0,), "attempts"),
    ],
)
def test_commit_with_a_bad_argument_is_refused_by_its_name(
    attempts: tuple[int, ...], partition_ids: tuple[int, ...], field: str
) -> None:
    log = Log()
    with pytest.raises(InvalidArgumentError) as refused:
        decide_commit(log.state, commit_load(log.open(), attempts, partition_ids))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (MERGING, "committed with other attempts"),
        (DONE, "committed with other attempts"),
        (ABORTED, "enough"),
    ],
)
def test_commit_of_a_closed_load_is_refused_and_says_what_became_of_it(
    state: LoadState, why: str
) -> None:
    log = Log()
    load_id = log.in_state(state)
    with pytest.raises(LoadClosedError, match=why) as refused:
        decide_commit(log.state, commit_load(load_id, (99,)))
    assert (refused.value.load_id, refused.value.state) == (load_id, state.name.lower())


@pytest.mark.parametrize("state", [MERGING, DONE])
def test_commit_repeated_proposes_nothing(state: LoadState) -> None:
    log = Log()
    load_id = log.in_state(state)
    assert decide_commit(log.state, commit_load(load_id)) == outcome(load_id, state)


def test_commit_overtaken_by_a_later_batch_is_refused_and_says_what_to_do() -> None:
    log = Log()
    late, later = log.open("a", batch=3), log.open("b", batch=4)
    log.apply(commit_load(later))
    with pytest.raises(LoadClosedError, match="abort this load") as refused:
        decide_commit(log.state, commit_load(late))
    assert refused.value.state == "open"


def test_commit_that_would_merge_an_offline_partition_is_refused_until_it_is_back() -> None:
    log = Log()
    append, overwrite = log.open("a"), log.open("o", LoadMode.OVERWRITE)
    for number in (2, 3):  # partition 1 has no other replicas
        fence(log.state, number)
    with pytest.raises(PartitionOfflineError) as refused:
        decide_commit(log.state, commit_load(append, (7,), (0, 1)))
    assert refused.value.partition_id == 1
    with pytest.raises(PartitionOfflineError):
        decide_commit(log.state, commit_load(overwrite, (7,), (0,)))
    elsewhere = commit_load(append, (7,), (0, 2))
    assert decide_commit(log.state, elsewhere) is elsewhere
    log.apply(elsewhere)
    assert decide_commit(log.state, elsewhere) == outcome(append, MERGING)


def test_commit_repeated_while_a_partition_is_offline_is_answered_alike() -> None:
    log = Log()
    load_id = log.open()
    log.apply(commit_load(load_id, (7,), (1,)))
    for number in (2, 3):
        fence(log.state, number)
    assert decide_commit(log.state, commit_load(load_id, (7,), (1,))) == outcome(load_id, MERGING)


def test_abort_of_an_open_load_decides_a_command_with_a_bounded_reason() -> None:
    log = Log()
    load_id = log.open()
    command = decide_abort(log.state, load_id, "r" * 500)
    assert command == AbortLoad(load_id=load_id, reason="r" * 200)
    log.apply(abort_load(load_id))
    assert decide_abort(log.state, load_id, "again") == outcome(load_id, ABORTED)


def test_texts_of_a_load_are_stored_as_operators_can_be_shown_them() -> None:
    opened = decide_open(Log().state, LoadWish(job_id="j", mode=APPEND, description="a\x1b[2J\n"))
    assert isinstance(opened, OpenLoad)
    assert opened.description == "a\\x1b[2J\\n"
    log = Log()
    aborted = decide_abort(log.state, log.open(), "because\x07")
    assert isinstance(aborted, AbortLoad)
    assert aborted.reason == "because\\x07"


@pytest.mark.parametrize("state", [MERGING, DONE])
def test_abort_of_a_committed_load_is_refused(state: LoadState) -> None:
    log = Log()
    load_id = log.in_state(state)
    with pytest.raises(LoadClosedError, match="can no longer be aborted") as refused:
        decide_abort(log.state, load_id, "")
    assert refused.value.state == state.name.lower()


def test_merged_partitions_decide_a_command_only_if_they_are_news() -> None:
    log = Log()
    load_id = log.in_state(MERGING)
    command = decide_merged(log.state, load_id, [2, 2, 1])
    assert command == PartitionsMerged(load_id=load_id, partition_ids=partitions(1, 2))
    log.apply(merged(load_id, 2))
    assert decide_merged(log.state, load_id, [2]) == outcome(load_id, MERGING)
    assert decide_merged(log.state, 999, [2]) == outcome(999, LoadState.UNKNOWN)
    with pytest.raises(InvalidArgumentError):
        decide_merged(log.state, load_id, [PARTITIONS])


def test_node_reports_as_merged_only_what_it_leads() -> None:
    log = Log()
    load_id = log.in_state(MERGING)
    row = log.state.row(2)
    assert row is not None
    leads = {node.info.node_id: node.info.number == row.primary for node in log.state.nodes}
    (reporter,) = (node for node, does in leads.items() if does)
    command = decide_merged(log.state, load_id, [2, 1], reporter)
    assert command == PartitionsMerged(load_id=load_id, partition_ids=partitions(2))
    for other in ("unheard-of", *(node for node, does in leads.items() if not does)):
        assert decide_merged(log.state, load_id, [2], other) == outcome(load_id, MERGING)


def test_load_that_is_not_known_is_closed_and_says_so() -> None:
    state = Log().state
    for decide in (
        lambda: decide_commit(state, CommitLoad(load_id=99, attempts=(), partition_ids=())),
        lambda: decide_abort(state, 99, ""),
        lambda: load_in(state, 99, OPEN),
    ):
        with pytest.raises(LoadClosedError, match="no such load") as refused:
            decide()
        assert (refused.value.load_id, refused.value.state) == (99, "unknown")


def test_load_in_another_state_than_wanted_is_closed() -> None:
    log = Log()
    load_id = log.open()
    assert load_in(log.state, load_id, OPEN).load_id == load_id
    with pytest.raises(LoadClosedError, match="is open"):
        load_in(log.state, load_id, MERGING)


# --- soft state ---------------------------------------------------------------------------------


def idle_log(*timeouts_s: float) -> Log:
    log = Log()
    for i, timeout_s in enumerate(timeouts_s):
        log.apply(replace(open_load(f"j{i}"), timeout_ms=round(timeout_s * 1000)))
    return log


def due(activity: Activity, log: Log, now: float) -> list[str]:
    expired = activity.tick(now, log.state.loads.active, pause_s=PAUSE_S)
    return [load.job_id for load in expired]


def run(activity: Activity, log: Log, begin: float, end: float) -> list[str]:
    """Tick in steps of half a second; return what was due at the end."""
    now, found = begin, due(activity, log, begin)
    while now < end:
        now += 0.5
        found = due(activity, log, now)
    return found


def test_load_that_nobody_touches_is_due_when_its_own_time_is_over() -> None:
    log, activity = idle_log(10, 20), Activity(100.0)
    assert run(activity, log, 100.0, 109.5) == []
    assert run(activity, log, 110.0, 110.0) == ["j0"]
    assert run(activity, log, 110.5, 120.0) == ["j0", "j1"]


def test_touched_load_has_its_full_time_again() -> None:
    log, activity = idle_log(10), Activity(100.0)
    load_id = log.index
    assert run(activity, log, 100.0, 109.0) == []
    activity.touch(load_id, 109.0)
    assert activity.idle_s(load_id, 112.0) == 3.0
    assert run(activity, log, 109.0, 118.5) == []
    assert run(activity, log, 118.5, 119.0) == ["j0"]


def test_load_that_is_opened_late_in_a_term_begins_with_its_full_time() -> None:
    log, activity = idle_log(), Activity(100.0)
    run(activity, log, 100.0, 200.0)
    log.apply(replace(open_load("late"), timeout_ms=10_000))
    assert run(activity, log, 200.0, 209.5) == []
    assert due(activity, log, 210.0) == ["late"]


def test_time_in_which_the_leader_stood_still_does_not_count() -> None:
    log, activity = idle_log(10), Activity(100.0)
    assert run(activity, log, 100.0, 105.0) == []
    assert due(activity, log, 105.0 + 3600) == []
    assert run(activity, log, 3705.0, 3709.5) == []
    assert due(activity, log, 3710.0) == ["j0"]


def test_load_whose_abort_is_proposed_is_not_due_again_unless_it_was_not_appended() -> None:
    log, activity = idle_log(10), Activity(100.0)
    assert run(activity, log, 100.0, 110.0) == ["j0"]
    activity.hold(log.index)
    assert due(activity, log, 110.5) == []
    activity.release(log.index)
    assert due(activity, log, 111.0) == ["j0"]


@pytest.mark.parametrize("state", [MERGING, DONE, ABORTED])
def test_load_that_is_closed_is_never_due(state: LoadState) -> None:
    log, activity = Log(), Activity(100.0)
    log.in_state(state)
    assert run(activity, log, 100.0, 100.0 + LOAD_TIMEOUT_MS / 1000 + 1) == []


def test_staged_rows_are_the_sum_of_what_each_attempt_said_last() -> None:
    activity = Activity(100.0)
    for attempt, rows, size in ((7, 10, 100), (8, 5, 50), (7, 12, 120), (0, 0, 0)):
        activity.touch(1, 101.0, attempt=attempt, rows=rows, size_bytes=size)
    assert activity.staged(1) == (17, 170)
    assert activity.staged(2) == (0, 0)
