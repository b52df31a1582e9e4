"""top: a live view of the cluster."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from koinon.cli.console import output
from koinon.cli.console.command import DONE, Session, command
from koinon.cli.console.reply import Table, rich_block
from koinon.cli.console.terminal import Console
from koinon.cli.operate import loads
from koinon.cli.operate.hot import HOTTEST
from koinon.cli.operate.status import NODE_STATES, summary_line
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.json_form import json_of
from koinon.operate.judge.answers import partition_counts
from koinon.operate.judge.dashboard import NodeView, Observer, Overview, View, top_answer, total
from koinon.operate.judge.heat import hot_partition
from koinon.operate.judge.hotspots import (
    READ_BYTES,
    READS,
    WRITES,
    WRITTEN_BYTES,
    Columns,
    FollowerLag,
)
from koinon.operate.wording import bytes_text, count, duration_text, rate_text
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.contract.table import NodeStatus
from koinon_proto.process.printable import flush, goes_to_terminal

root = typer.Typer()
CLUSTER_TIMEOUT_MS = 1_500
NODE_TIMEOUT_S = 1.0
HOT_SHOWN = 10
EVENTS_SHOWN = 5
HOT_ROWS_MIN = 3
"""The lines for the hottest partitions that remain on a small terminal."""
NODE_COLUMNS_EXPENDABLE = ("UNACKED", "REPLICAS", "BYTES/S", "HEARD", "STORE")
HOT_COLUMNS_EXPENDABLE = ("BYTES/S", "TIMES MEAN")
FULL_YELLOW, FULL_RED = 0.8, 0.95
LAG_YELLOW_S = 1.0

_NODE_COLUMNS = {
    "NODE": 4,
    "STATE": 8,
    "PRIMARIES": 9,
    "REPLICAS": 8,
    "READS/S": 8,
    "WRITES/S": 8,
    "BYTES/S": 10,
    "STORE": 7,
    "LAG": 6,
    "UNACKED": 7,
    "HEARD": 6,
}
"""The columns with their minimal widths, so that they do not shift between updates."""
_MARKS = {"NODE": "", "STATE": ""}
_PARTITION_WORDS = {
    "online": "online",
    "offline": "offline",
    "assigned": "starting",
    "under_replicated": "short of copies",
    "moving": "being moved",
}

Wait = Callable[[float], bool]
"""Waits this many seconds; returns True if the operator wants to quit."""


@command(
    root,
    panel="The cluster",
    examples=["top", "top --interval 5 --json >> top.jsonl", "top --once"],
)
def top(
    session: Session,
    *,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60.0, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Show one moment and end; its rates are of one interval.")
    ] = False,
) -> int:
    """Show a live view: nodes and their traffic, coordinators, moves, loads, the hottest
    partitions.

    Ends with q or Ctrl-C. If standard output is no terminal, it prints one view after the other;
    with --json, one object a line.
    """
    overview = Overview()
    with (
        session.admin(CLUSTER_TIMEOUT_MS) as connected,
        Observer(connected, timeout_s=NODE_TIMEOUT_S) as observer,
        contextlib.suppress(KeyboardInterrupt),
    ):
        first = observer.look()
        if first.status is None:
            raise UnavailableError(reason=first.failure)
        view = overview.update(first)
        with _shown(session, once) as (draw, wait):
            draw(view, False)
            while not wait(interval):
                draw(overview.update(observer.look()), True)
                if once:
                    break
    return DONE


@contextmanager
def _shown(session: Session, once: bool) -> Iterator[tuple[Callable[[View, bool], None], Wait]]:
    """Yield two functions: the first draws a view (with its rates, if True), the second waits for
    the next.
    """
    if session.json or once or not goes_to_terminal():

        def put(view: View, whole: bool) -> None:
            if not whole:
                return
            if session.json:
                output.print_json(
                    json_of(top_answer(view, hottest_max=HOT_SHOWN, events_max=EVENTS_SHOWN))
                )
            else:
                printer = output.console()
                printer.print(picture(view, printer))
                printer.print()
            flush()

        yield put, _sleep
        return
    printer = output.console()
    with Live(console=printer, screen=True, auto_refresh=False) as live, _keys() as wait:

        def draw(view: View, _whole: bool) -> None:
            live.update(picture(view, printer, printer.height), refresh=True)

        yield draw, wait


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextmanager
def _keys() -> Iterator[Wait]:
    """Yield a wait that ends at once when q is typed."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def wait(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
                return True
        return False

    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# --- how it looks --------------------------------------------------------------------------------


def picture(view: View, printer: Console, height: int | None = None) -> Group:
    """Return the whole view, in ``height`` lines at most (None: no limit)."""
    lines: list[Any] = [_summary(view), _totals(view)]
    if view.table is None or not view.nodes:
        return Group(*lines)
    below = [*_lines(view)]
    fixed = sum(_height(printer, line) for line in (*lines, *below)) + 2
    nodes = list(view.nodes)
    left = None if height is None else height - fixed - 1
    if left is not None and len(nodes) > (most := max(2, left - HOT_ROWS_MIN - 2)):
        nodes = sorted(nodes, key=_trouble)[: most - 1]
    left_out = len(view.nodes) - len(nodes)
    shown = output.fitted(printer, nodes_table(nodes, view), NODE_COLUMNS_EXPENDABLE)
    lines += [Text(), shown]
    if left_out:
        lines.append(Text(f"… and {count(left_out, 'more node')}", style="dim"))
    lines += [Text(), *below]
    if left is not None:
        left -= len(nodes) + bool(left_out)
    lines += _hottest_and_events(view, printer, left)
    return Group(*lines)


def _height(printer: Console, line: Text) -> int:
    return len(line.wrap(printer, printer.width))


def _trouble(node: NodeView) -> tuple[bool, float]:
    """Sort key: nodes with a problem first, then the busiest."""
    well = node.info.status is NodeStatus.ACTIVE and not node.silent
    return well, -_rows(node.rates)


def _summary(view: View) -> Text:
    summary: Text = rich_block(summary_line(view.summary))
    return summary


def _totals(view: View) -> Text:
    clock = _clock(view.unix_s)
    if view.rates is None:
        return Text(f"{clock}  counting…", style="dim")
    columns = total(view.nodes)
    return Text(
        f"{clock}  {columns[READS]:,.0f} reads/s, {columns[WRITES]:,.0f} writes/s, "
        f"{bytes_text(_bytes(columns))}/s"
    )


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def nodes_table(nodes: Sequence[NodeView], view: View) -> Any:
    """Return the table of nodes: their data, traffic and lag."""
    shown = output.table(*(_MARKS.get(name, ">") + name for name in _NODE_COLUMNS))
    for column in shown.columns:
        column.no_wrap, column.min_width = True, _NODE_COLUMNS[str(column.header)]
    for node in nodes:
        shown.add_row(*_node_cells(node, view.status))
    return shown


def _node_cells(node: NodeView, status: ClusterStatus | None) -> list[str]:
    word, style = NODE_STATES[node.info.status]
    state = f"[{style}]{word}[/]"
    if node.silent and node.info.status is not NodeStatus.FENCED:
        state = "[red]silent[/]"
    cells = [output.escape(node.info.node_id), state, f"{node.primaries:,}", f"{node.replicas:,}"]
    if node.rates is None:
        cells += ["-", "-", "-"]
    else:
        cells += [rate_text(node.rates[READS]), rate_text(node.rates[WRITES])]
        cells.append(bytes_text(_bytes(node.rates)))
    used, heard = node.used_share, node.heard_ms_ago
    color = "red" if used >= FULL_RED else "yellow" if used >= FULL_YELLOW else ""
    filled = f"{used:.0%}" if used >= 0.01 else bytes_text(node.used_bytes)
    cells.append("-" if heard is None else f"[{color}]{filled}[/]" if color else filled)
    cells += _lag_cells(node.lag)
    late = status is not None and heard is not None and heard > max(500, status.lease_ms)
    cells.append("-" if heard is None else f"[yellow]{heard:,} ms[/]" if late else f"{heard:,} ms")
    return cells


def _lag_cells(lag: FollowerLag | None) -> list[str]:
    if lag is None:
        return ["-", "-"]
    age = duration_text(lag.oldest_s) if lag.records else "0 ms"
    return [f"[yellow]{age}[/]" if lag.oldest_s >= LAG_YELLOW_S else age, f"{lag.records:,}"]


def _lines(view: View) -> Iterator[Text]:
    status = view.status
    assert status is not None
    yield _coordinators_line(view, status)
    yield _labelled("partitions", *_partitions_text(view))
    yield _labelled("moves", _moves_text(view), view.moves is not None)
    loading = loads.line(view.loads) if view.loads else "none"
    yield _labelled("loads", loading, bool(view.loads))


def _labelled(label: str, text: str, lively: bool) -> Text:
    return Text.assemble((f"{label:<13}", "dim"), (text, "" if lively else "dim"))


def _coordinators_line(view: View, status: ClusterStatus) -> Text:
    text = Text.assemble(("coordinators ", "dim"))
    for index, member in enumerate(sorted(status.coordinators, key=lambda c: c.member_id)):
        leads = not view.failure and status.leader_id == member.member_id
        silent = status.is_leader and not leads and not member.active
        text.append(", " if index else "")
        text.append(member.member_id, "bold" if leads else "")
        if view.failure or not status.leader_id:
            answers = not view.failure and member.member_id == status.member_id
            text.append(" up" if answers else " unknown", "" if answers else "yellow")
        elif silent:
            text.append(" silent", "red")
        else:
            text.append(" leads" if leads else " up" if member.voter else " learns")
    text.append(f"; term {status.term:,}; changes of leader: {view.leader_changes:,}")
    return text


def _partitions_text(view: View) -> tuple[str, bool]:
    counts = asdict(partition_counts(view.table))
    words = [f"{counts[name]:,} {word}" for name, word in _PARTITION_WORDS.items() if counts[name]]
    changes = f"changes of primary: {view.primary_changes:,}"
    return f"{', '.join(words)}; {changes}", True


def _moves_text(view: View) -> str:
    moves = view.moves
    if moves is None:
        return "none"
    text = f"{moves.done:,} of {moves.moves:,} done, {moves.running:,} under way"
    if moves.turned_back:
        text += f", {moves.turned_back:,} turned back or dropped"
    if moves.bytes_per_second:
        text += f"; {bytes_text(moves.bytes_per_second)}/s"
    if moves.paused:
        return f"{text}; paused"
    if moves.seconds_left:
        text += f", {duration_text(moves.seconds_left)} left"
    return text


def _hottest_and_events(view: View, printer: Console, left: int | None) -> list[Any]:
    """Return the hottest partitions and the last events, to fill the rest of the screen."""
    lines: list[Any] = []
    events = list(view.events)[-EVENTS_SHOWN:]
    if left is not None:
        events = events[len(events) - max(0, min(len(events), (left - HOT_ROWS_MIN - 2) // 2)) :]
        left -= len(events)
    for at, what in events:
        text = Text.assemble((f"{_clock(at):<13}", "dim"), what)
        text.truncate(printer.width, overflow="ellipsis")
        lines.append(text)
    most = HOT_SHOWN if left is None else min(left - 2, len(view.hottest))
    if view.table is None or most <= 0:
        return lines
    if not view.hottest:
        waits = "no rows go by" if view.rates is not None else "…"
        return [*lines, Text(), Text(f"hottest partitions: {waits}", style="dim")]
    found = [hot_partition(one, view.table) for one in view.hottest[:most]]
    shown = rich_block(Table(HOTTEST, found))
    return [*lines, Text(), output.fitted(printer, shown, HOT_COLUMNS_EXPENDABLE)]


def _bytes(columns: Columns) -> float:
    return float(columns[READ_BYTES] + columns[WRITTEN_BYTES])


def _rows(columns: Columns | None) -> float:
    return 0.0 if columns is None else float(columns[READS] + columns[WRITES])
