"""Text files: opening them, and dividing them into pieces that contain whole rows."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from koinon_proto.contract.errors import InvalidArgumentError

LINE_BYTES_MAX = 64 * 1024 * 1024
# UTF-32's mark begins with UTF-16's
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_COUNTED_BYTES = 4 * 1024 * 1024


def unreadable(path: Path, reason: str) -> InvalidArgumentError:
    """Build the error for a file that cannot be read."""
    return InvalidArgumentError(field="file", reason=f"{path.name}: {reason}")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[start, end)`` of an uncompressed file, which contain whole rows. Start 0: from the
    first row; end None: to the last one. A compressed file is one piece.
    """

    path: Path
    start: int = 0
    end: int | None = None


def _zstd(raw: IO[bytes]) -> IO[bytes]:
    import pyarrow as pa

    return cast("IO[bytes]", io.BufferedReader(pa.CompressedInputStream(raw, "zstd")))


_DECOMPRESS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".zst": _zstd}


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in _DECOMPRESS


def open_text(path: Path) -> tuple[IO[bytes], Callable[[], int]]:
    """Open a file, decompressed according to its suffix and positioned behind its byte order mark.
    Return it, with a function that returns how far the file on disk was read (0 for a pipe).

    Raises:
        InvalidArgumentError: it is UTF-16 or UTF-32.
    """
    raw = path.open("rb")
    tell = raw.tell if raw.seekable() else lambda: 0
    file = _DECOMPRESS.get(path.suffix.lower(), lambda same: same)(raw)
    head = file.peek(4)[:4]
    if head.startswith(_WIDE):
        file.close()
        raise unreadable(path, "it is UTF-16 or UTF-32; make it UTF-8: iconv -f UTF-16 -t UTF-8")
    if head.startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))
    return cast("IO[bytes]", file), tell


class Bounded:
    """The rest of a file, up to the end of a piece."""

    def __init__(self, file: IO[bytes], piece: Piece) -> None:
        """``file`` is positioned at the piece's first row, or at its start."""
        if piece.start:
            file.seek(piece.start)
        self._file = file
        self._left = None if piece.end is None else piece.end - file.tell()

    def read(self, size: int) -> bytes:
        return self._counted(self._file.read(self._at_most(size)))

    def lines(self) -> Iterator[bytes]:
        """Yield lines; a line longer than ``LINE_BYTES_MAX`` comes in parts."""
        if self._left is None:
            yield from iter(partial(self._file.readline, LINE_BYTES_MAX), b"")
        while line := self._counted(self._file.readline(self._at_most(LINE_BYTES_MAX))):
            yield line

    def _at_most(self, size: int) -> int:
        return size if self._left is None or 0 <= size < self._left else self._left

    def _counted(self, read: bytes) -> bytes:
        if self._left is not None:
            self._left -= len(read)
        return read


def line_ends(path: Path, wanted: int) -> Iterator[int]:
    """Yield positions where lines of an uncompressed file end, one about every ``wanted`` bytes,
    and the end of the file.
    """
    file, _ = open_text(path)
    size, cut = path.stat().st_size, 0
    with file:
        while cut < size:
            file.seek(cut + wanted)
            cut = file.tell() if _pass_over_line(file) else size
            yield cut


def _pass_over_line(file: IO[bytes]) -> bool:
    """Skip to the end of the line, which may be larger than memory; return whether there is one."""
    found = False
    while line := file.readline(_COUNTED_BYTES):
        found = True
        if line.endswith(b"\n"):
            break
    return found


def lines_before(file: IO[bytes], end: int) -> int:
    """Return the number of lines before byte ``end`` of a file, and leave the file at that
    position.
    """
    file.seek(0)
    lines = 0
    while (left := end - file.tell()) > 0 and (block := file.read(min(left, _COUNTED_BYTES))):
        lines += block.count(b"\n")
    return lines
