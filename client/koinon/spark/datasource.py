"""The data source ``koinon``: Spark's classes, which only call tasks, jobs and reads.

Spark pickles writers and readers when it plans, and runs their methods in Python workers: tasks in
executors, ``commit`` and ``abort`` on the driver. They hold their arguments and no connection.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow as pa
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
from koinon.spark.encoding.typed import RowForm, field_of
from koinon.spark.options import PERMISSIVE, ReadOptions, read_options, write_options
from koinon.spark.reading import (
    RECORD,
    ReadColumns,
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
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.contract.table import MAX_KEY_BYTES

FORMAT: Final = "koinon"
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
SCANS_APART: Final = hasattr(DataSourceReader, "pushLimit")
"""True if this Spark keeps a reader's plan with the scan it is for. Spark 4.1 to 4.3 keep it with
the data source: after one query with a filter, queries of the same DataFrame without one, and the
other filters of a union or a join, would read only what the last filter left. Readers for such a
Spark take no filter; option ``keys`` names keys there.
"""
KEYS_PER_TASK: Final = 10_000
_METADATA: Final = ("_partition_id", "_version", "_expires_at")
_COUNTS: Final = ("partition_id", "rows")
_DDL: Final = {
    "key": "binary",
    "value": "binary",
    "partition_id": "int",
    "version": "bigint",
    "expires_at": "timestamp",
    "rows": "bigint",
}
"""Spark's types of the columns in ``reading.RECORD``."""
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
_EXECUTION, _ROOT_EXECUTION = "spark.sql.execution.id", "spark.sql.execution.root.id"
_RUN: Final = "spark.jobGroup.id"
"""The property with the group id of Spark's jobs; in a streaming query it is the run's id."""

_StreamBases: tuple[type, ...]
if hasattr(spark_datasource, "DataSourceStreamArrowWriter"):
    _StreamBases = (spark_datasource.DataSourceStreamArrowWriter,)
else:  # Spark 4.0 passes record batches to any Arrow writer, in streams as well
    _StreamBases = (DataSourceArrowWriter, DataSourceStreamWriter)


def register(spark: SparkSession) -> None:
    """Register ``format("koinon")`` with a session. Filters on ``key`` are pushed down from then
    on, if Spark does so correctly (``SCANS_APART``) and the session's configuration does not forbid
    it.

    A new Python thread that writes without a query of its own must call this again: Spark looks for
    a write's source in the thread's active session, and a new thread has none.
    """
    if SparkSession.getActiveSession() is None:
        # this call makes the session active in this thread
        spark.createDataFrame([], "nothing int")
    try:
        spark.dataSource.register(KoinonDataSource)
    except AnalysisException as error:  # Spark 4.0, if it has found the source by itself
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
    with suppress(Exception):  # a Spark without this setting, or one that cannot list its settings
        known = SCANS_APART and spark.conf.get(PUSHDOWN) is not None
        if known and PUSHDOWN not in spark.conf.getAll:
            spark.conf.set(PUSHDOWN, "true")


def count(spark: SparkSession, *, coordinators: str, prefix: str = "", **options: str) -> int:
    """Return the number of live records whose keys begin with ``prefix``. A record that exists
    during the whole call counts once; expired and deleted records never count, even while they
    still take disk space. The call costs less than reading keys; ``DataFrame.count()`` reads
    values, because Spark does not tell a Python data source which columns it needs.

    Args:
        coordinators: ``host:port,…``.
        options: further options of reads: ``keyspace``, ``timeout``, ``tlsBundle``, ``tokenFile``.

    Raises:
        ConfigurationError: an option is wrong; the query raises it in Spark's form.
    """
    reader = spark.read.format("koinon").options(coordinators=coordinators, counts="true")
    if prefix:
        reader = reader.option("prefix", prefix)
    counted = reader.options(**options).load().agg({"rows": "sum"}).first()
    return int(counted[0] or 0) if counted is not None else 0


class KoinonDataSource(DataSource):
    """Reads and writes a cluster's records; docs/spark.md lists the options. The keyspace's name is
    looked up once, when a read, a write or a micro-batch is planned.
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
            names = list(_COUNTS)
        else:
            names = ["key"] if options.keys_only else ["key", "value"]
            names += _METADATA if options.metadata else ()
        return ", ".join(f"{name} {_DDL[name.removeprefix('_')]}" for name in names)

    def reader(self, schema: StructType) -> KoinonReader:
        options = read_options(self.options)
        wanted = _read_columns(schema, options)
        return KoinonReader(opened(options), wanted)

    def writer(self, schema: StructType, overwrite: bool) -> KoinonWriter:
        job = self._job(schema, overwrite)
        with job.cluster() as cluster:
            cluster.target()  # raise now, not in a task
        return KoinonWriter(job)

    def streamWriter(self, schema: StructType, overwrite: bool) -> KoinonStreamWriter:  # noqa: N802
        job = self._job(schema, overwrite)
        options = job.options
        if options.transaction is not None:
            raise ConfigurationError(reason="option txnAppId: streams number their batches")
        if overwrite and not (options.prefix or options.own_keyspace):
            raise ConfigurationError(
                reason="output mode complete replaces at each batch all keys that the query owns: "
                "name them by option prefix, or give ownKeyspace 'true' if everything in keyspace "
                f"{options.keyspace or DEFAULT!r} is the query's"
            )
        return KoinonStreamWriter(job)

    def _job(self, schema: StructType, overwrite: bool) -> Job:
        fields: list[Field] = [(field.name, field.dataType.jsonValue()) for field in schema.fields]
        options = write_options(self.options, overwrite=overwrite)
        return Job(
            job_id=f"spark:{uuid.uuid4()}",
            plan=plan_rows(options, fields),
            options=opened(options),
            overwrite=overwrite,
            stream_batch=options.transaction,
        )


@dataclass
class Staged(WriterCommitMessage):
    """A task's message to the driver."""

    report: TaskReport


class KoinonWriter(DataSourceArrowWriter):
    """A batch write: one load, all rows or none."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def write(self, iterator: Iterator[Any]) -> Staged:
        context = _task_context()
        _refuse_new_table(context)
        return Staged(run_task(self.job, context.partitionId(), iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        Commit(job=self.job, reports=_all_reports(messages)).run()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        jobs.abort(self.job, _reports(messages), "the Spark job failed")


class KoinonStreamWriter(*_StreamBases):  # type: ignore[misc]
    """A streaming sink: one load for each micro-batch, applied once however often Spark
    replays it.
    """

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
        """Return the job of a task's report. Spark commits with another instance of this class,
        which knows the batch only from the tasks, and may have found another keyspace by its name.
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
    """Reads the records of all partitions, or of the keys in options or in a filter."""

    def __init__(self, options: ReadOptions, wanted: ReadColumns) -> None:
        self.options = options
        self.wanted = wanted
        self.keys: frozenset[bytes] | None = (
            None if options.keys is None else frozenset(options.keys)
        )
        """Keys to read; None: all."""

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
        # a count reports each partition, also those without records
        asked: Sequence[int] = known.partition_ids
        if not self.options.counts:
            asked = partitions_with(self.options.prefix, known)
        for partition_id in asked:
            by_owner.setdefault(routing.owner_of[partition_id], []).append(partition_id)
        cut = [
            np.array_split(mine, -(-len(mine) // self.options.partitions_per_task))
            for mine in by_owner.values()
        ]
        # neighbouring tasks read from different nodes
        in_turn = chain.from_iterable(zip_longest(*cut))
        return [Partitions(tuple(ids.tolist())) for ids in in_turn if ids is not None]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if isinstance(partition, Keys):
            return read_keys(self.options, self.wanted, partition.keys)
        if isinstance(partition, Partitions) and self.options.counts:
            return count_partitions(self.options, self.wanted, partition.partition_ids)
        if isinstance(partition, Partitions):
            return read_partitions(self.options, self.wanted, partition.partition_ids)
        return iter(())  # Spark calls ``read`` with None if there are no partitions


class _Pushdown:
    """The ``pushFilters`` method of a reader, for any setting of Spark's filter push-down.

    With push-down off, Spark refuses readers that override the method, which it detects by the
    underlying function; this object works in both cases.
    """

    def __init__(self, reader: KoinonReader) -> None:
        self._reader = reader
        self.__func__ = getattr(DataSourceReader, "pushFilters", None)

    def __call__(self, filters: Sequence[Any]) -> list[Any]:
        """Take the filters on keys if push-down is correct here; return the others."""
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
    """Return the keys that a filter selects; None if the filter is of another kind."""
    if getattr(given, "attribute", None) != ("key",):
        return None
    kind = type(given).__name__
    if kind in ("EqualTo", "EqualNullSafe") and isinstance(given.value, (bytes, bytearray)):
        return frozenset((bytes(given.value),))
    if kind == "In" and all(isinstance(key, (bytes, bytearray)) for key in given.value):
        return frozenset(map(bytes, given.value))
    return None


def _read_columns(schema: StructType, options: ReadOptions) -> ReadColumns:
    """Return the columns to read: those of the record, and fields of the rows in values.

    Raises:
        ConfigurationError: a column does not exist, or has a type that it cannot have.
    """
    own = _own_columns(options)
    corrupt = options.corrupt_column if options.value_encoding else None
    record, fields, made = {}, [], []
    for column in schema.fields:
        name, kind = column.name, column.dataType.simpleString()
        if name in own:
            _check_type(name, kind, (_DDL[own[name]],))
            record[name] = own[name]
            made.append(pa.field(name, RECORD[own[name]], nullable=column.nullable))
            continue
        if not options.value_encoding:
            _refuse(f"there is no column {name!r} among {', '.join(own)}")
        if name == corrupt:
            _check_type(name, kind, ("string", "binary"))
        try:
            made.append(field_of(name, column.dataType.jsonValue(), nullable=column.nullable))
        except ConfigurationError as error:
            _refuse(error.reason)
        fields += [made[-1]] if name != corrupt else []
        if options.malformed_mode == PERMISSIVE and not column.nullable:
            _refuse(f"column {name!r} is NOT NULL: mode permissive makes nulls of malformed values")
    form = None
    if len(record) < len(made):
        form = RowForm(
            fields=pa.schema(fields),
            encoding=options.value_encoding,
            mode=options.malformed_mode,
            corrupt=next((field for field in made if field.name == corrupt), None),
        )
    return ReadColumns(schema=pa.schema(made), record=record, rows=form)


def _own_columns(options: ReadOptions) -> dict[str, str]:
    """Return the columns of the record itself: their names, each with its name in RECORD. If values
    are read as rows, these columns have special names and are included only on request, since a
    row's field may have any name.
    """
    if options.counts:
        return {name: name for name in _COUNTS}
    own: tuple[str, ...] = ("key", "value", *_METADATA)
    if options.value_encoding:
        own = ("_key", "_value", *_METADATA) if options.metadata else ()
    return {name: name.removeprefix("_") for name in own}


def _check_type(name: str, kind: str, allowed: Sequence[str]) -> None:
    if kind not in allowed:
        _refuse(
            f"column {name!r} has type {' or '.join(allowed)}, not {kind}; cast it after reading"
        )


def _refuse(reason: str) -> NoReturn:
    raise ConfigurationError(reason=f"schema: {reason}")


# --- the tasks of both ----------------------------------------------------------------------------


def _task_context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise InternalError(reason="rows are written outside of a Spark task")
    return context


def _refuse_new_table(context: TaskContext) -> None:
    """Refuse to fill a table that Spark has just made: ``saveAsTable``, or ``writeTo(…).create()``.
    A Python data source can recognise it only by one sign: the write's execution is nested in
    another one. (An execution nested in a stream's is that of ``foreachBatch``.)

    Raises:
        ConfigurationError: the write makes a table.
    """
    execution, root = map(context.getLocalProperty, (_EXECUTION, _ROOT_EXECUTION))
    if root and execution != root and not context.getLocalProperty(_QUERY):
        raise ConfigurationError(
            reason="saveAsTable and writeTo make tables, which no data source in Python can have: "
            "write by save(), and query by CREATE TEMPORARY VIEW … USING koinon OPTIONS (…). "
            "Nothing was written"
        )


def _reports(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport]:
    return [message.report for message in messages if isinstance(message, Staged)]


def _all_reports(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport]:
    """Return the reports of a job that is committed; none may be missing.

    Raises:
        InternalError: a task has not reported.
    """
    reports = _reports(messages)
    if len(reports) < len(messages):
        missing = len(messages) - len(reports)
        raise InternalError(reason=f"{missing} tasks have not reported their staged rows")
    return reports
