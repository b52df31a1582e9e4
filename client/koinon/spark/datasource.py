"""The data source ``koinon``: Spark's classes, thin over tasks, jobs and reads.

Spark pickles writers and readers at planning and runs their methods in Python workers of their own:
tasks in executors, ``commit`` and ``abort`` on the driver. They hold what was given, and no
connection.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any, Final

import numpy as np
from pyspark import TaskContext
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import datasource as spark_datasource
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from koinon.core.scanning import partitions_with
from koinon.spark.cluster import cluster_of, opened
from koinon.spark.encoding.typed import fields_of
from koinon.spark.options import ReadOptions, read_options, write_options
from koinon.spark.reading import (
    COUNTS,
    METADATA,
    count_partitions,
    read_keys,
    read_partitions,
)
from koinon.spark.writing import jobs
from koinon.spark.writing.jobs import Commit, Job, TaskReport
from koinon.spark.writing.planning import Field, plan_rows
from koinon.spark.writing.tasks import run_task
from koinon_proto.contract.bulk_loads import StreamBatch
from koinon_proto.contract.errors import ConfigurationError, InternalError
from koinon_proto.contract.table import MAX_KEY_BYTES

FORMAT: Final = "koinon"
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
SCANS_APART: Final = hasattr(DataSourceReader, "pushLimit")
"""Spark keeps what a reader has planned with the scan that it is for. Spark 4.1 to 4.3 keep it with
the data source: after one query with a filter, queries of the same DataFrame without one, and the
other filters of a union or a join, would read what the last filter left. Such a Spark gets readers
that take no filter; option ``keys`` names keys there.
"""
KEYS_PER_TASK: Final = 10_000
_DDL: Final = {
    "key": "binary",
    "value": "binary",
    "partition_id": "int",
    "version": "long",
    "expires_at": "timestamp",
    "rows": "long",
}
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
_RUN: Final = "spark.jobGroup.id"
"""A stream's run sets its jobs' group to its own id."""

_StreamBases: tuple[type, ...]
if hasattr(spark_datasource, "DataSourceStreamArrowWriter"):
    _StreamBases = (spark_datasource.DataSourceStreamArrowWriter,)
else:  # Spark 4.0 hands record batches to whatever is an Arrow writer, in streams as well
    _StreamBases = (DataSourceArrowWriter, DataSourceStreamWriter)


def register(spark: SparkSession) -> None:
    """Make ``format("koinon")`` known to a session. Filters on ``key`` are pushed down from then
    on, where Spark does that right (``SCANS_APART``), unless the session's configuration says
    otherwise.

    A Python thread that writes without a query of its own calls it again: Spark looks for the
    source of a write in the thread's active session, which a new thread has not.
    """
    if SparkSession.getActiveSession() is None:
        spark.createDataFrame([], "nothing int")  # the call that makes a session active here
    try:
        spark.dataSource.register(KoinonDataSource)
    except AnalysisException as error:  # Spark 4.0, where it has found the source by itself
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
    with suppress(Exception):  # a Spark that knows no such setting, or cannot list what is set
        known = SCANS_APART and spark.conf.get(PUSHDOWN) is not None
        if known and PUSHDOWN not in spark.conf.getAll:
            spark.conf.set(PUSHDOWN, "true")


class KoinonDataSource(DataSource):
    """Reads and writes a cluster's records; see ``koinon.spark.options``. Where a read, a write or
    a micro-batch is planned, the keyspace's name is looked up, and never again for that job.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        options = read_options(self.options)
        if options.value_encoding:
            raise ConfigurationError(
                reason="option valueEncoding: say which fields of the rows are read, and their "
                "types: .schema(orders.schema), or .schema('o_orderkey long, …')"
            )
        if options.counts:
            names = list(COUNTS)
        else:
            names = ["key"] if options.keys_only else ["key", "value"]
            names += METADATA if options.metadata else ()
        return ", ".join(f"{name} {_DDL[name]}" for name in names)

    def reader(self, schema: StructType) -> KoinonReader:
        options = read_options(self.options)
        offered = COUNTS if options.counts else ("key", "value", *METADATA)
        names, fields = _read_columns(schema, offered, fields=bool(options.value_encoding))
        return KoinonReader(opened(options), names, fields)

    def writer(self, schema: StructType, overwrite: bool) -> KoinonWriter:
        job = self._job(schema, overwrite)
        with job.cluster() as cluster:
            cluster.target()  # complain now, not in a task
        return KoinonWriter(job)

    def streamWriter(self, schema: StructType, overwrite: bool) -> KoinonStreamWriter:  # noqa: N802
        return KoinonStreamWriter(self._job(schema, overwrite))

    def _job(self, schema: StructType, overwrite: bool) -> Job:
        fields: list[Field] = [(field.name, field.dataType.jsonValue()) for field in schema.fields]
        options = write_options(self.options, overwrite=overwrite)
        return Job(
            job_id=f"spark:{uuid.uuid4()}",
            plan=plan_rows(options, fields),
            options=opened(options),
            overwrite=overwrite,
        )


@dataclass
class Staged(WriterCommitMessage):
    """A task's message to the driver."""

    report: TaskReport


class KoinonWriter(DataSourceArrowWriter):
    """A batch write: one load, all of it or nothing."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def write(self, iterator: Iterator[Any]) -> Staged:
        return Staged(run_task(self.job, _task_context().partitionId(), iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        Commit(job=self.job, reports=_all_reports(messages)).run()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        jobs.abort(self.job, _reports(messages), "the Spark job failed")


class KoinonStreamWriter(*_StreamBases):  # type: ignore[misc]
    """A streaming sink: a load per micro-batch, applied once however often it is replayed."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def write(self, iterator: Iterator[Any]) -> Staged:
        context = _task_context()
        query, batch = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
        if not query or not batch:
            raise InternalError(reason=f"Spark does not say in {_QUERY} and {_BATCH} what it runs")
        job = replace(
            self.job,
            job_id=f"stream:{query}:{batch}:{context.getLocalProperty(_RUN) or ''}",
            stream_batch=StreamBatch(query, int(batch)),
        )
        return Staged(run_task(job, context.partitionId(), iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        reports = _all_reports(messages)
        others = {r.stream_batch.batch_id for r in reports if r.stream_batch} - {batchId}
        if others:
            raise InternalError(reason=f"batch {batchId} is committed with rows of {others}")
        if reports:
            Commit(job=self._job_of(reports[0]), reports=reports).run()

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        reports = _reports(messages)
        if reports:
            reason = f"micro-batch {batchId} failed"
            jobs.abort(self._job_of(reports[0]), reports, reason)

    def _job_of(self, report: TaskReport) -> Job:
        """Spark commits with another instance, which knows the batch from the tasks only, and may
        have found another keyspace by its name.
        """
        options = replace(self.job.options, opened=report.opened)
        return replace(
            self.job, job_id=report.job_id, stream_batch=report.stream_batch, options=options
        )


# --- reading ------------------------------------------------------------------------------------


@dataclass
class Partitions(InputPartition):
    """Whole partitions; their owners are looked up when they are read."""

    partition_ids: tuple[int, ...]


@dataclass
class Keys(InputPartition):
    """Single keys."""

    keys: tuple[bytes, ...]


class KoinonReader(DataSourceReader):
    """Reads records of all partitions, or those of the keys that options or a filter name."""

    def __init__(self, options: ReadOptions, names: Sequence[str], fields: Any = None) -> None:
        """``fields``: those of the names that are fields of the values, an Arrow schema."""
        self.options = options
        self.names = tuple(names)
        self.fields = fields
        self.keys: frozenset[bytes] | None = (
            None if options.keys is None else frozenset(options.keys)
        )
        """Only these; None: all."""

    @property
    def pushFilters(self) -> _Pushdown:  # noqa: N802
        return _Pushdown(self)

    def partitions(self) -> list[InputPartition]:
        if self.keys is not None:
            keys = sorted(
                key
                for key in self.keys
                if key.startswith(self.options.prefix) and 0 < len(key) <= MAX_KEY_BYTES
            )
            return [
                Keys(tuple(keys[at : at + KEYS_PER_TASK]))
                for at in range(0, len(keys), KEYS_PER_TASK)
            ]
        by_owner: dict[str, list[int]] = {}
        with cluster_of(self.options) as cluster:
            routing, known = cluster.routing(), cluster.target().partitioner
        asked: Sequence[int] = known.partition_ids  # counts tell of each, if it has none
        if not self.options.counts:
            asked = partitions_with(self.options.prefix, known)
        for partition_id in asked:
            by_owner.setdefault(routing.owner_of[partition_id], []).append(partition_id)
        cut = [
            np.array_split(mine, -(-len(mine) // self.options.partitions_per_task))
            for mine in by_owner.values()
        ]
        in_turn = chain.from_iterable(zip_longest(*cut))  # neighbours ask different nodes
        return [Partitions(tuple(ids.tolist())) for ids in in_turn if ids is not None]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if isinstance(partition, Keys):
            return read_keys(self.options, self.names, partition.keys, self.fields)
        if isinstance(partition, Partitions) and self.options.counts:
            return count_partitions(self.options, self.names, partition.partition_ids)
        if isinstance(partition, Partitions):
            return read_partitions(self.options, self.names, partition.partition_ids, self.fields)
        return iter(())  # what Spark makes of no partitions


class _Pushdown:
    """``pushFilters`` of a reader that takes filters where Spark offers them.

    With its setting off, Spark refuses readers that implement the method, which it knows by the
    function behind it; this one serves either way.
    """

    def __init__(self, reader: KoinonReader) -> None:
        self._reader = reader
        self.__func__ = getattr(DataSourceReader, "pushFilters", None)

    def __call__(self, filters: Sequence[Any]) -> list[Any]:
        """Take the filters that name keys, where that is right; return the others."""
        if not SCANS_APART:
            return list(filters)
        left = []
        for given in filters:
            keys = _keys_named(given)
            if keys is None:
                left.append(given)
            else:
                known = self._reader.keys
                self._reader.keys = keys if known is None else known & keys
        return left


def _keys_named(given: Any) -> frozenset[bytes] | None:
    """Return the keys that a filter leaves; None if it is of another kind."""
    if getattr(given, "attribute", None) != ("key",):
        return None
    kind = type(given).__name__
    if kind in ("EqualTo", "EqualNullSafe") and isinstance(given.value, (bytes, bytearray)):
        return frozenset((bytes(given.value),))
    if kind == "In" and all(isinstance(key, (bytes, bytearray)) for key in given.value):
        return frozenset(map(bytes, given.value))
    return None


def _read_columns(
    schema: StructType, offered: Sequence[str], *, fields: bool
) -> tuple[list[str], Any]:
    """Return the columns to be read, and which of them are fields of the values (an Arrow schema;
    None: none). With ``fields``, all are that are not the record's own.

    Raises:
        ConfigurationError: a column that there is not, or of another type.
    """
    in_values = []
    for field in schema.fields:
        if field.name not in offered and fields:
            in_values.append(field)
            continue
        if field.name not in offered:
            raise ConfigurationError(
                reason=f"schema: there is no column {field.name!r} among {', '.join(offered)}"
            )
        wanted = _DDL[field.name]
        if field.dataType.simpleString() not in (wanted, wanted.replace("long", "bigint")):
            raise ConfigurationError(
                reason=f"schema: column {field.name!r} has type {wanted}, "
                f"not {field.dataType.simpleString()}; cast it after reading"
            )
    try:
        typed = fields_of([(field.name, field.dataType.jsonValue()) for field in in_values])
    except ConfigurationError as error:
        raise ConfigurationError(reason=f"schema: {error.reason}") from error
    return [field.name for field in schema.fields], typed if in_values else None


# --- what both share ----------------------------------------------------------------------------


def _task_context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise InternalError(reason="rows are written outside of a Spark task")
    return context


def _reports(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport]:
    return [message.report for message in messages if isinstance(message, Staged)]


def _all_reports(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport]:
    """Return the reports of a job that is committed: none may be missing.

    Raises:
        InternalError: a task has not reported.
    """
    reports = _reports(messages)
    if len(reports) < len(messages):
        missing = len(messages) - len(reports)
        raise InternalError(reason=f"{missing} tasks have not said what they staged")
    return reports
