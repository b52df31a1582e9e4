"""The bytes of the write-ahead log: records, segments, and what is left of them after a crash.

A log is a chain of segments. Each begins with a head that says whose it is and which position its
first record has; records follow one another without gaps, and one that does not fit begins the next
segment:

    head      magic, version, life, first position, size, CRC    (HEAD_BYTES, the rest is unused)
    record    magic, length, CRC, life, position, synced, body   (the CRC covers what follows it)
    body      for each write: database, count, kinds of lengths; then key lengths, value lengths,
              keys, values, one after the other
    end       whatever a segment held before it was used again

The *life* is a random number, another one whenever the store is opened. Everything of another life
counts as nothing, so a segment that is used again need not be cleared; and no client can guess it,
so none can write a value that passes for a record. *Positions* are dense within a life, from 1.
*synced* is the last position that was durable when the record was made.

After a crash a log ends where no valid record of its life with the next position follows. What was
written and never synced may be there in part, in any order of its blocks. So a bad record is the
torn tail if nothing behind it shows that it was durable once. A later record that says so, or a
later segment (which is begun only after all before it has been synced), shows that the disk has
lost what it had acknowledged: ``CorruptLogError``.

Pure: the driver reads and writes (storage/write_ahead_log.py).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from koinon_node.core.frames import Writes

HEAD_BYTES = 4096  # a block: no record shares it
_VERSION = 1
_HEAD = struct.Struct("<8sIQQQI")  # magic, version, life, first position, size, CRC of these
_HEAD_MAGIC = b"koinlog\n"
_RECORD = struct.Struct("<4sIIQQQ")  # magic, length of the body, CRC, life, position, synced
_RECORD_MAGIC = b"kRec"
_CRC_AT = 8
_WRITE = struct.Struct("<BI")  # database, count
_NO_VALUE = 0xFFFF_FFFF  # as a length: the key is deleted
RECORD_HEAD_BYTES = _RECORD.size


class CorruptLogError(Exception):
    """The log lacks something that was durable. ``segment``: its place among those given."""

    def __init__(self, segment: int, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.segment = segment
        self.offset = offset
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Head:
    """What a segment says of itself."""

    life: int
    first_position: int
    size: int  # of the whole segment, bytes


@dataclass(frozen=True, slots=True)
class Found:
    """A valid record, and where it stands."""

    segment: int  # its place among those given
    position: int
    body: memoryview


def encode_head(head: Head) -> bytes:
    """Return the first block of a segment."""
    fixed = _HEAD.pack(_HEAD_MAGIC, _VERSION, head.life, head.first_position, head.size, 0)
    crc = zlib.crc32(fixed[:-4])
    return (fixed[:-4] + crc.to_bytes(4, "little")).ljust(HEAD_BYTES, b"\0")


def decode_head(block: bytes | memoryview) -> Head | None:
    """Return the head of a segment; None if there is no valid one."""
    if len(block) < HEAD_BYTES:
        return None
    magic, version, life, first, size, crc = _HEAD.unpack_from(block)
    if magic != _HEAD_MAGIC or version != _VERSION:
        return None
    if zlib.crc32(bytes(block[: _HEAD.size - 4])) != crc:
        return None
    return Head(life, first, size)


def encode_record(tickets: Sequence[Writes], life: int, position: int, synced: int) -> bytearray:
    """Return the record of a commit group, given as what each of its tickets writes."""
    parts = [b""]
    for writes in tickets:
        for database, keys, values in writes:
            count = len(keys)
            lengths = [_NO_VALUE if value is None else len(value) for value in values]
            parts.append(_WRITE.pack(database, count))
            parts.append(struct.pack(f"<{count}H", *map(len, keys)))
            parts.append(struct.pack(f"<{count}I", *lengths))
            parts += keys
            parts += filter(None, values)
    parts[0] = _RECORD.pack(_RECORD_MAGIC, sum(map(len, parts)), 0, life, position, synced)
    record = bytearray().join(parts)
    crc = zlib.crc32(memoryview(record)[_CRC_AT + 4 :])
    record[_CRC_AT : _CRC_AT + 4] = crc.to_bytes(4, "little")
    return record


def decode_body(body: memoryview) -> Iterator[tuple[int, list[bytes], list[bytes | None]]]:
    """Yield (database, keys, values) of a valid record, as ``encode_record`` was given them."""
    at = 0
    data = bytes(body)
    while at < len(data):
        database, count = _WRITE.unpack_from(data, at)
        at += _WRITE.size
        key_lengths = struct.unpack_from(f"<{count}H", data, at)
        at += 2 * count
        value_lengths = struct.unpack_from(f"<{count}I", data, at)
        at += 4 * count
        ends = list(accumulate(key_lengths, initial=at))
        keys = [data[start:end] for start, end in pairwise(ends)]
        at = ends[-1]
        if _NO_VALUE not in value_lengths:
            ends = list(accumulate(value_lengths, initial=at))
            values: list[bytes | None] = [data[start:end] for start, end in pairwise(ends)]
            at = ends[-1]
        else:
            values = []
            for length in value_lengths:
                if length == _NO_VALUE:
                    values.append(None)
                else:
                    values.append(data[at : at + length])
                    at += length
        yield database, keys, values


def record_at(segment: memoryview, offset: int, life: int) -> tuple[int, int, int] | None:
    """Return (position, synced, where it ends) of the valid record of that life which begins at the
    offset; None if there is none.
    """
    if offset + _RECORD.size > len(segment):
        return None
    magic, length, crc, of_life, position, synced = _RECORD.unpack_from(segment, offset)
    end = offset + _RECORD.size + length
    if magic != _RECORD_MAGIC or of_life != life or end > len(segment):
        return None
    if zlib.crc32(segment[offset + _CRC_AT + 4 : end]) != crc:
        return None
    return position, synced, end


def replay(segments: Sequence[memoryview], life: int, after: int) -> Iterator[Found]:
    """Yield the records of that life whose position is above ``after``, in order.

    ``segments``: whole, in the order of their first positions; at the end those without a valid
    head, or of another life.

    Raises:
        CorruptLogError: something is missing that was durable.
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
                yield Found(number, position, segment[offset + _RECORD.size : end])
                wanted += 1
            offset, position = end, position + 1
        rests.append((number, offset))
    for number, offset in rests:
        _check_torn(segments[number], number, offset, life, wanted)


def _check_torn(segment: memoryview, number: int, offset: int, life: int, wanted: int) -> None:
    """Check that nothing in the rest of the segment shows that position ``wanted`` was durable."""
    rest = bytes(segment[offset:])
    mark = _RECORD_MAGIC
    at = rest.find(mark)
    while at >= 0:
        found = record_at(segment, offset + at, life)
        if found is not None and found[0] > wanted and found[1] >= wanted:
            reason = f"position {wanted} is bad, {found[0]} says that it was durable"
            raise CorruptLogError(number, offset, reason)
        at = rest.find(mark, at + 1)
