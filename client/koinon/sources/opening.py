"""Streams rows of CSV, JSON lines and Parquet files; never a whole file in memory.

A source yields slabs: rows as (key, value) columns, the bad rows among them, and the position in
the file after them. CSV cells are the bytes in the file (``007`` stays ``007``); a whole row as
JSON is compact and in the file's column order.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from koinon.sources.delimited import delimited, row_ends
from koinon.sources.json_lines import json_lines
from koinon.sources.row_batches import parquet_rows
from koinon.sources.slabs import Slab, SlabMaker
from koinon.sources.taken import Made, Maker, Taken
from koinon.sources.text_files import Piece, is_compressed, line_ends, unreadable
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError

FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
COMPRESSED = (".gz", ".bz2", ".zst")
DELIMITERS = {"csv": ",", "tsv": "\t"}


def format_of(path: Path, given: str | None) -> str:
    """Return the format, from the option or else from the suffix before one of compression."""
    if given:
        return given
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in COMPRESSED]
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
    """Yield the slabs of a file. ``value`` None: the whole row as JSON. A row whose value exceeds
    ``max_value_bytes`` is a bad row. Raises as ``read_piece`` does.
    """
    taken = Taken(key=(key,), value=value)
    return read_piece(Piece(path), file_format, taken, SlabMaker(max_value_bytes))


def pieces_of(path: Path, file_format: str, wanted: int) -> list[Piece]:
    """Divide a text file into pieces of about ``wanted`` bytes; a compressed file is one piece."""
    if is_compressed(path):
        return [Piece(path)]
    delimiter = DELIMITERS.get(file_format)
    found = line_ends(path, wanted) if delimiter is None else row_ends(path, delimiter, wanted)
    ends = list(found)
    return [Piece(path, *between) for between in zip([0, *ends], ends, strict=False)]


def read_piece(piece: Piece, file_format: str, taken: Taken, maker: Maker[Made]) -> Iterator[Made]:
    """Yield the rows of a piece of a file, in lots built by the maker.

    Raises:
        InvalidArgumentError: a column is missing, or the file cannot be read as this format; the
            reason names the file.
        OSError: the file cannot be opened.
    """
    path = piece.path
    if file_format == "jsonl":
        lots = json_lines(piece, taken, maker)
    elif file_format == "parquet":
        lots = parquet_rows(path, taken, maker)
    else:
        lots = delimited(piece, taken, DELIMITERS[file_format], maker)
    try:
        yield from lots
    except KoinonError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise unreadable(path, f"truncated or damaged: {error}") from error
    except OSError as error:
        if error.filename is not None:
            raise
        raise unreadable(path, str(error)) from error
    except ValueError as error:  # includes pyarrow.ArrowInvalid
        raise unreadable(path, str(error)) from error
