"""Shows a command's progress: a bar on a terminal, a line at intervals elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from koinon.cli.console import output
from koinon_proto.process.printable import goes_to_terminal

T = TypeVar("T")

BAR_WIDTH = 28
LINE_EVERY_S = 5.0
"""The time between two lines of progress if there is no terminal."""


@contextmanager
def progress(
    quiet: bool,
    live: Callable[[], AbstractContextManager[Callable[[T], None]]],
    plain: Callable[[T], None],
) -> Iterator[Callable[[T], None]]:
    """Yield a function that shows the state of the work: no output if ``quiet``, the drawing of
    ``live`` if standard error is a terminal, else ``plain``.
    """
    if quiet:
        yield lambda _state: None
    elif goes_to_terminal(stderr=True):
        with live() as draw:
            yield draw
    else:
        yield plain


def line_at_intervals(
    line: Callable[[T], str],
    *,
    at_once: bool = False,
    say: Callable[[str], None] = output.note,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[T], None]:
    """Return a function that prints a line about a state, at most one in ``LINE_EVERY_S``. An empty
    line, or the same line as before, is not printed.
    """
    last_at = float("-inf") if at_once else clock()
    last = ""

    def draw(state: T) -> None:
        nonlocal last_at, last
        now = clock()
        if now - last_at >= LINE_EVERY_S and (text := line(state)) not in ("", last):
            last_at, last = now, text
            say(text)

    return draw


def work_progress(
    quiet: bool, what: str, total: int | None, text: Callable[[], str]
) -> AbstractContextManager[Callable[[int], None]]:
    """Return a context with a function that takes the position of the work; it shows the done share
    of ``total`` (None: unknown) and an estimate of the remaining time.

    Args:
        what: the work, in one word.
        text: returns further text; called for each update.
    """

    def line(position: int) -> str:
        return text() if total is None else f"{100 * position / max(1, total):3.0f} %  {text()}"

    return progress(quiet, lambda: _work_bar(what, total, text), line_at_intervals(line))


@contextmanager
def _work_bar(
    what: str, total: int | None, text: Callable[[], str]
) -> Iterator[Callable[[int], None]]:
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(what),
        BarColumn(bar_width=BAR_WIDTH),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}"),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=output.console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total or None, text="")
        yield lambda position: shown.update(task, completed=position, text=text())


def rows_and_rate(rows: Callable[[], int]) -> Callable[[], str]:
    """Return a function that returns the number of rows so far and the rate since this call, as
    text.
    """
    began = time.monotonic()

    def text() -> str:
        rate = rows() / max(0.001, time.monotonic() - began)
        return f"{rows():,} rows  {rate:,.0f} rows/s"

    return text
