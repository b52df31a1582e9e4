"""Plans, moves and primaries, at a leader over a group of one."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from koinon_coordinator.core.cluster.commands import (
    AcceptPlan,
    FinishMoves,
    SetNodeStatus,
    SetReplicationFactor,
    StartMoves,
)
from koinon_coordinator.core.decide.copy_progress import Progress, Stage
from koinon_coordinator.core.decide.plan_requests import (
    PlanKind,
    Planned,
    PlanTask,
    PlanWish,
    plan,
    planned,
)
from koinon_coordinator.metrics import bytes_remaining
from koinon_coordinator.wire.state_codec import command_from_bytes
from koinon_proto.contract.cluster_errors import (
    MembershipChangeError,
    NotLeaderError,
    PlanStaleError,
    UnknownNodeError,
)
from koinon_proto.contract.errors import (
    ConfigurationError,
    ResourceExhaustedError,
    UnknownFateError,
)
from koinon_proto.contract.table import NodeNumber, NodeStatus
from tests.coordinator.kit.plans import (
    P0,
    REBALANCE,
    THREE,
    carry_out,
    counts,
    execute,
    rows,
    with_newcomer,
)
from tests.coordinator.kit.states import ample_room, force, record_of, row_of
from tests.coordinator.kit.support import (
    TIMING,
    LeaderContext,
    bootstrapped,
    fence,
    hold_proposals,
    register,
    run_term,
    settled,
)
from tests.kit.waiting import until

# --- plans -------------------------------------------------------------------------------------


def test_rebalance_onto_a_new_node_is_planned_shown_and_carried_out() -> None:
    async def test(term: LeaderContext) -> None:
        planned = await term.leadership.operations.plan(REBALANCE)
        assert await term.leadership.operations.plan(REBALANCE) == planned
        assert (len(planned.plan.moves), term.group.proposed) == (3, [])
        await execute(term, REBALANCE)
        await carry_out(term, "n1", "n2", "n3", "n4")
        assert counts(term) == {1: 3, 2: 3, 3: 3, 4: 3}
        assert all(len(row.in_sync) == 2 and not row.removing for row in rows(term))
        assert (await term.leadership.operations.plan(REBALANCE)).plan.moves == ()
        await execute(term, REBALANCE)  # nothing to do is no error

    term = run_term(test, state=with_newcomer())
    assert term.count(AcceptPlan) == 1
    assert term.count(FinishMoves) >= 1


def test_plan_that_does_not_fit_any_more_is_refused_by_both_ids() -> None:
    async def test(term: LeaderContext) -> None:
        operations = term.leadership.operations
        old = (await operations.plan(REBALANCE)).plan.plan_id
        term.replicated.state.apply(register("n5"))
        with pytest.raises(PlanStaleError) as refused:
            await operations.execute(REBALANCE, old)
        assert (refused.value.plan_id, refused.value.current_plan_id) == (
            old,
            (await operations.plan(REBALANCE)).plan.plan_id,
        )
        assert not term.replicated.state.moves

    assert run_term(test, state=with_newcomer()).count(AcceptPlan) == 0


def test_plan_whose_rows_change_while_it_is_proposed_is_refused_as_stale() -> None:
    async def test(term: LeaderContext) -> None:
        operations = term.leadership.operations
        plan_id = (await operations.plan(REBALANCE)).plan.plan_id
        proposed, gate = hold_proposals(term)
        calls = [asyncio.ensure_future(operations.execute(REBALANCE, plan_id)) for _ in range(2)]
        await proposed.wait()
        await settled()
        gate.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(o) for o in outcomes] == [type(None), PlanStaleError]
        assert isinstance(outcomes[1], PlanStaleError)
        assert outcomes[1].current_plan_id not in ("", plan_id)

    run_term(test, state=with_newcomer())


def test_plan_is_made_beside_the_loop_and_anew_if_the_state_changes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader that plans goes on with its heartbeats."""
    begun, may_end = threading.Event(), threading.Event()
    tasks = []

    def slow(task: PlanTask) -> Planned:
        tasks.append(task)
        begun.set()
        assert may_end.wait(5), "nothing else ran meanwhile"
        return planned(task)

    async def test(term: LeaderContext) -> None:
        state, operations = term.replicated.state, term.leadership.operations
        plan_id = plan(state, REBALANCE, ample_room(state)).plan.plan_id
        del term.leadership.term.computed
        monkeypatch.setattr("koinon_coordinator.leader.admin_requests.planned", slow)
        executing = asyncio.ensure_future(operations.execute(REBALANCE, plan_id))
        await until(begun.is_set)
        may_end.set()
        await executing
        assert len(state.moves) == 3
        begun.clear()
        may_end.clear()
        planning = asyncio.ensure_future(operations.plan(REBALANCE))
        await until(begun.is_set)
        state.apply(register("n5"))
        may_end.set()
        assert await planning == plan(state, REBALANCE, term.leadership.mover.room())
        assert len(tasks) == 3

    run_term(test, state=with_newcomer())


def test_drain_marks_the_node_first_empties_it_and_lets_it_leave() -> None:
    async def test(term: LeaderContext) -> None:
        operations = term.leadership.operations
        with pytest.raises(MembershipChangeError, match="n1 is still a replica of 4 partitions"):
            await operations.set_node_status("n1", NodeStatus.LEFT)
        await execute(term, PlanWish(kind=PlanKind.DRAIN, node_id="n1"))
        kinds = [type(c) for c in term.group.proposed]
        assert kinds[:2] == [SetNodeStatus, AcceptPlan]
        assert record_of(term.replicated.state, 1).info.status is NodeStatus.DRAINING
        await carry_out(term, "n1", "n2", "n3", "n4")
        assert 1 not in counts(term)
        await operations.set_node_status("n1", NodeStatus.LEFT)
        with pytest.raises(MembershipChangeError, match="has left"):
            await term.register("n1", last=1, registration="r2")

    run_term(test, state=with_newcomer())


def test_drain_that_cannot_move_anything_is_refused_and_leaves_the_node_as_it_is() -> None:
    async def test(term: LeaderContext) -> None:
        wish = PlanWish(kind=PlanKind.DRAIN, node_id="n1")
        planned = await term.leadership.operations.plan(wish)
        assert planned.plan.refusals
        with pytest.raises(MembershipChangeError, match=planned.plan.refusals[0].reason[:10]):
            await term.leadership.operations.execute(wish, planned.plan.plan_id)
        assert term.group.proposed == []

    run_term(test, state=bootstrapped([(1, 2, 3)] * 3))


def test_replace_gives_every_place_of_a_node_to_another_and_the_old_one_gets_no_more() -> None:
    async def test(term: LeaderContext) -> None:
        await execute(term, PlanWish(kind=PlanKind.REPLACE, node_id="n2", with_node_id="n4"))
        await carry_out(term, "n1", "n2", "n3", "n4")
        assert [row.replicas for row in rows(term)] == [
            tuple(4 if n == 2 else n for n in replicas) for replicas in THREE
        ]
        assert record_of(term.replicated.state, 2).draining

    run_term(test, state=with_newcomer())


@pytest.mark.parametrize(("before", "factor"), [([(1,), (2,), (3,)], 3), ([(1, 2, 3)] * 3, 1)])
def test_replication_factor_is_set_first_and_rows_follow(
    before: list[tuple[int, ...]], factor: int
) -> None:
    async def test(term: LeaderContext) -> None:
        wish = PlanWish(kind=PlanKind.REPLICATION_FACTOR, replication_factor=factor)
        await execute(term, wish)
        kinds = [type(c) for c in term.group.proposed]
        assert kinds[:2] == [SetReplicationFactor, AcceptPlan]
        await carry_out(term, "n1", "n2", "n3")
        config = term.replicated.state.config
        assert config is not None
        assert (config.replication_factor, config.min_in_sync) == (factor, (factor + 1) // 2)
        assert all(len(row.replicas) == len(row.in_sync) == factor for row in rows(term))

    run_term(test, state=bootstrapped(before))


# --- moves under way ---------------------------------------------------------------------------


def test_moves_are_reported_with_progress_and_what_they_wait_for() -> None:
    async def test(term: LeaderContext) -> None:
        operations = term.leadership.operations
        await operations.set_moves(moves_per_node=1)
        plan_id = await execute(term, REBALANCE)
        await settled()
        _, views = operations.moves()
        running = [view for view in views if view.move.running]
        assert (len(views), len(running)) == (3, 1)
        assert {view.waits_for for view in views if not view.move.running} == {
            "waits for the move of n4"
        }
        assert all((v.move.plan_id, v.move.plan_moves) == (plan_id, 3) for v in views)
        p = running[0].move.partition_id
        copying = Progress(partition_id=p, stage=Stage.SNAPSHOT, records=5, records_total=9)
        await beat(term, "n4", copying)
        _, views = operations.moves()
        view = next(v for v in views if v.move.running)
        assert (view.waits_for, view.progress) == ("copying to n4", {NodeNumber(4): copying})
        await beat(term, "n4")  # it says nothing of it any more
        assert all(not v.progress for v in operations.moves()[1])

    run_term(test, state=with_newcomer())


async def beat(term: LeaderContext, node_id: str, *progress: Progress) -> None:
    await term.heartbeat(node_id, progress=progress)


def test_moves_progress_of_a_node_that_is_fenced_is_forgotten() -> None:
    async def test(term: LeaderContext) -> None:
        mover = term.leadership.mover
        copying = Progress(partition_id=P0, stage=Stage.SNAPSHOT, bytes=3, bytes_total=10)
        for node_id in ("n3", "n4"):
            await beat(term, node_id, copying)
        assert bytes_remaining(mover.progress) == 14
        fence(term.replicated.state, 4)
        await term.pass_time(TIMING.tick_s)
        assert bytes_remaining(mover.progress) == 7
        assert list(mover.progress) == [3]

    run_term(test, state=with_newcomer())


def test_moves_paused_stand_still_and_go_on_when_resumed() -> None:
    async def test(term: LeaderContext) -> None:
        operations = term.leadership.operations
        assert (await operations.set_moves(paused=True)).paused
        await execute(term, REBALANCE)
        await term.live(2.0, "n1", "n2", "n3", "n4")
        assert term.count(StartMoves) == 0
        assert {view.waits_for for view in operations.moves()[1]} == {"paused"}
        settings = await operations.set_moves(paused=False, bytes_per_second=9)
        assert (settings.paused, settings.bytes_per_second) == (False, 9)
        assert await operations.set_moves() == settings  # nothing given: nothing proposed
        await carry_out(term, "n1", "n2", "n3", "n4")

    run_term(test, state=with_newcomer())


def test_move_settings_whose_caller_has_gone_are_not_undone_by_the_next() -> None:
    async def test(term: LeaderContext) -> None:
        operations = term.leadership.operations
        proposed, gate = hold_proposals(term)
        first = asyncio.ensure_future(operations.set_moves(paused=True))
        await proposed.wait()
        first.cancel()
        next_one = asyncio.ensure_future(operations.set_moves(moves_per_node=2))
        await settled()
        gate.set()
        settings = await next_one
        assert (settings.paused, settings.moves_per_node) == (True, 2)
        assert term.replicated.state.move_settings == settings

    run_term(test, state=with_newcomer())


def test_moves_cancelled_are_dropped_or_turned_back_and_counted() -> None:
    async def test(term: LeaderContext) -> None:
        operations = term.leadership.operations
        assert await operations.cancel([]) == (0, 0)
        await operations.set_moves(moves_per_node=1)
        await execute(term, REBALANCE)
        await settled()
        assert await operations.cancel([]) == (2, 1)
        await carry_out(term, "n1", "n2", "n3", "n4")
        assert tuple(row.replicas for row in rows(term)) == tuple(THREE)

    run_term(test, state=with_newcomer())


def test_moves_have_one_proposal_under_way_at_most() -> None:
    async def test(term: LeaderContext) -> None:
        under_way, most, propose = 0, 0, term.group.propose

        async def count(command: bytes) -> object:
            nonlocal under_way, most
            of_mover = isinstance(command_from_bytes(command), StartMoves | FinishMoves)
            under_way += of_mover
            most = max(most, under_way)
            for _ in range(3 * of_mover):
                term.replicated.wake()
                await asyncio.sleep(0)
            try:
                return await propose(command)
            finally:
                under_way -= of_mover

        term.group.propose = count  # type: ignore[method-assign]
        await execute(term, REBALANCE)
        await carry_out(term, "n1", "n2", "n3", "n4")
        assert most == 1

    run_term(test, state=with_newcomer())


def test_moves_whose_command_was_never_appended_go_on_later() -> None:
    async def test(term: LeaderContext) -> None:
        refused = 0

        def fate(command: object) -> ResourceExhaustedError | None:
            nonlocal refused
            if isinstance(command, StartMoves) and refused < 2:
                refused += 1
                return ResourceExhaustedError(resource="queue", limit=1)
            return None

        term.group.fate = fate
        await execute(term, REBALANCE)
        await until(lambda: term.count(StartMoves) > 0)
        assert refused == 2

    run_term(test, state=with_newcomer())


def test_moves_command_that_is_refused_is_not_proposed_again_in_the_same_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(term: LeaderContext) -> None:
        apply = term.replicated.apply

        def swallow(index: int, command: bytes) -> object:
            if type(term.group.proposed[-1]) is StartMoves:
                term.replicated.wake()
                return term.replicated.state.apply(StartMoves(partition_ids=()))
            return apply(index, command)

        term.replicated.apply = swallow  # type: ignore[method-assign, assignment]
        await execute(term, REBALANCE)
        for _ in range(10):
            term.replicated.wake()
            await settled()
        assert term.count(StartMoves) == 1

    run_term(test, state=with_newcomer())
    assert sum("moves refused" in r.message for r in caplog.records) == 1


def test_moves_survive_a_defect_of_the_planner(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koinon_coordinator.leader.mover.FAILURE_PAUSE_S", 0.0)
    failures = []

    def fails(*_: object) -> None:
        failures.append(1)
        raise ConfigurationError(reason="x") if len(failures) > 2 else ValueError("defect")

    async def test(term: LeaderContext) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("koinon_coordinator.leader.mover.next_step", fails)
            await execute(term, REBALANCE)
            await until(lambda: len(failures) > 2)
        await until(lambda: term.count(StartMoves) > 0)

    run_term(test, state=with_newcomer())
    assert any("moves stand still" in r.message for r in caplog.records)


def test_moves_go_on_under_the_next_leader() -> None:
    async def test(term: LeaderContext) -> None:
        await term.leadership.operations.set_moves(paused=True)
        await execute(term, REBALANCE)
        old = term.leadership
        running = asyncio.ensure_future(term.begin(2).run())
        await until(lambda: term.leadership.term.is_open)
        await term.leadership.operations.set_moves(paused=False)
        await until(lambda: term.count(StartMoves) > 0)
        await carry_out(term, "n1", "n2", "n3", "n4")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        with pytest.raises(NotLeaderError):
            (await term.leadership.operations.plan(REBALANCE))
        term.leadership = old

    run_term(test, state=with_newcomer())


def test_operators_request_of_unknown_fate_says_so() -> None:
    async def test(term: LeaderContext) -> None:
        term.group.fate = lambda _: "lost"
        with pytest.raises(UnknownFateError):
            await term.leadership.operations.set_moves(moves_per_node=2)

    run_term(test, state=with_newcomer())


# --- primaries ---------------------------------------------------------------------------------


def test_restore_primaries_asks_for_those_that_can_lead() -> None:
    async def test(term: LeaderContext) -> None:
        operations = term.leadership.operations
        assert await operations.restore_primaries() == 0
        await term.propose(0, to=2)
        assert await operations.restore_primaries() == 1
        assert row_of(term.replicated.state).wanted_primary == 1

    run_term(test, state=bootstrapped([(1, 2), (2, 3)]))


def test_force_primary_elects_by_name_and_is_logged_as_what_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(term: LeaderContext) -> None:
        state = term.replicated.state
        await term.propose(0, 1, 2)
        fence(state, 1)
        fence(state, 2)
        before = row_of(state).primary_epoch
        operations = term.leadership.operations
        epoch, refused = await operations.force_primaries([(0, "n3"), (1, "n3")])
        assert epoch == row_of(state).primary_epoch == before + 1
        assert "nothing has to be forced" in str(refused)
        (refused,) = await operations.force_primaries([(0, "n3")])
        assert "nothing has to be forced" in str(refused)
        with pytest.raises(UnknownNodeError):
            await operations.force_primaries([(0, "n3"), (0, "n9")])

    run_term(test, state=bootstrapped([(1, 2, 3), (3, 1)]))
    (warning,) = (r for r in caplog.records if "primary forced" in r.message)
    assert warning.levelno == logging.WARNING
    assert "partition=0 node=n3" in warning.message
    assert "ForcePrimaries" in warning.message


def test_force_primary_that_another_operator_was_quicker_with_is_refused() -> None:
    async def test(term: LeaderContext) -> None:
        state = term.replicated.state
        await term.propose(0, 1, 2)
        for number in (1, 2):
            fence(state, number)
        proposed, gate = hold_proposals(term)
        call = asyncio.ensure_future(term.leadership.operations.force_primaries([(0, "n3")]))
        await proposed.wait()
        force(state, 3)
        gate.set()
        (refused,) = await call
        assert "the partition has changed" in str(refused)

    run_term(test, state=bootstrapped([(1, 2, 3)]))
