"""The ring of written keys against a plain list."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from koinon_node.core.writes.recent_writes import RecentWrites


def append(journal: RecentWrites, *rows: tuple[int, int, bytes]) -> None:
    journal.append(
        np.array([row[0] for row in rows], np.uint32),
        np.array([row[1] for row in rows], np.uint64),
        [row[2] for row in rows],
    )


def test_journal_knows_nothing_of_before_it_began() -> None:
    journal = RecentWrites(np.array([7, 0], np.uint64))
    append(journal, (0, 8, b"a"), (1, 1, b"b"), (0, 9, b"c"), (0, 10, b"a"))
    assert journal.since(0, 6) is None
    assert journal.since(0, 7) == [b"a", b"c"]
    assert journal.since(0, 8) == [b"a", b"c"]
    assert journal.since(0, 10) == []


def test_journal_reset_forgets_what_was_entered() -> None:
    journal = RecentWrites(np.zeros(2, np.uint64))
    append(journal, (0, 50, b"other lineage"), (1, 3, b"b"))
    journal.reset(0, 20)
    append(journal, (0, 21, b"a"))
    assert journal.since(0, 19) is None
    assert journal.since(0, 20) == [b"a"]
    assert journal.since(1, 0) == [b"b"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12), st.integers(1, 7))
def test_journal_answers_all_or_that_it_does_not_know(chunks: list[list[int]], size: int) -> None:
    journal = RecentWrites(np.zeros(3, np.uint64), size)
    written: list[tuple[int, int, bytes]] = []
    for chunk in chunks:
        rows = [
            (p, len(written) + i + 1, b"%d" % ((len(written) + i) % 5)) for i, p in enumerate(chunk)
        ]
        append(journal, *rows)
        written += rows
    for p in range(3):
        mine = [row for row in written if row[0] == p]
        for after in range(len(written) + 1):
            expected = sorted({key for _, sequence, key in mine if sequence > after})
            kept = [row for row in written[-size:] if row[0] == p]
            lost = max((s for _, s, _ in written[:-size] if _partition(written, s) == p), default=0)
            answer = journal.since(p, after)
            assert answer == (expected if after >= lost else None), (kept, lost)


def _partition(written: list[tuple[int, int, bytes]], sequence: int) -> int:
    return written[sequence - 1][0]
