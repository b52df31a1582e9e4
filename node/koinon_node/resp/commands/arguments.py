"""Arguments of Redis's commands: numbers, keys of one slot, and expiries. Pure, but for the limits.

What is wrong is raised as ``RefusedError``, whose text is the reply.
"""

from __future__ import annotations

from collections.abc import Sequence

from koinon_node.core.updates import KEEP, NEVER, Expiry, ExpiryKind, parse_integer
from koinon_node.resp.errors import CROSS_SLOT, NOT_AN_INTEGER, RefusedError
from koinon_node.serving.request_limits import check_key
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
"""Options that name an expiry, and the milliseconds of their unit."""


def integer(text: bytes) -> int:
    """Return an integer of 64 bits with a sign."""
    try:
        return parse_integer(text)
    except NotANumberError:
        raise RefusedError(NOT_AN_INTEGER) from None


def keys_of_one_slot(keys: Sequence[bytes]) -> Sequence[bytes]:
    """Check the keys of a command, and that one node serves them all."""
    for key in keys:
        check_key(key)
    if len(keys) > 1 and len(set(map(slot_of, keys))) > 1:
        raise RefusedError(CROSS_SLOT)
    return keys


def expiry(kind: ExpiryKind, number: bytes, unit_ms: int, now_ms: int, command: str) -> Expiry:
    """Return the expiry that a command is given; it may be over."""
    ms = integer(number) * unit_ms
    after_ms = ms - now_ms if kind is ExpiryKind.AT else ms
    if after_ms > MAX_TTL_MS:
        raise RefusedError(f"ERR invalid expire time in '{command}' command")
    return Expiry(kind, ms)


def positive_expiry(
    kind: ExpiryKind, number: bytes, unit_ms: int, now_ms: int, command: str
) -> Expiry:
    """As ``expiry``, of a command that takes only what is above 0."""
    found = expiry(kind, number, unit_ms, now_ms, command)
    if found.ms <= 0:
        raise RefusedError(f"ERR invalid expire time in '{command}' command")
    return found


_OF_EXPIRY = (b"EX", b"KEEPTTL", b"PERSIST")
"""Of these a command has one at most."""


class Options:
    """The options at the end of a command, taken one by one."""

    def __init__(self, arguments: Sequence[bytes], command: str, now_ms: int) -> None:
        self._left = list(reversed(arguments))
        self._command = command
        self._now_ms = now_ms
        self.expiry: Expiry | None = None
        self.flags: set[bytes] = set()

    def take(self, *flags: bytes) -> None:
        """Take all: these flags, each once; an expiry, KEEPTTL and PERSIST where they are named."""
        while self._left:
            name = self._left.pop().upper()
            if name in _KINDS and b"EX" in flags and self.expiry is None and self._left:
                kind, unit_ms = _KINDS[name]
                number = self._left.pop()
                self.expiry = positive_expiry(kind, number, unit_ms, self._now_ms, self._command)
            elif name in _OF_EXPIRY and name in flags and name != b"EX" and self.expiry is None:
                self.expiry = KEEP if name == b"KEEPTTL" else NEVER
            elif name in flags and name not in _OF_EXPIRY and name not in self.flags:
                self.flags.add(name)
            else:
                raise RefusedError(SYNTAX)
