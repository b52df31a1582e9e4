"""Encodes messages with large fields of bytes in parts, so that the fields are not copied.

Protobuf's own encoder writes a message into a buffer that it doubles as it grows, and copies the
whole at the end: some 4 ms for 2 MB, once for each time that it is sent. What sends many parts at
once (writev) needs none of that. In protobuf's wire format a message is its fields one after the
other, in any order: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_LENGTH_DELIMITED = 2  # the wire type of bytes, and of messages within messages


def with_bytes(encoded: bytes, field_number: int, values: Iterable[bytes]) -> list[bytes]:
    """Return, in parts, the encoded message with these values of a repeated field of bytes behind
    those that it has.
    """
    tag = _varint(field_number << 3 | _LENGTH_DELIMITED)
    parts = [encoded]
    for value in values:
        parts += (tag + _varint(len(value)), value)
    return parts


def as_field(field_number: int, parts: Sequence[bytes]) -> list[bytes]:
    """Return, in parts, an encoded message whose only field is the message of these parts."""
    tag = _varint(field_number << 3 | _LENGTH_DELIMITED)
    return [tag + _varint(sum(map(len, parts))), *parts]


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
