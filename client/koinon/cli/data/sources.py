"""Rows out of CSV, JSON lines and Parquet files, streaming: never a whole file in memory.

A source yields slabs: rows as (key, value) columns, the bad rows among what was read, and how far
into the file that was. CSV cells are bytes as they stand in the file (``007`` stays ``007``); a
whole row as JSON is compact and in the file's column order.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import math
import re
import sys
import uuid
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from koinon.cli.console.output import json_bytes
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import MAX_KEY_BYTES

SLAB_ROWS = 10_000
SLAB_BYTES = 8 * 1024 * 1024
CSV_BLOCK_BYTES = 16 * 1024 * 1024
"""A row must fit in a block."""
LINE_BYTES_MAX = 64 * 1024 * 1024

FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
DELIMITERS = {"csv": ",", "tsv": "\t"}


@dataclass(kw_only=True)
class BadRow:
    """A row that cannot be stored. ``row`` counts from 1, a header not included; ``line`` is where
    it begins in the file, 0 where the reader does not see lines (``lines_of`` finds it).
    """

    row: int
    reason: str
    line: int = 0


@dataclass(kw_only=True)
class Slab:
    """Some rows of a file, in its order."""

    keys: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    position: int = 0
    """Bytes of the file behind these rows (estimated where a format hides it)."""


def format_of(path: Path, given: str | None) -> str:
    """Return the format by option or by suffix (``.gz`` aside)."""
    if given:
        return given
    suffixes = [s.lower() for s in path.suffixes if s.lower() != ".gz"]
    if suffixes and suffixes[-1] in FORMATS:
        return FORMATS[suffixes[-1]]
    raise InvalidArgumentError(
        field="file",
        reason=f"{path.name}: cannot tell the format from the name; say --format csv, tsv, jsonl "
        "or parquet",
    )


def open_source(
    path: Path, file_format: str, key: str, value: str | None, max_value_bytes: int | None = None
) -> Iterator[Slab]:
    """Yield the slabs of a file; ``value`` None means the whole row as JSON. A value of more than
    ``max_value_bytes`` makes a bad row.

    Raises:
        InvalidArgumentError: a column is missing, or the file cannot be read as this format; the
            reason names the file.
        OSError: the file cannot be opened.
    """
    maker = _SlabMaker(max_value_bytes)
    if file_format == "jsonl":
        slabs = _json_lines(path, key, value, maker)
    elif file_format == "parquet":
        slabs = _parquet(path, key, value, maker)
    else:
        slabs = _delimited(path, key, value, DELIMITERS[file_format], maker)
    try:
        yield from slabs
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _unreadable(path, f"truncated or damaged: {error}") from error
    except OSError as error:
        if error.filename is not None:
            raise
        raise _unreadable(path, str(error)) from error
    except ValueError as error:  # pyarrow.ArrowInvalid among them
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(field="file", reason=f"{path.name}: {reason}")


class _SlabMaker:
    """Checks rows one by one and cuts them into slabs."""

    def __init__(self, max_value_bytes: int | None = None) -> None:
        self.row = 0
        self.line = 0  # of the file; 0 where lines are not seen
        self._max_value_bytes = max_value_bytes
        self._taken = 0
        self._skip = 0
        self._slab = Slab()
        self._bytes = 0

    def start_again(self) -> None:
        """The file is read from its start once more: pass over the rows that were taken."""
        self.row, self._skip = 0, self._taken
        self._slab, self._bytes = Slab(), 0

    def add(self, key: bytes | None, value: bytes | None) -> None:
        self.row += 1
        if self.row <= self._skip:
            return
        reason = _fault(key, value, self._max_value_bytes)
        if reason is not None:
            self._slab.bad.append(BadRow(row=self.row, reason=reason, line=self.line))
            return
        assert key is not None
        assert value is not None
        self._slab.keys.append(key)
        self._slab.values.append(value)
        self._bytes += len(key) + len(value)

    def refuse(self, reason: str) -> None:
        self.row += 1
        if self.row <= self._skip:
            return
        self._slab.bad.append(BadRow(row=self.row, reason=reason, line=self.line))

    @property
    def full(self) -> bool:
        return (
            len(self._slab.keys) >= SLAB_ROWS
            or self._bytes >= SLAB_BYTES
            or len(self._slab.bad) >= SLAB_ROWS
        )

    def take(self, position: int) -> Slab:
        slab, self._slab, self._bytes = self._slab, Slab(), 0
        self._taken = self.row
        slab.position = position
        return slab


def _fault(key: bytes | None, value: bytes | None, max_value_bytes: int | None) -> str | None:
    if key is None:
        return "the key is null"
    if not key:
        return "the key is empty"
    if len(key) > MAX_KEY_BYTES:
        return f"the key has {len(key)} bytes, the limit is {MAX_KEY_BYTES}"
    if value is None:
        return "the value is null"
    if max_value_bytes is not None and len(value) > max_value_bytes:
        return f"the value has {len(value)} bytes, the limit is {max_value_bytes}"
    return None


def _open_plain(path: Path) -> tuple[IO[bytes], Callable[[], int]]:
    """Open a file, through gzip if it is; return it and what tells the position on disk, which is
    0 in a pipe.
    """
    raw = path.open("rb")
    tell = raw.tell if raw.seekable() else lambda: 0
    if path.suffix.lower() == ".gz":
        return cast("IO[bytes]", gzip.open(raw)), tell
    return raw, tell


def _json_lines(path: Path, key: str, value: str | None, maker: _SlabMaker) -> Iterator[Slab]:
    file, position = _open_plain(path)
    mark = codecs.BOM_UTF8
    with file:
        while line := file.readline(LINE_BYTES_MAX):
            maker.line += 1
            line, mark = line.removeprefix(mark).strip(), b""
            if not line:
                continue
            try:
                maker.add(*_json_row(line, key, value))
            except RecursionError:
                maker.refuse("it is nested too deeply")
            except UnicodeEncodeError:
                maker.refuse("it has half of a surrogate pair, which UTF-8 cannot hold")
            except ValueError as error:
                maker.refuse(f"not JSON: {error}")
            except TypeError as error:
                maker.refuse(str(error))
            if maker.full:
                yield maker.take(position())
    yield maker.take(position() if not file.closed else path.stat().st_size)


def _json_row(line: bytes, key: str, value: str | None) -> tuple[bytes | None, bytes | None]:
    """Return (key cell, value cell). Raises TypeError if it is no object."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError(f"not a JSON object but a {type(row).__name__}")
    return _cell(row.get(key)), line if value is None else _cell(row.get(value))


def _cell(content: Any) -> bytes | None:
    """A cell as bytes: text as UTF-8, bytes as they are, anything else as JSON."""
    if content is None or isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    return _compact(content)


def _compact(content: Any) -> bytes:
    try:
        return _dumped(content)
    except ValueError:
        return _dumped(_with_words(content))


def _dumped(content: Any) -> bytes:
    return json.dumps(
        content,
        ensure_ascii=False,
        separators=(",", ":"),
        default=_json_default,
        allow_nan=False,
    ).encode()


def _with_words(content: Any) -> Any:
    """The same with words for the numbers that JSON has none for, as in Spark and ``ingest``."""
    if isinstance(content, float) and not math.isfinite(content):
        return "NaN" if math.isnan(content) else "Infinity" if content > 0 else "-Infinity"
    if isinstance(content, dict):
        return {name: _with_words(part) for name, part in content.items()}
    if isinstance(content, list | tuple):
        return [_with_words(part) for part in content]
    return content


def _json_default(content: Any) -> Any:
    return json_bytes(content) if isinstance(content, bytes) else str(content)


def _check_columns(path: Path, names: Sequence[str], wanted: Sequence[str | None]) -> None:
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise InvalidArgumentError(
            field="column",
            reason=f"{path.name} has more than one column named {', '.join(map(repr, repeated))}",
        )
    for column in wanted:
        if column is not None and column not in names:
            raise InvalidArgumentError(
                field="column",
                reason=f"{path.name} has no column {column!r}; it has {', '.join(names)}",
            )


def _batch_rows(batch: Any, key: str, value: str | None) -> Iterator[tuple[Any, Any]]:
    """Yield (key cell, value cell) of an Arrow record batch."""
    keys = batch.column(batch.schema.get_field_index(key)).to_pylist()
    if value is not None:
        values = batch.column(batch.schema.get_field_index(value)).to_pylist()
        yield from zip(map(_cell, keys), map(_cell, values), strict=True)
        return
    for cell, row in zip(keys, batch.to_pylist(), strict=True):
        yield _cell(cell), _compact(row)


def _parquet(path: Path, key: str, value: str | None, maker: _SlabMaker) -> Iterator[Slab]:
    import pyarrow.parquet as pq

    size = path.stat().st_size
    file = pq.ParquetFile(path)
    names = file.schema_arrow.names
    _check_columns(path, names, (key, value))
    rows = max(1, file.metadata.num_rows)
    columns = names if value is None else list(dict.fromkeys((key, value)))
    for batch in file.iter_batches(batch_size=SLAB_ROWS, columns=columns):
        for row in _batch_rows(batch, key, value):
            maker.add(*row)
            if maker.full:
                yield maker.take(size * maker.row // rows)
    yield maker.take(size)


def _delimited(
    path: Path, key: str, value: str | None, delimiter: str, maker: _SlabMaker
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
    path: Path, key: str, value: str | None, delimiter: str, maker: _SlabMaker, *, byte_wise: bool
) -> Iterator[Slab]:
    import pyarrow as pa
    from pyarrow import csv

    file, position = _open_plain(path)
    with file:
        names = _header(path, file, delimiter)
        _check_columns(path, names, (key, value))
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

    def __init__(self, reader: Any, read_to: Sequence[int], maker: _SlabMaker) -> None:
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
    maker: _SlabMaker,
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
    file, _ = _open_plain(path)
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
    malformed: _Malformed, position: Callable[[], int], maker: _SlabMaker, *, but: int = 0
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
        yield _compact(dict(zip(names, map(json_bytes, cells), strict=True)))


def _header(path: Path, file: IO[bytes], delimiter: str) -> list[str]:
    """Read the first row: the columns' names."""
    import csv

    line = file.readline(LINE_BYTES_MAX).decode("utf-8-sig", errors="replace")
    try:
        names = next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error as error:  # no text, or lines that end in CR alone
        raise _unreadable(path, f"its header row cannot be read: {error}") from error
    if not names:
        raise InvalidArgumentError(field="file", reason=f"{path.name}: it has no header row")
    return names
