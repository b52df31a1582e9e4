"""admin loads: lists bulk loads, running and ended, and aborts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from koinon.cli.console import output
from koinon.cli.console.command import (
    INTERRUPTED,
    NOT_FOUND,
    RefusedError,
    Session,
    Yes,
    command,
    default_command,
)
from koinon.cli.console.help import Group
from koinon.cli.console.reply import Block, Cell, Column, Reply, Styled, Table, show
from koinon.cli.console.units import UINT64_MAX
from koinon.cli.operate.following import until_ended
from koinon.operate.loads_client import LoadState, LoadView
from koinon.operate.wording import bytes_text, count, duration_text
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.process.printable import printable_bytes

app = typer.Typer(cls=Group)
ENDED_SHOWN = 10
STYLES = {
    LoadState.OPEN: "yellow",
    LoadState.MERGING: "cyan",
    LoadState.DONE: "green",
    LoadState.ABORTED: "red",
}


@dataclass(frozen=True, kw_only=True)
class LoadsAnswer:
    """The known bulk loads."""

    loads: Sequence[LoadView]


def _merged(load: LoadView) -> Cell:
    return f"{load.partitions_merged:,} of {load.partitions:,}" if load.partitions else ""


def _keyspace(load: LoadView) -> Cell:
    return None if load.keyspace == DEFAULT else load.keyspace


def what(load: LoadView) -> str:
    """Return a load's description, or without one, its job id."""
    batch = load.stream_batch
    of_stream = f" (batch {batch.batch_id:,} of {batch.query_id})" if batch is not None else ""
    return (load.description or load.job_id) + of_stream


LOADS = (
    Column(">LOAD", lambda load: str(load.load_id)),
    Column("STATE", lambda load: Styled(load.state.name.lower(), STYLES.get(load.state, ""))),
    Column("MODE", lambda load: load.mode and load.mode.name.lower(), narrow=2),
    Column("PREFIX", lambda load: printable_bytes(load.prefix), narrow=1),
    Column(">ROWS", "rows"),
    Column(">BYTES", lambda load: bytes_text(load.bytes), narrow=3),
    Column(">MERGED", _merged),
    Column(
        ">IDLE",
        lambda load: None if load.idle_ms is None else duration_text(load.idle_ms / 1000),
        narrow=5,
    ),
    Column("WHAT", what),
    Column("KEYSPACE", _keyspace, if_any=True),
    Column("WHY", "reason", narrow=4, if_any=True),
)


@default_command(app)
def loads(
    session: Session,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow those under way until none is.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="List all that ended, not only the last.")
    ] = False,
) -> Reply | int:
    """List the bulk loads that are open or being merged, and the last that ended."""
    with session.admin() as admin:
        if watch:
            seen = until_ended(
                session,
                lambda: [load for load in admin.loads() if not load.state.ended],
                lambda active: not active,
                picture=lambda active: [Table(LOADS, active)],
                line=line,
                farewell="the loads continue",
            )
            if seen is None:
                return INTERRUPTED
        found = admin.loads()
    return Reply(LoadsAnswer(loads=found), _blocks(found, len(found) if every else ENDED_SHOWN))


@command(app, examples=["admin loads abort 4711"])
def abort(
    session: Session,
    load_id: Annotated[int, typer.Argument(metavar="ID", min=1, max=UINT64_MAX)],
    *,
    reason: Annotated[
        str, typer.Option(help="Told to the job, and kept with the load.")
    ] = "an operator aborted it",
    yes: Yes = False,
) -> Reply:
    """Abort an open load: none of its rows becomes readable, and its staged rows are deleted."""
    with session.admin() as admin:
        load = next((load for load in admin.loads() if load.load_id == load_id), None)
        if load is None:
            raise RefusedError(
                f"there is no load {load_id}, or it ended long ago",
                "'koinon admin loads --all' lists all known loads.",
                code=NOT_FOUND,
            )
        if load.state is LoadState.OPEN and not yes:
            if not session.json and output.somebody_is_there():
                with output.telling("nothing was changed: the load"):
                    show(Table(LOADS, [load]))
            session.ask(f"Abort load {load_id}?", yes=yes)
        admin.abort_load(load_id, reason=reason)
    return Reply({"aborted": load_id}, f"Load {load_id} is aborted.")


def _blocks(loads: Sequence[LoadView], ended_max: int) -> list[Block]:
    if not loads:
        return ["No bulk load is known."]
    ended = [load for load in loads if load.state.ended]
    shown = ended[max(0, len(ended) - ended_max) :]
    blocks: list[Block] = [
        Table(LOADS, [*shown, *(load for load in loads if not load.state.ended)])
    ]
    if left_out := len(ended) - len(shown):
        blocks.append(Styled(f"… and {left_out:,} more that ended before (--all)", "dim"))
    counts = Counter(load.state.name.lower() for load in loads)
    words = ", ".join(f"{number:,} {word}" for word, number in counts.items())
    return [*blocks, Styled(f"{count(len(loads), 'load')}: {words}", "dim")]


def line(loads: Sequence[LoadView]) -> str:
    """Return the progress of loads in one line."""
    parts = []
    for load in loads:
        rows = count(load.rows, "row")
        so_far = f"{rows} staged"
        if load.state is LoadState.MERGING:
            so_far = f"{load.partitions_merged:,} of {load.partitions:,} partitions merged, {rows}"
        parts.append(f"load {load.load_id}: {so_far}")
    return "; ".join(parts)
