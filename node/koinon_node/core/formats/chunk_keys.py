"""Keys and records of bulk loads' staged rows in a partition (v1/loads.proto).

    u64 load_id || u64 attempt || u32 number  ->  packed columns (contract/columns.py)
    u64 load_id || u64 0       || u32 0       ->  u8 state || key   how far the load is merged here

These keys follow ``u16 partition_id || u8 kind`` in a data key. No attempt is 0. The mark stays
until the load is closed, so that a new primary knows how far the merge is.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from koinon_proto.contract.columns import Columns

_NAME = struct.Struct(">QQI")
_LOAD = struct.Struct(">Q")
_MERGED = b"\x01"
_UNDER_WAY = b"\x00"


class ChunkName(NamedTuple):
    """The name of a staged chunk within its partition."""

    load_id: int
    attempt: int
    number: int


def chunk_key(load_id: int, attempt: int, number: int) -> bytes:
    """Return the key of a chunk, without the partition and kind of a data key."""
    return _NAME.pack(load_id, attempt, number)


def load_key(load_id: int) -> bytes:
    """Return the common prefix of all keys that the load has staged."""
    return _LOAD.pack(load_id)


def mark_key(load_id: int) -> bytes:
    """Return the key of the load's mark, which sorts before the load's chunks."""
    return _NAME.pack(load_id, 0, 0)


def chunk_name(key: bytes) -> ChunkName:
    """Decode a chunk's key."""
    return ChunkName(*_NAME.unpack(key))


class Mark(NamedTuple):
    """The progress of a merge in a partition: done up to ``key``, or ``merged`` completely."""

    merged: bool = False
    key: bytes = b""


def encode_mark(mark: Mark) -> bytes:
    return (_MERGED if mark.merged else _UNDER_WAY) + mark.key


def decode_mark(data: bytes) -> Mark:
    return Mark(data[:1] == _MERGED, data[1:])


# --- chunks ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows ``[start, end)`` of a chunk, whose keys ascend."""

    columns: Columns
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def bytes(self) -> int:
        """The bytes of the rows' keys and values."""
        return sum(
            int(offsets[self.end] - offsets[self.start])
            for offsets in (self.columns.key_offsets, self.columns.value_offsets)
        )


def slice_of(chunk: Columns, after_key: bytes, until_key: bytes) -> Slice:
    """Return the rows with keys in (after_key, until_key]; b"" leaves that end open."""
    keys = _Keys(chunk)
    start = bisect.bisect_right(keys, after_key) if after_key else 0
    end = bisect.bisect_right(keys, until_key) if until_key else len(keys)
    return Slice(chunk, start, max(start, end))


def key_at(chunk: Columns, row: int) -> bytes:
    """Return the key of a row."""
    offsets = chunk.key_offsets
    return bytes(chunk.keys[offsets[row] : offsets[row + 1]])


class _Keys(Sequence[bytes]):
    """A chunk's keys as a sequence for binary search."""

    def __init__(self, chunk: Columns) -> None:
        self._chunk = chunk

    def __len__(self) -> int:
        return self._chunk.header.rows

    def __getitem__(self, row: Any) -> Any:
        return key_at(self._chunk, row)
