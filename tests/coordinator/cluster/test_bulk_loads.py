"""Bulk loads in the replicated state: every way that a command can go, and what the table shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from koinon_coordinator.core.cluster import load_rules
from koinon_coordinator.core.cluster.commands import CommitLoad, LoadOutcome, OpenLoad, Reason
from koinon_coordinator.core.cluster.load_rules import ALREADY_APPLIED
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.raft import RaftConfig
from koinon_coordinator.wire.state_codec import command_to_bytes, image_from_bytes, image_to_bytes
from koinon_proto.contract.bulk_loads import LOAD_ATTEMPTS_MAX, LoadMode, LoadState, StreamBatch
from koinon_proto.contract.table import ActiveLoad, PartitionId
from tests.coordinator.kit.load_states import (
    ABORTED,
    DONE,
    FIRST_INDEX,
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
from tests.coordinator.kit.states import rejected

STATES = (OPEN, MERGING, DONE, ABORTED)
OVERWRITE = LoadMode.OVERWRITE


def last_batch(log: Log) -> int | None:
    """The last batch of the streaming query "q" that was committed."""
    batches = {batch.query_id: batch.batch_id for batch in log.state.image().loads.batches}
    return batches.get("q")


def shown(log: Log) -> list[tuple[int, bool]]:
    return [(load.load_id, load.merging) for load in log.table().loads]


# --- opening ------------------------------------------------------------------------------------


def test_load_is_named_by_the_log_index_of_its_opening_and_shown_in_the_table() -> None:
    log = Log()
    version = log.state.table_version
    assert log.apply(open_load("a")) == outcome(FIRST_INDEX, OPEN)
    log.index += 5
    assert log.apply(open_load("b")) == outcome(FIRST_INDEX + 6, OPEN)
    assert log.table().loads == (
        ActiveLoad(load_id=FIRST_INDEX, merging=False),
        ActiveLoad(load_id=FIRST_INDEX + 6, merging=False),
    )
    assert log.state.table_version == version + 2


def test_load_without_a_place_in_the_log_is_a_defect() -> None:
    log = Log()
    with pytest.raises(ValueError, match="log index"):
        log.state.apply(open_load())


def test_loads_open_or_merging_at_once_are_bounded() -> None:
    log = Log()
    for i in range(load_rules.ACTIVE_MAX):
        log.in_state(MERGING if i % 2 else OPEN, job_id=f"j{i}")
    assert rejected(log.apply(open_load("more"))) is Reason.TOO_MANY_LOADS
    assert log.apply(open_load("j0")) == outcome(FIRST_INDEX, OPEN)
    log.apply(abort_load(FIRST_INDEX))
    assert isinstance(log.apply(open_load("more")), LoadOutcome)


# --- committing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [MERGING, DONE])
def test_commit_repeated_with_the_same_attempts_is_answered_alike(state: LoadState) -> None:
    log = Log()
    load_id = log.in_state(state)
    before = log.state.image()
    assert log.apply(commit_load(load_id)) == outcome(load_id, state)
    assert log.state.image() == before


def test_commit_after_the_abort_is_rejected() -> None:
    log = Log()
    load_id = log.in_state(ABORTED)
    assert rejected(log.apply(commit_load(load_id))) is Reason.LOAD_CLOSED


@pytest.mark.parametrize(
    ("attempts", "partition_ids"),
    [
        ((7, 5, 7), (0,)),
        ((7, 0), (0,)),
        (tuple(range(1, LOAD_ATTEMPTS_MAX + 2)), (0,)),
        ((7,), (2, 0)),
        ((7,), (0, 0)),
        ((7,), (0, PARTITIONS)),
        ((7,), (-1, 0)),
        ((), (0,)),
    ],
    ids=[
        "twice",
        "the job itself",
        "too many",
        "descending",
        "repeated",
        "too high",
        "too low",
        "of nobody",
    ],
)
def test_commit_that_no_state_could_accept_is_rejected(
    attempts: tuple[int, ...], partition_ids: tuple[int, ...]
) -> None:
    log = Log()
    load_id = log.open()
    command = commit_load(load_id, attempts, partition_ids)
    assert rejected(log.apply(command)) is Reason.BAD_VALUE
    assert log.load(load_id).state is OPEN


def test_attempts_that_are_merged_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_rules, "ATTEMPTS_MERGING_MAX", 5)
    log = Log()
    first, second = log.open("a"), log.open("b")
    log.apply(commit_load(first, (1, 2, 3)))
    assert rejected(log.apply(commit_load(second, (1, 2, 3)))) is Reason.TOO_MANY_ATTEMPTS
    log.apply(merged(first, 0, 2))
    assert log.apply(commit_load(second, (1, 2, 3))) == outcome(second, MERGING)


def test_largest_commit_fits_into_a_command_of_the_log() -> None:
    command = CommitLoad(
        load_id=(1 << 53) - 1,
        attempts=tuple((1 << 64) - 1 - i for i in range(LOAD_ATTEMPTS_MAX)),
        partition_ids=tuple(PartitionId(p) for p in range(1 << 16)),
        rows=1 << 60,
        bytes=1 << 60,
    )
    members = {"c1": "127.0.0.1:1"}
    config = RaftConfig(member_id="c1", data_dir=Path("unused"), initial_members=members)
    assert len(command_to_bytes(command)) <= config.append_bytes_max


# --- aborting -----------------------------------------------------------------------------------


def test_abort_ends_an_open_load_and_its_repetition_changes_nothing() -> None:
    log = Log()
    load_id = log.open()
    version = log.state.table_version
    assert log.apply(abort_load(load_id, "first")) == outcome(load_id, ABORTED)
    assert shown(log) == []
    assert log.state.table_version == version + 1
    assert log.apply(abort_load(load_id, "second")) == outcome(load_id, ABORTED)
    assert log.load(load_id).reason == "first"
    assert log.state.table_version == version + 1


@pytest.mark.parametrize("state", [MERGING, DONE])
def test_abort_after_the_commit_is_rejected(state: LoadState) -> None:
    log = Log()
    load_id = log.in_state(state)
    before = log.state.image()
    assert rejected(log.apply(abort_load(load_id))) is Reason.LOAD_CLOSED
    assert log.state.image() == before


# --- merging ------------------------------------------------------------------------------------


def test_merged_partitions_are_counted_and_the_last_one_ends_the_load() -> None:
    log = Log()
    load_id = log.in_state(MERGING)
    version = log.state.table_version
    assert log.apply(merged(load_id, 2)) == outcome(load_id, MERGING)
    assert (log.load(load_id).unmerged, log.load(load_id).partitions_merged) == (partitions(0), 1)
    assert log.state.table_version == version  # progress is nothing that a table shows
    assert log.apply(merged(load_id, 0)) == outcome(load_id, DONE)
    load = log.load(load_id)
    assert (load.attempts, load.unmerged) == ((), ())
    assert (load.partitions, load.partitions_merged, load.rows) == (2, 2, 100)
    assert shown(log) == []
    assert log.state.table_version == version + 1


@pytest.mark.parametrize("command", [commit_load(99), abort_load(99), merged(99, 0)])
def test_command_of_a_load_that_never_was_is_rejected(command: CommitLoad) -> None:
    log = Log()
    log.open()
    assert rejected(log.apply(command)) is Reason.LOAD_UNKNOWN


# --- streaming queries --------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [(), (0, 2)])
def test_batch_is_recorded_with_its_commit_and_never_opened_again(staged: tuple[int, ...]) -> None:
    log = Log()
    load_id = log.open(batch=0)
    assert last_batch(log) is None
    log.apply(commit_load(load_id, (7,), staged))
    assert last_batch(log) == 0
    log.apply(merged(load_id, 0, 2))
    assert log.apply(open_load("another run", batch=0)) == ALREADY_APPLIED
    assert log.open("next", batch=1) == log.index


@pytest.mark.parametrize("state", [OPEN, MERGING])
def test_batch_under_way_is_answered_with_its_own_load_whoever_asks(state: LoadState) -> None:
    log = Log()
    load_id = log.in_state(state, batch=3)
    assert log.apply(open_load("another run", batch=3)) == outcome(load_id, state)
    wrong = open_load("another run", OVERWRITE, batch=3)
    assert rejected(log.apply(wrong)) is Reason.LOAD_DIFFERS


def test_load_of_a_batch_that_a_later_one_has_overtaken_can_only_be_aborted() -> None:
    log = Log()
    late, later = log.open("a", batch=3), log.open("b", batch=4)
    log.apply(commit_load(later))
    assert rejected(log.apply(commit_load(late))) is Reason.BATCH_APPLIED
    assert log.apply(open_load("another run", batch=3)) == ALREADY_APPLIED
    assert last_batch(log) == 4
    assert log.apply(abort_load(late)) == outcome(late, ABORTED)


def test_streaming_queries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_rules, "QUERIES_MAX", 1)
    log = Log()
    log.apply(commit_load(log.open("a", batch=1)))
    other = OpenLoad(job_id="x", mode=LoadMode.APPEND, stream_batch=StreamBatch("r", 0))
    log.apply(other)
    assert rejected(log.apply(commit_load(log.index))) is Reason.TOO_MANY_QUERIES
    second = log.open("b", batch=2)
    assert log.apply(commit_load(second)) == outcome(second, MERGING)


# --- what is kept -------------------------------------------------------------------------------


def test_ended_loads_are_kept_for_a_while_and_their_batches_for_good() -> None:
    log = Log()
    first = log.in_state(DONE, job_id="first", batch=8)
    for i in range(load_rules.ENDED_MAX - 1):
        log.in_state(ABORTED, job_id=f"j{i}")
    assert log.apply(open_load("first", batch=8)) == outcome(first, DONE)
    log.in_state(ABORTED, job_id="one more")
    assert log.state.loads.get(first) is None
    assert len(log.state.loads.image().ended) == load_rules.ENDED_MAX
    assert log.apply(open_load("first", batch=8)) == ALREADY_APPLIED
    assert log.apply(open_load("first")) == outcome(log.index, OPEN)


def test_ids_of_a_group_that_was_made_anew_begin_above_its_base() -> None:
    image = Log().state.image()
    base = 1 << 40
    based = replace(image, loads=replace(image.loads, id_base=base))
    log = Log(ClusterState(image_from_bytes(image_to_bytes(based))), 1)
    assert log.apply(open_load()) == outcome(base + 2, OPEN)
