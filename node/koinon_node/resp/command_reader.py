"""Parses a client's bytes into commands.

A command is an array of bulk strings, or a line of words (an inline command). Most reads from a
socket bring only complete commands, or end inside the last one. hiredis, in C, parses the complete
commands, and the complete arguments of a long one; this module parses the rest piece by piece. So
no parser keeps a buffer, an array grows as its arguments come, and a length is checked before its
bytes are received.

Pure. https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import re
from itertools import islice

import hiredis

Command = list[bytes]

ARGUMENTS_MAX = 1024 * 1024
LINE_BYTES_MAX = 64 * 1024
"""The most bytes of an inline command."""
ARGUMENT_BYTES = 64
"""Memory of one argument beside its bytes: the Python object and its list entry."""
_HEADER_BYTES_MAX = 32
_MANY, _MANY_BYTES = 16, 1_024  # arguments missing and bytes at hand, from which C parses them

# hiredis allocates an array by its stated length, and accepts nested arrays, nine deep.
_HUGE_ARRAY = re.compile(rb"[*%~>|][0-9+-]{6}")
_HEADER = re.compile(rb"([*$])(-?[0-9]{1,18})\r\n")
_WORD = re.compile(
    rb"""[ \t\v\f\r]*(?:"((?:\\.|[^"\\])*)"|'((?:\\'|[^'])*)'|([^\s"']+))(?=[ \t\v\f\r]|\Z)""",
    re.DOTALL,
)
_ESCAPED = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"a": b"\a"}
_OF_HTTP = frozenset((b"post", b"host:"))
_BYTES = frozenset((bytes,))
_NOTHING = b"*0\r\n"  # a command without words


class _ProtocolError(Exception):
    """The peer sent bytes that are no command."""


class CommandReader:
    """Parses the commands in one connection's bytes. ``limit``: the most bytes of a command.
    ``one_by_one``: return a single command at a time; ``feed(b"")`` returns the next one, possibly
    under another limit.
    """

    def __init__(self, limit: int, *, one_by_one: bool = False) -> None:
        self.limit = limit
        self.one_by_one = one_by_one
        self.fault = ""
        """The protocol error behind the last command, in Redis's words; '' if there is none. After
        an error nothing more is parsed."""
        self._head = b""  # an incomplete header or line, not parsed yet
        self._missing_arguments = 0  # of the incomplete array, including the current argument
        self._arguments: Command = []  # the complete arguments of the incomplete array
        self._missing = 0  # bytes of the current argument and its line end; 0: no header yet
        self._partial = bytearray()  # the received bytes of the current argument
        self._held_bytes = 0  # all received bytes of the incomplete array

    @property
    def has_begun(self) -> bool:
        """True while a command is incomplete."""
        return bool(self._head or self._missing_arguments)

    @property
    def held_bytes(self) -> int:
        """The received bytes of an incomplete command."""
        return self._held_bytes + len(self._head)

    @property
    def coming_bytes(self) -> int:
        """The missing bytes of its current argument."""
        return self._missing

    def feed(self, data: bytes) -> list[Command]:
        """Return the commands that are complete with this data. Check ``fault`` afterwards."""
        if self.fault:
            return []
        if self._head:
            data, self._head = self._head + data, b""
        commands: list[Command] = []
        try:
            at = self._read_arguments(data, commands) if self._missing_arguments else 0
            rest = data[at:] if at else data
            if rest and not self._missing_arguments:
                at = 0 if self.one_by_one else _append_whole(rest, commands, self.limit)
                while at < len(rest) and not self._head:
                    if commands and self.one_by_one:
                        self._head = rest[at:]
                    else:
                        at = self._read_command(rest, at, commands)
        except _ProtocolError as error:
            self.fault = str(error)
            self._arguments, self._partial = [], bytearray()
            self._held_bytes = self._missing = self._missing_arguments = 0
        return commands

    # --- incomplete commands ---------------------------------------------------------------

    def _read_command(self, data: bytes, at: int, commands: list[Command]) -> int:
        """Parse the command at this offset as far as it has come; return the offset of the next
        command.
        """
        if data[at] != _ARRAY:
            return self._read_inline(data, at, commands)
        end, count = self._length(data, at, _ARRAY)
        if end and count > ARGUMENTS_MAX:
            raise _ProtocolError("invalid multibulk length")
        if count <= 0:  # an empty command, or an incomplete header
            return end or len(data)
        self._missing_arguments = count
        return self._read_arguments(data, commands, end)

    def _read_arguments(self, data: bytes, commands: list[Command], at: int = 0) -> int:
        """Parse arguments of the incomplete array; return the offset of the next command."""
        while self._missing_arguments:
            if not self._missing:
                if len(data) - at >= _MANY_BYTES and self._missing_arguments > _MANY:
                    at = self._read_whole_arguments(data, at)
                if at == len(data):
                    return at
                if data[at] != _BULK:
                    got = ascii(chr(data[at]))[1:-1]
                    raise _ProtocolError(f"expected '$', got '{got}'")
                end, size = self._length(data, at, _BULK)
                if not end:
                    return len(data)
                if size < 0 or self._held_bytes + size > self.limit:
                    raise _ProtocolError("invalid bulk length")
                at, self._missing = end, size + 2
            piece = data[at : at + self._missing]
            at += len(piece)
            self._missing -= len(piece)
            self._held_bytes += len(piece)
            if self._missing:
                self._partial += piece
                return at
            if self._partial:
                self._partial += piece
                del self._partial[-2:]
                self._arguments.append(bytes(self._partial))
                self._partial = bytearray()
            else:
                self._arguments.append(piece[:-2])
            self._held_bytes += ARGUMENT_BYTES
            self._missing_arguments -= 1
        commands.append(self._arguments)
        self._arguments, self._held_bytes = [], 0
        return at

    def _read_whole_arguments(self, data: bytes, at: int) -> int:
        """Parse arguments of the incomplete array in C, all but the last one that has begun; return
        the offset behind them. Return the same offset if one of them needs a closer look.
        """
        end = data.rfind(b"\r\n$", at) + 2
        found = _arguments_in(data[at:end], self._missing_arguments - 1)
        sizes = list(map(len, found))
        size = sum(sizes) + 2 * len(sizes)
        headers = sum(map(len, map(str, sizes))) + 3 * len(sizes)
        if at + size + headers != end or self._held_bytes + size > self.limit:
            return at
        self._arguments += found
        self._missing_arguments -= len(found)
        self._held_bytes += size + ARGUMENT_BYTES * len(found)
        return end

    def _length(self, data: bytes, at: int, kind: int) -> tuple[int, int]:
        """Parse the header at this offset; return its end and its number, or (0, 0) if it is
        incomplete.
        """
        if found := _HEADER.match(data, at):
            return found.end(), int(found[2])
        if len(data) - at >= _HEADER_BYTES_MAX or data.find(b"\n", at) >= 0:
            raise _ProtocolError(
                "invalid multibulk length" if kind == _ARRAY else "invalid bulk length"
            )
        self._head = data[at:]
        return 0, 0

    def _read_inline(self, data: bytes, at: int, commands: list[Command]) -> int:
        end = data.find(b"\n", at)
        if (len(data) if end < 0 else end) - at > min(LINE_BYTES_MAX, self.limit):
            raise _ProtocolError("too big inline request")
        if end < 0:
            self._head = data[at:]
            return len(data)
        if words := _words(data[at:end]):
            commands.append(words)
        return end + 1


_ARRAY, _BULK = b"*$"


def _append_whole(data: bytes, commands: list[Command], limit: int) -> int:
    """Append the complete commands at the beginning of the data, and return their end. Return 0 if
    hiredis cannot tell where that is.
    """
    if len(data) > limit or _HUGE_ARRAY.search(data) is not None:
        return 0
    if data.endswith(b"\r\n") and _parse(data, commands):
        return len(data)
    end = data.rfind(b"\r\n*") + 2
    return end if end >= 2 and _parse(data[:end], commands) else 0


def _arguments_in(data: bytes, most: int) -> list[bytes]:
    """Return the bulk strings that the data consists of, at most so many; none if it has another
    thing.
    """
    if _HUGE_ARRAY.search(data) is not None:
        return []
    reader = hiredis.Reader()
    reader.feed(data)
    try:
        found = list(islice(iter(reader.gets, False), most))
    except hiredis.ProtocolError:
        return []
    return found if _BYTES.issuperset(map(type, found)) else []


def _parse(data: bytes, commands: list[Command]) -> bool:
    """Append the commands if the data consists of complete commands; else append nothing and return
    False.
    """
    reader = hiredis.Reader()
    reader.feed(data)
    found: list[Command] = []
    try:
        while (command := reader.gets()) is not False:
            if type(command) is not list or not _BYTES.issuperset(map(type, command)):
                return False
            if command:
                found.append(command)
        reader.feed(_NOTHING)
        if reader.gets() != []:  # the data ends with an incomplete command
            return False
    except hiredis.ProtocolError:
        return False
    commands += found
    return True


def _words(line: bytes) -> Command:
    """Split an inline command into words by Redis's rules."""
    if b'"' not in line and b"'" not in line:
        words = line.split()
    else:
        words, at = [], 0
        line = line.rstrip()
        while at < len(line):
            if (found := _WORD.match(line, at)) is None:
                raise _ProtocolError("unbalanced quotes in request")
            at = found.end()
            double, single, plain = found.groups()
            if double is not None:
                words.append(_ESCAPED.sub(_unescaped, double))
            else:
                words.append(plain if single is None else single.replace(b"\\'", b"'"))
    if words and words[0].lower() in _OF_HTTP:  # a web page may have made a browser send this
        raise _ProtocolError("this is no HTTP server")
    return words


def _unescaped(escape: re.Match[bytes]) -> bytes:
    what = escape[1]
    if len(what) > 1:
        return bytes.fromhex(what[1:].decode())
    return _ESCAPES.get(what, what)
