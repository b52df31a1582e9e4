"""Reads a whole file, or standard input, with a limit on its size."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

from koinon_proto.contract.errors import InvalidArgumentError

STANDARD_INPUT = "standard input"


def open_whole(file: str) -> AbstractContextManager[BinaryIO]:
    """Open the file; ``-`` is standard input, which stays open afterwards.

    Raises:
        OSError: the file cannot be opened.
    """
    return nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb")


def read_whole(source: BinaryIO, limit: int, *, field: str, what: str) -> bytes:
    """Read all bytes of the source, at most one more than the limit, since a device or a pipe may
    have no end.

    Args:
        field: the option that names the source, for the error.
        what: the thing that has this limit, for the error: "a value".

    Raises:
        InvalidArgumentError: the source has more bytes than ``limit``.
        OSError: the source cannot be read.
    """
    try:
        data = source.read(limit + 1)
    except OSError as error:  # a closed standard input has no name
        raise OSError(error.errno, error.strerror, error.filename or STANDARD_INPUT) from None
    if len(data) <= limit:
        return data
    status = os.fstat(source.fileno())
    is_file = stat.S_ISREG(status.st_mode)
    raise InvalidArgumentError(
        field=field,
        reason=f"longer than {what} may be, in bytes{'' if is_file else '; no more was read'}",
        limit=limit,
        actual=status.st_size if is_file else len(data),
    )
