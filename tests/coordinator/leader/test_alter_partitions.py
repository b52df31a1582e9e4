"""Primaries' proposals for their rows, at the leader."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from koinon_coordinator.config import BootstrapConfig
from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.core.cluster.commands import AlterPartitions
from koinon_coordinator.core.decide.registrations import CHANGES_MAX
from koinon_proto.contract import convert
from koinon_proto.contract.cluster_errors import NodeFencedError, NotLeaderError, UnknownNodeError
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownFateError,
    WrongClusterError,
)
from koinon_proto.contract.table import NodeId, PartitionStatus, apply_update
from koinon_proto.v1 import membership_pb2
from tests.coordinator.kit.fake_node import Caller, FakeNode
from tests.coordinator.kit.served import online, with_coordinator
from tests.coordinator.kit.states import change_of, row_of
from tests.coordinator.kit.support import (
    LeaderContext,
    bootstrapped,
    fence,
    hold_proposals,
    run_term,
)
from tests.kit.waiting import until


async def alter(
    term: LeaderContext, *changes: object, node_id: str = "n1", epoch: int = 1, cluster_id: str = ""
) -> tuple[int, ...]:
    return await term.leadership.members.alter_partitions(
        replace(term.sender(node_id, epoch), cluster_id=cluster_id),
        changes,  # type: ignore[arg-type]
    )


def test_nothing_is_handed_over_to_a_node_whose_disk_hangs() -> None:
    async def test(term: LeaderContext) -> None:
        row = row_of(term.replicated.state)
        await term.heartbeat("n2", stats=membership_pb2.NodeStats(commit_out_ms=2_000))
        assert await term.propose(0, to=2) == (0,)
        assert row_of(term.replicated.state) is row
        assert await term.propose(0, to=3) == ()

    term = run_term(test, state=bootstrapped([(1, 2, 3), (2, 3, 1)]))
    assert term.count(AlterPartitions) == 1


def test_alter_shrinks_widens_and_hands_over_in_one_command_each() -> None:
    async def test(term: LeaderContext) -> None:
        state = term.replicated.state
        assert await term.propose(0, 1, 2) == ()
        assert row_of(state).in_sync == (1, 2)
        assert await term.propose(0, 1, 2, 3) == ()
        assert await term.propose(0, to=2) == ()
        row = row_of(state)
        assert (row.primary, row.status) == (2, PartitionStatus.ASSIGNED)
        answer = await term.heartbeat("n2")
        assert [c.partition_id for c in answer] == [0]

    term = run_term(test, state=bootstrapped([(1, 2, 3), (2, 3, 1)]))
    assert term.count(AlterPartitions) == 3


def test_alter_stale_rows_are_named_and_the_others_are_changed() -> None:
    async def test(term: LeaderContext) -> None:
        state = term.replicated.state
        stale = change_of(row_of(state, 1), 1, 2, skew=(0, -1))
        foreign = change_of(row_of(state, 2), 1, 2)
        good = change_of(row_of(state), 1, 2)
        assert await alter(term, stale, good, foreign) == (1, 2)
        assert [row_of(state, p).in_sync for p in range(3)] == [(1, 2), (1, 2, 3), (2, 3, 1)]
        assert await alter(term) == ()

    term = run_term(test, state=bootstrapped([(1, 2, 3), (1, 2, 3), (2, 3, 1)]))
    assert term.count(AlterPartitions) == 1  # nothing asked, nothing proposed


def test_alter_of_a_node_that_is_unknown_fenced_or_elsewhere_is_refused_typed() -> None:
    async def test(term: LeaderContext) -> None:
        state = term.replicated.state
        change = change_of(row_of(state), 1, 2)
        for wrong, error in (
            ({"node_id": "n9"}, UnknownNodeError),
            ({"epoch": 9}, NodeFencedError),
            ({"cluster_id": "elsewhere"}, WrongClusterError),
        ):
            with pytest.raises(error):
                await alter(term, change, **wrong)
        with pytest.raises(InvalidArgumentError, match="partition"):
            await alter(term, change_of(row_of(bootstrapped([(1, 2, 3)] * 9), 8), 1, 2))
        with pytest.raises(InvalidArgumentError, match=f"limit {CHANGES_MAX}"):
            await alter(term, *[change] * (CHANGES_MAX + 1))
        fence(state, 1)
        with pytest.raises(NodeFencedError):
            await alter(term, change)

    assert run_term(test, state=bootstrapped([(1, 2, 3)])).count(AlterPartitions) == 0


def test_alter_of_a_node_that_is_fenced_meanwhile_is_told_to_register() -> None:
    async def test(term: LeaderContext) -> None:
        proposed, gate = hold_proposals(term)
        call = asyncio.ensure_future(term.propose(0, 1, 2))
        await proposed.wait()
        fence(term.replicated.state, 1)
        gate.set()
        with pytest.raises(NodeFencedError):
            await call

    run_term(test, state=bootstrapped([(1, 2, 3)]))


def test_alter_many_are_under_way_at_once_and_none_waits_for_another() -> None:
    async def test(term: LeaderContext) -> None:
        waiting, propose = [], term.group.propose

        async def hold(command: bytes) -> object:
            gate = asyncio.Event()
            waiting.append(gate)
            await gate.wait()
            return await propose(command)

        term.group.propose = hold  # type: ignore[method-assign]
        calls = [asyncio.ensure_future(term.propose(p, *sync)) for p, sync in enumerate(SETS)]
        await until(lambda: len(waiting) == len(calls))
        for gate in reversed(waiting):
            gate.set()
        assert await asyncio.gather(*calls) == [()] * len(calls)

    run_term(test, state=bootstrapped([(1, 2, 3), (2, 3, 1), (3, 1, 2)]))


SETS = ((1, 2), (2, 3), (3, 1))


@pytest.mark.parametrize(
    "refusal",
    [
        NotLeaderError(leader_id="", leader_address="", term=1),
        ResourceExhaustedError(resource="queue", limit=1),
        UnavailableError(reason="stopped"),
    ],
)
def test_alter_that_was_never_appended_says_so(refusal: KoinonError) -> None:
    async def test(term: LeaderContext) -> None:
        term.group.fate = lambda _: refusal
        with pytest.raises(type(refusal)):
            await term.propose(0, 1, 2)
        assert row_of(term.replicated.state).in_sync == (1, 2, 3)

    run_term(test, state=bootstrapped([(1, 2, 3)]))


def test_alter_of_unknown_fate_stays_unknown() -> None:
    async def test(term: LeaderContext) -> None:
        term.group.fate = lambda c: "lost" if isinstance(c, AlterPartitions) else None
        with pytest.raises(UnknownFateError):
            await term.propose(0, 1, 2)

    run_term(test, state=bootstrapped([(1, 2, 3)]))


async def test_alter_while_the_term_ends_is_of_unknown_fate_and_refused_afterwards() -> None:
    term = LeaderContext(state=bootstrapped([(1, 2, 3)]))
    running = asyncio.ensure_future(term.leadership.run())
    await until(lambda: term.leadership.term.is_open)
    proposed, _ = hold_proposals(term)
    call = asyncio.ensure_future(term.propose(0, 1, 2))
    await proposed.wait()
    running.cancel()
    with pytest.raises(UnknownFateError):
        await call
    with pytest.raises(NotLeaderError):
        await term.propose(0, 1, 2)


def test_alter_caller_who_gives_up_leaves_the_proposal_going() -> None:
    async def test(term: LeaderContext) -> None:
        proposed, gate = hold_proposals(term)
        call = asyncio.ensure_future(term.propose(0, 1, 2))
        await proposed.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        gate.set()
        await until(lambda: row_of(term.replicated.state).in_sync == (1, 2))

    run_term(test, state=bootstrapped([(1, 2, 3)]))


def test_alter_over_the_wire_answers_with_the_rejected_and_the_difference(tmp_path: Path) -> None:
    async def test(_: Coordinator, caller: Caller) -> None:
        nodes = [FakeNode(f"n{i}", [caller.address]) for i in (1, 2)]
        lives = [asyncio.ensure_future(node.run()) for node in nodes]
        await until(lambda: all(online(node) == 8 for node in nodes))
        node = nodes[0]
        table = node.table
        assert table is not None
        number = table.by_id[NodeId("n1")].number
        own = [row for row in table.rows if row.primary == number]
        request = membership_pb2.AlterPartitionsRequest(
            node_id="n1",
            registration_id=node.registered_by,
            node_epoch=node.epoch,
            table_version=table.table_version,
            changes=[
                membership_pb2.PartitionChange(
                    partition_id=row.partition_id,
                    primary_epoch=row.primary_epoch,
                    partition_epoch=row.partition_epoch + skew,
                    in_sync=[number],
                )
                for row, skew in ((own[0], 0), (own[1], 5))
            ],
        )
        reply = await caller.call(caller.membership.AlterPartitions, request)
        assert list(reply.rejected) == [own[1].partition_id]
        after = apply_update(table, convert.update_from_proto(reply.table))
        assert after is not None
        assert after.rows[own[0].partition_id].in_sync == (number,)
        assert reply.table.base_version == table.table_version
        for life in lives:
            life.cancel()
        for node in nodes:
            await node.close()

    bootstrap = BootstrapConfig(partition_count=8, bootstrap_nodes=2)
    with_coordinator(tmp_path, test, bootstrap=bootstrap)
