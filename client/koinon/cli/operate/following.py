"""Following what goes on in the cluster until it ends, and moves in particular."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from koinon.cli.console import output
from koinon.cli.console.progress import BAR_WIDTH, now_and_then, progress
from koinon.cli.console.session import DONE, INTERRUPTED, NOT_FOUND, Session
from koinon.operate.moves import Plan
from koinon.operate.nodes import node_name
from koinon.operate.progress import MovesTracker, Share, Snapshot
from koinon.operate.progress import Replicas as ReplicasHeld
from koinon.operate.replicas import PartitionSize, Replicas
from koinon_proto.contract.errors import KoinonError, UnavailableError
from koinon_proto.contract.table import Table

if TYPE_CHECKING:
    from koinon.operate.admin import Admin

POLL_S = 0.4
SILENT_S_MAX = 60.0
WAITS_MAX = 3
NOBODY_ANSWERS = "no coordinator answers: waiting"

T = TypeVar("T")


def until_ended(
    session: Session,
    look: Callable[[], T],
    ended: Callable[[T], bool],
    *,
    picture: Callable[[T], Any],
    line: Callable[[T], str],
    farewell: str,
) -> T | None:
    """Look again and again, and show what is seen, until it has ended; return the last. Ctrl-C ends
    the following, with a farewell, and returns None. Coordinators that fail over are waited for.
    """

    def said(seen: T | None) -> str:
        return NOBODY_ANSWERS if seen is None else line(seen)

    try:
        plain = now_and_then(said, at_once=True)
        with progress(session.json, lambda: _live(picture), plain) as draw:
            return _looked(look, ended, draw)
    except KeyboardInterrupt:
        output.note(f"\n{farewell}")
        return None


def _looked(
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
def _live(picture: Callable[[T], Any]) -> Iterator[Callable[[T | None], None]]:
    last: Any = Text("…")
    silent = Text(f"{NOBODY_ANSWERS} for them", style="yellow")
    hint = Text("Ctrl-C leaves them to go on by themselves.", style="dim")
    with Live(console=output.console(stderr=True), transient=True, auto_refresh=False) as live:

        def draw(seen: T | None) -> None:
            nonlocal last
            if seen is not None:
                last = Group(picture(seen), hint)
            live.update(Group(last, silent) if seen is None else last, refresh=True)

        yield draw


# --- moves ---------------------------------------------------------------------------------------


def follow(
    session: Session,
    admin: Admin,
    *,
    plan: Plan | None = None,
    sizes: Mapping[int, PartitionSize] | None = None,
) -> int:
    """Show how the moves (of a plan, or all) go on until they are over; return the exit code.
    ``sizes`` are those of the plan's partitions; nodes are asked for any other.
    """
    expected = dict(sizes or {})
    tracker = MovesTracker(plan=plan, sizes=expected)
    began = time.monotonic()
    table = admin.status().table

    def look() -> Snapshot:
        view = admin.moves()
        unsized = {move.move.partition_id for move in view.moves} - expected.keys()
        if unsized:
            with Replicas() as nodes:
                expected.update(nodes.sizes(admin.status(), unsized))
        return tracker.update(view, time.monotonic(), held)

    def held() -> ReplicasHeld:
        status = admin.status()
        if not status.is_leader or status.table is None:  # others may not have heard yet
            raise UnavailableError(reason="no coordinator leads")
        return {int(row.partition_id): row.replicas for row in status.table.rows}

    snapshot = until_ended(
        session,
        look,
        lambda seen: seen.ended,
        picture=lambda seen: picture(seen, table),
        line=line,
        farewell="the moves go on without you: 'koinon admin moves --watch' follows them again, "
        "'koinon admin pause' halts them, 'koinon admin cancel' turns them back",
    )
    if snapshot is None:
        return INTERRUPTED
    if not session.json:
        output.console().print(summary(snapshot, time.monotonic() - began), markup=False)
    return NOT_FOUND if snapshot.turned_back else DONE


def summary(snapshot: Snapshot, seconds: float) -> str:
    """Return the result of the moves in a sentence."""
    if not snapshot.moves:
        return "Nothing moves."
    whole = snapshot.whole
    text = f"{snapshot.done:,} of {output.count(snapshot.moves, 'move')} done"
    if whole.bytes:
        rate = whole.bytes / max(seconds, 0.001)
        text += f", {output.bytes_text(whole.bytes)} copied at {output.bytes_text(rate)}/s"
    text += f", in {output.duration_text(seconds)}"
    if snapshot.turned_back:
        text += f"; {snapshot.turned_back:,} turned back or dropped"
    return text + "."


def line(snapshot: Snapshot) -> str:
    """Return the progress of the moves in a line; "" where nothing moves."""
    if not snapshot.moves:
        return ""
    whole = snapshot.whole
    parts = [f"{snapshot.done:,} of {output.count(snapshot.moves, 'move')} done"]
    parts += [f"{snapshot.running:,} under way", f"{snapshot.queued:,} queued"]
    mark = "~" if snapshot.guessed else ""
    copied = f"{output.bytes_text(whole.bytes)} of {mark}{output.bytes_text(whole.bytes_total)}"
    if snapshot.bytes_per_second is not None:
        copied += f" at {output.bytes_text(snapshot.bytes_per_second)}/s"
    parts.append(copied)
    if snapshot.seconds_left:
        about = "about " if snapshot.guessed else ""
        parts.append(f"{about}{output.duration_text(snapshot.seconds_left)} left")
    if snapshot.paused:
        parts.append("paused")
    return ", ".join(parts)


def picture(snapshot: Snapshot, table: Table | None) -> Any:
    """Return the progress of the moves: a bar for each receiving node, and what they wait for."""
    rows = output.table("NODE", "", ">COPIES", ">BYTES")
    for number, share in sorted(snapshot.nodes.items()):
        rows.add_row(node_name(table, number) if table else f"node {number}", *_cells(share))
    if len(snapshot.nodes) > 1:
        rows.add_row("all", *_cells(snapshot.whole))
    lines: list[Any] = [Text(line(snapshot)), rows]
    waits = sorted(snapshot.waits_for.items(), key=lambda wait: -wait[1])[:WAITS_MAX]
    lines += [Text(f"{number:,} wait: {reason}", style="yellow") for reason, number in waits]
    return Group(*lines)


def _cells(share: Share) -> tuple[Any, str, str]:
    total, done = (share.bytes_total, share.bytes) if share.bytes_total else (1, 0)
    if not share.bytes_total and share.copies == share.copies_done:
        done = 1
    bar = ProgressBar(total=total, completed=done, width=BAR_WIDTH)
    copies = f"{share.copies_done:,}/{share.copies:,}"
    size = f"{output.bytes_text(share.bytes)} of {output.bytes_text(share.bytes_total)}"
    return bar, copies, size
