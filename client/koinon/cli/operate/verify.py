"""verify: whether all copies of each partition are alike."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from koinon.cli.console import output
from koinon.cli.console.session import NOT_FOUND, Session
from koinon.cli.console.units import partition_ids
from koinon.operate.health import ranges
from koinon.operate.nodes import node_name
from koinon.operate.replicas import Replicas
from koinon.operate.verify import CopyVerdict, PartitionVerdict, Report, Verdict, verify
from koinon_proto.contract.errors import ClusterNotReadyError
from koinon_proto.contract.table import Table

if TYPE_CHECKING:
    from koinon.operate.admin import Admin

TIMEOUT_MS = 10_000
PAUSE_S = 0.2
SHOWN_MAX = 20


def verify_copies(
    session: Session,
    *,
    partition: Annotated[str | None, typer.Option(help="Only these, such as 3 or 0-15,40.")] = None,
) -> int | None:
    """Compare the copies of each partition, record by record, by checksums.

    Exit code 1 if any copy differs. Writes may go on: a copy is compared with its primary where
    both have come to the same point. Reads every record once on every node.
    """
    with session.admin(TIMEOUT_MS) as admin, Replicas() as replicas:
        table = ready_table(admin)
        chosen = (
            partition_ids(partition)
            if partition
            else [int(row.partition_id) for row in table.used_rows]
        )
        if chosen and chosen[-1] >= len(table.rows):
            raise typer.BadParameter(f"the partitions are 0 to {len(table.rows) - 1}")
        report = _verify(session, admin, replicas, chosen)
    if session.json:
        output.print_json(report_json(report, table))
    else:
        _print(report, table)
    return NOT_FOUND if report.of(Verdict.DIFFERENT) else None


def ready_table(admin: Admin) -> Table:
    """Return the table of a cluster whose partitions are placed.

    Raises:
        ClusterNotReadyError: too few nodes have registered yet.
    """
    table = admin.status().table
    if table is None or not table.bootstrapped:
        waits = 0 if table is None else table.cluster.bootstrap_nodes
        raise ClusterNotReadyError(
            registered_nodes=0 if table is None else len(table.nodes), bootstrap_nodes=waits
        )
    return table


def _verify(session: Session, admin: Admin, replicas: Replicas, chosen: list[int]) -> Report:
    def pause() -> None:
        threading.Event().wait(PAUSE_S)

    def now() -> Table:
        return ready_table(admin)

    if session.json:
        return verify(now, replicas, chosen, pause=pause)
    columns = (
        TextColumn("comparing"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("partitions"),
        TimeRemainingColumn(),
    )
    console = output.console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=len(chosen))
        return verify(
            now,
            replicas,
            chosen,
            on_progress=lambda done: bar.update(task, completed=done),
            pause=pause,
        )


def _print(report: Report, table: Table) -> None:
    printer = output.console()
    same, different = report.of(Verdict.IDENTICAL), report.of(Verdict.DIFFERENT)
    unsure = report.of(Verdict.NOT_COMPARABLE)
    for found in different[:SHOWN_MAX]:
        primary = node_name(table, found.primary)
        for copy in found.copies:
            if copy.verdict is Verdict.DIFFERENT:
                where = output.escape(node_name(table, copy.node_number))
                printer.print(
                    f"[bold red]Different:[/] partition {found.partition_id} on {where}: "
                    f"{output.escape(copy.reason)} ({output.escape(primary)})"
                )
    if len(different) > SHOWN_MAX:
        more = [found.partition_id for found in different[SHOWN_MAX:]]
        printer.print(f"[bold red]Different too:[/] partitions {ranges(more)}")
    reasons = Counter(reason for found in unsure for reason in found.reasons)
    for reason, number in reasons.most_common():
        printer.print(f"[yellow]Not comparable:[/] {number:,}: {output.escape(reason)}")
    copies = sum(len(found.copies) for found in same)
    records = sum(_records(found) for found in same)
    single = sum(len(found.copies) == 1 for found in same)
    alone = f" ({single:,} of them have one copy only)" if single else ""
    printer.print(
        f"{output.count(len(same), 'partition')} identical in {output.count(copies, 'copy')}, "
        f"{output.count(records, 'record')} each{alone}; {len(different):,} different, "
        f"{len(unsure):,} not comparable.".replace("copys", "copies"),
        markup=False,
    )


def _records(found: PartitionVerdict) -> int:
    """Return the number of records that the primary holds of a partition."""
    copy = next((c for c in found.copies if c.node_number == found.primary), None)
    return copy.checksum.records if copy is not None and copy.checksum is not None else 0


def report_json(report: Report, table: Table) -> dict[str, Any]:
    """The stable form of a report: counts, and every partition that is not identical."""
    return {
        "identical": len(report.of(Verdict.IDENTICAL)),
        "different": len(report.of(Verdict.DIFFERENT)),
        "not_comparable": len(report.of(Verdict.NOT_COMPARABLE)),
        "records": sum(_records(found) for found in report.of(Verdict.IDENTICAL)),
        "partitions": [
            {
                "partition_id": found.partition_id,
                "verdict": found.verdict.value,
                "primary": node_name(table, found.primary) if found.primary else None,
                "copies": [_copy_json(copy, table) for copy in found.copies],
            }
            for verdict in (Verdict.DIFFERENT, Verdict.NOT_COMPARABLE)
            for found in report.of(verdict)
        ],
    }


def _copy_json(copy: CopyVerdict, table: Table) -> dict[str, Any]:
    said = copy.checksum
    return {
        "node": node_name(table, copy.node_number),
        "verdict": copy.verdict.value,
        "reason": copy.reason or None,
        "complete_through": said.complete_through if said else None,
        "records": said.records if said else None,
        "bytes": said.bytes if said else None,
        "digest": f"{said.digest:016x}" if said else None,
    }
