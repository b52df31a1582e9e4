"""Removes expired records that reads meet; in small steps over one index removes all other expired
records, and tombstones that are no longer needed.

Invariants:
- Records are removed only in partitions that this node serves, under a lease. The removal of an
  expired record is sequenced like any other delete (rule 13).
- A tombstone is purged once its retention time has passed, every required follower holds it, and no
  pass that began before it is under way. The purge floor rises in the same transaction and is then
  announced; followers purge no further (rule 14).
- An index entry whose record was rewritten or deleted is just dropped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

import numpy as np

from koinon_node.core.formats import record_layout, records
from koinon_node.core.membership.assignment import ServedPartitions
from koinon_node.core.writes import write_decisions
from koinon_node.partition.serving_context import ServingContext
from koinon_proto.contract.errors import StorageFullError, UnavailableError, UnknownFateError

_ENTRY_BYTES = 48


@dataclass(slots=True)
class _Due:
    """The removals that some index entries ask for."""

    dropped: list[bytes] = field(default_factory=list)  # entries
    expired: list[bytes] = field(default_factory=list)  # data keys
    tombstones: list[tuple[bytes, bytes, int]] = field(default_factory=list)
    """(entry, data key, sequence)"""


class Reclaimer:
    """Deletes expired records and purges tombstones where this node leads. Belongs to the event
    loop.
    """

    def __init__(self, context: ServingContext) -> None:
        self._state = context.state
        self._store = context.store
        self._pending = context.pending
        self._primaries = context.primaries
        self._replicator = context.replicator
        self._clock = context.clock
        self._claims = context.claims

    async def remove_expired(self, keys: list[bytes], view: ServedPartitions) -> None:
        """Queue sequenced deletes of the keys that are still expired, and wait for them.

        Keys in partitions that are no longer served as in ``view`` are left out: another node gives
        sequences there now, and refuses the reader anyway. If the disk is too full for a delete, or
        too few replicas are left, reads continue: by this process's clock the record stays expired.
        """
        keys = list(dict.fromkeys(keys))
        partition_ids = np.fromiter(map(records.partition_of_data_key, keys), np.uint32, len(keys))
        await self._claims.released(partition_ids)
        now_ms = self._clock.now_ms()
        served = self._state.served_as(view, partition_ids)
        few = self._state.too_few[partition_ids]
        if (served & few).any():
            self._clock.keep_told()
        served &= ~few
        if not served.any():
            return
        effects = write_decisions.decide_expiry(
            list(itertools.compress(keys, served)),
            self._primaries,
            self._pending,
            self._stored,
            now_ms,
        )
        ticket = self._replicator.submit(effects, len(keys) * _ENTRY_BYTES)
        if ticket is not None:
            try:
                await self._replicator.finish(ticket)
            except (StorageFullError, UnavailableError, UnknownFateError):
                self._clock.keep_told()

    def look(self, start: bytes, rows_max: int) -> tuple[bytes, list[Awaitable[None]]]:
        """Check some entries of the index and queue the removals that they need; see
        IndexSweeper.
        """
        view = self._state.served
        if not self._state.serving() or not len(view.epochs):
            return b"", []
        now_ms = self._clock.now_ms()  # one time for all: a dropped entry's record is removed too
        entries, start = self._store.expired_entries(start, now_ms, rows_max)
        if not entries:
            return start, []
        partition_ids = records.partitions_of_data_keys([entry[8:] for entry in entries])
        served = self._state.served_as(view, partition_ids) & ~self._state.too_few[partition_ids]
        due = self._due([e for e, here in zip(entries, served.tolist(), strict=True) if here])
        queued: list[Awaitable[None]] = []
        if due.tombstones and (purge := self._purge(due.tombstones)) is not None:
            queued.append(purge)
        if due.dropped:
            effects = write_decisions.decide_expiry(
                due.expired, self._primaries, self._pending, self._stored, now_ms
            )
            ticket = self._replicator.submit(effects, len(due.dropped) * _ENTRY_BYTES, due.dropped)
            if ticket is not None:
                queued.append(self._replicator.finish(ticket))
        return start, queued

    def _due(self, entries: Sequence[bytes]) -> _Due:
        due = _Due()
        split = [(entry, *record_layout.split_expiry_key(entry)) for entry in entries]
        stored = self._stored([key for _, _, key in split])
        for entry, at_ms, key in split:
            if self._pending.overlapping((key,)):
                continue  # a write of the key is under way; the next round checks it
            data = stored.get(key)
            record = records.decode_record(data) if data is not None else None
            if record is None or record.expires_at_ms != at_ms:
                due.dropped.append(entry)
            elif record.tombstone:
                due.tombstones.append((entry, key, record.sequence))
            else:
                due.dropped.append(entry)
                due.expired.append(key)
        return due

    def _purge(self, tombstones: list[tuple[bytes, bytes, int]]) -> asyncio.Future[None] | None:
        """Queue the removal of the tombstones that are not needed any more."""
        keys = [key for _, key, _ in tombstones]
        partition_ids = records.partitions_of_data_keys(keys)
        sequences = np.array([sequence for _, _, sequence in tombstones], np.uint64)
        bounds = self._replicator.leading.purge_bounds(partition_ids)
        chosen = np.flatnonzero(sequences <= bounds)
        if not len(chosen):
            return None
        ids = np.unique(partition_ids[chosen])
        floors = self._primaries.purge_floors
        np.maximum.at(floors, partition_ids[chosen], sequences[chosen])
        rows = chosen.tolist()
        return self._replicator.submit_purge(
            ids, [keys[row] for row in rows], [tombstones[row][0] for row in rows]
        )

    def _stored(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        return dict(self._store.get_many(keys))
