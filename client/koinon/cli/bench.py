"""bench: how fast this cluster is from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from koinon.cli.console import output
from koinon.cli.console.command import Session, command
from koinon.cli.console.reply import Column, Reply, Table
from koinon.operate.wording import count

if TYPE_CHECKING:
    from koinon.cli.benchmark import Report

root = typer.Typer()
STEP_NAMES = {
    "put_many": "durable put, batches",
    "get_many_1000": "get, batches of 1,000",
    "get_many_1000_x4": "get, 4 such batches at once",
    "async_get_64": "get, 64 asyncio tasks",
    "async_put_64": "durable put, 64 asyncio tasks",
    "get_1_threads": "get, 1 thread",
    "get_16_threads": "get, 16 threads",
    "put_1_thread": "durable put, 1 thread",
    "scan": "scan",
}


@command(root, panel="The cluster", examples=["bench", "bench --local --seconds 1"])
def bench(
    session: Session,
    *,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long each step takes.")] = 3.0,
    local: Annotated[
        bool, typer.Option("--local", help="On a cluster made for it on this machine.")
    ] = False,
) -> Reply:
    """Measure what one client process gets out of the cluster.

    Writes keys that begin with bench: and deletes them afterwards.
    """
    if not local:
        return _measured(session, session.coordinators, seconds)
    from koinon.local import LocalCluster

    if not session.json:
        output.note("starting a temporary cluster of 3 coordinators and 3 nodes…")
    with LocalCluster() as cluster:
        return _measured(session, cluster.coordinators, seconds)


def _measured(session: Session, coordinators: str, seconds: float) -> Reply:
    from koinon.cli import benchmark

    timeout_ms = session.timeout_or(benchmark.TIMEOUT_MS)
    if session.json:
        return Reply(benchmark.measure(coordinators, seconds, timeout_ms=timeout_ms))
    with output.console(stderr=True).status("measuring…") as status:
        report = benchmark.measure(
            coordinators,
            seconds,
            lambda step: status.update(f"{STEP_NAMES.get(step, step)}…"),
            timeout_ms=timeout_ms,
        )
    about = (
        f"{report.keys:,} keys with values of {report.value_bytes} bytes "
        f"on {count(report.nodes, 'node')}; one client process"
    )
    return Reply(report, [_table(report)], notes=[about])


def _table(report: Report) -> Table:
    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.2f} ms"

    columns = (
        Column("WHAT", lambda row: STEP_NAMES.get(row[0], row[0])),
        Column(">PER SECOND", lambda row: f"{row[1].rows_per_s:,.0f}"),
        Column(">MEDIAN", lambda row: ms(row[1].p50_ms)),
        Column(">99 % WITHIN", lambda row: ms(row[1].p99_ms)),
    )
    return Table(columns, list(report.measures.items()))
