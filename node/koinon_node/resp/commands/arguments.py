"""Parses arguments of Redis's commands: numbers, keys of one slot, and expiries. Pure.

A wrong argument raises ``RefusedError``, whose text is the reply.
"""

from __future__ import annotations

from collections.abc import Sequence

from koinon_node.core.writes.updates import (
    INTEGER_MAX,
    INTEGER_MIN,
    KEEP,
    NEVER,
    Expiry,
    ExpiryKind,
    parse_integer,
)
from koinon_node.partition.request_limits import check_key
from koinon_node.resp.error_replies import CROSS_SLOT, NOT_AN_INTEGER, RefusedError
from koinon_proto.contract.errors import NotANumberError
from koinon_proto.contract.table import MAX_TTL_MS
from koinon_proto.partitioner import slot_of

SYNTAX = "ERR syntax error"
_KINDS = {
    b"EX": (ExpiryKind.AFTER, 1_000),
    b"PX": (ExpiryKind.AFTER, 1),
    b"EXAT": (ExpiryKind.AT, 1_000),
    b"PXAT": (ExpiryKind.AT, 1),
}
"""The options that give an expiry, with their unit in milliseconds."""


def integer(text: bytes) -> int:
    """Parse a signed 64-bit integer."""
    try:
        return parse_integer(text)
    except NotANumberError:
        raise RefusedError(NOT_AN_INTEGER) from None


def keys_of_one_slot(keys: Sequence[bytes]) -> Sequence[bytes]:
    """Check the keys of a command and that they lie in one slot; return them."""
    for key in keys:
        check_key(key)
    if len(keys) > 1 and len(set(map(slot_of, keys))) > 1:
        raise RefusedError(CROSS_SLOT)
    return keys


def expiry(kind: ExpiryKind, number: bytes, unit_ms: int, now_ms: int, command: str) -> Expiry:
    """Parse an expiry, which may lie in the past. As in Redis, a time of more than 64 bits of
    milliseconds is refused.
    """
    ms = integer(number) * unit_ms
    latest_ms = INTEGER_MAX if kind is ExpiryKind.AT else INTEGER_MAX - now_ms
    if not INTEGER_MIN <= ms <= latest_ms:
        raise RefusedError(invalid_expiry(command))
    after_ms = ms - now_ms if kind is ExpiryKind.AT else ms
    if after_ms > MAX_TTL_MS:
        raise RefusedError(f"{invalid_expiry(command)}: nothing lives longer than 100 years here")
    return Expiry(kind, ms)


def invalid_expiry(command: str) -> str:
    """Build Redis's error for an expiry time out of range."""
    return f"ERR invalid expire time in '{command}' command"


def positive_expiry(
    kind: ExpiryKind, number: bytes, unit_ms: int, now_ms: int, command: str
) -> Expiry:
    """Parse an expiry like ``expiry``, and refuse numbers below 1."""
    found = expiry(kind, number, unit_ms, now_ms, command)
    if found.ms <= 0:
        raise RefusedError(invalid_expiry(command))
    return found


_VALUES_COMPARED = (b"IFEQ", b"IFNE")
_ALTERNATIVES = (
    frozenset((*_KINDS, b"KEEPTTL", b"PERSIST")),
    frozenset((b"NX", b"XX", *_VALUES_COMPARED)),
)
"""A command has at most one option of each set. It may repeat that option: the last value
counts."""


class Options:
    """The options at the end of a command. ``flags`` are the allowed names; EX stands for all
    options that give an expiry.
    """

    def __init__(self, arguments: Sequence[bytes], *flags: bytes) -> None:
        self.flags: dict[bytes, bytes] = {}
        """By option, in capital letters: the value that follows it, or b''."""
        left = list(reversed(arguments))
        while left:
            name = left.pop().upper()
            if not (name in flags or (name in _KINDS and b"EX" in flags)):
                raise RefusedError(SYNTAX)
            others = (alike - {name} for alike in _ALTERNATIVES if name in alike)
            has_value = name in _KINDS or name in _VALUES_COMPARED
            if any(not other.isdisjoint(self.flags) for other in others) or (
                has_value and not left
            ):
                raise RefusedError(SYNTAX)
            self.flags[name] = left.pop() if has_value else b""

    def expiry(self, command: str, now_ms: int) -> Expiry | None:
        """Return the expiry that the options give, or None."""
        if b"KEEPTTL" in self.flags:
            return KEEP
        if b"PERSIST" in self.flags:
            return NEVER
        for name in self.flags.keys() & _KINDS.keys():
            kind, unit_ms = _KINDS[name]
            return positive_expiry(kind, self.flags[name], unit_ms, now_ms, command)
        return None
