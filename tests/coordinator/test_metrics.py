"""Metrics of a coordinator: rows of the table, the pace of moves, fences."""

from __future__ import annotations

import pytest

from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.copy_progress import (
    PACE_WINDOW_S,
    Pace,
    Progress,
    Stage,
    received_since,
)
from koinon_coordinator.metrics import RowCounts, bytes_remaining, count_rows
from koinon_proto.contract.table import NodeNumber, PartitionId, PartitionStatus
from tests.coordinator.kit.states import alter, applied, moving
from tests.coordinator.kit.support import LeaderContext, bootstrapped, fence, run_term

THREE = [(1, 2, 3)] * 4


def counts_of(state: ClusterState) -> RowCounts:
    table = state.table()
    assert table is not None
    return count_rows(table)


def progress(partition_id: int, size: int, total: int, stage: Stage = Stage.SNAPSHOT) -> Progress:
    return Progress(
        partition_id=PartitionId(partition_id), stage=stage, bytes=size, bytes_total=total
    )


# --- rows --------------------------------------------------------------------------------------


def test_whole_table_is_counted_by_status_and_node() -> None:
    counts = counts_of(bootstrapped([(1, 2, 3), (2, 3, 1), (3, 1, 2), (1, 3, 2)]))
    assert counts.statuses == {PartitionStatus.ONLINE: 4}
    assert (counts.under_replicated, counts.below_minimum) == (0, 0)
    assert counts.primaries == {1: 2, 2: 1, 3: 1}
    assert counts.replicas == {1: 4, 2: 4, 3: 4}


def test_fenced_node_leaves_its_partitions_under_replicated() -> None:
    state = bootstrapped(THREE)
    fence(state, 3)
    counts = counts_of(state)
    assert (counts.under_replicated, counts.below_minimum) == (4, 0)


def test_fenced_node_that_has_to_stay_in_sync_does_not_count_as_a_copy() -> None:
    """``in_sync`` never shrinks below the minimum: the rows still name both nodes."""
    state = bootstrapped(THREE)
    fence(state, 3)
    fence(state, 2)
    counts = counts_of(state)
    assert (counts.under_replicated, counts.below_minimum) == (4, 4)


def test_follower_out_of_sync_is_missed_and_a_moves_target_is_not() -> None:
    state = bootstrapped([(1, 2), (1, 2)])
    applied(alter(state, 1))
    assert counts_of(state).under_replicated == 1
    state = moving(bootstrapped([(1, 2)]), (3, 2))
    assert counts_of(state).under_replicated == 0


# --- moves -------------------------------------------------------------------------------------


def test_received_bytes_are_counted_once_and_anew_where_a_copy_begins_anew() -> None:
    before = {PartitionId(1): progress(1, 70, 100), PartitionId(2): progress(2, 50, 100)}
    now = [progress(1, 90, 100), progress(2, 10, 100), progress(3, 5, 100)]
    assert received_since(before, now) == 20 + 10 + 5


def test_bytes_remaining_are_those_of_copies_that_are_not_whole() -> None:
    told = {
        NodeNumber(1): {PartitionId(1): progress(1, 30, 100), PartitionId(2): progress(2, 9, 0)},
        NodeNumber(2): {PartitionId(1): progress(1, 30, 100, Stage.LIVE)},
    }
    assert bytes_remaining(told) == 70


@pytest.mark.parametrize("seconds", [2, 60])
def test_pace_of_a_steady_stream_is_its_rate(seconds: int) -> None:
    pace = Pace(0.0)
    for step in range(1, 10 * seconds + 1):
        pace.add(100, step / 10)
    assert pace.per_second(float(seconds)) == pytest.approx(1_000, rel=0.05)


def test_pace_falls_when_nothing_comes() -> None:
    pace = Pace(0.0)
    assert pace.per_second(0.0) == 0
    pace.add(1_000_000, 60.0)
    first = pace.per_second(60.0)
    assert pace.per_second(60.0 + PACE_WINDOW_S) < first / 2
    assert pace.per_second(60.0 + 20 * PACE_WINDOW_S) < 1


# --- a term ------------------------------------------------------------------------------------


def test_fences_are_counted_and_received_bytes_paced() -> None:
    async def test(term: LeaderContext) -> None:
        await term.register("n1")
        await term.heartbeat("n1")
        assert term.leadership.members.fences == 0
        await term.pass_time(5.0)
        assert term.leadership.members.fences == 1
        mover = term.leadership.mover
        mover.note_progress(NodeNumber(1), [progress(1, 1_000, 5_000)])
        mover.note_progress(NodeNumber(1), [progress(1, 2_000, 5_000)])
        mover.note_progress(NodeNumber(1), [])
        assert 2_000 / PACE_WINDOW_S < mover.pace.per_second(term.clock()) < 1_000

    run_term(test)
