"""The answer of a command: typed data, and its form for people.

A command returns a ``Reply``. Its ``answer`` (a frozen dataclass, or a list of them) is printed as
JSON for programs, by ``json_of``. Its ``people`` are blocks (lines and tables) of plain data. Only
``write`` prints. Texts need no escaping here: none is read as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from koinon.cli.console import output
from koinon.operate.json_form import json_of
from koinon_proto.process.printable import printable


class Styled(NamedTuple):
    """Text in a style of rich's: ``red``, ``bold green``."""

    text: str
    style: str


Cell = Any
"""A text, a number, Styled, None (an empty cell), or a bar of rich's."""
Line = str | Styled | Sequence[str | Styled]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; ``>`` before the name aligns it on the right.

    Attributes:
        cell: the name of the row's attribute, or a function of the row. Numbers are grouped by
            thousands.
        narrow: a terminal that is too narrow leaves columns out, the smallest number first; 0: the
            column always stays.
        if_any: the column is left out if all its cells are empty.
    """

    name: str
    cell: str | Callable[[Any], Cell]
    narrow: int = 0
    if_any: bool = False

    def value(self, row: Any) -> Cell:
        found = attrgetter(self.cell)(row) if isinstance(self.cell, str) else self.cell(row)
        return f"{found:,}" if isinstance(found, int) else found


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns; without ``header`` a list of names and values."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    header: bool = True

    def kept(self) -> list[Column]:
        return [c for c in self.columns if not c.if_any or any(map(c.value, self.rows))]


Block = Line | Table


def facts(pairs: Mapping[str, str | None]) -> Table:
    """Return a table of names and values; pairs whose value is '' or None are left out."""
    rows = [(name, text) for name, text in pairs.items() if text]
    columns = [Column("", lambda row: Styled(row[0], "dim")), Column("", lambda row: row[1])]
    return Table(columns, rows, header=False)


def remark(head: str, style: str, text: str) -> Line:
    """Return a line whose first word has a style of its own."""
    return [Styled(head, style), f" {text}"]


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a command.

    Attributes:
        answer: the data for programs.
        people: the lines and tables for people; a single line needs no list.
        code: the exit code.
        done: the work that was done, as the beginning of a sentence that ends with "could not be
            printed"; '': the first line of ``people``.
        notes: remarks for people, on standard error.
        each: True: programs get each part of the answer on a line of its own.
    """

    answer: Any
    people: str | Sequence[Block] = ()
    code: int = 0
    done: str = ""
    notes: Sequence[str] = ()
    each: bool = False

    def write(self, *, as_json: bool) -> None:
        """Print the reply, for programs or for people."""
        blocks = [self.people] if isinstance(self.people, str) else self.people
        done = self.done or (f"{self.people} This" if isinstance(self.people, str) else "")
        with output.telling(done):
            if as_json:
                for part in self.answer if self.each else [self.answer]:
                    output.print_json(json_of(part))
            else:
                show(*blocks)
        if not as_json:
            for note in self.notes:
                output.note(note)


def show(*blocks: Block) -> None:
    """Print blocks for people."""
    for block in blocks:
        if isinstance(block, Table):
            output.show(rich_block(block), expendable=expendable(block))
        else:
            output.console().print(rich_block(block))


def expendable(table: Table) -> list[str]:
    """Return the names of the columns that a narrow terminal leaves out, in their order."""
    narrow = sorted((column for column in table.columns if column.narrow), key=lambda c: c.narrow)
    return [column.name.removeprefix(">") for column in narrow]


def rich_block(block: Block) -> Any:
    """Return the block for rich to print, with its texts shown literally, whatever markup they look
    like.
    """
    if not isinstance(block, Table):
        shown = _text(block)
        # not wrapped: a person may copy it, such as a secret
        shown.no_wrap = " " not in shown.plain
        return shown
    columns = block.kept()
    made = output.table(*(column.name for column in columns))
    made.show_header = block.header
    for row in block.rows:
        made.add_row(*(_cell(column.value(row)) for column in columns))
    return made


def _cell(cell: Any) -> Any:
    """Return a cell for rich; bars and the like are already rich's."""
    return _text(cell or "") if cell is None or isinstance(cell, str | Styled) else cell


def _text(line: Line) -> Any:
    from rich.text import Text

    shown = Text()
    for part in [line] if isinstance(line, str | Styled) else line:
        text, style = part if isinstance(part, Styled) else (part, "")
        shown.append(printable(text), style)
    return shown
