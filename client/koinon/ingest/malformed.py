"""The file and line of a malformed row, which Spark does not tell. They are looked for once a job
has failed because of the row, in files of this machine.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

from koinon.ingest.failures import ROW_CHARS_MAX, MalformedRowError
from koinon.ingest.files import is_local, local_files
from koinon_proto.contract.errors import KoinonError

BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
"""Of files that are looked through."""


def located(error: KoinonError, paths: Sequence[str], kind: str) -> KoinonError:
    """Return the error, with the file and line of the row if it is of one that is found."""
    if not isinstance(error, MalformedRowError) or not all(map(is_local, paths)):
        return error
    with suppress(OSError, EOFError):
        for path, number in _candidates(error.row, paths, kind):
            shown = f": {error.row}" if kind != "jsonl" else ""
            return replace(error, reason=error.told(f"{path} line {number}{shown}"))
    return error


def _candidates(row: str, paths: Sequence[str], kind: str) -> Iterator[tuple[Path, int]]:
    first_line = row.splitlines()[0].encode() if row.strip() else b""
    cut = len(row) >= ROW_CHARS_MAX
    left = BYTES_MAX
    for path in local_files(paths):
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                left -= len(line)
                if left < 0:
                    return
                text = line.rstrip(b"\r\n")
                if kind == "jsonl":
                    is_it = bool(text.strip()) and not _is_object(text)
                else:
                    is_it = text.startswith(first_line) if cut else text == first_line
                if is_it and (number > 1 or kind == "jsonl"):
                    yield path, number


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
