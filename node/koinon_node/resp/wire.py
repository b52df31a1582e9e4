"""The bytes of replies. What they are in RESP2; ``in_resp3`` makes RESP3 of it where that differs.

Pure. https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

OK = b"+OK\r\n"
NIL = b"$-1\r\n"
NIL_ARRAY = b"*-1\r\n"
NULL = b"_\r\n"
"""RESP3's nil, in the place of both of RESP2's."""
ZERO, ONE = b":0\r\n", b":1\r\n"
_BULK, _MINUS = b"$-"


def bulk(value: bytes) -> bytes:
    """Return a bulk string."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def bulk_or_nil(value: bytes | None) -> bytes:
    """Return a bulk string, or the nil of RESP2."""
    return NIL if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def integer(number: int) -> bytes:
    """Return an integer, of 64 bits with a sign at most."""
    return b":%d\r\n" % number


def simple(text: str) -> bytes:
    """Return a simple string."""
    return b"+%b\r\n" % _one_line(text)


def error(text: str) -> bytes:
    """Return an error; its first word is its kind: ``ERR no such thing``."""
    return b"-%b\r\n" % _one_line(text)


def array(parts: Sequence[bytes]) -> bytes:
    """Return an array of replies."""
    return b"*%d\r\n%b" % (len(parts), b"".join(parts))


def bulks(values: Iterable[bytes]) -> bytes:
    """Return an array of bulk strings."""
    return array([bulk(value) for value in values])


def push(*values: bytes) -> bytes:
    """Return a message that answers no command (RESP3)."""
    return b">%d\r\n%b" % (len(values), b"".join(map(bulk, values)))


def map_of(pairs: Sequence[tuple[bytes, bytes]], *, resp3: bool) -> bytes:
    """Return a map of replies; in RESP2 an array of keys and values in turn."""
    head = b"%%%d\r\n" % len(pairs) if resp3 else b"*%d\r\n" % (2 * len(pairs))
    return head + b"".join([part for pair in pairs for part in pair])


def in_resp3(replies: bytes) -> bytes:
    """Return the replies with RESP3's nil for those of RESP2."""
    if NIL not in replies and NIL_ARRAY not in replies:
        return replies
    parts: list[bytes] = []
    start = at = 0
    while at < len(replies):
        end = replies.index(b"\r\n", at) + 2
        if replies[at] in b"$*" and replies[at + 1] == _MINUS:
            parts += (replies[start:at], NULL)
            start = end
        elif replies[at] == _BULK:
            end += int(replies[at + 1 : end - 2]) + 2
        at = end
    parts.append(replies[start:])
    return b"".join(parts)


def _one_line(text: str) -> bytes:
    return text.replace("\r", " ").replace("\n", " ").encode("utf-8", "replace")
