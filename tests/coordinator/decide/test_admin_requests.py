"""Tests of operators' requests: the commands made of them, and the refusals."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from koinon_coordinator.core.cluster.commands import (
    CancelMoves,
    Reason,
    SetMoveSettings,
    WantPrimaries,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.admin_requests import (
    decide_cancel,
    decide_force,
    decide_restore,
    decide_settings,
    decide_status,
    refusal,
)
from koinon_coordinator.core.decide.plan_requests import (
    MOVES_PER_COMMAND_MAX,
    PlanKind,
    PlanWish,
    accepted,
    layout_of,
    plan,
    repair,
    repair_layouts,
    repair_task,
)
from koinon_coordinator.core.planning.planner import Layout, Plan, PlannedMove
from koinon_coordinator.raft import RaftConfig
from koinon_coordinator.wire.state_codec import command_to_bytes
from koinon_proto.contract.cluster_errors import (
    MembershipChangeError,
    PlanStaleError,
    UnknownNodeError,
)
from koinon_proto.contract.errors import (
    ClusterNotReadyError,
    InvalidArgumentError,
    KoinonError,
    UnavailableError,
)
from koinon_proto.contract.table import MoveSettings, NodeNumber, NodeStatus, PartitionId
from tests.coordinator.kit.states import alter, ample_room, moving, numbers, queue, row_of
from tests.coordinator.kit.support import bootstrapped, fence, host_everything, register

N1, N2, N3 = numbers(1, 2, 3)
P0 = PartitionId(0)


# --- settings, cancelling, primaries -----------------------------------------------------------


def test_settings_keep_what_is_not_given() -> None:
    state = bootstrapped([(1,)])
    state.apply(SetMoveSettings(settings=MoveSettings(paused=True, bytes_per_second=7)))
    command = decide_settings(state, paused=None, bytes_per_second=None, moves_per_node=9)
    assert command.settings == MoveSettings(paused=True, bytes_per_second=7, moves_per_node=9)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("moves_per_node", 0, "pause"),
        ("moves_per_node", 1025, "limit 1024, got 1025"),
        ("bytes_per_second", 1 << 63, "0 means no limit"),
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(field: str, value: int, says: str) -> None:
    given: dict[str, int | None] = {"bytes_per_second": None, "moves_per_node": None, field: value}
    with pytest.raises(InvalidArgumentError, match=says) as refused:
        decide_settings(bootstrapped([(1,)]), paused=None, **given)
    assert refused.value.field == field


def test_cancel_takes_all_that_is_not_turned_back_yet_or_what_is_named() -> None:
    state = bootstrapped([(1,), (1,)])
    assert decide_cancel(state, []) is None
    moving(state, (2,))
    assert decide_cancel(state, []) == CancelMoves(partition_ids=(P0,))
    assert decide_cancel(state, [0, 0, 1]) == CancelMoves(partition_ids=(P0,))
    assert decide_cancel(state, [1]) is None
    state.apply(CancelMoves(partition_ids=(P0,)))
    assert decide_cancel(state, []) is None
    with pytest.raises(InvalidArgumentError, match="0 to 1"):
        decide_cancel(state, [2])


def test_restore_wants_preferred_primaries_that_can_lead() -> None:
    state = bootstrapped([(1, 2), (2, 1), (3, 1), (1, 3)])
    assert decide_restore(state) is None
    alter(state, to=2)  # as 1 is live and in sync: wanted back
    alter(state, 1, to=1, partition_id=1)  # 2 is not in sync
    fence(state, 3)  # not live
    assert decide_restore(state) == WantPrimaries(wishes=((P0, N1),))


def test_force_is_refused_unless_the_partition_is_offline_and_the_replica_live() -> None:
    state = bootstrapped([(1, 2, 3)], nodes=4)

    def why(partition_id: int, node_id: str, error: type[KoinonError]) -> str:
        with pytest.raises(error) as refused:
            decide_force(state, partition_id, node_id)
        return str(refused.value)

    assert "led by n1" in why(0, "n2", MembershipChangeError)
    assert "partition_id" in why(1, "n2", InvalidArgumentError)
    assert "n9" in why(0, "n9", UnknownNodeError)
    alter(state, 1, 2)
    for number in (2, 1):
        fence(state, number)
    assert "not a replica of partition 0; its replicas are n1, n2, n3" in why(
        0, "n4", MembershipChangeError
    )
    assert "n2 is down" in why(0, "n2", MembershipChangeError)
    command = decide_force(state, 0, "n3")
    assert command.partition_epoch == row_of(state).partition_epoch
    state.apply(command)
    assert (row_of(state).primary, row_of(state).in_sync) == (3, (3,))
    with pytest.raises(ClusterNotReadyError):
        decide_force(ClusterState(), 0, "n1")


# --- nodes -------------------------------------------------------------------------------------


def left(state: ClusterState, node_id: str) -> str:
    with pytest.raises(MembershipChangeError) as refused:
        decide_status(state, node_id, NodeStatus.LEFT)
    return refused.value.reason


def test_node_that_holds_replicas_cannot_leave_and_is_told_what_it_holds() -> None:
    state = bootstrapped([(1, 2)] * 12 + [(2, 3)])
    assert left(state, "n1") == "n1 is still a replica of 12 partitions: drain it first"
    for p in range(11):
        alter(state, 1, partition_id=p)
    assert left(state, "n1") == (
        "n1 is still a replica of 12 partitions (11 of them hold the last in-sync copy: "
        "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 1 more): drain it first"
    )
    assert left(state, "n3") == "n3 is still a replica of 1 partition: drain it first"
    assert isinstance(refusal(Reason.NODE_IN_USE, state=state, node=N3), MembershipChangeError)


def test_node_that_only_moves_name_cannot_leave_either() -> None:
    state = bootstrapped([(1,)])
    queue(state, (2,))
    assert left(state, "n2") == "n2 is part of 1 move under way: wait for them or cancel them"
    assert decide_status(state, "n3", NodeStatus.LEFT).node_number == 3


def test_node_status_is_one_that_an_operator_can_give() -> None:
    state = bootstrapped([(1,)])
    for status in (0, 1, 9):
        with pytest.raises(InvalidArgumentError, match="ACTIVE, DRAINING, LEFT"):
            decide_status(state, "n1", status)
    with pytest.raises(UnknownNodeError):
        decide_status(state, "n9", NodeStatus.DRAINING)
    with pytest.raises(InvalidArgumentError, match="node_id"):
        decide_status(state, "", NodeStatus.DRAINING)
    state.apply(decide_status(state, "n2", NodeStatus.LEFT))
    assert decide_status(state, "n2", NodeStatus.LEFT)
    with pytest.raises(MembershipChangeError, match="left the cluster for good"):
        decide_status(state, "n2", NodeStatus.ACTIVE)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (Reason.NODE_LEFT, MembershipChangeError),
        (Reason.UNKNOWN_NODE, UnknownNodeError),
        (Reason.MOVED_ON, PlanStaleError),
        (Reason.BAD_TARGET, PlanStaleError),
        (Reason.BAD_VALUE, InvalidArgumentError),
        (Reason.NOTHING_CURRENT, MembershipChangeError),
        (Reason.NOT_OFFLINE, MembershipChangeError),
        (Reason.NO_CLUSTER, UnavailableError),
    ],
)
def test_refused_command_becomes_a_typed_error(reason: Reason, error: type[KoinonError]) -> None:
    assert type(refusal(reason, state=bootstrapped([(1,)]), node=N2, plan_id="x")) is error


# --- planning ----------------------------------------------------------------------------------


def whole(state: ClusterState) -> Layout:
    """The only keyspace, as the planner sees it."""
    return layout_of(state, state.keyspaces.default, ample_room(state)).layout


def test_layout_counts_moves_as_done_and_leaves_them_alone() -> None:
    state = bootstrapped([(1, 2), (2, 1)], nodes=5)
    queue(state, (1, 3))
    fence(state, 5)
    state.apply(decide_status(state, "n4", NodeStatus.DRAINING))
    layout = whole(state)
    assert layout.replicas == ((1, 3), (2, 1))
    assert layout.fixed == {P0}
    assert layout.replication_factor == 2
    assert [(n.number, n.takes, n.gives) for n in layout.nodes] == [
        (1, True, False),
        (2, True, False),
        (3, True, False),
        (4, False, True),
        (5, False, False),  # down: it keeps what it has
    ]
    state.apply(decide_status(state, "n4", NodeStatus.LEFT))
    assert [n.number for n in whole(state).nodes] == [1, 2, 3, 5]


def test_layout_of_a_draining_node_that_is_down_still_gives() -> None:
    state = bootstrapped([(1, 2)])
    state.apply(decide_status(state, "n2", NodeStatus.DRAINING))
    fence(state, 2)
    node = next(n for n in whole(state).nodes if n.number == N2)
    assert (node.takes, node.gives) == (False, True)


@pytest.mark.parametrize(
    "wish",
    [
        PlanWish(kind=PlanKind.DRAIN, node_id="n1"),
        PlanWish(kind=PlanKind.REPLACE, node_id="n1", with_node_id="n4"),
    ],
)
def test_plan_that_empties_a_node_is_the_same_before_and_after_it_is_told(wish: PlanWish) -> None:
    state = bootstrapped([(1, 2), (2, 3), (3, 1)], nodes=4)
    before = plan(state, wish, ample_room(state))
    assert (len(before.plan.moves), before.emptied) == (2, 1)
    state.apply(decide_status(state, "n1", NodeStatus.DRAINING))
    assert plan(state, wish, ample_room(state)) == before


@pytest.mark.parametrize(
    ("wish", "error", "says"),
    [
        (PlanWish(kind=PlanKind.DRAIN), InvalidArgumentError, "node_id"),
        (PlanWish(kind=PlanKind.DRAIN, node_id="n9"), UnknownNodeError, "n9"),
        (PlanWish(kind=PlanKind.DRAIN, node_id="n5"), MembershipChangeError, "left"),
        (PlanWish(kind=PlanKind.REPLACE, node_id="n1"), InvalidArgumentError, "with_node_id"),
        (
            PlanWish(kind=PlanKind.REPLACE, node_id="n1", with_node_id="n1"),
            InvalidArgumentError,
            "another node",
        ),
        (
            PlanWish(kind=PlanKind.REPLACE, node_id="n1", with_node_id="n4"),
            MembershipChangeError,
            "n4 is fenced",
        ),
        (PlanWish(kind=PlanKind.REPLICATION_FACTOR), InvalidArgumentError, "1 to 7"),
        (
            PlanWish(kind=PlanKind.REPLICATION_FACTOR, replication_factor=8),
            InvalidArgumentError,
            "1 to 7",
        ),
        (
            PlanWish(kind=PlanKind.REPLICATION_FACTOR, replication_factor=5),
            InvalidArgumentError,
            "number of nodes .limit 4, got 5",
        ),
    ],
)
def test_plan_of_what_cannot_be_is_refused_typed(
    wish: PlanWish, error: type[KoinonError], says: str
) -> None:
    state = bootstrapped([(1,), (2,)], nodes=5)
    state.apply(decide_status(state, "n5", NodeStatus.LEFT))
    fence(state, 4)
    with pytest.raises(error, match=says):
        plan(state, wish, ample_room(state))
    with pytest.raises(ClusterNotReadyError):
        plan(state := ClusterState(), wish, ample_room(state))


def test_large_plan_is_queued_in_pieces_that_fit_into_the_log() -> None:
    moves = tuple(
        PlannedMove(
            partition_id=PartitionId(p),
            origin=numbers(*range(1001, 1008)),
            target=numbers(*range(2001, 2008)),
            reason="n" * 300,
        )
        for p in range(MOVES_PER_COMMAND_MAX + 1)
    )
    whole = Plan(plan_id="id", moves=moves, before=(), after=(), refusals=())
    pieces = accepted("id", whole)
    assert [len(piece.moves) for piece in pieces] == [MOVES_PER_COMMAND_MAX, 1]
    assert all(move.plan_moves == len(moves) for piece in pieces for move in piece.moves)
    largest: Any = next(f.default for f in fields(RaftConfig) if f.name == "append_bytes_max")
    assert len(command_to_bytes(pieces[0])) < largest
    assert accepted("id", Plan(plan_id="", moves=(), before=(), after=(), refusals=())) == []


# --- repair ------------------------------------------------------------------------------------


def test_repair_replaces_lost_nodes_where_somebody_leads_and_nothing_moves_yet() -> None:
    state = bootstrapped([(1, 2), (2, 3), (3, 1), (3, 1)], nodes=4)
    queue(state, (1, 4))
    alter(state, 3, partition_id=2)
    fence(state, 3)
    host_everything(state)
    task = repair_task(state, [N3])
    assert task is not None
    assert task.partition_ids == {1, 3}  # 0 has nothing there, 2 is offline
    moves = repair(repair_layouts(state, task, ample_room(state)), task).moves
    assert [m.partition_id for m in moves] == [1, 3]
    assert all(len(set(m.target)) == 2 and N3 not in m.target for m in moves)
    assert repair_task(state, [NodeNumber(4)]) is None
    assert repair_task(state, []) is None
    state.apply(SetMoveSettings(settings=MoveSettings(paused=True)))
    assert repair_task(state, [N3]) is None


def test_repair_task_changes_when_a_node_comes_that_can_help() -> None:
    state = bootstrapped([(1, 2)], nodes=2)
    fence(state, 2)
    task = repair_task(state, [N2])
    assert task is not None
    plan_now = repair(repair_layouts(state, task, ample_room(state)), task)
    assert (len(plan_now.moves), len(plan_now.refusals) > 0) == (0, True)
    assert repair_task(state, [N2]) == task
    state.apply(register("n3"))
    later = repair_task(state, [N2])
    assert later is not None
    assert later != task
    assert [
        move.target for move in repair(repair_layouts(state, later, ample_room(state)), later).moves
    ] == [(1, 3)]
