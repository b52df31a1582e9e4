"""Text, from any source, that cannot upset a terminal or forge a line of a log.

What is not printable (``str.isprintable``) is escaped as Python writes it, ``\\x1b`` for ESC:
control characters (C0 and C1), line and paragraph separators, marks that turn the direction of
writing, lone surrogates. Text that is printable is returned as it is.

Processes of Koinon call :func:`protect_streams` before anything else: from then on whatever Python
writes to standard output and error (prints, tracebacks, warnings, logs) goes through here. No other
module writes to the streams below (``make check`` holds that), but for ``terminal.Console``, which
escapes text before it adds colours.

A stream that cannot be written (closed, on a full disk, a pipe that nobody reads) raises
:class:`OutputError`, by which a program tells this failure from all others. A character that the
stream's encoding lacks is escaped like one that is not printable.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast


def printable(text: str) -> str:
    """Return the text as one line: what is not printable, line ends too, is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def printable_lines(text: str) -> str:
    """Return the text with its line ends and tabs; whatever else is not printable is escaped."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def printable_bytes(data: bytes) -> str:
    """Return bytes as one line of text; a byte that is not UTF-8 is escaped as ``\\x80``."""
    return printable(data.decode("utf-8", errors="surrogateescape"))


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


class OutputError(OSError):
    """Standard output or error could not be written. ``reason`` is the system's, in words.

    ``what`` is the thing that could not be printed, as the subject of a sentence: whoever prints a
    result sets it, and says in it what was done before.
    """

    def __init__(self, cause: OSError) -> None:
        closed = cause.errno == errno.EBADF
        self.reason = "the output is closed" if closed else cause.strerror or str(cause)
        self.reader_is_gone = cause.errno == errno.EPIPE
        self.what = ""
        super().__init__(self.reason)  # without errno: typer ends by itself at EPIPE


class CheckedStream:
    """A text stream whose failures are OutputErrors; all else is the stream's beneath.

    Args:
        drops: drop text that cannot be written, now and later. A pipe without a reader fails
            nevertheless.
    """

    def __init__(self, beneath: TextIO, *, drops: bool = False) -> None:
        self.beneath = beneath
        self._drops = drops

    def write(self, text: str) -> int:
        try:
            return self.beneath.write(text)
        except OSError as error:
            self._fail(error)
            return len(text)

    def flush(self) -> None:
        try:
            self.beneath.flush()
        except OSError as error:
            self._fail(error)

    def let_go(self) -> None:
        """Send to nowhere what could not be written: Python tries once more at its end."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.beneath.fileno())
        os.close(null)

    def _fail(self, error: OSError) -> None:
        failure = OutputError(error)
        if failure.reader_is_gone or not self._drops:
            raise failure from error
        self.let_go()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


class PrintableStream:
    """A text stream that escapes what is written to it; all else is the stream's beneath.

    It says that it is no terminal: who asks wants to write colours, and only ``terminal.Console``
    may do that, on the stream beneath.
    """

    def __init__(self, beneath: TextIO) -> None:
        self.beneath = beneath

    def write(self, text: str) -> int:
        self.beneath.write(printable_lines(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


def protect_streams(*, drop_messages: bool = False) -> None:
    """Let all that this process writes to standard output and error be printable.

    Args:
        drop_messages: drop what standard error does not take, since the work is worth more than
            the messages. Servers do not: their log goes on once the disk has room again.
    """
    _hold_descriptors()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, PrintableStream):
            continue
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        checked = CheckedStream(stream, drops=drop_messages and name == "stderr")
        setattr(sys, name, PrintableStream(cast(TextIO, checked)))


def _hold_descriptors() -> None:
    """Open standard streams that the parent process has closed, so that reads and writes fail as
    they do on a closed file: Python leaves None in their places, and the next file or socket that
    is opened would get the descriptor, and with it what libraries print to descriptor 1 or 2.
    """
    for name, flags, mode in (
        ("stdin", os.O_WRONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_RDONLY, "w"),
    ):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def stream_of(stderr: bool = False) -> TextIO:
    """Return standard output or error as it is beneath the escapes: for ``terminal.Console``."""
    stream = sys.stderr if stderr else sys.stdout
    return stream.beneath if isinstance(stream, PrintableStream) else stream


def encodes(text: str) -> bool:
    """Return whether standard output shows each character of the text as itself."""
    encoding = stream_of().encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding) == text


def goes_to_terminal(*, stderr: bool = False) -> bool:
    """Return whether a person sees standard output (or error) as it is written."""
    return stream_of(stderr=stderr).isatty()


def tell(text: str, *, stderr: bool = False) -> None:
    """Write a line, or several, to standard output or error, at once."""
    stream = stream_of(stderr=stderr)
    stream.write(printable_lines(text) + "\n")
    stream.flush()


def flush() -> None:
    """Send on what standard output and error have kept back.

    Raises:
        OutputError: one of them cannot be written.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def let_go() -> None:
    """Forget what standard output and error have kept back and cannot write."""
    for stream in map(stream_of, (False, True)):
        try:
            stream.flush()
        except OSError:
            if isinstance(stream, CheckedStream):
                stream.let_go()


def write_bytes(data: bytes) -> None:
    """Write exactly these bytes to standard output, which must be no terminal.

    Raises:
        OutputError: it cannot be written.
    """
    stream = stream_of()
    if stream.isatty():
        raise ValueError("raw bytes do not go to a terminal")
    stream.flush()
    try:
        stream.buffer.write(data)
        stream.buffer.flush()
    except OSError as error:
        raise OutputError(error) from error
