"""Jobs without Spark: tasks are run here, one after the other, as Spark would run them."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from koinon.spark.options import write_options
from koinon.spark.reading import RECORD, ReadColumns
from koinon.spark.writing.jobs import Commit, Job, TaskReport
from koinon.spark.writing.planning import plan_rows
from koinon.spark.writing.tasks import run_task
from koinon_proto.contract.bulk_loads import StreamBatch
from tests.spark.fake_loads import LoadsCluster

Pairs = Iterable[tuple[bytes | None, bytes | None]]
_counter = iter(range(1, 1 << 30))


def make_job(
    fake: LoadsCluster,
    *,
    fields: list[tuple[str, Any]] | None = None,
    overwrite: bool = False,
    stream_batch: StreamBatch | None = None,
    job_id: str = "",
    **given: str,
) -> Job:
    """Return a job of columns ``key`` and ``value`` (binary), or of others."""
    options = write_options(
        {"coordinators": fake.seeds, "timeout": "5s", **given}, overwrite=overwrite
    )
    return Job(
        job_id=job_id or f"test-{next(_counter)}",
        options=options,
        plan=plan_rows(options, fields or [("key", "binary"), ("value", "binary")]),
        overwrite=overwrite,
        stream_batch=stream_batch,
    )


def record_columns(*names: str) -> ReadColumns:
    """Return the columns of a read of these, by the names that they have in ``RECORD``."""
    schema = pa.schema([(name, RECORD[name]) for name in names])
    return ReadColumns(schema=schema, record={name: name for name in names})


def batch_of(pairs: Pairs) -> Any:
    keys, values = zip(*pairs, strict=True)
    return pa.RecordBatch.from_pydict(
        {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
    )


def run(job: Job, task: int, *lots: Pairs) -> TaskReport:
    """Run a task over some record batches."""
    return run_task(job, task, [batch_of(lot) for lot in lots])


def commit(job: Job, *reports: TaskReport) -> str:
    """Commit what tasks reported; return what the driver says."""
    out = io.StringIO()
    Commit(job=job, reports=reports, out=out).run()
    return out.getvalue()


def pairs(first: int, last: int, value: str = "v") -> list[tuple[bytes, bytes]]:
    """Return rows whose keys are numbered."""
    return [(b"key-%06d" % i, f"{value}{i}".encode()) for i in range(first, last)]
