"""The budget of bytes: who is read, and who is cut."""

from __future__ import annotations

from koinon_node.resp.memory_budget import (
    BUDGET_BYTES,
    MIB,
    OWED_BYTES,
    PATIENCE_S,
    QUEUED_BYTES,
    STRANGERS_BYTES,
    Holder,
    MemoryBudget,
)

LARGE = 16 * MIB


class Peer:
    """A connection that asks for room for its argument whenever it may."""

    def __init__(self, budget: MemoryBudget, *, is_known: bool = True, coming: int = 0) -> None:
        self.budget = budget
        self.is_known = is_known
        self.owed, self.coming = 0, coming
        self.is_read = True
        self.aborted = 0
        self.read_on()

    def read_on(self) -> None:
        if self.coming:
            self.is_read = self.budget.hold(self, 0, self.owed, self.coming)

    def abort(self) -> None:
        self.aborted += 1


class Counted:
    """A budget with a clock, and the cuts that it told of."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cuts: list[tuple[int, int]] = []
        self.budget = MemoryBudget(lambda: self.now, self.note)

    def note(self, count: int, size: int, first: Holder) -> None:
        self.cuts.append((count, size))


def test_large_arguments_are_read_in_turn_as_there_is_room() -> None:
    counted = Counted()
    peers = [Peer(counted.budget, coming=LARGE) for _ in range(10)]
    read = [peer for peer in peers if peer.is_read]
    assert read == peers[: len(read)]
    assert 0 < counted.budget.owed_bytes == LARGE * len(read) <= OWED_BYTES
    small = Peer(counted.budget)
    assert counted.budget.hold(small, 0, 20_000), "what is small needs no room"
    for done in range(10 - len(read)):
        counted.budget.release(peers[done])
        assert [peer.is_read for peer in peers] == [at <= done + len(read) for at in range(10)]
    assert not counted.cuts


def test_who_keeps_others_waiting_is_cut_and_who_keeps_nobody_waiting_is_not() -> None:
    counted = Counted()
    slow = [Peer(counted.budget, coming=LARGE) for _ in range(4)]
    assert all(peer.is_read for peer in slow)
    counted.now = 10 * PATIENCE_S
    counted.budget.cut_slow()
    assert not counted.cuts
    late = Peer(counted.budget, coming=LARGE)
    assert not late.is_read
    counted.budget.cut_slow()
    assert counted.cuts == [(1, LARGE)]
    assert late.is_read
    counted.budget.cut_slow()
    assert len(counted.cuts) == 1


def test_many_are_cut_at_once_and_each_only_once() -> None:
    counted = Counted()
    peers = [Peer(counted.budget) for _ in range(20_000)]
    for peer in peers:
        counted.budget.hold(peer, 0, 16 * 1024)  # all that it owes, it keeps
    assert counted.budget.owed_bytes <= OWED_BYTES
    assert {peer.aborted for peer in peers} == {0, 1}
    kept = OWED_BYTES / (16 * 1024)
    assert sum(peer.aborted for peer in peers) >= 20_000 - kept
    assert len(counted.cuts) < 24, "a pass frees an eighth: it does not go through all for each"


def test_strangers_have_a_small_share_and_are_cut_before_those_who_owe_more() -> None:
    counted = Counted()
    known = Peer(counted.budget)
    counted.budget.hold(known, 0, 60 * MIB)
    strangers = [Peer(counted.budget, is_known=False) for _ in range(400)]
    for stranger in strangers:
        counted.budget.hold(stranger, 0, 160 * 1024)
    owed = sum(160 * 1024 for stranger in strangers if not stranger.aborted)
    assert owed <= STRANGERS_BYTES
    assert not known.aborted
    left = next(stranger for stranger in strangers if not stranger.aborted)
    counted.budget.become_known(left)
    counted.budget.hold(left, 0, 30 * MIB)
    counted.budget.hold(known, 0, 63 * MIB)
    assert all(stranger.aborted for stranger in strangers if stranger is not left)
    assert not left.aborted


def test_commands_that_wait_for_this_node_stop_reading_and_cut_nobody() -> None:
    counted = Counted()
    peers = [Peer(counted.budget) for _ in range(100)]
    for peer in peers:
        counted.budget.hold(peer, MIB, 0)
        assert counted.budget.is_short is (counted.budget.queued_bytes > QUEUED_BYTES)
    assert counted.budget.held_bytes < BUDGET_BYTES
    for peer in peers:
        counted.budget.release(peer)
    assert not counted.budget.is_short
    assert counted.budget.held_bytes == 0
    assert not counted.cuts


def test_where_all_who_hold_the_room_wait_for_more_the_first_goes_on() -> None:
    counted = Counted()
    peers = [Peer(counted.budget) for _ in range(12)]
    for peer in peers:
        peer.owed = peer.coming = 6 * MIB
        counted.budget.hold(peer, 0, peer.owed)
    for peer in peers:
        peer.read_on()
    assert not any(peer.is_read for peer in peers)
    counted.budget.cut_slow()
    assert peers[0].is_read
    assert sum(peer.aborted for peer in peers) == sum(count for count, _ in counted.cuts) == 1
