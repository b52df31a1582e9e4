"""One term's leader over a group of one that can lose, refuse or delay what is proposed."""

from __future__ import annotations

import asyncio
import logging

import pytest

from koinon_coordinator.config import BootstrapConfig
from koinon_coordinator.core.cluster.commands import (
    ConfirmRegistration,
    CreateCluster,
    FenceNode,
    PartitionsHosted,
    RegisterNode,
)
from koinon_coordinator.core.decide.registrations import Registration
from koinon_coordinator.leader.membership import NodeReport
from koinon_proto.contract.cluster_errors import (
    NodeFencedError,
    NotLeaderError,
    RegistrationPendingError,
)
from koinon_proto.contract.errors import KoinonError, ResourceExhaustedError, WrongClusterError
from koinon_proto.contract.table import NodeNumber, NodeStatus, PartitionStatus
from tests.coordinator.kit.support import TIMING, LeaderContext, hold_proposals, request, run_term
from tests.kit.waiting import until


def online(term: LeaderContext) -> int:
    rows = term.replicated.state.image().rows
    return sum(row.status is PartitionStatus.ONLINE for row in rows)


def test_leader_fresh_group_creates_the_cluster_once() -> None:
    async def test(term: LeaderContext) -> None:
        config = term.replicated.state.config
        assert config is not None
        assert len(config.cluster_id) == 32
        assert config.partition_count == 8

    assert run_term(test).count(CreateCluster) == 1


def test_leader_other_flags_than_the_replicated_are_warned_of_and_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(term: LeaderContext) -> None:
        before = term.replicated.state.config
        term.bootstrap = BootstrapConfig(partition_count=16)
        later = asyncio.ensure_future(term.begin(2).run())
        await until(lambda: term.leadership.term.is_open)
        later.cancel()
        assert term.replicated.state.config == before

    with caplog.at_level(logging.WARNING):
        run_term(test)
    assert any("setting ignored" in r.message and "16" in r.message for r in caplog.records)


def test_leader_node_from_registration_to_online_partitions() -> None:
    async def test(term: LeaderContext) -> None:
        registered = await term.register()
        assert (registered.node_number, registered.node_epoch) == (1, 1)
        await until(lambda: term.replicated.state.bootstrapped)
        answer = await term.heartbeat()
        assert len(answer) == 8
        again = await term.heartbeat(answer=answer)
        assert again == []  # the reply does not wait for the log
        await until(lambda: online(term) == 8)
        await term.heartbeat(answer=answer)  # a repeated acknowledgement says nothing new

    term = run_term(test)
    assert term.count(PartitionsHosted) == 1
    assert term.count(ConfirmRegistration) == 1


def test_leader_bootstrap_waits_for_the_minimum_of_nodes() -> None:
    async def test(term: LeaderContext) -> None:
        await term.register("n1")
        await term.pass_time(0.3)
        assert not term.replicated.state.bootstrapped
        await term.register("n2")
        await term.pass_time(0.3)
        assert {row.primary for row in term.replicated.state.image().rows} == {1, 2}

    run_term(test, BootstrapConfig(partition_count=8, bootstrap_nodes=2))


def test_leader_ticks_often_only_while_a_session_is_about_to_end() -> None:
    """Or while nodes are waited for: a leader that finds nothing to do is what a cluster costs."""

    async def test(term: LeaderContext) -> None:
        ticks = term.leadership._next_tick_s
        assert ticks() == TIMING.tick_s, "until partitions are assigned"
        await term.register()
        await until(lambda: term.replicated.state.bootstrapped)
        await term.heartbeat()
        assert ticks() == TIMING.resting_tick_s
        term.clock.now += TIMING.session_timeout_ms / 1000 - 0.05
        assert ticks() == pytest.approx(0.05)
        term.clock.now += 0.04
        assert ticks() == TIMING.tick_s

    run_term(test)


def test_leader_confirmation_is_committed_before_the_first_acknowledgement() -> None:
    async def test(term: LeaderContext) -> None:
        await term.register()
        term.group.fate = lambda c: (
            ResourceExhaustedError(resource="queue", limit=1)
            if isinstance(c, ConfirmRegistration)
            else None
        )
        with pytest.raises(ResourceExhaustedError):
            await term.heartbeat()
        assert term.leadership.members.sessions.lease_ends_at(NodeNumber(1)) < term.clock.now
        term.group.fate = lambda _: None
        await term.heartbeat()
        record = term.replicated.state.node_by_id("n1")
        assert record is not None
        assert record.confirmed
        assert term.leadership.members.sessions.lease_ends_at(NodeNumber(1)) > term.clock.now

    run_term(test)


def test_leader_cut_off_from_its_quorum_acknowledges_nothing_and_fences_nobody() -> None:
    async def test(term: LeaderContext) -> None:
        await term.register()
        await term.heartbeat()
        for age in (0.5, None):
            term.group.contact_age_s = age
            with pytest.raises(NotLeaderError):
                await term.heartbeat()
        await term.pass_time(5.0)
        assert term.count(FenceNode) == 0
        term.group.contact_age_s = 0.1
        await term.heartbeat()

    run_term(test)


def test_leader_silent_node_is_fenced_by_one_command_and_comes_back() -> None:
    async def test(term: LeaderContext) -> None:
        await term.register()
        answer = await term.heartbeat()
        await term.heartbeat(answer=answer)
        await term.pass_time(1.4)
        assert term.count(FenceNode) == 0
        await term.pass_time(3.0)
        assert term.count(FenceNode) == 1
        with pytest.raises(NodeFencedError):
            await term.heartbeat()
        rows = term.replicated.state.image().rows
        assert all(row.status is PartitionStatus.OFFLINE for row in rows)
        registered = await term.register(last=1, registration="r2")
        assert (registered.node_epoch, registered.copies_lost) == (2, 0)
        answer = await term.heartbeat(epoch=2)
        await term.heartbeat(epoch=2, answer=answer)
        await until(lambda: online(term) == 8)

    run_term(test)


def test_leader_fence_that_was_never_appended_is_proposed_again() -> None:
    async def test(term: LeaderContext) -> None:
        await term.register()
        term.group.fate = lambda c: (
            ResourceExhaustedError(resource="queue", limit=1) if isinstance(c, FenceNode) else None
        )
        await term.pass_time(2.0)
        assert term.count(FenceNode) == 0
        term.group.fate = lambda _: None
        await term.pass_time(0.3)
        assert term.count(FenceNode) == 1

    run_term(test)


def test_leader_never_acknowledges_while_a_fence_is_under_way() -> None:
    async def test(term: LeaderContext) -> None:
        await term.register()
        await term.heartbeat()
        term.group.fate = lambda c: "lost" if isinstance(c, FenceNode) else None
        # The fence's fate stays unknown to this leader, as when its term is about to end.
        apply, term.replicated.apply = term.replicated.apply, lambda i, c: None  # type: ignore[method-assign, assignment, return-value]
        await term.pass_time(2.0)
        term.replicated.apply = apply  # type: ignore[method-assign]
        assert term.count(FenceNode) == 1
        record = term.replicated.state.node_by_id("n1")
        assert record is not None
        assert record.info.status is NodeStatus.ACTIVE
        with pytest.raises(NodeFencedError):
            await term.heartbeat()
        with pytest.raises(RegistrationPendingError):
            await term.register(last=1, registration="r2")
        await term.pass_time(3.0)
        assert term.count(FenceNode) == 1

    run_term(test)


def test_leader_paused_for_long_fences_nobody() -> None:
    async def test(term: LeaderContext) -> None:
        await term.register()
        await term.heartbeat()
        term.clock.now += 10.0
        await term.pass_time(1.0)
        assert term.count(FenceNode) == 0
        await term.heartbeat()

    run_term(test)


def test_leader_registration_with_an_unknown_fate_is_retried_to_the_same_epoch() -> None:
    async def test(term: LeaderContext) -> None:
        term.group.fate = lambda c: "lost" if isinstance(c, RegisterNode) else None
        with pytest.raises(NotLeaderError):
            await term.register()
        term.group.fate = lambda _: None
        term.begin(2)  # applied all the same, as the next leader finds
        running = asyncio.ensure_future(term.leadership.run())
        await until(lambda: term.leadership.term.is_open)
        again = await term.register()
        running.cancel()
        assert (again.node_epoch, again.repeated) == (1, True)

    run_term(test)


def test_leader_caller_of_a_registration_gives_up_the_session_is_opened_all_the_same() -> None:
    async def test(term: LeaderContext) -> None:
        proposed, gate = hold_proposals(term)
        call = asyncio.ensure_future(term.register())
        await proposed.wait()
        call.cancel()
        gate.set()
        await until(lambda: term.replicated.state.node_by_id("n1") is not None)
        await until(lambda: term.leadership.members.sessions.is_live(NodeNumber(1), term.clock.now))
        assert (await term.register()).repeated

    run_term(test)


async def test_leader_term_ends_while_a_registration_waits_the_node_is_sent_on() -> None:
    term = LeaderContext()
    running = asyncio.ensure_future(term.leadership.run())
    await until(lambda: term.leadership.term.is_open)
    proposed, _ = hold_proposals(term)
    call = asyncio.ensure_future(term.register())
    await proposed.wait()
    running.cancel()
    with pytest.raises(NotLeaderError):
        await call
    with pytest.raises(NotLeaderError):
        await term.register()


@pytest.mark.parametrize(
    "refusal",
    [
        NotLeaderError(leader_id="", leader_address="", term=1),  # leadership is being transferred
        ResourceExhaustedError(resource="queue", limit=1),
    ],
)
def test_leader_registration_that_was_never_appended_can_be_tried_again(
    refusal: KoinonError,
) -> None:
    async def test(term: LeaderContext) -> None:
        await term.register()
        await term.heartbeat()
        term.clock.now += 1.2
        term.group.fate = lambda c: refusal if isinstance(c, RegisterNode) else None
        with pytest.raises(type(refusal)):
            await term.register(last=1, registration="r2")
        term.group.fate = lambda _: None
        assert (await term.register(last=1, registration="r2")).node_epoch == 2

    run_term(test)


def test_leader_never_acknowledges_the_old_epoch_while_a_new_one_is_under_way() -> None:
    """Else the old process would hold a lease beside the new one."""

    async def test(term: LeaderContext) -> None:
        await term.register()
        await term.heartbeat()
        term.clock.now += 1.2
        proposed, gate = hold_proposals(term)
        call = asyncio.ensure_future(term.register(last=1, registration="r2"))
        await proposed.wait()
        with pytest.raises(NodeFencedError):
            await term.heartbeat()
        gate.set()
        assert (await call).node_epoch == 2

    run_term(test)


def test_leader_refuses_another_cluster_by_both_ids() -> None:
    async def test(term: LeaderContext) -> None:
        asked: Registration = request("n1")
        with pytest.raises(WrongClusterError) as refused:
            await term.leadership.members.register(asked, "elsewhere")
        assert refused.value.actual_cluster_id == "elsewhere"

    run_term(test)


def test_leave_beside_a_registration_does_not_end_the_new_session() -> None:
    async def test(term: LeaderContext) -> None:
        await term.register()
        await until(lambda: term.replicated.state.bootstrapped)
        await term.heartbeat()
        term.clock.now += 1.1  # its lease is over, its session is not
        proposed, gate = hold_proposals(term)
        again = asyncio.ensure_future(term.register(last=1, registration="again"))
        await proposed.wait()
        with pytest.raises(NotLeaderError):
            await term.leadership.members.leave(term.sender())
        gate.set()
        assert (await again).node_epoch == 2
        assert term.leadership.members.sessions.is_live(NodeNumber(1), term.clock.now)
        await term.pass_time(5.0)
        assert term.count(FenceNode) == 1

    run_term(test)


@pytest.mark.parametrize("stranger", ["", "made up"])
def test_who_does_not_know_a_nodes_registration_does_not_speak_for_it(stranger: str) -> None:
    async def test(term: LeaderContext) -> None:
        members = term.leadership.members
        await term.register(registration="its own")
        await until(lambda: term.replicated.state.bootstrapped)
        await term.heartbeat()
        other = term.sender(registration_id=stranger)
        for refused in (
            members.leave(other),
            members.alter_partitions(other, ()),
            members.heartbeat(other, NodeReport(), term.clock.now),
        ):
            with pytest.raises(NodeFencedError):
                await refused
        assert term.count(FenceNode) == 0
        await members.alter_partitions(term.sender(), ())
        await members.leave(term.sender())
        assert term.count(FenceNode) == 1

    run_term(test)
