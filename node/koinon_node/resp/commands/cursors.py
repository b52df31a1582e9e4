"""SCAN's cursors and patterns. Pure.

A cursor is a 64-bit number, and the node keeps no state about it. It names the next partition and,
in a partition with too many keys for one page, the first hash. Such a partition is scanned in the
order of its keys' CRC-32, as Redis scans its hash table: a scan returns every key that exists from
its beginning to its end, whatever else is written or deleted.

    cursor = partition_id << 32 | hash      0: from the start, and at the end
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from zlib import crc32

_HASH_BITS = 32
_HASH_END = 1 << _HASH_BITS
_SPECIAL = re.compile(rb"[*?\[\\]")


def cursor_of(partition_id: int, first_hash: int) -> int:
    """Return the cursor of the partition's keys from this hash on."""
    return partition_id << _HASH_BITS | first_hash


def position_of(cursor: int) -> tuple[int, int]:
    """Return (partition_id, first hash) of a cursor."""
    return cursor >> _HASH_BITS, cursor & (_HASH_END - 1)


class HashPage:
    """Selects a page of one partition: the ``size`` keys with the lowest hashes from ``first_hash``
    on. All keys of the partition are offered, in any order.
    """

    def __init__(self, first_hash: int, size: int) -> None:
        self._first = first_hash
        self._size = size
        self._heap: list[tuple[int, bytes]] = []  # (-hash, key): the highest hash is on top
        self._end = _HASH_END  # keys from this hash on belong to the next page

    def offer(self, keys: Iterable[bytes]) -> None:
        """Add those of the keys that belong to the page. Each key may be offered once."""
        for key in keys:
            hashed = crc32(key)
            if self._first <= hashed < self._end:
                heapq.heappush(self._heap, (-hashed, key))
                if len(self._heap) > self._size:
                    self._drop_last()

    def _drop_last(self) -> None:
        """Move the highest hash with all its keys to the next page, unless it is the only hash."""
        last = self._heap[0][0]
        if all(negative == last for negative, _ in self._heap):
            return
        self._end = -last
        while self._heap[0][0] == last:
            heapq.heappop(self._heap)

    @property
    def keys(self) -> list[bytes]:
        return [key for _, key in self._heap]

    @property
    def next_hash(self) -> int | None:
        """The first hash of the next page, or None if there is none."""
        return self._end if self._end < _HASH_END else None


def literal_prefix(pattern: bytes) -> bytes:
    """Return the prefix of all keys that match the pattern."""
    found = _SPECIAL.search(pattern)
    return pattern[: found.start()] if found else pattern


def compiled(pattern: bytes) -> re.Pattern[bytes]:
    """Compile Redis's glob (``*``, ``?``, ``[a-c]``, ``[^a]``, and backslash as the escape) into a
    regular expression for whole keys. The text between two stars is matched at its first
    occurrence, without backtracking: otherwise a pattern of many stars could take exponential time.

    What is between two stars is taken where it fits first, and never looked for again: a pattern of
    many stars would else be tried in more ways than anybody can wait for.
    """
    pieces: list[bytes] = [b""]  # between the stars; each matches texts of one length
    at = 0
    while at < len(pattern):
        char = pattern[at : at + 1]
        at += 1
        if char == b"*":
            if len(pieces) == 1 or pieces[-1]:
                pieces.append(b"")
        elif char == b"?":
            pieces[-1] += b"."
        elif char == b"[":
            part, at = _set_at(pattern, at)
            pieces[-1] += part
        else:
            if char == b"\\" and at < len(pattern):
                char = pattern[at : at + 1]
                at += 1
            pieces[-1] += re.escape(char)
    first, *between = pieces
    if not between:
        return re.compile(first, re.DOTALL)
    last = between.pop()
    middle = b"".join(b"(?>.*?%b)" % piece for piece in between)
    return re.compile(b"%b%b.*%b" % (first, middle, last), re.DOTALL)


def _set_at(pattern: bytes, at: int) -> tuple[bytes, int]:
    """Return the expression for the set at this offset, and the set's end."""
    negated = pattern[at : at + 1] == b"^"
    at += negated
    items: list[bytes] = []
    while at < len(pattern) and pattern[at : at + 1] != b"]":
        if pattern[at : at + 1] == b"\\" and at + 1 < len(pattern):
            items.append(re.escape(pattern[at + 1 : at + 2]))
            at += 2
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            low, high = sorted((pattern[at : at + 1], pattern[at + 2 : at + 3]))
            items.append(re.escape(low) + b"-" + re.escape(high))
            at += 3
        else:
            items.append(re.escape(pattern[at : at + 1]))
            at += 1
    if not items:
        return (b"." if negated else b"(?!)"), at + 1
    return b"[" + (b"^" if negated else b"") + b"".join(items) + b"]", at + 1
