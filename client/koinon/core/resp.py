"""Single operations, reads of many rows and pages of scans in the Redis protocol (RESP): encodes
commands and interprets replies.

The commands are our own; the node's koinon_commands.py lists them. A reply arrives here as a RESP
parser returns it: ``bytes``, ``int``, ``None`` or a list of these. An error of the node is in one
line (``-KOINON <the error, base64> <request id>``); any other line that begins with ``-`` is a
defect of either side.
"""

from __future__ import annotations

from base64 import b64decode
from functools import lru_cache
from typing import Any

from koinon.core.batching import Kind, PendingOperation
from koinon.core.exchange import Command, PendingMessage
from koinon.core.node_clock import NodeClock
from koinon.types import Entry
from koinon_proto.contract.keyspaces import DEFAULT_ID

# members as globals: attribute access on an Enum is slow
_GET_KIND, _ENTRY_KIND = Kind.GET, Kind.GET_ENTRY
_PUT_KIND, _DELETE_KIND = Kind.PUT, Kind.DELETE
_EXISTS_KIND, _INCREMENT_KIND = Kind.EXISTS, Kind.INCREMENT
_TOUCH_KIND, _GET_OR_PUT_KIND = Kind.TOUCH, Kind.GET_OR_PUT

LEAVING = b"koinon.leaving"
"""The push message by which a node announces that it is about to stop."""

_PROTOCOL = 2
_REFUSAL = "KOINON "
_NOT_KNOWN = "ERR unknown command"
_JOINED_BYTES_MAX = 16 * 1024
"""Up to this many bytes of a value, copying is cheaper than another buffer in a system call."""

_GET = b"*4\r\n$10\r\nKOINON.GET\r\n$%d\r\n%b\r\n%b%b"
_ENTRY = b"*4\r\n$12\r\nKOINON.ENTRY\r\n$%d\r\n%b\r\n%b%b"
_EXISTS = b"*4\r\n$13\r\nKOINON.EXISTS\r\n$%d\r\n%b\r\n%b%b"
_INCREMENT = b"*8\r\n$16\r\nKOINON.INCREMENT\r\n$%d\r\n%b\r\n%b%b%b%b%b"
_TOUCH = b"*7\r\n$12\r\nKOINON.TOUCH\r\n$%d\r\n%b\r\n%b%b%b%b"
_GET_OR_PUT = b"*8\r\n$15\r\nKOINON.GETORPUT\r\n$%d\r\n%b\r\n$%d\r\n"
_GET_OR_PUT_OPTIONS = b"\r\n%b%b%b%b"
_PUT = b"*9\r\n$10\r\nKOINON.PUT\r\n$%d\r\n%b\r\n$%d\r\n"
_PUT_OPTIONS = b"\r\n%b%b%b%b%b"
_DELETE = b"*7\r\n$13\r\nKOINON.DELETE\r\n$%d\r\n%b\r\n%b%b%b%b"
_MESSAGES = {
    command: b"*3\r\n$%d\r\n%b\r\n" % (len(command.value), command.value) for command in Command
}
_NONE = b"$0\r\n\r\n"
_YES_OR_NO = (_DELETE_KIND, _EXISTS_KIND, _TOUCH_KIND)
_DURABILITIES = {"all_in_sync": b"$1\r\n0\r\n", "primary": b"$1\r\n1\r\n"}


def hello(cluster_id: str, keyspace_id: int = DEFAULT_ID, token: str = "") -> bytes:
    """Return the first command of a connection, which selects the keyspace of all its operations.
    The reply has the node's id and its time (``node_clock.of_welcome``).
    """
    arguments = [_number(_PROTOCOL), _bulk(cluster_id.encode()), _number(keyspace_id)]
    if token:
        arguments.append(_bulk(token.encode()))
    return b"*%d\r\n$12\r\nKOINON.HELLO\r\n%b" % (1 + len(arguments), b"".join(arguments))


def command(
    single: PendingOperation | PendingMessage,
    table_version: int,
    request_id: str,
    clock: NodeClock | None = None,
) -> list[bytes]:
    """Encode an operation or a message as buffers to send one after the other: one buffer, or three
    where the value is too large to copy. With a ``clock``, the node refuses a write after its
    deadline.
    """
    if type(single) is PendingMessage:  # its message has a table version of its own
        message = single.value
        begin = b"%b$%d\r\n" % (_MESSAGES[single.command], len(message))
        return _buffers(begin, message, b"\r\n%b" % _bulk(request_id.encode()))
    key, version, request = single.key, _number(table_version), _bulk(request_id.encode())
    if single.kind is _GET_KIND:
        return [_GET % (len(key), key, version, request)]
    if single.kind is _ENTRY_KIND:
        return [_ENTRY % (len(key), key, version, request)]
    if single.kind is _EXISTS_KIND:
        return [_EXISTS % (len(key), key, version, request)]
    take_by = _NONE if clock is None else _bulk(b"%d" % clock.ms_at(single.deadline))
    request += take_by
    durability = _DURABILITIES[single.durability]
    if single.update:
        return _update(single, version, durability, request)
    condition = _number(single.if_version)
    if single.kind is _DELETE_KIND:
        return [_DELETE % (len(key), key, version, condition, durability, request)]
    value = single.value
    begin = _PUT % (len(key), key, len(value))
    end = _PUT_OPTIONS % (version, _number(single.ttl_ms or 0), condition, durability, request)
    return _buffers(begin, value, end)


def _update(
    single: PendingOperation, version: bytes, durability: bytes, request: bytes
) -> list[bytes]:
    key, ttl = single.key, _number(single.ttl_ms or 0)
    if single.kind is _INCREMENT_KIND:
        by = _number(single.by)
        return [_INCREMENT % (len(key), key, by, ttl, version, durability, request)]
    if single.kind is _TOUCH_KIND:
        return [_TOUCH % (len(key), key, ttl, version, durability, request)]
    begin = _GET_OR_PUT % (len(key), key, len(single.value))
    return _buffers(begin, single.value, _GET_OR_PUT_OPTIONS % (ttl, version, durability, request))


def _buffers(begin: bytes, value: bytes, end: bytes) -> list[bytes]:
    return [begin, value, end] if len(value) > _JOINED_BYTES_MAX else [begin + value + end]


def result_of(single: PendingOperation | PendingMessage, reply: Any) -> Any:  # noqa: C901 (a case a kind)
    """Convert the reply to an operation's command into the caller's result.

    Raises:
        ValueError: the reply does not fit the command.
    """
    if type(single) is PendingMessage:
        if type(reply) is bytes:
            return reply
        raise ValueError(f"no answer to {single.command.name}: {type(reply).__name__}")
    kind, answer = single.kind, type(reply)
    if kind is _GET_KIND:
        if answer is bytes or reply is None:
            return reply
    elif kind is _PUT_KIND:
        if answer is bytes:
            return int(reply)
    elif kind is _INCREMENT_KIND:
        if answer is int:
            return reply
    elif kind in _YES_OR_NO:
        if answer is int:
            return reply == 1
    elif reply is None:
        return single.value if kind is _GET_OR_PUT_KIND else None
    elif kind is _GET_OR_PUT_KIND:
        if answer is bytes:
            return reply
    elif answer is list and len(reply) == 3 and type(reply[0]) is bytes:
        return Entry(single.key, reply[0], int(reply[1]), int(reply[2]) or None)
    raise ValueError(f"no answer to {kind.value}: {answer.__name__}")


def is_not_known(line: str) -> bool:
    """Return whether the error line says that the node does not know the command."""
    return line.startswith(_NOT_KNOWN)


def refusal_of(line: str) -> bytes:
    """Return the serialized error of an error line. (The request id in the line is that of our
    command.)

    Raises:
        ValueError: the line holds no such error.
    """
    if not line.startswith(_REFUSAL):
        raise ValueError(f"not an error of ours: {line}")
    return b64decode(line[len(_REFUSAL) :].partition(" ")[0], validate=True)


@lru_cache(maxsize=1_024)
def _number(number: int | None) -> bytes:
    """Encode a number as an argument; None as an empty one."""
    return _bulk(b"" if number is None else b"%d" % number)


def _bulk(argument: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(argument), argument)
