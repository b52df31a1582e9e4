"""The file by which a server says that it serves: this process, and no other, at its addresses.

Whoever started the server cannot learn this from the addresses. An address may belong to another
process by now, which answers there, while the new server has ended because it could not be bound.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.process import private_files


@contextlib.contextmanager
def pid_file(path: Path | None) -> Iterator[None]:
    """Write this process's id to the file, and remove the file at the end; None: no file.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    if path is None:
        yield
        return
    unfinished = path.with_name(f"{path.name}.new")
    try:
        with open(unfinished, "w", encoding="ascii", opener=private_files.opener) as file:
            file.write(f"{os.getpid()}\n")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigurationError(reason=f"pid-file {path}: {error.strerror or error}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def add_flag(parser: Any) -> None:
    """Give a server's parser the flag that names the file."""
    parser.add_argument(
        "--pid-file",
        type=Path,
        metavar="PATH",
        help="holds this process's id from when it serves until it ends (no file)",
    )
