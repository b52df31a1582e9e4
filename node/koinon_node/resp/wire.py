"""Encodes replies in RESP2; ``in_resp3`` converts them to RESP3 where that differs.

Pure. https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

OK = b"+OK\r\n"
NIL = b"$-1\r\n"
NIL_ARRAY = b"*-1\r\n"
NULL = b"_\r\n"
"""RESP3's nil; RESP2 has two."""
ZERO, ONE = b":0\r\n", b":1\r\n"
_BULK, _MINUS = b"$-"


def bulk(value: bytes) -> bytes:
    """Encode a bulk string."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def bulk_or_nil(value: bytes | None) -> bytes:
    """Encode a bulk string, or RESP2's nil."""
    return NIL if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def integer(number: int) -> bytes:
    """Encode a signed 64-bit integer."""
    return b":%d\r\n" % number


def simple(text: str) -> bytes:
    """Encode a simple string."""
    return b"+%b\r\n" % _one_line(text)


def error(text: str) -> bytes:
    """Encode an error. Its first word is the error code: ``ERR no such thing``."""
    return b"-%b\r\n" % _one_line(text)


def array(parts: Sequence[bytes]) -> bytes:
    """Encode an array of encoded replies."""
    return b"*%d\r\n%b" % (len(parts), b"".join(parts))


def bulks(values: Iterable[bytes]) -> bytes:
    """Encode an array of bulk strings."""
    return array([bulk(value) for value in values])


def push(*values: bytes) -> bytes:
    """Encode a push message, which answers no command (RESP3)."""
    return b">%d\r\n%b" % (len(values), b"".join(map(bulk, values)))


def map_of(pairs: Sequence[tuple[bytes, bytes]], *, resp3: bool) -> bytes:
    """Encode a map of encoded replies; in RESP2 an array of alternating keys and values."""
    head = b"%%%d\r\n" % len(pairs) if resp3 else b"*%d\r\n" % (2 * len(pairs))
    return head + b"".join([part for pair in pairs for part in pair])


def in_resp3(replies: bytes) -> bytes:
    """Replace RESP2's nils in the replies by RESP3's."""
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
