"""backup: makes backups at one consistent cut; lists, checks and deletes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from koinon.cli.console import output
from koinon.cli.console.command import (
    INTERRUPTED,
    NOT_FOUND,
    USAGE,
    RefusedError,
    Session,
    Yes,
    command,
    duration_ms,
    not_empty,
)
from koinon.cli.console.help import Group
from koinon.cli.console.progress_bar import work_progress
from koinon.cli.console.reply import Block, Column, Reply, Styled, Table, facts, remark
from koinon.cli.console.signals import Interrupt
from koinon.cli.console.units import bytes_per_second
from koinon.operate.wording import bytes_text, count, duration_text
from koinon_proto.process import private_files

if TYPE_CHECKING:
    from koinon.backup.backup_check import CheckReport
    from koinon.backup.backup_job import BackupJob, BackupProgress
    from koinon.backup.destination import Destination, Found
    from koinon.backup.manifest import Manifest

app = typer.Typer(
    cls=Group,
    help="Keep the data elsewhere: consistent backups as Parquet files in a directory or an object "
    "store. [bold]koinon restore[/bold] brings them back.\n\n"
    "\b\n  $ koinon backup create /backups\n"
    "  $ koinon backup list /backups\n"
    "  $ koinon backup prune /backups --keep-last 7 --keep-daily 30",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
root = typer.Typer()
root.add_typer(app, name="backup", rich_help_panel="Data")
TIMEOUT_MS = 30_000
FAULTS_SHOWN_MAX = 20

DestinationName = Annotated[
    str,
    typer.Argument(
        metavar="DESTINATION",
        help="A directory of this machine, or s3://BUCKET/PATH, gs://…, file://…; credentials come "
        "from the environment.",
    ),
]
BackupId = Annotated[
    str,
    typer.Argument(
        metavar="[BACKUP]",
        callback=not_empty,
        help="The id of a backup, as 'backup list' shows it. By default the newest.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class BackedUpKeyspace:
    """One keyspace of a backup. ``bytes``: of keys and values."""

    keyspace: str
    partitions: int
    partitioner: str
    rows: int
    bytes: int
    files: int
    file_bytes: int


@dataclass(frozen=True, kw_only=True)
class BackupAnswer:
    """One backup. Times are Unix milliseconds."""

    backup_id: str
    cluster_id: str
    began_ms: int
    cut_ms: int
    ended_ms: int
    held_ms: int
    table_version: int
    made_by: str
    rows: int
    bytes: int
    files: int
    file_bytes: int
    keyspaces: list[BackedUpKeyspace]


def backup_answer(manifest: Manifest) -> BackupAnswer:
    """Return a backup's answer for programs."""
    return BackupAnswer(
        backup_id=manifest.backup_id,
        cluster_id=manifest.cluster_id,
        began_ms=manifest.began_ms,
        cut_ms=manifest.cut_ms,
        ended_ms=manifest.ended_ms,
        held_ms=manifest.held_ms,
        table_version=manifest.table_version,
        made_by=manifest.made_by,
        rows=manifest.rows,
        bytes=manifest.bytes,
        files=len(manifest.files),
        file_bytes=manifest.file_bytes,
        keyspaces=[
            BackedUpKeyspace(
                keyspace=part.name,
                partitions=len(part.partitions),
                partitioner=part.settings.partitioner,
                rows=part.rows,
                bytes=part.bytes,
                files=len(part.files),
                file_bytes=sum(file.bytes for file in part.files),
            )
            for part in manifest.keyspaces
        ],
    )


def at_text(unix_ms: int) -> str:
    """Return a time as text: ``2026-11-28 12:00:05 UTC``."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


KeyspaceNames = Annotated[
    list[str] | None,
    typer.Option(
        "--keyspace",
        metavar="NAME",
        callback=not_empty,
        help="Only this keyspace; may be given several times. By default all.",
    ),
]
Throttle = Annotated[
    str,
    typer.Option("--throttle", metavar="SIZE", help="The limit of bytes a second: 50MB, 1GiB."),
]
Wait = Annotated[
    str,
    typer.Option(
        help="How long to try for a consistent cut, while partitions move or a bulk load is merged."
    ),
]


@command(
    app,
    examples=[
        "backup create /backups",
        "backup create s3://acme-backups/koinon --keyspace carts --keyspace users",
        "backup create /backups --throttle 50MB",
    ],
)
def create(
    session: Session,
    destination: DestinationName,
    *,
    keyspace: KeyspaceNames = None,
    throttle: Throttle = "off",
    wait: Wait = "60s",
) -> Reply | int:
    """Back up keyspaces as of one moment: a backup with a write also has every write that was
    acknowledged before that write was sent.

    Writes go on; during the cut itself they wait, for 250 ms at most. This machine writes the
    files. A backup that fails or is interrupted leaves no files.
    """
    from koinon import __version__
    from koinon.backup.backup_job import BackupJob
    from koinon.backup.destination import Destination
    from koinon.spark.cluster import Cluster

    rate, wait_s = bytes_per_second(throttle), duration_ms(wait) / 1000
    place = Destination(destination)
    private_files.only_for_owner()
    began = time.monotonic()
    with Cluster(session.coordinators, timeout_s=session.timeout_or(TIMEOUT_MS) / 1000) as cluster:
        job = BackupJob(
            cluster=cluster,
            destination=place,
            keyspaces=keyspace or (),
            bytes_per_second=rate,
            wait_s=wait_s,
            made_by=f"koinon {__version__}",
            say=output.note,
        )
        manifest = _run(session, job)
    if manifest is None:
        output.note("interrupted: nothing is left of this backup")
        return INTERRUPTED
    return _created(manifest, time.monotonic() - began)


def _run(session: Session, job: BackupJob) -> Manifest | None:
    """Make the backup and show its progress; return None if it was interrupted."""
    from koinon.backup.cut_sessions import chosen_keyspaces

    chosen = chosen_keyspaces(job.cluster.routing().table, job.keyspaces)
    total = sum(one.partition_count for one in chosen)
    text = _rows_and_bytes(job.progress)
    with (
        Interrupt() as interrupt,
        work_progress(session.json, "backing up", total, text) as advance,
    ):
        job.stopped = lambda: interrupt.asked
        job.on_progress = lambda progress: advance(progress.partitions)
        try:
            return job.run()
        except KeyboardInterrupt:
            return None


def _rows_and_bytes(progress: BackupProgress) -> Callable[[], str]:
    began = time.monotonic()

    def text() -> str:
        rate = progress.bytes / max(0.001, time.monotonic() - began)
        return f"{progress.rows:,} rows  {bytes_text(rate)}/s"

    return text


def _created(manifest: Manifest, seconds: float) -> Reply:
    rate = bytes_text(manifest.bytes / max(seconds, 0.001))
    lines: list[Block] = [
        [Styled(f"Backup {manifest.backup_id}", "bold"), f" of {at_text(manifest.cut_ms)}"],
        f"{count(manifest.rows, 'row')}, {bytes_text(manifest.bytes)} of keys and values in "
        f"{count(len(manifest.files), 'file')} of {bytes_text(manifest.file_bytes)}, in "
        f"{duration_text(seconds)} ({rate}/s); writes waited {manifest.held_ms} ms at most.",
    ]
    return Reply(
        backup_answer(manifest), lines, done=f"backup {manifest.backup_id} is made, but the summary"
    )


# --- listing -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ListedBackup:
    """One backup of a destination. ``state``: complete, unfinished or damaged."""

    backup_id: str
    state: str
    cut_ms: int | None
    rows: int | None
    file_bytes: int
    keyspaces: list[str]
    fault: str | None


@dataclass(frozen=True, kw_only=True)
class ListAnswer:
    """The backups of a destination, the oldest first."""

    backups: list[ListedBackup]


def _listed(found: Found) -> ListedBackup:
    manifest = found.manifest
    state = "unfinished" if found.is_unfinished else "damaged" if manifest is None else "complete"
    return ListedBackup(
        backup_id=found.backup_id,
        state=state,
        cut_ms=manifest.cut_ms if manifest else None,
        rows=manifest.rows if manifest else None,
        file_bytes=found.file_bytes,
        keyspaces=[part.name for part in manifest.keyspaces] if manifest else [],
        fault=found.fault or None,
    )


_STATES = {"complete": "green", "unfinished": "yellow", "damaged": "red"}
BACKUPS = (
    Column("BACKUP", "backup_id"),
    Column("STATE", lambda one: Styled(one.state, _STATES[one.state])),
    Column("OF", lambda one: at_text(one.cut_ms) if one.cut_ms else None, narrow=1),
    Column(">ROWS", "rows"),
    Column(">SIZE", lambda one: bytes_text(one.file_bytes)),
    Column("KEYSPACES", lambda one: ", ".join(one.keyspaces), narrow=2),
    Column("WHY", "fault", narrow=3, if_any=True),
)


@command(app, "list", examples=["backup list /backups"], connects=False)
def list_backups(session: Session, destination: DestinationName) -> Reply:
    """List the backups of a destination, the oldest first."""
    from koinon.backup.destination import Destination

    found = [_listed(one) for one in Destination(destination).backups()]
    blocks: list[Block] = [Table(BACKUPS, found)] if found else [f"{destination} has no backup."]
    return Reply(ListAnswer(backups=found), blocks)


KEYSPACES = (
    Column("KEYSPACE", "keyspace"),
    Column(">PARTITIONS", "partitions"),
    Column("KEYS BY", "partitioner"),
    Column(">ROWS", "rows"),
    Column(">BYTES", lambda one: bytes_text(one.bytes)),
    Column(">FILES", "files", narrow=1),
    Column(">SIZE", lambda one: bytes_text(one.file_bytes)),
)


@command(app, examples=["backup show /backups"], connects=False)
def show(session: Session, destination: DestinationName, backup_id: BackupId = "") -> Reply:
    """The keyspaces of one backup, and how it was made."""
    from koinon.backup.destination import Destination

    manifest = chosen(Destination(destination), backup_id)
    answer = backup_answer(manifest)
    known = facts(
        {
            "backup": manifest.backup_id,
            "of": f"{at_text(manifest.cut_ms)}, table version {manifest.table_version}",
            "cluster": manifest.cluster_id,
            "made by": f"{manifest.made_by}, in "
            f"{duration_text((manifest.ended_ms - manifest.began_ms) / 1000)}",
            "writes waited": f"{manifest.held_ms} ms at most",
        }
    )
    return Reply(answer, [known, Table(KEYSPACES, answer.keyspaces)])


def chosen(destination: Destination, backup_id: str) -> Manifest:
    """Return the manifest of the backup with this id, or of the newest complete backup.

    Raises:
        RefusedError: there is no such backup.
    """
    if backup_id:
        from koinon.backup.manifest import is_backup_id

        if not is_backup_id(backup_id):
            raise typer.BadParameter(
                f"{backup_id!r} is not the id of a backup; 'koinon backup list' shows the ids"
            )
        return destination.manifest(backup_id)
    complete = [found.manifest for found in destination.backups() if found.manifest]
    if not complete:
        raise RefusedError(
            f"{destination.text} has no complete backup",
            "'koinon backup list' lists all backups.",
            code=NOT_FOUND,
        )
    return complete[-1]


# --- checks --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckAnswer:
    """The result of a check of a backup."""

    backup_id: str
    good: bool
    deep: bool
    files: int
    file_bytes: int
    rows: int
    faults: list[str]
    unknown_files: list[str]


@command(
    app,
    examples=["backup verify /backups", "backup verify /backups --deep"],
    connects=False,
)
def verify(
    session: Session,
    destination: DestinationName,
    backup_id: BackupId = "",
    *,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also read all rows, and compare their digests with those of the cut."
        ),
    ] = False,
) -> Reply | int:
    """Compare every file of a backup with the manifest's SHA-256.

    Exit code 1 if a file is missing or altered.
    """
    from koinon.backup.backup_check import check_backup
    from koinon.backup.destination import Destination

    place = Destination(destination)
    manifest = chosen(place, backup_id)
    with (
        Interrupt() as interrupt,
        work_progress(session.json, "checking", manifest.file_bytes, lambda: "") as advance,
    ):

        def on_progress(report: CheckReport) -> None:
            advance(report.bytes)

        try:
            report = check_backup(
                place,
                manifest,
                deep=deep,
                on_progress=on_progress,
                stopped=lambda: interrupt.asked,
            )
        except KeyboardInterrupt:
            return INTERRUPTED
    answer = CheckAnswer(
        backup_id=manifest.backup_id,
        good=not report.faults,
        deep=deep,
        files=report.files,
        file_bytes=report.bytes,
        rows=report.rows,
        faults=report.faults,
        unknown_files=report.strangers,
    )
    return Reply(answer, _check_blocks(answer), code=NOT_FOUND if report.faults else 0)


def _check_blocks(answer: CheckAnswer) -> list[Block]:
    blocks: list[Block] = [
        remark("Damaged:", "bold red", fault) for fault in answer.faults[:FAULTS_SHOWN_MAX]
    ]
    if more := len(answer.faults) - FAULTS_SHOWN_MAX:
        blocks += [f"… and {more:,} more"] if more > 0 else []
    for path in answer.unknown_files[:FAULTS_SHOWN_MAX]:
        blocks.append(remark("Files that do not belong to the backup:", "yellow", path))
    what = f"{count(answer.files, 'file')}, {bytes_text(answer.file_bytes)}"
    rows = f", {count(answer.rows, 'row')} read" if answer.deep else ""
    if answer.good:
        return [*blocks, f"Backup {answer.backup_id} matches its manifest: {what}{rows}."]
    faults = count(len(answer.faults), "fault")
    return [
        *blocks,
        f"Backup {answer.backup_id} has {faults}, and cannot be restored: take another one "
        "('koinon backup list'), and check the disk or the object store.",
    ]


# --- deleting ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PruneAnswer:
    """The backups that were, or would be, deleted, and the backups that are kept."""

    deleted: list[str]
    kept: list[str]
    dry_run: bool


@command(
    app,
    examples=[
        "backup prune /backups --keep-last 7 --keep-daily 30 --dry-run",
        "backup prune /backups --keep-last 7 --yes",
    ],
    connects=False,
)
def prune(
    session: Session,
    destination: DestinationName,
    *,
    keep_last: Annotated[
        int, typer.Option("--keep-last", min=0, help="Keep this many of the newest backups.")
    ] = 0,
    keep_daily: Annotated[
        int,
        typer.Option(
            "--keep-daily", min=0, help="Keep the newest backup of each of this many days (UTC)."
        ),
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted; delete nothing.")
    ] = False,
    yes: Yes = False,
) -> Reply:
    """Delete backups, except those that --keep-last or --keep-daily keeps. Unfinished backups
    are deleted once they are older than a day.
    """
    from koinon.backup.destination import Destination
    from koinon.backup.retention import prune as decide

    if not keep_last + keep_daily:
        raise RefusedError(
            "nothing says which backups stay",
            "Give --keep-last or --keep-daily: backups that neither keeps are deleted.",
            code=USAGE,
        )
    place = Destination(destination)
    pruning = decide(place.backups(), keep_last=keep_last, keep_daily=keep_daily, now_s=time.time())
    answer = PruneAnswer(
        deleted=[found.backup_id for found in pruning.gone],
        kept=[found.backup_id for found, _ in pruning.kept],
        dry_run=dry_run,
    )
    if pruning.gone and not dry_run:
        session.ask(
            f"Delete {count(len(pruning.gone), 'backup')} of {destination} "
            f"({', '.join(answer.deleted[:5])}{', …' if len(answer.deleted) > 5 else ''})?",
            yes=yes,
            shows=", --dry-run shows the backups that would be deleted",
        )
        for found in pruning.gone:
            place.delete(found.backup_id)
    return Reply(answer, _prune_blocks(answer, pruning.kept))


def _prune_blocks(answer: PruneAnswer, kept: Sequence[tuple[Found, str]]) -> list[Block]:
    verb = "would be deleted" if answer.dry_run else "deleted"
    blocks: list[Block] = [f"{verb}: {backup_id}" for backup_id in answer.deleted]
    blocks += [Styled(f"kept: {found.backup_id} ({why})", "dim") for found, why in kept]
    return [*blocks, f"{count(len(answer.deleted), 'backup')} {verb}, {len(kept):,} kept."]
