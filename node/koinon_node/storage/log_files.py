"""The files of a write-ahead log: creates them, reads them, and has the store take them over.

The store calls this module when it is opened, and the writer process while the node serves.
write_ahead_log.py appends to the log.
"""

from __future__ import annotations

import errno
import mmap
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from koinon_node.core.formats import log_format, log_recovery
from koinon_node.core.formats.log_format import RECORD_HEAD_BYTES
from koinon_node.core.formats.log_recovery import Found
from koinon_node.storage.directory import sync_directory
from koinon_node.storage.environment import META_DB
from koinon_node.storage.transactions import Gathered, gathered
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.process.private_files import make_directory

LOG = "log"
LOG_STATE = b"log"  # in META_DB, see encode_state
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Stretch = tuple[str, int, int]
"""(segment, start, end): a range of bytes in one file with consecutive records."""
Record = tuple[int, memoryview]
"""(position, body)."""


def segment_paths(directory: Path) -> list[Path]:
    """Return the segments in a log's directory, by number."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


@contextmanager
def mapped(paths: Sequence[Path]) -> Iterator[list[memoryview]]:
    """Map the files for reading."""
    with ExitStack() as stack:
        views = []
        for path in paths:
            file = stack.enter_context(path.open("rb"))
            pages = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            views.append(stack.enter_context(memoryview(pages)))
        yield views


def in_order(segments: Sequence[memoryview], life: int) -> list[memoryview]:
    """Sort the segments as ``surviving_records`` expects them."""

    def place(segment: memoryview) -> tuple[bool, int]:
        head = log_format.decode_head(segment)
        if head is None or head.life != life:
            return True, 0
        return False, head.first_position

    return sorted(segments, key=place)


def left_over(directory: Path, life: int, after: int) -> Iterator[Found]:
    """Yield the records of the log's last life above the position ``after``. A record's memory is
    valid until the next one is requested.

    Raises:
        DataDirectoryError: a record that was durable is missing.
    """
    paths = [path for path in segment_paths(directory / LOG) if path.stat().st_size]
    with mapped(paths) as segments:
        ordered = in_order(segments, life)
        try:
            for found in log_recovery.surviving_records(ordered, life, after):
                with found.body:
                    yield found
        except log_recovery.CorruptLogError as error:
            name = next(
                path.name
                for path, segment in zip(paths, segments, strict=True)
                if segment is ordered[error.segment]
            )
            raise DataDirectoryError(
                path=str(directory / LOG / name),
                reason=f"the log is damaged at byte {error.offset}: {error.reason}",
            ) from None


def make_log(directory: Path) -> bool:
    """Create the directory of a store's log durably, if there is none. Return False if the disk is
    full.

    Raises:
        DataDirectoryError: the directory cannot be created for another reason.
    """
    try:
        make_directory(directory / LOG)
    except OSError as error:
        if error.errno in NO_ROOM:
            return False
        raise DataDirectoryError(path=str(directory / LOG), reason=str(error)) from error
    sync_directory(directory)
    return True


def remove_log(directory: Path) -> None:
    """Remove a log that the store has taken over completely."""
    for path in segment_paths(directory / LOG):
        path.unlink()
    with suppress(OSError):  # there is no directory, or it holds foreign files
        (directory / LOG).rmdir()


def has_log(directory: Path) -> bool:
    """Return whether the store has a log directory."""
    return (directory / LOG).is_dir()


def new_life() -> int:
    """Return the number of a new life; see core/formats/log_format.py."""
    return secrets.randbits(63) | 1 << 63


def read_records(directory: Path, life: int, stretches: Sequence[Stretch]) -> list[Record]:
    """Read the records of these stretches.

    Raises:
        DataDirectoryError: the log does not hold the records that were written.
    """
    records: list[Record] = []
    for name, start, end in stretches:
        path = directory / LOG / name
        with path.open("rb") as file:
            file.seek(start)
            read = memoryview(file.read(end - start))
        at = 0
        while at < len(read):
            found = log_format.record_at(read, at, life)
            if found is None:
                reason = f"the record at byte {start + at} is not what was written there"
                raise DataDirectoryError(path=str(path), reason=reason)
            position, _, end_at = found
            records.append((position, read[at + RECORD_HEAD_BYTES : end_at]))
            at = end_at
    return records


def take_over(
    records: Sequence[Record], life: int, put: Callable[[Gathered, int], str]
) -> tuple[int, str]:
    """Have the store take over the records. ``put`` stores the rows of one transaction, which
    include the new log state, and gets their approximate bytes; it returns the reason if there is
    no room, else ''. Then fewer records are tried: at worst a transaction needs a page for each
    row.


    Return the last position that the store has now (0: none of these), and the reason for an early
    end.
    """
    rows, size, last = gathered(), 0, 0
    for position, body in records:
        gather(rows, body)
        size, last = size + len(body), position
    rows[META_DB][LOG_STATE] = encode_state(life, last)
    reason = put(rows, size)
    if not reason:
        return last, ""
    if len(records) == 1:
        return 0, reason
    half = len(records) // 2
    first, reason = take_over(records[:half], life, put)
    if reason:
        return first, reason
    second, reason = take_over(records[half:], life, put)
    return second or first, reason


def gather(rows: Gathered, body: memoryview) -> int:
    """Add the writes of a record to ``rows``; return how many rows they are."""
    count = 0
    for database, keys, values in log_format.decode_body(body):
        rows[database].update(zip(keys, values, strict=True))
        count += len(keys)
    return count


def encode_state(life: int, position: int) -> bytes:
    """Encode the store's note on its log: the life, and the position up to which the store has
    it.
    """
    return f"{life} {position}".encode()


def decode_state(state: str) -> tuple[int, int]:
    """Return (life, position); zeros if there never was a log."""
    life, _, position = (state or "0 0").partition(" ")
    return int(life), int(position)
