"""Restores keyspaces of a backup by bulk loads.

This machine reads the files, and compares each file's SHA-256 before it stages the file's rows. It
commits no load before all files of all keyspaces are staged, so rows become readable only once
every file has matched the manifest. A keyspace is restored whole or not at all; several keyspaces
are committed one after the other.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from koinon.backup.backup_check import first_faults
from koinon.backup.destination import Destination
from koinon.backup.manifest import BackupDamagedError, FilePart, KeyspacePart, Manifest
from koinon.backup.parquet_rows import batches_of, bytes_of
from koinon.core.target import OpenedKeyspace
from koinon.spark.options import WriteOptions
from koinon.spark.writing.jobs import Commit, Job, TaskReport, abort
from koinon.spark.writing.planning import Field, plan_rows
from koinon.spark.writing.tasks import run_task

TASKS = 2
"""Tasks that stage side by side; each holds one file and a lot of rows in memory."""
LOOK_EVERY_S = 0.2
FIELDS: Sequence[Field] = (("key", "binary"), ("value", "binary"), ("expires_at", "timestamp"))


class MakesOptions(Protocol):
    """Makes the options of a bulk load into a keyspace."""

    def __call__(self, opened: OpenedKeyspace, *, overwrite: bool) -> WriteOptions: ...


@dataclass(frozen=True, kw_only=True)
class RestoredKeyspace:
    """One keyspace of the backup, and the keyspace that it is restored into. ``overwrite``: rows
    there that the backup lacks are deleted.
    """

    part: KeyspacePart
    target: OpenedKeyspace
    overwrite: bool


@dataclass(kw_only=True)
class RestoreProgress:
    """Counts of a running restore. Several threads write it under ``lock``."""

    rows_total: int = 0
    rows: int = 0
    bytes: int = 0
    expired: int = 0
    """Rows that have expired since the backup; they are not restored."""
    restored: list[str] = field(default_factory=list)
    """The keyspaces that are readable by now, by their new names."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(kw_only=True)
class RestoreJob:
    """The restore of some keyspaces of a backup.

    Attributes:
        on_progress: called several times a second.
        stopped: asked several times a second; once it returns True, and no keyspace is committed
            yet, KeyboardInterrupt is raised.
    """

    destination: Destination
    manifest: Manifest
    keyspaces: Sequence[RestoredKeyspace]
    options: MakesOptions
    on_progress: Callable[[RestoreProgress], None] = lambda _progress: None
    stopped: Callable[[], bool] = lambda: False
    progress: RestoreProgress = field(default_factory=RestoreProgress)

    def run(self) -> RestoreProgress:
        """Restore the keyspaces; return the final counts.

        Raises:
            BackupDamagedError: a file is missing or altered; nothing was restored.
            KoinonError: the cluster refused, or did not serve in time; ``progress.restored`` names
                the keyspaces that are readable nevertheless.
        """
        if faults := first_faults(self.destination, self.manifest):
            more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
            raise BackupDamagedError(reason=f"{self.manifest.backup_id}/{faults[0]}{more}")
        self.progress.rows_total = sum(keyspace.part.rows for keyspace in self.keyspaces)
        jobs = [(keyspace, self._job(keyspace)) for keyspace in self.keyspaces]
        staged: list[tuple[RestoredKeyspace, Job, list[TaskReport]]] = []
        try:
            for keyspace, job in jobs:
                staged.append((keyspace, job, self._stage(job, keyspace.part.files)))
            while staged:
                keyspace, job, reports = staged[0]
                Commit(job=job, reports=reports).run()
                del staged[0]
                self.progress.restored.append(keyspace.target.name)
        except BaseException:
            done = len(self.progress.restored)
            for _, job in jobs[done:]:
                reports = next((r for _, other, r in staged if other is job), [])
                abort(job, reports, "the restore failed")
            raise
        return self.progress

    def _job(self, keyspace: RestoredKeyspace) -> Job:
        options = self.options(keyspace.target, overwrite=keyspace.overwrite)
        return Job(
            job_id=f"restore:{uuid.uuid4()}",
            options=options,
            plan=plan_rows(options, FIELDS),
            overwrite=keyspace.overwrite,
        )

    def _stage(self, job: Job, files: Sequence[FilePart]) -> list[TaskReport]:
        """Stage all rows of the files; return the tasks' reports, which the commit needs."""
        left: queue.SimpleQueue[FilePart] = queue.SimpleQueue()
        for part in files:
            left.put(part)
        ended = threading.Event()
        pool = ThreadPoolExecutor(TASKS, thread_name_prefix="koinon-restore")
        try:
            calls = [
                pool.submit(run_task, job, task, self._batches(left, ended))
                for task in range(min(TASKS, max(1, len(files))))
            ]
            self._watch(set(calls))
            return [call.result() for call in calls]
        finally:
            ended.set()
            pool.shutdown()

    def _watch(self, calls: set[Future[TaskReport]]) -> None:
        while True:
            done, pending = wait(calls, LOOK_EVERY_S, FIRST_EXCEPTION)
            for call in done:
                call.result()
            self.on_progress(self.progress)
            if not pending:
                return
            if self.stopped():
                raise KeyboardInterrupt

    def _batches(self, left: queue.SimpleQueue[FilePart], ended: threading.Event) -> Iterator[Any]:
        """Yield the unexpired rows of files that no other task has taken."""
        while not ended.is_set():
            try:
                part = left.get_nowait()
            except queue.Empty:
                return
            content = self.destination.read_part(self.manifest.backup_id, part)
            for batch in batches_of(content, part):
                if ended.is_set():
                    return
                live = self._live(batch)
                with self.progress.lock:
                    self.progress.rows += len(batch)
                    self.progress.bytes += bytes_of(batch)
                    self.progress.expired += len(batch) - len(live)
                yield live

    def _live(self, batch: Any) -> Any:
        """Return the key, value and expiry columns of the rows that have not expired."""
        rows = batch.select(["key", "value", "expires_at"])
        if not rows.num_rows or rows.column(2).null_count == len(rows):
            return rows
        now = pa.scalar(time.time_ns() // 1_000_000, rows.column(2).type)
        lives = pc.fill_null(pc.greater(rows.column(2), now), True)
        return rows.filter(lives)
