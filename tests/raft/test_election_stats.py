"""The count of recent elections, by which an operator sees leadership that does not stay."""

from __future__ import annotations

from koinon_coordinator.raft.election_stats import WINDOW_S, ElectionHistory


def test_history_first_leader_is_no_change_and_later_ones_are() -> None:
    history = ElectionHistory(100.0)
    assert history.recent(101.0).terms == 0
    history.note(101.0, 10, None)
    history.note(102.0, 10, "c1")
    history.note(102.5, 10, "c1")
    quiet = history.recent(110.0)
    assert (quiet.leader_changes, quiet.terms, quiet.watched_s, quiet.quiet_s) == (0, 0, 10.0, 9.0)
    history.note(111.0, 11, None)
    history.note(112.0, 12, "c1")  # itself again
    history.note(113.0, 13, "c2")
    seen = history.recent(114.0)
    assert (seen.leader_changes, seen.terms, seen.quiet_s) == (2, 3, 1.0)


def test_history_forgets_what_is_older_than_its_window_and_is_bounded() -> None:
    history = ElectionHistory(0.0)
    for term in range(1, 3_000):
        history.note(term * 0.1, term, f"c{term % 3}")
    assert history.recent(300.0).leader_changes < 1_000
    history.note(400.0, 3_000, "c1")
    later = history.recent(400.0 + WINDOW_S - 1)
    assert (later.leader_changes, later.terms) == (1, 1)
    last = history.recent(400.0 + WINDOW_S + 1)
    assert (last.leader_changes, last.terms, last.watched_s) == (0, 0, WINDOW_S)


def test_history_of_terms_without_a_leader_counts_terms() -> None:
    history = ElectionHistory(0.0)
    for term in range(5, 25):
        history.note(float(term), term, None)
    assert (history.recent(30.0).leader_changes, history.recent(30.0).terms) == (0, 19)
