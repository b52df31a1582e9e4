"""Commands of Redis on the bits of strings. Bit 0 is the highest of the first byte."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from koinon_node.core.writes.joint_updates import CombineBits
from koinon_node.core.writes.updates import Result, SetBit
from koinon_node.partition.request_limits import check_key, check_value
from koinon_node.resp import wire
from koinon_node.resp.commands.arguments import SYNTAX, integer, keys_of_one_slot
from koinon_node.resp.commands.replies import one_if_written, value_in
from koinon_node.resp.commands.strings import update_of
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import Arguments, Encoded, Jointly, Outcome, Read
from koinon_node.resp.session import Session

_OPERATIONS = (b"AND", b"OR", b"XOR", b"NOT")
_OFFSETS_END = 1 << 32


def _offset(text: bytes) -> int:
    try:
        offset = integer(text)
    except RefusedError:
        offset = -1
    if not 0 <= offset < _OFFSETS_END:
        raise RefusedError("ERR bit offset is not an integer or out of range")
    return offset


def setbit(session: Session, arguments: Arguments) -> Outcome:
    """Set or clear a bit; reply with the bit before."""
    _, key, where, bit = arguments
    check_key(key)
    offset = _offset(where)
    if bit not in (b"0", b"1"):
        raise RefusedError("ERR bit is not an integer or out of range")
    keyspace = session.served.keyspace()
    check_value(offset // 8 + 1, keyspace)
    update = SetBit(offset, bit == b"1", keyspace.unnamed_ttl_ms)
    return update_of(key, update, one_if_written)


def getbit(session: Session, arguments: Arguments) -> Outcome:
    """Read a bit."""
    _, key, where = arguments
    check_key(key)
    return Read((key,), partial(_bit_at, _offset(where)))


def _bit_at(offset: int, found: Sequence[Encoded]) -> bytes:
    at, value = offset // 8, value_in(found)
    return wire.integer(value[at] >> 7 - offset % 8 & 1 if at < len(value) else 0)


class _Range:
    """The part of a value that BITCOUNT and BITPOS read: ``[start [end [BYTE | BIT]]]``."""

    def __init__(self, arguments: Arguments) -> None:
        unit = arguments[2].upper() if len(arguments) > 2 else b"BYTE"
        if len(arguments) > 3 or unit not in (b"BYTE", b"BIT"):
            raise RefusedError(SYNTAX)
        self._start = integer(arguments[0]) if arguments else 0
        self._end = integer(arguments[1]) if len(arguments) > 1 else -1
        self.has_end = len(arguments) > 1
        self._unit = 1 if unit == b"BIT" else 8

    def bits_of(self, value: bytes) -> tuple[int, int, int]:
        """Return the bits in the range as a number, how many they are, and the offset of the
        first.
        """
        size = len(value) * 8 // self._unit
        if self._start < 0 and self._end < 0 and self._start > self._end:
            return 0, 0, 0
        first, last = (max(0, at + size if at < 0 else at) for at in (self._start, self._end))
        last = min(last, size - 1)
        if first > last:
            return 0, 0, 0
        first, end = first * self._unit, (last + 1) * self._unit
        part = value[first // 8 : (end + 7) // 8]
        number = int.from_bytes(part, "big") >> -end % 8
        count = end - first
        return number & ((1 << count) - 1), count, first


def bitcount(session: Session, arguments: Arguments) -> Outcome:
    """Count the bits that are set in a range."""
    check_key(arguments[1])
    if len(arguments) == 3:
        raise RefusedError(SYNTAX)
    looked_at = _Range(arguments[2:])
    return Read(
        (arguments[1],),
        lambda found: wire.integer(looked_at.bits_of(value_in(found))[0].bit_count()),
    )


def bitpos(session: Session, arguments: Arguments) -> Outcome:
    """Find the first bit that is set, or clear."""
    check_key(arguments[1])
    bit = integer(arguments[2])
    if bit not in (0, 1):
        raise RefusedError("ERR The bit argument must be 1 or 0.")
    looked_at = _Range(arguments[3:])
    return Read((arguments[1],), partial(_place_of, bit, looked_at))


def _place_of(bit: int, looked_at: _Range, found: Sequence[Encoded]) -> bytes:
    if found[0] is None:
        return wire.integer(-1 if bit else 0)
    number, count, first = looked_at.bits_of(value_in(found))
    if not count:
        return wire.integer(-1)
    wanted = number if bit else number ^ ((1 << count) - 1)
    if wanted:
        return wire.integer(first + count - wanted.bit_length())
    # Zeros follow a value, unless the command gives an end.
    return wire.integer(-1 if bit or looked_at.has_end else first + count)


def bitop(session: Session, arguments: Arguments) -> Outcome:
    """Combine values bit by bit, and write the result."""
    operation = arguments[1].upper()
    if operation not in _OPERATIONS:
        raise RefusedError(SYNTAX)
    keys = keys_of_one_slot(arguments[2:])
    if operation == b"NOT" and len(keys) != 2:
        raise RefusedError("ERR BITOP NOT must be called with a single source key.")
    ttl_ms = session.served.keyspace().unnamed_ttl_ms
    return Jointly(keys, CombineBits(operation.decode(), len(keys) - 1, ttl_ms), _length)


def _length(result: Result) -> bytes:
    assert isinstance(result, int)
    return wire.integer(result)
