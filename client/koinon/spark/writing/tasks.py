"""Carries out one task of a write, from record batches to staged chunks.

Columns become keys, values and orders batch by batch; rows that cannot be stored are refused or set
aside; the others are buffered, and staged lot by lot. The load is opened with the first rows, and
touched while the task is running.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from koinon.operate.loads_client import LoadState
from koinon.spark.cluster import Cluster
from koinon.spark.encoding.faults import (
    BadRows,
    Limits,
    Refusing,
    SettingAside,
    without,
)
from koinon.spark.writing.chunk_sender import ChunkSender
from koinon.spark.writing.chunking import Batcher
from koinon.spark.writing.jobs import Job, TaskReport
from koinon.spark.writing.lifetimes import Lifetimes
from koinon.spark.writing.load_keepalive import LoadKeepalive
from koinon.spark.writing.order_values import orders_of
from koinon.spark.writing.rows import encode_rows, faults_of, lifetimes_of, limits_of
from koinon_proto.process import memory

log = logging.getLogger(__name__)

_KEPT_BYTES: Final = 1 << 30
SLICE_ROWS: Final = 65_536
SLICE_BYTES: Final = 16 * 1024 * 1024


def run_task(job: Job, task: int, batches: Iterable[Any]) -> TaskReport:
    """Stage the rows of a task under a new attempt; return the report for the commit.

    Raises:
        InvalidArgumentError: rows cannot be stored; the error names the column.
        LoadClosedError: the load has ended meanwhile.
        KoinonError: the cluster refused with a final error, or did not serve in time.
    """
    with _freed_memory_kept(), _Task(job, task) as running:
        return running.run(batches)


@contextlib.contextmanager
def _freed_memory_kept() -> Iterator[None]:
    """A context in which the C library keeps freed memory in the process, up to ``_KEPT_BYTES``,
    and returns it at the end. A task constantly allocates and frees columns of up to some 64 MB;
    page faults on fresh memory were a fifth of a load's time. (Arrow's own pool always returns
    memory at once.) Does nothing without glibc.
    """
    if not memory.keep_freed(_KEPT_BYTES):
        yield
        return
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)
        memory.give_back()


class _Task:
    """One attempt of a task."""

    def __init__(self, job: Job, task: int) -> None:
        self._job = job
        self._task = task
        self._attempt = secrets.randbits(63) + 1
        self._cluster = job.cluster()
        self._staging: _Staging | None = None  # from the first rows on, unless applied
        self._applied = False  # the micro-batch had been committed before
        self._load_id = 0  # 0 until the load is opened
        self._rows_read = 0
        self._bad_count = 0  # rows set aside
        self._bad = self._bad_rows()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if self._staging is not None:
                self._staging.close(error)
        finally:
            self._cluster.close()
            if error is not None:
                try:
                    self._bad.discard()
                except Exception:  # the original error says more
                    log.warning(
                        "the file of a failed attempt's bad rows was not deleted", exc_info=True
                    )

    def run(self, batches: Iterable[Any]) -> TaskReport:
        target = self._cluster.target()
        options, plan = self._job.options, self._job.plan
        keyspace = target.settings(self._cluster.routing())
        limits, lifetimes = limits_of(plan, options, keyspace), lifetimes_of(options, keyspace)
        batcher = Batcher(
            target.partitioner,
            memory_bytes=options.memory_bytes,
            expires_at_ms=lifetimes.unnamed_ms,
        )
        for batch in _slices(batches):
            if not self._rows_read:
                self._open()  # from now on the load is touched, however slowly the rows come
            self._add(batch, batcher, limits, lifetimes)
            if batcher.full:
                self._stage(batcher)
        self._stage(batcher)
        if self._staging is not None:
            self._staging.stager.finish()
        self._bad.close()
        return self._report(batcher)

    def _add(self, batch: Any, batcher: Batcher, limits: Limits, lifetimes: Lifetimes) -> None:
        """Encode a batch's rows and buffer them."""
        options, plan = self._job.options, self._job.plan
        keys, values = encode_rows(batch, plan, options)
        orders = None
        if plan.order_column >= 0:
            orders = orders_of(batch.column(plan.order_column), plan.names[plan.order_column])
        expiries = lifetimes.expiries_of(batch, plan)
        faults = faults_of(batch, plan, keys, values, limits, lifetimes)
        if faults:
            self._bad.take(batch, faults, self._rows_read)
            fine = without(faults, len(batch))
            self._bad_count += len(batch) - len(fine)
            keys, values = keys.take(fine), values.take(fine)
            orders = None if orders is None else orders[fine.to_numpy()]
            expiries = None if expiries is None else expiries[fine.to_numpy()]
        self._rows_read += len(batch)
        batcher.add(keys, values, orders, expiries)

    def _stage(self, batcher: Batcher) -> None:
        """Stage the buffered rows; drop them if the micro-batch was applied before."""
        for chunk in batcher.chunks():
            if self._staging is None:
                return  # the micro-batch was applied before
            self._staging.stager.add(chunk)

    def _open(self) -> None:
        with self._job.loads() as loads:
            opened = self._job.open(loads)
        self._load_id = opened.load_id
        if not opened.load_id or opened.state is not LoadState.OPEN:
            self._applied = True
            return
        stager = ChunkSender(
            self._cluster,
            load_id=opened.load_id,
            attempt=self._attempt,
            table_version=opened.table_version,
            bytes_per_second_max=self._job.options.bytes_per_second_max,
        )
        self._staging = _Staging(self._job, self._cluster, stager, opened.load_id, self._attempt)

    def _report(self, batcher: Batcher) -> TaskReport:
        staged = self._staging is not None
        partition_ids = np.flatnonzero(batcher.rows_of) if staged else np.empty(0, np.int64)
        return TaskReport(
            job_id=self._job.job_id,
            load_id=self._load_id,
            attempt=self._attempt,
            task=self._task,
            opened=self._job.options.opened,
            stream_batch=self._job.stream_batch,
            applied=self._applied,
            partition_ids=partition_ids.astype(np.int32).tobytes(),
            rows_of=batcher.rows_of[partition_ids].tobytes(),
            rows=int(batcher.rows_of[partition_ids].sum()),
            bytes=batcher.bytes if staged else 0,
            bad_rows=self._bad_count,
        )

    def _bad_rows(self) -> BadRows:
        path = self._job.options.bad_records_path
        if not path:
            return Refusing()
        folder = self._job.job_id.replace(":", "-")
        return SettingAside(path, f"{folder}/task-{self._task:05d}-{self._attempt:016x}.jsonl")


class _Staging:
    """A chunk sender, and the thread that keeps its load open."""

    def __init__(
        self, job: Job, cluster: Cluster, stager: ChunkSender, load_id: int, attempt: int
    ) -> None:
        self._cluster = cluster
        self.stager = stager
        self._touching = LoadKeepalive(
            job.options,
            load_id,
            attempt=attempt,
            staged=lambda: (stager.rows, stager.bytes),
            on_closed=stager.fail,
        )

    def close(self, error: BaseException | None) -> None:
        """End all threads; with an error, abort the messages in flight."""
        try:
            if error is not None:
                self.stager.fail(error)
                self._cluster.close()
            self.stager.close()
        finally:
            self._touching.close()


def _slices(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield record batches of bounded size."""
    for batch in batches:
        rows = batch.num_rows
        if not rows:
            continue
        step = min(SLICE_ROWS, max(1, rows * SLICE_BYTES // max(1, batch.nbytes)))
        for at in range(0, rows, step):
            yield batch.slice(at, step)
