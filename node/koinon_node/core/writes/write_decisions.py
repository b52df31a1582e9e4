"""A primary's decisions on writes of the partitions that it leads: sequences and conditions.

Invariants:
- Within a partition sequences rise by one per write, from ``primary_epoch << 40`` + 1, and are
  never given twice: a process adopts an epoch once, and a new process gets a new epoch. Every
  sequence belongs to the adopted epoch: once an epoch's sequences are used up, writes are refused.
  Long before (``SPARE_SEQUENCES``) the partition continues under a new epoch
  (core/replication/in_sync_and_hand_over.py).
- Conditions and updates (updates.py) are evaluated in sequence order over pending records and,
  below them, stored ones. Only effects go to the store.
- An expired record counts as absent; its removal is sequenced before the record that replaces it.

State is held in columns over all partitions, because a batch of 1,000 rows touches most of them.
Pure: the driver brings stored records and the time, and carries the effects to the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from koinon_node.core.formats.record_layout import expiry_key
from koinon_node.core.formats.records import (
    BoolArray,
    Record,
    U32Array,
    U64Array,
    decode_record,
    encode_one_progress,
    encode_progress,
    encode_record,
    encode_records,
    encode_tombstone,
    partition_of_data_key,
    progress_key,
    progress_keys,
)
from koinon_node.core.writes.commit_group import CommitGroup
from koinon_node.core.writes.pending_writes import PendingWrites
from koinon_node.core.writes.updates import Change, Result, Update
from koinon_proto.contract.errors import (
    ConditionFailedError,
    KoinonError,
    PartitionOfflineError,
)
from koinon_proto.contract.table import SEQUENCE_COUNTER_BITS

SPARE_SEQUENCES = 1 << 36
"""With fewer sequences left the primary asks for a new epoch: 19 hours at a million writes/s."""
_COUNTER_MASK = (1 << SEQUENCE_COUNTER_BITS) - 1
_NO_VERSIONS = np.zeros(0, np.uint64)
_ALL_SEQUENCES = np.uint64(_COUNTER_MASK + 1)  # of an epoch

Stored = Callable[[Sequence[bytes]], Mapping[bytes, bytes]]
"""Reads stored records by data key; keys without a record are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRows:
    """Rows to write, as columns: entry i belongs to row i. All limits have been checked."""

    partition_ids: U32Array
    keys: Sequence[bytes]  # data keys
    values: Sequence[bytes]
    deletes: frozenset[int] = frozenset()
    expires_at_ms: Sequence[int] | None = None  # 0: never
    conditions: Mapping[int, int] = field(default_factory=dict)  # row -> version
    list_present: bool = False
    """Rows that fail their condition "absent" are listed in ``present`` instead of getting
    errors."""
    updates: Mapping[int, Update] = field(default_factory=dict)
    """Updates by row. The entries of such a row in the other columns are ignored."""


@dataclass(kw_only=True, slots=True)
class Effects:
    """The changes of a decision, and the answers once these are durable."""

    versions: U64Array  # 0 for rows that wrote nothing
    records: dict[bytes, bytes | None] = field(default_factory=dict)  # None: removed
    expiry_keys: list[bytes] = field(default_factory=list)
    touched: U32Array = field(default_factory=lambda: np.zeros(0, np.uint32))
    absent: list[int] = field(default_factory=list)  # deletes that found no record
    present: list[int] = field(default_factory=list)  # as ``list_present`` says
    failed: dict[int, KoinonError] = field(default_factory=dict)  # conditions, and updates
    results: dict[int, Result] = field(default_factory=dict)  # of updates, by row
    observed_group: int = 0  # the oldest group that was read and is not durable here; 0: none
    observed: dict[CommitGroup, set[int]] = field(default_factory=dict)
    """Groups in flight that were read, with the partitions of the rows that read them."""


class Primaries:
    """The write positions of all partitions. ``epochs[p]`` 0: this process has never led p."""

    def __init__(
        self, complete_through: U64Array, purge_floors: U64Array, tombstone_ms: int = 600_000
    ) -> None:
        self.epochs = np.zeros(len(complete_through), np.uint64)
        self.last_sequences = complete_through.copy()
        self.purge_floors = purge_floors  # the column of ``Copies``, shared
        self.replicated = np.zeros(len(complete_through), np.bool_)
        self.followed = np.zeros(len(complete_through), np.bool_)  # by a change feed
        self.tombstone_ms = tombstone_ms

    def progress(self, partition_ids: U32Array) -> tuple[list[bytes], list[bytes | None]]:
        """Return the progress entries of these partitions' write positions, as keys and values."""
        if len(partition_ids) == 1:  # a single put: arrays would cost ten times as much
            p = int(partition_ids[0])
            last, floor = int(self.last_sequences[p]), int(self.purge_floors[p])
            return [progress_key(p)], [encode_one_progress(last, floor)]
        lasts, floors = self.last_sequences[partition_ids], self.purge_floors[partition_ids]
        return progress_keys(partition_ids), list(encode_progress(lasts, floors))

    def keeps_tombstones(self, partition_id: int) -> bool:
        """Return whether a delete in the partition needs a tombstone, for replicas or feeds."""
        return bool(self.replicated[partition_id] or self.followed[partition_id])

    def nearly_used_up(self, size: int) -> BoolArray:
        """Return a mask of the first ``size`` partitions: few sequences are left in their epoch."""
        counters = self.last_sequences[:size] & np.uint64(_COUNTER_MASK)
        few: BoolArray = counters > np.uint64(_COUNTER_MASK - SPARE_SEQUENCES)
        return few

    def adopt(self, partition_ids: U32Array, primary_epochs: U64Array) -> None:
        """Lead each partition in its epoch, with the epoch's first sequence."""
        p, starts = partition_ids, primary_epochs << np.uint64(SEQUENCE_COUNTER_BITS)
        if (primary_epochs <= self.epochs[p]).any():
            raise AssertionError(f"partitions {p}: one of {primary_epochs} adopted twice")
        if (starts <= self.last_sequences[p]).any():
            raise AssertionError(f"partitions {p}: sequences above one of {primary_epochs}")
        self.epochs[p] = primary_epochs
        self.last_sequences[p] = starts

    def assign(self, partition_ids: U32Array) -> U64Array:
        """Give each row its sequence, in row order within each partition.

        Raises:
            PartitionOfflineError: a partition's epoch has too few sequences left; none was given.
        """
        rows = len(partition_ids)
        if rows == 1:
            return np.array([self.take(int(partition_ids[0]))], np.uint64)
        order = np.argsort(partition_ids, kind="stable")
        ordered = partition_ids[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        counts = np.diff(np.append(starts, rows))
        touched = ordered[starts]
        before = self.last_sequences[touched]
        after = before + counts.astype(np.uint64)
        carried = (before ^ after) >= _ALL_SEQUENCES
        if carried.any():
            raise _used_up(int(touched[carried][0]))
        ranks = np.arange(1, rows + 1) - np.repeat(starts, counts)
        sequences = np.empty(rows, np.uint64)
        sequences[order] = self.last_sequences[ordered] + ranks.astype(np.uint64)
        self.last_sequences[touched] = after
        return sequences

    def take(self, partition_id: int) -> int:
        """Give one sequence.

        Raises:
            PartitionOfflineError: the partition's epoch has no sequence left.
        """
        sequence = int(self.last_sequences[partition_id]) + 1
        if not sequence & _COUNTER_MASK:
            raise _used_up(partition_id)
        self.last_sequences[partition_id] = sequence
        return sequence


def _used_up(partition_id: int) -> PartitionOfflineError:
    return PartitionOfflineError(
        partition_id=partition_id, reason="its epoch has no sequences left; a new one is asked for"
    )


def decide_write(
    rows: WriteRows, primaries: Primaries, pending: PendingWrites, stored: Stored, now_ms: int
) -> Effects:
    """Give the rows sequences and decide on them. The caller adds a ticket with the effects to the
    open group, without an await in between.
    """
    if rows.deletes or rows.conditions or rows.updates:
        effects = Decision(rows, primaries, pending, stored, now_ms).run()
    else:
        sequences = primaries.assign(rows.partition_ids)
        records = encode_records(sequences, rows.values, rows.expires_at_ms)
        effects = Effects(
            versions=sequences,
            records=dict(zip(rows.keys, records, strict=True)),
            touched=np.unique(rows.partition_ids),
        )
        if rows.expires_at_ms is not None:
            pairs = zip(rows.expires_at_ms, rows.keys, strict=True)
            effects.expiry_keys = [expiry_key(at, key) for at, key in pairs if at]
    return effects


def decide_put(
    partition_id: int, data_key: bytes, value: bytes, expires_at_ms: int, primaries: Primaries
) -> tuple[int, Effects]:
    """Decide like ``decide_write`` on one unconditional row; return its sequence as well."""
    sequence = primaries.take(partition_id)
    effects = Effects(
        versions=_NO_VERSIONS,
        records={data_key: encode_record(sequence, value, expires_at_ms)},
        touched=np.array((partition_id,), np.uint32),
    )
    if expires_at_ms:
        effects.expiry_keys.append(expiry_key(expires_at_ms, data_key))
    return sequence, effects


def decide_expiry(
    keys: Sequence[bytes],
    primaries: Primaries,
    pending: PendingWrites,
    stored: Stored,
    now_ms: int,
) -> Effects:
    """Decide like ``decide_write`` on the removal of those ``keys`` whose record has expired."""
    partition_ids = np.array([int.from_bytes(key[:2], "big") for key in keys], np.uint32)
    rows = WriteRows(partition_ids=partition_ids, keys=keys, values=())
    decision = Decision(rows, primaries, pending, stored, now_ms)
    for row in range(len(keys)):
        decision.current(row)
    return decision.finish()


class Decision:
    """The row-by-row evaluation of a batch that has to read records before it writes."""

    def __init__(
        self,
        rows: WriteRows,
        primaries: Primaries,
        pending: PendingWrites,
        stored: Stored,
        now_ms: int,
    ) -> None:
        self._rows = rows
        self._primaries = primaries
        self._pending = pending
        self._now_ms = now_ms
        self._effects = Effects(versions=np.zeros(len(rows.keys), np.uint64))
        self._partitions: list[int] = rows.partition_ids.tolist()
        self._touched: set[int] = set()
        looked_at = rows.deletes | rows.conditions.keys() | rows.updates.keys()
        keys = [rows.keys[row] for row in looked_at] if looked_at else rows.keys
        self._stored = stored(keys)
        self._in_flight = bool(pending.overlapping(set(keys)))

    def run(self) -> Effects:
        rows, effects = self._rows, self._effects
        for row in range(len(rows.keys)):
            if (update := rows.updates.get(row)) is not None:
                self._update(row, update)
                continue
            is_delete, condition = row in rows.deletes, rows.conditions.get(row)
            if is_delete or condition is not None:
                record = self.current(row)
                version = record.sequence if record else 0
                if condition is not None and condition != version:
                    if rows.list_present and not condition:
                        effects.present.append(row)
                        continue
                    effects.failed[row] = ConditionFailedError(
                        expected_version=condition, current_version=version
                    )
                    continue
                if is_delete and record is None:
                    effects.absent.append(row)
                    continue
            sequence = self.take(row)
            effects.versions[row] = sequence
            if is_delete:
                self.remove(row, sequence)
            else:
                expires_at_ms = rows.expires_at_ms[row] if rows.expires_at_ms else 0
                self.put(row, sequence, rows.values[row], expires_at_ms)
        return self.finish()

    def _update(self, row: int, update: Update) -> None:
        record, effects = self.current(row), self._effects
        try:
            decided = update.decide(record, self._now_ms)
        except KoinonError as error:
            effects.failed[row] = error
            return
        effects.results[row] = decided.result
        if decided.change is Change.LEAVE:
            return
        sequence = self.take(row)
        effects.versions[row] = sequence
        if decided.change is Change.DELETE:
            self.remove(row, sequence)
        else:
            self.put(row, sequence, decided.value, decided.expires_at_ms)

    def current(self, row: int) -> Record | None:
        """Return the live record of the row's key; remove an expired one."""
        key = self._rows.keys[row]
        data = self._lookup(key)
        record = decode_record(data) if data is not None else None
        if record is None or record.tombstone:
            return None
        if record.expired(self._now_ms):
            self.remove(row, self.take(row))
            return None
        return record

    def finish(self) -> Effects:
        self._effects.touched = np.array(sorted(self._touched), np.uint32)
        return self._effects

    def _lookup(self, key: bytes) -> bytes | None:
        if key in self._effects.records:
            return self._effects.records[key]
        if self._in_flight:
            effects = self._effects
            partition_id = partition_of_data_key(key)
            for incomplete in self._pending.incomplete((key,)):
                effects.observed.setdefault(incomplete, set()).add(partition_id)
            group, data = self._pending.find(key)
            if group is not None:
                effects.observed.setdefault(group, set()).add(partition_id)
                oldest = effects.observed_group or group.number
                effects.observed_group = min(oldest, group.number)
                return data
        return self._stored.get(key)

    def take(self, row: int) -> int:
        partition_id = self._partitions[row]
        self._touched.add(partition_id)
        return self._primaries.take(partition_id)

    def put(self, row: int, sequence: int, value: bytes, expires_at_ms: int) -> None:
        key = self._rows.keys[row]
        self._effects.records[key] = encode_record(sequence, value, expires_at_ms)
        if expires_at_ms:
            self._effects.expiry_keys.append(expiry_key(expires_at_ms, key))

    def remove(self, row: int, sequence: int) -> None:
        key, partition_id = self._rows.keys[row], self._partitions[row]
        if self._primaries.keeps_tombstones(partition_id):
            purge_at_ms = self._now_ms + self._primaries.tombstone_ms
            self._effects.records[key] = encode_tombstone(sequence, purge_at_ms)
            self._effects.expiry_keys.append(expiry_key(purge_at_ms, key))
            return
        # No replica or feed needs a tombstone: the purge floor covers the delete.
        self._effects.records[key] = None
        self._primaries.purge_floors[partition_id] = sequence
