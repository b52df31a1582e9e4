"""Changes of membership and of the leader: directed schedules.

Most are from the Raft paper or Ongaro's dissertation ("diss.").
"""

from __future__ import annotations

from koinon_coordinator.core.raft import (
    AppendReply,
    AppendRequest,
    Refusal,
    RemovedFromGroup,
    Role,
    TimeoutNow,
    TransferGivenUp,
    VoteReply,
    VoteRequest,
)

from .group import QUIET_S, Group

# -- membership (diss. 4)


def test_change_before_the_terms_noop_is_committed_is_refused() -> None:
    """The single-server bug of 2015 (raft-dev): see `Leader._change`."""
    group = Group("abcd")
    group.tick("a", after_s=QUIET_S)
    group.pump(lambda m: isinstance(m, VoteRequest | VoteReply))
    leader = group["a"]
    assert group.role("a") is Role.LEADER
    outcome = leader.add_learner("e", "host-e:1", group.now)
    assert outcome is Refusal.TERM_NOT_COMMITTED
    assert leader.remove_member("d", group.now) is Refusal.TERM_NOT_COMMITTED


def test_change_while_another_is_in_flight_is_refused() -> None:
    group = Group("abc")
    leader = group.elect("a")
    assert not isinstance(leader.add_learner("d", "host-d:1", group.now), Refusal)
    assert leader.remove_member("b", group.now) is Refusal.CHANGE_IN_FLIGHT
    group.take("a")
    group.pump()
    assert not isinstance(leader.remove_member("b", group.now), Refusal)


def test_change_counts_from_when_it_is_appended() -> None:
    group = Group("abc")
    leader = group.elect("a")
    leader.remove_member("c", group.now)
    assert sorted(leader.configuration.voters) == ["a", "b"]
    group.take("a")
    group.pump_between("ab")
    assert leader.log.commit_index == leader.log.last_index


def test_own_address_of_an_only_member_is_changed_and_survives_a_restart() -> None:
    group = Group("a")
    leader = group.elect("a")
    assert not isinstance(leader.change_own_address("elsewhere:1", group.now), Refusal)
    group.take("a")
    group.pump()
    group.boot("a")
    assert group["a"].configuration.voters == {"a": "elsewhere:1"}


def test_change_that_is_truncated_is_rolled_back() -> None:
    group = Group("abc")
    group.elect("a")
    group["a"].remove_member("c", group.now)
    group.take("a")
    group.network.clear()
    assert sorted(group["a"].configuration.voters) == ["a", "b"]
    group.elect("b", among="bc")
    group.heartbeat("b")
    group.pump()
    assert sorted(group["a"].configuration.voters) == ["a", "b", "c"]


def test_change_refusals_name_the_reason() -> None:
    group = Group("ab", learners="l", promote_lag_entries_max=3)
    leader = group.elect("a", among="ab")
    now = group.now
    assert leader.add_learner("b", "x:1", now) is Refusal.ALREADY_MEMBER
    assert leader.add_learner("z", "host-b:1", now) is Refusal.ADDRESS_IN_USE
    assert leader.promote("z", now) is Refusal.NOT_A_LEARNER
    assert leader.promote("b", now) is Refusal.NOT_A_LEARNER
    assert leader.remove_member("z", now) is Refusal.NOT_A_MEMBER
    for _ in range(5):
        group.propose("a")
        group.pump_between("ab")
    assert leader.promote("l", group.now) is Refusal.LEARNER_BEHIND
    assert group["b"].promote("l", group.now) is Refusal.NOT_LEADER
    sole = Group("a").elect("a")
    assert sole.remove_member("a", group.now) is Refusal.LAST_VOTER


def test_removal_that_would_leave_no_majority_in_touch_is_refused() -> None:
    group = Group("abc")
    leader = group.elect("a")
    for _ in range(10):
        group.heartbeat("a")
        group.pump_between("ab")
    assert leader.remove_member("b", group.now) is Refusal.NO_MAJORITY
    assert sorted(leader.configuration.voters) == ["a", "b", "c"]
    assert leader.remove_member("a", group.now) is Refusal.NO_MAJORITY
    assert not isinstance(leader.remove_member("c", group.now), Refusal)
    group.take("a")
    group.pump_between("ab")
    assert leader.log.commit_index == leader.log.last_index


def test_removal_of_a_learner_needs_no_majority_beside_it() -> None:
    group = Group("abc", learners="l")
    leader = group.elect("a")
    for _ in range(10):
        group.heartbeat("a")
        group.pump_between("ab")
    assert not isinstance(leader.remove_member("l", group.now), Refusal)


def test_learner_joins_catches_up_and_is_promoted() -> None:
    group = Group("abc")
    leader = group.elect("a")
    group.propose("a")
    group.pump()
    leader.add_learner("d", "host-d:1", group.now)
    group.add_process("d")
    group.take("a")
    group.pump()
    assert group["d"].log.last_index == leader.log.last_index
    assert not isinstance(leader.promote("d", group.now), Refusal)
    group.take("a")
    group.pump()
    assert "d" in group["d"].configuration.voters


def test_sole_voter_that_has_led_for_long_gets_a_second_and_leads_on() -> None:
    group = Group("a")
    leader = group.elect("a")
    for _ in range(100):
        group.heartbeat("a")
        group.pump()
    leader.add_learner("b", "host-b:1", group.now)
    group.add_process("b")
    group.take("a")
    group.pump()
    assert not isinstance(leader.promote("b", group.now), Refusal)
    leader.tick(group.now)
    assert leader.role is Role.LEADER
    group.take("a")
    group.pump()
    assert leader.log.commit_index == leader.log.last_index


def test_learner_does_not_count_towards_commit() -> None:
    group = Group("abc", learners="lm")
    leader = group.elect("a")
    before = leader.log.commit_index
    group.propose("a")
    group.pump_between("alm")
    assert leader.log.commit_index == before
    assert leader.progress["l"].match_index == leader.log.last_index


def test_learner_does_not_count_for_contact_or_reads() -> None:
    group = Group("abc", learners="lm")
    leader = group.elect("a")
    contact = leader.quorum_contact_at(group.now)
    leader.read_index("read", group.now)
    group.take("a")
    group.heartbeat("a")
    group.pump_between("alm")
    assert leader.quorum_contact_at(group.now) == contact
    assert not group.reads


def test_learner_never_campaigns_and_its_vote_never_counts() -> None:
    group = Group("abc", learners="l")
    group.tick("l", after_s=QUIET_S)
    assert group.role("l") is Role.FOLLOWER
    group.tick("a", after_s=QUIET_S)
    assert not group.waiting(VoteRequest, to="l")
    group["a"].step(
        VoteReply(term=0, sender="l", to="a", request_term=1, pre_vote=True, granted=True),
        group.now,
    )
    assert group.role("a") is Role.PRE_CANDIDATE


def test_removed_leader_leads_until_committed_then_steps_down() -> None:
    group = Group("abc")
    leader = group.elect("a")
    leader.remove_member("a", group.now)
    group.take("a")
    assert group.role("a") is Role.LEADER
    for message in group.waiting(AppendRequest, to="b"):
        group.deliver(message)
    for reply in group.waiting(AppendReply, sender="b"):
        group.deliver(reply)
    assert group.role("a") is Role.LEADER, "one of two is no majority, its own copy does not count"
    group.pump()
    assert group.role("a") is Role.FOLLOWER
    assert any(isinstance(event, RemovedFromGroup) for event in group.events["a"])
    assert Role.LEADER in {group["b"].role, group["c"].role}, "the successor was told"


def test_removed_leader_applies_its_removal_before_it_goes() -> None:
    """Others may commit it first: whoever asked for it is still to be answered."""
    group = Group("abc")
    leader = group.elect("a")
    group.hold_saves("a")
    position = leader.remove_member("a", group.now)
    assert not isinstance(position, Refusal)
    group.take("a")
    group.pump()
    assert leader.log.commit_index == position.index
    assert group.role("a") is Role.LEADER
    group.release_saves("a")
    assert group.applied["a"][-1].index == position.index
    assert group.role("a") is Role.FOLLOWER


def test_removed_follower_learns_of_its_removal() -> None:
    group = Group("abc")
    leader = group.elect("a")
    leader.remove_member("c", group.now)
    group.take("a")
    group.pump()
    assert any(isinstance(event, RemovedFromGroup) for event in group.events["c"])
    assert "c" not in leader.progress


def test_removed_member_out_of_touch_is_forgotten() -> None:
    group = Group("abc")
    leader = group.elect("a")
    leader.remove_member("c", group.now)
    group.take("a")
    group.pump_between("ab")
    for _ in range(10):
        group.heartbeat("a")
        group.pump_between("ab")
    assert "c" not in leader.progress


def test_member_removed_in_its_own_log_alone_can_still_lead() -> None:
    """Diss. 4.2.2: its entry is on no other member, and no other log is as good."""
    group = Group("ab")
    group.elect("a")
    group["a"].remove_member("a", group.now)
    group.take("a")
    group.network.clear()
    group.boot("a")
    group.tick("b", after_s=QUIET_S)
    group.pump()
    assert group.role("b") is not Role.LEADER
    group.tick("a", after_s=QUIET_S)
    group.pump()
    group.tick("b", after_s=QUIET_S)
    group.pump()
    assert group.role("b") is Role.LEADER
    assert sorted(group["b"].configuration.voters) == ["b"]


# -- transfer (diss. 3.10)


def test_transfer_target_takes_over_once_it_has_caught_up() -> None:
    group = Group()
    leader = group.elect("a")
    group.propose("a")
    group.network.clear()
    assert leader.transfer_leadership("b", group.now) == "b"
    group.take("a")
    assert not group.waiting(TimeoutNow), "b lacks an entry"
    for _ in range(3):
        group.heartbeat("a")
        group.pump()
    assert group.role("b") is Role.LEADER
    assert group["a"].leader_id == "b"


def test_transfer_waits_for_the_target_though_all_is_applied() -> None:
    group = Group()
    leader = group.elect("a")
    group.propose("a")
    group.pump_between("ac")
    assert leader.log.applied_index == leader.log.last_index
    group.network.clear()
    assert leader.transfer_leadership("b", group.now) == "b"
    group.take("a")
    assert not group.waiting(TimeoutNow), "b lacks an entry"


def test_transfer_refuses_proposals_and_is_given_up_in_time() -> None:
    group = Group()
    leader = group.elect("a")
    leader.transfer_leadership("b", group.now)
    group.take("a")
    assert leader.propose(b"x", group.now) is Refusal.TRANSFERRING
    assert leader.remove_member("c", group.now) is Refusal.TRANSFERRING
    assert leader.transfer_leadership("c", group.now) is Refusal.TRANSFERRING
    for _ in range(9):
        group.heartbeat("a")
        group.pump_between("ac")
    assert TransferGivenUp(to="b") in group.events["a"]
    assert not isinstance(leader.propose(b"x", group.now), Refusal)


def test_transfer_without_a_name_picks_the_voter_furthest_on() -> None:
    group = Group("abc", learners="l")
    leader = group.elect("a")
    group.propose("a")
    group.pump_between("acl")
    assert leader.transfer_leadership(None, group.now) == "c"


def test_transfer_to_none_in_touch_or_no_voter_is_refused() -> None:
    group = Group("abc", learners="l")
    leader = group.elect("a")
    assert leader.transfer_leadership("l", group.now) is Refusal.NOT_A_VOTER
    assert leader.transfer_leadership("a", group.now) is Refusal.NOT_A_VOTER
    assert Group("a").elect("a").transfer_leadership(None, 999.0) is Refusal.NO_TARGET
