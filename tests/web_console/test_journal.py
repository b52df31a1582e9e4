"""Tests of what a reader gets that comes back: what it has missed, or whole values."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon.web_console import journal as journals
from koinon.web_console.journal import Entry, Journal


def numbered(count: int, topic: str = "t") -> Journal:
    journal = Journal("me")
    for n in range(1, count + 1):
        journal.add(topic, f"news {n}", lambda: f"all of {topic}")
    return journal


def datas(entries: list[Entry]) -> list[str]:
    return [entry.data for entry in entries]


def test_reader_that_comes_back_gets_what_it_has_missed() -> None:
    journal = numbered(5)
    known = journal.number_of("me.3")
    assert datas(journal.after(known)) == ["news 4", "news 5"]
    assert journal.after(5) == []


@pytest.mark.parametrize(
    "entry_id", ["", "me", "me.", "other.3", "me.6", "me.-1", "me.x", "me.²", "me." + "9" * 30]
)
def test_reader_without_a_known_entry_gets_whole_values(entry_id: str) -> None:
    journal = numbered(5)
    assert journal.number_of(entry_id) is None
    assert datas(journal.after(None)) == ["all of t"]


def test_reader_that_is_too_far_behind_gets_whole_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "ENTRIES_MAX", 3)
    journal = numbered(10)
    assert datas(journal.after(7)) == ["news 8", "news 9", "news 10"]
    assert datas(journal.after(6)) == ["all of t"]


def test_journal_keeps_no_more_characters_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "CHARS_MAX", 20)
    journal = numbered(5)
    assert datas(journal.after(1)) == ["all of t"]
    assert datas(journal.after(2)) == ["news 3", "news 4", "news 5"]


def test_whole_values_can_be_continued_only_after_the_last_of_them() -> None:
    journal = numbered(2, "table")
    journal.add("moment", "news 3", lambda: "all of moment")
    whole = journal.after(None)
    assert [(journal.id_of(e), e.topic) for e in whole] == [(None, "table"), ("me.3", "moment")]
    assert journal.after(journal.number_of("me.3")) == []


@given(
    news=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=40),
    leaves=st.lists(st.integers(0, 40), max_size=6),
    kept=st.integers(1, 10),
)
def test_reader_that_comes_and_goes_ends_with_the_newest_values(
    news: list[tuple[str, int]], leaves: list[int], kept: int
) -> None:
    """Values are sums, and news what is added: so a reader that misses any, or gets it twice, ends
    with another sum.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journals, "ENTRIES_MAX", kept)
        journal, sums, last_id = Journal("me"), dict.fromkeys("abc", 0), ""
        seen: dict[str, int] = {}

        def whole_of(topic: str) -> Callable[[], str]:
            return lambda: json.dumps([True, sums[topic]])

        def read() -> None:
            nonlocal last_id
            for entry in journal.after(journal.number_of(last_id)):
                whole, value = json.loads(entry.data)
                seen[entry.topic] = value if whole else seen[entry.topic] + value
                last_id = journal.id_of(entry) or last_id

        for place, (topic, more) in enumerate(news):
            first = not sums[topic] and topic not in seen
            sums[topic] += more
            data = [True, sums[topic]] if first else [False, more]
            journal.add(topic, json.dumps(data), whole_of(topic))
            if place not in leaves:
                read()
        read()
        assert seen == {topic: value for topic, value in sums.items() if topic in seen}
        assert set(seen) == {topic for topic, _ in news}
