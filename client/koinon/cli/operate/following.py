"""Following moves: a live view on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from koinon.cli.console import output
from koinon.cli.console.session import DONE, INTERRUPTED, NOT_FOUND, Session
from koinon.operate.moves import Plan
from koinon.operate.progress import MovesTracker, Replicas, Share, Snapshot
from koinon.operate.replicas import PartitionSize
from koinon_proto.contract.errors import KoinonError, UnavailableError
from koinon_proto.contract.table import Table
from koinon_proto.process.printable import goes_to_terminal

if TYPE_CHECKING:
    from koinon.operate.admin import Admin

POLL_S = 0.4
LINE_S = 2.0
SILENT_S_MAX = 60.0
BAR_WIDTH = 28
WAITS_MAX = 3

Draw = Callable[[Snapshot | None], None]


def follow(
    session: Session,
    admin: Admin,
    *,
    plan: Plan | None = None,
    sizes: Mapping[int, PartitionSize] | None = None,
) -> int:
    """Show how the moves (of a plan, or all) go on until they are over; return the exit code.

    Coordinators that fail over meanwhile are waited for. Ctrl-C ends the following, not the moves.
    """
    tracker = MovesTracker(plan=plan, sizes=sizes or {})
    began = time.monotonic()
    try:
        with _view(session, admin.status().table) as draw:
            snapshot = _until_ended(admin, tracker, draw)
    except KeyboardInterrupt:
        output.note(
            "\nthe moves go on without you: 'koinon admin moves --watch' follows them again, "
            "'koinon admin pause' halts them, 'koinon admin cancel' turns them back"
        )
        return INTERRUPTED
    if not session.json:
        output.console().print(summary(snapshot, time.monotonic() - began), markup=False)
    return NOT_FOUND if snapshot.turned_back else DONE


def _until_ended(admin: Admin, tracker: MovesTracker, draw: Draw) -> Snapshot:
    def replicas() -> Replicas:
        status = admin.status()
        if not status.is_leader or status.table is None:  # others may not have heard yet
            raise UnavailableError(reason="no coordinator leads")
        return {int(row.partition_id): row.replicas for row in status.table.rows}

    heard = time.monotonic()
    while True:
        try:
            snapshot = tracker.update(admin.moves(), time.monotonic(), replicas)
        except KoinonError as error:
            if not (error.retriable or error.maybe_applied):
                raise
            if time.monotonic() - heard > SILENT_S_MAX:
                raise
            draw(None)
        else:
            heard = time.monotonic()
            draw(snapshot)
            if snapshot.ended:
                return snapshot
        time.sleep(POLL_S)


def summary(snapshot: Snapshot, seconds: float) -> str:
    """What the moves came to, in a sentence."""
    whole = snapshot.whole
    text = f"{snapshot.done:,} of {output.count(snapshot.moves, 'move')} done"
    if whole.bytes:
        rate = whole.bytes / max(seconds, 0.001)
        text += f", {output.bytes_text(whole.bytes)} copied at {output.bytes_text(rate)}/s"
    text += f", in {output.duration_text(seconds)}"
    if snapshot.turned_back:
        text += f"; {snapshot.turned_back:,} turned back or dropped"
    return text + "."


# --- how it looks --------------------------------------------------------------------------------


@contextmanager
def _view(session: Session, table: Table | None) -> Iterator[Draw]:
    if session.json:
        yield lambda _snapshot: None
    elif goes_to_terminal(stderr=True):
        with Live(console=output.console(stderr=True), transient=True, auto_refresh=False) as live:
            last: list[Any] = [Text("…")]

            def draw(snapshot: Snapshot | None) -> None:
                if snapshot is not None:
                    last[0] = picture(snapshot, table)
                silent = Text("no coordinator answers: waiting for them", style="yellow")
                live.update(Group(last[0], silent) if snapshot is None else last[0], refresh=True)

            yield draw
    else:
        yield _line_by_line()


def _line_by_line() -> Draw:
    last = 0.0

    def draw(snapshot: Snapshot | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_S:
            last = now
            output.note("no coordinator answers: waiting" if snapshot is None else line(snapshot))

    return draw


def line(snapshot: Snapshot) -> str:
    """How far the moves are, in a line."""
    whole = snapshot.whole
    parts = [f"{snapshot.done:,} of {output.count(snapshot.moves, 'move')} done"]
    parts += [f"{snapshot.running:,} under way", f"{snapshot.queued:,} queued"]
    parts.append(
        f"{output.bytes_text(whole.bytes)} of {output.bytes_text(whole.bytes_total)} "
        f"at {output.bytes_text(snapshot.bytes_per_second)}/s"
    )
    if snapshot.seconds_left:
        parts.append(f"{output.duration_text(snapshot.seconds_left)} left")
    if snapshot.paused:
        parts.append("paused")
    return ", ".join(parts)


def picture(snapshot: Snapshot, table: Table | None) -> Any:
    """How far the moves are: a bar for each receiving node, and what is waited for."""
    rows = output.table("NODE", "", ">COPIES", ">BYTES")
    names = {n.number: n.node_id for n in table.nodes.values()} if table else {}
    for number, share in sorted(snapshot.nodes.items()):
        rows.add_row(names.get(number, f"node {number}"), *_cells(share))  # type: ignore[call-overload]
    if len(snapshot.nodes) > 1:
        rows.add_row("all", *_cells(snapshot.whole))
    lines: list[Any] = [Text(line(snapshot)), rows]
    waits = sorted(snapshot.waits_for.items(), key=lambda wait: -wait[1])[:WAITS_MAX]
    lines += [Text(f"{number:,} wait: {reason}", style="yellow") for reason, number in waits]
    lines.append(Text("Ctrl-C leaves them to go on by themselves.", style="dim"))
    return Group(*lines)


def _cells(share: Share) -> tuple[Any, str, str]:
    total, done = (share.bytes_total, share.bytes) if share.bytes_total else (1, 0)
    if not share.bytes_total and share.copies == share.copies_done:
        done = 1
    bar = ProgressBar(total=total, completed=done, width=BAR_WIDTH)
    copies = f"{share.copies_done:,}/{share.copies:,}"
    size = f"{output.bytes_text(share.bytes)} of {output.bytes_text(share.bytes_total)}"
    return bar, copies, size
