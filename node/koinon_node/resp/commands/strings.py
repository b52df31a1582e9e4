"""Commands of Redis on strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from koinon_node.core.writes.joint_updates import PutAllIfAbsent
from koinon_node.core.writes.updates import (
    ANY_RECORD,
    INTEGER_MIN,
    KEEP,
    Append,
    Assign,
    Expiry,
    ExpiryKind,
    GetAndDelete,
    GetAndExpire,
    Increment,
    IncrementDecimal,
    Overwrite,
    Presence,
    Put,
    RecordIf,
    RemoveIf,
    Update,
    parse_decimal,
)
from koinon_node.partition.request_limits import check_expiry, check_key, check_value, expiry_of
from koinon_node.resp import wire
from koinon_node.resp.commands import replies
from koinon_node.resp.commands.arguments import (
    Options,
    integer,
    keys_of_one_slot,
    positive_expiry,
)
from koinon_node.resp.commands.spec import Handler, wrong_number
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import (
    Arguments,
    Encoded,
    Jointly,
    Outcome,
    Read,
    Row,
    Write,
    Written,
)
from koinon_node.resp.session import Session
from koinon_proto.contract.table import MAX_ATOMIC_BYTES, MAX_ATOMIC_OPERATIONS


def reads_one(reply: Callable[[Sequence[Encoded]], bytes]) -> Handler:
    """Build the handler of a command that reads the key in its first argument."""

    def handler(session: Session, arguments: Arguments) -> Outcome:
        check_key(arguments[1])
        return Read((arguments[1],), reply)

    return handler


def reads_all(reply: Callable[[Sequence[Encoded]], bytes]) -> Handler:
    """Build the handler of a command whose arguments are all keys to read."""
    return lambda session, arguments: Read(keys_of_one_slot(arguments[1:]), reply)


def update_of(key: bytes, update: Update, reply: Callable[[Sequence[Written]], bytes]) -> Outcome:
    """Build the outcome of a command that updates one record."""
    check_key(key)
    return Write((Row(key, update=update),), reply)


def getrange(session: Session, arguments: Arguments) -> Outcome:
    """Read the bytes from one offset to another, both included; negative offsets count from the
    end.
    """
    _, key, start, end = arguments
    check_key(key)
    return Read((key,), partial(_part, integer(start), integer(end)))


def _part(start: int, end: int, found: Sequence[Encoded]) -> bytes:
    value = replies.value_in(found)
    if start < 0 and end < 0 and start > end:
        return wire.bulk(b"")
    first, last = (at if at >= 0 else max(0, len(value) + at) for at in (start, end))
    return wire.bulk(value[first : last + 1])


# --- whole values ------------------------------------------------------------------------------


def set_(session: Session, arguments: Arguments) -> Outcome:
    """Write a value, with the options of Redis."""
    _, key, value, *rest = arguments
    _check(session, key, value)
    if not rest:
        return Write((Row(key, value, ttl_ms=_unnamed_ttl_ms(session)),), replies.ok)
    now_ms, keyspace = session.service.now_ms(), session.served.keyspace()
    options = Options(rest, b"NX", b"XX", b"IFEQ", b"IFNE", b"GET", b"KEEPTTL", b"EX")
    flags, named = options.flags, options.expiry("set", now_ms)
    expiry = named or expiry_of(keyspace, 0)
    if expiry.kind is ExpiryKind.KEEP:
        expiry = Expiry(ExpiryKind.KEEP, keyspace.unnamed_ttl_ms)
    elif named is not None:
        check_expiry(keyspace, expiry, now_ms)
    if expiry.kind is ExpiryKind.AFTER and flags.keys() <= {b"EX", b"PX"}:
        return Write((Row(key, value, ttl_ms=expiry.ms),), replies.ok)
    reply = replies.value_before if b"GET" in flags else replies.ok_if_written
    return update_of(key, Assign(value, expiry, _condition(flags)), reply)


def _condition(flags: Mapping[bytes, bytes]) -> RecordIf:
    """Return the condition on the record that these options of SET or DELEX give."""
    if b"NX" in flags:
        return RecordIf(Presence.ABSENT)
    if b"XX" in flags:
        return RecordIf(Presence.PRESENT)
    for name, equal in ((b"IFEQ", True), (b"IFNE", False)):
        if name in flags:
            return RecordIf(Presence.ANY, flags[name], equal)
    return ANY_RECORD


def assigns(only_if: RecordIf, reply: Callable[[Sequence[Written]], bytes]) -> Handler:
    """Build the handler of GETSET or SETNX, whose arguments are a key and a value."""

    def handler(session: Session, arguments: Arguments) -> Outcome:
        _, key, value = arguments
        _check(session, key, value)
        return update_of(
            key, Assign(value, expiry_of(session.served.keyspace(), 0), only_if), reply
        )

    return handler


def sets_until(name: str, unit_ms: int) -> Handler:
    """Build the handler of SETEX or PSETEX."""

    def handler(session: Session, arguments: Arguments) -> Outcome:
        _, key, number, value = arguments
        _check(session, key, value)
        expiry = positive_expiry(ExpiryKind.AFTER, number, unit_ms, 0, name)
        check_expiry(session.served.keyspace(), expiry, 0)
        return Write((Row(key, value, ttl_ms=expiry.ms),), replies.ok)

    return handler


def mset(session: Session, arguments: Arguments) -> Outcome:
    """Write the values of several keys."""
    keys, values = _keys_and_values(session, arguments, "mset")
    ttl_ms = _unnamed_ttl_ms(session)
    rows = [Row(key, value, ttl_ms=ttl_ms) for key, value in zip(keys, values, strict=True)]
    return Write(rows, replies.ok)


def msetnx(session: Session, arguments: Arguments) -> Outcome:
    """Write the values of several keys if none of them has a record."""
    keys, values = _keys_and_values(session, arguments, "msetnx")
    if len(keys) > MAX_ATOMIC_OPERATIONS or sum(map(len, arguments)) > MAX_ATOMIC_BYTES:
        raise RefusedError(
            f"ERR MSETNX has {MAX_ATOMIC_OPERATIONS:,} keys and "
            f"{MAX_ATOMIC_BYTES // 1024**2} MiB of arguments at most"
        )
    ttl_ms = _unnamed_ttl_ms(session)
    joint = PutAllIfAbsent([Put(value, ttl_ms) for value in values])
    return Jointly(keys, joint, replies.one_or_zero)


def _keys_and_values(
    session: Session, arguments: Arguments, name: str
) -> tuple[Sequence[bytes], Sequence[bytes]]:
    if len(arguments) % 2 == 0:
        raise wrong_number(name)
    keys, values = keys_of_one_slot(arguments[1::2]), arguments[2::2]
    keyspace = session.served.keyspace()
    for value in values:
        check_value(len(value), keyspace)
    return keys, values


def _unnamed_ttl_ms(session: Session) -> int:
    return session.served.keyspace().unnamed_ttl_ms


# --- updates -----------------------------------------------------------------------------------


def delex(session: Session, arguments: Arguments) -> Outcome:
    """Delete a record if its value equals, or does not equal, the given one (Redis 8.4)."""
    options = Options(arguments[2:], b"IFEQ", b"IFNE")
    return update_of(arguments[1], RemoveIf(_condition(options.flags)), replies.one_if_written)


def delifeq(session: Session, arguments: Arguments) -> Outcome:
    """Delete a record if its value equals the given one (Valkey 9)."""
    _, key, value = arguments
    return update_of(key, RemoveIf(RecordIf(value=value)), replies.one_if_written)


def getdel(session: Session, arguments: Arguments) -> Outcome:
    """Read a value and delete its record."""
    return update_of(arguments[1], GetAndDelete(), replies.result_of)


def getex(session: Session, arguments: Arguments) -> Outcome:
    """Read a value and change its expiry."""
    key = arguments[1]
    check_key(key)
    now_ms = session.service.now_ms()
    options = Options(arguments[2:], b"PERSIST", b"EX")
    try:
        expiry = options.expiry("getex", now_ms) or KEEP
        check_expiry(session.served.keyspace(), expiry, now_ms)
    except RefusedError as error:  # Redis checks the key first, and then the expiry
        reason = wire.error(error.reason)
        return Read((key,), lambda found: wire.NIL if found[0] is None else reason)
    return update_of(key, GetAndExpire(expiry), replies.result_of)


def append(session: Session, arguments: Arguments) -> Outcome:
    """Append to a value; reply with its new length."""
    _, key, value = arguments
    _check(session, key, value)
    limit = session.served.keyspace().max_value_bytes
    return update_of(key, Append(value, limit, _unnamed_ttl_ms(session)), replies.result_of)


def setrange(session: Session, arguments: Arguments) -> Outcome:
    """Overwrite a value from an offset on; reply with its new length."""
    _, key, start, value = arguments
    check_key(key)
    offset = integer(start)
    if offset < 0:
        raise RefusedError("ERR offset is out of range")
    if value:
        check_value(offset + len(value), session.served.keyspace())
    return update_of(key, Overwrite(offset, value, _unnamed_ttl_ms(session)), replies.result_of)


def increments(sign: int, *, by_argument: bool) -> Handler:
    """Build the handler of INCR, DECR, INCRBY or DECRBY. Without an argument the command adds
    ``sign``.
    """

    def handler(session: Session, arguments: Arguments) -> Outcome:
        by = integer(arguments[2]) if by_argument else 1
        if sign < 0 and by == INTEGER_MIN:
            raise RefusedError("ERR decrement would overflow")
        update = Increment(sign * by, _unnamed_ttl_ms(session))
        return update_of(arguments[1], update, replies.result_of)

    return handler


def incrbyfloat(session: Session, arguments: Arguments) -> Outcome:
    """Add a decimal number to a value."""
    check_key(arguments[1])
    by = parse_decimal(arguments[2])
    update = IncrementDecimal(by, _unnamed_ttl_ms(session))
    return update_of(arguments[1], update, replies.result_of)


def _check(session: Session, key: bytes, value: bytes) -> None:
    check_key(key)
    check_value(len(value), session.served.keyspace())
