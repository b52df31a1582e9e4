"""``put_many`` and ``delete_many`` of any size: the input is read a chunk at a time, a bounded
number of chunks is in flight, and only failed rows are remembered.

A later row wins over an earlier one with the same key. Within a chunk only the last row of a key is
sent. A chunk that shares a key with one in flight waits until that one is settled, retries
included. So two rows of one key are never in flight together, and the order holds, with one
unavoidable exception: a row reported as *unknown* may still reach its node late, after a later row
of its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from koinon.core.limits import check_keys, check_ttls, check_values
from koinon.types import BytesLike, Row, RowFailure, WriteResult
from koinon_proto.contract.errors import KoinonError

FAILURES_MAX = 100_000
"""The number of failed rows after which the rest of the input is left unread."""

_PIECE_ROWS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Consecutive rows of the input, as columns, each key once."""

    first_row: int
    rows: int
    keys: Sequence[bytes]
    values: Sequence[bytes] | None
    ttls: Sequence[int] | None
    """Times to live in milliseconds; 0: the row has none; None: no row has one."""
    key_set: frozenset[bytes] | set[bytes]
    row_of: Sequence[int] | None = None
    """The row (in the chunk) of each entry, if keys were repeated; None: entry i is row i."""
    superseded: dict[bytes, list[int]] | None = None
    """The earlier rows of each repeated key; None if no key was repeated."""

    def rows_of(self, entry: int) -> list[int]:
        """Return the rows (in the chunk) that share the entry's outcome."""
        if self.row_of is None:
            return [entry]
        return [self.row_of[entry], *(self.superseded or {}).get(self.keys[entry], ())]


class LoadProgress:
    """The chunks of one ``*_many`` write that are in flight, and its result so far."""

    def __init__(self, *, in_flight_max: int) -> None:
        self.result = WriteResult()
        self.error: BaseException | None = None
        """An unexpected exception that ended a chunk; raised to the caller once the rest is
        settled.
        """
        self._in_flight_max = in_flight_max
        self._in_flight = 0  # number of chunks in flight
        self._keys: set[bytes] = set()  # keys of the chunks in flight

    @property
    def idle(self) -> bool:
        return self._in_flight == 0

    @property
    def stopped(self) -> bool:
        """True once no further chunk should be read."""
        if self.error is not None:
            return True
        return len(self.result.refused) + len(self.result.unknown) >= FAILURES_MAX

    def may_start(self, chunk: Chunk) -> bool:
        return self._in_flight < self._in_flight_max and self._keys.isdisjoint(chunk.key_set)

    def start(self, chunk: Chunk) -> None:
        self._in_flight += 1
        self._keys |= chunk.key_set

    def finish(
        self,
        chunk: Chunk,
        failures: Mapping[int, KoinonError],
        absent: int,
        present: Sequence[int] = (),
    ) -> None:
        """Record the outcome of a chunk; ``failures`` is by entry, ``present`` lists entries."""
        self._in_flight -= 1
        self._keys -= chunk.key_set
        result = self.result
        result.rows += chunk.rows
        result.absent += absent
        failed = sum(len(chunk.rows_of(entry)) for entry in present)
        result.present += failed
        for entry, error in sorted(failures.items()):
            key, rows = chunk.keys[entry], chunk.rows_of(entry)
            failed += len(rows)
            where = result.unknown if error.maybe_applied else result.refused
            where += [RowFailure(chunk.first_row + row, key, error) for row in sorted(rows)]
        result.applied += chunk.rows - failed

    def end(self, input_left: bool) -> WriteResult:
        """Return the result, with failures in the order of the input."""
        self.result.complete = not input_left
        self.result.refused.sort(key=lambda failure: failure.row)
        self.result.unknown.sort(key=lambda failure: failure.row)
        return self.result


def put_chunks(
    items: Mapping[bytes, BytesLike] | Iterable[Row],
    *,
    rows_max: int,
    bytes_max: int,
    max_value_bytes: int,
) -> Iterator[Chunk]:
    """Read rows and return them as checked chunks.

    Input of known length is checked whole before the first chunk; an iterator is checked chunk by
    chunk, so that rows before a bad one may have been written by the time it is met.
    """
    given: Iterable[Row] = items.items() if isinstance(items, Mapping) else items
    is_whole = isinstance(given, Sequence) or isinstance(items, Mapping)
    groups = [list(given)] if is_whole else _pulled(iter(given), rows_max, bytes_max)
    first_row = 0
    for rows in groups:
        key_column, value_column, ttl_column = _columns(rows, first_row)
        keys = check_keys(key_column, first_row)
        values = check_values(value_column, max_value_bytes, first_row)
        ttls = check_ttls(ttl_column, first_row)
        # one piece of the input may be far larger
        for a, b in _bounds(keys, values, rows_max, bytes_max):
            yield chunk_of(first_row + a, keys[a:b], values[a:b], ttls and ttls[a:b])
        first_row += len(rows)


def delete_chunks(keys: Iterable[BytesLike], *, rows_max: int) -> Iterator[Chunk]:
    """Read keys and return them as checked chunks; see ``put_chunks``."""
    if isinstance(keys, Sequence):
        check_keys(keys)
    source, first_row = iter(keys), 0
    while chunk := tuple(islice(source, rows_max)):
        yield chunk_of(first_row, check_keys(chunk, first_row), None, None)
        first_row += len(chunk)


def _pulled(source: Iterator[Row], rows_max: int, bytes_max: int) -> Iterator[list[Row]]:
    """Group the source by rows and bytes; read at most a piece beyond a group."""
    rows: list[Row] = []
    size = 0
    while piece := list(islice(source, min(_PIECE_ROWS, rows_max))):
        rows += piece
        try:
            size += sum(len(row[0]) + len(row[1]) for row in piece)
        except (TypeError, LookupError):  # rows that are no pairs of bytes; the checks report them
            yield rows
            rows, size = [], 0
            continue
        if len(rows) + _PIECE_ROWS > rows_max or size >= bytes_max:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _columns(
    rows: Sequence[Row], first_row: int
) -> tuple[Sequence[BytesLike], Sequence[BytesLike], Sequence[int | None]]:
    """Return the columns of keys, values and times to live (empty if the rows are pairs)."""
    if not rows:
        return (), (), ()
    columns: Sequence[Sequence[Any]] = ()
    with suppress(TypeError, ValueError):  # not a row, or a row of another length than the first
        columns = list(zip(*rows, strict=True))
    if len(columns) == 2:
        return columns[0], columns[1], ()
    if len(columns) == 3:
        return columns[0], columns[1], columns[2]
    for i, row in enumerate(rows):
        if not isinstance(row, tuple | list) or len(row) not in (2, 3):
            raise TypeError(f"row {first_row + i} is not a (key, value) pair")
        if len(row) != len(rows[0]):
            raise TypeError(
                f"row {first_row + i} has {len(row)} parts where others have {len(rows[0])}: rows "
                "are (key, value), or all of them (key, value, ttl_ms)"
            )
    raise TypeError("rows are not (key, value) pairs")


def _bounds(
    keys: Sequence[bytes], values: Sequence[bytes], rows_max: int, bytes_max: int
) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of slices with limited rows and bytes."""
    a, size = 0, 0
    while a < len(keys):
        b = min(len(keys), a + rows_max)
        size = sum(map(len, keys[a:b])) + sum(map(len, values[a:b]))
        while size > bytes_max and b - a > 1:
            b = a + max(1, min(b - a - 1, (b - a) * bytes_max // size))
            size = sum(map(len, keys[a:b])) + sum(map(len, values[a:b]))
        yield a, b
        a = b


def chunk_of(
    first_row: int,
    keys: Sequence[bytes],
    values: Sequence[bytes] | None,
    ttls: Sequence[int] | None = None,
) -> Chunk:
    """Return checked columns as a chunk; of rows with the same key only the last is kept."""
    key_set = set(keys)
    whole = Chunk(
        first_row=first_row, rows=len(keys), keys=keys, values=values, ttls=ttls, key_set=key_set
    )
    if len(key_set) == len(keys):
        return whole
    last = {key: row for row, key in enumerate(keys)}
    superseded: dict[bytes, list[int]] = {}
    for row, key in enumerate(keys):
        if last[key] != row:
            superseded.setdefault(key, []).append(row)
    winners = list(last.values())
    return replace(
        whole,
        keys=list(last),
        values=None if values is None else [values[row] for row in winners],
        ttls=None if ttls is None else [ttls[row] for row in winners],
        row_of=winners,
        superseded=superseded,
    )
