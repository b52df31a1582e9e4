"""The cursors of consumer groups: their keys and values, and the updates that change them.

A cursor is a group's position in the changes of one partition. It is a record of the kind CURSOR in
that partition, so it is replicated, moved and verified like every record, and no client can name
it.

    key:    u64 group_id
    value:  u8 1 || u64 generation || u64 sequence || u64 bound || u64 committed_at_ms
            || u16 length of the member's name || member's name || after_key

The rule that fences replaced consumers: no two owners of a partition ever have the same generation.
An owner first claims the cursor with its generation, which is refused if the stored one is higher,
and then commits with exactly the stored generation. The primary decides on both in the order of
sequences, over pending and stored records, so between the claim and a commit of one owner no other
owner has claimed. Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from koinon_node.core.formats.records import REST_BYTES_MAX, Record
from koinon_node.core.writes.updates import Change, Decided
from koinon_proto.contract.errors import (
    CursorMovedError,
    StaleGenerationError,
    UnsupportedVersionError,
)

MEMBER_BYTES_MAX: Final = 512
_VERSION = 1
_HEAD = struct.Struct(">BQQQQH")
_CURSOR_BYTES_MAX = _HEAD.size + MEMBER_BYTES_MAX + REST_BYTES_MAX
_U64 = struct.Struct(">Q")


class CursorPosition(NamedTuple):
    """A position in one partition; the fields are those of a feed's position."""

    sequence: int = 0
    bound: int = 0
    after_key: bytes = b""


BEGINNING = CursorPosition()


class GroupCursor(NamedTuple):
    """The value of a cursor."""

    generation: int  # of the owner that claimed it last
    position: CursorPosition
    committed_at_ms: int  # Unix time at which the position was set last; 0: it never was
    member: str  # the name of the owner that claimed it last


_NEW = GroupCursor(0, BEGINNING, 0, "")


def cursor_key(group_id: int) -> bytes:
    """Return the key, within its partition and kind, of the group's cursor."""
    return _U64.pack(group_id)


def encode_cursor(cursor: GroupCursor) -> bytes:
    """Encode a cursor's value."""
    member = cursor.member.encode()
    head = _HEAD.pack(
        _VERSION,
        cursor.generation,
        cursor.position.sequence,
        cursor.position.bound,
        cursor.committed_at_ms,
        len(member),
    )
    return head + member + cursor.position.after_key


def decode_cursor(value: bytes) -> GroupCursor:
    """Decode a cursor's value.

    Raises:
        UnsupportedVersionError: its encoding is one that this build does not know.
    """
    if value[0] != _VERSION:
        raise UnsupportedVersionError(what="group cursor", version=value[0], supported=_VERSION)
    _, generation, sequence, bound, committed_at_ms, length = _HEAD.unpack_from(value)
    end = _HEAD.size + length
    position = CursorPosition(sequence, bound, value[end:])
    return GroupCursor(generation, position, committed_at_ms, value[_HEAD.size : end].decode())


@dataclass(frozen=True, slots=True)
class ClaimCursor:
    """Make the holder of a generation the cursor's owner. The position ``start`` is for a cursor
    that has none yet. The result is the cursor. A repeated claim changes nothing.
    """

    partition_id: int
    generation: int
    member: str
    start: CursorPosition = BEGINNING

    @property
    def size(self) -> int:
        return _CURSOR_BYTES_MAX

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        stored = decode_cursor(record.value) if record is not None else _NEW
        if stored.generation > self.generation:
            raise _stale(self, stored)
        if record is not None and stored.generation == self.generation:
            return Decided(Change.LEAVE, record.value)
        if self.start != BEGINNING and not stored.committed_at_ms:
            stored = stored._replace(position=self.start, committed_at_ms=now_ms)
        return _put(stored._replace(generation=self.generation, member=self.member))


@dataclass(frozen=True, slots=True)
class CommitCursor:
    """Store a position for the owner of the cursor. A position behind the stored one, of a late or
    repeated commit, leaves the cursor alone. With ``after``, the cursor must still have that
    position: then a repeated commit is refused, and the writes of its batch with it. Only so an
    owner puts the cursor back.
    """

    partition_id: int
    generation: int
    position: CursorPosition
    after: CursorPosition | None = None

    @property
    def size(self) -> int:
        return _CURSOR_BYTES_MAX

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        stored = decode_cursor(record.value) if record is not None else _NEW
        if record is None or stored.generation != self.generation:
            raise _stale(self, stored)
        if self.after is None and self.position < stored.position:
            return Decided(Change.LEAVE, record.value)
        if self.after is not None and stored.position != self.after:
            raise CursorMovedError(
                partition_id=self.partition_id,
                expected_sequence=self.after.sequence,
                current_sequence=stored.position.sequence,
            )
        return _put(stored._replace(position=self.position, committed_at_ms=now_ms))


@dataclass(frozen=True, slots=True)
class ResetCursor:
    """Store a position for an operator. The group's generation was raised before, so that no owner
    with an older one commits afterwards.
    """

    partition_id: int
    generation: int
    position: CursorPosition

    @property
    def size(self) -> int:
        return _CURSOR_BYTES_MAX

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        stored = decode_cursor(record.value) if record is not None else _NEW
        if stored.generation > self.generation:
            raise _stale(self, stored)
        return _put(GroupCursor(self.generation, self.position, now_ms, ""))


def _put(cursor: GroupCursor) -> Decided:
    value = encode_cursor(cursor)
    return Decided(Change.PUT, value, value)


def _stale(
    update: ClaimCursor | CommitCursor | ResetCursor, stored: GroupCursor
) -> StaleGenerationError:
    return StaleGenerationError(
        partition_id=update.partition_id,
        generation=update.generation,
        current_generation=stored.generation,
    )
