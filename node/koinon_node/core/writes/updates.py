"""Read-modify-write: what an update does to one record, a pure function of the record and the time.

The primary decides in the order of sequences, over what is pending and what is stored, as it does
on conditions (write_decisions.py). What follows from it are effects: backups, the log and the
store get records, never updates. A record that has expired is None here.

Integers are as Redis has them: 64 bits with a sign, in decimal, without anything around them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Context, Decimal
from enum import Enum
from typing import Final, NamedTuple, Protocol

from koinon_node.core.formats.records import Record, encode_record
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    NotANumberError,
    NumberOverflowError,
)

INTEGER_MIN: Final = -(1 << 63)
INTEGER_MAX: Final = (1 << 63) - 1
NUMBER_BYTES_MAX: Final = 330
"""Of what an increment writes: a number below ``_DECIMAL_END``, and its fraction."""
_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_DECIMAL = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_DECIMAL_END = Decimal(10) ** 309  # beyond a double
_FRACTION = Decimal(10) ** -17  # Redis keeps so many digits, too
_EXACT = Context(prec=600)

AN_INTEGER: Final = "an integer of 64 bits"
A_NUMBER: Final = "a decimal number"


class Change(Enum):
    """The effect of an update on the record."""

    LEAVE = "leave"
    PUT = "put"
    DELETE = "delete"


Result = int | bytes | bool | tuple[bool, bytes | None] | KoinonError | None
"""An error only among the results of a batch that goes on after one (atomic_batch.py)."""


class Decided(NamedTuple):
    """An update's change with its answer; what a PUT writes."""

    change: Change
    result: Result
    value: bytes = b""
    expires_at_ms: int = 0  # 0: never


class Update(Protocol):
    """An update of one record."""

    @property
    def size(self) -> int:
        """The bytes, at most, that it writes beside those of the record's own value."""

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        """Return what becomes of the live record.

        Raises:
            KoinonError: the record does not allow it; nothing is written.
        """


class ExpiryKind(Enum):
    NEVER = "never"
    KEEP = "keep"  # the record's own; a new one's is that of AFTER, or never if there is no ``ms``
    AT = "at"  # Unix time
    AFTER = "after"  # the decision


class Expiry(NamedTuple):
    """The expiry of the record that an update writes; AT, AFTER and KEEP use ``ms``."""

    kind: ExpiryKind
    ms: int = 0

    def at_ms(self, record: Record | None, now_ms: int) -> int:
        """Return the Unix time; 0: never. What is before all time is over in any case."""
        if self.kind is ExpiryKind.AT:
            return max(1, self.ms)
        if self.kind is ExpiryKind.KEEP and record is not None:
            return record.expires_at_ms
        if self.kind is ExpiryKind.AFTER or self.ms:
            return max(1, now_ms + self.ms)
        return 0


NEVER = Expiry(ExpiryKind.NEVER)
KEEP = Expiry(ExpiryKind.KEEP)


def expires_after(ttl_ms: int) -> Expiry:
    """Return the expiry of what lives so long from the decision on; 0: for ever."""
    return Expiry(ExpiryKind.AFTER, ttl_ms) if ttl_ms else NEVER


def parse_integer(text: bytes) -> int:
    """Return the integer.

    Raises:
        NotANumberError: it is none, or beyond 64 bits.
    """
    if _INTEGER.fullmatch(text) is not None:
        number = int(text)
        if INTEGER_MIN <= number <= INTEGER_MAX:
            return number
    raise NotANumberError(expected=AN_INTEGER)


def parse_decimal(text: bytes) -> Decimal:
    """Return the number; it is finite.

    Raises:
        NotANumberError: it is none, or beyond the range of a double.
        NumberOverflowError: it is infinite.
    """
    if text.lstrip(b"+-").lower() in (b"inf", b"infinity"):
        raise NumberOverflowError(expected=A_NUMBER)
    if len(text) <= NUMBER_BYTES_MAX and _DECIMAL.fullmatch(text) is not None:
        number = Decimal(text.decode("ascii"))
        if abs(number) < _DECIMAL_END:
            return number
    raise NotANumberError(expected=A_NUMBER)


@dataclass(frozen=True, slots=True)
class Increment:
    """Add to an integer; no record counts as 0. The record's expiry stays; a new record expires
    after ``ttl_ms`` (0: never). The result is the sum.
    """

    by: int
    ttl_ms: int = 0

    @property
    def size(self) -> int:
        return NUMBER_BYTES_MAX

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        total = self.by + (parse_integer(record.value) if record is not None else 0)
        if not INTEGER_MIN <= total <= INTEGER_MAX:
            raise NumberOverflowError(expected=AN_INTEGER)
        return Decided(Change.PUT, total, b"%d" % total, _kept(record, self.ttl_ms, now_ms))


@dataclass(frozen=True, slots=True)
class IncrementDecimal:
    """Add to a decimal number, exactly but for what is beyond 17 digits after the point; as
    ``Increment`` otherwise. The result is the sum as it is written.
    """

    by: Decimal
    ttl_ms: int = 0

    @property
    def size(self) -> int:
        return NUMBER_BYTES_MAX

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        before = parse_decimal(record.value) if record is not None else Decimal(0)
        total = _EXACT.add(before, self.by)
        if abs(total) >= _DECIMAL_END:
            raise NumberOverflowError(expected=A_NUMBER)
        text = f"{_EXACT.quantize(total, _FRACTION):f}".rstrip("0").rstrip(".")
        value = b"0" if text == "-0" else text.encode("ascii")
        return Decided(Change.PUT, value, value, _kept(record, self.ttl_ms, now_ms))


@dataclass(frozen=True, slots=True)
class Append:
    """Append to the value; no record counts as an empty one. The record's expiry stays, as with
    ``Increment``. The result is the new length.
    """

    value: bytes
    value_bytes_max: int
    ttl_ms: int = 0

    @property
    def size(self) -> int:
        return len(self.value)

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        value = self.value if record is None else record.value + self.value
        if len(value) > self.value_bytes_max:
            raise InvalidArgumentError(
                field="value", reason="too long", limit=self.value_bytes_max, actual=len(value)
            )
        return Decided(Change.PUT, len(value), value, _kept(record, self.ttl_ms, now_ms))


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Overwrite the value from ``offset`` on, with zeros up to there where it ends before; no
    record counts as an empty one, and nothing is changed by an empty ``value``. The record's expiry
    stays, as with ``Increment``. The result is the new length.
    """

    offset: int
    value: bytes
    ttl_ms: int = 0

    @property
    def size(self) -> int:
        return self.offset + len(self.value) if self.value else 0

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        before = record.value if record is not None else b""
        if not self.value:
            return Decided(Change.LEAVE, len(before))
        start = before[: self.offset].ljust(self.offset, b"\0")
        value = start + self.value + before[self.offset + len(self.value) :]
        return Decided(Change.PUT, len(value), value, _kept(record, self.ttl_ms, now_ms))


@dataclass(frozen=True, slots=True)
class SetBit:
    """Set a bit of the value, or clear it, with zeros up to there where the value ends before. The
    record's expiry stays, as with ``Increment``. The result is whether it was set.
    """

    offset: int  # 0: the highest of the first byte
    on: bool
    ttl_ms: int = 0

    @property
    def size(self) -> int:
        return self.offset // 8 + 1

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        at, bit = self.offset // 8, 0x80 >> self.offset % 8
        value = bytearray((record.value if record is not None else b"").ljust(at + 1, b"\0"))
        was_on = bool(value[at] & bit)
        value[at] = value[at] | bit if self.on else value[at] & ~bit
        expires_at_ms = _kept(record, self.ttl_ms, now_ms)
        return Decided(Change.PUT, was_on, bytes(value), expires_at_ms)


class Presence(Enum):
    """The presence of a record that an update asks for."""

    ANY = "any"
    ABSENT = "absent"
    PRESENT = "present"


class RecordIf(NamedTuple):
    """The record that an update asks for. With a ``value``, the record's is to be ``equal`` to it,
    or is not to be: no record is equal to none.
    """

    presence: Presence = Presence.ANY
    value: bytes | None = None
    equal: bool = True

    def holds(self, record: Record | None) -> bool:
        """Return whether it is this one."""
        if self.value is not None:
            return (record is not None and record.value == self.value) is self.equal
        there = Presence.ABSENT if record is None else Presence.PRESENT
        return self.presence in (Presence.ANY, there)


ANY_RECORD = RecordIf()


@dataclass(frozen=True, slots=True)
class Assign:
    """Write a value if the record is the one that is asked for. The result is whether that was
    done, and the value that was there before.
    """

    value: bytes
    expiry: Expiry = NEVER
    only_if: RecordIf = ANY_RECORD

    @property
    def size(self) -> int:
        return len(self.value)

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        before = record.value if record is not None else None
        if not self.only_if.holds(record):
            return Decided(Change.LEAVE, (False, before))
        expires_at_ms = self.expiry.at_ms(record, now_ms)
        return _put_until(record, self.value, expires_at_ms, now_ms, (True, before))


class ExpireIf(Enum):
    """The present expiry of the record that an ``Expire`` asks for. One that never expires counts
    as later than all others.
    """

    ANY = "any"
    NONE = "none"
    SOME = "some"
    SOONER = "sooner"  # than the new one
    LATER = "later"
    SOME_LATER = "some, later"


@dataclass(frozen=True, slots=True)
class Expire:
    """Change when the record expires. The result is whether that was done."""

    expiry: Expiry
    only_if: ExpireIf = ExpireIf.ANY

    @property
    def size(self) -> int:
        return 0

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        if record is None:
            return Decided(Change.LEAVE, False)
        before, after = record.expires_at_ms, self.expiry.at_ms(record, now_ms)
        asked = {
            ExpireIf.ANY: True,
            ExpireIf.NONE: not before,
            ExpireIf.SOME: bool(before),
            ExpireIf.SOONER: bool(before) and (not after or before < after),
            ExpireIf.LATER: bool(after) and (not before or before > after),
            ExpireIf.SOME_LATER: bool(after) and before > after,
        }[self.only_if]
        if not asked:
            return Decided(Change.LEAVE, False)
        return _put_until(record, record.value, after, now_ms, True)


@dataclass(frozen=True, slots=True)
class GetAndExpire:
    """Change when the record expires; the result is its value, None if there is no record."""

    expiry: Expiry

    @property
    def size(self) -> int:
        return 0

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        if record is None:
            return Decided(Change.LEAVE, None)
        expires_at_ms = self.expiry.at_ms(record, now_ms)
        return _put_until(record, record.value, expires_at_ms, now_ms, record.value)


@dataclass(frozen=True, slots=True)
class Look:
    """Change nothing; the result is the record, encoded as the store has it, None if there is none.
    What the same batch has written has no sequence yet: 0.
    """

    @property
    def size(self) -> int:
        return 0

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        if record is None:
            return Decided(Change.LEAVE, None)
        encoded = encode_record(record.sequence, record.value, record.expires_at_ms)
        return Decided(Change.LEAVE, encoded)


@dataclass(frozen=True, slots=True)
class Put:
    """Write a value, also where it is there already: the record has a new version. No result."""

    value: bytes
    ttl_ms: int = 0  # 0: it never expires

    @property
    def size(self) -> int:
        return len(self.value)

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        expires_at_ms = now_ms + self.ttl_ms if self.ttl_ms else 0
        return Decided(Change.PUT, None, self.value, expires_at_ms)


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete the record; the result is whether there was one."""

    @property
    def size(self) -> int:
        return 0

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        change = Change.LEAVE if record is None else Change.DELETE
        return Decided(change, record is not None)


@dataclass(frozen=True, slots=True)
class RemoveIf:
    """Delete the record if it is the one that is asked for; the result is whether that was done."""

    only_if: RecordIf

    @property
    def size(self) -> int:
        return 0

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        removes = record is not None and self.only_if.holds(record)
        return Decided(Change.DELETE if removes else Change.LEAVE, removes)


@dataclass(frozen=True, slots=True)
class GetAndDelete:
    """Delete the record; the result is its value, None if there was no record."""

    @property
    def size(self) -> int:
        return 0

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        if record is None:
            return Decided(Change.LEAVE, None)
        return Decided(Change.DELETE, record.value)


def _kept(record: Record | None, ttl_ms: int, now_ms: int) -> int:
    """Return when a record expires that keeps its expiry, or is made to live so long."""
    return Expiry(ExpiryKind.KEEP, ttl_ms).at_ms(record, now_ms)


def _put_until(
    record: Record | None, value: bytes, expires_at_ms: int, now_ms: int, result: Result
) -> Decided:
    """Put the value; one that would have expired already leaves no record."""
    if not 0 < expires_at_ms <= now_ms:
        same = record is not None and record.value is value
        if same and record is not None and record.expires_at_ms == expires_at_ms:
            return Decided(Change.LEAVE, result)
        return Decided(Change.PUT, result, value, expires_at_ms)
    return Decided(Change.DELETE if record is not None else Change.LEAVE, result)
