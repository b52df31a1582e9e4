"""Moves: each step's rule, and whole moves with somebody lost after every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from koinon_coordinator.core.cluster.commands import (
    AcceptPlan,
    Applied,
    CancelMoves,
    FenceNode,
    PartitionsHosted,
    Reason,
    SetNodeStatus,
    SetReplicationFactor,
    StartMoves,
    WantPrimaries,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_proto.contract.table import (
    NO_NODE,
    NodeStatus,
    OfflineReason,
    PartitionId,
    PartitionStatus,
)
from tests.coordinator.kit.copies import Copies
from tests.coordinator.kit.states import (
    P0,
    alter,
    applied,
    cancel,
    finish,
    moving,
    next_step,
    numbers,
    plan_of,
    queue,
    record_of,
    rejected,
    restart,
    row_of,
    start,
)
from tests.coordinator.kit.support import bootstrapped, fence, hosted_of, register

N1, N2, N3, N4, N5 = numbers(1, 2, 3, 4, 5)


def one(**kwargs: int) -> ClusterState:
    return bootstrapped([(1,)], nodes=3, **kwargs)


def three() -> ClusterState:
    return bootstrapped([(1, 2, 3)], nodes=5)


def host(state: ClusterState) -> None:
    row = row_of(state)
    record = record_of(state, row.primary)
    applied(
        state.apply(
            PartitionsHosted(
                node_number=row.primary,
                node_epoch=record.info.node_epoch,
                hosted=hosted_of(state.assigned_to(row.primary)),
            )
        )
    )


# --- queueing ----------------------------------------------------------------------------------


def test_accept_plan_queues_every_move_and_leaves_the_table_alone() -> None:
    state = bootstrapped([(1,), (2,), (3,)])
    version = state.table_version
    plan = plan_of(((1,), (2,)), ((2,), (3,)))
    assert state.apply(plan) == Applied(rows_changed=2)
    assert tuple(state.moves.values()) == plan.moves
    begun = tuple(replace(move, running=True, cancelled=True) for move in plan.moves)
    twin = bootstrapped([(1,), (2,), (3,)])
    twin.apply(replace(plan, moves=begun))
    assert twin.image() == state.image()
    assert state.table_version == version
    assert ClusterState(state.image()).image() == state.image()


def test_accept_plan_repeated_or_overlapping_is_rejected() -> None:
    state = bootstrapped([(1,), (2,)])
    plan = plan_of(((1,), (2,)))
    state.apply(plan)
    before = state.image()
    assert rejected(state.apply(plan)) is Reason.MOVED_ON
    assert rejected(state.apply(plan_of(((1,), (3,)), ((2,), (3,))))) is Reason.MOVED_ON
    assert state.image() == before
    start(state)
    assert rejected(state.apply(plan)) is Reason.MOVED_ON


@pytest.mark.parametrize(
    ("ways", "reason"),
    [
        ((((2,), (3,)),), Reason.MOVED_ON),  # planned for other replicas
        ((((1,), ()),), Reason.BAD_TARGET),
        ((((1,), (2, 2)),), Reason.BAD_TARGET),
        ((((1,), (9,)),), Reason.BAD_TARGET),
        ((((1,), (4,)),), Reason.BAD_TARGET),  # has left
        ((((1,), (2,)), ((2,), (3,)), ((3,), (1,))), Reason.UNKNOWN_PARTITION),
    ],
)
def test_accept_plan_that_does_not_fit_is_rejected_whole(
    ways: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], reason: Reason
) -> None:
    state = bootstrapped([(1,), (2,)], nodes=4)
    state.apply(SetNodeStatus(node_number=N4, status=NodeStatus.LEFT))
    assert rejected(state.apply(plan_of(*ways))) is reason
    assert not state.moves


def test_accept_plan_with_a_partition_twice_is_rejected() -> None:
    state = one()
    (move,) = plan_of(((1,), (2,))).moves
    command = AcceptPlan(plan_id="plan", moves=(move, move))
    assert rejected(state.apply(command)) is Reason.MOVED_ON


def test_accept_plan_of_a_row_on_its_way_without_a_move_is_rejected() -> None:
    """A state that was put together from a table may hold such rows."""
    state = ClusterState(replace(moving(one(), (2,)).image(), moves=()))
    assert rejected(queue(state, (3,))) is Reason.MOVED_ON


# --- starting ----------------------------------------------------------------------------------


def test_start_names_the_target_first_and_what_goes_last() -> None:
    state = three()
    epoch = row_of(state).partition_epoch
    moving(state, (4, 2, 5))
    row = row_of(state)
    assert row.replicas == (N4, N2, N5, N1, N3)
    assert (row.adding, row.removing) == ((N4, N5), (N1, N3))
    assert (row.target, row.settled) == ((N4, N2, N5), (N2, N1, N3))
    assert (row.in_sync, row.primary) == ((N1, N2, N3), N1)
    assert (row.wanted_primary, row.partition_epoch) == (N4, epoch + 1)
    assert row.status is PartitionStatus.ONLINE
    assert state.moves[P0].running


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ((1, 2, 4), NO_NODE),  # the preferred primary stays and leads
        ((2, 1, 3), N2),  # another one is preferred
        ((2, 3, 4), N2),  # the primary goes
    ],
)
def test_start_wishes_for_the_preferred_primary_where_it_changes(
    target: tuple[int, ...], wanted: int
) -> None:
    assert row_of(moving(three(), target)).wanted_primary == wanted


def test_start_wishes_for_the_preferred_primary_if_the_one_that_leads_goes() -> None:
    state = three()
    alter(state, to=3)
    host(state)
    assert row_of(moving(state, (1, 2, 4))).wanted_primary == N1


def test_start_forgets_a_wish_for_one_that_goes_and_keeps_another() -> None:
    for wish, kept in ((N3, NO_NODE), (N2, N2)):
        state = three()
        state.apply(WantPrimaries(wishes=((P0, wish),)))
        assert row_of(moving(state, (1, 2, 4))).wanted_primary == kept


def test_start_of_a_move_that_is_not_queued_is_rejected_row_by_row() -> None:
    state = bootstrapped([(1,), (2,), (3,)])
    state.apply(plan_of(((1,), (2,)), ((2,), (3,))))
    start(state)
    version = state.table_version
    command = StartMoves(partition_ids=tuple(PartitionId(p) for p in (0, 1, 2, 77, 1)))
    result = state.apply(command)
    assert result == Applied(rows_changed=1, rejected=tuple(PartitionId(p) for p in (0, 2, 77, 1)))
    assert state.table_version == version + 1
    before = state.image()
    assert start(state) == Applied(rejected=(P0,))
    assert state.image() == before


# --- finishing ---------------------------------------------------------------------------------


def ready() -> ClusterState:
    """A move (1, 2, 3) to (4, 2, 3) that can be finished."""
    state = moving(three(), (4, 2, 3))
    applied(alter(state, 1, 2, 3, 4))
    applied(alter(state, to=4))
    host(state)
    return state


def test_finish_leaves_the_target_alone() -> None:
    state = ready()
    before = row_of(state)
    applied(finish(state))
    row = row_of(state)
    assert (row.replicas, row.in_sync) == ((N4, N2, N3), (N2, N3, N4))
    assert (row.adding, row.removing, row.wanted_primary) == ((), (), NO_NODE)
    assert (row.primary, row.primary_epoch) == (N4, before.primary_epoch)
    assert row.partition_epoch == before.partition_epoch + 1
    assert not state.moves
    before_again = state.image()
    assert finish(state) == Applied(rejected=(P0,))
    assert state.image() == before_again


def test_finish_before_everything_added_is_in_sync_is_rejected() -> None:
    state = ready()
    applied(alter(state, 2, 3, 4))
    applied(finish(ClusterState(state.image())))
    state = moving(three(), (1, 2, 4))
    assert finish(state) == Applied(rejected=(P0,))
    applied(alter(state, 1, 2, 3, 4))
    applied(finish(state))


def test_finish_while_the_primary_is_one_that_goes_is_rejected() -> None:
    state = moving(three(), (4, 2, 3))
    alter(state, 1, 2, 3, 4)
    assert finish(state) == Applied(rejected=(P0,))


def test_finish_before_the_primary_has_hosted_is_rejected() -> None:
    state = moving(three(), (4, 2, 3))
    alter(state, 1, 2, 3, 4)
    alter(state, to=4)
    assert finish(state) == Applied(rejected=(P0,))
    host(state)
    applied(finish(state))


def test_finish_with_too_few_of_the_target_in_sync_is_rejected() -> None:
    state = ready()
    applied(alter(state, 4, 1, 3))
    applied(alter(state, 4, 1))
    assert finish(state) == Applied(rejected=(P0,))  # 4 alone would be left of two
    applied(alter(state, 4, 1, 2))
    applied(finish(state))


def test_finish_of_a_queued_move_is_rejected() -> None:
    state = one()
    queue(state, (1,))
    assert finish(state) == Applied(rejected=(P0,))


def test_finish_wishes_for_the_preferred_primary_if_another_leads() -> None:
    state = moving(three(), (4, 2, 3))
    alter(state, 1, 2, 3, 4)
    alter(state, to=2)
    host(state)
    finish(state)
    row = row_of(state)
    assert (row.primary, row.wanted_primary) == (N2, N4)


def test_finish_does_not_wish_for_a_preferred_primary_out_of_sync() -> None:
    state = moving(three(), (2, 1, 4))
    alter(state, 1, 3, 4)
    finish(state)
    row = row_of(state)
    assert (row.replicas, row.primary) == ((N2, N1, N4), N1)
    assert row.wanted_primary == N2  # as since the start, for when it is


def test_finish_wishes_for_the_preferred_primary_whatever_was_wished_for_meanwhile() -> None:
    for in_sync, wanted in (((1, 2, 4), N2), ((1, 3, 4), NO_NODE)):  # in sync, and not
        state = moving(three(), (2, 1, 4))
        alter(state, *in_sync)
        state.apply(WantPrimaries(wishes=((P0, NO_NODE),)))
        applied(finish(state))
        assert row_of(state).wanted_primary == wanted


def test_finish_of_fewer_replicas_needs_the_smaller_minimum() -> None:
    state = three()
    state.apply(SetReplicationFactor(replication_factor=1))
    moving(state, (2,))
    assert row_of(state).adding == ()
    alter(state, to=2)
    host(state)
    applied(finish(state))
    assert (row_of(state).replicas, row_of(state).in_sync) == ((N2,), (N2,))


def test_start_towards_more_replicas_keeps_the_partition_writable() -> None:
    state = one()
    state.apply(SetReplicationFactor(replication_factor=3))
    moving(state, (1, 2, 3))
    assert state.config is not None
    assert state.keyspaces.min_in_sync(row_of(state)) == 1
    alter(state, 1, 2)
    fence(state, 2)
    assert row_of(state).in_sync == (N1,)
    restart(state, 2)
    applied(alter(state, 1, 2))
    applied(alter(state, 1))
    applied(alter(state, 1, 2, 3))
    applied(finish(state))
    assert state.keyspaces.min_in_sync(row_of(state)) == 2
    fence(state, 2)
    fence(state, 3)
    assert row_of(state).in_sync == (N1, N3)


# --- cancelling --------------------------------------------------------------------------------


def test_cancel_of_a_queued_move_drops_it() -> None:
    state = one()
    queue(state, (2,))
    before = row_of(state)
    version = state.table_version
    applied(cancel(state))
    assert not state.moves
    assert (row_of(state), state.table_version) == (before, version)


def test_cancel_of_a_running_move_turns_it_back() -> None:
    state = moving(three(), (4, 2, 5))
    applied(alter(state, 1, 2, 3, 4))
    applied(cancel(state))
    row, move = row_of(state), state.moves[P0]
    assert row.replicas == (N1, N2, N3, N4, N5)
    assert (row.adding, row.removing) == ((), (N4, N5))
    assert row.wanted_primary == NO_NODE  # it leads still
    assert (move.origin, move.target) == ((N4, N2, N5), (N1, N2, N3))
    assert move.running
    assert move.cancelled
    applied(finish(state))
    assert (row_of(state).replicas, row_of(state).in_sync) == ((N1, N2, N3), (N1, N2, N3))


def test_cancel_after_the_hand_over_wishes_for_the_old_primary_first() -> None:
    state = ready()
    applied(cancel(state))
    assert row_of(state).wanted_primary == N1
    assert finish(state) == Applied(rejected=(P0,))  # the primary is to be removed
    applied(alter(state, to=1))
    host(state)
    applied(finish(state))
    assert row_of(state).primary == N1


@pytest.mark.parametrize("target", [(4, 2, 5), (3, 2, 4)])
def test_cancel_twice_is_once(target: tuple[int, ...]) -> None:
    state = moving(three(), target)
    applied(cancel(state))
    before = state.image()
    assert cancel(state) == Applied(rejected=(P0,))
    both = CancelMoves(partition_ids=(P0, P0, PartitionId(9)))
    assert state.apply(both) == Applied(rejected=(P0, P0, PartitionId(9)))
    assert state.image() == before


def test_cancel_is_rejected_where_the_copies_are_with_the_target_alone() -> None:
    """Turned back, it would wait for a node that may never come back."""
    state = moving(one(), (2,))
    alter(state, 1, 2)
    fence(state, 1)
    assert row_of(state).in_sync == (N2,)
    assert cancel(state) == Applied(rejected=(P0,))
    host(state)
    applied(finish(state))


def test_cancel_of_a_move_that_was_turned_back_in_vain_turns_it_round_again() -> None:
    state = moving(one(), (2,))
    alter(state, 1, 2)
    applied(cancel(state))
    fence(state, 1)
    host(state)
    assert finish(state) == Applied(rejected=(P0,))
    applied(cancel(state))
    row, move = row_of(state), state.moves[P0]
    assert (row.replicas, row.adding, row.removing) == ((N2, N1), (N2,), (N1,))
    assert (move.origin, move.target, move.cancelled) == ((N1,), (N2,), False)
    assert cancel(state) == Applied(rejected=(P0,))
    applied(finish(state))


def test_cancel_on_the_way_to_more_replicas_keeps_the_partition_writable() -> None:
    state = one()
    state.apply(SetReplicationFactor(replication_factor=3))
    moving(state, (1, 2, 3))
    cancel(state)
    assert state.config is not None
    assert state.keyspaces.min_in_sync(row_of(state)) == 1


def test_election_in_a_move_prefers_those_that_stay() -> None:
    state = moving(three(), (4, 5, 2))
    alter(state, 1, 2, 3, 4)
    fence(state, 1)
    assert row_of(state).primary == N4
    cancel(state)
    fence(state, 4)
    assert row_of(state).primary == N2


# --- whole moves, and somebody lost after every step -------------------------------------------


def drive(copies: Copies, steps_max: int = 60) -> list[Copies]:
    """Go on until nothing is left to do; return what there was after every step."""
    passed = [copies.fork()]
    while (command := next_step(copies.state)) is not None:
        copies.apply(command)
        passed.append(copies.fork())
        assert len(passed) < steps_max
    return passed


def begun(origin: tuple[int, ...], target: tuple[int, ...]) -> Copies:
    """Five nodes, partition 0 with a move queued; the model knows who holds what."""
    copies = Copies(bootstrapped([origin], nodes=5))
    for record in copies.state.nodes:
        copies.epochs[record.info.node_id, record.info.store_id] = record.info.node_epoch
    copies.holders[0] = {copies.store_of(n) for n in row_of(copies.state).in_sync}
    copies.apply(plan_of((origin, target)))
    return copies


def fence_of(copies: Copies, number: int) -> None:
    info = record_of(copies.state, number).info
    copies.apply(FenceNode(node_number=info.number, node_epoch=info.node_epoch))


def register_of(copies: Copies, number: int, *, store: str = "") -> None:
    info = record_of(copies.state, number).info
    copies.apply(
        register(
            info.node_id,
            store=store or info.store_id,
            last=copies.epochs.get((info.node_id, store or info.store_id), 0),
            known=info.node_epoch,
            registration=f"again{info.node_epoch}",
        )
    )


def back_after_fence(copies: Copies, number: int) -> None:
    fence_of(copies, number)
    drive(copies)  # what the others do meanwhile
    register_of(copies, number)


def back_at_once(copies: Copies, number: int) -> None:
    fence_of(copies, number)
    register_of(copies, number)


def restarted(copies: Copies, number: int) -> None:
    register_of(copies, number)


def emptied(copies: Copies, number: int) -> None:
    register_of(copies, number, store="empty")
    drive(copies)
    if row_of(copies.state).offline_reason is OfflineReason.STORE_LOST:
        register_of(copies, number, store=f"store-n{number}")


def everyone_away(copies: Copies, number: int) -> None:
    """A power cut; ``number`` is back first."""
    order = [number, *(n for n in range(1, 6) if n != number)]
    for n in reversed(order):
        fence_of(copies, n)
    for n in order:
        register_of(copies, n)


WAYS = {
    "one replica": ((1,), (2,)),
    "replace the primary": ((1, 2, 3), (4, 2, 3)),
    "replace a backup": ((1, 2, 3), (1, 2, 4)),
    "replace two": ((1, 2, 3), (4, 5, 1)),
    "more": ((1,), (1, 2, 3)),
    "fewer": ((1, 2, 3), (3,)),
    "another order": ((1, 2, 3), (3, 1, 2)),
}


def assert_settled(copies: Copies, replicas: tuple[int, ...]) -> None:
    row = row_of(copies.state)
    assert row.status is PartitionStatus.ONLINE
    assert row.replicas == numbers(*replicas)
    assert set(row.in_sync) == set(row.replicas)
    assert (row.adding, row.removing, row.wanted_primary) == ((), (), NO_NODE)
    assert not copies.state.moves


@pytest.mark.parametrize("way", WAYS)
def test_move_undisturbed_ends_with_the_target_in_sync_and_led_by_its_first(way: str) -> None:
    origin, target = WAYS[way]
    copies = begun(origin, target)
    passed = drive(copies)
    assert_settled(copies, target)
    assert row_of(copies.state).primary == target[0]
    assert len(passed) >= 3


@pytest.mark.parametrize(
    "loss", [back_after_fence, back_at_once, restarted, emptied, everyone_away]
)
@pytest.mark.parametrize("way", WAYS)
def test_move_with_a_node_lost_after_any_step_goes_on_and_keeps_every_write(
    way: str, loss: Callable[[Copies, int], None]
) -> None:
    origin, target = WAYS[way]
    for step in drive(begun(origin, target)):
        for number in sorted({*origin, *target}):
            copies = step.fork()
            loss(copies, number)
            drive(copies)
            assert_settled(copies, target)


@pytest.mark.parametrize("way", WAYS)
def test_move_with_a_node_lost_twice_after_any_step_keeps_every_write(way: str) -> None:
    origin, target = WAYS[way]
    for first in drive(begun(origin, target)):
        for number in sorted({*origin, *target}):
            copies = first.fork()
            fence_of(copies, number)
            for second in drive(copies):
                for other in sorted({*origin, *target} - {number}):
                    again = second.fork()
                    fence_of(again, other)
                    drive(again)
                    register_of(again, number)
                    drive(again)
                    register_of(again, other)
                    drive(again)
                    assert_settled(again, target)


@pytest.mark.parametrize("way", WAYS)
def test_move_cancelled_after_any_step_ends_where_it_began_or_where_it_led(way: str) -> None:
    origin, target = WAYS[way]
    for step in drive(begun(origin, target)):
        for number in (0, *sorted({*origin, *target})):
            copies = step.fork()
            is_moving = bool(copies.state.moves)
            copies.apply(CancelMoves(partition_ids=(P0,)))
            if number:
                back_after_fence(copies, number)
            drive(copies)
            assert_settled(copies, origin if is_moving else target)
