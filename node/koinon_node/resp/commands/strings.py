"""Commands of Redis on strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from koinon_node.core import records
from koinon_node.core.atomic_batch import Check, Step
from koinon_node.core.updates import (
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
    Update,
    parse_decimal,
)
from koinon_node.resp import errors, wire
from koinon_node.resp.commands.arguments import (
    SYNTAX,
    Options,
    integer,
    keys_of_one_slot,
    positive_expiry,
)
from koinon_node.resp.commands.koinon_commands import value_or_nil
from koinon_node.resp.commands.table import (
    Arguments,
    Encoded,
    Outcome,
    Read,
    Row,
    Write,
    Written,
    command,
)
from koinon_node.resp.errors import RefusedError
from koinon_node.resp.session import Session
from koinon_node.serving.request_limits import check_expiry, check_key, check_value, expiry_of
from koinon_proto.contract.errors import CheckFailedError, KoinonError
from koinon_proto.contract.table import MAX_ATOMIC_BYTES, MAX_ATOMIC_OPERATIONS

_READ = ("readonly", "fast")
_WRITE = ("write", "denyoom")
_FAST = ("write", "denyoom", "fast")
_ONE = (1, 1, 1)


# --- reads -------------------------------------------------------------------------------------


@command("GET", 2, errors.guest, flags=_READ, keys=_ONE)
def get(session: Session, arguments: Arguments) -> Outcome:
    """Read a value."""
    check_key(arguments[1])
    return Read((arguments[1],), value_or_nil)


@command("MGET", -2, errors.guest, flags=_READ, keys=(1, -1, 1))
def mget(session: Session, arguments: Arguments) -> Outcome:
    """Read values."""
    return Read(keys_of_one_slot(arguments[1:]), _values_or_nils)


def _values_or_nils(found: Sequence[Encoded]) -> bytes:
    values = (records.value_of(record) if record is not None else None for record in found)
    return wire.array(list(map(wire.bulk_or_nil, values)))


@command("STRLEN", 2, errors.guest, flags=_READ, keys=_ONE)
def strlen(session: Session, arguments: Arguments) -> Outcome:
    """Tell how long a value is."""
    check_key(arguments[1])
    return Read((arguments[1],), _length)


def _length(found: Sequence[Encoded]) -> bytes:
    return wire.integer(len(records.value_of(found[0])) if found[0] is not None else 0)


def getrange(session: Session, arguments: Arguments) -> Outcome:
    """Read a part of a value, from one byte to another; negative: counted from its end."""
    _, key, start, end = arguments
    check_key(key)
    return Read((key,), partial(_part, integer(start), integer(end)))


def _part(start: int, end: int, found: Sequence[Encoded]) -> bytes:
    value = records.value_of(found[0]) if found[0] is not None else b""
    first, last = (at if at >= 0 else max(0, len(value) + at) for at in (start, end))
    is_before = end < 0 and len(value) + end < 0  # of the first byte
    return wire.bulk(value[first : last + 1] if not is_before else b"")


command("GETRANGE", 4, errors.guest, flags=("readonly",), keys=_ONE)(getrange)
command("SUBSTR", 4, errors.guest, flags=("readonly",), keys=_ONE)(getrange)


# --- whole values ------------------------------------------------------------------------------


@command("SET", -3, errors.guest, flags=_WRITE, keys=_ONE)
def set_(session: Session, arguments: Arguments) -> Outcome:
    """Write a value, with all of Redis's options."""
    _, key, value, *rest = arguments
    _check(session, key, value)
    if not rest:
        return Write((Row(key, value, ttl_ms=_unnamed_ttl_ms(session)),), _ok)
    now_ms, keyspace = session.service.now_ms(), session.served.keyspace()
    options = Options(rest, "set", now_ms)
    options.take(b"NX", b"XX", b"GET", b"KEEPTTL", b"EX")
    flags, expiry = options.flags, options.expiry or expiry_of(keyspace, 0)
    if expiry.kind is ExpiryKind.KEEP:
        expiry = Expiry(ExpiryKind.KEEP, keyspace.unnamed_ttl_ms)
    elif options.expiry is not None:
        check_expiry(keyspace, expiry, now_ms)
    if flags >= {b"NX", b"XX"}:
        raise RefusedError(SYNTAX)
    if not flags and expiry.kind is ExpiryKind.AFTER:
        return Write((Row(key, value, ttl_ms=expiry.ms),), _ok)
    only_if = Presence.ANY
    if flags & {b"NX", b"XX"}:
        only_if = Presence.ABSENT if b"NX" in flags else Presence.PRESENT
    reply = _value_before if b"GET" in flags else _ok_if_done
    return _update(key, Assign(value, expiry, only_if), reply)


def _ok(written: Sequence[Written]) -> bytes:
    return wire.OK


def _assigned(written: Sequence[Written]) -> tuple[bool, bytes | None]:
    result = written[0].result
    assert isinstance(result, tuple)
    return result


def _ok_if_done(written: Sequence[Written]) -> bytes:
    return wire.OK if _assigned(written)[0] else wire.NIL


def _one_if_done(written: Sequence[Written]) -> bytes:
    return wire.ONE if _assigned(written)[0] else wire.ZERO


def _value_before(written: Sequence[Written]) -> bytes:
    return wire.bulk_or_nil(_assigned(written)[1])


@command("GETSET", 3, errors.guest, flags=_FAST, keys=_ONE)
def getset(session: Session, arguments: Arguments) -> Outcome:
    """Write a value; answer with the one before."""
    _, key, value = arguments
    _check(session, key, value)
    return _update(key, Assign(value, expiry_of(session.served.keyspace(), 0)), _value_before)


@command("SETNX", 3, errors.guest, flags=_FAST, keys=_ONE)
def setnx(session: Session, arguments: Arguments) -> Outcome:
    """Write a value where there is none."""
    _, key, value = arguments
    _check(session, key, value)
    expiry = expiry_of(session.served.keyspace(), 0)
    return _update(key, Assign(value, expiry, Presence.ABSENT), _one_if_done)


@command("SETEX", 4, errors.guest, flags=_WRITE, keys=_ONE)
def setex(session: Session, arguments: Arguments) -> Outcome:
    """Write a value that expires after so many seconds."""
    return _set_until(session, arguments, 1_000, "setex")


@command("PSETEX", 4, errors.guest, flags=_WRITE, keys=_ONE)
def psetex(session: Session, arguments: Arguments) -> Outcome:
    """Write a value that expires after so many milliseconds."""
    return _set_until(session, arguments, 1, "psetex")


def _set_until(session: Session, arguments: Arguments, unit_ms: int, name: str) -> Outcome:
    _, key, number, value = arguments
    _check(session, key, value)
    expiry = positive_expiry(ExpiryKind.AFTER, number, unit_ms, 0, name)
    check_expiry(session.served.keyspace(), expiry, 0)
    return Write((Row(key, value, ttl_ms=expiry.ms),), _ok)


@command("MSET", -3, errors.guest, flags=_WRITE, keys=(1, -1, 2))
def mset(session: Session, arguments: Arguments) -> Outcome:
    """Write values."""
    keys, values = _keys_and_values(session, arguments, "mset")
    ttl_ms = _unnamed_ttl_ms(session)
    return Write([Row(k, v, ttl_ms=ttl_ms) for k, v in zip(keys, values, strict=True)], _ok)


@command("MSETNX", -3, errors.guest, flags=_WRITE, keys=(1, -1, 2))
def msetnx(session: Session, arguments: Arguments) -> Outcome:
    """Write values where none of the keys is there: all of them, or nothing."""
    keys, values = _keys_and_values(session, arguments, "msetnx")
    if 2 * len(keys) > MAX_ATOMIC_OPERATIONS or sum(map(len, arguments)) > MAX_ATOMIC_BYTES:
        raise RefusedError(
            f"ERR MSETNX has {MAX_ATOMIC_OPERATIONS // 2:,} keys and "
            f"{MAX_ATOMIC_BYTES // 1024**2} MiB of arguments at most"
        )
    ttl_ms = _unnamed_ttl_ms(session)
    return _put_all_if_absent(session, keys, [Put(value, ttl_ms) for value in values])


async def _put_all_if_absent(session: Session, keys: Sequence[bytes], puts: Sequence[Put]) -> bytes:
    steps: list[Step] = [Check(0)] * len(keys)
    session.served.check_one_slot(keys)
    try:
        await session.service.commit(session.served, [*keys, *keys], [*steps, *puts])
    except CheckFailedError:
        return wire.ZERO
    except KoinonError as error:
        raise session.served.redirected(error, keys[0]) from error
    return wire.ONE


def _keys_and_values(
    session: Session, arguments: Arguments, name: str
) -> tuple[Sequence[bytes], Sequence[bytes]]:
    if len(arguments) % 2 == 0:
        raise RefusedError(f"ERR wrong number of arguments for '{name}' command")
    keys, values = keys_of_one_slot(arguments[1::2]), arguments[2::2]
    keyspace = session.served.keyspace()
    for value in values:
        check_value(len(value), keyspace)
    return keys, values


def _unnamed_ttl_ms(session: Session) -> int:
    return session.served.keyspace().unnamed_ttl_ms


# --- updates -----------------------------------------------------------------------------------


def _update(key: bytes, update: Update, reply: Callable[[Sequence[Written]], bytes]) -> Outcome:
    return Write((Row(key, update=update),), reply)


def _result(written: Sequence[Written]) -> bytes:
    """Return the reply of an update whose result is a value, a number, or nothing."""
    result = written[0].result
    if result is None or isinstance(result, bytes):
        return wire.bulk_or_nil(result)
    assert isinstance(result, int)
    return wire.integer(result)


@command("GETDEL", 2, errors.guest, flags=("write", "fast"), keys=_ONE)
def getdel(session: Session, arguments: Arguments) -> Outcome:
    """Read a value and delete it."""
    check_key(arguments[1])
    return _update(arguments[1], GetAndDelete(), _result)


@command("GETEX", -2, errors.guest, flags=("write", "fast"), keys=_ONE)
def getex(session: Session, arguments: Arguments) -> Outcome:
    """Read a value and change when it expires."""
    key = arguments[1]
    check_key(key)
    now_ms = session.service.now_ms()
    options = Options(arguments[2:], "getex", now_ms)
    options.take(b"PERSIST", b"EX")
    expiry = options.expiry or KEEP
    check_expiry(session.served.keyspace(), expiry, now_ms)
    return _update(key, GetAndExpire(expiry), _result)


@command("APPEND", 3, errors.guest, flags=_FAST, keys=_ONE)
def append(session: Session, arguments: Arguments) -> Outcome:
    """Append to a value."""
    _, key, value = arguments
    _check(session, key, value)
    limit = session.served.keyspace().max_value_bytes
    return _update(key, Append(value, limit, _unnamed_ttl_ms(session)), _result)


@command("SETRANGE", 4, errors.guest, flags=_WRITE, keys=_ONE)
def setrange(session: Session, arguments: Arguments) -> Outcome:
    """Overwrite a value from a byte on; say how long it is then."""
    _, key, start, value = arguments
    check_key(key)
    offset = integer(start)
    if offset < 0:
        raise RefusedError("ERR offset is out of range")
    if value:
        check_value(offset + len(value), session.served.keyspace())
    return _update(key, Overwrite(offset, value, _unnamed_ttl_ms(session)), _result)


@command("INCR", 2, errors.guest, flags=_FAST, keys=_ONE)
def incr(session: Session, arguments: Arguments) -> Outcome:
    """Add one."""
    return _increment(session, arguments[1], 1)


@command("DECR", 2, errors.guest, flags=_FAST, keys=_ONE)
def decr(session: Session, arguments: Arguments) -> Outcome:
    """Take one away."""
    return _increment(session, arguments[1], -1)


@command("INCRBY", 3, errors.guest, flags=_FAST, keys=_ONE)
def incrby(session: Session, arguments: Arguments) -> Outcome:
    """Add."""
    return _increment(session, arguments[1], integer(arguments[2]))


@command("DECRBY", 3, errors.guest, flags=_FAST, keys=_ONE)
def decrby(session: Session, arguments: Arguments) -> Outcome:
    """Take away."""
    return _increment(session, arguments[1], -integer(arguments[2]))


def _increment(session: Session, key: bytes, by: int) -> Outcome:
    check_key(key)
    return _update(key, Increment(by, _unnamed_ttl_ms(session)), _result)


@command("INCRBYFLOAT", 3, errors.guest, flags=_FAST, keys=_ONE)
def incrbyfloat(session: Session, arguments: Arguments) -> Outcome:
    """Add to a decimal number."""
    check_key(arguments[1])
    by = parse_decimal(arguments[2])
    return _update(arguments[1], IncrementDecimal(by, _unnamed_ttl_ms(session)), _result)


def _check(session: Session, key: bytes, value: bytes) -> None:
    check_key(key)
    check_value(len(value), session.served.keyspace())
