"""Text, from any source, that cannot upset a terminal or forge a line of a log.

What is not printable (``str.isprintable``) is escaped as Python writes it, ``\\x1b`` for ESC:
control characters (C0 and C1), line and paragraph separators, marks that turn the direction of
writing, lone surrogates. Text that is printable is returned as it is.

Processes of Koinon call :func:`protect_streams` before anything else: from then on whatever Python
writes to standard output and error (prints, tracebacks, warnings, logs) goes through here. No other
module writes to the streams below (``make check`` holds that), but for ``terminal.Console``, which
escapes text before it adds colours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO


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


def protect_streams() -> None:
    """Let all that this process writes to standard output and error be printable."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, PrintableStream):
            setattr(sys, name, PrintableStream(stream))


def stream_of(stderr: bool = False) -> TextIO:
    """Return standard output or error as it is beneath the protection: for ``terminal.Console``."""
    stream = sys.stderr if stderr else sys.stdout
    return stream.beneath if isinstance(stream, PrintableStream) else stream


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
        BrokenPipeError: who reads it has gone.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def write_bytes(data: bytes) -> None:
    """Write exactly these bytes to standard output, which must be no terminal."""
    stream = stream_of()
    if stream.isatty():
        raise ValueError("raw bytes do not go to a terminal")
    stream.flush()
    stream.buffer.write(data)
    stream.buffer.flush()
