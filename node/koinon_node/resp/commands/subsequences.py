"""LCS: the longest common subsequence of two values.

Each row of the table of lengths is a number with one bit per character (Hyyrö, "Bit-parallel
LCS-length computation revisited", 2004): a row costs a few operations on long integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from koinon_node.core.formats import records
from koinon_node.resp import wire
from koinon_node.resp.commands.arguments import SYNTAX, integer, keys_of_one_slot
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import Arguments, Encoded, Outcome, Read
from koinon_node.resp.session import Session

_CELLS_MAX = 4_000_000
"""The greatest product of both lengths: the computation blocks the node's event loop."""
_FIRST_BYTES_MAX = 16 * 1024
"""The most bytes of the first value: each step back through the table costs time by its length."""
Match = tuple[int, int]


def lcs(session: Session, arguments: Arguments) -> Outcome:
    """Find the longest common subsequence of two values."""
    keys, options = keys_of_one_slot(arguments[1:3]), list(arguments[3:])
    flags: set[bytes] = set()
    shortest = 0
    while options:
        name = options.pop(0).upper()
        if name == b"MINMATCHLEN" and options:
            shortest = max(0, integer(options.pop(0)))
        elif name in (b"LEN", b"IDX", b"WITHMATCHLEN"):
            flags.add(name)
        else:
            raise RefusedError(SYNTAX)
    if flags >= {b"LEN", b"IDX"}:
        raise RefusedError("ERR If you want both the length and indexes, please just use IDX.")
    return Read(keys, partial(_reply, session.resp3, flags, shortest), work=_work)


def _values(found: Sequence[Encoded]) -> list[bytes]:
    return [records.value_of(record) if record is not None else b"" for record in found]


def _work(found: Sequence[Encoded]) -> int:
    """Return the cost of the computation, as bytes whose copying takes as long. There are as many
    steps as bytes in both values; each handles numbers with one bit per byte of the first value.
    """
    first, second = map(len, _values(found))
    return (first + second) * (first // 32 + 64)


def _reply(resp3: bool, flags: set[bytes], shortest: int, found: Sequence[Encoded]) -> bytes:
    a, b = _values(found)
    if len(a) > _FIRST_BYTES_MAX:
        return wire.error(
            f"ERR LCS of a first value of {len(a)} bytes: it has {_FIRST_BYTES_MAX} here at most; "
            "exchange the keys if the second value is shorter"
        )
    if len(a) * len(b) > _CELLS_MAX:
        return wire.error(
            f"ERR LCS of values of {len(a)} and {len(b)} bytes: their product is {_CELLS_MAX} here "
            "at most"
        )
    matches = _matches(a, b)
    if b"LEN" in flags:
        return wire.integer(len(matches))
    if b"IDX" not in flags:
        return wire.bulk(bytes(a[at] for at, _ in matches))
    ranges = [run for run in _runs(matches) if run[1] >= shortest]
    shown = [_shown(end, count, b"WITHMATCHLEN" in flags) for end, count in reversed(ranges)]
    pairs = [
        (wire.bulk(b"matches"), wire.array(shown)),
        (wire.bulk(b"len"), wire.integer(len(matches))),
    ]
    return wire.map_of(pairs, resp3=resp3)


def _matches(a: bytes, b: bytes) -> list[Match]:
    """Return the pairs of positions of a longest common subsequence, in order."""
    places: dict[int, int] = {}
    for at, byte in enumerate(a):
        places[byte] = places.get(byte, 0) | 1 << at
    mask = (1 << len(a)) - 1
    rows = [mask]  # after each byte of b: a zero bit where the length rises along a
    for byte in b:
        row, fits = rows[-1], rows[-1] & places.get(byte, 0)
        rows.append(((row + fits) | (row - fits)) & mask)
    found: list[Match] = []
    i, j = len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            i, j = i - 1, j - 1
            found.append((i, j))
        elif _length(rows[j], i - 1) > _length(rows[j - 1], i):
            i -= 1
        else:
            j -= 1
    return found[::-1]


def _length(row: int, i: int) -> int:
    return i - (row & ((1 << i) - 1)).bit_count()


def _runs(matches: Sequence[Match]) -> list[tuple[Match, int]]:
    """Return each run of adjacent matches: its last match, and its length."""
    if not matches:
        return []
    runs = [(matches[0], 1)]
    for before, match in pairwise(matches):
        is_next = match == (before[0] + 1, before[1] + 1)
        if is_next:
            runs[-1] = match, runs[-1][1] + 1
        else:
            runs.append((match, 1))
    return runs


def _shown(end: Match, count: int, with_length: bool) -> bytes:
    ranges = [wire.array([wire.integer(at - count + 1), wire.integer(at)]) for at in end]
    return wire.array([*ranges, wire.integer(count)] if with_length else ranges)
