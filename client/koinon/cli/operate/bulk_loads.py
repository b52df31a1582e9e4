"""admin loads: bulk loads under way and the last that ended; and how to end one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from koinon.cli.console import output
from koinon.cli.console.session import INTERRUPTED, NOT_FOUND, Session, command, default_command
from koinon.cli.console.units import UINT64_MAX
from koinon.cli.operate.plans import Yes, ask, say
from koinon.operate.bulk_loads import LoadState, LoadView
from koinon_proto.contract.errors import KoinonError
from koinon_proto.process.printable import goes_to_terminal, printable_bytes

if TYPE_CHECKING:
    from koinon.operate.admin import Admin

app = typer.Typer()
ENDED_SHOWN = 10
POLL_S = 0.4
LINE_S = 2.0
SILENT_S_MAX = 60.0
COLORS = {
    LoadState.OPEN: "yellow",
    LoadState.MERGING: "cyan",
    LoadState.DONE: "green",
    LoadState.ABORTED: "red",
}
EXPENDABLE = ("PREFIX", "MODE", "BYTES", "WHY", "IDLE")
"""What a narrow terminal does without, in this order."""

Draw = Callable[[Sequence[LoadView] | None], None]


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
    load_id: Annotated[
        int, typer.Argument(metavar="ID", min=1, max=UINT64_MAX, show_default=False)
    ],
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
            problem = f"there is no load {load_id}, or it ended long ago"
            output.problem(f"{problem}\n  'koinon admin loads --all' lists those that are known.")
            if session.json:
                output.print_json({"error": problem})
            return NOT_FOUND
        if load.state is LoadState.OPEN and not yes:
            if not session.json and output.somebody_is_there():
                output.show(_table([load]))
            if (refused := ask(session, f"Abort load {load_id}?")) is not None:
                return refused
        admin.abort_load(load_id, reason=reason)
    say(session, f"Load {load_id} is aborted.", {"aborted": load_id})
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
    columns = [">LOAD", "STATE", "MODE", "PREFIX", ">ROWS", ">BYTES", ">MERGED", ">IDLE", "WHAT"]
    shown = output.table(*columns, *["WHY"] * aborted)
    for load in loads:
        shown.add_row(*_cells(load), *[output.escape(load.reason)] * aborted)
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
    """What a load brings, for people: its description, else its job."""
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
    try:
        with _view(session) as draw:
            _until_ended(admin, draw)
    except KeyboardInterrupt:
        output.note("\nthe loads go on without you")
        return INTERRUPTED
    return None


def _until_ended(admin: Admin, draw: Draw) -> None:
    """Coordinators that fail over meanwhile are waited for."""
    heard = time.monotonic()
    while True:
        try:
            active = [load for load in admin.loads() if not load.state.ended]
        except KoinonError as error:
            is_passing = error.retriable or error.maybe_applied
            if not is_passing or time.monotonic() - heard > SILENT_S_MAX:
                raise
            draw(None)
        else:
            heard = time.monotonic()
            if not active:
                return
            draw(active)
        time.sleep(POLL_S)


@contextmanager
def _view(session: Session) -> Iterator[Draw]:
    if session.json:
        yield lambda _loads: None
        return
    if not goes_to_terminal(stderr=True):
        yield _line_by_line()
        return
    silent = Text("no coordinator answers: waiting for them", style="yellow")
    hint = Text("Ctrl-C leaves them to go on by themselves.", style="dim")
    with Live(console=output.console(stderr=True), transient=True, auto_refresh=False) as live:
        live.update(Text("…"), refresh=True)

        def draw(loads: Sequence[LoadView] | None) -> None:
            live.update(silent if loads is None else Group(_table(loads), hint), refresh=True)

        yield draw


def _line_by_line() -> Draw:
    last = float("-inf")

    def draw(loads: Sequence[LoadView] | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_S:
            last = now
            output.note("no coordinator answers: waiting" if loads is None else line(loads))

    return draw


def line(loads: Sequence[LoadView]) -> str:
    """How far loads are, in a line."""
    parts = []
    for load in loads:
        rows = output.count(load.rows, "row")
        so_far = f"{rows} staged"
        if load.state is LoadState.MERGING:
            so_far = f"{load.partitions_merged:,} of {load.partitions:,} partitions merged, {rows}"
        parts.append(f"load {load.load_id}: {so_far}")
    return "; ".join(parts)
