"""A member of a group: what it holds after each answer, and what it may commit."""

from __future__ import annotations

import pytest

from koinon.core.feeds import FeedPart, PartitionPosition
from koinon.core.groups import (
    BEGINNING,
    PROGRESS_MIN,
    PROGRESS_S,
    Grant,
    Membership,
    OwnershipChange,
    split,
)

SESSION_S = 10.0
AT_5 = PartitionPosition(5)


def grants(*partition_ids: int, generation: int = 1) -> dict[int, Grant]:
    return {p: Grant(1, generation) for p in partition_ids}


def owning(*partition_ids: int) -> Membership:
    """Return a member that owns these partitions since the time 0."""
    member = Membership(SESSION_S)
    for p in member.answered(grants(*partition_ids), 1, 0.0, 0.0):
        assert member.claimed(p, Grant(1, 1), BEGINNING, 0.0)
    assert member.changes() == OwnershipChange(granted=list(partition_ids))
    member.told()
    return member


def test_partition_is_owned_once_its_cursor_is_claimed() -> None:
    member = Membership(SESSION_S)
    assert member.answered(grants(1, 2), 7, 0.0, 0.1) == [1, 2]
    assert member.held() == {1: [(1, 1), (2, 1)]}
    assert not member.changes()
    assert member.claimed(2, Grant(1, 1), AT_5, 0.2)
    assert member.changes() == OwnershipChange(granted=[2])
    assert member.owned() == [2]
    assert not member.changes()
    assert member.answered(grants(1, 2), 7, 3.0, 3.0) == [], "it is not claimed twice"


def test_late_claim_of_an_older_grant_counts_for_nothing() -> None:
    member = Membership(SESSION_S)
    member.answered(grants(1), 1, 0.0, 0.0)
    member.answered(grants(1, generation=2), 2, 0.0, 0.0)
    assert not member.claimed(1, Grant(1, 1), AT_5, 0.0)
    assert member.claimed(1, Grant(1, 2), AT_5, 0.0)
    assert not member.claimed(1, Grant(1, 2), BEGINNING, 0.0), "one of two answers"


def test_revoked_partition_is_held_until_the_consumer_was_told() -> None:
    member = owning(1, 2)
    member.answered(grants(2), 2, 1.0, 1.0)
    assert member.owned() == [2]
    assert member.held() == {1: [(1, 1), (2, 1)]}
    assert member.changes() == OwnershipChange(revoked=[1])
    assert member.held() == {1: [(1, 1), (2, 1)]}
    assert member.told() == [1]
    assert member.held() == {1: [(2, 1)]}
    assert member.told() == []


def test_partition_granted_anew_is_not_given_back_by_the_news_of_its_loss() -> None:
    member = owning(1)
    member.answered({}, 2, 1.0, 1.0)
    assert member.changes().revoked == [1]
    member.refused(1, 1)  # meanwhile: another member has claimed it
    member.answered(grants(1, generation=3), 3, 2.0, 2.0)
    assert member.told() == []
    assert member.holds(1, 3)


def test_lost_partition_is_told_before_it_is_granted_again() -> None:
    member = owning(1)
    member.refused(1, 1)
    member.answered(grants(1, generation=2), 2, 1.0, 1.0)
    member.claimed(1, Grant(1, 2), AT_5, 1.0)
    assert member.changes() == OwnershipChange(revoked=[1])
    assert member.changes() == OwnershipChange(granted=[1])


def test_generation_is_held_once() -> None:
    """A commit of changes that were delivered before the loss may still be under way."""
    member = owning(1, 2, 3)
    member.refused(1, 1)
    member.answered(grants(1, 3), 2, 1.0, 1.0)
    member.changes()
    assert member.told() == [2]
    assert member.answered(grants(1, 2, 3), 3, 2.0, 2.0) == []
    assert member.held() == {1: [(3, 1)]}
    assert member.expire(99.0)
    assert member.answered(grants(1, 2, 3), 3, 99.0, 99.0) == []
    assert member.answered(grants(1, 2, 3, generation=2), 4, 99.0, 99.0) == [1, 2, 3]


def test_everything_is_lost_at_the_end_of_the_session() -> None:
    member = owning(1)
    assert not member.expire(SESSION_S - 0.1)
    member.answered(grants(1, 2), 2, 5.0, 6.0)
    assert not member.expire(SESSION_S + 4.9)
    assert member.expire(SESSION_S + 5.0)
    assert member.held() == {}
    assert member.changes() == OwnershipChange(revoked=[1]), "the consumer never knew of 2"
    assert member.known_revision == 0
    assert not member.expire(99.0), "the next session begins with an answer"


def test_consumer_that_does_not_come_back_loses_what_was_revoked() -> None:
    member = owning(1, 2)
    member.answered(grants(2), 2, 1.0, 1.0)
    assert member.overdue(SESSION_S + 0.9) == []
    assert member.overdue(SESSION_S + 1.0) == [1]
    assert member.held() == {1: [(2, 1)]}
    assert member.changes() == OwnershipChange(revoked=[1])


def test_refusal_of_an_older_generation_loses_nothing() -> None:
    member = owning(1)
    member.refused(1, 0)
    assert member.owned() == [1]
    member.refused(1, 1)
    assert member.owned() == []


def test_what_is_handled_is_uncommitted_until_it_is_committed() -> None:
    member = owning(1)
    assert member.uncommitted() == {}
    member.deliver([FeedPart(1, 0, 2, BEGINNING, AT_5), FeedPart(9, 2, 3, BEGINNING, AT_5)])
    assert member.uncommitted() == {}, "it may not be handled"
    member.asked()
    assert member.uncommitted() == {1: (1, AT_5)}
    member.committed(1, 2, AT_5, 1.0)
    assert member.uncommitted(), "under another generation"
    member.committed(1, 1, AT_5, 1.0)
    assert member.uncommitted() == {}


def test_earlier_position_is_no_news() -> None:
    member = owning(1)
    member.deliver([FeedPart(1, 0, 2, BEGINNING, AT_5)])
    assert member.is_news(1, 1, AT_5)
    member.committed(1, 1, AT_5, 1.0)
    member.committed(1, 1, PartitionPosition(4), 1.0)
    assert not member.is_news(1, 1, PartitionPosition(4))
    assert not member.is_news(1, 1, AT_5)
    assert member.is_news(1, 2, BEGINNING), "of another generation: the primary decides"
    member.begun_again(1, 1, 2.0)
    assert not member.is_news(1, 1, AT_5), "it is of changes that come again"
    member.deliver([FeedPart(1, 0, 1, BEGINNING, PartitionPosition(0, 9, b"k"))])
    assert member.is_news(1, 1, PartitionPosition(0, 9, b"k"))


def test_progress_is_committed_late_and_never_over_changes() -> None:
    member = owning(1)
    far = {1: PartitionPosition(PROGRESS_MIN)}
    assert member.progress(far, PROGRESS_S - 1) == {}
    assert member.progress({1: PartitionPosition(PROGRESS_MIN - 1)}, PROGRESS_S) == {}
    assert member.progress(far, PROGRESS_S) == {1: (1, far[1])}
    member.deliver([FeedPart(1, 0, 1, BEGINNING, AT_5)])
    assert member.progress(far, PROGRESS_S) == {}


KEYS = [b"a", b"b", b"c", b"d"]
LIVE = FeedPart(3, 0, 4, PartitionPosition(1), PartitionPosition(9))


def after(*places: PartitionPosition) -> list[PartitionPosition]:
    return list(places)


@pytest.mark.parametrize(
    ("part", "versions", "at_most", "expected"),
    [
        (LIVE, [2, 3, 4, 5], 2, after(PartitionPosition(3), PartitionPosition(9))),
        (LIVE, [2, 3, 3, 5], 2, after(PartitionPosition(3), PartitionPosition(9))),
        (LIVE, [2, 2, 2, 2], 1, after(PartitionPosition(9))),
        (LIVE, [2, 3, 4, 5], 9, after(PartitionPosition(9))),
        (  # a backfill of one page
            LIVE,
            [5, 2, 3, 4],
            3,
            after(PartitionPosition(1, 9, b"\0c"), PartitionPosition(9)),
        ),
        (  # a page of a backfill, and the last page
            LIVE._replace(after=PartitionPosition(1, 8, b"\0d")),
            [2, 3, 4, 5],
            3,
            after(PartitionPosition(1, 8, b"\0c"), PartitionPosition(1, 8, b"\0d")),
        ),
        (
            LIVE._replace(before=PartitionPosition(1, 9, b"\0A")),
            [2, 3, 4, 5],
            3,
            after(PartitionPosition(1, 9, b"\0c"), PartitionPosition(9)),
        ),
    ],
)
def test_parts_have_positions_of_their_own(
    part: FeedPart, versions: list[int], at_most: int, expected: list[PartitionPosition]
) -> None:
    pieces = split(part, KEYS, versions, at_most)
    assert [piece.after for piece in pieces] == expected
    assert [piece.before for piece in pieces] == [part.before, *expected[:-1]]
    rows = [row for piece in pieces for row in range(piece.start, piece.end)]
    assert rows == list(range(4))
