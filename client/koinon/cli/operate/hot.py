"""admin hot: the partitions and keys that clients use most, and how uneven that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn

from koinon.cli.console import output
from koinon.cli.console.progress import BAR_WIDTH, now_and_then, progress
from koinon.cli.console.session import Session
from koinon.cli.operate.remedies import advice, key_text
from koinon.cli.operate.verify import ready_table
from koinon.operate.hotspots import (
    READ_BYTES,
    READS,
    WRITES,
    WRITTEN_BYTES,
    Blamed,
    Columns,
    HotPartition,
    RankBy,
    SampledRows,
    Skew,
    blame,
    hottest,
    skew_of,
)
from koinon.operate.nodes import node_name
from koinon.operate.traffic import (
    NODE_KEYS_MAX,
    NODE_PARTITIONS_MAX,
    Survey,
    TrafficClient,
    running,
)
from koinon_proto.contract.table import Table

SECONDS_MAX = 60.0
PARTITION_COLUMNS_EXPENDABLE = ("BYTES/S", "PRIMARY")


class By(StrEnum):
    """The measure by which partitions are hot."""

    READS = "reads"
    WRITES = "writes"
    BYTES = "bytes"
    ALL = "all"


def hot(
    session: Session,
    *,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=SECONDS_MAX, help="For how long to look.")
    ] = 5.0,
    partitions: Annotated[
        int, typer.Option(min=1, max=NODE_PARTITIONS_MAX, help="How many partitions to show.")
    ] = 10,
    keys: Annotated[
        int, typer.Option(min=0, max=NODE_KEYS_MAX, help="How many keys of each; 0: sample none.")
    ] = 3,
    by: Annotated[
        By, typer.Option(help="What makes a partition hot; 'all' are rows read and written.")
    ] = By.ALL,
) -> None:
    """The partitions and keys that clients use most, and how uneven that is.

    Looks for some seconds: nodes count all rows of each partition, and sample keys meanwhile.
    """
    rank = RankBy[by.name]
    with session.admin() as admin:
        table = ready_table(admin)
    with TrafficClient() as traffic, _watching(session, table, seconds) as on_tick:
        survey = traffic.survey(
            table, seconds, by=rank, partitions_max=partitions, keys_max=keys, on_tick=on_tick
        )
    found = hottest(
        survey.rates, rank, partitions, sample=survey.sample if keys else None, keys_max=keys
    )
    skew = skew_of(survey.rates.heat(rank))
    blamed = blame(found, survey.rates.rows)
    if session.json:
        output.print_json(hot_json(survey, found, skew, blamed, table, by))
    else:
        _print(survey, found, skew, blamed, table, by)


def _watching(
    session: Session, table: Table, seconds: float
) -> AbstractContextManager[Callable[[float], None]]:
    """Show on standard error that something goes on."""
    text = f"counting on {output.count(len(running(table)), 'node')} for {seconds:g} s"

    @contextmanager
    def bar() -> Iterator[Callable[[float], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=BAR_WIDTH))
        console = output.console(stderr=True)
        with Progress(*columns, console=console, transient=True) as shown:
            task = shown.add_task(text, total=seconds)
            yield lambda elapsed_s: shown.update(task, completed=elapsed_s)

    return progress(session.json, bar, now_and_then(lambda _: f"{text}…", at_once=True))


# --- how it looks --------------------------------------------------------------------------------


def _print(
    survey: Survey,
    found: Sequence[HotPartition],
    skew: Skew,
    blamed: Sequence[Blamed],
    table: Table,
    by: By,
) -> None:
    printer = output.console()
    say_silent(survey.silent, table)
    total = survey.rates.total
    printer.print(
        f"{total[READS]:,.0f} reads/s, {total[WRITES]:,.0f} writes/s, "
        f"{output.bytes_text(_bytes(total))}/s in "
        f"{output.count(len(table.used_rows), 'partition')} of "
        f"{output.count(len(survey.rates.nodes), 'node')}, over {survey.seconds:.1f} s",
        markup=False,
    )
    if not found:
        what = "rows" if by in (By.ALL, By.BYTES) else by.value
        printer.print(f"No {what} were seen: nothing is hot.", markup=False)
        return
    of = "" if by is By.ALL else f" of {by.value}"
    printer.print(
        f"Skew{of}: the hottest partition has {skew.max_over_mean:.1f} times the mean; "
        f"coefficient of variation {skew.coefficient_of_variation:.2f}{_by_chance(survey, by)}",
        markup=False,
    )
    printer.print()
    output.show(partitions_table(found, table), expendable=PARTITION_COLUMNS_EXPENDABLE)
    _print_keys(found, survey)
    lines = advice(blamed, survey, table)
    if lines:
        printer.print()
    for line in lines:
        printer.print(f"[yellow]Note:[/] {output.escape(line)}")


def _by_chance(survey: Survey, by: By) -> str:
    chance = survey.rates.by_chance()
    return f" (by chance alone {chance:.2f})" if by is By.ALL and chance >= 0.1 else ""


def say_silent(silent: Mapping[int, str], table: Table) -> None:
    """Name the nodes that have not answered: what they serve is missing."""
    for number, reason in sorted(silent.items()):
        output.problem(f"{node_name(table, number)} does not count: {reason}")


def partitions_table(found: Sequence[HotPartition], table: Table) -> Any:
    """The partitions, the hottest first."""
    columns = [
        ">PARTITION",
        "PRIMARY",
        ">READS/S",
        ">WRITES/S",
        ">BYTES/S",
        ">SHARE",
        ">TIMES MEAN",
    ]
    shown = output.table(*columns)
    for one in found:
        shown.add_row(
            str(one.partition_id),
            output.escape(primary_of(table, one.partition_id)),
            rate_text(one.per_second[READS]),
            rate_text(one.per_second[WRITES]),
            output.bytes_text(_bytes(one.per_second)),
            f"{one.share:.1%}",
            f"{one.times_mean:.1f}",
        )
    return shown


def _print_keys(found: Sequence[HotPartition], survey: Survey) -> None:
    if not any(one.keys for one in found):
        return
    printer = output.console()
    shown = output.table(">PARTITION", "KEY", ">READS/S", ">WRITES/S", ">SHARE OF PARTITION")
    for one in found:
        for key in one.keys:
            shown.add_row(
                str(one.partition_id),
                output.escape(key_text(key.key)),
                rate_text(key.reads_per_second),
                rate_text(key.writes_per_second),
                f"{key.share:.0%}",
            )
    printer.print()
    output.show(shown, expendable=("WRITES/S",))
    printer.print(f"[dim]{output.escape(_founded_on(survey))}[/]")


def _founded_on(survey: Survey) -> str:
    looked = [
        f"{rows.taken:,} of {rows.rows:,} rows {what} ({rows.taken / rows.rows:.0%})"
        for what, rows in (("read", survey.sample.read), ("written", survey.sample.written))
        if rows.rows
    ]
    missed = max(survey.sample.read.missed_max, survey.sample.written.missed_max)
    short = f"; a key may have had {missed:,} rows more" if missed else ""
    return f"Keys are estimated from {' and '.join(looked)}; scans are not sampled{short}."


def rate_text(rate: float) -> str:
    """A rate for people: small ones with a digit behind the point."""
    return f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"


def primary_of(table: Table, partition_id: int) -> str:
    number = table.rows[partition_id].primary
    return node_name(table, number) if number else "-"


def _bytes(columns: Columns) -> float:
    return float(columns[READ_BYTES] + columns[WRITTEN_BYTES])


# --- for programs --------------------------------------------------------------------------------


def hot_json(
    survey: Survey,
    found: Sequence[HotPartition],
    skew: Skew,
    blamed: Sequence[Blamed],
    table: Table,
    by: By,
) -> dict[str, Any]:
    """The stable form of ``admin hot --json``."""
    return {
        "seconds": round(survey.seconds, 3),
        "by": by.value,
        "rows": survey.rates.rows,
        "total": rates_json(survey.rates.total),
        "skew": {
            "max_over_mean": round(skew.max_over_mean, 3),
            "coefficient_of_variation": round(skew.coefficient_of_variation, 3),
            "by_chance": round(survey.rates.by_chance(), 3),
        },
        "nodes": [
            {"id": node_name(table, number), **rates_json(columns)}
            for number, columns in sorted(survey.rates.nodes.items())
        ],
        "silent": {node_name(table, n): reason for n, reason in sorted(survey.silent.items())},
        "partitions": [partition_json(one, table) for one in found],
        "sampled": {
            "reads": _sampled_json(survey.sample.read),
            "writes": _sampled_json(survey.sample.written),
        },
        "advice": advice(blamed, survey, table),
    }


def partition_json(one: HotPartition, table: Table) -> dict[str, Any]:
    """One hot partition; a share is a part of 1."""
    primary = table.rows[one.partition_id].primary
    return {
        "partition_id": one.partition_id,
        "primary": node_name(table, primary) if primary else None,
        **rates_json(one.per_second),
        "share": round(one.share, 4),
        "times_mean": round(one.times_mean, 2),
        "keys": [
            {
                "key": output.json_bytes(key.key),
                "reads_per_second": round(key.reads_per_second, 1),
                "writes_per_second": round(key.writes_per_second, 1),
                "share_of_partition": round(key.share, 4),
            }
            for key in one.keys
        ],
    }


def rates_json(columns: Columns) -> dict[str, float]:
    """Rates by measure."""
    return {
        "reads_per_second": round(float(columns[READS]), 1),
        "writes_per_second": round(float(columns[WRITES]), 1),
        "read_bytes_per_second": round(float(columns[READ_BYTES])),
        "written_bytes_per_second": round(float(columns[WRITTEN_BYTES])),
    }


def _sampled_json(rows: SampledRows) -> dict[str, int]:
    return {"rows": rows.rows, "taken": rows.taken, "missed_max": rows.missed_max}
