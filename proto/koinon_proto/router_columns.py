"""Routers over columns of keys: the vectorised half of ``routers``, which imports it with the first
column.

Each function takes keys as ``data[starts[i]:ends[i]]``, one behind the other, at least one, and
returns such a triple of the bytes to be hashed. Nothing is copied, but for ``h3_parents`` and
``gathered``, whose bytes are not those of the key. Positions are int64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]
Spans = tuple[Bytes, Places, Places]

_CELL_BYTES: Final = 8
_FIRST_BYTE: Final = np.uint64(0x08)
_BASE_CELLS: Final = np.uint64(122)
_RESOLUTION_AT: Final = np.uint64(52)
_RESOLUTION_BITS: Final = np.uint64(15)
_BASE_CELL_AT: Final = np.uint64(45)
_BASE_CELL_BITS: Final = np.uint64(127)


def gathered(
    routing_bytes: Callable[[bytes], bytes], data: Bytes, starts: Places, ends: Places
) -> Spans:
    """Call the scalar form for each key, and join the results."""
    view = np.ascontiguousarray(data).data
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    found = [routing_bytes(bytes(view[a:b])) for a, b in spans]
    offsets = np.zeros(len(found) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, found), np.int64, len(found)), out=offsets[1:])
    return np.frombuffer(b"".join(found), np.uint8), offsets[:-1], offsets[1:]


def until(data: Bytes, starts: Places, ends: Places, delimiter: int, n: int) -> Spans:
    """Cut each key before its n-th delimiter; one that has fewer stays whole."""
    first = int(starts[0])
    at = np.flatnonzero(data[first : int(ends[-1])] == delimiter)
    if not at.size:
        return data, starts, ends
    at += first
    per_key, rest = divmod(at.size, len(starts))
    if not rest and per_key >= n:  # where each key has as many as the others, none is searched
        columns = at.reshape(-1, per_key)
        if bool((columns[:, 0] >= starts).all()) and bool((columns[:, -1] < ends).all()):
            return data, starts, columns[:, n - 1]
    place = np.searchsorted(at, starts)
    place += n - 1
    found = at[np.minimum(place, at.size - 1)]
    cut = (place < at.size) & (found < ends)
    return data, starts, np.where(cut, found, ends)


def hash_tags(data: Bytes, starts: Places, ends: Places) -> tuple[Places, Places]:
    """Return where each key's hash tag starts and ends; where it has none, the whole key."""
    first, last = int(starts[0]), int(ends[-1])
    opens, closes = (
        np.append(np.flatnonzero(data[first:last] == brace) + first, last) for brace in b"{}"
    )
    if len(opens) == 1 or len(closes) == 1:  # nothing but the sentinel
        return starts, ends
    tag_starts = opens[np.searchsorted(opens, starts)] + 1
    tag_ends = closes[np.minimum(np.searchsorted(closes, tag_starts), len(closes) - 1)]
    tagged = (tag_ends < ends) & (tag_ends > tag_starts)
    return np.where(tagged, tag_starts, starts), np.where(tagged, tag_ends, ends)


def first(data: Bytes, starts: Places, ends: Places, n: int) -> Spans:
    """Cut each key after n bytes."""
    return data, starts, np.minimum(ends, starts + n)


def h3_parents(
    data: Bytes, starts: Places, ends: Places, resolution: int, finer: int, digits: int
) -> Spans:
    """Return the parents of the cells at the keys' starts, 8 bytes each; other keys whole.

    ``finer`` has the bits of all digits below ``resolution``, ``digits`` the lowest bit of each
    digit above, of which none may be 7.
    """
    long_enough = ends - starts >= _CELL_BYTES
    if not long_enough.any():
        return data, starts, ends
    at = starts if bool(long_enough.all()) else np.where(long_enough, starts, 0)
    word_at = np.ndarray((data.size - _CELL_BYTES + 1,), ">u8", data, 0, (1,))  # at every byte
    words = word_at[at].astype(np.uint64)
    cells = long_enough
    cells &= words >> np.uint64(56) == _FIRST_BYTE
    cells &= (words >> _RESOLUTION_AT) & _RESOLUTION_BITS >= np.uint64(resolution)
    cells &= (words >> _BASE_CELL_AT) & _BASE_CELL_BITS < _BASE_CELLS
    sevens = words & (words >> np.uint64(1)) & (words >> np.uint64(2))
    cells &= (sevens & np.uint64(digits)) == 0
    words &= ~(_RESOLUTION_BITS << _RESOLUTION_AT)
    words |= np.uint64(resolution << 52 | finer)
    parents = words.astype(">u8").view(np.uint8)
    places = np.arange(len(starts), dtype=np.int64) * _CELL_BYTES
    if bool(cells.all()):
        return parents, places, places + _CELL_BYTES
    begin = int(starts[0])
    moved = parents.size - begin  # the keys' bytes lie behind those of the parents
    return (
        np.concatenate((parents, data[begin : int(ends[-1])])),
        np.where(cells, places, starts + moved),
        np.where(cells, places + _CELL_BYTES, ends + moved),
    )
