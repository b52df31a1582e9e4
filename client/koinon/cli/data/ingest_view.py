"""Shows an ingest: a progress bar, a summary at its end, the result of a dry run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from koinon.cli.console import output
from koinon.cli.console.progress_bar import line_at_intervals, progress
from koinon.cli.console.reply import Block, Column, Styled, remark
from koinon.cli.console.reply import Table as Rows
from koinon.ingest.job import Outcome
from koinon.ingest.progress import Phase, Snapshot
from koinon.ingest.survey import HeavyKey, Survey, per_node
from koinon.operate.json_form import IF_KNOWN
from koinon.operate.loads_client import LoadState
from koinon.operate.views import view
from koinon.operate.wording import bytes_text, count, duration_text
from koinon.spark.writing.planning import MALFORMED, RowPlan
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


# --- progress ------------------------------------------------------------------------------------


def shown(*, quiet: bool) -> contextlib.AbstractContextManager[Draw]:
    """Yield a function that shows a snapshot: as a bar on a terminal, as a line at intervals
    elsewhere.
    """
    return progress(quiet, _bar, line_at_intervals(_line))


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
                remark=progress_text(snapshot),
            )

        yield draw


def _line(snapshot: Snapshot) -> str:
    if snapshot.phase not in STEPS:
        return ""
    share = "" if snapshot.share is None else f"{100 * snapshot.share:3.0f} %  "
    return f"{snapshot.phase.value}: {share}{progress_text(snapshot)}".rstrip(": ")


def progress_text(snapshot: Snapshot) -> str:
    """Return the progress in a line: rows and rows/s during staging, then merged partitions."""
    parts = []
    if snapshot.phase in (Phase.STAGING, Phase.PREPARING):
        parts.append(f"{snapshot.rows:,} rows")
        parts.append(f"{snapshot.rows_per_second:,.0f} rows/s")
    elif snapshot.phase is Phase.MERGING:
        parts.append(f"{snapshot.partitions_merged:,} of {snapshot.partitions:,} partitions")
    if snapshot.seconds_left:
        parts.append(f"{duration_text(snapshot.seconds_left)} left")
    return "  ".join(parts)


# --- summary -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class IngestAnswer:
    """The result of an ingest; docs/cli.md explains the keys. ``rows_bad`` None: not counted."""

    load_id: int
    state: str
    rows: int
    bytes: int
    rows_bad: int | None
    seconds: dict[str, float]
    rows_per_second: int
    interrupted: bool
    error: str | None = field(metadata=IF_KNOWN)


def ingest_answer(outcome: Outcome, bad: int | None) -> IngestAnswer:
    seconds = {name: round(outcome.seconds.get(phase, 0.0), 3) for phase, name in STEPS.items()}
    return view(
        IngestAnswer,
        outcome,
        state="none" if outcome.state is None else outcome.state.name.lower(),
        rows_bad=bad,
        seconds={**seconds, "all": round(_all_seconds(outcome), 3)},
        rows_per_second=round(_rate(outcome)),
        error=str(outcome.error) if outcome.error is not None else None,
    )


def summary(outcome: Outcome, bad: int | None, *, kept_in: str) -> list[Block]:
    """Return the summary for people. ``bad``: the number of bad rows (None: not counted), which are
    in ``kept_in``.
    """
    blocks: list[Block] = []
    if outcome.state is LoadState.DONE:
        took = (
            f", {bytes_text(outcome.bytes)}: readable and durable in "
            f"{duration_text(_all_seconds(outcome))} "
            f"({_rate(outcome):,.0f} rows/s from the load's opening to the end of its merge)."
        )
        blocks.append([Styled(count(outcome.rows, "row"), "bold"), took])
        if kept_in and bad != 0:
            what = "bad rows, if any," if bad is None else count(bad, "bad row")
            blocks.append(remark(what, "yellow", f"kept in {kept_in}"))
    elif outcome.interrupted:
        blocks.append(remark("Interrupted:", "yellow", _what_became(outcome)))
    if outcome.state is not None:
        seconds = outcome.seconds
        stages = [f"{p.value} {duration_text(seconds[p])}" for p in STEPS if p in seconds]
        blocks.append(", ".join(stages) + ".")
    return blocks


def _what_became(outcome: Outcome) -> str:
    if outcome.state is LoadState.MERGING:
        return (
            f"load {outcome.load_id} was committed already, and its merge continues: "
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
    """Return rows a second from the load's opening to the end of its merge."""
    seconds = _all_seconds(outcome) - outcome.seconds.get(Phase.STARTING, 0.0)
    return outcome.rows / seconds if seconds else 0.0


# --- a dry run -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PartitionsAnswer:
    """Rows per partition; ``heaviest`` is the partition with the most."""

    first: int
    count: int
    mean: float
    least: int
    most: int
    heaviest: int
    most_to_mean: float
    coefficient_of_variation: float


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """The rows that a node will lead, and its bytes including copies."""

    id: str
    partitions: int
    rows: int
    primary_bytes: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class SurveyAnswer:
    """The result of a dry run; docs/cli.md explains the keys."""

    schema: list[dict[str, str]]
    rows: int
    rows_bad: int
    rows_repeating_a_key: int
    bytes: int
    partitions: PartitionsAnswer
    rows_per_partition: list[int]
    nodes: list[NodeShare]
    repeated_keys: Sequence[HeavyKey]
    heaviest_keys: Sequence[HeavyKey]


def survey_answer(schema: Any, survey: Survey, table: Table) -> SurveyAnswer:
    skew = survey.skew
    return SurveyAnswer(
        schema=[
            {"column": field.name, "type": field.dataType.simpleString()}
            for field in schema
            if field.name != MALFORMED
        ],
        rows=survey.rows_total,
        rows_bad=survey.bad_rows,
        rows_repeating_a_key=survey.duplicate_rows,
        bytes=int(survey.bytes.sum()),
        partitions=view(
            PartitionsAnswer,
            skew,
            first=survey.base,
            count=len(survey.rows),
            mean=round(skew.mean, 3),
            heaviest=skew.heaviest_partition,
            most_to_mean=round(skew.most_to_mean, 4),
            coefficient_of_variation=round(skew.variation, 4),
        ),
        rows_per_partition=survey.rows.tolist(),
        nodes=[view(NodeShare, share, id=share.node_id) for share in per_node(survey, table)],
        repeated_keys=survey.repeated,
        heaviest_keys=survey.heaviest,
    )


NODES = (
    Column("NODE", "node_id"),
    Column(">LEADS", "partitions"),
    Column(">ROWS", "rows"),
    Column(">BYTES", lambda share: bytes_text(share.primary_bytes)),
    Column(">WITH COPIES", lambda share: bytes_text(share.bytes)),
)


def survey_blocks(schema: Any, plan: RowPlan, survey: Survey, table: Table) -> list[Block]:
    """Return the result of a dry run for people."""
    skew = survey.skew
    blocks: list[Block] = [
        _columns_of(schema, plan),
        "",
        [
            Styled(count(int(survey.rows.sum()), "row"), "bold"),
            f" with {bytes_text(float(survey.bytes.sum()))} of keys and values for "
            f"{len(survey.rows):,} partitions.",
        ],
        f"Rows per partition: mean {skew.mean:,.1f}, least {skew.least:,}, most {skew.most:,} "
        f"in partition {skew.heaviest_partition} ({skew.most_to_mean:.2f} of the mean); "
        f"coefficient of variation {100 * skew.variation:.1f} %.",
        Rows(NODES, per_node(survey, table)),
    ]
    if survey.bad_rows:
        why = (
            " (no key, or a key or value over the limit): the load would fail, "
            "or keep them apart with --bad-records."
        )
        bad = Styled(f"{count(survey.bad_rows, 'row')} cannot be stored", "red")
        blocks.append([bad, why])
    return [*blocks, *key_blocks(survey, ordered=plan.order_column >= 0)]


def _columns_of(schema: Any, plan: RowPlan) -> Rows:
    """Return the columns of the files, and the use of each."""
    uses = {
        "key": plan.key_columns,
        "value": plan.stored,
        "order": [plan.order_column],
        "time to live": [plan.ttl_column],
        "delete": [plan.delete_column],
    }
    columns = (
        Column("COLUMN", lambda row: row[1].name),
        Column("TYPE", lambda row: row[1].dataType.simpleString()),
        Column("USE", lambda row: ", ".join(use for use, of in uses.items() if row[0] in of)),
    )
    return Rows(columns, [row for row in enumerate(schema) if row[0] != plan.malformed_column])


def key_blocks(survey: Survey, *, ordered: bool) -> list[Block]:
    """Return lines about keys that repeat or have many rows."""
    blocks: list[Block] = ["Every key comes once."]
    if survey.duplicate_rows:
        what = (
            "the row with the greatest value of --order-by stays"
            if ordered
            else "the load would fail; --order-by COLUMN says which row stays"
        )
        repeats = "repeats" if survey.duplicate_rows == 1 else "repeat"
        rows = count(survey.duplicate_rows, "row")
        blocks = [[Styled(f"{rows} {repeats} a key", "yellow"), f": {what}."]]
    for title, keys in (("REPEATED", survey.repeated), ("HEAVIEST", survey.heaviest)):
        columns = (
            Column(f"{title} KEY", lambda key: printable_bytes(key.key)[:KEY_CHARS_MAX]),
            Column(">ROWS", "rows"),
            Column(">BYTES", lambda key: bytes_text(key.bytes)),
        )
        if keys:
            blocks.append(Rows(columns, keys))
    return blocks
