"""CSV, TSV and JSON lines as record batches of keys and values, as ``load`` reads them.

A batch has the key, the value, and the other columns that options name. If malformed rows are kept,
it also has ``MALFORMED``: the place and the text of a malformed row, null for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from koinon.ingest.failures import ROW_CHARS_MAX
from koinon.sources.delimited import numbered_rows
from koinon.sources.json_lines import add_line
from koinon.sources.opening import DELIMITERS, read_piece
from koinon.sources.slabs import SLAB_BYTES, SLAB_ROWS
from koinon.sources.taken import Cells, Taken
from koinon.sources.text_files import Piece, lines_before, open_text
from koinon.spark.writing.planning import MALFORMED
from koinon_proto.contract.errors import InvalidArgumentError

TEXT_KINDS: Final = ("csv", "tsv", "jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextReader:
    """Reads pieces of text files in a task. ``names``: of the key, the value and the other columns;
    ``types``: of the other columns, by name, as Spark's schema writes them; columns that are
    missing here are strings. ``zone``: for timestamps without a time zone. ``keep``: True keeps
    malformed rows; False lets the first one fail the task.
    """

    kind: str
    taken: Taken
    names: tuple[str, ...]
    types: Mapping[str, str] = field(default_factory=dict)
    zone: str = "UTC"
    keep: bool = False

    @property
    def fields(self) -> list[tuple[str, str]]:
        """The columns of the batches, with their types."""
        named = [(name, self.types.get(name, "string")) for name in self.names]
        return [*named, (MALFORMED, "string")] if self.keep else named

    def batches(self, piece: Piece, names: Sequence[str]) -> Iterator[Any]:
        """Yield the rows of a piece as record batches of these columns.

        Raises:
            InvalidArgumentError: a row is malformed, or the file cannot be read.
        """
        for batch in read_piece(piece, self.kind, self.taken, _BatchMaker(self, piece)):
            yield batch.select(list(names))

    def batches_of_lines(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the rows of record batches of JSON lines."""
        maker = _BatchMaker(self, None)
        for batch in batches:
            for line in batch.column(0).cast("binary").to_pylist():
                add_line(line or b"", self.taken, maker)
                if maker.full:
                    yield maker.take(0)
            yield maker.take(0)


class _BatchMaker:
    """Builds record batches from rows."""

    def __init__(self, reader: TextReader, piece: Piece | None) -> None:
        """``piece``: the part of the file that the rows come from; None: unknown."""
        self.row = 0
        self.line = 0
        self._reader = reader
        self._piece = piece
        self._taken = self._skip = 0
        self._rows: list[tuple[bytes | None, ...]] = []
        self._bytes = 0
        self._bad: list[tuple[int, int, str, bytes]] = []  # row, line of the piece, reason, text
        self._places: Iterator[tuple[int, tuple[int, bytes]]] | None = None

    def start_again(self) -> None:
        self.row, self._skip = 0, self._taken
        self._rows, self._bad, self._bytes = [], [], 0

    def add(self, key: bytes | None, value: bytes | None, beside: Cells = ()) -> None:
        self.row += 1
        if self.row > self._skip:
            self._rows.append((key, value, *beside))
            self._bytes += len(key or b"") + len(value or b"") + sum(len(c or b"") for c in beside)

    def refuse(self, reason: str, text: bytes = b"") -> None:
        self.row += 1
        if self.row > self._skip:
            self._bad.append((self.row, self.line, reason, text))
            self._bytes += len(text)

    @property
    def full(self) -> bool:
        return len(self._rows) + len(self._bad) >= SLAB_ROWS or self._bytes >= SLAB_BYTES

    def take(self, position: int) -> Any:
        """Return the record batch of the rows since the last call.

        Raises:
            InvalidArgumentError: a row is malformed, and malformed rows are not kept.
        """
        import pyarrow as pa

        told = [self._described(*bad) for bad in self._bad if self._reader.keep]
        if self._bad and not told:
            place = self._described(*self._bad[0])[:ROW_CHARS_MAX]
            raise InvalidArgumentError(
                field="a malformed row", reason=f"{place}; --bad-records DIR keeps such rows apart"
            )
        rows, self._rows, self._bad, self._bytes = self._rows, [], [], 0
        self._taken = self.row
        names, nothing = self._reader.names, [None] * len(told)
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        made = [pa.array([*cells, *nothing], pa.binary()).view(pa.string()) for cells in columns]
        for at, name in enumerate(names):
            if (kind := self._reader.types.get(name)) is not None:
                made[at] = typed(made[at], kind, self._reader.zone)
        if self._reader.keep:
            names = (*names, MALFORMED)
            made.append(pa.array([*[None] * len(rows), *told], pa.string()))
        return pa.RecordBatch.from_arrays(made, names=list(names))

    def _described(self, row: int, line: int, reason: str, text: bytes) -> str:
        """Return the place, the fault and the text of a malformed row."""
        place = ""
        if self._piece is not None:
            if self._reader.kind in DELIMITERS:
                number, text = self._find(row)
            else:
                number = self._lines_before() + line
            place = f"{self._piece.path} line {number}: "
        return f"{place}{reason}: {text.strip().decode(errors='backslashreplace')}"

    def _find(self, row: int) -> tuple[int, bytes]:
        """Return the line number and the text of a CSV row, by reading the piece once more. Rows
        must be requested in ascending order.
        """
        assert self._piece is not None
        if self._places is None:
            delimiter = DELIMITERS[self._reader.kind]
            self._places = enumerate(numbered_rows(self._piece, delimiter), start=1)
        return next((found for at, found in self._places if at == row), (0, b""))

    def _lines_before(self) -> int:
        assert self._piece is not None
        if not self._piece.start:
            return 0
        file, _ = open_text(self._piece.path)
        with file:
            return lines_before(file, self._piece.start)


# --- types of cells -------------------------------------------------------------------------------


def fitting(column: Any, zone: str) -> list[str]:
    """Return the types that all cells of a string column fit, the simplest first."""
    found = []
    for kind in TYPES:
        try:
            typed(column, kind, zone)
        except ValueError:  # Arrow's types
            continue
        found.append(kind)
    return found


TYPES: Final = ("long", "double", "boolean", "date", "timestamp")


def typed(column: Any, kind: str, zone: str) -> Any:
    """Convert a column of strings to this type; empty cells become null.

    Raises:
        ValueError: a cell does not fit the type (Arrow's error).
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    if kind != "timestamp":
        types = {
            "long": pa.int64(),
            "double": pa.float64(),
            "boolean": pa.bool_(),
            "date": pa.date32(),
        }
        return column.cast(types[kind])
    try:
        return column.cast(pa.timestamp("us", "UTC"))
    except pa.ArrowInvalid:
        return pc.assume_timezone(column.cast(pa.timestamp("us")), zone)
