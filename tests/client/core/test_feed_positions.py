"""Tests of the positions of change feeds: their text comes back whole; no other is taken."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon.core.feeds import FeedPositions, PartitionPosition
from koinon_proto.contract.errors import InvalidArgumentError

numbers = st.integers(0, 2**64 - 1)
positions = st.builds(
    FeedPositions,
    st.text(max_size=20),
    numbers,
    st.dictionaries(
        st.integers(0, 65_535),
        st.builds(PartitionPosition, numbers, numbers, st.binary(max_size=501)),
        max_size=20,
    ),
)


@given(positions)
def test_text_of_positions_comes_back_whole(before: FeedPositions) -> None:
    text = str(before)
    assert text.isascii()
    assert text.isprintable()
    assert " " not in text
    assert FeedPositions.parse(f"{text}\n") == before
    assert before.reaches(before)


@given(positions, st.data())
def test_text_that_was_cut_or_changed_is_refused(
    before: FeedPositions, data: st.DataObject
) -> None:
    text = str(before)
    cut = text[: data.draw(st.integers(0, len(text) - 5))]
    with pytest.raises(InvalidArgumentError, match="not the text of feed positions"):
        FeedPositions.parse(cut)


def packed(content: bytes) -> str:
    return "koinon-feed-1." + base64.urlsafe_b64encode(zlib.compress(content)).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "koinon-feed-2.eJw=",
        "koinon-feed-1.***",
        packed(b"{}"),
        packed(b"[1,2,[]]"),
        packed(b'["c",0,[[0,-1,0,""]]]'),
        packed(b'["c",0,[[0,1,0,"zz"]]]'),
        packed(b'["c",0,[[0,18446744073709551616,0,""]]]'),
        packed(b'["c",0,[[true,1,0,""]]]'),
        packed(b"[" * 100_000),
        packed(b" " * (65 << 20)),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not the text of feed positions"):
        FeedPositions.parse(text)


def test_positions_reach_others_that_are_nowhere_further() -> None:
    start = FeedPositions("c", 0, {0: PartitionPosition(5), 1: PartitionPosition(0, 9, b"k")})
    later = FeedPositions("c", 0, {0: PartitionPosition(5), 1: PartitionPosition(9)})
    assert later.reaches(start)
    assert not start.reaches(later)
    assert not later.without(1).reaches(start)
    assert not FeedPositions("d", 0, later.partitions).reaches(start)
    assert later.without(1).partitions == {0: PartitionPosition(5)}
