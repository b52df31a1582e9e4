"""The bytes of the write-ahead log: segments and records.

A log is a chain of segments. Each begins with a head, which has the log's life and the position of
the first record. Records follow without gaps; a record that does not fit begins the next segment:

    head      magic, version, life, first position, size, CRC    (HEAD_BYTES, the rest is unused)
    record    magic, length, CRC, life, position, synced, body   (the CRC covers what follows it)
    body      for each write: database, count, kinds of lengths; then key lengths, value lengths,
              keys, values, one after the other
    end       leftover bytes of the segment's earlier use

The *life* is a random number, a new one at each opening of the store. Bytes of another life are
ignored, so a reused segment need not be cleared; and no client can guess the life, so none can
write a value that passes for a record. *Positions* are dense within a life, from 1. *synced* is the
last position that was durable when the record was written.

log_recovery.py decides which records are valid after a crash. Pure: the driver reads and writes
(storage/write_ahead_log.py).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from koinon_node.core.formats.writer_frames import Writes

HEAD_BYTES = 4096  # a whole block, so that no record shares it
_VERSION = 1
_HEAD = struct.Struct("<8sIQQQI")  # magic, version, life, first position, size, CRC of these
_HEAD_MAGIC = b"koinlog\n"
_RECORD = struct.Struct("<4sIIQQQ")  # magic, length of the body, CRC, life, position, synced
RECORD_MAGIC = b"kRec"
_CRC_AT = 8
_WRITE = struct.Struct("<BI")  # database, count
_NO_VALUE = 0xFFFF_FFFF  # as a length: the key is deleted
RECORD_HEAD_BYTES = _RECORD.size


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a segment."""

    life: int
    first_position: int
    size: int  # of the whole segment, bytes


def encode_head(head: Head) -> bytes:
    """Return the first block of a segment."""
    fixed = _HEAD.pack(_HEAD_MAGIC, _VERSION, head.life, head.first_position, head.size, 0)
    crc = zlib.crc32(fixed[:-4])
    return (fixed[:-4] + crc.to_bytes(4, "little")).ljust(HEAD_BYTES, b"\0")


def decode_head(block: bytes | memoryview) -> Head | None:
    """Decode the head of a segment; return None if it is not valid."""
    if len(block) < HEAD_BYTES:
        return None
    magic, version, life, first, size, crc = _HEAD.unpack_from(block)
    if magic != _HEAD_MAGIC or version != _VERSION:
        return None
    if zlib.crc32(bytes(block[: _HEAD.size - 4])) != crc:
        return None
    return Head(life, first, size)


def encode_record(tickets: Sequence[Writes], life: int, position: int, synced: int) -> bytearray:
    """Encode the record of a commit group, given the writes of each of its tickets."""
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
    parts[0] = _RECORD.pack(RECORD_MAGIC, sum(map(len, parts)), 0, life, position, synced)
    record = bytearray().join(parts)
    crc = zlib.crc32(memoryview(record)[_CRC_AT + 4 :])
    record[_CRC_AT : _CRC_AT + 4] = crc.to_bytes(4, "little")
    return record


def decode_body(body: memoryview) -> Iterator[tuple[int, list[bytes], list[bytes | None]]]:
    """Yield (database, keys, values) of a valid record, as they were given to ``encode_record``."""
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
    """Return (position, synced, end offset) of the valid record of this life at the offset, or
    None.
    """
    if offset + _RECORD.size > len(segment):
        return None
    magic, length, crc, of_life, position, synced = _RECORD.unpack_from(segment, offset)
    end = offset + _RECORD.size + length
    if magic != RECORD_MAGIC or of_life != life or end > len(segment):
        return None
    if zlib.crc32(segment[offset + _CRC_AT + 4 : end]) != crc:
        return None
    return position, synced, end
