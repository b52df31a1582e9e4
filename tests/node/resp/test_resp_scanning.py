"""SCAN's cursors and patterns: a key that is there throughout is seen, whatever else happens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_node.resp.commands.cursors import (
    HashPage,
    compiled,
    cursor_of,
    literal_prefix,
    position_of,
)


@given(partition_id=st.integers(0, 65_535), hashed=st.integers(0, (1 << 32) - 1))
def test_cursor_is_a_number_of_64_bits_and_says_where(partition_id: int, hashed: int) -> None:
    cursor = cursor_of(partition_id, hashed)
    assert 0 <= cursor < 1 << 64
    assert position_of(cursor) == (partition_id, hashed)


def page_of(keys: Sequence[bytes], first_hash: int, size: int) -> HashPage:
    page = HashPage(first_hash, size)
    page.offer(keys)
    return page


@given(
    kept=st.sets(st.binary(max_size=8), max_size=80),
    changing=st.lists(st.sets(st.binary(max_size=8), max_size=30), min_size=1, max_size=5),
    size=st.integers(1, 20),
)
def test_every_key_that_stays_is_on_a_page_whatever_comes_and_goes(
    kept: set[bytes], changing: list[set[bytes]], size: int
) -> None:
    seen: set[bytes] = set()
    first: int | None = 0
    turn = 0
    while first is not None:
        page = page_of(sorted(kept | changing[turn % len(changing)]), first, size)
        assert page.next_hash is None or page.next_hash > first
        seen.update(page.keys)
        first = page.next_hash
        turn += 1
    assert kept <= seen


def test_keys_of_one_hash_are_on_one_page() -> None:
    same = [b"plumless", b"buckeroo"]
    assert crc32(same[0]) == crc32(same[1])
    others = [b"%d" % n for n in range(50)]
    for size in range(1, 52):
        keys: list[bytes] = []
        first: int | None = 0
        while first is not None:
            page = page_of(same + others, first, size)
            keys += page.keys
            first = page.next_hash
        assert sorted(keys) == sorted(same + others), size


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        (b"*", [b"", b"a\nb", b"\xff"], []),
        (b"user:*", [b"user:", b"user:1"], [b"user", b"xuser:1"]),
        (b"h?llo", [b"hello", b"h\nllo"], [b"hllo", b"heello"]),
        (b"h[ae]llo", [b"hello", b"hallo"], [b"hillo"]),
        (b"h[^e]llo", [b"hallo"], [b"hello"]),
        (b"h[a-c]llo", [b"hbllo"], [b"hdllo"]),
        (b"h[c-a]llo", [b"hbllo"], [b"hdllo"]),
        (b"a\\*b", [b"a*b"], [b"axb"]),
        (b"a.b", [b"a.b"], [b"axb"]),
        (b"[\\]x]", [b"]", b"x"], [b"\\"]),
        (b"[a-", [b"a", b"-"], [b"b"]),
        (b"[]", [], [b"", b"]"]),
        (b"trailing\\", [b"trailing\\"], [b"trailing"]),
    ],
)
def test_pattern_fits_what_it_fits_in_redis(
    pattern: bytes, fitting: list[bytes], others: list[bytes]
) -> None:
    expression = compiled(pattern)
    assert [key for key in fitting + others if expression.fullmatch(key)] == fitting
    assert all(key.startswith(literal_prefix(pattern)) for key in fitting) or b"\\" in pattern


@given(
    pattern=st.lists(st.sampled_from([b"*", b"*", b"?", b"a", b"b", b"[ab]", b"[^a]"]), max_size=9),
    key=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=9).map(b"".join),
)
def test_pattern_of_many_stars_fits_as_in_any_way_of_matching(
    pattern: list[bytes], key: bytes
) -> None:
    plain = b"".join({b"*": b".*", b"?": b"."}.get(part, part) for part in pattern)
    fits = re.compile(plain, re.DOTALL).fullmatch(key) is not None
    assert (compiled(b"".join(pattern)).fullmatch(key) is not None) == fits


def test_pattern_of_many_stars_is_not_tried_in_all_ways() -> None:
    expression = compiled(b"*a" * 25 + b"*b")  # 10**41 ways, of which none fits
    assert expression.fullmatch(b"a" * 500) is None
    assert expression.fullmatch(b"a" * 499 + b"b") is not None


@given(pattern=st.lists(st.sampled_from([b"*", b"?", b"[", b"]", b"^", b"-", b"\\", b"a", b"."])))
def test_any_pattern_compiles(pattern: list[bytes]) -> None:
    compiled(b"".join(pattern)).fullmatch(b"aaa")


@pytest.mark.parametrize(
    ("pattern", "prefix"),
    [(b"user:*", b"user:"), (b"*", b""), (b"abc", b"abc"), (b"a[b]", b"a"), (b"a\\*", b"a")],
)
def test_prefix_of_a_pattern_is_what_is_meant_as_it_stands(pattern: bytes, prefix: bytes) -> None:
    assert literal_prefix(pattern) == prefix
