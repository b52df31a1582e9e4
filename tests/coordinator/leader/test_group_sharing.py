"""Consumer groups in one term's leader, over a group of one that can lose or refuse proposals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from koinon_coordinator.core.cluster.commands import CreateGroup, RaiseGeneration
from koinon_coordinator.core.groups.group_requests import AttendWish
from koinon_coordinator.leader.group_sharing import Attended
from koinon_proto.contract.cluster_errors import (
    GroupInUseError,
    NotLeaderError,
    UnknownGroupError,
)
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    MemberFencedError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownKeyspaceError,
    WrongClusterError,
)
from koinon_proto.contract.groups import GroupStrategy
from koinon_proto.contract.keyspaces import DEFAULT_ID, KeyspaceId
from koinon_proto.contract.table import PartitionId
from tests.coordinator.kit.load_states import PARTITIONS, small_state
from tests.coordinator.kit.support import LeaderContext, hold_proposals, run_term, settled
from tests.kit.waiting import until

SESSION_S = 60
ALL = range(PARTITIONS)


class Consumer:
    """A member that asks, and does at once what each answer says."""

    def __init__(self, term: LeaderContext, member_id: str, **fields: Any) -> None:
        self.term = term
        self.held: dict[PartitionId, int] = {}
        self.wish = AttendWish(
            group="billing",
            member_id=member_id,
            incarnation=1,
            number=0,
            is_static=False,
            client_name="test",
            keyspace_ids=(DEFAULT_ID,),
            strategy=0,
            session_ms=SESSION_S * 1000,
            known_revision=0,
        )
        self.wish = replace(self.wish, **fields)

    async def ask(self) -> Attended:
        self.wish = replace(self.wish, number=self.wish.number + 1)
        groups = self.term.leadership.groups
        answer = await groups.attend(self.wish, self.held, "c0ffee")
        self.held = dict(answer.granted)
        self.wish = replace(self.wish, known_revision=answer.revision)
        return answer

    async def waits(self) -> asyncio.Task[Attended]:
        """Send a request, which finds no news at first."""
        asking = asyncio.ensure_future(self.ask())
        await settled()
        return asking


def with_term(test: Callable[[LeaderContext], Awaitable[None]]) -> LeaderContext:
    return run_term(test, state=small_state())


async def shared(term: LeaderContext, *consumers: Consumer) -> None:
    """Let the consumers take part until the shares are settled."""
    for _ in range(4):
        asking = []
        for consumer in consumers:
            asking.append(await consumer.waits())
        await term.live(1.5, "n1", "n2", "n3")
        for consumer, task in zip(consumers, asking, strict=True):
            if not task.done():
                task.cancel()
            elif task.exception():
                raise AssertionError(consumer.wish.member_id) from task.exception()


def test_group_is_created_by_its_first_member_and_shared_by_all() -> None:
    async def test(term: LeaderContext) -> None:
        a, b = Consumer(term, "a"), Consumer(term, "b")
        first = await a.ask()
        assert not first.granted
        assert (first.members, first.is_idle) == (1, False)
        assert first.group.strategy is GroupStrategy.STICKY
        waiting = await a.waits()
        assert not waiting.done()
        await term.live(1.0, "n1", "n2", "n3")
        assert (await waiting).granted == dict.fromkeys(ALL, 1)
        await shared(term, a, b)
        assert sorted([*a.held, *b.held]) == list(ALL)
        assert (len(a.held), len(b.held)) == (2, 2)
        assert set(a.held.values()) == {1}
        assert set(b.held.values()) == {2}

    term = with_term(test)
    assert (term.count(CreateGroup), term.count(RaiseGeneration)) == (1, 2)


def test_new_leader_keeps_the_grants_and_shares_on() -> None:
    async def test(term: LeaderContext) -> None:
        a, b, c = (Consumer(term, name) for name in "abc")
        await shared(term, a, b)
        before = [dict(a.held), dict(b.held)]
        running = asyncio.ensure_future(term.begin(2).run())
        await until(lambda: term.leadership.term.is_open)
        waiting = [await a.waits(), await b.waits()]
        await term.live(2.0, "n1", "n2", "n3")
        assert not any(task.done() for task in waiting), "what they hold is what they are granted"
        (view,) = await term.leadership.groups.views("billing", "")
        assert view.core is not None
        assert view.core.unowned() == 0
        assert [a.held, b.held] == before
        for task in waiting:
            task.cancel()
        await shared(term, a, b, c)
        assert sorted([*a.held, *b.held, *c.held]) == list(ALL)
        assert set(c.held.values()) == {2}
        running.cancel()

    with_term(test)


def test_partitions_of_a_member_that_is_lost_with_its_leader_wait_for_its_session() -> None:
    async def test(term: LeaderContext) -> None:
        a, b = Consumer(term, "a"), Consumer(term, "b")
        await shared(term, a, b)
        kept = dict(a.held)
        running = asyncio.ensure_future(term.begin(2).run())
        await until(lambda: term.leadership.term.is_open)
        for _ in range(5):
            waiting = await a.waits()
            await term.live(10.0, "n1", "n2", "n3")
            waiting.cancel()
        assert a.held == kept
        waiting = await a.waits()
        await term.live(12.0, "n1", "n2", "n3")
        assert (await waiting).granted == dict.fromkeys(map(PartitionId, ALL), 2) | kept
        running.cancel()

    with_term(test)


def test_leader_without_a_quorum_answers_no_member() -> None:
    async def test(term: LeaderContext) -> None:
        a = Consumer(term, "a")
        await shared(term, a)
        waiting = await a.waits()
        term.group.contact_age_s = 60.0
        with pytest.raises(NotLeaderError):
            await Consumer(term, "b").ask()
        # Whatever wakes the request: no answer leaves, which the member could take for its session.
        key = next(iter(term.leadership.groups._waiting))
        term.leadership.groups.cores[key[0]].pause(term.clock.now, 0.0)
        term.leadership._tick()
        with pytest.raises(NotLeaderError):
            await waiting

    with_term(test)


def test_requests_that_wait_end_with_the_term() -> None:
    async def test(term: LeaderContext) -> None:
        a = Consumer(term, "a")
        await shared(term, a)
        waiting = await a.waits()
        await term.leadership.term.end()
        await settled()
        assert isinstance(waiting.exception(), NotLeaderError)

    with_term(test)


def test_generation_that_cannot_be_raised_is_tried_again() -> None:
    async def test(term: LeaderContext) -> None:
        a = Consumer(term, "a")
        fates = iter(
            [UnavailableError(reason="the disk"), ResourceExhaustedError(resource="q", limit=1)]
        )
        term.group.fate = lambda c: next(fates, None) if isinstance(c, RaiseGeneration) else None
        await shared(term, a)
        assert a.held == dict.fromkeys(ALL, 1)

    with_term(test)


def test_requests_that_were_overtaken_end_and_their_members_lose_nothing() -> None:
    async def test(term: LeaderContext) -> None:
        a = Consumer(term, "a", is_static=True)
        await shared(term, a)
        older = await a.waits()
        newer = await a.waits()
        with pytest.raises(UnavailableError, match="later request"):
            await older
        assert not newer.done()
        again = Consumer(term, "a", is_static=True, incarnation=2)
        await again.ask()
        with pytest.raises(MemberFencedError):
            await newer
        await shared(term, again)
        assert again.held == dict.fromkeys(ALL, 2)

    with_term(test)


def test_session_of_a_group_without_members_is_noted_as_over() -> None:
    async def test(term: LeaderContext) -> None:
        a = Consumer(term, "a")
        await shared(term, a)
        groups = term.replicated.state.groups
        assert groups.by_name["billing"].session_ms == SESSION_S * 1000
        await term.leadership.groups.leave("billing", "a", 1, "", "c0ffee")
        await term.live(1.0, "n1", "n2", "n3")
        assert groups.by_name["billing"].session_ms == 0

    with_term(test)


def test_reset_takes_all_grants_and_pauses_and_a_second_call_ends_the_pause() -> None:
    async def test(term: LeaderContext) -> None:
        leader, a = term.leadership.groups, Consumer(term, "a")
        await shared(term, a)
        with pytest.raises(GroupInUseError):
            await leader.raise_generation("billing", 9_000, "", forced=False)
        with pytest.raises(InvalidArgumentError):
            await leader.raise_generation("billing", 99_000, "", forced=True)
        raised = await leader.raise_generation("billing", 60_000, "", forced=True)
        assert raised.generation == 2
        assert (await a.ask()).granted == {}
        await shared(term, a)
        assert a.held == {}
        await leader.raise_generation("billing", 0, "", forced=True)
        await shared(term, a)
        assert a.held == dict.fromkeys(ALL, 4)

    with_term(test)


def test_member_that_comes_while_the_group_is_deleted_is_granted_nothing_and_joins_anew() -> None:
    async def test(term: LeaderContext) -> None:
        leader, a = term.leadership.groups, Consumer(term, "a")
        await a.ask()
        await leader.leave("billing", "a", 1, "", "c0ffee")
        await term.live(1.0, "n1", "n2", "n3")
        c = Consumer(term, "c")
        await c.ask()
        proposed, raised = hold_proposals(term)
        await term.live(1.0, "n1", "n2", "n3")
        await proposed.wait()  # the generation that c is to be granted partitions with
        await leader.leave("billing", "c", 1, "", "c0ffee")
        proposed, release = hold_proposals(term)
        deleting = asyncio.ensure_future(leader.delete("billing", ""))
        await proposed.wait()
        b = Consumer(term, "c", incarnation=2)
        known = (await b.ask()).revision
        b.wish = replace(b.wish, known_revision=known)
        asking = await b.waits()
        await term.live(2.0, "n1", "n2", "n3")
        raised.set()
        await term.live(2.0, "n1", "n2", "n3")
        assert not asking.done(), "nothing is granted of what may be deleted"
        release.set()
        first = await deleting
        with pytest.raises(UnavailableError, match="join anew"):
            await asking
        again = await b.ask()
        assert again.group.group_id > first.group_id
        await shared(term, b)
        assert b.held == dict.fromkeys(ALL, 1)

    with_term(test)


def test_group_is_deleted_only_without_members_and_its_name_begins_anew() -> None:
    async def test(term: LeaderContext) -> None:
        leader, a = term.leadership.groups, Consumer(term, "a")
        await shared(term, a)
        with pytest.raises(GroupInUseError):
            await leader.delete("billing", "")
        await leader.leave("billing", "a", 1, "", "c0ffee")
        first = await leader.delete("billing", "")
        for call in (
            leader.delete("billing", ""),
            leader.views("billing", ""),
            leader.raise_generation("billing", 0, "", forced=True),
        ):
            with pytest.raises(UnknownGroupError):
                await call
        assert await leader.views("", "") == []
        again = await Consumer(term, "a").ask()
        assert again.group.group_id > first.group_id

    with_term(test)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"group": ""}, InvalidArgumentError),
        ({"group": "x" * 129}, InvalidArgumentError),
        ({"member_id": "a\n"}, InvalidArgumentError),
        ({"strategy": 9}, InvalidArgumentError),
        ({"session_ms": 999}, InvalidArgumentError),
        ({"session_ms": 300_001}, InvalidArgumentError),
        ({"keyspace_ids": ()}, InvalidArgumentError),
        ({"keyspace_ids": (KeyspaceId(77),)}, UnknownKeyspaceError),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else value.__name__,
)
def test_request_that_no_group_could_accept_is_refused(
    fields: dict[str, Any], error: type[Exception]
) -> None:
    async def test(term: LeaderContext) -> None:
        with pytest.raises(error):
            await Consumer(term, **{"member_id": "a", **fields}).ask()
        await Consumer(term, "a", is_static=True, session_ms=3_600_000).ask()

    with_term(test)


def test_members_of_another_cluster_and_of_another_strategy_are_refused() -> None:
    async def test(term: LeaderContext) -> None:
        a = Consumer(term, "a", strategy=int(GroupStrategy.RANGE))
        await a.ask()
        with pytest.raises(InvalidArgumentError, match="range"):
            await Consumer(term, "b", strategy=int(GroupStrategy.STICKY)).ask()
        await Consumer(term, "c").ask()
        with pytest.raises(WrongClusterError):
            await term.leadership.groups.attend(a.wish, {}, "another")

    with_term(test)
