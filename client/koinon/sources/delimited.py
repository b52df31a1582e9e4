"""Rows of CSV and TSV files: cells are the bytes in the file (``007`` stays ``007``).

Arrow reads the files. This module adds what Arrow does not support: malformed rows with bytes that
are not UTF-8, blocks that end with a row, and the line numbers of bad rows.
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
"""The block size; a row must fit in a block."""
_SCANNED_BYTES = 4 * 1024 * 1024
# rows converted to Python objects at once: a block may hold millions of short rows
_SLICE_ROWS = 10_000


def delimited(piece: Piece, taken: Taken, delimiter: str, maker: Maker[Made]) -> Iterator[Made]:
    """Yield the rows of a piece of a CSV file, in lots. If Arrow stops at a malformed row that is
    not UTF-8, the piece is read again with each byte as one character.
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
    """Read the first row of a file from its start; return the columns' names, and the number of
    lines up to its end. A column without a name is named by its position, ``_c2``, as Spark does.
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
        # Arrow refuses a single row without a line end
        pa.BufferReader(text.rstrip(b"\r\n") + b"\n"),
        # One row needs none of Arrow's threads; a process that ends while they start is aborted.
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
    """The batches of a reader, and the position in the file of the rows taken from them. Each batch
    belongs to one read of the file; the reader reads ahead.
    """

    def __init__(self, reader: Any, read_to: Sequence[int], maker: Maker[Any]) -> None:
        self._reader = reader
        self._read_to = read_to
        self._maker = maker
        # of the present batch: its number, from 1; its rows; the number of the row before it
        self._at = 0
        self._rows = self._before = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._reader:
            self._at, self._rows, self._before = self._at + 1, batch.num_rows, self._maker.row
            yield batch

    def position(self) -> int:
        """Return how many bytes of the file were read for the rows so far, by their number."""
        ends = [0, *self._read_to]
        at = min(self._at, len(ends) - 1)
        began, ended = ends[max(0, at - 1)], ends[at]
        done = min(self._maker.row - self._before, self._rows)
        return began + (ended - began) * done // max(1, self._rows)


class _Malformed:
    """Malformed rows that the reader has left out, in their order; compact, since a block may have
    millions. ``rows`` is empty if there are none.
    """

    def __init__(self, columns: int) -> None:
        self.rows = array("q")
        self._wanted = columns
        self._columns = array("q")
        self._next = 0

    def add(self, row: Any) -> str:
        """Record a malformed row; called by Arrow."""
        self.rows.append((row.number or 0) - 1)  # the first mark is before the first row
        self._columns.append(row.actual_columns)
        return "skip"

    def __len__(self) -> int:
        return len(self.rows) - self._next

    def due(self, row: int) -> bool:
        """Return whether the next malformed row is at this row number or before it."""
        return bool(self.rows) and self.rows[self._next] <= row

    def take(self) -> str:
        """Remove the next malformed row; return its fault."""
        columns = self._columns[self._next]
        self._next += 1
        if self._next == len(self.rows):
            del self.rows[:], self._columns[:]
            self._next = 0
        return f"{columns} columns instead of {self._wanted}"


class _Framed(io.RawIOBase):
    """A CSV file without its header, between two marker rows. The first marker makes Arrow return
    blocks that have only malformed rows; the last one comes back only if no quote is open at the
    end.
    """

    def __init__(
        self, file: Bounded, position: Callable[[], int], columns: int, delimiter: str
    ) -> None:
        self._file = file
        self._position = position
        self.read_to: list[int] = []  # the position in the file after each read
        self.mark = uuid.uuid4().hex.encode()
        row = delimiter.encode().join([self.mark] * columns) + b"\n"
        self._ready, self._last = row, b"\n" + row

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._ready:
            self._ready = self._file.read(size)
            if size < 0 or len(self._ready) < size:
                # Its end, in one block with the marker: Arrow refuses a row that is in three
                # blocks.
                self._ready, self._last = self._ready + self._last, b""
        if size < 0:
            size = len(self._ready)
        answer, self._ready = self._ready[:size], self._ready[size:]
        self.read_to.append(self._position())
        return answer


class _ByteWise(io.RawIOBase):
    """A file in which each byte becomes one character of UTF-8: it is decoded as Latin-1."""

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
    """A context that keeps Arrow's complaint about an undecodable row off standard error."""
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
    """Yield the rows in lots, with the malformed rows, which the reader leaves out, in their
    places. The last row of either kind is held back until its end is known.
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
        # It may contain the rest of the file and the marker: the row held back, or the last
        # malformed one.
        maker.refuse("a quote is never closed")
    yield maker.take(position())


def numbered_rows(piece: Piece, delimiter: str) -> Iterator[tuple[int, bytes]]:
    """Yield, for each row of a piece of a CSV file, its line number in the file, from 1, and the
    line.
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
    """Return the line numbers at which these rows of a CSV file begin (rows from 1 after the
    header, lines from 1). Reads the file again up to the last of them.
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
    """Yield positions where rows of an uncompressed CSV file end, one about every ``wanted`` bytes,
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
    """Return whether a line of CSV ends inside a quoted cell; ``quoted``: it begins inside one.
    Only a quote at the beginning of a cell opens it; the cell ends at the next quote that is not
    doubled.
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
    """Refuse the malformed rows that come before the present row, except the last ``but`` of
    them.
    """
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
    """Return the batch with its columns as strings, without checking that they are UTF-8."""
    import pyarrow as pa

    columns = [column.view(pa.string()) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
