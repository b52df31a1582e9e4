"""Commands for moves: list, follow, pause, cancel, throttle; and for primaries and removed
nodes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.command import (
    DONE,
    INTERRUPTED,
    NOT_FOUND,
    RefusedError,
    Session,
    Yes,
    command,
)
from koinon.cli.console.progress_bar import BAR_WIDTH
from koinon.cli.console.reply import Block, Cell, Column, Reply, Styled, Table, show
from koinon.cli.console.units import UINT32_MAX, bytes_per_second, partition_ids
from koinon.cli.operate.following import until_ended
from koinon.operate.admin import Admin
from koinon.operate.judge.health import replicas_by_node
from koinon.operate.judge.moves_progress import MovesTracker, Share, Snapshot
from koinon.operate.judge.moves_progress import Replicas as ReplicasHeld
from koinon.operate.judge.plan_costs import (
    MoveAnswer,
    MovesAnswer,
    moves_answer,
)
from koinon.operate.plans import Plan, PlannedMove, Stage
from koinon.operate.replicas import PartitionSize, Replicas
from koinon.operate.wording import bytes_text, count, duration_text, node_name
from koinon_proto.contract.cluster_errors import UnknownNodeError
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.contract.table import MoveSettings, NodeStatus
from koinon_proto.contract.table import Table as PartitionTable

app = typer.Typer()
PANEL = "Nodes and replicas"
MOVES_SHOWN = 20
WAITS_MAX = 3
STAGES = {
    Stage.UNKNOWN: "",
    Stage.WAITING: "waiting",
    Stage.SNAPSHOT: "copying",
    Stage.CATCH_UP: "catching up",
    Stage.LIVE: "following",
}
NodeId = Annotated[str, typer.Argument(metavar="NODE")]


# --- listing -------------------------------------------------------------------------------------


def steps(move: PlannedMove) -> list[tuple[int | None, int | None]]:
    """Return a move as steps between nodes: (from, to) moves a copy, (from, None) drops a copy,
    (None, to) adds one. A move that changes only the order is a step from the old to the new
    primary.
    """
    added, dropped = list(move.added), list(move.dropped)
    if not added and not dropped:
        return [(move.origin[0], move.target[0])]
    pairs = max(len(added), len(dropped))
    olds: list[int | None] = [*dropped, *[None] * (pairs - len(dropped))]
    news: list[int | None] = [*added, *[None] * (pairs - len(added))]
    return list(zip(olds, news, strict=True))


def _state(row: MoveAnswer) -> str:
    if row.state != "running":
        return row.state.replace("_", " ")
    least = min(row.copies, key=lambda copy: copy.stage, default=None)
    return STAGES[least.stage] if least is not None else "under way"


def _copied(row: MoveAnswer) -> Cell:
    size = sum(copy.bytes for copy in row.copies)
    return bytes_text(size) if size else ""


def _move_columns(table: PartitionTable) -> list[Column]:
    def nodes(at: int) -> Any:
        def names(row: MoveAnswer) -> str:
            numbers = [step[at] for step in steps(row.move.move)]
            return " ".join("-" if n is None else node_name(table, n) for n in numbers)

        return names

    return [
        Column(">PARTITION", lambda row: str(row.partition_id)),
        Column("FROM", nodes(0)),
        Column("TO", nodes(1)),
        Column("STATE", _state),
        Column(">COPIED", _copied, narrow=2),
        Column("WAITS FOR", "waits_for"),
        Column("WHY", "reason", narrow=1),
    ]


@command(app, panel=PANEL, examples=["admin moves --watch"])
def moves(
    session: Session,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow them until they are done.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="List all, not only the first.")] = False,
) -> Reply | int:
    """List the moves of replicas that are queued or under way, and their settings."""
    with session.admin() as admin:
        code = follow(session, admin) if watch else DONE
        if watch and (not session.json or code == INTERRUPTED):
            return code
        view, table = admin.moves(), admin.status().table
    assert table is not None, "a leader has answered"
    found = moves_answer(view, table)
    shown = _moves_blocks(found, table, len(found.moves) if every else MOVES_SHOWN)
    return Reply(found, shown, code=code)


def _moves_blocks(found: MovesAnswer, table: PartitionTable, shown_max: int) -> list[Block]:
    settings = Styled(settings_text(found), "dim")
    if not found.moves:
        return ["Nothing moves.", settings]
    ordered = sorted(found.moves, key=lambda row: (not row.move.running, row.partition_id))
    blocks: list[Block] = [Table(_move_columns(table), ordered[:shown_max])]
    if len(ordered) > shown_max:
        blocks.append(Styled(f"… and {len(ordered) - shown_max:,} more (--all)", "dim"))
    words = {"turning_back": "being turned back", "running": "under way", "queued": "queued"}
    counts = Counter(words[row.state] for row in found.moves)
    parts = ", ".join(f"{number:,} {word}" for word, number in counts.items())
    return [*blocks, Styled(f"{count(len(found.moves), 'move')}: {parts}", "dim"), settings]


def settings_text(settings: MoveSettings) -> str:
    """Return the settings of moves as text."""
    rate = settings.bytes_per_second
    limit = f"{bytes_text(rate)}/s a node" if rate else "no limit of bytes"
    paused = "paused; " if settings.paused else ""
    return f"{paused}{count(settings.moves_per_node, 'move')} a node at once, {limit}"


# --- following -----------------------------------------------------------------------------------


def follow(
    session: Session,
    admin: Admin,
    *,
    plan: Plan | None = None,
    sizes: Mapping[int, PartitionSize] | None = None,
) -> int:
    """Show the progress of the plan's moves (None: of all moves) until they are done; return the
    exit code. ``sizes``: the known sizes of partitions; nodes are asked for the others.
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
        # other coordinators may not know the plan yet
        if not status.is_leader or status.table is None:
            raise UnavailableError(reason="no coordinator leads")
        return {int(row.partition_id): row.replicas for row in status.table.rows}

    snapshot = until_ended(
        session,
        look,
        lambda seen: seen.ended,
        picture=lambda seen: picture(seen, table),
        line=line,
        farewell="the moves continue: 'koinon admin moves --watch' follows them again, "
        "'koinon admin pause' halts them, 'koinon admin cancel' turns them back",
    )
    if snapshot is None:
        return INTERRUPTED
    if not session.json:
        show(summary(snapshot, time.monotonic() - began))
    return NOT_FOUND if snapshot.turned_back else DONE


def summary(snapshot: Snapshot, seconds: float) -> str:
    """Return the result of the moves in one sentence."""
    if not snapshot.moves:
        return "Nothing moves."
    whole = snapshot.whole
    text = f"{snapshot.done:,} of {count(snapshot.moves, 'move')} done"
    if whole.bytes:
        rate = whole.bytes / max(seconds, 0.001)
        text += f", {bytes_text(whole.bytes)} copied at {bytes_text(rate)}/s"
    text += f", in {duration_text(seconds)}"
    if snapshot.turned_back:
        text += f"; {snapshot.turned_back:,} turned back or dropped"
    return text + "."


def line(snapshot: Snapshot) -> str:
    """Return the progress of the moves in one line; "" if nothing moves."""
    if not snapshot.moves:
        return ""
    whole = snapshot.whole
    parts = [f"{snapshot.done:,} of {count(snapshot.moves, 'move')} done"]
    parts += [f"{snapshot.running:,} under way", f"{snapshot.queued:,} queued"]
    mark = "~" if snapshot.guessed else ""
    copied = f"{bytes_text(whole.bytes)} of {mark}{bytes_text(whole.bytes_total)}"
    if snapshot.bytes_per_second is not None:
        copied += f" at {bytes_text(snapshot.bytes_per_second)}/s"
    parts.append(copied)
    if snapshot.seconds_left:
        about = "about " if snapshot.guessed else ""
        parts.append(f"{about}{duration_text(snapshot.seconds_left)} left")
    if snapshot.paused:
        parts.append("paused")
    return ", ".join(parts)


def picture(snapshot: Snapshot, table: PartitionTable | None) -> list[Block]:
    """Return the progress of the moves: a bar for each receiving node, and the reasons for
    waiting.
    """
    rows = [
        (node_name(table, number) if table else f"node {number}", share)
        for number, share in sorted(snapshot.nodes.items())
    ]
    if len(rows) > 1:
        rows.append(("all", snapshot.whole))
    waits = sorted(snapshot.waits_for.items(), key=lambda wait: -wait[1])[:WAITS_MAX]
    return [
        line(snapshot),
        Table(PROGRESS, rows),
        *[Styled(f"{number:,} wait: {reason}", "yellow") for reason, number in waits],
    ]


def _bar(share: Share) -> Any:
    from rich.progress_bar import ProgressBar

    total, done = (share.bytes_total, share.bytes) if share.bytes_total else (1, 0)
    if not share.bytes_total and share.copies == share.copies_done:
        done = 1
    return ProgressBar(total=total, completed=done, width=BAR_WIDTH)


PROGRESS = (
    Column("NODE", lambda row: row[0]),
    Column("", lambda row: _bar(row[1])),
    Column(">COPIES", lambda row: f"{row[1].copies_done:,}/{row[1].copies:,}"),
    Column(">BYTES", lambda row: f"{bytes_text(row[1].bytes)} of {bytes_text(row[1].bytes_total)}"),
)


# --- control -------------------------------------------------------------------------------------


@command(app, panel=PANEL)
def pause(session: Session) -> Reply:
    """Pause all moves: no move begins, copies or hands over until 'resume'."""
    return _set(session, paused=True)


@command(app, panel=PANEL)
def resume(session: Session) -> Reply:
    """Resume moves."""
    return _set(session, paused=False)


@command(app, panel=PANEL, examples=["admin cancel", "admin cancel 3 16-31"])
def cancel(
    session: Session,
    partitions: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PARTITION]…", help="Such as 3 or 0-15; none: all moves."),
    ] = None,
) -> Reply:
    """Drop queued moves, and turn back those under way. Finished moves stay."""
    chosen = sorted({p for text in partitions or () for p in partition_ids(text)})
    with session.admin() as admin:
        dropped, turned_back = admin.cancel_moves(chosen)
    return Reply(
        {"dropped": dropped, "turned_back": turned_back},
        f"{count(dropped, 'queued move')} dropped; {turned_back:,} under way "
        f"{'is' if turned_back == 1 else 'are'} being turned back.",
    )


@command(app, panel=PANEL, examples=["admin throttle 50MB", "admin throttle off"])
def throttle(
    session: Session,
    rate: Annotated[str, typer.Argument(metavar="RATE", help="50MB, 1GiB, off")],
) -> Reply:
    """Limit the bytes a second that each node receives as new replicas; 'off' removes the limit."""
    return _set(session, bytes_per_second=bytes_per_second(rate))


@command(app, panel=PANEL, examples=["admin moves-per-node 8"])
def moves_per_node(
    session: Session,
    number: Annotated[int, typer.Argument(metavar="N", min=1, max=UINT32_MAX)],
) -> Reply:
    """Limit the number of simultaneous moves from or to one node."""
    return _set(session, moves_per_node=number)


def _set(session: Session, **changes: Any) -> Reply:
    with session.admin() as admin:
        settings = admin.set_moves(**changes)
    return Reply(settings, f"Moves: {settings_text(settings)}.")


# --- nodes and primaries -------------------------------------------------------------------------


@command(app, panel=PANEL)
def primaries(session: Session) -> Reply:
    """Hand partitions back to their preferred primaries, if these are in sync."""
    with session.admin() as admin:
        wanted = admin.restore_primaries()
    message = f"{count(wanted, 'partition')} go back to their preferred primary."
    return Reply(
        {"wanted": wanted}, message if wanted else "Every preferred primary leads already."
    )


@command(app, panel=PANEL, examples=["admin remove n2"])
def remove(session: Session, node: NodeId, *, yes: Yes = False) -> Reply:
    """Remove a node that holds no replicas from the cluster, for good."""
    with session.admin() as admin:
        table = admin.status().table
        known = None if table is None else table.by_id.get(node)  # type: ignore[call-overload]
        if table is None or known is None:
            raise UnknownNodeError(node_id=node)
        held = replicas_by_node(table)[known.number]
        if held:
            raise RefusedError(
                f"{node} still holds {count(held, 'replica')}: it cannot be removed",
                f"'koinon admin drain {node} --wait' moves them away first.",
                error=f"{node} still holds {held} replicas",
            )
        if not yes and not session.json and output.somebody_is_there():
            output.note(
                f"{node} at {known.address} would leave for good: its id is never used again."
            )
        session.ask(f"Remove {node}?", yes=yes)
        admin.set_node_status(node, NodeStatus.LEFT)
    return Reply(
        {"removed": node},
        f"{node} has left the cluster. Its process may be stopped, and its data deleted.",
    )
