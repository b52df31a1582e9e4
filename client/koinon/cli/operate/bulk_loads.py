"""admin loads: bulk loads under way and the last that ended; and how to end one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.help import Group
from koinon.cli.console.session import INTERRUPTED, NOT_FOUND, Session, command, default_command
from koinon.cli.console.units import UINT64_MAX
from koinon.cli.operate.following import until_ended
from koinon.cli.operate.rebalance_and_drain import Yes, ask
from koinon.operate.bulk_loads import LoadState, LoadView
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.process.printable import printable_bytes

if TYPE_CHECKING:
    from koinon.operate.admin import Admin

app = typer.Typer(cls=Group)
ENDED_SHOWN = 10
COLORS = {
    LoadState.OPEN: "yellow",
    LoadState.MERGING: "cyan",
    LoadState.DONE: "green",
    LoadState.ABORTED: "red",
}
EXPENDABLE = ("PREFIX", "MODE", "BYTES", "WHY", "IDLE")
"""Columns that a narrow terminal leaves out, in this order."""


# --- the commands --------------------------------------------------------------------------------


def list_loads(
    session: Session,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow those under way until none is.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="List all that ended, not only the last.")
    ] = False,
) -> int | None:
    """The bulk loads that are open or being merged, and the last that ended."""
    with session.admin() as admin:
        if watch and (code := _follow(session, admin)) is not None:
            return code
        loads = admin.loads()
    if session.json:
        output.print_json({"loads": [load_json(load) for load in loads]})
    else:
        _print_loads(loads, len(loads) if every else ENDED_SHOWN)
    return None


def abort(
    session: Session,
    load_id: Annotated[int, typer.Argument(metavar="ID", min=1, max=UINT64_MAX)],
    *,
    reason: Annotated[
        str, typer.Option(help="Told to the job, and kept with the load.")
    ] = "an operator aborted it",
    yes: Yes = False,
) -> int | None:
    """End an open load: nothing of it becomes readable, and what was staged is deleted."""
    with session.admin() as admin:
        load = next((load for load in admin.loads() if load.load_id == load_id), None)
        if load is None:
            return session.refuse(
                f"there is no load {load_id}, or it ended long ago",
                "'koinon admin loads --all' lists those that are known.",
                code=NOT_FOUND,
            )
        if load.state is LoadState.OPEN and not yes:
            if not session.json and output.somebody_is_there():
                output.show(_table([load]))
            if (refused := ask(session, f"Abort load {load_id}?")) is not None:
                return refused
        admin.abort_load(load_id, reason=reason)
    session.say(f"Load {load_id} is aborted.", {"aborted": load_id})
    return None


default_command(app, list_loads)
command(app, "abort", examples=["koinon admin loads abort 4711"])(abort)


# --- how it looks --------------------------------------------------------------------------------


def _print_loads(loads: Sequence[LoadView], ended_max: int) -> None:
    printer = output.console()
    if not loads:
        printer.print("No bulk load is known.", markup=False)
        return
    ended = [load for load in loads if load.state.ended]
    shown = ended[max(0, len(ended) - ended_max) :]
    active = [load for load in loads if not load.state.ended]
    output.show(_table([*shown, *active]), expendable=EXPENDABLE)
    if len(shown) < len(ended):
        printer.print(f"[dim]… and {len(ended) - len(shown):,} more that ended before (--all)[/]")
    counts = Counter(load.state.name.lower() for load in loads)
    words = ", ".join(f"{number:,} {word}" for word, number in counts.items())
    printer.print(f"[dim]{output.count(len(loads), 'load')}: {words}[/]")


def _table(loads: Sequence[LoadView]) -> Any:
    aborted = any(load.reason for load in loads)
    apart = any(load.keyspace not in ("", DEFAULT) for load in loads)
    columns = [">LOAD", "STATE", "MODE", "PREFIX", ">ROWS", ">BYTES", ">MERGED", ">IDLE", "WHAT"]
    shown = output.table(*columns, *["KEYSPACE"] * apart, *["WHY"] * aborted)
    for load in loads:
        keyspace, why = output.escape(load.keyspace), output.escape(load.reason)
        shown.add_row(*_cells(load), *[keyspace] * apart, *[why] * aborted)
    return shown


def _cells(load: LoadView) -> list[str]:
    color = COLORS.get(load.state)
    state = load.state.name.lower()
    merged = f"{load.partitions_merged:,} of {load.partitions:,}" if load.partitions else ""
    idle = output.duration_text(load.idle_ms / 1000) if load.state is LoadState.OPEN else ""
    return [
        str(load.load_id),
        f"[{color}]{state}[/]" if color else state,
        load.mode.name.lower() if load.mode is not None else "",
        output.escape(printable_bytes(load.prefix)),
        f"{load.rows:,}",
        output.bytes_text(load.bytes),
        merged,
        idle,
        output.escape(what(load)),
    ]


def what(load: LoadView) -> str:
    """Return a load's description for people, or else its job."""
    batch = load.stream_batch
    of_stream = f" (batch {batch.batch_id:,} of {batch.query_id})" if batch is not None else ""
    return (load.description or load.job_id) + of_stream


def load_json(load: LoadView) -> dict[str, Any]:
    """The stable form of a load."""
    batch = load.stream_batch
    return {
        "load_id": load.load_id,
        "job_id": load.job_id,
        "state": load.state.name.lower(),
        "mode": load.mode.name.lower() if load.mode is not None else None,
        "prefix": output.json_bytes(load.prefix),
        "keyspace": load.keyspace or None,
        "stream_batch": None
        if batch is None
        else {"query_id": batch.query_id, "batch_id": batch.batch_id},
        "description": load.description,
        "rows": load.rows,
        "bytes": load.bytes,
        "partitions": load.partitions,
        "partitions_merged": load.partitions_merged,
        "idle_ms": load.idle_ms if load.state is LoadState.OPEN else None,
        "timeout_ms": load.timeout_ms,
        "reason": load.reason or None,
    }


# --- following -----------------------------------------------------------------------------------


def _follow(session: Session, admin: Admin) -> int | None:
    """Show the loads under way until none is; return an exit code if that was not waited for."""
    seen = until_ended(
        session,
        lambda: [load for load in admin.loads() if not load.state.ended],
        lambda active: not active,
        picture=_table,
        line=line,
        farewell="the loads go on without you",
    )
    return INTERRUPTED if seen is None else None


def line(loads: Sequence[LoadView]) -> str:
    """Return the progress of loads in a line."""
    parts = []
    for load in loads:
        rows = output.count(load.rows, "row")
        so_far = f"{rows} staged"
        if load.state is LoadState.MERGING:
            so_far = f"{load.partitions_merged:,} of {load.partitions:,} partitions merged, {rows}"
        parts.append(f"load {load.load_id}: {so_far}")
    return "; ".join(parts)
