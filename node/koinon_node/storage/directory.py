"""A node's data directory: its lock, its identity, and checks that it is complete.

    identity     format version and store_id, with a checksum; written once, replaced whole
    data.mdb     the LMDB environment (lock.mdb: its reader table)
    in-use       locked (flock) while the node process, or a writer that outlives it, is alive
    unfinished   exists only while the directory is being created
    sync-failed  a sync failed after more writes had been acknowledged (see ``note_failed_sync``)

Invariant: a directory with any contents is never taken for an empty one. A torn, truncated, missing
or foreign file raises a DataDirectoryError that names the file.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import struct
import subprocess
import time
import zlib
from pathlib import Path

from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.process import private_files
from koinon_proto.process.child_python import module_command
from koinon_proto.process.printable import tell

FORMAT_VERSION = 2
IDENTITY = "identity"
DATA = "data.mdb"
LMDB_LOCK = "lock.mdb"
IN_USE = "in-use"
UNFINISHED = "unfinished"
SYNC_FAILED = "sync-failed"
_MAGIC = "koinon-node-store"
_OURS = frozenset({IDENTITY, DATA, LMDB_LOCK, IN_USE, UNFINISHED, SYNC_FAILED, f"{IDENTITY}.new"})
_LOCK_WAIT_S = 5.0  # a killed node's writer may still be finishing its last transaction
_VERIFY_TIMEOUT_S = 3600
_AT_FDCWD, _STATX_BTIME, _STATX_BYTES, _BTIME_AT = -100, 0x800, 256, 80  # linux/stat.h


def new_store_id() -> str:
    return secrets.token_hex(16)


def lock_directory(directory: Path, wait_s: float = _LOCK_WAIT_S) -> int:
    """Create the directory if needed, lock it, and return the descriptor that holds the lock.

    Raises:
        DataDirectoryError: another process uses the directory, or it cannot be created or written.
    """
    path = directory / IN_USE
    try:
        private_files.make_directory(directory, IDENTITY)
        foreign = sorted(n for n in os.listdir(directory) if n not in _OURS and n != "lost+found")  # noqa: PTH208
        if foreign and not (directory / IDENTITY).exists() and not (directory / DATA).exists():
            raise DataDirectoryError(
                path=str(directory / foreign[0]),
                reason="the directory is not a Koinon store and not empty",
            )
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, private_files.FILE_MODE)
    except OSError as error:
        raise DataDirectoryError(path=str(path), reason=error.strerror or str(error)) from error
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise DataDirectoryError(
                    path=str(path), reason="another node process uses this directory"
                ) from None
            time.sleep(0.02)


def begin_if_fresh(directory: Path) -> bool:
    """Return whether the store has to be created; remove the remains of an interrupted creation.

    Raises:
        DataDirectoryError: one part of a store exists and another is missing.
    """
    marker = directory / UNFINISHED
    identity, data = directory / IDENTITY, directory / DATA
    if marker.exists():
        for path in (identity, data, directory / LMDB_LOCK):
            path.unlink(missing_ok=True)
        return True
    if identity.exists() and data.exists():
        # These entries may not be durable, if the sync of an earlier start failed.
        sync_directory(directory)
        return False
    if identity.exists() or data.exists():
        missing = data if identity.exists() else identity
        raise DataDirectoryError(path=str(missing), reason="missing from a directory with a store")
    marker.touch()
    sync_directory(directory)
    sync_directory(directory.parent)
    return True


def finish_fresh(directory: Path) -> None:
    """Note durably that the store is complete."""
    (directory / UNFINISHED).unlink()
    sync_directory(directory)


def note_failed_sync(directory: Path) -> None:
    """Note for the next start in this boot that a sync failed.

    Linux reports the error once and then counts the pages as clean, though the disk may lack any of
    them. Writes acknowledged before such a sync are as uncertain as after a crash of the machine.
    After a reboot the note is not needed: no such store is trusted then.
    """
    try:
        (directory / SYNC_FAILED).touch()
    except OSError as error:  # for example a file system that became read-only
        tell(
            f"{directory}: a sync failed, and that cannot be noted ({error}): "
            "do not start a node on this directory again",
            stderr=True,
        )


def noted_failed_sync(directory: Path) -> bool:
    """Return whether a sync has failed since the store was last trusted."""
    return (directory / SYNC_FAILED).exists()


def forget_failed_sync(directory: Path) -> None:
    """Remove the note: the store is durable, or its copies are marked as untrusted."""
    (directory / SYNC_FAILED).unlink(missing_ok=True)


def write_identity(directory: Path, store_id: str) -> None:
    """Replace the identity file durably."""
    body = f"{_MAGIC} {FORMAT_VERSION}\nstore_id {store_id}\n"
    temporary = directory / f"{IDENTITY}.new"
    with temporary.open("w", encoding="ascii") as file:
        file.write(f"{body}crc32 {zlib.crc32(body.encode()):08x}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / IDENTITY)
    sync_directory(directory)


def read_identity(directory: Path) -> str:
    """Return the store_id.

    Raises:
        DataDirectoryError: the file is torn, truncated, foreign, or of an unknown version.
    """
    path = directory / IDENTITY
    try:
        text = path.read_bytes().decode("ascii")
    except UnicodeDecodeError:
        raise DataDirectoryError(path=str(path), reason="not a Koinon identity file") from None
    except OSError as error:
        raise DataDirectoryError(path=str(path), reason=error.strerror or str(error)) from error
    lines = text.split("\n")
    magic, _, version = lines[0].partition(" ")
    if magic != _MAGIC:
        raise DataDirectoryError(path=str(path), reason="not a Koinon identity file")
    if version.isdecimal() and int(version) != FORMAT_VERSION and len(lines) > 1:
        raise DataDirectoryError(
            path=str(path),
            reason=f"store format version {version}; this build supports {FORMAT_VERSION}",
        )
    body = "\n".join(lines[:2]) + "\n"
    if lines[2:] != [f"crc32 {zlib.crc32(body.encode()):08x}", ""]:
        raise DataDirectoryError(path=str(path), reason="torn or truncated (checksum mismatch)")
    return lines[1].removeprefix("store_id ")


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable.

    Raises:
        DataDirectoryError: the disk failed.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise DataDirectoryError(path=str(directory), reason=f"not synced: {error}") from error
    finally:
        os.close(descriptor)


def data_file_id(directory: Path) -> str:
    """Return the identity of the data file: its inode and birth time. No copy has the same. (A copy
    may get the inode of a deleted file, but not its birth time.)
    """
    path = directory / DATA
    return f"{path.stat().st_ino}.{_made_at_ns(path)}"


def _made_at_ns(path: Path) -> int:
    """Return the file's birth time in nanoseconds by statx(2), which ``os.stat`` does not call; 0
    if the file system keeps none.
    """
    found = ctypes.create_string_buffer(_STATX_BYTES)
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)  # C libraries before 2018
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, found):
        return 0
    (known,) = struct.unpack_from("=I", found, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", found, _BTIME_AT)
    return int(seconds * 10**9 + nanoseconds) if known & _STATX_BTIME else 0


def boot_id() -> str:
    """Return the id of the machine's current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def check_not_truncated(directory: Path, last_page: int, page_bytes: int) -> None:
    """Check that the file reaches to the last page in use.

    LMDB maps the file: reading a page beyond its end kills the process (SIGBUS). A valid file may
    be a little short, if its last pages were allocated and freed in one transaction. So another
    process reads a short file completely before it is accepted or refused.

    Raises:
        DataDirectoryError: pages in use are missing.
    """
    path = directory / DATA
    size, needed = path.stat().st_size, (last_page + 1) * page_bytes
    if size >= needed:
        return
    command = module_command("koinon_node.storage.verify_store", str(directory))
    result = subprocess.run(command, capture_output=True, timeout=_VERIFY_TIMEOUT_S, check=False)
    if result.returncode != 0:
        raise DataDirectoryError(
            path=str(path), reason=f"truncated: {size} bytes, its pages reach to {needed}"
        )
    os.truncate(path, needed)
