"""admin hot: the partitions and keys with the most traffic, and how uneven the traffic is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import Annotated

import typer

from koinon.cli.console import output
from koinon.cli.console.command import Session, command
from koinon.cli.console.progress_bar import BAR_WIDTH, line_at_intervals, progress
from koinon.cli.console.reply import Block, Column, Reply, Styled, Table, remark
from koinon.operate.cluster_status import table_of
from koinon.operate.judge.heat import HotAnswer, hot_answer
from koinon.operate.judge.hotspots import RankBy
from koinon.operate.judge.remedies import key_text
from koinon.operate.traffic import NODE_KEYS_MAX, NODE_PARTITIONS_MAX, TrafficClient, running
from koinon.operate.wording import bytes_text, count, rate_text

app = typer.Typer()
SECONDS_MAX = 60.0


class By(StrEnum):
    """The measure of heat."""

    READS = "reads"
    WRITES = "writes"
    BYTES = "bytes"
    ALL = "all"


HOTTEST = (
    Column(">PARTITION", lambda one: str(one.partition_id)),
    Column("PRIMARY", lambda one: one.primary or "-", narrow=2),
    Column(">READS/S", lambda one: rate_text(one.reads_per_second)),
    Column(">WRITES/S", lambda one: rate_text(one.writes_per_second)),
    Column(">BYTES/S", lambda one: bytes_text(one.bytes_per_second), narrow=1),
    Column(">SHARE", lambda one: f"{one.share:.1%}"),
    Column(">TIMES MEAN", lambda one: f"{one.times_mean:.1f}"),
)
KEYS = (
    Column(">PARTITION", lambda row: str(row[0].partition_id)),
    Column("KEY", lambda row: key_text(row[1].key)),
    Column(">READS/S", lambda row: rate_text(row[1].reads_per_second)),
    Column(">WRITES/S", lambda row: rate_text(row[1].writes_per_second), narrow=1),
    Column(">SHARE OF PARTITION", lambda row: f"{row[1].share_of_partition:.0%}"),
)


@command(app, examples=["admin hot", "admin hot --by writes --seconds 10 --keys 5"])
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
) -> Reply:
    """Show the partitions and keys with the most traffic, and how uneven it is.

    Measures for some seconds: nodes count all rows of each partition, and sample keys meanwhile.
    """
    rank = RankBy[by.name]
    with session.admin() as admin:
        table = table_of(admin.status())
    on_nodes = f"counting on {count(len(running(table)), 'node')} for {seconds:g} s"
    with TrafficClient() as traffic, _watching(session, on_nodes, seconds) as on_tick:
        survey = traffic.survey(
            table, seconds, by=rank, partitions_max=partitions, keys_max=keys, on_tick=on_tick
        )
    answer = hot_answer(survey, table, rank, shown=partitions, keys=keys)
    if not session.json:
        for name, reason in answer.silent.items():
            output.problem(f"{name} does not count: {reason}")
    return Reply(answer, _blocks(answer))


def _watching(
    session: Session, text: str, seconds: float
) -> AbstractContextManager[Callable[[float], None]]:
    """Show the measurement's progress on standard error."""

    @contextmanager
    def bar() -> Iterator[Callable[[float], None]]:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=BAR_WIDTH))
        console = output.console(stderr=True)
        with Progress(*columns, console=console, transient=True) as shown:
            task = shown.add_task(text, total=seconds)
            yield lambda elapsed_s: shown.update(task, completed=elapsed_s)

    return progress(session.json, bar, line_at_intervals(lambda _: f"{text}…", at_once=True))


def _blocks(answer: HotAnswer) -> list[Block]:
    total, skew = answer.total, answer.skew
    first = (
        f"{total.reads_per_second:,.0f} reads/s, {total.writes_per_second:,.0f} writes/s, "
        f"{bytes_text(total.bytes_per_second)}/s in {count(answer.partitions_used, 'partition')} "
        f"of {count(len(answer.nodes), 'node')}, over {answer.seconds:.1f} s"
    )
    if not answer.partitions:
        what = "rows" if answer.by in (RankBy.ALL, RankBy.BYTES) else answer.by.name.lower()
        return [first, f"No {what} were counted: nothing is hot."]
    is_all = answer.by is RankBy.ALL
    of = "" if is_all else f" of {answer.by.name.lower()}"
    chance = f" (by chance alone {skew.by_chance:.2f})" if is_all and skew.by_chance >= 0.1 else ""
    blocks: list[Block] = [
        first,
        f"Skew{of}: the hottest partition has {skew.max_over_mean:.1f} times the mean; "
        f"coefficient of variation {skew.coefficient_of_variation:.2f}{chance}",
        "",
        Table(HOTTEST, answer.partitions),
    ]
    if rows := [(one, key) for one in answer.partitions for key in one.keys]:
        blocks += ["", Table(KEYS, rows), Styled(_founded_on(answer), "dim")]
    if answer.advice:
        blocks += ["", *[remark("Note:", "yellow", line) for line in answer.advice]]
    return blocks


def _founded_on(answer: HotAnswer) -> str:
    words = {"reads": "read", "writes": "written"}
    looked = [
        f"{rows.taken:,} of {rows.rows:,} rows {words[kind]} ({rows.taken / rows.rows:.0%})"
        for kind, rows in answer.sampled.items()
        if rows.rows
    ]
    missed = max(rows.missed_max for rows in answer.sampled.values())
    short = f"; a key may have had {missed:,} rows more" if missed else ""
    return f"Keys are estimated from {' and '.join(looked)}; scans are not sampled{short}."
