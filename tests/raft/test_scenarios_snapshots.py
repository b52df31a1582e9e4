"""Compaction, and snapshots to followers that are far behind: directed schedules.

Most are from the Raft paper or Ongaro's dissertation ("diss.").
"""

from __future__ import annotations

from dataclasses import replace

from koinon_coordinator.core.raft import (
    Configuration,
    EntryKind,
    ProgressState,
    SnapshotChunk,
    SnapshotReply,
)

from .group import Group, addresses

# -- snapshots (paper 7)


def lagging_group(state: bytes = b"0123456789" * 5) -> Group:
    """`c` has missed everything that `a` has compacted since."""
    group = Group(snapshot_chunk_bytes=16, retained_entries_max=0)
    group.elect("a")
    for _ in range(5):
        group.propose("a")
        group.pump_between("ab")
    group.compact("a", state)
    return group


def start_snapshot(group: Group) -> None:
    while not group.waiting(SnapshotChunk, to="c"):
        group.heartbeat("a")
        for message in list(group.network):
            if not isinstance(message, SnapshotChunk):
                group.deliver(message)


def test_snapshot_lagging_follower_catches_up_in_chunks() -> None:
    group = lagging_group()
    start_snapshot(group)
    group.pump()
    assert group["c"].log.snapshot.data == b"0123456789" * 5
    group.propose("a")
    group.pump()
    assert group["c"].log.last_index == group["a"].log.last_index
    assert group["a"].progress["c"].state is ProgressState.REPLICATE


def test_snapshot_one_chunk_is_under_way_at_a_time() -> None:
    group = lagging_group()
    start_snapshot(group)
    group.heartbeat("a")
    assert len(group.waiting(SnapshotChunk)) == 1


def test_snapshot_lost_chunk_is_sent_again() -> None:
    group = lagging_group()
    start_snapshot(group)
    group.deliver(group.waiting(SnapshotChunk)[0])
    group.deliver(group.waiting(SnapshotReply)[0])
    (second,) = group.waiting(SnapshotChunk)
    group.network.clear()
    assert second.offset == 16
    for _ in range(8):
        group.heartbeat("a")
        group.pump()
    assert group["c"].log.snapshot.index == group["a"].log.snapshot.index


def test_snapshot_chunks_out_of_order_or_doubled_are_not_taken() -> None:
    group = lagging_group()
    start_snapshot(group)
    (first,) = group.waiting(SnapshotChunk)
    group.network.clear()
    state = b"0123456789" * 5
    third = replace(first, offset=32, data=state[32:48])
    second = replace(first, offset=16, data=state[16:32])
    fourth = replace(first, offset=48, data=state[48:])
    for chunk, wanted in [(first, 16), (third, 16), (first, 16), (second, 32), (third, 48)]:
        group.deliver(chunk)
        (reply,) = group.waiting(SnapshotReply)
        assert reply.next_offset == wanted
        group.network.clear()
    group.deliver(fourth)
    assert group["c"].log.snapshot.data == state


def test_snapshot_wrong_checksum_is_not_installed() -> None:
    group = lagging_group()
    start_snapshot(group)
    (first,) = group.waiting(SnapshotChunk)
    whole = b"X" * first.size_bytes
    group.network.clear()
    group.deliver(replace(first, data=whole))
    assert group["c"].log.snapshot.index == 0
    (reply,) = group.waiting(SnapshotReply)
    assert (reply.next_offset, reply.match_index) == (0, 0)


def test_snapshot_older_than_what_is_committed_changes_nothing() -> None:
    group = lagging_group(state=b"older")
    start_snapshot(group)
    (late,) = group.waiting(SnapshotChunk)
    group.pump()
    for _ in range(3):
        group.propose("a")
        group.heartbeat("a")
        group.pump()
    group.compact("c", b"newer")
    commit_index = group["c"].log.commit_index
    group.deliver(late)
    (reply,) = group.waiting(SnapshotReply)
    assert group["c"].log.snapshot.data == b"newer"
    assert reply.match_index == group["c"].log.commit_index == commit_index


def test_snapshot_resumes_under_a_new_leader_that_has_the_same() -> None:
    group = lagging_group()
    group.compact("b", b"0123456789" * 5)
    start_snapshot(group)
    group.deliver(group.waiting(SnapshotChunk)[0])
    group.network.clear()
    first = group["a"].log.snapshot
    assert first.checksum == group["b"].log.snapshot.checksum
    second = SnapshotChunk(
        term=2,
        sender="b",
        to="c",
        round_id=1,
        snapshot_index=first.index,
        snapshot_term=first.term,
        configuration=first.configuration,
        size_bytes=50,
        checksum=first.checksum,
        offset=16,
        data=first.data[16:],
    )
    group.deliver(second)
    assert group["c"].log.snapshot.data == first.data


def test_snapshot_is_acknowledged_only_when_durable() -> None:
    group = lagging_group(state=b"small")
    start_snapshot(group)
    group.hold_saves("c")
    group.deliver_to("c")
    assert not [r for r in group.waiting(SnapshotReply) if r.match_index]
    group.release_saves("c")
    assert [r.match_index for r in group.waiting(SnapshotReply)] == [6]


def test_snapshot_outdated_by_a_compaction_under_way_is_followed_by_another() -> None:
    group = lagging_group()
    start_snapshot(group)
    for _ in range(3):
        group.propose("a")
        for message in list(group.network):
            if not isinstance(message, SnapshotChunk) and message.to != "c":
                group.deliver(message)
    group.heartbeat("a")
    for message in list(group.network):
        if not isinstance(message, SnapshotChunk):
            group.deliver(message)
    group.compact("a", b"newer")
    for _ in range(6):
        group.heartbeat("a")
        group.pump()
    assert group["c"].log.last_index == group["a"].log.last_index


def test_snapshot_follower_that_conflicts_below_the_leaders_base_gets_one() -> None:
    """All that they could agree on is compacted at the leader."""
    group = Group(
        logs={"a": [1, 3, 3, 3], "b": [1, 3, 3, 3], "c": [1, 2, 2, 2, 2]},
        terms={"a": 3, "b": 3, "c": 2},
        retained_entries_max=0,
    )
    group.elect("a", among="ab")
    group.compact("a")
    for _ in range(4):
        group.heartbeat("a")
        group.pump()
    assert group["c"].log.last_index == group["a"].log.last_index


def test_snapshot_entries_kept_behind_it_spare_a_slightly_late_follower() -> None:
    group = Group(retained_entries_max=100)
    group.elect("a")
    for _ in range(5):
        group.propose("a")
        group.pump_between("ab")
    group.compact("a")
    for _ in range(3):
        group.heartbeat("a")
        group.pump()
    assert group["c"].log.last_index == group["a"].log.last_index
    assert group["c"].log.snapshot.index == 0


def test_compaction_survives_a_restart() -> None:
    group = lagging_group(state=b"state")
    core = group.boot("a")
    assert core.log.snapshot.data == b"state"
    assert core.log.last_index == 6
    assert core.log.commit_index == 6


def test_snapshot_carries_the_configuration() -> None:
    group = Group("abc", retained_entries_max=0)
    group.elect("a")
    group["a"].add_learner("d", "host-d:1", group.now)
    group.take("a")
    group.pump()
    group.propose("a")
    group.pump()
    group.compact("a")
    group.add_process("d")
    for _ in range(8):
        group.heartbeat("a")
        group.pump()
    assert group["d"].log.snapshot.index > 0
    assert group["d"].configuration == Configuration(
        voters=addresses("abc"), learners=addresses("d")
    )


def test_leader_opens_its_term_with_a_noop() -> None:
    leader = Group().elect("a")
    assert leader.log.slice(1, 1)[0].kind is EntryKind.NOOP
