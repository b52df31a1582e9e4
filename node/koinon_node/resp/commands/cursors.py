"""SCAN's cursors and patterns. Pure.

A cursor is a number of 64 bits and nothing is remembered about it: it says which partition comes
next and, in a partition of too many keys for one page, from which hash on. Such a partition is
walked in the order of its keys' CRC-32, as Redis walks its table: a key that is there throughout is
seen, whatever is written or deleted meanwhile.

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
    """Return the cursor of the keys of the partition from this hash on."""
    return partition_id << _HASH_BITS | first_hash


def position_of(cursor: int) -> tuple[int, int]:
    """Return (partition_id, first hash) of a cursor."""
    return cursor >> _HASH_BITS, cursor & (_HASH_END - 1)


class HashPage:
    """The keys of one partition from a hash on, the ``size`` that come first; from all of its keys,
    offered in any order.
    """

    def __init__(self, first_hash: int, size: int) -> None:
        self._first = first_hash
        self._size = size
        self._heap: list[tuple[int, bytes]] = []  # the last in the order is on top
        self._end = _HASH_END  # keys of this hash and beyond are the next page's

    def offer(self, keys: Iterable[bytes]) -> None:
        """Take note of keys, each once."""
        for key in keys:
            hashed = crc32(key)
            if self._first <= hashed < self._end:
                heapq.heappush(self._heap, (-hashed, key))
                if len(self._heap) > self._size:
                    self._drop_last()

    def _drop_last(self) -> None:
        """Leave the last hash, with all its keys, to the next page, unless it is the only one."""
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
        """The hash from which the next page goes on; None: there is none."""
        return self._end if self._end < _HASH_END else None


def literal_prefix(pattern: bytes) -> bytes:
    """Return what every key that fits the pattern begins with."""
    found = _SPECIAL.search(pattern)
    return pattern[: found.start()] if found else pattern


def compiled(pattern: bytes) -> re.Pattern[bytes]:
    """Return Redis's glob as an expression for whole keys: ``*``, ``?``, ``[a-c]``, ``[^a]``, and
    a backslash before what is meant as it stands.

    What is between two stars is taken where it fits first, and never looked for again: a pattern of
    many stars would else be tried in more ways than anybody can wait for.
    """
    pieces: list[bytes] = [b""]  # what is between stars; each fits one length only
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
    """Return the expression of the set that begins there, and where it ends."""
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
