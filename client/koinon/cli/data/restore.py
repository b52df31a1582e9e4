"""restore: restores keyspaces of a backup into this cluster or another one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.command import INTERRUPTED, RefusedError, Session, command, not_empty
from koinon.cli.console.progress_bar import work_progress
from koinon.cli.console.reply import Block, Reply, Styled
from koinon.cli.console.signals import Interrupt
from koinon.cli.console.units import UINT32_MAX, bytes_per_second
from koinon.cli.data.backup import KeyspaceNames, Throttle, at_text, chosen
from koinon.operate.wording import bytes_text, count, duration_text
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.keyspaces import DEFAULT

if TYPE_CHECKING:
    from koinon import Client
    from koinon.backup.manifest import KeyspacePart, Manifest
    from koinon.backup.restore_job import RestoredKeyspace, RestoreProgress
    from koinon.operate.admin import Admin

root = typer.Typer()
ADMIN_TIMEOUT_MS = 30_000


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """The options for keyspaces that are created or replaced."""

    partitions: Annotated[
        int,
        typer.Option(
            "--partitions",
            min=0,
            max=UINT32_MAX,
            help="Partitions of a keyspace that is created. 0: as in the backup.",
        ),
    ] = 0
    replication_factor: Annotated[
        int,
        typer.Option(
            "--replication-factor",
            min=0,
            max=UINT32_MAX,
            help="Copies, of a keyspace that is created. By default as in the backup.",
        ),
    ] = 0
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace all records of a keyspace that exists; records that the backup lacks "
            "are deleted.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class RestoreAnswer:
    """The number of restored rows, and the keyspaces by their new names."""

    backup_id: str
    cut_ms: int
    keyspaces: list[str]
    rows: int
    rows_expired: int
    bytes: int
    seconds: float


@command(
    root,
    panel="Data",
    examples=[
        "restore /backups",
        "restore /backups/20261128T120000Z-1a2b3c4d --keyspace carts --as carts-before",
        "restore s3://acme-backups/koinon --keyspace users --partitions 256",
        "restore /backups --keyspace carts --overwrite",
    ],
)
def restore(
    session: Session,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A destination of backups, whose newest backup is restored; or one backup: "
            "DESTINATION/ID.",
        ),
    ],
    *,
    keyspace: KeyspaceNames = None,
    as_: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="NAME",
            callback=not_empty,
            help="Restore the keyspace under this name; with one --keyspace.",
        ),
    ] = "",
    throttle: Throttle = "off",
    how: RestoreOptions,
) -> Reply | int:
    """Restore keyspaces from a backup. A keyspace that does not exist is created as it was; one
    that exists has to be empty, unless --overwrite is given.

    All files are checked against the manifest before any row becomes readable; then all rows of a
    keyspace become readable at once. Records keep their expiry, and get new versions. Expired
    records are left out.
    """
    from koinon.backup.destination import Destination, split_source
    from koinon.backup.restore_job import RestoreJob

    where, backup_id = split_source(source)
    place = Destination(where)
    manifest = chosen(place, backup_id)
    names = _names(manifest, keyspace or (), as_)
    rate = bytes_per_second(throttle)
    began = time.monotonic()
    with ExitStack() as made, session.admin(ADMIN_TIMEOUT_MS) as admin:
        with session.connect() as client:
            _check_targets(client, names, how)
        progress_of: list[RestoreProgress] = []
        targets = [_target(admin, part, name, how, made, progress_of) for part, name in names]
        with Interrupt() as interrupt:
            job = RestoreJob(
                destination=place,
                manifest=manifest,
                keyspaces=targets,
                options=_options(session, manifest, rate),
                stopped=lambda: interrupt.asked,
            )
            progress_of.append(job.progress)
            if not _run(session, job):
                return INTERRUPTED
        made.pop_all()  # keyspaces that were created stay
    return _reply(manifest, job.progress, time.monotonic() - began)


def _run(session: Session, job: Any) -> bool:
    """Run the job and show its progress; return whether it finished."""
    began, progress = time.monotonic(), job.progress
    total = sum(one.part.rows for one in job.keyspaces)

    def text() -> str:
        rate = progress.rows / max(0.001, time.monotonic() - began)
        return f"{progress.rows:,} rows  {rate:,.0f} rows/s"

    with work_progress(session.json, "restoring", total, text) as advance:
        job.on_progress = lambda progress: advance(progress.rows)
        try:
            job.run()
        except KeyboardInterrupt:
            output.note("interrupted: nothing was restored")
            return False
        except KoinonError:
            if progress.restored:
                output.note(f"restored all the same: {', '.join(progress.restored)}")
            raise
    return True


def _names(manifest: Manifest, wanted: Sequence[str], as_: str) -> list[tuple[KeyspacePart, str]]:
    """Return the keyspaces to restore, each with its name in this cluster."""
    parts = [manifest.keyspace(name) for name in dict.fromkeys(wanted)] or manifest.keyspaces
    if as_ and len(parts) != 1:
        raise typer.BadParameter("--as names one keyspace: give --keyspace once")
    return [(part, as_ or part.name) for part in parts]


def _check_targets(
    client: Client, names: Sequence[tuple[KeyspacePart, str]], how: RestoreOptions
) -> None:
    """Refuse a target that cannot be restored into, before any keyspace is changed."""
    known = client.table().keyspaces
    for _, name in names:
        found = known.get(name)
        if found is None:
            continue
        if how.partitions and how.partitions != found.partition_count:
            raise RefusedError(
                f"keyspace {name} exists, with {found.partition_count} partitions",
                "The number never changes: restore it under another name, with --as.",
            )
        if how.overwrite:
            continue
        within = client if name == DEFAULT else client.keyspace(name)
        if next(iter(within.scan(limit=1, keys_only=True)), None) is not None:
            raise RefusedError(
                f"keyspace {name} has records",
                "--overwrite replaces all of them; --as NAME restores into another keyspace.",
            )


def _target(
    admin: Admin,
    part: KeyspacePart,
    name: str,
    how: RestoreOptions,
    made: ExitStack,
    progress_of: list[RestoreProgress],
) -> RestoredKeyspace:
    """Open the keyspace to restore into, and create it first if it does not exist. ``made`` drops a
    created keyspace at the end if it was not restored.
    """
    from koinon.backup.restore_job import RestoredKeyspace
    from koinon.core.target import OpenedKeyspace
    from koinon.operate.cluster_status import table_of

    table = table_of(admin.status())
    found, version = table.keyspaces.get(name), table.table_version
    if found is None:
        old = part.settings
        found = admin.keyspaces.create(
            name,
            partition_count=how.partitions or old.partition_count,
            partitioner=old.partitioner,
            replication_factor=how.replication_factor or old.replication_factor,
            min_in_sync=0 if how.replication_factor else old.min_in_sync,
            max_value_bytes=old.max_value_bytes,
            default_ttl_ms=old.default_ttl_ms,
            max_ttl_ms=old.max_ttl_ms,
            max_rows_per_s=old.max_rows_per_s,
            max_bytes_per_s=old.max_bytes_per_s,
        ).keyspace
        version = table_of(admin.status()).table_version
        keyspace_id = found.keyspace_id

        def drop() -> None:
            restored = progress_of[0].restored if progress_of else ()
            if name not in restored:
                with suppress(KoinonError):  # the restore's own error says more
                    admin.keyspaces.drop(name, keyspace_id)

        made.callback(drop)
    target = OpenedKeyspace(found.keyspace_id, found.name, version)
    return RestoredKeyspace(part=part, target=target, overwrite=how.overwrite)


def _options(session: Session, manifest: Manifest, rate: int) -> Any:
    from koinon.backup.restore_job import TASKS
    from koinon.core.target import OpenedKeyspace
    from koinon.spark.options import WriteOptions, write_options

    def options(opened: OpenedKeyspace, *, overwrite: bool) -> WriteOptions:
        given = {
            "coordinators": session.coordinators,
            "keyspace": opened.name,
            "keyColumn": "key",
            "valueColumn": "value",
            "ttlColumn": "expires_at",
            "description": f"koinon restore of {manifest.backup_id}",
            **({"maxBytesPerSecond": str(max(1, rate // TASKS))} if rate else {}),
        }
        return replace(write_options(given, overwrite=overwrite), opened=opened)

    return options


def _reply(manifest: Manifest, progress: RestoreProgress, seconds: float) -> Reply:
    rows = progress.rows - progress.expired
    answer = RestoreAnswer(
        backup_id=manifest.backup_id,
        cut_ms=manifest.cut_ms,
        keyspaces=progress.restored,
        rows=rows,
        rows_expired=progress.expired,
        bytes=progress.bytes,
        seconds=round(seconds, 3),
    )
    expired = f"; {count(progress.expired, 'row')} had expired" if progress.expired else ""
    lines: list[Block] = [
        [
            Styled(count(rows, "row"), "bold"),
            f" restored into {', '.join(progress.restored)}, as of {at_text(manifest.cut_ms)}: "
            f"{bytes_text(progress.bytes)} in {duration_text(seconds)}{expired}.",
        ]
    ]
    return Reply(answer, lines, done="the keyspaces are restored, but the summary")
