"""Writes answers: tables and lines for people, JSON for programs, exact bytes on request."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from koinon_proto.process import printable
from koinon_proto.process.printable import OutputError, goes_to_terminal

# rich is imported only on use: a command that prints a value or JSON does without
if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from koinon.cli.console.terminal import Console

PIPE_WIDTH = 200
NOT_PRINTED = 4
BROKEN_PIPE = 141
"""Exit codes of a command that succeeded but could not print its result: in general, and because
the reading program has ended.
"""


def console(*, stderr: bool = False) -> Console:
    """Return a console. It is wide if its stream is no terminal, so that piped tables are neither
    cut nor wrapped. It replaces no part of a text, such as ``:key:``, by an emoji.
    """
    from koinon.cli.console.terminal import Console

    seen = goes_to_terminal(stderr=stderr)
    columns = os.environ.get("COLUMNS", "")
    width = None if seen else int(columns) if columns.isdecimal() else PIPE_WIDTH
    width = None if width == 0 else width
    return Console(stderr=stderr, highlight=False, emoji=False, width=width, soft_wrap=not seen)


def escape(text: str) -> str:
    """Return a text escaped for a line of rich's markup."""
    from rich import markup

    return markup.escape(printable.printable(text))


def somebody_is_there() -> bool:
    """Return whether standard input is a terminal, so that a person can answer a question."""
    return sys.stdin.isatty()


def problem(message: str) -> None:
    """Print an error in one line on standard error; further lines hold advice."""
    head, _, rest = message.partition("\n")
    printer = console(stderr=True)
    printer.print(f"[bold red]koinon:[/] {escape(head)}", soft_wrap=True)
    if rest:
        printer.print(rest, style="dim", soft_wrap=True, markup=False)


def note(message: str) -> None:
    """Print a remark on standard error, apart from piped output."""
    console(stderr=True).print(message, style="dim", soft_wrap=True, markup=False)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """A context for printing a result. If printing fails, the error says that ``what`` could not be
    printed. ``what`` is the subject of that sentence and names the work that was done: "the record
    was deleted, but its result".
    """
    try:
        yield
        printable.flush()
    except OutputError as error:
        error.what = error.what or what
        raise


def tell_unprinted(error: OutputError) -> int:
    """Report that the output failed, unless its reader has just ended; return the exit code."""
    printable.let_go()
    if error.reader_is_gone:
        return BROKEN_PIPE
    problem(f"{error.what or 'the output'} could not be printed: {error.reason}")
    return NOT_PRINTED


def table(*columns: str, title: str | None = None) -> RichTable:
    """Return an aligned table without lines; a column whose name starts with '>' is
    right-aligned.
    """
    from rich.table import Table as RichTable

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
    """Print a table without the trailing blanks of its last column. If it is too wide, leave out
    columns in the order of ``expendable``.
    """
    printer = console()
    made = fitted(printer, made, expendable)
    with printer.capture() as capture:
        printer.print(made)
    shown = "".join(line.rstrip() + "\n" for line in capture.get().splitlines())
    printer.file.write(shown)
    printer.file.flush()


def fitted(printer: Console, made: RichTable, expendable: Sequence[str]) -> RichTable:
    """Return the table without the columns that do not fit, left out in the order of
    ``expendable``.
    """
    for name in expendable:
        if _width(printer, made) <= printer.width:
            break
        made = _without(made, name)
    return made


def _width(printer: Console, made: RichTable) -> int:
    """Return the width at which no cell is folded, without the padding behind the last column."""
    from rich.measure import Measurement

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
    """Return bytes for JSON: as text if they are UTF-8, else ``{"base64": …}``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def print_json(answer: Any) -> None:
    """Print one JSON value on one line and flush it: a program may be waiting at the end of a
    pipe.
    """
    write_line(json_text(answer), flush=True)


def json_text(answer: Any) -> str:
    """Return one JSON value on one line of ASCII: the same bytes whatever the output's encoding,
    and without terminal escapes.
    """
    return json.dumps(answer, separators=(",", ":")).replace("\x7f", "\\u007f")


def print_failure(answer: Mapping[str, Any]) -> None:
    """Print the cause of a command's failure as JSON. An error in printing is ignored: the message
    is on standard error, and the exit code is the command's.
    """
    with suppress(OutputError):
        print_json(answer)


def write_line(line: str, *, flush: bool = False) -> None:
    """Write a line to standard output, which may buffer it for a while."""
    sys.stdout.write(line + "\n")
    if flush:
        sys.stdout.flush()
