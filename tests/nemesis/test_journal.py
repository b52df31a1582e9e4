"""Histories survive the way through files, and mean the same to the checker."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkers.history import NEVER, Kind, Outcome
from tests.checkers.linearizability import check
from tests.nemesis.journal import (
    CONDITION,
    GENERATION,
    Journal,
    merge,
    operations,
    read_history,
    write_history,
)


def test_history_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    first, second = Journal(tmp_path / "a"), Journal(tmp_path / "b", first=5_000)
    write = first.invoke(0, "write", "k", "v")
    read = second.invoke(0, "read", "k", None)
    write.ok(version=7)
    second.note("begin split", ["n1"])
    read.ok(value="v", version=7)
    lines = merge([tmp_path / "a", tmp_path / "b"])
    write_history(tmp_path / "history.jsonl", lines)
    assert read_history(tmp_path / "history.jsonl") == lines
    assert [line["index"] for line in lines] == list(range(5))
    assert [line["type"] for line in lines] == ["invoke", "invoke", "ok", "info", "ok"]
    assert [line["process"] for line in lines] == [0, 5_000, 0, "nemesis", 5_000]
    put, get = operations(lines)
    assert (put.kind, put.value, put.version, put.outcome) == (Kind.PUT, b"v", 7, Outcome.OK)
    assert (get.kind, get.value, get.version) == (Kind.GET, b"v", 7)
    assert put.invoked_at < get.invoked_at < put.completed_at < get.completed_at


def test_process_of_unknown_fate_never_comes_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    journal.invoke(2, "write", "k", "v").info("no answer")
    journal.invoke(2, "cas", "k", None, if_version=3).fail(CONDITION, version=9)
    lines = merge([tmp_path / "a"])
    assert [line["process"] for line in lines] == [2, 2, 2 + GENERATION, 2 + GENERATION]
    unknown, refused = operations(lines)
    assert (unknown.outcome, unknown.completed_at) == (Outcome.UNKNOWN, NEVER)
    assert (refused.kind, refused.condition) == (Kind.DELETE, 3)
    assert (refused.outcome, refused.version) == (Outcome.REFUSED, 9)


def test_line_that_was_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    journal.invoke(0, "write", "k", "v")
    with (tmp_path / "a").open("a") as file:
        file.write('{"time": 12, "proc')
    lines = merge([tmp_path / "a"])
    assert [line["type"] for line in lines] == ["invoke"]
    assert operations(lines)[0].outcome is Outcome.UNKNOWN


def test_batches_rows_that_no_read_finds_are_lost(tmp_path: Path) -> None:
    """The answer to a batch names no versions; a read's does."""
    journal = Journal(tmp_path / "a")
    for row in range(2):
        journal.invoke(row, "write", f"once/{row}", "v").ok()
    journal.invoke(0, "read", "once/0", None).ok(value="v", version=9)
    journal.invoke(1, "read", "once/1", None).ok(value=None, version=0)
    (violation,) = check(operations(merge([tmp_path / "a"])))
    assert violation.key == b"once/1"
    assert "lost" in violation.reason


def test_each_line_is_json_of_its_own(tmp_path: Path) -> None:
    Journal(tmp_path / "a").invoke(0, "write", "k", 'a "quoted"\nvalue', ttl_ms=5).ok(version=1)
    texts = (tmp_path / "a").read_text().splitlines()
    assert len(texts) == 2
    assert all(json.loads(text)["f"] == "write" for text in texts)
