"""Counts the outcomes of the rows in clients' requests, a batch at a time.

Outcomes: ``ok``; ``absent`` (a read or a delete found no record); ``refused`` (without an effect:
the partition is not served here, there is no room, too few replicas); ``failed`` (a condition did
not hold, an increment met a value that is no number, or an error of this node); ``unknown`` (a
write that may have been applied, or may be later).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from itertools import compress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from koinon_node.core.formats.records import HEADER_BYTES, U32Array
from koinon_node.core.writes.atomic_batch import Check, Part, Step
from koinon_node.core.writes.updates import Assign, Look, Put, Remove
from koinon_node.partition.batches import (
    AtomicAnswer,
    AtomicBatch,
    ReadAnswer,
    ScanAnswer,
    WriteAnswer,
    WriteBatch,
)
from koinon_proto.contract.errors import (
    ConditionFailedError,
    KoinonError,
    NotANumberError,
    NumberOverflowError,
    UnknownFateError,
)

I64Array = npt.NDArray[np.int64]
Operation = Literal["get", "put", "delete", "update", "scan", "stage"]
Outcome = Literal["ok", "absent", "refused", "failed", "unknown"]

OUTCOMES: dict[Operation, tuple[Outcome, ...]] = {
    "get": ("ok", "absent", "refused", "failed"),
    "put": ("ok", "refused", "failed", "unknown"),
    "delete": ("ok", "absent", "refused", "failed", "unknown"),
    "update": ("ok", "refused", "failed", "unknown"),
    "scan": ("ok",),
    "stage": ("ok", "refused", "failed", "unknown"),
}
"""The possible outcomes of each operation. A scan's page that fails has no rows."""


_DECIDED = (ConditionFailedError, NotANumberError, NumberOverflowError)


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of rows that ended with this error."""
    if isinstance(error, UnknownFateError | asyncio.CancelledError):
        return "unknown"
    if isinstance(error, _DECIDED) or not isinstance(error, KoinonError):
        return "failed"
    return "refused"


class RowCounts:
    """``rows`` by operation and outcome; ``bytes`` of the values of ``ok`` rows, by operation."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Operation, Outcome], int] = {
            (operation, outcome): 0 for operation, known in OUTCOMES.items() for outcome in known
        }
        self.bytes: dict[Operation, int] = dict.fromkeys(OUTCOMES, 0)

    async def of_read(
        self, partition_ids: U32Array, reading: Coroutine[Any, Any, ReadAnswer]
    ) -> ReadAnswer:
        """Await a read, and count its rows by their outcome. Raises the errors of the read."""
        try:
            answer = await reading
        except BaseException as error:
            self.read_failed(len(partition_ids), error)
            raise
        self.read(partition_ids, answer)
        return answer

    async def of_write(
        self, batch: WriteBatch, writing: Coroutine[Any, Any, WriteAnswer]
    ) -> WriteAnswer:
        """Await a write, and count its rows by their outcome. Raises the errors of the write."""
        try:
            answer = await writing
        except BaseException as error:
            self.write_failed(batch, error)
            raise
        self.written(batch, answer)
        return answer

    def read(self, partition_ids: U32Array, answer: ReadAnswer) -> None:
        """Count the rows of a read."""
        absent = len(answer.missing)
        refused = _count_in(partition_ids, answer)
        found = len(partition_ids) - absent - refused
        self.rows["get", "ok"] += found
        self.rows["get", "absent"] += absent
        self.rows["get", "refused"] += refused
        self.bytes["get"] += max(0, answer.held_bytes - HEADER_BYTES * found)

    def read_rows(self, found: Sequence[bytes | None]) -> None:
        """Count single reads by whether a record was found."""
        there = [len(record) for record in found if record is not None]
        self.rows["get", "ok"] += len(there)
        self.rows["get", "absent"] += len(found) - len(there)
        self.bytes["get"] += sum(there) - HEADER_BYTES * len(there)

    def read_failed(self, rows: int, error: BaseException) -> None:
        """Count rows of a read that failed. (A cancelled read counts as failed: its client has
        disconnected.)
        """
        outcome = outcome_of(error)
        self.rows["get", "failed" if outcome == "unknown" else outcome] += rows

    def scanned(self, answer: ScanAnswer) -> None:
        """Count the rows of a page that was read."""
        self.scanned_rows(len(answer.keys), sum(map(len, answer.values)))

    def scanned_rows(self, rows: int, size: int) -> None:
        """Count rows that a scan read, with values of ``size`` bytes."""
        self.rows["scan", "ok"] += rows
        self.bytes["scan"] += size

    def staged(
        self,
        partition_ids: U32Array,
        rows: I64Array,
        chunks: Sequence[bytes],
        refusals: Collection[int],
    ) -> None:
        """Count rows that a bulk load staged in chunks, without the refused partitions. Columns
        over chunks.
        """
        taken = ~np.isin(partition_ids, list(refusals))
        self.rows["stage", "ok"] += int(rows[taken].sum())
        self.rows["stage", "refused"] += int(rows[~taken].sum())
        self.bytes["stage"] += sum(map(len, compress(chunks, taken.tolist())))

    def stage_failed(self, rows: int, error: BaseException) -> None:
        """Count rows of a bulk load that could not be staged."""
        self.rows["stage", outcome_of(error)] += rows

    def written(self, batch: WriteBatch, answer: WriteAnswer) -> None:
        """Count the rows of a batch by the answer."""
        left = _rows_by_operation(batch)
        size = sum(map(len, batch.values))
        for row, outcome in _not_written(batch, answer):
            operation = _operation_of(batch, row)
            self.rows[operation, outcome] += 1
            left[operation] -= 1
            size -= len(batch.values[row])
        absent = len(answer.absent)
        self.rows["put", "ok"] += left["put"]
        self.rows["update", "ok"] += left["update"]
        self.rows["delete", "ok"] += left["delete"] - absent
        self.rows["delete", "absent"] += absent
        self.bytes["put"] += size

    def batch_committed(self, batch: AtomicBatch, answer: AtomicAnswer) -> None:
        """Count the rows of an atomic batch that was written; checks are no rows."""
        for step, result in zip(batch.steps, answer.results, strict=True):
            operation = _operation_of_step(step)
            if operation is None:
                continue
            if operation == "get":
                self.read_rows([result if isinstance(result, bytes) else None])
                continue
            outcome: Outcome = "ok"
            if isinstance(result, KoinonError):
                outcome = outcome_of(result)
            elif operation == "delete" and result is False:
                outcome = "absent"
            self.rows[operation, outcome] += 1
            if operation == "put":
                self.bytes["put"] += step.size if isinstance(step, Put | Assign) else 0

    def batch_failed(self, batch: AtomicBatch, error: BaseException) -> None:
        """Count the rows of an atomic batch that ended with an error."""
        outcome = outcome_of(error)
        for step in batch.steps:
            if (operation := _operation_of_step(step)) == "get":
                self.read_failed(1, error)
            elif operation is not None:
                self.rows[operation, outcome] += 1

    def put(self, value_bytes: int) -> None:
        """Count a single put."""
        self.rows["put", "ok"] += 1
        self.bytes["put"] += value_bytes

    def put_failed(self, error: BaseException) -> None:
        """Count a single put that ended with an error."""
        self.rows["put", outcome_of(error)] += 1

    def write_failed(self, batch: WriteBatch, error: BaseException) -> None:
        """Count the rows of a batch that ended with an error."""
        outcome = outcome_of(error)
        for operation, rows in _rows_by_operation(batch).items():
            self.rows[operation, outcome] += rows


def _operation_of_step(step: Step) -> Operation | None:
    if isinstance(step, Check | Part):
        return None
    if isinstance(step, Look):
        return "get"
    if isinstance(step, Put | Assign):
        return "put"
    return "delete" if isinstance(step, Remove) else "update"


def _rows_by_operation(batch: WriteBatch) -> dict[Operation, int]:
    deletes, updates = len(batch.deletes), len(batch.updates)
    puts = len(batch.keys) - deletes - updates
    return {"put": puts, "delete": deletes, "update": updates}


def _operation_of(batch: WriteBatch, row: int) -> Operation:
    if row in batch.updates:
        return "update"
    return "delete" if row in batch.deletes else "put"


def _not_written(batch: WriteBatch, answer: WriteAnswer) -> list[tuple[int, Outcome]]:
    """Return the refused and failed rows with their outcomes."""
    found = [(row, outcome_of(error)) for row, error in answer.row_errors.items()]
    found += [(row, "failed") for row in answer.present]
    if answer.refusals:
        refused = np.flatnonzero(np.isin(batch.partition_ids, list(answer.refusals)))
        found += [(row, "refused") for row in refused.tolist() if row not in answer.row_errors]
    return found


def _count_in(partition_ids: U32Array, answer: ReadAnswer) -> int:
    if not answer.refusals:
        return 0
    return int(np.isin(partition_ids, list(answer.refusals)).sum())
