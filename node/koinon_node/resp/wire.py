"""RESP on the wire: takes commands out of bytes, and makes the bytes of replies.

hiredis parses, in C. It makes room for an array as soon as it reads the array's length, and a
command of ten bytes may name a thousand million: so such a length is looked for before it is fed.
It also takes arrays in arrays, nine deep, which no command has: large ones are looked for, too.

Pure. https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import hiredis

Command = list[bytes]

OK = b"+OK\r\n"
NIL = b"$-1\r\n"
NIL_ARRAY = b"*-1\r\n"
NULL = b"_\r\n"
"""RESP3's nil: not all of its readers take the nil array of RESP2."""
ZERO, ONE = b":0\r\n", b":1\r\n"

# Of arrays, maps, sets, pushes and attributes: a length of 100 or more, and of 10,000 or more.
_LARGE = re.compile(rb"[*%~>|][0-9+-]{3}")
_TOO_MANY = re.compile(rb"[*%~>|][0-9+-]{5}")
_MAYBE_CUT = re.compile(rb"[*%~>|][0-9+-]{0,4}\Z")
_CUT_BYTES = 6
_ROOM_BYTES = 8 * 10_000  # at most, of the array of a large command
_BYTES = frozenset((bytes,))


class ProtocolError(Exception):
    """The peer sent something that is no command; the connection cannot go on."""


class CommandReader:
    """Takes commands, arrays of bulk strings, out of a stream of bytes."""

    def __init__(self, command_bytes_max: int) -> None:
        self._reader = hiredis.Reader()
        self.limit = command_bytes_max
        self._cut = b""  # of the last bytes, what may be the beginning of a length
        self.held_bytes = 0  # fed since the last whole command

    @property
    def has_begun(self) -> bool:
        """True while bytes have come since the last whole command."""
        return bool(self._cut or self.held_bytes)

    def feed(self, data: bytes) -> list[Command]:
        """Return the commands that are whole with this data.

        Raises:
            ProtocolError: the stream holds something else, or a command that is too long.
        """
        if self._cut:
            data, self._cut = self._cut + data, b""
        if cut := _MAYBE_CUT.search(data[-_CUT_BYTES:]):
            data, self._cut = data[: -len(cut[0])], cut[0]
        commands: list[Command] = []
        start = 0
        for found in _LARGE.finditer(data):
            self._take(data[start : found.start()], commands)
            start = found.start()
            if not self._reader.has_data():  # so what comes is a length, not part of a value
                self._begin_large(_TOO_MANY.match(data, start) is not None)
        self._take(data[start:] if start else data, commands)
        return commands

    def _begin_large(self, too_many: bool) -> None:
        if too_many:
            raise ProtocolError("invalid multibulk length")
        self._reader.feed(b"*0\r\n")  # an empty command, unless a command is coming in
        if self._reader.gets() != []:
            raise ProtocolError("expected a command, an array of bulk strings")
        self.held_bytes += _ROOM_BYTES

    def _take(self, data: bytes, commands: list[Command]) -> None:
        self._reader.feed(data)
        self.held_bytes += len(data)
        try:
            while (command := self._reader.gets()) is not False:
                if type(command) is not list or not _BYTES.issuperset(map(type, command)):
                    raise ProtocolError("expected a command, an array of bulk strings")
                if command:
                    commands.append(command)
                self.held_bytes = len(data) if self._reader.has_data() else 0  # at most
        except hiredis.ProtocolError as error:
            raise ProtocolError(str(error)) from None
        if self.held_bytes > self.limit:
            raise ProtocolError(f"a command has more than {self.limit} bytes")


def bulk(value: bytes) -> bytes:
    """Return a bulk string."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def bulk_or_nil(value: bytes | None) -> bytes:
    """Return a bulk string, or the nil of RESP2, which RESP3 readers take too."""
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


def _one_line(text: str) -> bytes:
    return text.replace("\r", " ").replace("\n", " ").encode("utf-8", "replace")
