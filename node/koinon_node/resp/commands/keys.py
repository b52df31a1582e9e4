"""Commands of Redis on keys, whatever their values: existence, renaming, expiry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from koinon_node.core.formats import records
from koinon_node.core.writes.joint_updates import Copy
from koinon_node.core.writes.updates import (
    NEVER,
    Expire,
    ExpireIf,
    ExpiryKind,
    Result,
    parse_integer,
)
from koinon_node.partition.request_limits import check_expiry, check_key
from koinon_node.resp import wire
from koinon_node.resp.commands import replies
from koinon_node.resp.commands.arguments import SYNTAX, expiry, integer, keys_of_one_slot
from koinon_node.resp.commands.spec import Handler, subcommands
from koinon_node.resp.commands.strings import update_of
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import Arguments, Encoded, Jointly, Outcome, Read, Row, Write
from koinon_node.resp.session import Session
from koinon_proto.contract.errors import NotANumberError

_NO_KEY, _NO_EXPIRY = b":-2\r\n", b":-1\r\n"
_CONDITIONS = {
    frozenset[bytes](): ExpireIf.ANY,
    frozenset((b"NX",)): ExpireIf.NONE,
    frozenset((b"XX",)): ExpireIf.SOME,
    frozenset((b"GT",)): ExpireIf.SOONER,
    frozenset((b"XX", b"GT")): ExpireIf.SOONER,
    frozenset((b"LT",)): ExpireIf.LATER,
    frozenset((b"XX", b"LT")): ExpireIf.SOME_LATER,
}


def delete(session: Session, arguments: Arguments) -> Outcome:
    """Delete records; reply with the number of records that existed."""
    keys = keys_of_one_slot(arguments[1:])
    return Write([Row(key, is_delete=True) for key in keys], replies.count_deleted)


def _tells(tell: Callable[[bytes], bytes]) -> Handler:
    """Build the handler of an OBJECT subcommand that replies with a property of a value."""

    def reply(found: Sequence[Encoded]) -> bytes:
        return wire.NIL if found[0] is None else tell(records.value_of(found[0]))

    def handler(session: Session, arguments: Arguments) -> Outcome:
        check_key(arguments[2])
        return Read((arguments[2],), reply)

    return handler


def _encoding(value: bytes) -> bytes:
    try:
        parse_integer(value)
    except NotANumberError:
        return wire.bulk(b"embstr" if len(value) <= _EMBEDDED_BYTES_MAX else b"raw")
    return wire.bulk(b"int")


_EMBEDDED_BYTES_MAX = 44
_NO_FREQUENCY = wire.error(
    "ERR An LFU maxmemory policy is not selected, access frequency not tracked."
)
# Redis's own answers: clients and their tests expect them.
object_ = subcommands(
    {
        b"ENCODING": (3, _tells(_encoding)),
        b"FREQ": (3, _tells(lambda _: _NO_FREQUENCY)),
        b"IDLETIME": (3, _tells(lambda _: wire.ZERO)),  # no eviction, so uses are not recorded
        b"REFCOUNT": (3, _tells(lambda _: wire.ONE)),
    }
)


# --- two keys of one slot ----------------------------------------------------------------------


def renames(done: bytes, *, replaced: bool) -> Handler:
    """Build the handler of RENAME or RENAMENX, which replies ``done`` after a rename."""

    def reply(result: Result) -> bytes:
        if result is None:
            return wire.error("ERR no such key")
        return done if result else wire.ZERO

    def handler(session: Session, arguments: Arguments) -> Outcome:
        keys = keys_of_one_slot(arguments[1:])
        return Jointly(keys, Copy(moved=True, replaced=replaced), reply)

    return handler


def copy(session: Session, arguments: Arguments) -> Outcome:
    """Copy a record to another key."""
    keys, options = keys_of_one_slot(arguments[1:3]), list(arguments[3:])
    replaced = False
    while options:
        name = options.pop(0).upper()
        if name == b"DB" and options:
            if integer(options.pop(0)):
                raise RefusedError("ERR DB index is out of range")
        elif name == b"REPLACE":
            replaced = True
        else:
            raise RefusedError(SYNTAX)
    if keys[0] == keys[1]:
        raise RefusedError("ERR source and destination objects are the same")
    return Jointly(keys, Copy(moved=False, replaced=replaced), replies.one_or_zero)


# --- expiry ------------------------------------------------------------------------------------


def tells_expiry(unit_ms: int, *, is_left: bool) -> Handler:
    """Build the handler of a command that replies with a record's expiry, rounded to the unit: as
    Unix time, or with ``is_left`` as the remaining time.
    """

    def reply(session: Session, found: Sequence[Encoded]) -> bytes:
        if found[0] is None:
            return _NO_KEY
        at_ms = records.decode_record(found[0]).expires_at_ms
        if not at_ms:
            return _NO_EXPIRY
        shown_ms = max(0, at_ms - session.service.now_ms()) if is_left else at_ms
        return wire.integer((shown_ms + unit_ms // 2) // unit_ms)

    def handler(session: Session, arguments: Arguments) -> Outcome:
        check_key(arguments[1])
        return Read((arguments[1],), partial(reply, session))

    return handler


def expires(name: str, kind: ExpiryKind, unit_ms: int) -> Handler:
    """Build the handler of a command that changes a record's expiry."""

    def handler(session: Session, arguments: Arguments) -> Outcome:
        _, key, number, *conditions = arguments
        check_key(key)
        only_if = _condition(conditions)
        now_ms = session.service.now_ms()
        until = expiry(kind, number, unit_ms, now_ms, name)
        check_expiry(session.served.keyspace(), until, now_ms)
        return update_of(key, Expire(until, only_if), replies.one_if_written)

    return handler


def _condition(options: Sequence[bytes]) -> ExpireIf:
    names = frozenset(option.upper() for option in options)
    for option in options:
        if option.upper() not in (b"NX", b"XX", b"GT", b"LT"):
            raise RefusedError(f"ERR Unsupported option {option.decode('ascii', 'replace')}")
    if len(names) > 1 and b"NX" in names:
        raise RefusedError("ERR NX and XX, GT or LT options at the same time are not compatible")
    if names >= {b"GT", b"LT"}:
        raise RefusedError("ERR GT and LT options at the same time are not compatible")
    return _CONDITIONS[names]


def persist(session: Session, arguments: Arguments) -> Outcome:
    """Remove a record's expiry; reply with 1 if it had one."""
    check_key(arguments[1])
    check_expiry(session.served.keyspace(), NEVER, 0)
    return update_of(arguments[1], Expire(NEVER, ExpireIf.SOME), replies.one_if_written)
