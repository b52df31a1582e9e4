"""Cursors of groups: what claims, commits and resets make of them, and how they are stored."""

from __future__ import annotations

import pytest

from koinon_node.core.formats.records import Record
from koinon_node.core.writes.cursor_updates import (
    BEGINNING,
    ClaimCursor,
    CommitCursor,
    CursorPosition,
    GroupCursor,
    ResetCursor,
    decode_cursor,
    encode_cursor,
)
from koinon_node.core.writes.updates import Change, Update
from koinon_proto.contract.errors import (
    CursorMovedError,
    StaleGenerationError,
    UnsupportedVersionError,
)

NOW = 1_000
HERE = CursorPosition(7, 9, b"\x00k")
NEXT = CursorPosition(9)
STORED = GroupCursor(5, HERE, 3, "m1")


def after(update: Update, stored: GroupCursor | None = STORED) -> GroupCursor:
    """Return the cursor that the update leaves."""
    record = Record(1, 0, 0, encode_cursor(stored)) if stored is not None else None
    decided = update.decide(record, NOW)
    assert decided.change is not Change.DELETE
    if decided.change is Change.LEAVE:
        assert stored is not None
        return stored
    assert decided.result == decided.value
    assert len(decided.value) <= update.size
    return decode_cursor(decided.value)


@pytest.mark.parametrize("cursor", [STORED, GroupCursor(2**64 - 1, NEXT, 0, "é" * 127)])
def test_cursor_is_read_as_it_was_written(cursor: GroupCursor) -> None:
    assert decode_cursor(encode_cursor(cursor)) == cursor


def test_cursor_of_another_format_is_refused() -> None:
    with pytest.raises(UnsupportedVersionError):
        decode_cursor(b"\x02" + encode_cursor(STORED)[1:])


def test_claim_makes_a_cursor_at_its_start() -> None:
    assert after(ClaimCursor(1, 1, "m", HERE), None) == GroupCursor(1, HERE, NOW, "m")
    unset = after(ClaimCursor(1, 1, "m"), None)
    assert unset == GroupCursor(1, BEGINNING, 0, "m")
    assert after(ClaimCursor(1, 2, "n", HERE), unset) == GroupCursor(2, HERE, NOW, "n")


def test_claim_keeps_the_position_of_the_owner_before() -> None:
    claimed = after(ClaimCursor(1, 6, "m2", NEXT))
    assert claimed == STORED._replace(generation=6, member="m2")


def test_claim_may_be_repeated() -> None:
    assert after(ClaimCursor(1, 5, "m1", NEXT)) == STORED


@pytest.mark.parametrize(
    "update",
    [
        ClaimCursor(1, 4, "m", NEXT),
        CommitCursor(1, 4, NEXT),
        CommitCursor(1, 6, NEXT),
        ResetCursor(1, 4, NEXT),
    ],
)
def test_update_of_another_generation_is_refused(update: Update) -> None:
    with pytest.raises(StaleGenerationError) as caught:
        after(update)
    assert caught.value.current_generation == 5
    assert not caught.value.retriable


def test_commit_without_a_cursor_is_refused() -> None:
    with pytest.raises(StaleGenerationError):
        after(CommitCursor(1, 1, NEXT), None)


def test_commit_moves_the_cursor() -> None:
    committed = after(CommitCursor(1, 5, NEXT))
    assert committed == GroupCursor(5, NEXT, NOW, "m1")
    assert after(CommitCursor(1, 5, NEXT, after=HERE)) == committed


def test_commit_after_another_position_is_refused_when_repeated() -> None:
    commit = CommitCursor(1, 5, NEXT, after=HERE)
    with pytest.raises(CursorMovedError):
        after(commit, after(commit))


def test_reset_moves_the_cursor_and_fences_its_owner() -> None:
    moved = after(ResetCursor(1, 6, NEXT))
    assert moved == GroupCursor(6, NEXT, NOW, "")
    with pytest.raises(StaleGenerationError):
        after(CommitCursor(1, 5, HERE), moved)


@pytest.mark.parametrize(
    "behind", [BEGINNING, CursorPosition(6, 99, b"z"), HERE._replace(bound=8), CursorPosition(7)]
)
def test_late_commit_does_not_put_the_cursor_back(behind: CursorPosition) -> None:
    assert after(CommitCursor(1, 5, behind)) == STORED
    assert after(CommitCursor(1, 5, behind, after=HERE)) == GroupCursor(5, behind, NOW, "m1")
