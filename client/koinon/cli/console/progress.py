"""Shows a command's progress: a picture on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from koinon.cli.console import output
from koinon_proto.process.printable import goes_to_terminal

T = TypeVar("T")

BAR_WIDTH = 28


@contextmanager
def progress(
    quiet: bool,
    live: Callable[[], AbstractContextManager[Callable[[T], None]]],
    plain: Callable[[T], None],
) -> Iterator[Callable[[T], None]]:
    """Yield what shows how far the work is: nothing if ``quiet``, what ``live`` yields where
    standard error is a terminal, else ``plain``.
    """
    if quiet:
        yield lambda _state: None
    elif goes_to_terminal(stderr=True):
        with live() as draw:
            yield draw
    else:
        yield plain


def now_and_then(
    line: Callable[[T], str], every_s: float, *, at_once: bool = False
) -> Callable[[T], None]:
    """Return what notes the line about a state, once in ``every_s`` seconds; '' is not noted."""
    last = float("-inf") if at_once else time.monotonic()

    def draw(state: T) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= every_s and (text := line(state)):
            last = now
            output.note(text)

    return draw
