"""Commands of Redis on keys, whatever their values: whether they are there, when they expire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from koinon_node.core import records
from koinon_node.core.updates import NEVER, Expire, ExpireIf, Expiry, ExpiryKind
from koinon_node.resp import errors, wire
from koinon_node.resp.commands.arguments import expiry, keys_of_one_slot
from koinon_node.resp.commands.koinon_commands import was_there
from koinon_node.resp.commands.table import (
    Arguments,
    Encoded,
    Handler,
    Outcome,
    Read,
    Row,
    Write,
    Written,
    command,
)
from koinon_node.resp.errors import RefusedError
from koinon_node.resp.session import Session
from koinon_node.serving.request_limits import check_expiry, check_key

_READ = ("readonly", "fast")
_ONE, _ALL = (1, 1, 1), (1, -1, 1)
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
    """Delete records; say how many there were."""
    keys = keys_of_one_slot(arguments[1:])
    return Write([Row(key, is_delete=True) for key in keys], was_there)


command("DEL", -2, errors.guest, flags=("write",), keys=_ALL)(delete)
command("UNLINK", -2, errors.guest, flags=("write", "fast"), keys=_ALL)(delete)


def exists(session: Session, arguments: Arguments) -> Outcome:
    """Say how many of the keys are there."""
    return Read(keys_of_one_slot(arguments[1:]), _how_many)


command("EXISTS", -2, errors.guest, flags=_READ, keys=_ALL)(exists)
command("TOUCH", -2, errors.guest, flags=_READ, keys=_ALL)(exists)  # nothing is evicted


def _how_many(found: Sequence[Encoded]) -> bytes:
    return wire.integer(sum(record is not None for record in found))


@command("TYPE", 2, errors.guest, flags=_READ, keys=_ONE)
def type_(session: Session, arguments: Arguments) -> Outcome:
    """Say of which type a value is: there is only one."""
    check_key(arguments[1])
    return Read((arguments[1],), _type_of)


def _type_of(found: Sequence[Encoded]) -> bytes:
    return wire.simple("none" if found[0] is None else "string")


# --- when they expire --------------------------------------------------------------------------


def _tells_expiry(answer: Callable[[int, int], int]) -> Handler:
    """Return the handler of a command that answers with (expires_at_ms, now_ms)."""

    def handler(session: Session, arguments: Arguments) -> Outcome:
        check_key(arguments[1])
        return Read((arguments[1],), partial(_expiry_of, session, answer))

    return handler


def _expiry_of(
    session: Session, answer: Callable[[int, int], int], found: Sequence[Encoded]
) -> bytes:
    if found[0] is None:
        return _NO_KEY
    expires_at_ms = records.decode_record(found[0]).expires_at_ms
    if not expires_at_ms:
        return _NO_EXPIRY
    return wire.integer(answer(expires_at_ms, session.service.now_ms()))


def _left_ms(at_ms: int, now_ms: int) -> int:
    return max(0, at_ms - now_ms)


for _name, _answer in {
    "TTL": lambda at_ms, now_ms: (_left_ms(at_ms, now_ms) + 500) // 1_000,
    "PTTL": _left_ms,
    "EXPIRETIME": lambda at_ms, _: at_ms // 1_000,
    "PEXPIRETIME": lambda at_ms, _: at_ms,
}.items():
    command(_name, 2, errors.guest, flags=_READ, keys=_ONE)(_tells_expiry(_answer))


def _expires(name: str, kind: ExpiryKind, unit_ms: int) -> Handler:
    """Return the handler of a command that changes when a record expires."""

    def handler(session: Session, arguments: Arguments) -> Outcome:
        _, key, number, *conditions = arguments
        check_key(key)
        now_ms = session.service.now_ms()
        until = expiry(kind, number, unit_ms, now_ms, name)
        check_expiry(session.served.keyspace(), until, now_ms)
        return _expire(key, until, _condition(conditions))

    return handler


def _condition(options: Sequence[bytes]) -> ExpireIf:
    names = frozenset(option.upper() for option in options)
    if unknown := names - {b"NX", b"XX", b"GT", b"LT"}:
        raise RefusedError(f"ERR Unsupported option {min(unknown).decode('ascii', 'replace')}")
    if len(names) > 1 and b"NX" in names:
        raise RefusedError("ERR NX and XX, GT or LT options at the same time are not compatible")
    if names >= {b"GT", b"LT"}:
        raise RefusedError("ERR GT and LT options at the same time are not compatible")
    return _CONDITIONS[names]


def _expire(key: bytes, until: Expiry, only_if: ExpireIf) -> Outcome:
    return Write((Row(key, update=Expire(until, only_if)),), _one_if_done)


def _one_if_done(written: Sequence[Written]) -> bytes:
    return wire.ONE if written[0].result else wire.ZERO


for _name, _kind, _unit_ms in (
    ("EXPIRE", ExpiryKind.AFTER, 1_000),
    ("PEXPIRE", ExpiryKind.AFTER, 1),
    ("EXPIREAT", ExpiryKind.AT, 1_000),
    ("PEXPIREAT", ExpiryKind.AT, 1),
):
    command(_name, -3, errors.guest, flags=("write", "fast"), keys=_ONE)(
        _expires(_name.lower(), _kind, _unit_ms)
    )


@command("PERSIST", 2, errors.guest, flags=("write", "fast"), keys=_ONE)
def persist(session: Session, arguments: Arguments) -> Outcome:
    """Have a record never expire; say whether it would have."""
    check_key(arguments[1])
    check_expiry(session.served.keyspace(), NEVER, 0)
    return _expire(arguments[1], NEVER, ExpireIf.SOME)
