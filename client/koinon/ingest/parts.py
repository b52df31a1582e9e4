"""A write whose tasks read their rows themselves (``opened_rows``), without Spark's data source.

Spark schedules, retries and cancels the tasks; staging and commit are the same as in the data
source.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from koinon.ingest.failures import of_commit
from koinon.ingest.opened_rows import Part
from koinon.spark.options import WriteOptions
from koinon.spark.writing.jobs import Commit, Job, TaskReport
from koinon.spark.writing.planning import Field, RowPlan, plan_rows
from koinon.spark.writing.tasks import run_task
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError


def save(
    context: Any,
    parts: Sequence[Part],
    fields: Sequence[Field],
    options: WriteOptions,
    *,
    overwrite: bool,
) -> None:
    """Write the rows of all parts by tasks of this SparkContext; return when they are readable.

    Raises:
        ConfigurationError: an option is wrong, or names a missing column, or one of a wrong type.
        KoinonError: the commit failed.
        Exception: Spark's error for a failed task.
    """
    task = _Task.of(fields, options, overwrite=overwrite)
    numbered = list(enumerate(parts))
    reports = context.parallelize(numbered, len(parts)).map(task).collect() if parts else []
    try:
        Commit(job=task.job, reports=reports, out=io.StringIO()).run()
    except KoinonError as error:
        raise of_commit(error) from error


@dataclass(frozen=True, kw_only=True)
class _Task:
    """Stages a part. It reads only columns of ``job``'s plan, unless bad rows are to be shown."""

    job: Job
    whole: RowPlan

    @classmethod
    def of(cls, fields: Sequence[Field], options: WriteOptions, *, overwrite: bool) -> _Task:
        whole = plan_rows(options, fields)
        needed = whole
        if whole.value_column >= 0 and not options.bad_records_path:
            needed = plan_rows(options, [fields[at] for at in whole.used])
        job_id = f"spark:{uuid.uuid4()}"
        job = Job(job_id=job_id, options=options, plan=needed, overwrite=overwrite)
        return cls(job=job, whole=whole)

    def __call__(self, numbered: tuple[int, Part]) -> TaskReport:
        task, part = numbered
        try:
            return run_task(self.job, task, part.batches(self.job.plan.names))
        except InvalidArgumentError:
            if self.job.plan.names == self.whole.names:
                raise
            # Bad rows are shown with all their columns.
            job = replace(self.job, plan=self.whole)
            return run_task(job, task, part.batches(self.whole.names))
