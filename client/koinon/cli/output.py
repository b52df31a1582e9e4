"""How answers look: tables and lines for people, JSON for programs, exact bytes when asked."""

from __future__ import annotations

import base64
import errno
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table as RichTable

PIPE_WIDTH = 200


class _Console(Console):
    """A reader that has gone away ends the command as it does where nothing of rich is printed."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console(*, stderr: bool = False) -> Console:
    """A console; wide where nobody looks, so that piped tables are neither cut nor wrapped. A key
    such as ``user:key:1`` is printed as it is: no part of it stands for an emoji.
    """
    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else int(columns) if columns.isdecimal() else PIPE_WIDTH
    width = None if width == 0 else width
    return _Console(
        stderr=stderr, highlight=False, emoji=False, width=width, soft_wrap=not stream.isatty()
    )


def somebody_is_there() -> bool:
    """Whether a question would reach a person."""
    return sys.stdin.isatty()


def problem(message: str) -> None:
    """One line on standard error (further lines hold advice)."""
    head, _, rest = message.partition("\n")
    printer = console(stderr=True)
    printer.print(f"[bold red]koinon:[/] {escape(head)}", soft_wrap=True)
    if rest:
        printer.print(escape(rest), style="dim", soft_wrap=True)


def note(message: str) -> None:
    """A remark on standard error, out of the way of what is piped."""
    console(stderr=True).print(escape(message), style="dim", soft_wrap=True)


def table(*columns: str, title: str | None = None) -> RichTable:
    """An aligned table without lines; a column whose name starts with '>' is right-aligned."""
    made = RichTable(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            column.removeprefix(">"),
            justify="right" if right else "left",
            header_style="dim",
            overflow="fold",
        )
    return made


def show(made: RichTable, *, expendable: Sequence[str] = ()) -> None:
    """Print a table, without the blanks that fill its last column where nobody sees them. Where it
    is too wide, columns are left out as far as needed, in the order of ``expendable``.
    """
    printer = console()
    made = fitted(printer, made, expendable)
    with printer.capture() as capture:
        printer.print(made)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))
    sys.stdout.flush()


def fitted(printer: Console, made: RichTable, expendable: Sequence[str]) -> RichTable:
    """Return the table, without columns that do not fit, in the order of ``expendable``."""
    for name in expendable:
        if _width(printer, made) <= printer.width:
            break
        made = _without(made, name)
    return made


def _width(printer: Console, made: RichTable) -> int:
    """The width at which nothing is folded; the padding behind the last column does not count."""
    options = printer.options.update(width=10_000)
    return Measurement.get(printer, options, made).maximum


def _without(made: RichTable, name: str) -> RichTable:
    kept = [column for column in made.columns if column.header != name]
    headers = [(">" if c.justify == "right" else "") + str(c.header) for c in kept]
    narrower = table(*headers)
    for column, before in zip(narrower.columns, kept, strict=True):
        column.min_width, column.no_wrap = before.min_width, before.no_wrap
    for cells in zip(*(column.cells for column in kept), strict=True):
        narrower.add_row(*cells)
    return narrower


def json_bytes(data: bytes) -> str | dict[str, str]:
    """Bytes in JSON: the text they are as UTF-8, else ``{"base64": …}``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def print_json(answer: Any) -> None:
    """One JSON value on one line, at once: who reads it through a pipe may be waiting for it."""
    sys.stdout.write(json_line(answer))
    sys.stdout.flush()


def json_line(answer: Any) -> str:
    """Return one JSON value as a line."""
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")) + "\n"


def printable(data: bytes) -> str:
    """Bytes as one line of text that cannot upset a terminal: what is not printable is escaped."""
    text = data.decode("utf-8", errors="surrogateescape")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def count(number: int, noun: str) -> str:
    """``1 row``, ``2,000 rows``, ``3 copies``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("py") else f"{number:,} {noun}s"


def bytes_text(number: float) -> str:
    """A size for people: ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def duration_text(seconds: float) -> str:
    """A duration for people: ``240 ms``, ``3.2 s``, ``4 min 05 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
