"""Nodes that stay away, at a leader over a group of one: when and how they are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from koinon_coordinator.core.cluster.commands import (
    AcceptPlan,
    CancelMoves,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.move_scheduler import REPAIR_PREFIX
from tests.coordinator.kit.plans import (
    REBALANCE,
    THREE,
    carry_out,
    counts,
    execute,
    rows,
    with_newcomer,
)
from tests.coordinator.kit.states import record_of
from tests.coordinator.kit.support import (
    LeaderContext,
    T,
    bootstrapped,
    fence,
    register,
    run_term,
    settled,
)


def test_move_to_a_node_that_stays_away_is_turned_back_after_half_a_minute() -> None:
    async def test(term: LeaderContext) -> None:
        await execute(term, REBALANCE)
        await settled()
        await term.live(25, "n1", "n2", "n3")  # n4 is fenced after 1.5 s
        assert not record_of(term.replicated.state, 4).live
        assert {v.waits_for for v in term.leadership.operations.moves()[1]} == {"n4 is down"}
        assert term.count(CancelMoves) == 0
        await term.live(10, "n1", "n2", "n3")
        assert term.count(CancelMoves) == 1
        assert not term.replicated.state.moves
        assert tuple(row.replicas for row in rows(term)) == tuple(THREE)

    run_term(test, state=with_newcomer())


def away(rereplicate_after_ms: int, replicas: Sequence[tuple[int, ...]] = THREE) -> ClusterState:
    state = bootstrapped(replicas, rereplicate_after_ms=rereplicate_after_ms)
    state.apply(register("n4"))
    return state


def test_node_that_stays_away_is_replaced_and_finds_nothing_of_its_own_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(term: LeaderContext) -> None:
        others = ("n1", "n2", "n4")
        await term.live(6, *others)
        assert term.count(AcceptPlan) == 0
        await term.live(3, *others)
        moves = list(term.replicated.state.moves.values())
        assert {m.partition_id for m in moves} == {1, 2, 3, 5}
        assert all(m.plan_id.startswith(REPAIR_PREFIX) and "n3" in m.reason for m in moves)
        await carry_out(term, *others)
        assert 3 not in counts(term)
        assert all(len(row.in_sync) == 2 for row in rows(term))
        await term.live(3, *others)

    term = run_term(test, state=away(5_000))
    assert term.count(AcceptPlan) == 1
    assert sum("re-replication begun" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("after_ms", [0, 600_000])
def test_node_that_is_not_away_for_long_enough_keeps_its_replicas(after_ms: int) -> None:
    async def test(term: LeaderContext) -> None:
        await term.live(20, "n1", "n2", "n4")
        assert term.count(AcceptPlan) == 0

    run_term(test, state=away(after_ms))


def test_node_that_comes_back_before_its_moves_have_begun_keeps_its_replicas() -> None:
    async def test(term: LeaderContext) -> None:
        await term.leadership.operations.set_moves(moves_per_node=1)
        await term.live(8, "n1", "n2", "n4")
        queued = [m for m in term.replicated.state.moves.values() if not m.running]
        assert queued
        await term.register("n3", last=1, registration="r2")
        await settled()
        assert all(m.running for m in term.replicated.state.moves.values())
        await carry_out(term, "n1", "n2", "n3", "n4")
        assert counts(term)[3] == len(queued)

    run_term(test, state=away(5_000))


def test_node_that_comes_back_while_its_replacement_is_planned_keeps_its_replicas() -> None:
    async def test(term: LeaderContext) -> None:
        begun, gate = asyncio.Event(), asyncio.Event()

        async def held(work: Callable[[], T]) -> T:
            begun.set()
            await gate.wait()
            return work()

        term.leadership.term.computed = held  # type: ignore[method-assign]
        await term.live(8, "n1", "n2", "n4")
        assert begun.is_set()
        await term.register("n3", last=1, registration="r2")
        gate.set()
        await settled()

    assert run_term(test, state=away(5_000)).count(AcceptPlan) == 0


def test_lost_node_without_anyone_to_replace_it_is_tried_again_when_a_node_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(term: LeaderContext) -> None:
        await term.live(15, "n1", "n2")
        assert term.count(AcceptPlan) == 0
        assert sum("re-replication refused" in r.message for r in caplog.records) == 1
        await term.register("n4")
        await term.live(1, "n1", "n2", "n4")
        assert term.count(AcceptPlan) == 1
        await carry_out(term, "n1", "n2", "n4")
        assert 3 not in counts(term)

    run_term(test, state=bootstrapped([(1, 2, 3), (2, 3, 1)], rereplicate_after_ms=5_000))


def test_leader_that_has_just_begun_counts_from_its_beginning() -> None:
    async def test(term: LeaderContext) -> None:
        await term.live(4, "n1", "n2", "n4")
        assert term.count(AcceptPlan) == 0
        await term.live(3, "n1", "n2", "n4")
        assert term.count(AcceptPlan) == 1

    state = away(5_000)
    fence(state, 3)
    run_term(test, state=state)
