"""Writes answers: tables and lines for people, JSON for programs, exact bytes when asked."""

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

if TYPE_CHECKING:  # a command that prints a value, or JSON, does not import rich
    from rich.table import Table as RichTable

    from koinon.cli.console.terminal import Console

PIPE_WIDTH = 200
NOT_PRINTED = 4
BROKEN_PIPE = 141
"""Exit codes of a command that did its work, and whose result could not be printed: on the whole,
or because the program that reads it has ended.
"""


def console(*, stderr: bool = False) -> Console:
    """Return a console; wide where it is no terminal, so that piped tables are neither cut nor
    wrapped. A key such as ``user:key:1`` is printed as it is: no part stands for an emoji.
    """
    from koinon.cli.console.terminal import Console

    seen = goes_to_terminal(stderr=stderr)
    columns = os.environ.get("COLUMNS", "")
    width = None if seen else int(columns) if columns.isdecimal() else PIPE_WIDTH
    width = None if width == 0 else width
    return Console(stderr=stderr, highlight=False, emoji=False, width=width, soft_wrap=not seen)


def escape(text: str) -> str:
    """Return text of others as a part of one line of markup, in which it stands for itself."""
    from rich import markup

    return markup.escape(printable.printable(text))


def somebody_is_there() -> bool:
    """Return whether a question would reach a person."""
    return sys.stdin.isatty()


def problem(message: str) -> None:
    """One line on standard error (further lines hold advice)."""
    head, _, rest = message.partition("\n")
    printer = console(stderr=True)
    printer.print(f"[bold red]koinon:[/] {escape(head)}", soft_wrap=True)
    if rest:
        printer.print(rest, style="dim", soft_wrap=True, markup=False)


def note(message: str) -> None:
    """A remark on standard error, out of the way of what is piped."""
    console(stderr=True).print(message, style="dim", soft_wrap=True, markup=False)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Print a result within this: if that fails, the error names ``what`` could not be printed, as
    the subject of a sentence, and what was done before: "the record was deleted, but its result".
    """
    try:
        yield
        printable.flush()
    except OutputError as error:
        error.what = error.what or what
        raise


def tell_unprinted(error: OutputError) -> int:
    """Say that the output failed, unless its reader has just ended; return the exit code."""
    printable.let_go()
    if error.reader_is_gone:
        return BROKEN_PIPE
    problem(f"{error.what or 'the output'} could not be printed: {error.reason}")
    return NOT_PRINTED


def table(*columns: str, title: str | None = None) -> RichTable:
    """An aligned table without lines; a column whose name starts with '>' is right-aligned."""
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
    """Print a table, without the blanks that fill its last column. Where it
    is too wide, columns are left out as far as needed, in the order of ``expendable``.
    """
    printer = console()
    made = fitted(printer, made, expendable)
    with printer.capture() as capture:
        printer.print(made)
    shown = "".join(line.rstrip() + "\n" for line in capture.get().splitlines())
    printer.file.write(shown)
    printer.file.flush()


def fitted(printer: Console, made: RichTable, expendable: Sequence[str]) -> RichTable:
    """Return the table, without columns that do not fit, in the order of ``expendable``."""
    for name in expendable:
        if _width(printer, made) <= printer.width:
            break
        made = _without(made, name)
    return made


def _width(printer: Console, made: RichTable) -> int:
    """The width at which nothing is folded; the padding behind the last column does not count."""
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
    """Bytes in JSON: the text they are as UTF-8, else ``{"base64": …}``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def print_json(answer: Any) -> None:
    """One JSON value on one line, at once: who reads it through a pipe may be waiting for it."""
    write_line(json_text(answer), flush=True)


def json_text(answer: Any) -> str:
    """Return one JSON value on one line of ASCII: the same bytes whatever the output's encoding,
    and nothing that a terminal obeys.
    """
    return json.dumps(answer, separators=(",", ":")).replace("\x7f", "\\u007f")


def print_failure(answer: Mapping[str, Any]) -> None:
    """Tell programs why the command failed, as JSON. Output that fails, too, hides no failure: the
    message is on standard error, and the exit code is the command's own.
    """
    with suppress(OutputError):
        print_json(answer)


def write_line(line: str, *, flush: bool = False) -> None:
    """Write a line to standard output, which may buffer it for a while."""
    sys.stdout.write(line + "\n")
    if flush:
        sys.stdout.flush()
