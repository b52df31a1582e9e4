"""A write job as its tasks and its driver know it, and the commit by the driver.

The job's id identifies its load: the first process that needs the load opens it, and all others get
the same one. A task's staged rows count if its report is among those that the driver commits; rows
staged by retried, speculative or killed attempts are not committed, and are deleted with the load.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Final, TextIO

import numpy as np

from koinon.core.target import DEFAULT_OPENED, OpenedKeyspace
from koinon.operate.loads_client import (
    LoadMode,
    LoadsClient,
    LoadState,
    LoadView,
    OpenedLoad,
    StreamBatch,
)
from koinon.spark.cluster import Cluster, cluster_of, loads_of, named
from koinon.spark.options import WriteOptions
from koinon.spark.writing.load_keepalive import LoadKeepalive
from koinon.spark.writing.planning import RowPlan
from koinon.spark.writing.preparing import prepare
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    UnavailableError,
    UnknownFateError,
    UnknownKeyspaceError,
)
from koinon_proto.process.printable import printable, stream_of

POLL_S, POLL_S_MAX = 0.05, 0.3
ABORT_TIMEOUT_S: Final = 20.0
SILENT_S: Final = 3.0
"""The time after which a merge logs its progress."""
SAY_EVERY_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings that all tasks of a write share."""

    job_id: str
    options: WriteOptions
    plan: RowPlan
    overwrite: bool
    stream_batch: StreamBatch | None = None

    def open(self, loads: LoadsClient) -> OpenedLoad:
        """Open the job's load, or return the open one. The load of a micro-batch may be committed.

        Raises:
            LoadClosedError: it has been closed meanwhile.
            UnknownKeyspaceError: the keyspace has been dropped, even if a new keyspace has its
                name.
            KoinonError: as ``LoadsClient.open_load``.
        """
        try:
            opened = loads.open_load(
                job_id=self.job_id,
                mode=LoadMode.OVERWRITE if self.overwrite else LoadMode.APPEND,
                prefix=self.options.prefix,
                keyspace_id=self.options.opened.keyspace_id,
                stream_batch=self.stream_batch,
                description=self.options.description or "Spark",
                timeout_ms=self.options.load_timeout_ms,
            )
        except UnknownKeyspaceError as error:
            raise named(error, self.options.opened) from error
        is_open = opened.state is LoadState.OPEN or not opened.load_id
        if not is_open and (opened.state is LoadState.ABORTED or self.stream_batch is None):
            raise LoadClosedError(load_id=opened.load_id, state=opened.state.name.lower())
        return opened

    def loads(self) -> LoadsClient:
        return loads_of(self.options, self.options.timeout_s)

    def cluster(self) -> Cluster:
        return cluster_of(self.options)


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """The rows that an attempt staged. ``load_id`` 0: none. ``applied``: its micro-batch had been
    committed before, by load ``load_id`` if still known, and no row was staged now.
    ``partition_ids`` and ``rows_of`` are columns: int32 and int64.
    """

    job_id: str
    load_id: int
    attempt: int
    task: int
    opened: OpenedKeyspace = DEFAULT_OPENED
    stream_batch: StreamBatch | None = None
    applied: bool = False
    partition_ids: bytes = b""
    rows_of: bytes = b""
    rows: int = 0
    bytes: int = 0
    bad_rows: int = 0


@dataclass(kw_only=True)
class Commit:
    """Commits a job's load, and waits until it is readable."""

    job: Job
    reports: Sequence[TaskReport]
    out: TextIO = field(default_factory=lambda: stream_of(stderr=True))

    def run(self) -> None:
        """Commit the rows in the reports.

        Raises:
            InvalidArgumentError: keys repeat, and there is no orderBy; the load is aborted.
            LoadClosedError: the load was aborted meanwhile, by its timeout or an operator.
            LoadIncompleteError: staged rows are missing.
            UnknownFateError: the commit was lost with all coordinators, or its answer was lost.
            UnavailableError: it was not served in time; the text says the state of the load.
        """
        self._commit(sorted(self.reports, key=lambda report: report.task))
        bad_rows = sum(report.bad_rows for report in self.reports)
        if bad_rows:
            self._say(
                f"{bad_rows:,} bad {'row was' if bad_rows == 1 else 'rows were'} set aside in "
                f"{self.job.options.bad_records_path}"
            )

    def _commit(self, reports: Sequence[TaskReport]) -> None:
        staged = [report for report in reports if report.load_id and not report.applied]
        applied = [report.load_id for report in reports if report.applied]
        if not (staged or applied or self.job.overwrite):
            return
        with self.job.loads() as loads:
            if applied:
                self._wait_for_applied(loads, max(applied), staged)
                return
            load_id = staged[0].load_id if staged else self._open_empty(loads)
            if not load_id:
                return
            with closing(LoadKeepalive(self.job.options, load_id)):  # the tasks are over
                try:
                    self._prepare(load_id, staged)
                except KoinonError as error:
                    with suppress(KoinonError):
                        loads.abort(load_id, reason=_reason(error))
                    raise
                rows_of = _rows_of(staged)
                loads.commit(
                    load_id,
                    attempts=[report.attempt for report in staged],
                    partition_ids=np.flatnonzero(rows_of).tolist(),
                    rows=int(rows_of.sum()),
                    size_bytes=sum(report.bytes for report in staged),
                )
            self._wait(loads, load_id)

    def _open_empty(self, loads: LoadsClient) -> int:
        """Open a load that only deletes; return 0 if it was applied before."""
        opened = self.job.open(loads)
        if opened.load_id and opened.state is not LoadState.OPEN:
            self._wait(loads, opened.load_id)
            return 0
        return opened.load_id

    def _wait_for_applied(
        self, loads: LoadsClient, load_id: int, staged: Sequence[TaskReport]
    ) -> None:
        """Wait for the load that committed the micro-batch before. Rows that some tasks staged
        before they could know are dropped.
        """
        for other in {report.load_id for report in staged} - {load_id}:
            with suppress(LoadClosedError):
                loads.abort(other, reason="its micro-batch has been applied by another load")
        if load_id:
            self._wait(loads, load_id)

    def _prepare(self, load_id: int, staged: Sequence[TaskReport]) -> None:
        if not staged:
            return
        rows_of = _rows_of(staged)
        with self.job.cluster() as cluster:
            duplicates = prepare(
                cluster,
                load_id=load_id,
                attempts=[report.attempt for report in staged],
                rows_of={p: int(rows_of[p]) for p in np.flatnonzero(rows_of).tolist()},
                duplicates_allowed=bool(self.job.options.order_column),
            )
        if duplicates.rows:
            keys = ", ".join(map(_shown, duplicates.keys))
            raise InvalidArgumentError(
                field=f"column {self.job.plan.key_name}",
                reason=f"{duplicates.rows} rows have the key of another row, such as {keys}; "
                "nothing was written. Leave one row per key, or name by option orderBy the "
                "column whose greatest value is to stay",
            )

    def _wait(self, loads: LoadsClient, load_id: int) -> None:
        """Return when the load is merged; log the progress if that takes long.

        Raises:
            UnavailableError: its merge does not advance, or the coordinators do not answer.
            UnknownFateError, LoadClosedError: its commit was lost, with all coordinators.
        """
        poll_s, began = POLL_S, time.monotonic()
        moved, said, merged = began, began + SILENT_S - SAY_EVERY_S, -1
        while True:
            try:
                load = loads.get(load_id)
            except UnavailableError as error:
                raise UnavailableError(
                    reason=f"load {load_id} is committed, and will be merged; the coordinators do "
                    f"not say how far it is: {error}. `koinon admin loads` shows it"
                ) from error
            if load is None:
                raise UnknownFateError(
                    reason=f"load {load_id} was committed, and the coordinators know nothing of it "
                    "any more: were they made anew? Write the rows again"
                )
            if load.state is LoadState.DONE:
                return
            # only coordinators that were made anew answer so
            if load.state is not LoadState.MERGING:
                raise LoadClosedError(
                    load_id=load_id, state=load.state.name.lower(), reason=load.reason or ""
                )
            now = time.monotonic()
            if load.partitions_merged > merged:
                merged, moved = load.partitions_merged, now
            if now - moved > self.job.options.merge_timeout_s:
                raise UnavailableError(
                    reason=f"load {load_id} is committed, but its merge has not advanced for "
                    f"{self.job.options.merge_timeout_s:g} s (option mergeTimeout): it "
                    f"continues when the partitions that it waits for are served. "
                    "`koinon admin loads` shows it"
                )
            if now - said > SAY_EVERY_S:
                self._say(_progress(load))
                said = now
            time.sleep(poll_s)
            poll_s = min(POLL_S_MAX, 1.5 * poll_s)

    def _say(self, text: str) -> None:
        self.out.write(f"koinon: {printable(text)}\n")
        self.out.flush()


def abort(job: Job, reports: Sequence[TaskReport], reason: str) -> None:
    """Abort the job's load, unless it is committed. Raises nothing: a load that cannot be aborted
    now is aborted by its timeout.
    """
    timeout_s = min(ABORT_TIMEOUT_S, job.options.timeout_s)
    with (
        suppress(KoinonError),
        loads_of(job.options, timeout_s) as loads,
    ):
        load_id = next((r.load_id for r in reports if r.load_id and not r.applied), 0)
        if not load_id and job.stream_batch is None:
            load_id = job.open(loads).load_id
        if load_id:
            loads.abort(load_id, reason=reason)


def _rows_of(staged: Sequence[TaskReport]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the total rows in the reports, by partition."""
    partition_ids = [np.frombuffer(report.partition_ids, np.int32) for report in staged]
    count = max((int(ids[-1]) + 1 for ids in partition_ids if len(ids)), default=0)
    total = np.zeros(count, np.int64)
    for ids, report in zip(partition_ids, staged, strict=True):
        total[ids] += np.frombuffer(report.rows_of, np.int64)
    return total


def _progress(load: LoadView) -> str:
    return (
        f"load {load.load_id}: {load.partitions_merged:,} of {load.partitions:,} partitions "
        f"merged, {load.rows:,} rows in all"
    )


def _reason(error: KoinonError) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _shown(key: bytes) -> str:
    text = key.decode("utf-8", "replace")
    return repr(text) if text.isprintable() and text.encode() == key else f"0x{key.hex()}"
