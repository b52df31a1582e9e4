"""Elections and leadership: directed schedules.

Most are from the Raft paper or Ongaro's dissertation ("diss.").
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from koinon_coordinator.core.raft import (
    HeartbeatReply,
    HeartbeatRequest,
    Refusal,
    Role,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from koinon_coordinator.core.raft.patience import HALF_LIFE_S, Patience

from .group import QUIET_S, Group, granted, vote_request

# -- elections (paper 5.2, 5.4.1)


def test_voter_second_candidate_in_term_is_refused() -> None:
    group = Group()
    assert granted(group, vote_request(5, "b", "a"))
    assert not granted(group, vote_request(5, "c", "a"))
    assert granted(group, vote_request(5, "b", "a")), "the same candidate may ask again"


def test_voter_after_restart_remembers_its_vote() -> None:
    group = Group()
    assert granted(group, vote_request(5, "b", "a"))
    group.boot("a")
    assert not granted(group, vote_request(5, "c", "a"))
    assert group["a"].term == 5


def test_vote_reply_leaves_only_after_the_vote_is_durable() -> None:
    group = Group()
    group.hold_saves("a")
    group.deliver(vote_request(5, "b", "a"))
    assert not group.waiting(VoteReply)
    group.release_saves("a")
    assert group.disks["a"].hard_state.vote == "b"
    assert [reply.granted for reply in group.waiting(VoteReply)] == [True]


def test_voter_candidate_with_older_last_term_is_refused() -> None:
    group = Group(logs={"a": [1, 3]}, terms={"a": 3})
    assert not granted(group, vote_request(4, "b", "a", last=(2, 9)))
    assert granted(group, vote_request(5, "b", "a", last=(3, 2)))


def test_voter_candidate_with_shorter_log_is_refused() -> None:
    group = Group(logs={"a": [1, 3]}, terms={"a": 3})
    assert not granted(group, vote_request(4, "b", "a", last=(3, 1)))


def test_candidate_stale_vote_reply_is_not_counted() -> None:
    """A grant for an earlier term, delayed, does not elect a candidate in a later one."""
    group = Group("abcde")
    group.tick("a", after_s=QUIET_S)
    group.pump(lambda m: not isinstance(m, VoteReply) or m.pre_vote)
    assert group["a"].term == 1
    group.tick("a", after_s=QUIET_S)
    group.pump(lambda m: not isinstance(m, VoteReply) or m.pre_vote)
    assert group["a"].term == 2
    for voter in "bc":
        late = VoteReply(term=1, sender=voter, to="a", request_term=1, pre_vote=False, granted=True)
        group.deliver(late)
    assert group.role("a") is Role.CANDIDATE


def test_candidate_pre_vote_reply_is_not_counted_as_a_vote() -> None:
    group = Group()
    group.tick("a", after_s=QUIET_S)
    group.pump(lambda m: not isinstance(m, VoteReply) or m.pre_vote)
    assert group.role("a") is Role.CANDIDATE
    late = VoteReply(term=0, sender="b", to="a", request_term=1, pre_vote=True, granted=True)
    group.deliver(late)
    assert group.role("a") is Role.CANDIDATE


def test_candidate_needs_a_true_majority() -> None:
    group = Group("abcd")
    group.tick("a", after_s=QUIET_S)
    group.pump_between("ab")
    assert group.role("a") is Role.PRE_CANDIDATE
    group.tick("a", after_s=QUIET_S)
    group.pump_between("abc")
    assert group.role("a") is Role.LEADER


def test_candidate_refused_by_a_majority_follows_again() -> None:
    group = Group(logs={"b": [1], "c": [1]}, terms={"b": 1, "c": 1})
    group.tick("a", after_s=QUIET_S)
    group.pump()
    assert group.role("a") is Role.FOLLOWER


def test_leader_message_of_an_old_term_is_answered_with_the_newer() -> None:
    group = Group(terms={"a": 7})
    old = HeartbeatRequest(term=3, sender="b", to="a", commit_index=0, round_id=4)
    group.deliver(old)
    (reply,) = group.waiting(HeartbeatReply)
    assert (reply.term, reply.round_id) == (7, 0)


# -- pre-vote, stickiness, check-quorum (diss. 9.6, 4.2.3, 6.2)


def test_isolated_member_coming_back_does_not_disrupt() -> None:
    group = Group()
    leader = group.elect("a")
    for _ in range(5):
        group.tick("c", after_s=0.2)
        group.heartbeat("a")
        group.pump_between("ab")
    for _ in range(3):
        group.heartbeat("a")
        group.tick("c")
        group.pump()
    assert (group.role("a"), leader.term) == (Role.LEADER, 1)
    assert group["c"].term == 1


def test_voter_that_hears_a_leader_refuses_higher_terms() -> None:
    group = Group()
    group.elect("a")
    group.heartbeat("a")
    group.pump()
    assert not granted(group, vote_request(9, "c", "b", last=(9, 9)))
    assert group["b"].term == 1


def test_voter_grants_a_transfer_though_it_hears_a_leader() -> None:
    group = Group()
    group.elect("a")
    assert granted(group, replace(vote_request(2, "c", "b", last=(1, 1)), transfer=True))


def test_leader_without_quorum_steps_down() -> None:
    group = Group()
    leader = group.elect("a")
    for _ in range(6):
        group.heartbeat("a")
        group.network.clear()
    assert group.role("a") is Role.LEADER
    assert leader.propose(b"late", group.now) is Refusal.NOT_LEADER
    for _ in range(2):
        group.heartbeat("a")
    assert group.role("a") is Role.FOLLOWER
    assert leader.leader_id is None


def test_leader_check_quorum_counts_from_the_send_time() -> None:
    """Answers that come late prove contact only as of when they were asked for."""
    group = Group()
    leader = group.elect("a")
    group.heartbeat("a")
    asked_at = group.now
    for follower in "bc":
        for message in group.waiting(HeartbeatRequest, to=follower):
            group.deliver(message)
    group.now += 0.3
    group.pump(lambda m: m.to == "a")
    assert leader.quorum_contact_at(group.now) == asked_at
    group.now += 0.15
    assert leader.propose(b"late", group.now) is Refusal.NOT_LEADER


@pytest.mark.parametrize("request_kind", ["read", "propose", "transfer", "step"])
def test_leader_resumed_after_a_pause_answers_nothing(request_kind: str) -> None:
    """SIGSTOP, SIGCONT: the first thing that happens is a request, before any tick."""
    group = Group(step_ms_max=60)
    leader = group.elect_running("a")
    contact = leader.quorum_contact_at(group.now)
    last_index = leader.log.last_index
    group.now += 30.0
    assert leader.quorum_contact_at(group.now) == contact
    if request_kind == "transfer":
        assert leader.transfer_leadership("b", group.now) is Refusal.NOT_LEADER
    elif request_kind == "step":
        leader.step(HeartbeatReply(term=1, sender="b", to="a", round_id=1), group.now)
    assert leader.read_index("read", group.now) is Refusal.NOT_LEADER
    assert leader.propose(b"late", group.now) is Refusal.NOT_LEADER
    assert leader.log.last_index == last_index


def test_leader_resumed_after_a_pause_leads_on_once_a_quorum_answers() -> None:
    group = Group(step_ms_max=60)
    leader = group.elect_running("a")
    group.now += 30.0
    group.heartbeat("a")
    assert leader.propose(b"early", group.now) is Refusal.NOT_LEADER
    group.pump()
    assert (group.role("a"), leader.term) == (Role.LEADER, 1)
    group.propose("a", b"now")


def test_leader_resumed_after_a_pause_without_a_quorum_steps_down() -> None:
    group = Group(step_ms_max=60)
    group.elect_running("a")
    group.now += 30.0
    for _ in range(45):
        group.tick("a", after_s=0.015)
    assert group.role("a") is Role.FOLLOWER


def test_follower_resumed_after_a_pause_hears_its_leader_before_it_campaigns() -> None:
    """The leader's messages of the pause are there, and are read only after a tick or two."""
    group = Group(step_ms_max=60)
    group.elect_running("a")
    for _ in range(20):
        group.now += 0.8
        group.tick("a", "b")
        assert group.role("b") is Role.FOLLOWER
        group.pump()
    assert (group.role("a"), group["b"].term) == (Role.LEADER, 1)


def test_voter_resumed_after_a_pause_still_hears_its_leader() -> None:
    group = Group(step_ms_max=60)
    group.elect_running("a")
    group.now += 5.0
    assert not granted(group, vote_request(9, "c", "b", last=(9, 9)))


# -- patience with those who are slow


@pytest.mark.parametrize("given_up", [False, True])
def test_follower_waits_longer_for_a_leader_that_was_heard_late(given_up: bool) -> None:
    group = Group()
    group.elect("a")

    def heard_after(silence_s: float) -> None:
        group.now += silence_s
        group.deliver(HeartbeatRequest(term=1, sender="a", to="b", commit_index=0, round_id=0))

    heard_after(0.08)
    if given_up:
        group.tick("b", after_s=QUIET_S)
        assert group.role("b") is Role.PRE_CANDIDATE
    heard_after(0.08 if given_up else 0.35)
    wait_s = 1.4 if given_up else 0.65
    for _ in range(10):  # however the timer is set
        group.tick("b", after_s=wait_s)
        assert group.role("b") is Role.FOLLOWER
        assert not granted(group, vote_request(9, "c", "b", last=(9, 9)))
        heard_after(0.0)
    group.tick("b", after_s=2.4 + 0.3)
    assert group.role("b") is Role.PRE_CANDIDATE


def test_leader_waits_longer_for_a_quorum_that_answered_late() -> None:
    group = Group()
    group.elect("a")
    group.now += 0.5
    group.heartbeat("a")
    group.pump()
    group.tick("a", after_s=0.9)
    assert group.role("a") is Role.LEADER
    assert group["a"].propose(b"late", group.now) is Refusal.NOT_LEADER, "but it takes nothing in"
    group.tick("a", after_s=0.4)
    assert group.role("a") is Role.FOLLOWER


def test_patience_is_bounded_and_forgets() -> None:
    patience = Patience(most_s=2.4)
    assert patience.least_s(0.3, 0.0) == 0.3
    patience.ended(0.1, 1.0)
    assert patience.least_s(0.3, 1.0) == 0.3
    patience.ended(0.5, 2.0)
    patience.ended(0.1, 3.0)  # shorter ones take nothing away
    assert patience.least_s(0.3, 2.0 + HALF_LIFE_S) == pytest.approx(0.5)
    assert patience.least_s(0.3, 2.0 + 2 * HALF_LIFE_S) == 0.3
    patience.ended(30.0, 100.0)
    assert patience.least_s(0.3, 100.0) == 2.4


def test_candidate_elections_that_nobody_wins_are_further_apart() -> None:
    group = Group(step_ms_max=60)
    times: list[float] = []
    while len(times) < 40:
        group.tick("a", after_s=0.015)
        if group.waiting(VoteRequest, to="b"):
            times.append(group.now)
        group.network.clear()
    apart = [later - sooner for sooner, later in pairwise(times)]
    assert max(apart[:1]) <= 0.65
    assert max(apart) > 1.2
    assert max(apart) <= 4 * 0.6 + 0.05


def test_quorum_contact_sole_voter_is_now() -> None:
    group = Group("a")
    leader = group.elect("a")
    assert leader.quorum_contact_at(group.now + 9) == group.now + 9


def test_quorum_contact_before_any_round_is_none() -> None:
    group = Group()
    group.tick("a", after_s=QUIET_S)
    group.pump(lambda m: isinstance(m, VoteRequest | VoteReply))
    assert group.role("a") is Role.LEADER
    assert group["a"].quorum_contact_at(group.now) is None
    assert group["b"].quorum_contact_at(group.now) is None


# -- a disk that hangs


def let_time_pass(group: Group, seconds: float, members: str = "abc") -> None:
    """Everyone ticks as a driver would, and all that these members send one another arrives."""
    end = group.now + seconds
    while group.now < end:
        group.tick(*members, after_s=0.015)
        group.pump_between(members)


def test_leader_whose_disk_hangs_leaves_the_lead_to_the_others() -> None:
    group = Group("abc")
    group.elect("a")
    group.hold_saves("a")
    group.propose("a", b"wanted")
    let_time_pass(group, 5.0)
    assert group.role("a") is Role.FOLLOWER
    (leader_id,) = (m for m in "bc" if group.role(m) is Role.LEADER)
    assert b"wanted" in [entry.data for entry in group.applied[leader_id]]
    term = group[leader_id].term
    group.release_saves("a")
    let_time_pass(group, 2.0)
    assert b"wanted" in [entry.data for entry in group.applied["a"]]
    assert group[leader_id].term == term, "it has come back without an election"
    assert group.role(leader_id) is Role.LEADER


def test_leader_whose_disk_hangs_while_nothing_is_proposed_leaves_the_lead_to_the_others() -> None:
    group = Group("abc")
    leader = group.elect("a")
    group.hold_saves("a")
    let_time_pass(group, 3.0)
    assert group.role("a") is Role.LEADER
    let_time_pass(group, 2.0)
    assert group.role("a") is Role.FOLLOWER
    assert leader.saving_s(group.now) > 1.5
    assert any(group.role(member) is Role.LEADER for member in "bc")


@pytest.mark.parametrize("hanging", ["abc", "ab"])
def test_disks_that_hang_while_nothing_is_proposed_elect_nobody(hanging: str) -> None:
    group = Group("abc")
    leader = group.elect("a")
    term = leader.term
    for member in hanging:
        group.hold_saves(member)
    let_time_pass(group, 10.0)
    assert (group.role("a"), leader.term) == (Role.LEADER, term)
    assert leader.log.last_index - leader.log.commit_index == 1, "one entry is enough"


def test_leader_whose_disk_is_slow_leads_on() -> None:
    group = Group("abc")
    leader = group.elect("a")
    term = leader.term
    for _ in range(3):
        group.hold_saves("a")
        group.propose("a")
        let_time_pass(group, 1.4)
        assert leader.saving_s(group.now) > 1.3
        group.release_saves("a")
        assert leader.saving_s(group.now) == 0.0
    assert (group.role("a"), leader.term) == (Role.LEADER, term)


def test_leader_whose_disk_hangs_leads_on_where_nobody_else_can() -> None:
    group = Group("abc")
    group.elect("a")
    group.hold_saves("a")
    group.propose("a")
    let_time_pass(group, 5.0, members="ab")
    assert group.role("a") is Role.LEADER


@pytest.mark.parametrize("hanging", ["abc", "ab"])
def test_leader_whose_disk_hangs_as_others_do_leads_on(hanging: str) -> None:
    """They may share it. Heartbeats go on, and nodes' leases with them."""
    group = Group("abc")
    leader = group.elect("a")
    term = leader.term
    for member in hanging:
        group.hold_saves(member)
    group.propose("a", b"wanted")
    let_time_pass(group, 6.0)
    assert (group.role("a"), leader.term) == (Role.LEADER, term)
    for member in hanging:
        group.release_saves(member)
    let_time_pass(group, 1.0)
    assert b"wanted" in [entry.data for entry in group.applied["a"]]
    assert (group.role("a"), leader.term) == (Role.LEADER, term)


def test_member_whose_disk_hangs_does_not_campaign() -> None:
    group = Group("abc")
    group.elect("a")
    group.hold_saves("b")
    group.propose("a")
    let_time_pass(group, 2.0)
    let_time_pass(group, 2.0, members="bc")
    group["b"].step(TimeoutNow(term=group["b"].term, sender="a", to="b"), group.now)
    assert group.role("b") is Role.FOLLOWER
    group["b"].tick(group.now + QUIET_S)
    assert group.role("b") is Role.FOLLOWER
