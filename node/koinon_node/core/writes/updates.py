"""Read-modify-write updates of one record: pure functions of the record and the time.

The primary evaluates updates in sequence order over pending and stored records, like conditions
(write_decisions.py). Their results are effects: backups, the log and the store get records, never
updates. An expired record is None here.

Integers have Redis's format: signed, of 64 bits, in decimal, without spaces or leading zeros.
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
"""The most bytes that an increment writes: a number below ``_DECIMAL_END``, and its fraction."""
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
"""An error occurs only in a batch with ``goes_on`` (atomic_batch.py)."""


class Decided(NamedTuple):
    """An update's change and result, with the record that a PUT writes."""

    change: Change
    result: Result
    value: bytes = b""
    expires_at_ms: int = 0  # 0: never


class Update(Protocol):
    """An update of one record."""

    @property
    def size(self) -> int:
        """The most bytes that it writes beyond the record's present value."""

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        """Decide on the live record.

        Raises:
            KoinonError: the record does not allow the update; nothing is written.
        """


class ExpiryKind(Enum):
    NEVER = "never"
    KEEP = "keep"  # the record's expiry stays; a new record expires after ``ms``, 0: never
    AT = "at"  # Unix time
    AFTER = "after"  # ``ms`` after the decision


class Expiry(NamedTuple):
    """The expiry of the record that an update writes. AT, AFTER and KEEP use ``ms``."""

    kind: ExpiryKind
    ms: int = 0

    def at_ms(self, record: Record | None, now_ms: int) -> int:
        """Return the expiry as Unix time in ms; 0: never. An expiry before 1970 becomes a past
        time.
        """
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
    """Return an expiry of so many ms after the decision; 0: never."""
    return Expiry(ExpiryKind.AFTER, ttl_ms) if ttl_ms else NEVER


def parse_integer(text: bytes) -> int:
    """Parse an integer.

    Raises:
        NotANumberError: the text is no integer, or exceeds 64 bits.
    """
    if _INTEGER.fullmatch(text) is not None:
        number = int(text)
        if INTEGER_MIN <= number <= INTEGER_MAX:
            return number
    raise NotANumberError(expected=AN_INTEGER)


def parse_decimal(text: bytes) -> Decimal:
    """Parse a finite decimal number.

    Raises:
        NotANumberError: the text is no number, or beyond the range of a double.
        NumberOverflowError: the number is infinite.
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
    """Add to a decimal number, exact to 17 digits after the point. Expiries as with ``Increment``.
    The result is the sum in its written form.
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
    """Overwrite the value from ``offset`` on, padding a shorter value with zeros. No record counts
    as an empty value; an empty ``value`` changes nothing. The record's expiry stays, as with
    ``Increment``. The result is the new length.
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
    """Set or clear a bit of the value, padding a shorter value with zeros. The record's expiry
    stays, as with ``Increment``. The result is whether the bit was set before.
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
    """A condition on the presence of a record."""

    ANY = "any"
    ABSENT = "absent"
    PRESENT = "present"


class RecordIf(NamedTuple):
    """A condition on a record. With a ``value``, the record's value must (``equal``) or must not
    equal it; an absent record equals no value.
    """

    presence: Presence = Presence.ANY
    value: bytes | None = None
    equal: bool = True

    def holds(self, record: Record | None) -> bool:
        """Return whether the record meets the condition."""
        if self.value is not None:
            return (record is not None and record.value == self.value) is self.equal
        there = Presence.ABSENT if record is None else Presence.PRESENT
        return self.presence in (Presence.ANY, there)


ANY_RECORD = RecordIf()


@dataclass(frozen=True, slots=True)
class Assign:
    """Write a value if the record meets a condition. The result is whether it was written, and the
    value before.
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
    """A condition of ``Expire`` on the record's present expiry. "Never" counts as later than any
    time.
    """

    ANY = "any"
    NONE = "none"
    SOME = "some"
    SOONER = "sooner"  # than the new one
    LATER = "later"
    SOME_LATER = "some, later"


@dataclass(frozen=True, slots=True)
class Expire:
    """Change the record's expiry. The result is whether it was changed."""

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
    """Change the record's expiry. The result is its value, None if there is no record."""

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
    """Change nothing. The result is the encoded record, None if there is none. A record that the
    same batch has written has the sequence 0.
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
    """Write a value, even an equal one: the record gets a new version. There is no result."""

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
    """Delete the record. The result is whether there was one."""

    @property
    def size(self) -> int:
        return 0

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        change = Change.LEAVE if record is None else Change.DELETE
        return Decided(change, record is not None)


@dataclass(frozen=True, slots=True)
class RemoveIf:
    """Delete the record if it meets a condition. The result is whether it was deleted."""

    only_if: RecordIf

    @property
    def size(self) -> int:
        return 0

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        removes = record is not None and self.only_if.holds(record)
        return Decided(Change.DELETE if removes else Change.LEAVE, removes)


@dataclass(frozen=True, slots=True)
class GetAndDelete:
    """Delete the record. The result is its value, None if there was no record."""

    @property
    def size(self) -> int:
        return 0

    def decide(self, record: Record | None, now_ms: int) -> Decided:
        if record is None:
            return Decided(Change.LEAVE, None)
        return Decided(Change.DELETE, record.value)


def _kept(record: Record | None, ttl_ms: int, now_ms: int) -> int:
    """Return the expiry of an existing record, or of a new one that lives for ``ttl_ms``."""
    return Expiry(ExpiryKind.KEEP, ttl_ms).at_ms(record, now_ms)


def _put_until(
    record: Record | None, value: bytes, expires_at_ms: int, now_ms: int, result: Result
) -> Decided:
    """Put the value; if the expiry has passed already, leave no record."""
    if not 0 < expires_at_ms <= now_ms:
        same = record is not None and record.value is value
        if same and record is not None and record.expires_at_ms == expires_at_ms:
            return Decided(Change.LEAVE, result)
        return Decided(Change.PUT, result, value, expires_at_ms)
    return Decided(Change.DELETE if record is not None else Change.LEAVE, result)
