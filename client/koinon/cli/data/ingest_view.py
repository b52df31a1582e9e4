"""Shows an ingest: a bar while it goes on, a summary at its end, the result of a dry run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from koinon.cli.console import output
from koinon.cli.console.progress import now_and_then, progress
from koinon.ingest.job import Outcome
from koinon.ingest.progress import Phase, Snapshot
from koinon.ingest.survey import HeavyKey, Survey, per_node
from koinon.operate.bulk_loads import LoadState
from koinon.spark.writing.planning import RowPlan
from koinon_proto.contract.table import Table
from koinon_proto.process.printable import printable_bytes

KEY_CHARS_MAX = 60

Draw = Callable[[Snapshot], None]

STEPS = {
    Phase.STARTING: "start",
    Phase.STAGING: "stage",
    Phase.PREPARING: "prepare",
    Phase.MERGING: "merge",
}


# --- while it goes on ----------------------------------------------------------------------------


def shown(*, quiet: bool) -> contextlib.AbstractContextManager[Draw]:
    """Yield what shows a snapshot: a bar on a terminal, a line now and then elsewhere."""
    return progress(quiet, _bar, now_and_then(_line))


@contextlib.contextmanager
def _bar() -> Iterator[Draw]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    with Progress(*columns, console=output.console(stderr=True), transient=True) as bar:
        task = bar.add_task(STEPS[Phase.STARTING], total=None, remark="")

        def draw(snapshot: Snapshot) -> None:
            share = snapshot.share
            bar.update(
                task,
                description=STEPS.get(snapshot.phase, snapshot.phase.value),
                total=None if share is None else 1.0,
                completed=share or 0.0,
                remark=remark(snapshot),
            )

        yield draw


def _line(snapshot: Snapshot) -> str:
    if snapshot.phase not in STEPS:
        return ""
    share = "" if snapshot.share is None else f"{100 * snapshot.share:3.0f} %  "
    return f"{snapshot.phase.value}: {share}{remark(snapshot)}".rstrip(": ")


def remark(snapshot: Snapshot) -> str:
    """Return the progress in a line: rows and rows/s while they are staged, then partitions."""
    parts = []
    if snapshot.phase in (Phase.STAGING, Phase.PREPARING):
        parts.append(f"{snapshot.rows:,} rows")
        parts.append(f"{snapshot.rows_per_second:,.0f} rows/s")
    elif snapshot.phase is Phase.MERGING:
        parts.append(f"{snapshot.partitions_merged:,} of {snapshot.partitions:,} partitions")
    if snapshot.seconds_left:
        parts.append(f"{output.duration_text(snapshot.seconds_left)} left")
    return "  ".join(parts)


# --- at its end ----------------------------------------------------------------------------------


def summary_json(outcome: Outcome, bad: int | None) -> dict[str, Any]:
    """The summary for programs; docs/cli.md lists the keys."""
    state = "none" if outcome.state is None else outcome.state.name.lower()
    seconds = {name: round(outcome.seconds.get(phase, 0.0), 3) for phase, name in STEPS.items()}
    return {
        "load_id": outcome.load_id,
        "state": state,
        "rows": outcome.rows,
        "bytes": outcome.bytes,
        "rows_bad": bad,
        "seconds": {**seconds, "all": round(_all_seconds(outcome), 3)},
        "rows_per_second": round(_rate(outcome)),
        "interrupted": outcome.interrupted,
        **({"error": str(outcome.error)} if outcome.error is not None else {}),
    }


def print_summary(outcome: Outcome, bad: int | None, *, kept_in: str) -> None:
    """The summary for people. ``bad`` rows (None: not counted) are in ``kept_in``."""
    printer = output.console()
    rows = output.count(outcome.rows, "row")
    if outcome.state is LoadState.DONE:
        printer.print(
            f"[bold]{rows}[/], {output.bytes_text(outcome.bytes)}: readable and durable in "
            f"{output.duration_text(_all_seconds(outcome))} "
            f"({_rate(outcome):,.0f} rows/s from the load's opening to the end of its merge)."
        )
        if kept_in and bad != 0:
            what = "bad rows, if any," if bad is None else output.count(bad, "bad row")
            printer.print(f"[yellow]{what}[/] kept in {output.escape(kept_in)}", soft_wrap=True)
    elif outcome.interrupted:
        printer.print(f"[yellow]Interrupted:[/] {_what_became(outcome)}")
    stages = [
        f"{phase.value} {output.duration_text(outcome.seconds[phase])}"
        for phase in STEPS
        if phase in outcome.seconds
    ]
    if outcome.state is not None:
        printer.print(", ".join(stages) + ".")


def _what_became(outcome: Outcome) -> str:
    if outcome.state is LoadState.MERGING:
        return (
            f"load {outcome.load_id} was committed already, and goes on merging without you: "
            "'koinon admin loads' shows it."
        )
    if outcome.state is LoadState.OPEN:
        return (
            f"load {outcome.load_id} is still open: 'koinon admin loads abort {outcome.load_id}' "
            "ends it, and nothing of it is readable."
        )
    return "the load is aborted; nothing of it is readable."


def _all_seconds(outcome: Outcome) -> float:
    return sum(outcome.seconds.get(phase, 0.0) for phase in STEPS)


def _rate(outcome: Outcome) -> float:
    """Rows a second from the load's opening to the end of its merge."""
    seconds = _all_seconds(outcome) - outcome.seconds.get(Phase.STARTING, 0.0)
    return outcome.rows / seconds if seconds else 0.0


# --- a dry run -----------------------------------------------------------------------------------


def survey_json(schema: Any, survey: Survey, table: Table) -> dict[str, Any]:
    """Return the result of a dry run for programs; docs/cli.md lists the keys."""
    skew = survey.skew
    return {
        "schema": [
            {"column": field.name, "type": field.dataType.simpleString()} for field in schema
        ],
        "rows": survey.rows_total,
        "rows_bad": survey.bad_rows,
        "rows_repeating_a_key": survey.duplicate_rows,
        "bytes": int(survey.bytes.sum()),
        "partitions": {
            "first": survey.base,
            "count": len(survey.rows),
            "mean": round(skew.mean, 3),
            "least": skew.least,
            "most": skew.most,
            "heaviest": skew.heaviest_partition,
            "most_to_mean": round(skew.most_to_mean, 4),
            "coefficient_of_variation": round(skew.variation, 4),
        },
        "rows_per_partition": survey.rows.tolist(),
        "nodes": [
            {
                "id": share.node_id,
                "partitions": share.partitions,
                "rows": share.rows,
                "primary_bytes": share.primary_bytes,
                "bytes": share.bytes,
            }
            for share in per_node(survey, table)
        ],
        "repeated_keys": _keys_json(survey.repeated),
        "heaviest_keys": _keys_json(survey.heaviest),
    }


def _keys_json(keys: Sequence[HeavyKey]) -> list[dict[str, Any]]:
    return [
        {"key": output.json_bytes(key.key), "rows": key.rows, "bytes": key.bytes} for key in keys
    ]


def print_survey(schema: Any, plan: RowPlan, survey: Survey, table: Table) -> None:
    """Print the result of a dry run for people."""
    shown = output.table("COLUMN", "TYPE", "USE")
    for at, field in enumerate(schema):
        uses = ["key"] if at in plan.key_columns else []
        uses += ["value"] if at in plan.stored else []
        uses += ["order"] if plan.order_column == at else []
        uses += ["time to live"] if plan.ttl_column == at else []
        uses += ["delete"] if plan.delete_column == at else []
        shown.add_row(
            output.escape(field.name), output.escape(field.dataType.simpleString()), ", ".join(uses)
        )
    output.show(shown)
    printer, skew = output.console(), survey.skew
    printer.print(
        f"\n[bold]{output.count(int(survey.rows.sum()), 'row')}[/] with "
        f"{output.bytes_text(float(survey.bytes.sum()))} of keys and values for "
        f"{len(survey.rows):,} partitions."
    )
    printer.print(
        f"Rows per partition: mean {skew.mean:,.1f}, least {skew.least:,}, most {skew.most:,} "
        f"in partition {skew.heaviest_partition} ({skew.most_to_mean:.2f} of the mean); "
        f"coefficient of variation {100 * skew.variation:.1f} %."
    )
    _print_nodes(survey, table)
    if survey.bad_rows:
        printer.print(
            f"[red]{output.count(survey.bad_rows, 'row')} cannot be stored[/] "
            "(no key, or a key or value over the limit): the load would fail, "
            "or keep them apart with --bad-records."
        )
    _print_keys(survey, ordered=plan.order_column >= 0)


def _print_nodes(survey: Survey, table: Table) -> None:
    nodes = output.table("NODE", ">LEADS", ">ROWS", ">BYTES", ">WITH COPIES")
    for share in per_node(survey, table):
        nodes.add_row(
            share.node_id,
            f"{share.partitions:,}",
            f"{share.rows:,}",
            output.bytes_text(share.primary_bytes),
            output.bytes_text(share.bytes),
        )
    output.show(nodes)


def _print_keys(survey: Survey, *, ordered: bool) -> None:
    printer = output.console()
    if survey.duplicate_rows:
        what = (
            "the row with the greatest value of --order-by stays"
            if ordered
            else "the load would fail; --order-by COLUMN says which row stays"
        )
        repeats = "repeats" if survey.duplicate_rows == 1 else "repeat"
        rows = output.count(survey.duplicate_rows, "row")
        printer.print(f"[yellow]{rows} {repeats} a key[/]: {what}.")
    else:
        printer.print("Every key comes once.")
    for title, keys in (("REPEATED", survey.repeated), ("HEAVIEST", survey.heaviest)):
        if keys:
            shown = output.table(f"{title} KEY", ">ROWS", ">BYTES")
            for key in keys:
                text = printable_bytes(key.key)[:KEY_CHARS_MAX]
                shown.add_row(output.escape(text), f"{key.rows:,}", output.bytes_text(key.bytes))
            output.show(shown)
