"""Moves that start, finish, are turned back and dropped, and what people are told meanwhile."""

from __future__ import annotations

import pytest

from koinon_coordinator.core.cluster.commands import (
    AcceptPlan,
    CancelMoves,
    Command,
    FinishMoves,
    Move,
    SetMoveSettings,
    StartMoves,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.copy_progress import Progress, Stage
from koinon_coordinator.core.decide.move_scheduler import (
    REPAIR_PREFIX,
    TURN_BACK_AFTER_S,
    Fences,
    moves_by_node,
    next_step,
    waits_for,
)
from koinon_proto.contract.table import MoveSettings, NodeNumber, PartitionId
from tests.coordinator.kit.states import (
    alter,
    ample_room,
    moving,
    numbers,
    plan_of,
    queue,
    restart,
    row_of,
)
from tests.coordinator.kit.support import bootstrapped, fence, host_everything

P0, P1 = PartitionId(0), PartitionId(1)
N3, N4 = NodeNumber(3), NodeNumber(4)
GONE = TURN_BACK_AFTER_S


def step(
    state: ClusterState, fenced_s: dict[NodeNumber, float] | None = None, after_s: float = 600.0
) -> Command | None:
    return next_step(state, fenced_s or {}, after_s, ample_room(state))


def settings(state: ClusterState, **changes: object) -> None:
    values = MoveSettings(**changes)  # type: ignore[arg-type]
    state.apply(SetMoveSettings(settings=values))


def says(state: ClusterState, progress: Progress | None = None, node: int = 4) -> str:
    of = {NodeNumber(node): {progress.partition_id: progress}} if progress is not None else {}
    return waits_for(
        state, state.moves[P0], moves_by_node(state.moves.values()), ample_room(state, of)
    )


# --- starting ----------------------------------------------------------------------------------


def test_queued_moves_start_in_one_command_up_to_the_limit_of_each_node() -> None:
    state = bootstrapped([(1,)] * 3 + [(2,)] * 3, nodes=4)
    settings(state, moves_per_node=2)
    state.apply(plan_of(*[((1,), (3,))] * 3, *[((2,), (4,))] * 3))
    started = step(state)
    assert started == StartMoves(partition_ids=tuple(PartitionId(p) for p in (0, 1, 3, 4)))
    state.apply(started)
    assert step(state) is None
    assert moves_by_node(state.moves.values()) == {1: 2, 2: 2, 3: 2, 4: 2}


def test_queued_move_counts_what_it_adds_and_removes_not_what_stays() -> None:
    state = bootstrapped([(1, 2), (1, 3), (2, 1)], nodes=5)
    settings(state, moves_per_node=1)
    state.apply(plan_of(((1, 2), (1, 4)), ((1, 3), (1, 5)), ((2, 1), (2, 5))))
    assert step(state) == StartMoves(partition_ids=(P0, P1))  # node 1 stays in both


def test_queued_move_waits_for_nodes_that_are_down_and_lets_others_pass() -> None:
    state = bootstrapped([(1,), (2,), (1,)], nodes=4)
    state.apply(plan_of(((1,), (3,)), ((2,), (4,)), ((1,), (4,))))
    fence(state, 3)
    fence(state, 2)
    assert step(state) == StartMoves(partition_ids=(PartitionId(2),))
    assert says(state) == "n3 is down"
    assert waits_for(state, state.moves[P1], {}, ample_room(state)) == "the partition is offline"


def test_change_of_order_alone_starts_whatever_the_limit_is() -> None:
    state = bootstrapped([(1, 2)] * 3)
    settings(state, moves_per_node=1)
    state.apply(plan_of(*[((1, 2), (2, 1))] * 3))
    started = step(state)
    assert isinstance(started, StartMoves)
    assert len(started.partition_ids) == 3
    state.apply(started)
    assert row_of(state).wanted_primary == 2


# --- finishing ---------------------------------------------------------------------------------


def test_running_move_finishes_when_its_target_is_in_sync_and_leads() -> None:
    state = moving(bootstrapped([(1,)]), (2,))
    assert step(state) is None
    alter(state, 1, 2)
    assert step(state) is None
    alter(state, to=2)
    assert step(state) is None
    host_everything(state)
    finish = step(state)
    assert finish == FinishMoves(partition_ids=(P0,))
    state.apply(finish)
    assert row_of(state).replicas == (2,)
    assert step(state) is None


def test_finishing_goes_before_starting() -> None:
    state = bootstrapped([(1, 2), (1, 2)], nodes=3)
    state.apply(plan_of(((1, 2), (2, 1)), ((1, 2), (1, 3))))
    state.apply(StartMoves(partition_ids=(P0,)))
    assert step(state) == FinishMoves(partition_ids=(P0,))


# --- turning back and dropping -----------------------------------------------------------------


def test_running_move_is_turned_back_once_its_new_node_has_gone_for_long() -> None:
    state = moving(bootstrapped([(1, 2)], nodes=4), (1, 4))
    fence(state, 4)
    assert step(state, {N4: GONE - 0.1}) is None
    back = step(state, {N4: GONE})
    assert back == CancelMoves(partition_ids=(P0,))
    state.apply(back)
    assert (state.moves[P0].cancelled, state.moves[P0].target) == (True, (1, 2))
    finish = step(state, {N4: GONE})
    assert finish == FinishMoves(partition_ids=(P0,))
    state.apply(finish)
    assert (row_of(state).replicas, len(state.moves)) == ((1, 2), 0)


def test_running_move_goes_on_while_another_node_than_the_new_one_is_away() -> None:
    state = moving(bootstrapped([(1, 2, 3)], nodes=4), (1, 2, 4))
    fence(state, 3)
    assert step(state, {N3: 99.0}) is None
    alter(state, 1, 2, 4)
    assert step(state, {N3: 99.0}) == FinishMoves(partition_ids=(P0,))


def test_running_move_whose_old_replicas_are_not_enough_any_more_is_not_turned_back() -> None:
    state = moving(bootstrapped([(1, 2)], nodes=5), (4, 5))
    alter(state, 1, 2, 4)
    fence(state, 1)
    fence(state, 2)
    host_everything(state)
    alter(state, 4)
    fence(state, 5)
    assert row_of(state).in_sync == (4,)
    assert step(state, {NodeNumber(5): GONE}) is None


def test_turned_back_move_is_turned_forward_if_only_the_new_replicas_live() -> None:
    """Else it would wait for nodes that may never come back, beside copies that are enough."""
    state = moving(bootstrapped([(1,)]), (2,))
    alter(state, 1, 2)
    state.apply(CancelMoves(partition_ids=(P0,)))
    fence(state, 1)
    host_everything(state)
    assert row_of(state).in_sync == (2,)
    assert step(state, {NodeNumber(1): GONE - 1}) is None
    forward = step(state, {NodeNumber(1): GONE})
    assert forward == CancelMoves(partition_ids=(P0,))
    state.apply(forward)
    assert (state.moves[P0].target, state.moves[P0].cancelled) == ((2,), False)
    assert step(state, {NodeNumber(1): GONE}) == FinishMoves(partition_ids=(P0,))


@pytest.mark.parametrize(("after_s", "drops"), [(600.0, True), (0.0, False)])
def test_queued_move_to_a_node_that_is_given_up_is_dropped(after_s: float, drops: bool) -> None:
    state = bootstrapped([(1,)], nodes=4)
    queue(state, (4,))
    fence(state, 4)
    assert step(state, {N4: 599.0}, after_s) is None
    dropped = step(state, {N4: 600.0}, after_s)
    assert dropped == (CancelMoves(partition_ids=(P0,)) if drops else None)


def test_queued_repair_of_a_node_that_is_back_is_dropped_and_a_running_one_goes_on() -> None:
    state = bootstrapped([(1, 2)] * 2, nodes=3)
    fence(state, 2)
    moves = tuple(
        Move(
            partition_id=p,
            origin=numbers(1, 2),
            target=numbers(1, 3),
            reason="n2 is lost",
            plan_id=f"{REPAIR_PREFIX}1",
        )
        for p in (P0, P1)
    )
    state.apply(AcceptPlan(plan_id=moves[0].plan_id, moves=moves))
    state.apply(StartMoves(partition_ids=(P0,)))
    assert step(state) == StartMoves(partition_ids=(P1,))
    restart(state, 2)
    assert step(state) == CancelMoves(partition_ids=(P1,))
    state.apply(CancelMoves(partition_ids=(P1,)))
    assert step(state) is None


def test_paused_nothing_goes_on_and_everything_says_so() -> None:
    state = moving(bootstrapped([(1,), (2,)]), (2,))
    state.apply(AcceptPlan(plan_id="b", moves=(_move(P1, (2,), (3,)),)))
    alter(state, 1, 2)
    alter(state, to=2)
    host_everything(state)
    fence(state, 3)
    settings(state, paused=True)
    assert step(state, {N3: 9_999.0}) is None
    assert {waits_for(state, m, {}, ample_room(state)) for m in state.moves.values()} == {"paused"}
    settings(state, paused=False)
    assert step(state) is not None


def _move(partition_id: PartitionId, origin: tuple[int, ...], target: tuple[int, ...]) -> Move:
    return Move(
        partition_id=partition_id,
        origin=numbers(*origin),
        target=numbers(*target),
        reason="balance",
        plan_id="b",
    )


# --- what people are told ----------------------------------------------------------------------


def test_waits_for_names_the_node_whose_moves_are_too_many() -> None:
    state = bootstrapped([(1,), (2,)], nodes=4)
    settings(state, moves_per_node=1)
    state.apply(plan_of(((1,), (4,)), ((2,), (4,))))
    assert says(state) == ""
    state.apply(StartMoves(partition_ids=(P1,)))
    assert says(state) == "waits for the move of n4"
    settings(state, moves_per_node=2)
    assert says(state) == ""
    settings(state, moves_per_node=1)
    load = {N4: 4}
    assert (
        waits_for(state, state.moves[P0], load, ample_room(state))
        == "waits for one of the 4 moves of n4"
    )


def test_waits_for_tells_a_running_moves_stages() -> None:
    state = moving(bootstrapped([(1, 2)], nodes=4), (4, 2))
    assert says(state) == "n4 waits for n1"
    for stage, text in (
        (Stage.WAITING, "n4 waits for n1"),
        (Stage.SNAPSHOT, "copying to n4"),
        (Stage.CATCH_UP, "copying to n4"),
        (Stage.LIVE, "n4 has everything and is about to be in sync"),
    ):
        assert says(state, Progress(partition_id=P0, stage=stage)) == text
    alter(state, 1, 2, 4)
    assert says(state) == "n1 hands over to n4"
    alter(state, to=4)
    assert says(state) == "n4 is taking over as primary"
    host_everything(state)
    assert says(state) == ""  # finished at the next look


def test_waits_for_tells_who_is_down() -> None:
    state = moving(bootstrapped([(1,)], nodes=4), (3, 4))
    fence(state, 4)
    assert says(state) == "n4 is down"
    fence(state, 3)
    assert says(state) == "n3 and n4 are down"
    fence(state, 1)
    restart(state, 3)
    restart(state, 4)
    assert says(state) == "the partition is offline"


# --- how long nodes have been away -------------------------------------------------------------


def test_fences_count_from_when_they_were_first_seen_and_anew_for_each_epoch() -> None:
    state = bootstrapped([(1,)])
    fences = Fences(100.0)
    fences.observe(state, 100.0)
    assert not fences.any
    fence(state, 2)
    fences.observe(state, 105.0)
    fences.observe(state, 110.0)
    assert fences.fenced_s(112.0) == {2: 7.0}
    restart(state, 2)
    fence(state, 2)  # back and gone again between two looks
    fences.observe(state, 120.0)
    assert fences.fenced_s(121.0) == {2: 1.0}
    restart(state, 2)
    fences.observe(state, 122.0)
    assert fences.fenced_s(130.0) == {}


def test_fences_leave_out_the_time_in_which_the_leader_stood_still() -> None:
    state = bootstrapped([(1,)])
    fence(state, 2)
    fences = Fences(100.0)
    fences.observe(state, 100.0)
    fences.tick(100.2, pause_s=0.25)
    fences.tick(700.2, pause_s=0.25)
    assert fences.fenced_s(700.2)[NodeNumber(2)] == pytest.approx(0.2)
