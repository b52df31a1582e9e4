"""Tests of updates: the record that each of them makes."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_node.core.formats.records import FLAG_EXPIRES, Record
from koinon_node.core.writes.updates import (
    ANY_RECORD,
    INTEGER_MAX,
    INTEGER_MIN,
    KEEP,
    NEVER,
    NUMBER_BYTES_MAX,
    Append,
    Assign,
    Change,
    Decided,
    Expire,
    ExpireIf,
    Expiry,
    ExpiryKind,
    GetAndDelete,
    GetAndExpire,
    Increment,
    IncrementDecimal,
    Overwrite,
    Presence,
    RecordIf,
    RemoveIf,
    Update,
    parse_decimal,
    parse_integer,
)
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    NotANumberError,
    NumberOverflowError,
)

NOW_MS = 1_000
AFTER_50 = Expiry(ExpiryKind.AFTER, 50)
AT_5000 = Expiry(ExpiryKind.AT, 5_000)
PAST = Expiry(ExpiryKind.AT, NOW_MS)
INT64 = st.integers(INTEGER_MIN, INTEGER_MAX)
NOTHING = Decided(Change.LEAVE, None)


def record(value: bytes, expires_at_ms: int = 0) -> Record:
    return Record(7, FLAG_EXPIRES if expires_at_ms else 0, expires_at_ms, value)


@given(before=INT64, by=INT64)
def test_increment_is_the_sum_or_refused(before: int, by: int) -> None:
    total = before + by
    found = record(b"%d" % before, 5_000)
    if INTEGER_MIN <= total <= INTEGER_MAX:
        decided = Increment(by).decide(found, NOW_MS)
        assert decided == (Change.PUT, total, b"%d" % total, 5_000)
    else:
        with pytest.raises(NumberOverflowError):
            Increment(by).decide(found, NOW_MS)


def test_increment_without_a_record_begins_at_zero() -> None:
    assert Increment(-4).decide(None, NOW_MS) == (Change.PUT, -4, b"-4", 0)
    assert Increment(1, ttl_ms=50).decide(None, NOW_MS).expires_at_ms == NOW_MS + 50
    assert Increment(1, ttl_ms=50).decide(record(b"1"), NOW_MS).expires_at_ms == 0


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b" 1", b"1 ", b"+1", b"01", b"-0", b"-", b"1.0", b"1_0", b"0x1", b"1\n"),
        *(b"9223372036854775808", b"-9223372036854775809", b"1" * 500, b"\xd9\xa1"),
    ],
)
def test_integer_that_redis_would_not_take_is_refused(text: bytes) -> None:
    with pytest.raises(NotANumberError):
        parse_integer(text)
    with pytest.raises(NotANumberError):
        Increment(1).decide(record(text), NOW_MS)


@given(number=INT64)
def test_integer_of_64_bits_is_taken(number: int) -> None:
    assert parse_integer(b"%d" % number) == number


@pytest.mark.parametrize(
    ("before", "by", "after"),
    [
        (None, "1", b"1"),
        (b"1", "1.1", b"2.1"),
        (b"10.50", "0.1", b"10.6"),
        (b"0.1", "0.2", b"0.3"),
        (b"5.0e3", "2.0e2", b"5200"),
        (b"-5", "5", b"0"),
        (b"-1", "0.5", b"-0.5"),
        (b"100", "-0.00000000000000000001", b"100"),
        (b"1e17", "0", b"100000000000000000"),
        (b"-.5", "0", b"-0.5"),
        (b"-1e-30", "0", b"0"),
    ],
)
def test_decimal_increment_is_written_without_an_exponent(
    before: bytes | None, by: str, after: bytes
) -> None:
    found = record(before, 5_000) if before is not None else None
    decided = IncrementDecimal(Decimal(by)).decide(found, NOW_MS)
    assert decided == (Change.PUT, after, after, 5_000 if found else 0)


@given(before=st.decimals(-(10**308), 10**308), by=st.decimals(-(10**308), 10**308))
def test_decimal_increment_stays_within_its_bytes(before: Decimal, by: Decimal) -> None:
    text = str(before).encode()
    if len(text) <= NUMBER_BYTES_MAX and abs(before + by) < Decimal("1e309"):
        decided = IncrementDecimal(by).decide(record(text), NOW_MS)
        assert len(decided.value) <= NUMBER_BYTES_MAX
        parse_decimal(decided.value)  # so it can be added to again


def test_decimal_increment_beyond_a_double_is_refused() -> None:
    for text in (b"inf", b"-Infinity"):
        with pytest.raises(NumberOverflowError):
            parse_decimal(text)
    with pytest.raises(NumberOverflowError):
        IncrementDecimal(Decimal("9e308")).decide(record(b"9e308"), NOW_MS)


@pytest.mark.parametrize(
    "text", [b"", b"nan", b"1e", b" 1", b"1_0", b".", b"1e99999", b"1e309", b"0x1"]
)
def test_decimal_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(NotANumberError):
        parse_decimal(text)


@given(
    before=st.none() | st.binary(max_size=6),
    offset=st.integers(0, 9),
    value=st.binary(max_size=4),
)
def test_overwritten_value_is_that_of_a_buffer(
    before: bytes | None, offset: int, value: bytes
) -> None:
    decided = Overwrite(offset, value, ttl_ms=50).decide(
        record(before, 5_000) if before is not None else None, NOW_MS
    )
    if not value:
        assert decided == (Change.LEAVE, len(before or b""), b"", 0)
        return
    expected = bytearray(before or b"")
    expected.extend(bytes(max(0, offset - len(expected))))
    expected[offset : offset + len(value)] = value
    assert decided.value == expected
    assert decided.result == len(expected)
    assert decided.expires_at_ms == (5_000 if before is not None else NOW_MS + 50)


def test_append_keeps_the_expiry_and_the_limit() -> None:
    append = Append(b"cd", 4)
    assert append.decide(None, NOW_MS) == (Change.PUT, 2, b"cd", 0)
    assert append.decide(record(b"ab", 5_000), NOW_MS) == (Change.PUT, 4, b"abcd", 5_000)
    with pytest.raises(InvalidArgumentError, match=r"limit 4, got 5"):
        append.decide(record(b"abc"), NOW_MS)


@pytest.mark.parametrize(
    ("only_if", "found", "done"),
    [
        (ANY_RECORD, True, True),
        (ANY_RECORD, False, True),
        (RecordIf(Presence.ABSENT), True, False),
        (RecordIf(Presence.ABSENT), False, True),
        (RecordIf(Presence.PRESENT), True, True),
        (RecordIf(Presence.PRESENT), False, False),
        (RecordIf(value=b"old"), True, True),
        (RecordIf(value=b"older"), True, False),
        (RecordIf(value=b""), False, False),
        (RecordIf(value=b"old", equal=False), True, False),
        (RecordIf(value=b"older", equal=False), True, True),
        (RecordIf(value=b"older", equal=False), False, True),
    ],
)
def test_assign_only_where_the_record_is_as_asked_for(
    only_if: RecordIf, found: bool, done: bool
) -> None:
    before = record(b"old") if found else None
    decided = Assign(b"new", AFTER_50, only_if).decide(before, NOW_MS)
    assert decided.result == (done, b"old" if found else None)
    assert decided.change is (Change.PUT if done else Change.LEAVE)
    if done:
        assert (decided.value, decided.expires_at_ms) == (b"new", NOW_MS + 50)
    removed = RemoveIf(only_if).decide(before, NOW_MS)
    assert removed.change is (Change.DELETE if done and found else Change.LEAVE)
    assert removed.result is (done and found)


@pytest.mark.parametrize(
    ("expiry", "expires_at_ms"), [(NEVER, 0), (KEEP, 3_000), (AT_5000, 5_000), (AFTER_50, 1_050)]
)
def test_every_expiry_by_every_update_that_takes_one(expiry: Expiry, expires_at_ms: int) -> None:
    found = record(b"v", 3_000)
    assert Assign(b"new", expiry).decide(found, NOW_MS).expires_at_ms == expires_at_ms
    unchanged = expires_at_ms == 3_000
    for update, result in ((Expire(expiry), True), (GetAndExpire(expiry), b"v")):
        decided = update.decide(found, NOW_MS)
        expected = (Change.LEAVE, result, b"", 0)
        assert decided == (expected if unchanged else (Change.PUT, result, b"v", expires_at_ms))


@pytest.mark.parametrize(("ttl_ms", "expires_at_ms"), [(0, 0), (50, NOW_MS + 50)])
def test_update_that_keeps_an_expiry_gives_a_new_record_its_own(
    ttl_ms: int, expires_at_ms: int
) -> None:
    keeping: list[Update] = [
        Assign(b"2", Expiry(ExpiryKind.KEEP, ttl_ms)),
        Increment(1, ttl_ms),
        IncrementDecimal(Decimal(1), ttl_ms),
        Append(b"1", 9, ttl_ms),
    ]
    for update in keeping:
        assert update.decide(None, NOW_MS).expires_at_ms == expires_at_ms
        assert update.decide(record(b"1", 3_000), NOW_MS).expires_at_ms == 3_000
        assert update.decide(record(b"1"), NOW_MS).expires_at_ms == 0


def assign_new(expiry: Expiry) -> Assign:
    return Assign(b"new", expiry)


def test_expiry_that_is_over_deletes() -> None:
    over = (PAST, Expiry(ExpiryKind.AT, 0), Expiry(ExpiryKind.AFTER, -5_000))
    for update in (kind(past) for past in over for kind in (assign_new, Expire, GetAndExpire)):
        assert update.decide(record(b"v"), NOW_MS).change is Change.DELETE
        assert update.decide(None, NOW_MS).change is Change.LEAVE


@pytest.mark.parametrize(
    ("only_if", "never", "sooner", "later"),
    [
        (ExpireIf.ANY, True, True, True),
        (ExpireIf.NONE, True, False, False),
        (ExpireIf.SOME, False, True, True),
        (ExpireIf.SOONER, False, True, False),
        (ExpireIf.LATER, True, False, True),
        (ExpireIf.SOME_LATER, False, False, True),
    ],
)
def test_expire_only_where_the_expiry_is_as_asked_for(
    only_if: ExpireIf, never: bool, sooner: bool, later: bool
) -> None:
    update = Expire(AT_5000, only_if)
    for expires_at_ms, done in ((0, never), (4_000, sooner), (6_000, later)):
        decided = update.decide(record(b"v", expires_at_ms), NOW_MS)
        assert decided.result is done
        assert decided.change is (Change.PUT if done else Change.LEAVE)


def test_nothing_is_made_of_no_record() -> None:
    assert Expire(AFTER_50).decide(None, NOW_MS).result is False
    assert GetAndExpire(AFTER_50).decide(None, NOW_MS) == NOTHING
    assert GetAndDelete().decide(None, NOW_MS) == NOTHING


def test_get_and_delete_answers_the_value() -> None:
    assert GetAndDelete().decide(record(b"v"), NOW_MS) == (Change.DELETE, b"v", b"", 0)
