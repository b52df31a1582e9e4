"""bench: how fast this cluster is from here."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.session import Session, command

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


def bench(
    session: Session,
    *,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long each step takes.")] = 3.0,
    local: Annotated[
        bool, typer.Option("--local", help="On a cluster made for it on this machine.")
    ] = False,
) -> None:
    """Measure what one client process gets out of the cluster.

    Writes keys that begin with bench: and deletes them afterwards.
    """
    if not local:
        _measure(session, session.coordinators, seconds)
        return
    from koinon.local import LocalCluster

    if not session.json:
        output.note("starting a temporary cluster of 3 coordinators and 3 nodes…")
    with LocalCluster() as cluster:
        _measure(session, cluster.coordinators, seconds)


def _measure(session: Session, coordinators: str, seconds: float) -> None:
    from koinon.cli import benchmark

    timeout_ms = session.timeout_or(benchmark.TIMEOUT_MS)
    if session.json:
        output.print_json(benchmark.run(coordinators, seconds, timeout_ms=timeout_ms))
        return
    with output.console(stderr=True).status("measuring…") as status:
        report = benchmark.run(
            coordinators,
            seconds,
            lambda step: status.update(f"{STEP_NAMES.get(step, step)}…"),
            timeout_ms=timeout_ms,
        )
    _print_report(report)


def _print_report(report: dict[str, Any]) -> None:
    shown = output.table("WHAT", ">PER SECOND", ">MEDIAN", ">99 % WITHIN")
    for step, measure in report["measures"].items():
        shown.add_row(
            STEP_NAMES.get(step, step),
            f"{measure['rows_per_s']:,.0f}",
            _ms(measure["p50_ms"]),
            _ms(measure["p99_ms"]),
        )
    output.show(shown)
    output.note(
        f"{report['keys']:,} keys with values of {report['value_bytes']} bytes "
        f"on {output.count(report['nodes'], 'node')}; one client process"
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} ms"


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "bench",
        panel="The cluster",
        examples=["koinon bench", "koinon bench --local --seconds 1"],
    )(bench)
