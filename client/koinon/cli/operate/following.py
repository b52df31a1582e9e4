"""Follows an activity of the cluster (moves, loads) until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from koinon.cli.console import output
from koinon.cli.console.command import Session
from koinon.cli.console.progress_bar import line_at_intervals, progress
from koinon.cli.console.reply import Block, Styled, rich_block
from koinon_proto.contract.errors import KoinonError

POLL_S = 0.4
SILENT_S_MAX = 60.0
NOBODY_ANSWERS = "no coordinator answers: waiting"

T = TypeVar("T")


def until_ended(
    session: Session,
    look: Callable[[], T],
    ended: Callable[[T], bool],
    *,
    picture: Callable[[T], Sequence[Block]],
    line: Callable[[T], str],
    farewell: str,
) -> T | None:
    """Poll by ``look`` and show the result until ``ended`` says so; return the last result. Ctrl-C
    prints the farewell and returns None. While no coordinator leads, wait.

    Args:
        picture: the result as shown on a terminal; ``line``: as shown in a log.
    """

    def said(seen: T | None) -> str:
        return NOBODY_ANSWERS if seen is None else line(seen)

    try:
        plain = line_at_intervals(said, at_once=True)
        with progress(session.json, lambda: _live(picture), plain) as draw:
            return _last_look(look, ended, draw)
    except KeyboardInterrupt:
        output.note(f"\n{farewell}")
        return None


def _last_look(
    look: Callable[[], T], ended: Callable[[T], bool], draw: Callable[[T | None], None]
) -> T:
    heard = time.monotonic()
    while True:
        try:
            seen = look()
        except KoinonError as error:
            is_passing = error.retriable or error.maybe_applied
            if not is_passing or time.monotonic() - heard > SILENT_S_MAX:
                raise
            draw(None)
        else:
            heard = time.monotonic()
            draw(seen)
            if ended(seen):
                return seen
        time.sleep(POLL_S)


@contextmanager
def _live(picture: Callable[[T], Sequence[Block]]) -> Iterator[Callable[[T | None], None]]:
    from rich.console import Group
    from rich.live import Live

    last: Any = rich_block("…")
    silent = rich_block(Styled(f"{NOBODY_ANSWERS} for them", "yellow"))
    hint = rich_block(Styled("After Ctrl-C they continue by themselves.", "dim"))
    with Live(console=output.console(stderr=True), transient=True, auto_refresh=False) as live:

        def draw(seen: T | None) -> None:
            nonlocal last
            if seen is not None:
                last = Group(*map(rich_block, picture(seen)), hint)
            live.update(Group(last, silent) if seen is None else last, refresh=True)

        yield draw
