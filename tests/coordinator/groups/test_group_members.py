"""The members of a group and their grants: single steps, whole worlds, and planted defects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from koinon_coordinator.core.groups.group_members import Attendance, GroupMembers
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    MemberFencedError,
    PermissionDeniedError,
    UnavailableError,
)
from koinon_proto.contract.groups import GroupStrategy
from koinon_proto.contract.keyspaces import KeyspaceId
from koinon_proto.contract.table import PartitionId
from tests.coordinator.groups import world

ORDERS, LATER = KeyspaceId(1), KeyspaceId(2)
SESSION_S = 10.0


class Group:
    """One group of ten partitions, whose generations are raised at once."""

    def __init__(self, *, waits_until: float = 0.0) -> None:
        self.now = 50.0
        self.generation = 0
        self.core = GroupMembers(
            "g", GroupStrategy.STICKY, {ORDERS: range(10)}, self.now, waits_until
        )
        self.numbers: dict[str, int] = {}

    def attend(
        self, member_id: str, held: Mapping[PartitionId, int] | None = None, **fields: Any
    ) -> None:
        self.numbers[member_id] = self.numbers.get(member_id, 0) + 1
        request = Attendance(
            member_id=member_id,
            incarnation=1,
            number=self.numbers[member_id],
            keyspace_ids=frozenset({ORDERS}),
            session_s=SESSION_S,
        )
        self.core.attend(replace(request, **fields), held or {}, self.generation, self.now)

    def follow(self, member_id: str, **fields: Any) -> None:
        """Attend as a member that has received the last answer, and does what it says."""
        member = self.core.members[member_id]
        held = dict(self.core.answer(member))
        self.attend(member_id, **{"held": held, "known_revision": member.revision, **fields})

    def pass_s(self, seconds: float) -> int:
        """Let time pass; return the number of generations."""
        before = self.generation
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.core.tick(self.now, pause_s=1.0, quorum=True)
            if self.core.act(self.now):
                self.generation += 1
                self.core.grant(self.generation, self.core.session_s, self.now)
        return self.generation - before

    def granted(self, member_id: str) -> dict[int, int]:
        return {int(p): g for p, g in self.core.members[member_id].granted.items()}


def test_first_member_is_granted_all_with_one_generation() -> None:
    group = Group()
    group.attend("a")
    assert group.granted("a") == {}
    assert group.pass_s(1.0) == 1
    assert group.granted("a") == dict.fromkeys(range(10), 1)
    assert not group.core.is_idle("a")


def test_partition_is_granted_to_the_next_member_only_once_it_is_released() -> None:
    group = Group()
    group.attend("a")
    group.pass_s(1.0)
    group.follow("a")
    group.attend("b")
    group.pass_s(1.0)
    assert len(group.granted("a")) == 5
    assert group.granted("b") == {}, "a may still hold all"
    kept = set(group.granted("a"))
    group.follow("a", held=dict.fromkeys(map(PartitionId, range(10)), 1))  # not released yet
    group.pass_s(1.0)
    assert group.granted("b") == {}
    group.follow("a")
    group.pass_s(1.0)
    assert group.granted("b") == {p: 2 for p in range(10) if p not in kept}
    assert group.granted("a") == dict.fromkeys(kept, 1), "what stays is not touched"


def test_partitions_of_a_silent_member_go_to_the_others_after_its_session() -> None:
    group = Group()
    group.attend("a")
    group.attend("b")
    group.pass_s(1.0)
    for _ in range(9):
        group.follow("a")
        group.pass_s(1.0)
    assert len(group.granted("b")) == 5
    group.follow("a")
    group.pass_s(1.0)
    assert list(group.core.members) == ["a"]
    assert len(group.granted("a")) == 10


def test_session_outlasts_a_pause_of_the_leader_and_a_lost_quorum() -> None:
    group = Group()
    group.attend("a")
    group.pass_s(1.0)
    group.now += 60.0
    group.core.tick(group.now, pause_s=1.0, quorum=True)
    group.now += 0.1
    group.core.tick(group.now, pause_s=1.0, quorum=True)
    assert list(group.core.members) == ["a"], "nothing could arrive meanwhile"
    for _ in range(200):
        group.now += 0.1
        group.core.tick(group.now, pause_s=1.0, quorum=False)
    assert list(group.core.members) == ["a"], "no grant could follow"


def test_grant_that_was_not_taken_up_is_made_anew_with_a_higher_generation() -> None:
    """As when the cursor has a higher generation than an adopted grant."""
    group = Group()
    group.attend("a")
    group.pass_s(1.0)
    group.follow("a", held=dict.fromkeys(map(PartitionId, range(1, 10)), 1))
    group.pass_s(1.0)
    assert group.granted("a") == {0: 2, **dict.fromkeys(range(1, 10), 1)}


def test_grant_that_the_member_has_not_heard_of_stays_as_it_is() -> None:
    group = Group()
    group.attend("a")
    group.pass_s(1.0)
    group.attend("a")  # the answer was lost: it knows nothing, and holds nothing
    assert group.pass_s(1.0) == 0
    assert len(group.granted("a")) == 10


def test_new_leader_keeps_what_members_hold_and_shares_the_rest_after_a_session() -> None:
    group = Group(waits_until=60.0)
    group.generation = 8
    group.attend("a", held={PartitionId(p): 5 for p in range(4)})
    group.attend("b", held={PartitionId(p): 7 for p in range(3, 6)})
    group.pass_s(9.5)
    assert group.generation == 8
    assert group.granted("a") == {0: 5, 1: 5, 2: 5}, "the higher generation has partition 3"
    assert group.granted("b") == {3: 7, 4: 7, 5: 7}
    group.follow("a")
    group.follow("b")
    assert group.pass_s(2.0) == 1
    assert group.granted("a") == {0: 5, 1: 5, 2: 5, 6: 9, 7: 9}
    assert group.granted("b") == {3: 7, 4: 7, 5: 7, 8: 9, 9: 9}


def test_new_leader_does_not_wait_once_every_partition_is_accounted_for() -> None:
    group = Group(waits_until=1_000.0)
    group.generation = 8
    group.attend("a", held={PartitionId(p): 5 for p in range(10)})
    group.attend("b")
    group.pass_s(1.0)
    group.follow("a")
    assert group.pass_s(1.0) == 1
    assert set(group.granted("b").values()) == {9}
    assert len(group.granted("b")) == 5


def test_second_process_of_a_member_takes_its_place_and_the_first_is_refused() -> None:
    group = Group()
    group.attend("a")
    group.attend("b")
    group.pass_s(1.0)
    had = set(group.granted("a"))
    group.attend("a", incarnation=2, number=1)
    assert group.granted("a") == {}
    group.pass_s(1.0)
    assert group.granted("a") == dict.fromkeys(had, 2), "the same ones, with a new generation"
    with pytest.raises(MemberFencedError):
        group.attend("a", incarnation=1, number=99)
    group.core.leave("a", 1, "", group.now)
    assert "a" in group.core.members, "who is gone cannot send its successor away"


def test_process_on_a_machine_whose_clock_is_behind_takes_the_members_place() -> None:
    group = Group()
    group.attend("a", incarnation=9, is_joining=True)
    group.attend("a", incarnation=5, number=1, is_joining=True)
    group.attend("a", incarnation=7, number=1, is_joining=True)
    for replaced in (9, 5):
        for is_joining in (False, True):
            with pytest.raises(MemberFencedError):
                group.attend("a", incarnation=replaced, number=99, is_joining=is_joining)
    group.attend("a", incarnation=7, number=2)
    group = Group()  # of the next leader, which has not seen the order
    group.attend("a", incarnation=5)
    group.attend("a", incarnation=9, number=1)
    with pytest.raises(MemberFencedError):
        group.attend("a", incarnation=5, number=99)


def test_requests_out_of_order_of_other_users_and_with_impossible_facts_are_refused() -> None:
    group = Group()
    group.attend("a", user="app")
    with pytest.raises(UnavailableError):
        group.attend("a", user="app", number=1)
    with pytest.raises(PermissionDeniedError):
        group.attend("a", user="other")
    with pytest.raises(PermissionDeniedError):
        group.core.leave("a", 1, "other", group.now)
    with pytest.raises(InvalidArgumentError):
        group.attend("a", user="app", held={PartitionId(1): 99})
    with pytest.raises(InvalidArgumentError):
        group.attend("a", user="app", session_s=SESSION_S + 1)


def test_members_without_a_share_are_idle() -> None:
    group = Group()
    for index in range(12):
        group.attend(f"m{index:02}")
    group.pass_s(1.0)
    idle = [m for m in group.core.members if group.core.is_idle(m)]
    assert len(idle) == 2
    assert group.core.unowned() == 0


def test_many_joins_within_a_second_make_few_generations() -> None:
    group = Group()
    group.core.set_partitions({ORDERS: range(1024)}, group.now)
    for index in range(100):
        group.attend(f"m{index}")
        if index % 10 == 9:
            group.pass_s(0.1)
    group.pass_s(3.0)
    assert group.generation <= 3
    assert {len(group.granted(m)) for m in group.core.members} == {10, 11}


def test_pause_takes_all_grants_and_makes_none_while_it_lasts() -> None:
    group = Group()
    group.attend("a")
    group.pass_s(1.0)
    group.core.pause(group.now, 3.0)
    group.generation += 1
    assert group.pass_s(2.5) == 0
    assert group.granted("a") == {}
    group.follow("a")
    group.pass_s(2.0)
    assert group.granted("a") == dict.fromkeys(range(10), 3)


def test_dropped_keyspace_is_forgotten_and_a_new_one_is_shared() -> None:
    group = Group()
    group.attend("a", keyspace_ids=frozenset({ORDERS, LATER}))
    group.pass_s(1.0)
    group.core.set_partitions({LATER: range(20, 22)}, group.now)
    assert group.granted("a") == {}
    group.follow("a", keyspace_ids=frozenset({ORDERS, LATER}))
    group.pass_s(1.0)
    assert group.granted("a") == {20: 2, 21: 2}


def test_member_with_a_longer_session_than_the_raise_announced_waits_for_the_next() -> None:
    group = Group()
    group.attend("a")
    group.now += 1.0
    assert group.core.act(group.now)
    group.attend("a", incarnation=2, number=1, session_s=2 * SESSION_S)
    assert group.core.grant(1, SESSION_S, group.now) == 0
    group.generation = 1
    group.pass_s(1.0)
    assert group.granted("a") == dict.fromkeys(range(10), 2)


# --- whole worlds -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_no_partition_has_two_owners_and_every_one_has_an_owner_at_last(seed: int) -> None:
    world.run(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1_000, 1_100))
def test_no_partition_has_two_owners_over_many_seeds(seed: int) -> None:
    world.run(seed)


def _two_owners(make: Callable[..., Any]) -> Any:
    def grantable(self: GroupMembers, now: float) -> Any:
        found = make(self, now)
        for partition_id, member_id in self._target.items():
            if member_id in self.members and self._owner.get(partition_id) != member_id:
                found.append((partition_id, member_id))
        return list(dict.fromkeys(found))

    return grantable


def _grant_before_release(_: Callable[..., Any]) -> Any:
    def grantable(self: GroupMembers, now: float) -> Any:
        return [
            (p, m)
            for p, m in self._target.items()
            if p not in self._owner and m in self.members and now >= self.waits_until
        ]

    return grantable


def _same_generation(_: Callable[..., Any]) -> Any:
    def raise_generation(self: world.World) -> None:
        self.generation = max(self.generation, 1)

    return raise_generation


def _no_waiting(change: Callable[..., Any]) -> Any:
    def change_leader(self: world.World) -> None:
        change(self)
        self.leader.waits_until = 0.0

    return change_leader


def _short_sessions(tick: Callable[..., Any]) -> Any:
    def early(self: GroupMembers, now: float, **facts: Any) -> None:
        tick(self, now + 0.7, **facts)
        self._ticked_at = now

    return early


def _forgets_what_it_told(_: Callable[..., Any]) -> Any:
    def answer(_self: GroupMembers, member: Any) -> Any:
        return member.granted

    return answer


@pytest.mark.parametrize(
    ("place", "name", "defect"),
    [
        (GroupMembers, "_grantable", _two_owners),
        (GroupMembers, "_grantable", _grant_before_release),
        (world.World, "raise_generation", _same_generation),
        (world.World, "change_leader", _no_waiting),
        (GroupMembers, "tick", _short_sessions),
        (GroupMembers, "answer", _forgets_what_it_told),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).strip("_"),
)
def test_planted_defect_is_found(
    monkeypatch: pytest.MonkeyPatch, place: type, name: str, defect: Callable[..., Any]
) -> None:
    monkeypatch.setattr(place, name, defect(getattr(place, name)))
    for seed in range(10):
        try:
            world.run(seed)
        except AssertionError:
            return
    pytest.fail("the planted defect was not found")
