"""verify: compares the copies of each partition."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import typer

from koinon.cli.console.command import NOT_FOUND, Session, command
from koinon.cli.console.progress_bar import work_progress
from koinon.cli.console.reply import Block, Reply, remark
from koinon.cli.console.units import partition_ids
from koinon.cli.operate.move_control import PANEL
from koinon.operate.cluster_status import table_of
from koinon.operate.replicas import Replicas
from koinon.operate.verify import CopyVerdict, PartitionVerdict, Report, Verdict, verify
from koinon.operate.wording import count, node_name, ranges
from koinon_proto.contract.table import Table

app = typer.Typer()
TIMEOUT_MS = 10_000
PAUSE_S = 0.2
SHOWN_MAX = 20


@dataclass(frozen=True, kw_only=True)
class ComparedCopy:
    """One copy compared with its primary's; counts are None if its node did not report them."""

    node: str
    verdict: Verdict
    reason: str | None
    complete_through: int | None
    records: int | None
    bytes: int | None
    digest: str | None


@dataclass(frozen=True, kw_only=True)
class ComparedPartition:
    """A partition whose copies are not all identical."""

    partition_id: int
    verdict: Verdict
    primary: str | None
    copies: list[ComparedCopy]


@dataclass(frozen=True, kw_only=True)
class VerifyAnswer:
    """The number of partitions for each verdict, and every partition whose copies are not
    identical.
    """

    identical: int
    different: int
    not_comparable: int
    records: int
    partitions: list[ComparedPartition]


@command(
    app,
    "verify",
    panel=PANEL,
    examples=["admin verify", "admin verify --partition 0-15"],
)
def verify_copies(
    session: Session,
    *,
    partition: Annotated[str | None, typer.Option(help="Only these, such as 3 or 0-15,40.")] = None,
) -> Reply:
    """Compare the copies of each partition, record by record, by checksums.

    Exit code 1 if any copy differs. Writes may go on: a copy is compared with its primary once both
    have reached the same sequence. Reads every record once on every node.
    """
    with session.admin(TIMEOUT_MS) as admin, Replicas() as replicas:
        table = table_of(admin.status())
        chosen = (
            partition_ids(partition)
            if partition
            else [int(row.partition_id) for row in table.used_rows]
        )
        if chosen and chosen[-1] >= len(table.rows):
            raise typer.BadParameter(f"the partitions are 0 to {len(table.rows) - 1}")
        settled = 0
        text = f"of {count(len(chosen), 'partition')}"
        with work_progress(
            session.json, "comparing", len(chosen), lambda: f"{settled:,} {text}"
        ) as advance:

            def on_progress(done: int) -> None:
                nonlocal settled
                settled = done
                advance(done)

            report = verify(
                lambda: table_of(admin.status()),
                replicas,
                chosen,
                on_progress=on_progress,
                pause=lambda: time.sleep(PAUSE_S),
            )
    differs = NOT_FOUND if report.of(Verdict.DIFFERENT) else 0
    return Reply(_answer(report, table), _blocks(report, table), code=differs)


def _answer(report: Report, table: Table) -> VerifyAnswer:
    unlike = [*report.of(Verdict.DIFFERENT), *report.of(Verdict.NOT_COMPARABLE)]
    return VerifyAnswer(
        identical=len(report.of(Verdict.IDENTICAL)),
        different=len(report.of(Verdict.DIFFERENT)),
        not_comparable=len(report.of(Verdict.NOT_COMPARABLE)),
        records=sum(_records(found) for found in report.of(Verdict.IDENTICAL)),
        partitions=[
            ComparedPartition(
                partition_id=found.partition_id,
                verdict=found.verdict,
                primary=node_name(table, found.primary) if found.primary else None,
                copies=[_copy(copy, table) for copy in found.copies],
            )
            for found in unlike
        ],
    )


def _copy(copy: CopyVerdict, table: Table) -> ComparedCopy:
    said = copy.checksum
    return ComparedCopy(
        node=node_name(table, copy.node_number),
        verdict=copy.verdict,
        reason=copy.reason or None,
        complete_through=said.complete_through if said else None,
        records=said.records if said else None,
        bytes=said.bytes if said else None,
        digest=f"{said.digest:016x}" if said else None,
    )


def _blocks(report: Report, table: Table) -> list[Block]:
    same, different = report.of(Verdict.IDENTICAL), report.of(Verdict.DIFFERENT)
    unsure = report.of(Verdict.NOT_COMPARABLE)
    blocks: list[Block] = []
    for found in different[:SHOWN_MAX]:
        primary = node_name(table, found.primary)
        for copy in found.copies:
            if copy.verdict is Verdict.DIFFERENT:
                where = f"partition {found.partition_id} on {node_name(table, copy.node_number)}"
                what = f"{where}: {copy.reason} ({primary})"
                blocks.append(remark("Different:", "bold red", what))
    if more := [found.partition_id for found in different[SHOWN_MAX:]]:
        blocks.append(remark("Different too:", "bold red", f"partitions {ranges(more)}"))
    reasons = Counter(reason for found in unsure for reason in found.reasons)
    for reason, number in reasons.most_common():
        blocks.append(remark("Not comparable:", "yellow", f"{number:,}: {reason}"))
    copies = sum(len(found.copies) for found in same)
    records = sum(_records(found) for found in same)
    single = sum(len(found.copies) == 1 for found in same)
    alone = f" ({single:,} of them have one copy only)" if single else ""
    return [
        *blocks,
        f"{count(len(same), 'partition')} identical in {count(copies, 'copy')}"
        f"{alone}, with {count(records, 'record')} in all (each counted once); "
        f"{len(different):,} different, {len(unsure):,} not comparable.",
    ]


def _records(found: PartitionVerdict) -> int:
    """Return the number of records in the primary's copy of a partition."""
    copy = next((c for c in found.copies if c.node_number == found.primary), None)
    return copy.checksum.records if copy is not None and copy.checksum is not None else 0
