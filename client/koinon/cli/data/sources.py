"""Rows out of CSV, JSON lines and Parquet files, streaming: never a whole file in memory.

A source yields slabs: rows as (key, value) columns, the bad rows among what was read, and how far
into the file that was. CSV cells are bytes as they stand in the file (``007`` stays ``007``); a
whole row as JSON is compact and in the file's column order.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from koinon.cli.data.cells import batch_rows, encoded
from koinon.cli.data.delimited import delimited
from koinon.cli.data.slabs import (
    LINE_BYTES_MAX,
    SLAB_ROWS,
    Slab,
    SlabMaker,
    check_columns,
    open_plain,
    unreadable,
)
from koinon_proto.contract.errors import InvalidArgumentError

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
    maker = SlabMaker(max_value_bytes)
    if file_format == "jsonl":
        slabs = _json_lines(path, key, value, maker)
    elif file_format == "parquet":
        slabs = _parquet(path, key, value, maker)
    else:
        slabs = delimited(path, key, value, DELIMITERS[file_format], maker)
    try:
        yield from slabs
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise unreadable(path, f"truncated or damaged: {error}") from error
    except OSError as error:
        if error.filename is not None:
            raise
        raise unreadable(path, str(error)) from error
    except ValueError as error:  # pyarrow.ArrowInvalid among them
        raise unreadable(path, str(error)) from error


def _json_lines(path: Path, key: str, value: str | None, maker: SlabMaker) -> Iterator[Slab]:
    file, position = open_plain(path)
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
    return encoded(row.get(key)), line if value is None else encoded(row.get(value))


def _parquet(path: Path, key: str, value: str | None, maker: SlabMaker) -> Iterator[Slab]:
    import pyarrow.parquet as pq

    size = path.stat().st_size
    file = pq.ParquetFile(path)
    names = file.schema_arrow.names
    check_columns(path, names, (key, value))
    rows = max(1, file.metadata.num_rows)
    columns = names if value is None else list(dict.fromkeys((key, value)))
    for batch in file.iter_batches(batch_size=SLAB_ROWS, columns=columns):
        for row in batch_rows(batch, key, value):
            maker.add(*row)
            if maker.full:
                yield maker.take(size * maker.row // rows)
    yield maker.take(size)
