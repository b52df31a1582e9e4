from __future__ import annotations

import pytest

from koinon_coordinator.core.decide.sessions import Sessions, may_acknowledge
from koinon_proto.contract.table import NodeNumber
from tests.coordinator.kit.support import TIMING

TIMES = TIMING.session_times()
N1, N2 = NodeNumber(1), NodeNumber(2)
TICK = TIMING.tick_s


def run_until(
    sessions: Sessions, begin: float, end: float, heard: tuple[NodeNumber, ...] = ()
) -> dict[NodeNumber, float]:
    """Tick regularly, hearing the named nodes; return when each was first said to be over."""
    over: dict[NodeNumber, float] = {}
    ticks = round((end - begin) / TICK)
    for i in range(1, ticks + 1):
        now = begin + i * TICK
        for number in heard:
            sessions.heard(number, now)
        for number in sessions.tick(now):
            over.setdefault(number, now)
            sessions.hold(number)
    return over


def test_sessions_new_leader_gives_everyone_a_full_session() -> None:
    sessions = Sessions(TIMES, 100.0, live=[(N1, True), (N2, True)])
    over = run_until(sessions, 100.0, 103.0, heard=(N2,))
    assert set(over) == {N1}
    assert over[N1] == pytest.approx(101.5 + 2 * TICK, abs=1.1 * TICK)


def test_sessions_expired_node_is_named_once_until_resolved() -> None:
    sessions = Sessions(TIMES, 0.0, live=[(N1, True)])
    over = run_until(sessions, 0.0, 3.0)
    assert list(over) == [N1]
    assert sessions.tick(3.0 + TICK) == []
    sessions.release(N1)  # the fence was never appended
    sessions.tick(3.0 + 2 * TICK)
    assert sessions.tick(3.0 + 3 * TICK) == [N1]


def test_sessions_say_when_the_next_one_may_end() -> None:
    sessions = Sessions(TIMES, 10.0, live=[(N1, True), (N2, True)])
    sessions.heard(N1, 11.0)
    assert sessions.due_at() == 10.0 + TIMES.session_timeout_s
    sessions.hold(N2)  # what becomes of it is decided
    assert sessions.due_at() == 11.0 + TIMES.session_timeout_s
    end = sessions.due_at() + 0.001
    assert sessions.tick(end) == []  # after a pause
    assert sessions.tick(end + TIMES.session_timeout_s) == []
    assert Sessions(TIMES, 10.0).due_at() == float("inf")


def test_sessions_that_wait_for_a_second_look_are_due_at_once() -> None:
    sessions = Sessions(TIMES, 0.0, live=[(N1, True)])
    run_until(sessions, 0.0, TIMES.session_timeout_s)
    now = TIMES.session_timeout_s + TICK
    assert (sessions.tick(now), sessions.due_at() <= now) == ([], True)
    assert sessions.tick(now + TICK) == [N1]


def test_sessions_held_node_is_not_acknowledged() -> None:
    sessions = Sessions(TIMES, 0.0, live=[(N1, True)])
    assert sessions.acknowledge(N1, 0.1)
    sessions.hold(N1)
    assert not sessions.acknowledge(N1, 0.2)
    sessions.close(N1)
    assert not sessions.acknowledge(N1, 0.3)


def test_sessions_paused_leader_judges_nobody_and_counts_on_from_there() -> None:
    sessions = Sessions(TIMES, 0.0, live=[(N1, True)])
    run_until(sessions, 0.0, 1.0)
    assert sessions.tick(11.0) == []  # stopped for ten seconds
    over = run_until(sessions, 11.0, 14.0)
    assert over[N1] == pytest.approx(10.0 + TIMES.session_timeout_s + 2 * TICK, abs=1.1 * TICK)


def test_sessions_short_pauses_every_while_do_not_keep_a_silent_node() -> None:
    sessions = Sessions(TIMES, 0.0, live=[(N1, True), (N2, True)])
    pause_s = TIMES.pause_s + 0.01
    now = 0.0
    over: dict[NodeNumber, float] = {}
    while now < 10.0 and not over:
        over = run_until(sessions, now, now + 1.4 - pause_s, heard=(N2,))
        now += 1.4
        assert sessions.tick(now) == []
    assert set(over) == {N1}
    assert over[N1] < 3 * TIMES.session_timeout_s


def test_sessions_pause_gives_no_more_than_a_full_session() -> None:
    sessions = Sessions(TIMES, 0.0, live=[(N1, True), (N2, True)])
    sessions.tick(0.0)
    sessions.heard(N1, 10.0)  # it waited for us
    assert sessions.tick(10.0) == []
    assert sessions.ends_at(N1) == 10.0 + TIMES.session_timeout_s
    assert sessions.ends_at(N2) == 10.0 + TIMES.session_timeout_s


def test_sessions_heartbeat_between_two_ticks_saves_the_node() -> None:
    sessions = Sessions(TIMES, 0.0, live=[(N1, True)])
    now = 0.0
    while now <= TIMES.session_timeout_s:
        assert sessions.tick(now) == []
        now += TICK
    assert sessions.tick(now) == []  # suspected only
    sessions.heard(N1, now + TICK / 2)  # it was queued
    assert sessions.tick(now + TICK) == []


def test_sessions_without_quorum_nobody_is_judged() -> None:
    sessions = Sessions(TIMES, 0.0, live=[(N1, True)])
    for i in range(100):
        assert sessions.tick(i * TICK, quorum=False) == []


def test_sessions_lease_of_earlier_leaders_is_over_before_the_first_session() -> None:
    sessions = Sessions(TIMES, 50.0, live=[(N1, True), (N2, False)])
    assert sessions.lease_ends_at(N1) == 50.0 + TIMES.check_quorum_s + TIMES.lease_s
    assert sessions.lease_ends_at(N1) < sessions.ends_at(N1)
    assert sessions.lease_ends_at(N2) < 50.0  # an unconfirmed epoch never had one


def test_sessions_lease_counts_from_receipt_and_never_shrinks() -> None:
    sessions = Sessions(TIMES, 0.0)
    sessions.open(N1, 10.0)
    assert sessions.lease_ends_at(N1) < 10.0
    sessions.acknowledge(N1, 10.5)
    sessions.acknowledge(N1, 10.2)  # answered later, received earlier
    assert sessions.lease_ends_at(N1) == 11.5


def test_sessions_lease_is_always_over_when_the_session_is() -> None:
    sessions = Sessions(TIMES, 0.0, live=[(N1, True)])
    for received_at in (0.2, 0.7, 1.3):
        sessions.heard(N1, received_at)
        sessions.acknowledge(N1, received_at)
        assert sessions.lease_ends_at(N1) < sessions.ends_at(N1)


def test_sessions_challenge_tells_the_living_from_the_dead() -> None:
    sessions = Sessions(TIMES, 0.0, live=[(N1, True)])
    sessions.heard(N1, 1.0)
    assert not sessions.heard_since_challenge(N1, "elsewhere", 1.1)
    assert not sessions.heard_since_challenge(N1, "elsewhere", 1.4)  # silent since
    sessions.heard(N1, 1.5)
    assert sessions.heard_since_challenge(N1, "elsewhere", 1.6)
    assert not sessions.heard_since_challenge(N1, "elsewhere", 1.7)  # the next one begins anew
    sessions.heard(N1, 9.0)
    assert not sessions.heard_since_challenge(N1, "elsewhere", 9.1)  # the old challenge is stale


@pytest.mark.parametrize(
    ("age", "allowed"), [(0.0, True), (0.4, True), (0.41, False), (None, False)]
)
def test_may_acknowledge_only_within_check_quorum(age: float | None, allowed: bool) -> None:
    contact = None if age is None else 1000.0 - age
    now = 1000.0
    assert may_acknowledge(now, contact, TIMES) is allowed or (
        age == 0.4 and now - 999.6 > TIMES.check_quorum_s  # the float's rounding, on the safe side
    )
