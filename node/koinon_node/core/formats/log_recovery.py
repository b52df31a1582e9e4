"""Finds the end of the write-ahead log after a crash: tells a torn tail from lost durable records.

A log ends where no valid record of its life with the next position follows. Of unsynced writes any
blocks may be on the disk. So a bad record is a torn tail if nothing behind it shows that it was
durable once. A later record with a higher ``synced``, or a later segment (which is begun only after
a sync of all before it), shows that the disk has lost a write that it had acknowledged:
``CorruptLogError``. A torn tail is not removed: the next life ignores it.

Pure: the driver maps the segments (storage/log_files.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from koinon_node.core.formats.log_format import (
    HEAD_BYTES,
    RECORD_HEAD_BYTES,
    RECORD_MAGIC,
    decode_head,
    record_at,
)


class CorruptLogError(Exception):
    """The log lacks a record that was durable. ``segment``: the index among the given segments."""

    def __init__(self, segment: int, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.segment = segment
        self.offset = offset
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Found:
    """A valid record and its place."""

    segment: int  # the index among the given segments
    position: int
    body: memoryview


def surviving_records(segments: Sequence[memoryview], life: int, after: int) -> Iterator[Found]:
    """Yield the records of this life above the position ``after``, in order.

    ``segments``: whole, in the order of their first positions; segments without a valid head, or of
    another life, come last.

    Raises:
        CorruptLogError: a record that was durable is missing.
    """
    wanted = after + 1
    rests: list[tuple[int, int]] = []  # (segment, where its valid records end)
    for number, segment in enumerate(segments):
        head = decode_head(segment)
        if head is None or head.life != life:
            rests.append((number, 0))
            continue
        if head.size != len(segment):
            reason = f"it has {len(segment)} bytes, and was made with {head.size}"
            raise CorruptLogError(number, 0, reason)
        if head.first_position > wanted:
            reason = f"position {wanted} is missing, the next segment begins with "
            place, offset = rests[-1] if rests else (number, 0)
            raise CorruptLogError(place, offset, reason + str(head.first_position))
        offset, position = HEAD_BYTES, head.first_position
        while (found := record_at(segment, offset, life)) and found[0] == position:
            _, _, end = found
            if position == wanted:
                yield Found(number, position, segment[offset + RECORD_HEAD_BYTES : end])
                wanted += 1
            offset, position = end, position + 1
        rests.append((number, offset))
    for number, offset in rests:
        _check_torn(segments[number], number, offset, life, wanted)


def _check_torn(segment: memoryview, number: int, offset: int, life: int, wanted: int) -> None:
    """Raise CorruptLogError if the rest of the segment shows that position ``wanted`` was
    durable.
    """
    rest = bytes(segment[offset:])
    at = rest.find(RECORD_MAGIC)
    while at >= 0:
        found = record_at(segment, offset + at, life)
        if found is not None and found[0] > wanted and found[1] >= wanted:
            reason = f"position {wanted} is bad, but position {found[0]} shows that it was durable"
            raise CorruptLogError(number, offset, reason)
        at = rest.find(RECORD_MAGIC, at + 1)
