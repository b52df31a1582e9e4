"""The files of a write-ahead log: making them, reading them, and having the store take them over.

The store does so when it is opened, and the writer process while a node serves, which needs no
event loop for it. write_ahead_log.py has what appends.
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
"""(segment, from, to): bytes of one file, records that follow one another."""
Record = tuple[int, memoryview]
"""(position, body)."""


def segment_paths(directory: Path) -> list[Path]:
    """Return the segments in a directory of a log, by number."""
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
    """Return the segments as ``surviving_records`` wants them."""

    def place(segment: memoryview) -> tuple[bool, int]:
        head = log_format.decode_head(segment)
        if head is None or head.life != life:
            return True, 0
        return False, head.first_position

    return sorted(segments, key=place)


def left_over(directory: Path, life: int, after: int) -> Iterator[Found]:
    """Yield what the log of a store holds of its last life above the position ``after``. A record
    is valid until the next is asked for.

    Raises:
        DataDirectoryError: something is missing that was durable.
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
    """Make the directory of a store's log, durably, if there is none; return whether there is one
    now. There is not on a full disk.

    Raises:
        DataDirectoryError: it cannot be made.
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
    """Remove a log of which the store has all."""
    for path in segment_paths(directory / LOG):
        path.unlink()
    with suppress(OSError):  # there is none, or something that is not ours lies in it
        (directory / LOG).rmdir()


def has_log(directory: Path) -> bool:
    """Return whether the store has the directory of a log."""
    return (directory / LOG).is_dir()


def new_life() -> int:
    """Return the number of a new life; see core/formats/log_format.py."""
    return secrets.randbits(63) | 1 << 63


def read_records(directory: Path, life: int, stretches: Sequence[Stretch]) -> list[Record]:
    """Return the records of these stretches.

    Raises:
        DataDirectoryError: the log does not hold what was written to it.
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
    """Have the store take over the records. ``put`` is given rows that belong into one transaction,
    with the note up to which position the store then has the log, and about how many bytes they
    are; it returns why there is no room for them. Fewer are tried then: a transaction needs a page
    for each row at worst.

    Return the last position that the store has now (0: none of these), and why not all.
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
    """Add what a record writes; return how many rows that is."""
    count = 0
    for database, keys, values in log_format.decode_body(body):
        rows[database].update(zip(keys, values, strict=True))
        count += len(keys)
    return count


def encode_state(life: int, position: int) -> bytes:
    """Return what the store notes of its log: of which life it has all up to which position."""
    return f"{life} {position}".encode()


def decode_state(state: str) -> tuple[int, int]:
    """Return (life, position); zeros where there never was a log."""
    life, _, position = (state or "0 0").partition(" ")
    return int(life), int(position)
