"""Rows out of CSV and TSV files: cells are bytes as they stand in the file (``007`` stays ``007``).

Arrow reads them. What it cannot hand over or does not tell is done here: malformed rows with bytes
that are not UTF-8, blocks that end with a row, the lines of bad rows.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from koinon.cli.console.output import json_bytes
from koinon.cli.data.cells import compact
from koinon.cli.data.slabs import (
    LINE_BYTES_MAX,
    Slab,
    SlabMaker,
    check_columns,
    open_plain,
    unreadable,
)
from koinon_proto.contract.errors import InvalidArgumentError

CSV_BLOCK_BYTES = 16 * 1024 * 1024
"""A row must fit in a block."""


def delimited(
    path: Path, key: str, value: str | None, delimiter: str, maker: SlabMaker
) -> Iterator[Slab]:
    """Yield the slabs of a CSV file. Arrow cannot hand over a malformed row that is not UTF-8, and
    gives up; then the file is read again, each byte as one character.
    """
    import pyarrow as pa

    try:
        with _silent_handler():
            yield from _delimited_once(path, key, value, delimiter, maker, byte_wise=False)
    except pa.ArrowInvalid as error:
        if "Expected" not in str(error) or "columns" not in str(error):
            raise
        maker.start_again()
        yield from _delimited_once(path, key, value, delimiter, maker, byte_wise=True)


def _delimited_once(
    path: Path, key: str, value: str | None, delimiter: str, maker: SlabMaker, *, byte_wise: bool
) -> Iterator[Slab]:
    import pyarrow as pa
    from pyarrow import csv

    file, position = open_plain(path)
    with file:
        names = _header(path, file, delimiter)
        check_columns(path, names, (key, value))
        malformed = _Malformed(len(names))
        framed = _Framed(file, position, len(names), delimiter)
        reader = csv.open_csv(
            pa.PythonFile(_ByteWise(framed) if byte_wise else framed, mode="r"),
            read_options=csv.ReadOptions(
                block_size=CSV_BLOCK_BYTES * (2 if byte_wise else 1),
                column_names=names,
                use_threads=False,
            ),
            parse_options=csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=malformed.add
            ),
            convert_options=csv.ConvertOptions(
                check_utf8=False,
                strings_can_be_null=False,
                column_types=dict.fromkeys(names, pa.binary()),
                include_columns=None if value is None else list(dict.fromkeys((key, value))),
            ),
        )
        batches = _Batches(reader, framed.read_to, maker)
        rows = _delimited_rows(batches, key, value, byte_wise=byte_wise)
        yield from _delimited_slabs(rows, framed.mark, malformed, batches.position, maker)


class _Batches:
    """The batches of a reader, and where in the file the rows are that were taken of them. Each
    batch is of what one read returned; the reader has read on meanwhile.
    """

    def __init__(self, reader: Any, read_to: Sequence[int], maker: SlabMaker) -> None:
        self._reader = reader
        self._read_to = read_to
        self._maker = maker
        self._at = 0  # of the batch under way: its number, from 1; its rows; the row before it
        self._rows = self._before = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._reader:
            self._at, self._rows, self._before = self._at + 1, batch.num_rows, self._maker.row
            yield batch

    def position(self) -> int:
        """Return how many bytes of the file are behind the rows so far, by their number."""
        ends = [0, *self._read_to]
        at = min(self._at, len(ends) - 1)
        began, ended = ends[max(0, at - 1)], ends[at]
        done = min(self._maker.row - self._before, self._rows)
        return began + (ended - began) * done // max(1, self._rows)


class _Malformed:
    """Rows that the reader has left out, in their order. Small, for a block may have millions.
    ``rows`` is empty when there are none.
    """

    def __init__(self, columns: int) -> None:
        self.rows = array("q")
        self._wanted = columns
        self._columns = array("q")
        self._next = 0

    def add(self, row: Any) -> str:
        """Arrow's handler."""
        self.rows.append((row.number or 0) - 1)  # before the first there is the mark
        self._columns.append(row.actual_columns)
        return "skip"

    def __len__(self) -> int:
        return len(self.rows) - self._next

    def due(self, row: int) -> bool:
        """Return whether the next one is that row, or comes before it."""
        return bool(self.rows) and self.rows[self._next] <= row

    def take(self) -> str:
        """Take the next one, and return what is wrong with it."""
        columns = self._columns[self._next]
        self._next += 1
        if self._next == len(self.rows):
            del self.rows[:], self._columns[:]
            self._next = 0
        return f"{columns} columns instead of {self._wanted}"


class _Framed(io.RawIOBase):
    """A CSV file behind its header, between two rows of marks. The first one lets Arrow hand over
    what it has block by block, even if it has only malformed rows; the last one comes back only if
    no quote is open at the end.
    """

    def __init__(
        self, file: IO[bytes], position: Callable[[], int], columns: int, delimiter: str
    ) -> None:
        self._file = file
        self._position = position
        self.read_to: list[int] = []  # where in the file each read has ended
        self.mark = uuid.uuid4().hex.encode()
        row = delimiter.encode().join([self.mark] * columns) + b"\n"
        self._ready, self._last = row, b"\n" + row

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._ready:
            self._ready = self._file.read(size)
            if size < 0 or len(self._ready) < size:
                # Its end, in one block with the mark: Arrow takes no row that is in three blocks.
                self._ready, self._last = self._ready + self._last, b""
        if size < 0:
            size = len(self._ready)
        answer, self._ready = self._ready[:size], self._ready[size:]
        self.read_to.append(self._position())
        return answer


class _ByteWise(io.RawIOBase):
    """A file whose bytes are each one character of UTF-8: Latin-1, read as text."""

    def __init__(self, file: _Framed) -> None:
        self._file = file
        self._ready = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._ready:
            self._ready = self._file.read(size).decode("latin-1").encode()
        if size < 0:
            size = len(self._ready)
        answer, self._ready = self._ready[:size], self._ready[size:]
        return answer


@contextlib.contextmanager
def _silent_handler() -> Iterator[None]:
    """Keep Arrow's complaint about a row that it could not hand over off standard error."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, UnicodeDecodeError):
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _delimited_slabs(
    batches: Iterator[Iterator[tuple[bytes, bytes]]],
    mark: bytes,
    malformed: _Malformed,
    position: Callable[[], int],
    maker: SlabMaker,
) -> Iterator[Slab]:
    """Yield the rows in slabs; the malformed ones, which the reader leaves out, in their places.
    The last row of either kind is held back until it is known that it ended.
    """
    held: tuple[bytes, bytes] | None = None
    marks = 0
    for batch in batches:
        for row in batch:
            if held is not None:
                if malformed.rows:
                    yield from _left_out(malformed, position, maker)
                maker.add(*held)
                if maker.full:
                    yield maker.take(position())
            marked = row[0] == mark
            marks += marked
            held = None if marked else row
        if held is not None:
            yield from _left_out(malformed, position, maker)
            if malformed.rows:  # they come after it
                maker.add(*held)
                held = None
        if held is None:
            yield from _left_out(malformed, position, maker, but=marks < 2)
    if marks < 2:
        # With the rest of the file inside, and the mark: the row held back, or the last left out.
        maker.refuse("a quote is never closed")
    yield maker.take(position())


def lines_of(path: Path, rows: Sequence[int], delimiter: str) -> dict[int, int]:
    """Return in which line of a CSV file these rows begin (rows from 1 behind the header, lines
    from 1). Reads the file again up to the last of them.
    """
    found: dict[int, int] = {}
    last = max(rows, default=0)
    row, quoted = 0, False
    file, _ = open_plain(path)
    with file:
        for number, line in enumerate(file, start=1):
            begins = not quoted
            if quoted or b'"' in line:
                quoted = _ends_quoted(line, delimiter.encode(), quoted)
            if not begins or number == 1 or not line.strip(b"\r\n"):  # Arrow skips empty lines
                continue
            row += 1
            if row in rows:
                found[row] = number
            if row >= last:
                break
    return found


_TO_CLOSING_QUOTE = re.compile(rb'(?:[^"]++|"")*+"')


def _ends_quoted(line: bytes, delimiter: bytes, quoted: bool) -> bool:
    """Return whether a line of CSV that begins inside a quoted cell, or not, ends inside one. Only
    a quote at the beginning of a cell opens one; the cell ends at the next one that is not doubled.
    """
    at = 0  # inside the quotes, or where a cell begins
    while True:
        if not quoted and line[at : at + 1] == b'"':
            at, quoted = at + 1, True
        if quoted:
            closed = _TO_CLOSING_QUOTE.match(line, at)
            if closed is None:
                return True
            at, quoted = closed.end(), False
        at = line.find(delimiter, at) + 1
        if not at:
            return False


def _left_out(
    malformed: _Malformed, position: Callable[[], int], maker: SlabMaker, *, but: int = 0
) -> Iterator[Slab]:
    """Refuse the malformed rows whose turn it is, but not the last ``but`` of them."""
    while len(malformed) > but and malformed.due(maker.row + 1):
        maker.refuse(malformed.take())
        if maker.full:
            yield maker.take(position())


def _delimited_rows(
    reader: Iterable[Any], key: str, value: str | None, *, byte_wise: bool
) -> Iterator[Iterator[tuple[bytes, bytes]]]:
    """Yield the (key cell, value cell) of each batch."""
    for batch in reader:
        names = batch.schema.names
        columns = [column.to_pylist() for column in batch.columns]
        if byte_wise:
            columns = [[cell.decode().encode("latin-1") for cell in column] for column in columns]
        keys = columns[names.index(key)]
        if value is not None:
            yield zip(keys, columns[names.index(value)], strict=True)
        else:
            yield zip(keys, _whole_rows(names, columns), strict=True)


def _whole_rows(names: list[str], columns: list[list[bytes]]) -> Iterator[bytes]:
    for cells in zip(*columns, strict=True):
        yield compact(dict(zip(names, map(json_bytes, cells), strict=True)))


def _header(path: Path, file: IO[bytes], delimiter: str) -> list[str]:
    """Read the first row: the columns' names."""
    import csv

    line = file.readline(LINE_BYTES_MAX).decode("utf-8-sig", errors="replace")
    try:
        names = next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error as error:  # no text, or lines that end in CR alone
        raise unreadable(path, f"its header row cannot be read: {error}") from error
    if not names:
        raise InvalidArgumentError(field="file", reason=f"{path.name}: it has no header row")
    return names
