"""Replication, commitment and reads: directed schedules.

Most are from the Raft paper or Ongaro's dissertation ("diss.").
"""

from __future__ import annotations

from dataclasses import replace

from koinon_coordinator.core.raft import (
    AppendReply,
    AppendRequest,
    HeartbeatReply,
    HeartbeatRequest,
    Refusal,
    Role,
    VoteReply,
    VoteRequest,
)

from .group import QUIET_S, Group, entries_of

# -- commitment (paper 5.3, 5.4.2)


def test_leader_commits_no_entry_of_an_older_term_by_counting() -> None:
    """Figure 8: S1 leads again in term 4 and brings its entry of term 2 to a majority."""
    group = Group(
        "abcde",
        logs={"a": [1, 2], "b": [1, 2], "c": [1], "d": [1], "e": [1, 3]},
        terms={"a": 3, "b": 2, "c": 3, "d": 3, "e": 3},
        append_entries_max=1,
    )
    group.tick("a", after_s=QUIET_S)
    group.pump(lambda m: isinstance(m, VoteRequest | VoteReply))
    leader = group["a"]
    assert group.role("a") is Role.LEADER
    assert leader.term == 4

    for _ in range(4):
        group.heartbeat("a")
        while group.network:
            message = group.network.pop(0)
            if isinstance(message, AppendRequest):
                old = tuple(entry for entry in message.entries if entry.index <= 2)
                message = replace(message, entries=old)
            if message.to in "abc":
                group.deliver(message)
    assert group["c"].log.term_at(2) == 2, "the old entry is on a, b and c"
    assert leader.progress["b"].match_index == leader.progress["c"].match_index == 2
    assert leader.log.commit_index == 0, "e could still lead, and replace it"
    group.heartbeat("a")
    group.pump_between("abc")
    assert leader.log.commit_index == 3, "with an entry of term 4 on top all are committed"


def test_leader_does_not_count_its_own_unpersisted_entry() -> None:
    group = Group()
    leader = group.elect("a")
    before = leader.log.commit_index
    group.hold_saves("a")
    position = group.propose("a")
    group.pump_between("ab")
    assert leader.log.commit_index == before, "durable on b alone"
    group.release_saves("a")
    assert leader.log.commit_index == position.index


def test_leader_followers_alone_may_commit() -> None:
    group = Group()
    leader = group.elect("a")
    group.hold_saves("a")
    position = group.propose("a")
    group.pump()
    assert leader.log.commit_index == position.index
    assert position.index not in [e.index for e in group.applied["a"]], "applied once durable"
    group.release_saves("a")
    assert position.index in [e.index for e in group.applied["a"]]


def test_leader_appends_leave_before_its_own_save() -> None:
    group = Group()
    group.elect("a")
    group.hold_saves("a")
    group.propose("a")
    assert len(group.waiting(AppendRequest)) == 2


def test_follower_acknowledges_only_what_is_durable() -> None:
    group = Group()
    group.elect("a")
    group.hold_saves("b")
    group.propose("a")
    group.deliver_to("b")
    assert not group.waiting(AppendReply, sender="b")
    group.release_saves("b")
    assert group.waiting(AppendReply, sender="b")


def test_follower_answers_heartbeats_while_it_saves() -> None:
    group = Group()
    group.elect("a")
    group.hold_saves("b")
    group.propose("a")
    group.deliver_to("b")
    group.heartbeat("a")
    group.deliver_to("b")
    assert group.waiting(HeartbeatReply, sender="b")
    assert not group.waiting(AppendReply, sender="b")


def test_follower_acknowledgement_of_an_old_term_never_leaves_late() -> None:
    """It was waiting for a save when a newer leader replaced what it acknowledges."""
    group = Group(terms={"a": 1, "b": 1, "c": 1})
    group.hold_saves("c")

    def append(term: int, sender: str, terms: list[int], first: int = 1) -> AppendRequest:
        return AppendRequest(
            term=term,
            sender=sender,
            to="c",
            previous_index=first - 1,
            previous_term=0,
            entries=entries_of(terms, first),
            commit_index=0,
            round_id=1,
        )

    group.deliver(append(1, "a", [1]))
    group.deliver(append(1, "a", [1, 1, 1]))
    group.deliver(append(2, "b", [2]))
    held = group.held.pop("c")
    group._save("c", held[0])
    group.take("c")
    for reply in group.waiting(AppendReply, to="a"):
        assert reply.match_index <= 1
    assert [r.match_index for r in group.waiting(AppendReply, to="b")] == [1]
    assert group.disks["c"].last_index == 1


def test_entry_truncated_during_its_save_does_not_count_as_durable() -> None:
    group = Group(terms={"a": 1, "b": 1, "c": 1})
    group.hold_saves("c")
    first = AppendRequest(
        term=1,
        sender="a",
        to="c",
        previous_index=0,
        previous_term=0,
        entries=entries_of([1, 1]),
        commit_index=0,
        round_id=1,
    )
    group.deliver(first)
    group.deliver(replace(first, term=2, sender="b", entries=entries_of([1, 2])))
    held = group.held["c"].pop(0)
    group._save("c", held)
    assert group["c"].log.persisted_index == 1


def test_follower_late_append_does_not_cut_off_what_followed_it() -> None:
    group = Group()
    group.elect("a")
    group.propose("a", b"one")
    (early,) = group.waiting(AppendRequest, to="b")
    group.pump()
    group.propose("a", b"two")
    group.pump()
    last_index = group["b"].log.last_index
    group.deliver(early)
    assert group["b"].log.last_index == last_index


def test_follower_conflicting_tail_is_replaced() -> None:
    """Figure 7 (f): a follower with entries of terms that no other member has."""
    group = Group(
        logs={"a": [1, 1, 1, 4, 4, 5, 5, 6, 6, 6], "b": [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3]},
        terms={"a": 6, "b": 3},
    )
    group.elect("a")
    assert [e.term for e in group["b"].log.slice(1, 11)] == [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7]


def test_follower_checks_the_term_of_the_previous_entry() -> None:
    group = Group(logs={"b": [1, 1]}, terms={"b": 2})
    request = AppendRequest(
        term=2,
        sender="a",
        to="b",
        previous_index=2,
        previous_term=2,
        entries=entries_of([2], first=3),
        commit_index=3,
        round_id=1,
    )
    group.deliver(request)
    (reply,) = group.waiting(AppendReply)
    assert not reply.success
    assert (reply.hint_index, reply.hint_term) == (2, 1)
    assert group["b"].log.commit_index == 0


def test_follower_commits_no_further_than_it_agrees() -> None:
    """Its own tail may differ from what the leader has committed there (figure 2, receiver 5)."""
    group = Group(logs={"b": [1, 2, 2]}, terms={"b": 2})
    request = AppendRequest(
        term=3,
        sender="a",
        to="b",
        previous_index=1,
        previous_term=1,
        entries=(),
        commit_index=3,
        round_id=1,
    )
    group.deliver(request)
    assert group["b"].log.commit_index == 1


def test_leader_backtracks_by_term_not_by_entry() -> None:
    """Paper, end of 5.3: one probe per conflicting term."""
    group = Group(
        logs={"a": [1] * 50 + [4] * 50, "b": [1] * 50 + [2] * 100 + [3] * 100},
        terms={"a": 4, "b": 3},
    )
    group.tick("a", after_s=QUIET_S)
    group.pump(lambda m: isinstance(m, VoteRequest | VoteReply))
    refusals = 0
    for _ in range(100):
        if group["b"].log.term_at(51) == 4:
            break
        if not group.network:
            group.heartbeat("a")
        refusals += isinstance(group.network[0], AppendReply) and not group.network[0].success
        group.deliver(group.network[0])
    assert group["b"].log.term_at(51) == 4
    assert refusals <= 3


def test_leader_finds_out_by_heartbeat_that_appends_were_lost() -> None:
    group = Group()
    leader = group.elect("a")
    for number in range(5):
        group.propose("a", b"%d" % number)
    group.network.clear()
    for _ in range(3):
        group.heartbeat("a")
        group.pump()
    assert leader.log.commit_index == leader.log.last_index


def test_leader_pipelines_appends_within_bounds() -> None:
    group = Group(inflight_messages_max=3)
    leader = group.elect("a")
    for number in range(10):
        group.propose("a", b"%d" % number)
    assert len(group.waiting(AppendRequest, to="b")) == 3
    group.pump()
    assert leader.log.commit_index == leader.log.last_index


def test_leader_append_is_bounded_in_bytes() -> None:
    group = Group(append_bytes_max=1000)
    group.elect("a")
    group.hold_saves("a")
    for _ in range(6):
        assert not isinstance(group["a"].propose(b"x" * 400, group.now), Refusal)
    group.take("a")
    sizes = [sum(e.size_bytes for e in m.entries) for m in group.waiting(AppendRequest, to="b")]
    assert len(sizes) == 3
    assert max(sizes) <= 1000


def test_proposals_beyond_the_bound_are_refused() -> None:
    group = Group(uncommitted_entries_max=3, append_bytes_max=100, uncommitted_bytes_max=1000)
    leader = group.elect("a")
    assert leader.propose(b"x" * 101, group.now) is Refusal.TOO_LARGE
    for _ in range(3):
        assert not isinstance(leader.propose(b"x", group.now), Refusal)
    assert leader.propose(b"x", group.now) is Refusal.QUEUE_FULL
    group.take("a")
    group.pump()
    assert not isinstance(leader.propose(b"x", group.now), Refusal)


def test_proposal_bytes_beyond_the_bound_are_refused() -> None:
    group = Group(uncommitted_bytes_max=100, append_bytes_max=50)
    leader = group.elect("a")
    for _ in range(3):
        for _ in range(2):
            assert not isinstance(leader.propose(b"x" * 50, group.now), Refusal)
        assert leader.propose(b"x", group.now) is Refusal.QUEUE_BYTES_FULL
        group.take("a")
        group.pump()


# -- reads (diss. 6.4)


def test_read_is_answered_only_after_a_round_of_its_own() -> None:
    group = Group()
    leader = group.elect("a")
    group.heartbeat("a")
    for message in group.waiting(HeartbeatRequest):
        group.deliver(message)
    answers = group.waiting(HeartbeatReply)
    group.network.clear()
    assert leader.read_index("read", group.now) is None
    group.take("a")
    for reply in answers:
        group.deliver(reply)
    assert not group.reads, "these answers are to an earlier round"
    group.pump()
    assert [context for _, _, context in group.reads] == ["read"]


def test_read_on_a_deposed_leader_is_never_answered() -> None:
    group = Group()
    group.elect("a")
    group.elect("b", among="bc")
    group["a"].read_index("read", group.now)
    group.take("a")
    group.pump()
    assert not group.reads


def test_read_on_a_leader_deposed_without_its_knowledge_is_never_answered() -> None:
    group = Group("abcde", check_quorum_ms=60_000)
    group.elect("a")
    group.elect("b", among="bcde")
    group.propose("b", b"new")
    group.pump_between("bcde")
    assert group.role("a") is Role.LEADER
    assert group["a"].read_index("read", group.now) is None
    group.take("a")
    group.pump_between("a")
    group.heartbeat("a")
    group.pump()
    assert not group.reads


def test_read_waits_for_an_entry_of_the_leaders_term() -> None:
    """A new leader may not know yet how much its predecessor had committed."""
    group = Group(logs={"a": [1], "b": [1], "c": [1]}, terms={"a": 1, "b": 1, "c": 1})
    group.tick("a", after_s=QUIET_S)
    group.pump(lambda m: isinstance(m, VoteRequest | VoteReply))
    leader = group["a"]
    assert leader.read_index("read", group.now) is None
    group.take("a")
    group.pump(lambda m: not isinstance(m, AppendRequest))
    assert not group.reads
    for _ in range(2):
        group.heartbeat("a")
        group.pump()
    ((_, index, _),) = group.reads
    assert index >= 2


def test_reads_beyond_the_bound_are_refused() -> None:
    group = Group(pending_reads_max=2)
    leader = group.elect("a")
    assert leader.read_index(1, group.now) is None
    assert leader.read_index(2, group.now) is None
    assert leader.read_index(3, group.now) is Refusal.READS_FULL
    group.take("a")
    group.pump()
    assert leader.read_index(3, group.now) is None
