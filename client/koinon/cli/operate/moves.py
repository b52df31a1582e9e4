"""Moves under way, and what an operator decides about nodes and primaries."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.session import INTERRUPTED, Session
from koinon.cli.console.units import UINT32_MAX, bytes_per_second, partition_ids
from koinon.cli.operate.following import follow
from koinon.cli.operate.rebalance_and_drain import NodeId, Yes, ask, steps
from koinon.operate.health import replicas_by_node
from koinon.operate.moves import CopyProgress, MovesView, MoveView, Stage
from koinon.operate.nodes import node_name
from koinon_proto.contract.cluster_errors import UnknownNodeError
from koinon_proto.contract.table import MoveSettings, NodeStatus, Table

MOVES_SHOWN = 20
CLUSTER_TIMEOUT_MS = 10_000
STAGES = {
    Stage.UNKNOWN: "",
    Stage.WAITING: "waiting",
    Stage.SNAPSHOT: "copying",
    Stage.CATCH_UP: "catching up",
    Stage.LIVE: "following",
}


# --- moves ---------------------------------------------------------------------------------------


def moves(
    session: Session,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow them until they are done.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="List all, not only the first.")] = False,
) -> int | None:
    """The moves of replicas that are queued or under way, and how they are set."""
    with session.admin() as admin:
        code = follow(session, admin) if watch else None
        if watch and (not session.json or code == INTERRUPTED):
            return code
        view, table = admin.moves(), admin.status().table
    assert table is not None, "a leader has answered"
    if session.json:
        output.print_json(_moves_json(view, table))
    else:
        _print_moves(view, table, len(view.moves) if every else MOVES_SHOWN)
    return code


def _print_moves(view: MovesView, table: Table, shown_max: int) -> None:
    printer = output.console()
    if view.moves:
        shown = output.table(">PARTITION", "FROM", "TO", "STATE", ">COPIED", "WAITS FOR", "WHY")
        ordered = sorted(view.moves, key=lambda m: (not m.running, m.move.partition_id))
        for move in ordered[:shown_max]:
            shown.add_row(*_move_cells(move, table))
        output.show(shown, expendable=("WHY", "COPIED"))
        if len(ordered) > shown_max:
            printer.print(f"[dim]… and {len(ordered) - shown_max:,} more (--all)[/]")
        counts = Counter(
            "being turned back" if m.cancelled else "under way" if m.running else "queued"
            for m in view.moves
        )
        words = ", ".join(f"{number:,} {word}" for word, number in counts.items())
        printer.print(f"[dim]{output.count(len(view.moves), 'move')}: {words}[/]")
    else:
        printer.print("Nothing moves.", markup=False)
    printer.print(f"[dim]{settings_text(view.settings)}[/]")


def _move_cells(move: MoveView, table: Table) -> list[str]:
    pairs = steps(move.move)
    olds = " ".join("-" if old is None else node_name(table, old) for old, _ in pairs)
    news = " ".join("-" if new is None else node_name(table, new) for _, new in pairs)
    state = "turning back" if move.cancelled else "queued"
    if move.running and not move.cancelled:
        least = min(move.progress, key=lambda p: p.stage, default=None)
        state = STAGES[least.stage] if least is not None else "under way"
    copied = sum(p.bytes for p in move.progress)
    size = output.bytes_text(copied) if copied else ""
    text = [olds, news, state, size, output.escape(move.waits_for), output.escape(move.move.reason)]
    return [str(move.move.partition_id), *text]


def settings_text(settings: MoveSettings) -> str:
    """Return the settings of moves in words."""
    rate = settings.bytes_per_second
    limit = f"{output.bytes_text(rate)}/s a node" if rate else "no limit of bytes"
    paused = "paused; " if settings.paused else ""
    return f"{paused}{output.count(settings.moves_per_node, 'move')} a node at once, {limit}"


def _moves_json(view: MovesView, table: Table) -> dict[str, Any]:
    return {
        **_settings_json(view.settings),
        "moves": [
            {
                "partition_id": m.move.partition_id,
                "from": [node_name(table, number) for number in m.move.origin],
                "to": [node_name(table, number) for number in m.move.target],
                "reason": m.move.reason,
                "plan_id": m.plan_id,
                "state": _state(m),
                "waits_for": m.waits_for or None,
                "copies": [_copy_json(copy, table) for copy in m.progress],
            }
            for m in view.moves
        ],
    }


def _state(move: MoveView) -> str:
    return "turning_back" if move.cancelled else "running" if move.running else "queued"


def _copy_json(copy: CopyProgress, table: Table) -> dict[str, Any]:
    return {
        "node": node_name(table, copy.node_number),
        "stage": copy.stage.name.lower(),
        "records": copy.records,
        "bytes": copy.bytes,
        "records_total": copy.records_total or None,
        "bytes_total": copy.bytes_total or None,
    }


def _settings_json(settings: MoveSettings) -> dict[str, Any]:
    return {
        "paused": settings.paused,
        "bytes_per_second": settings.bytes_per_second,
        "moves_per_node": settings.moves_per_node,
    }


def pause(session: Session) -> None:
    """Halt all moves: nothing is begun, copied or handed over until 'resume'."""
    _set(session, paused=True)


def resume(session: Session) -> None:
    """Let moves go on."""
    _set(session, paused=False)


def throttle(
    session: Session,
    rate: Annotated[str, typer.Argument(metavar="RATE", help="50MB, 1GiB, off")],
) -> None:
    """Bound the bytes a second that each node receives as new replicas; 'off' lifts the bound."""
    _set(session, bytes_per_second=bytes_per_second(rate))


def moves_per_node(
    session: Session,
    number: Annotated[int, typer.Argument(metavar="N", min=1, max=UINT32_MAX)],
) -> None:
    """Bound the moves at once that a node gives to or takes from."""
    _set(session, moves_per_node=number)


def _set(session: Session, **changes: Any) -> None:
    with session.admin() as admin:
        settings = admin.set_moves(**changes)
    session.say(f"Moves: {settings_text(settings)}.", _settings_json(settings))


def cancel(
    session: Session,
    partitions: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PARTITION]…", help="Such as 3 or 0-15; none: all moves."),
    ] = None,
) -> None:
    """Drop queued moves, and turn back those under way. What has moved already stays."""
    chosen = sorted({p for text in partitions or () for p in partition_ids(text)})
    with session.admin() as admin:
        dropped, turned_back = admin.cancel_moves(chosen)
    session.say(
        f"{output.count(dropped, 'queued move')} dropped, {turned_back:,} under way turned back.",
        {"dropped": dropped, "turned_back": turned_back},
    )


# --- nodes and primaries -------------------------------------------------------------------------


def primaries(session: Session) -> None:
    """Give partitions back to their preferred primaries, where those are in sync."""
    with session.admin() as admin:
        wanted = admin.restore_primaries()
    message = f"{output.count(wanted, 'partition')} go back to their preferred primary."
    session.say(message if wanted else "Every preferred primary leads already.", {"wanted": wanted})


def remove(session: Session, node: NodeId, *, yes: Yes = False) -> int | None:
    """Take a node that holds nothing any more out of the cluster, for good."""
    with session.admin() as admin:
        status = admin.status()
        table = status.table
        known = None if table is None else table.by_id.get(node)  # type: ignore[call-overload]
        if table is None or known is None:
            raise UnknownNodeError(node_id=node)
        held = replicas_by_node(table)[known.number]
        if held:
            return session.refuse(
                f"{node} still holds {output.count(held, 'replica')}: it cannot be removed",
                f"'koinon admin drain {node} --wait' moves them away first.",
                error=f"{node} still holds {held} replicas",
            )
        if not yes:
            if not session.json and output.somebody_is_there():
                output.note(f"{node} at {known.address} leaves for good: its id is not used again.")
            if (refused := ask(session, f"Remove {node}?")) is not None:
                return refused
        admin.set_node_status(node, NodeStatus.LEFT)
    session.say(
        f"{node} has left the cluster. Its process may be stopped, and its data deleted.",
        {"removed": node},
    )
    return None
