"""A primary's decision on an atomic batch: either all of its changes are written, or none.

The keys lie in one partition. All checks are evaluated first, on the records before the batch: on
pending records and, below them, on stored ones. Then the updates are evaluated in their order, each
on the result of the ones before. All changes get one sequence, which is the version of each written
record, and go into one ticket. A ticket is never split: it is in one commit group, one record of
the log, one transaction and one message to each follower, or nowhere.

An expired record counts as absent. Its removal is sequenced before the batch, and is queued even if
the batch is refused.

Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from koinon_node.core.formats.records import Record, head_of
from koinon_node.core.writes.pending_writes import PendingWrites
from koinon_node.core.writes.updates import Change, Result, Update
from koinon_node.core.writes.updates import Decided as Changed
from koinon_node.core.writes.write_decisions import Decision, Effects, Primaries, Stored, WriteRows
from koinon_proto.contract.errors import CheckFailedError, KoinonError, ResourceExhaustedError
from koinon_proto.contract.table import MAX_BATCH_BYTES


@dataclass(frozen=True, slots=True)
class Check:
    """Refuses the batch unless the record has this version; 0: unless there is no record."""

    version: int


class Joint(ABC):
    """An operation on the records of several keys: its own key, and the keys of the ``Part`` steps
    that follow it. The same key may come more than once.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def parts(self) -> int:
        """The number of ``Part`` steps that follow it."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The most bytes that it writes beyond the bytes of the existing records."""

    @abstractmethod
    def decide_all(
        self, records: Sequence[Record | None], now_ms: int
    ) -> tuple[Result, Sequence[tuple[int, Changed]]]:
        """Return the result, and the changes in their order, each with the index of its key.

        Raises:
            KoinonError: the records do not allow the operation; nothing is written.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """A further key of the ``Joint`` before it, without a result of its own."""

    @property
    def size(self) -> int:
        return 0

    def decide(self, record: Record | None, now_ms: int) -> Changed:
        """Change nothing: the ``Joint`` decides for this key."""
        return Changed(Change.LEAVE, None)


Step = Check | Update | Joint


@dataclass(frozen=True, kw_only=True, slots=True)
class AtomicSteps:
    """The operations of a batch as columns. All limits have been checked."""

    partition_id: int
    keys: Sequence[bytes]  # data keys, all of the partition
    steps: Sequence[Step]
    goes_on: bool = False
    """True: a failed update has its error as its result, and the other steps take effect. False: a
    failed update refuses the whole batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """A decision. ``version`` is the version of all written records, 0 if nothing is written;
    ``results`` has one entry per step, None for checks. ``refusal``: the error if the batch is
    refused; the client gets it once all groups that the decision read are complete.
    """

    effects: Effects
    version: int = 0
    results: Sequence[Result] = ()
    refusal: KoinonError | None = None


def decide_batch(
    batch: AtomicSteps, primaries: Primaries, pending: PendingWrites, stored: Stored, now_ms: int
) -> Decided:
    """Decide on a batch. The caller adds a ticket with the effects to the open group, without an
    await in between.

    Raises:
        PartitionOfflineError: the partition's epoch has no sequence left; nothing was decided.
    """
    keys = list(dict.fromkeys(batch.keys))
    ids = np.full(len(keys), batch.partition_id, np.uint32)
    rows = WriteRows(partition_ids=ids, keys=keys, values=())
    decision = Decision(rows, primaries, pending, stored, now_ms)
    before = {key: decision.current(row) for row, key in enumerate(keys)}
    refusal: KoinonError | None = _failed_check(batch, before)
    results: list[Result] = []
    changes: dict[bytes, Record | None] = {}
    if refusal is None:
        try:
            results, changes = _update(batch, before, now_ms)
        except KoinonError as error:
            refusal = error
    if refusal is not None or not changes:
        return Decided(effects=decision.finish(), results=results, refusal=refusal)
    row_of = {key: row for row, key in enumerate(keys)}
    version = decision.take(row_of[next(iter(changes))])
    for key, record in changes.items():
        if record is None:
            decision.remove(row_of[key], version)
        else:
            decision.put(row_of[key], version, record.value, record.expires_at_ms)
    return Decided(effects=decision.finish(), version=version, results=results)


def _failed_check(
    batch: AtomicSteps, before: Mapping[bytes, Record | None]
) -> CheckFailedError | None:
    """Return the error of the first check that does not hold, or None."""
    for key, step in zip(batch.keys, batch.steps, strict=True):
        if isinstance(step, Check):
            record = before[key]
            version = record.sequence if record is not None else 0
            if version != step.version:
                return CheckFailedError(
                    key=key[len(head_of(batch.partition_id)) :],
                    expected_version=step.version,
                    current_version=version,
                )
    return None


def _update(
    batch: AtomicSteps, before: Mapping[bytes, Record | None], now_ms: int
) -> tuple[list[Result], dict[bytes, Record | None]]:
    """Return the results of the steps, and the final record of each changed key; None: no record.

    Raises:
        ResourceExhaustedError: the results exceed a message: each of many short steps may return a
            record of a megabyte.
        KoinonError: an update failed, and ``goes_on`` is False.
    """
    after = dict(before)
    changed: dict[bytes, None] = {}  # in the order of their first change
    results: list[Result] = []
    shown_bytes = 0
    for at, (key, step) in enumerate(zip(batch.keys, batch.steps, strict=True)):
        if isinstance(step, Check):
            results.append(None)
            continue
        touched: Sequence[bytes] = (key,)
        changes: Sequence[tuple[int, Changed]]
        try:
            if isinstance(step, Joint):
                touched = batch.keys[at : at + 1 + step.parts]
                result, changes = step.decide_all([after[k] for k in touched], now_ms)
            else:
                decided = step.decide(after[key], now_ms)
                result, changes = decided.result, ((0, decided),)
        except KoinonError as error:
            if not batch.goes_on:
                raise
            results.append(error)
            continue
        results.append(result)
        shown_bytes += _bytes_returned(result)
        if shown_bytes > MAX_BATCH_BYTES:
            raise ResourceExhaustedError(
                resource="bytes of the records that a batch returns", limit=MAX_BATCH_BYTES
            )
        for place, change in changes:
            if change.change is not Change.LEAVE:
                after[touched[place]] = record_of(change)
                changed[touched[place]] = None
    left = {key: after[key] for key in changed}
    gone = (key for key, record in left.items() if record is None and before[key] is None)
    for key in list(gone):  # created and deleted by the batch itself
        del left[key]
    return results, left


def record_of(change: Changed) -> Record | None:
    """Return the record after a change. It has no sequence before the batch is decided."""
    if change.change is Change.DELETE:
        return None
    return Record(0, 0, change.expires_at_ms, change.value)


def _bytes_returned(result: Result) -> int:
    value = result[1] if isinstance(result, tuple) else result
    return len(value) if isinstance(value, bytes) else 0
