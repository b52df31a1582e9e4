"""Moves under way, and what an operator decides about nodes and primaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from koinon.admin import ClusterStatus
from koinon.cli import output
from koinon.cli.following import follow
from koinon.cli.plans import NodeId, Yes, ask, node_name, say, steps
from koinon.cli.session import NOT_FOUND, USAGE, Session
from koinon.cli.units import bytes_per_second, partition_ids
from koinon.health import replicas_by_node
from koinon.moves import CopyProgress, MovesView, MoveView, Stage
from koinon.replicas import Checksum, Replicas
from koinon_proto.errors import UnknownNodeError
from koinon_proto.table import MoveSettings, NodeStatus, PartitionRow, PartitionStatus, Table

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
        if watch and not session.json:
            return follow(session, admin)
        view, table = admin.moves(), admin.status().table
    assert table is not None, "a leader has answered"
    if session.json:
        output.print_json(_moves_json(view, table))
    else:
        _print_moves(view, table, len(view.moves) if every else MOVES_SHOWN)
    return None


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
    text = [olds, news, state, size, escape(move.waits_for), escape(move.move.reason)]
    return [str(move.move.partition_id), *text]


def settings_text(settings: MoveSettings) -> str:
    """How moves go on, in words."""
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
    rate: Annotated[
        str, typer.Argument(metavar="RATE", help="50MB, 1GiB, off", show_default=False)
    ],
) -> None:
    """Bound the bytes a second that each node receives as new replicas; 'off' lifts the bound."""
    _set(session, bytes_per_second=bytes_per_second(rate))


def moves_per_node(
    session: Session,
    number: Annotated[int, typer.Argument(metavar="N", min=1, show_default=False)],
) -> None:
    """Bound the moves at once that a node gives to or takes from."""
    _set(session, moves_per_node=number)


def _set(session: Session, **changes: Any) -> None:
    with session.admin() as admin:
        settings = admin.set_moves(**changes)
    say(session, f"Moves: {settings_text(settings)}.", _settings_json(settings))


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
    say(
        session,
        f"{output.count(dropped, 'queued move')} dropped, {turned_back:,} under way turned back.",
        {"dropped": dropped, "turned_back": turned_back},
    )


# --- nodes and primaries -------------------------------------------------------------------------


def primaries(session: Session) -> None:
    """Give partitions back to their preferred primaries, where those are in sync."""
    with session.admin() as admin:
        wanted = admin.restore_primaries()
    message = f"{output.count(wanted, 'partition')} go back to their preferred primary."
    say(
        session, message if wanted else "Every preferred primary leads already.", {"wanted": wanted}
    )


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
            output.problem(
                f"{node} still holds {output.count(held, 'replica')}: it cannot be removed\n"
                f"  'koinon admin drain {node} --wait' moves them away first."
            )
            if session.json:
                output.print_json({"error": f"{node} still holds {held} replicas"})
            return USAGE
        if not yes:
            if not session.json and output.somebody_is_there():
                output.note(f"{node} at {known.address} leaves for good: its id is not used again.")
            if (refused := ask(session, f"Remove {node}?")) is not None:
                return refused
        admin.set_node_status(node, NodeStatus.LEFT)
    say(
        session,
        f"{node} has left the cluster. Its process may be stopped, and its data deleted.",
        {"removed": node},
    )
    return None


def force_primary(
    session: Session,
    partition: Annotated[int, typer.Argument(metavar="PARTITION", min=0, show_default=False)],
    node: NodeId,
    *,
    accepted: Annotated[
        bool,
        typer.Option("--yes-i-may-lose-writes", help="Do not ask: writes may be lost for good."),
    ] = False,
    even_if_empty: Annotated[
        bool,
        typer.Option(
            "--even-if-empty", help="Though the copy is not usable, and another is or may be."
        ),
    ] = False,
) -> int | None:
    """Let a replica lead an offline partition though it may lack acknowledged writes.

    The last resort, for when no in-sync copy comes back. What the chosen copy lacks is lost for
    good, and the others are made like it: start every node that has one first, and choose one that
    is usable and complete through the most.
    """
    with session.admin(CLUSTER_TIMEOUT_MS) as admin:
        status = admin.status()
        table = status.table
        if table is None or partition >= len(table.rows):
            output.problem(f"there is no partition {partition}")
            return USAGE
        row = table.rows[partition]
        with Replicas() as replicas:
            asked = {int(number): [partition] for number in row.replicas}
            found, silent = replicas.checksums(table, asked)
        if not session.json:
            _print_copies(row, status, found, silent)
        better = _better_copies(row, table, node, found)
        if better and not even_if_empty:
            return _refuse_empty(session, node, better)
        if not accepted and (refused := _ask_for_loss(session, partition)) is not None:
            return refused
        epoch = admin.force_primary(partition, node)
    say(
        session,
        f"{node} leads partition {partition} from epoch {epoch} on. Its other replicas follow it.",
        {"partition_id": partition, "primary": node, "primary_epoch": epoch},
    )
    return None


def _better_copies(
    row: PartitionRow, table: Table, node: str, found: dict[tuple[int, int], Checksum]
) -> list[str]:
    """Return what speaks against a copy that is not usable: others that are, or may be."""
    copies = {number: found.get((number, int(row.partition_id))) for number in row.replicas}
    chosen = next((n for n in row.replicas if node_name(table, n) == node), None)
    if chosen is None or ((copy := copies.pop(chosen)) is not None and copy.usable):
        return []
    usable = [n for n, copy in copies.items() if copy is not None and copy.usable]
    unknown = [n for n, copy in copies.items() if copy is None]
    return [
        *(f"{node_name(table, n)} has a usable one" for n in usable),
        *(f"{node_name(table, n)} does not say what it has: start it first" for n in unknown),
    ]


def _refuse_empty(session: Session, node: str, better: Sequence[str]) -> int:
    reason = f"the copy on {node} is not usable, and the others would be made like it"
    output.problem(
        f"not carried out: {reason}\n  {'; '.join(better)}.\n"
        "  --even-if-empty does it all the same."
    )
    if session.json:
        output.print_json({"error": f"not carried out: {reason}", "better": list(better)})
    return USAGE


def _print_copies(
    row: PartitionRow,
    status: ClusterStatus,
    found: dict[tuple[int, int], Checksum],
    silent: dict[int, str],
) -> None:
    table = status.table
    assert table is not None
    state = row.status.name.lower()
    reason = f" ({row.offline_reason.name.lower()})" if row.offline_reason else ""
    printer = output.console()
    printer.print(f"Partition {row.partition_id} is {state}{reason}. Its replicas:", markup=False)
    shown = output.table("NODE", "IN SYNC", "COPY", ">COMPLETE THROUGH", ">RECORDS", ">BYTES")
    for number in row.replicas:
        copy = found.get((number, int(row.partition_id)))
        usual = "yes" if number in row.in_sync else "no"
        cells = ["", "", ""]
        what = f"unknown: {silent.get(number, 'the node does not say')}"
        if copy is not None:
            what = "usable" if copy.usable else "not usable"
            through = copy.complete_through
            through_text = f"epoch {through >> 40}, {through & ((1 << 40) - 1):,}"
            cells = [through_text, f"{copy.records:,}", output.bytes_text(copy.bytes)]
        shown.add_row(node_name(table, number), usual, escape(what), *cells)
    output.show(shown)
    if row.status is not PartitionStatus.OFFLINE:
        printer.print("It is served: nothing has to be forced.", markup=False)


def _ask_for_loss(session: Session, partition: int) -> int | None:
    if session.json or not output.somebody_is_there():
        output.problem(
            "not carried out: nobody is there to ask\n"
            "  --yes-i-may-lose-writes carries it out without asking."
        )
        if session.json:
            output.print_json({"error": "not carried out: --yes-i-may-lose-writes is missing"})
        return USAGE
    output.note("Acknowledged writes that the chosen copy lacks are lost for good.")
    typed = typer.prompt(f"To go on, type the partition's number ({partition})", err=True)
    if str(typed).strip() == str(partition):
        return None
    output.note("nothing was changed")
    return NOT_FOUND
