"""Makes servers' files private to the user as whom they run.

Records lie in data directories as they are. So a process that makes such files does that with
``only_for_owner``, and a directory of its own that others could read (it was made by an earlier
build, or by hand) is tightened when it is opened, and the log says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

log = logging.getLogger(__name__)

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def only_for_owner() -> None:
    """Make all files that this process creates from now on private to its user."""
    os.umask(0o077)


def opener(path: str, flags: int) -> int:
    """For ``open``: a created file is private to its user."""
    return os.open(path, flags, FILE_MODE)


def make_directory(directory: Path, marker: str = "") -> None:
    """Make the directory, or take one that is there; others may not look into it, nor read the
    files that lie in it. What belongs to another user stays as it is, and the log says so.

    ``marker`` is the file by which a directory that holds anything is known for ours: another one
    is left alone.

    Raises:
        OSError: it cannot be made.
    """
    if not directory.exists():
        directory.mkdir(parents=True, mode=DIRECTORY_MODE)
    elif marker and not (directory / marker).exists() and any(directory.iterdir()):
        return
    wide = [path for path in (directory, *directory.iterdir()) if _is_wide(path)]
    left = [path for path in wide if not _tighten(path)]
    if wide and wide != left:
        log.warning("data directory was open to other users: made private path=%s", directory)
    if left:
        log.warning("data is open to other users, and not ours to change path=%s", left[0])


def _is_wide(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:  # gone meanwhile
        return False
    kind = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return kind and path.name != "lost+found" and bool(found.st_mode & 0o077)


def _tighten(path: Path) -> bool:
    with contextlib.suppress(PermissionError):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o077)
        return True
    return False
