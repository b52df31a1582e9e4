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
from itertools import chain
from pathlib import Path
from typing import IO, Any

from koinon.sources.row_batches import Row, give, rows_of
from koinon.sources.taken import Made, Maker, Taken, check_columns
from koinon.sources.text_files import (
    LINE_BYTES_MAX,
    Bounded,
    Piece,
    lines_before,
    open_text,
    unreadable,
)

CSV_BLOCK_BYTES = 16 * 1024 * 1024
"""A row must fit in a block."""
_SCANNED_BYTES = 4 * 1024 * 1024
_SLICE_ROWS = 10_000  # that are objects at once: millions of short rows fit into a block


def delimited(piece: Piece, taken: Taken, delimiter: str, maker: Maker[Made]) -> Iterator[Made]:
    """Yield the rows of a piece of a CSV file, in lots. Arrow cannot hand over a malformed row that
    is not UTF-8, and gives up; then the piece is read again, each byte as one character.
    """
    import pyarrow as pa

    try:
        with _silent_handler():
            yield from _delimited_once(piece, taken, delimiter, maker, byte_wise=False)
    except pa.ArrowInvalid as error:
        if "Expected" not in str(error) or "columns" not in str(error):
            raise
        if not piece.path.is_file():
            raise unreadable(
                piece.path, "a malformed row is not UTF-8; load it from a file"
            ) from error
        maker.start_again()
        yield from _delimited_once(piece, taken, delimiter, maker, byte_wise=True)


def _delimited_once(
    piece: Piece, taken: Taken, delimiter: str, maker: Maker[Made], *, byte_wise: bool
) -> Iterator[Made]:
    import pyarrow as pa
    from pyarrow import csv

    file, position = open_text(piece.path)
    with file:
        names, _ = read_header(piece.path, file, delimiter)
        check_columns(piece.path.name, names, taken.named)
        malformed = _Malformed(len(names))
        framed = _Framed(Bounded(file, piece), position, len(names), delimiter)
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
                include_columns=taken.columns,
            ),
        )
        batches = _Batches(reader, framed.read_to, maker)
        rows = _delimited_rows(batches, taken, byte_wise=byte_wise)
        yield from _delimited_lots(rows, framed.mark, malformed, batches.position, maker)


def read_header(path: Path, file: IO[bytes], delimiter: str) -> tuple[list[str], int]:
    """Read the first row of a file that is at its start: return the columns' names, and the number
    of lines up to its end. A column without a name is named by its place, ``_c2``, as Spark does.
    """
    import pyarrow as pa
    from pyarrow import csv

    text, lines, quoted = b"", 0, False
    while (quoted or not text.strip(b"\r\n")) and (line := file.readline(LINE_BYTES_MAX)):
        text, lines = (text if quoted else b"") + line, lines + 1
        quoted = _ends_quoted(line, delimiter.encode(), quoted)
    if not text.strip(b"\r\n"):
        raise unreadable(path, "it has no header row")
    if quoted or b"\0" in text or b"\r" in text.rstrip(b"\r\n").replace(b"\r\n", b""):
        raise unreadable(
            path, "its header row cannot be read: " + _header_fault(text, quoted=quoted)
        )
    cells = text.count(delimiter.encode()) + 1
    table = csv.read_csv(
        pa.BufferReader(text.rstrip(b"\r\n") + b"\n"),  # Arrow refuses a lone row without an end
        # One row needs none of Arrow's threads; a process that ends while they begin is aborted.
        read_options=csv.ReadOptions(
            autogenerate_column_names=True, block_size=2 * len(text) + 64, use_threads=False
        ),
        parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=csv.ConvertOptions(
            strings_can_be_null=False, column_types={f"f{n}": pa.string() for n in range(cells)}
        ),
    )
    names = [column[0].as_py() for column in table.columns]
    return [name or f"_c{at}" for at, name in enumerate(names)], lines


def _header_fault(text: bytes, *, quoted: bool) -> str:
    if quoted:
        return "a quote is never closed"
    return "it is no text" if b"\0" in text else "lines end in CR alone; make them end in LF"


class _Batches:
    """The batches of a reader, and where in the file the rows are that were taken of them. Each
    batch is of what one read returned; the reader has read on meanwhile.
    """

    def __init__(self, reader: Any, read_to: Sequence[int], maker: Maker[Any]) -> None:
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
        self, file: Bounded, position: Callable[[], int], columns: int, delimiter: str
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


def _delimited_lots(
    batches: Iterator[Iterator[Row]],
    mark: bytes,
    malformed: _Malformed,
    position: Callable[[], int],
    maker: Maker[Made],
) -> Iterator[Made]:
    """Yield the rows in lots; the malformed ones, which the reader leaves out, in their places.
    The last row of either kind is held back until it is known that it ended.
    """
    held: Row | None = None
    marks = 0
    for batch in batches:
        for found in batch:
            if held is not None:
                if malformed.rows:
                    yield from _left_out(malformed, position, maker)
                give(held, maker)
                if maker.full:
                    yield maker.take(position())
            marked = mark in (found[0] or b"")
            marks += marked
            held = None if marked else found
        if held is not None:
            yield from _left_out(malformed, position, maker)
            if malformed.rows:  # they come after it
                give(held, maker)
                held = None
        if held is None:
            yield from _left_out(malformed, position, maker, but=marks < 2)
    if marks < 2:
        # With the rest of the file inside, and the mark: the row held back, or the last left out.
        maker.refuse("a quote is never closed")
    yield maker.take(position())


def numbered_rows(piece: Piece, delimiter: str) -> Iterator[tuple[int, bytes]]:
    """Yield, for each row of a piece of a CSV file, the number of its line in the file, from 1, and
    that line.
    """
    file, _ = open_text(piece.path)
    with file:
        if piece.start:
            number = lines_before(file, piece.start)
        else:
            _, number = read_header(piece.path, file, delimiter)
        quoted = False
        for line in Bounded(file, piece).lines():
            number, begins = number + 1, not quoted
            if quoted or b'"' in line:
                quoted = _ends_quoted(line, delimiter.encode(), quoted)
            if begins and line.strip(b"\r\n"):  # Arrow skips empty lines
                yield number, line


def lines_of(path: Path, rows: Sequence[int], delimiter: str) -> dict[int, int]:
    """Return in which line of a CSV file these rows begin (rows from 1 behind the header, lines
    from 1). Reads the file again up to the last of them.
    """
    found: dict[int, int] = {}
    last = max(rows, default=0)
    for row, (number, _) in enumerate(numbered_rows(Piece(path), delimiter), start=1):
        if row in rows:
            found[row] = number
        if row >= last:
            break
    return found


def row_ends(path: Path, delimiter: str, wanted: int) -> Iterator[int]:
    """Yield where rows of a CSV file that is not compressed end: one about every ``wanted`` bytes,
    and the end of the file.
    """
    file, _ = open_text(path)
    with file:
        read_header(path, file, delimiter)
        quoted, cut = False, file.tell()
        while block := file.read(min(wanted, _SCANNED_BYTES)) + file.readline(LINE_BYTES_MAX):
            if quoted or b'"' in block:
                for line in io.BytesIO(block):
                    quoted = _ends_quoted(line, delimiter.encode(), quoted)
            if not quoted and file.tell() - cut >= wanted:
                cut = file.tell()
                yield cut
        if file.tell() > cut:
            yield file.tell()


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
    malformed: _Malformed, position: Callable[[], int], maker: Maker[Made], *, but: int = 0
) -> Iterator[Made]:
    """Refuse the malformed rows whose turn it is, but not the last ``but`` of them."""
    while len(malformed) > but and malformed.due(maker.row + 1):
        maker.refuse(malformed.take())
        if maker.full:
            yield maker.take(position())


def _delimited_rows(
    reader: Iterable[Any], taken: Taken, *, byte_wise: bool
) -> Iterator[Iterator[Row]]:
    """Yield the rows of each batch."""
    import pyarrow as pa

    for batch in reader:
        if byte_wise:
            columns = [
                pa.array(
                    [cell.decode().encode("latin-1") for cell in column.to_pylist()], pa.binary()
                )
                for column in batch.columns
            ]
            batch = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
        whole = batch if taken.value is not None else _as_texts(batch)
        slices = (whole.slice(at, _SLICE_ROWS) for at in range(0, len(whole), _SLICE_ROWS))
        yield chain.from_iterable(rows_of(some, taken) for some in slices)


def _as_texts(batch: Any) -> Any:
    """Return the batch with its columns as strings, valid or not."""
    import pyarrow as pa

    columns = [column.view(pa.string()) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
