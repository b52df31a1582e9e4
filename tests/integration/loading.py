"""Bulk loads for tests on real processes: the data source's own parts, without Spark around them.

A job's tasks run as threads; the driver is the test. What Spark adds (processes that die, retries,
speculation) is tested in tests/spark.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from koinon.client import Client
from koinon.local import LocalCluster
from koinon.spark.options import write_options
from koinon.spark.writing.jobs import Commit, Job, TaskReport, abort
from koinon.spark.writing.planning import Field, plan_rows
from koinon.spark.writing.tasks import run_task
from koinon_proto.contract.errors import KoinonError
from tests.integration.copies import checksums, table_of

TASKS = 3
BATCH_ROWS = 500
FIELDS = (("key", "binary"), ("value", "binary"))

CHANGES = (*FIELDS, ("lives", "long"), ("gone", "boolean"))
TTL_MS = 3_600_000

Rows = dict[bytes, bytes]


def rows_of(name: str, count: int, version: int = 0) -> Rows:
    """Return rows whose values tell name, number and version."""
    return {
        b"%s/%06d" % (name.encode(), n): b"%d of %s/%d" % (version, name.encode(), n) + b"." * 60
        for n in range(count)
    }


class Load:
    """One job that writes these rows."""

    fields: Sequence[Field] = FIELDS

    def __init__(
        self, cluster: LocalCluster, rows: Rows, *, overwrite: bool = False, **options: str
    ) -> None:
        given = {
            "coordinators": cluster.coordinators,
            "memoryBytes": "1MiB",
            "timeout": "60s",
            **options,
        }
        parsed = write_options(given, overwrite=overwrite)
        self.rows = rows
        self.job = Job(
            job_id=str(uuid.uuid4()),
            options=parsed,
            plan=plan_rows(parsed, self.fields),
            overwrite=overwrite,
        )

    def stage(self) -> list[TaskReport]:
        """Run the tasks."""
        items = self.items()
        with ThreadPoolExecutor(TASKS) as pool:
            return list(pool.map(lambda n: self._task(n, items[n::TASKS]), range(TASKS)))

    def items(self) -> list[tuple[bytes, Any]]:
        return list(self.rows.items())

    def columns(self, items: list[tuple[bytes, Any]]) -> list[Any]:
        """Return some items as the columns of ``fields``."""
        return [pa.array([item[at] for item in items], pa.binary()) for at in (0, 1)]

    def _task(self, number: int, items: list[tuple[bytes, Any]]) -> TaskReport:
        names = [name for name, _ in self.fields]
        batches = (
            pa.record_batch(self.columns(items[at : at + BATCH_ROWS]), names)
            for at in range(0, len(items), BATCH_ROWS)
        )
        return run_task(self.job, number, batches)

    def commit(self, reports: list[TaskReport]) -> None:
        Commit(job=self.job, reports=reports).run()

    def save(self, between: Callable[[], None] = lambda: None) -> bool:
        """Do all that Spark does; return whether the load is committed, to the driver's knowledge.
        ``between`` is called before the commit.
        """
        reports: list[TaskReport] = []
        try:
            reports = self.stage()
            between()
            self.commit(reports)
        except KoinonError as error:
            print(f"load failed: {type(error).__name__}: {error}")
            abort(self.job, reports, str(error))
            return False
        return True


class Changes(Load):
    """A job that writes these rows, every other one with a time to live, and deletes other keys."""

    fields = CHANGES

    def __init__(self, cluster: LocalCluster, rows: Rows, deletes: Iterable[bytes]) -> None:
        super().__init__(
            cluster,
            rows,
            keyColumn="key",
            valueColumn="value",
            ttlColumn="lives",
            deleteColumn="gone",
        )
        self.deletes = list(deletes)
        self.brief = set(list(rows)[::2])
        """The keys of the rows that have a time to live."""

    def items(self) -> list[tuple[bytes, Any]]:
        return [*super().items(), *((key, None) for key in self.deletes)]

    def columns(self, items: list[tuple[bytes, Any]]) -> list[Any]:
        lives = [TTL_MS if key in self.brief else None for key, _ in items]
        gone = [value is None for _, value in items]
        return [*super().columns(items), pa.array(lives, pa.int64()), pa.array(gone)]


def readable(client: Client, rows: Rows) -> int:
    """Return how many of the rows are there; each that is has to be right."""
    found = dict(zip(rows, client.get_many(rows), strict=True))
    wrong = [key for key, value in found.items() if value not in (None, rows[key])]
    assert not wrong, f"{len(wrong)} rows have another value, such as {wrong[:3]}"
    return sum(value is not None for value in found.values())


def records_held(cluster: LocalCluster) -> int:
    """Return how many records the cluster holds, each partition's counted once: users' rows and
    whatever loads have left.
    """
    copies = checksums(table_of(cluster.status()))
    return sum(max(copy.records for copy in held.values()) for held in copies.values())


def wait_until_clean(cluster: LocalCluster, client: Client, timeout_s: float = 120.0) -> None:
    """Wait until the cluster holds what a scan finds, and nothing that loads have left."""
    deadline = time.monotonic() + timeout_s
    while (held := records_held(cluster)) != (found := sum(1 for _ in client.scan(keys_only=True))):
        assert time.monotonic() < deadline, f"{held} records, of which clients see {found}"
        time.sleep(0.2)
