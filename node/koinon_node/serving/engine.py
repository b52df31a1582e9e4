"""Reads and writes of the partitions that this node leads; knows neither messages nor transport.

Rules that hold here:
- Nothing is read or acknowledged without a lease, checked before and again after (rule 10). A write
  that became complete after the lease or the epoch ended is answered as unknown. One that was
  complete before is acknowledged, though its partition may be another's by now.
- A read waits for writes in flight of the keys that it reads, once. What it then finds may still
  be of a later write that is in the store and not on every in-sync replica: then it waits for that
  one and answers what it found, which was the newest complete write in that moment. The store shows
  a write a moment before the writer's answer says that it is there.
- A write is refused before it is sequenced where its partition has too few replicas.
- A read that meets an expired record queues its sequenced removal and waits for it (rule 13).
- Big batches go in steps with a chance for others to run between them.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections.abc import Collection, Sequence

import numpy as np

from koinon_node.config import Limits
from koinon_node.core import records, write_decisions
from koinon_node.core.commit_group import CommitGroup, Ticket
from koinon_node.core.membership.assignment import ServedPartitions
from koinon_node.core.pending_writes import PendingWrites
from koinon_node.core.records import BoolArray, Record, U32Array
from koinon_node.core.write_decisions import Primaries, WriteRows
from koinon_node.primary.replicator import Replicator
from koinon_node.serving.batches import (
    Durability,
    ReadAnswer,
    ScanAnswer,
    ScanPage,
    WriteAnswer,
    WriteBatch,
)
from koinon_node.serving.reclaimer import Reclaimer
from koinon_node.serving.traffic import Traffic
from koinon_node.state import Expired, NodeState, WallClock
from koinon_node.storage.index_sweeper import IndexSweeper
from koinon_node.storage.store import Store, scan_end, values_of
from koinon_node.storage.writer import Writer
from koinon_proto.contract.errors import (
    KoinonError,
    LeaseExpiredError,
    ReplyTooLargeError,
    ResourceExhaustedError,
    StorageFullError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import MAX_BATCH_BYTES
from koinon_proto.server import admission

_FIRST_READ_ROWS = 32  # before the size of the values is known
_ROW_OVERHEAD_BYTES = 48
_PARTITIONS_PER_STEP = 64
_LEASE_ENDED = "the node's lease ended before the answer"
_HANDED_ON = "its partition was handed on before the answer"
_flags_of = operator.itemgetter(records.FLAGS_AT)
_second = operator.itemgetter(1)


class Engine:
    """All methods belong to the event loop's thread."""

    def __init__(
        self,
        state: NodeState,
        store: Store,
        writer: Writer,
        pending: PendingWrites,
        primaries: Primaries,
        replicator: Replicator,
        limits: Limits,
        clock: WallClock,
    ) -> None:
        self._state = state
        self._store = store
        self._writer = writer
        self._pending = pending
        self._primaries = primaries
        self._replicator = replicator
        self._limits = limits
        self._clock = clock
        reclaimer = Reclaimer(state, store, pending, primaries, replicator, clock)
        self.reclaiming = IndexSweeper(reclaimer.look)
        self.waits = np.zeros(len(primaries.epochs), np.int32)
        self.traffic = Traffic()
        self._reading_rows = 0
        self._reading_bytes = 0
        self.rows_read = 0
        self.rows_written = 0

    # --- reads -----------------------------------------------------------------------------

    async def read(
        self,
        keys: Sequence[bytes],
        partition_ids: U32Array,
        table_version: int,
        *,
        want_versions: bool,
    ) -> ReadAnswer:
        """Read the rows. Refused partitions are listed; their rows have an empty value."""
        self._state.check_lease()
        view = self._state.served
        answer = ReadAnswer(refusals=self._state.refusals(view, partition_ids, table_version))
        if self._reading_rows and self._reading_rows + len(keys) > self._limits.reading_rows:
            raise ResourceExhaustedError(
                resource="rows being read", limit=self._limits.reading_rows
            )
        self._reading_rows += len(keys)
        try:
            if not answer.refusals:
                data_keys = records.data_keys(partition_ids, keys)
                await self._read_rows(view, data_keys, answer, want_versions)
                served = partition_ids
                self.traffic.count_reads(served, keys, answer.values)
            else:
                served = await self._read_served(view, keys, partition_ids, answer, want_versions)
        finally:
            self._reading_rows -= len(keys)
            self._reading_bytes -= answer.held_bytes
        if not self._state.still_serves(view, served):
            raise LeaseExpiredError(node_id=self._state.node_id)
        self.rows_read += len(keys)
        return answer

    def read_now(
        self, keys: Sequence[bytes], partition_ids: Sequence[int]
    ) -> list[bytes | None] | None:
        """Return the records of these keys, encoded (None: there is none), or None where one has to
        be waited for, or is refused: ``read`` says which.

        The rules are those of ``read``; nothing else runs between its checks and the reading. So
        what is in the store and not complete is of a group that the first look finds.
        """
        state, led = self._state, self._state.served.led
        if not state.serving() or not all(map(led.__getitem__, partition_ids)):
            return None
        if state.any_stopped and state.stopped[partition_ids].any():
            return None
        heads = records.heads(len(led))
        data_keys = [heads[p] + key for p, key in zip(partition_ids, keys, strict=True)]
        if self._writer.pending_rows and self._pending.overlapping(data_keys):
            return None
        found = self._store.get_each(data_keys)
        for record in found:
            if record is not None and record[records.FLAGS_AT]:
                if (live := self._live(found)) is None:
                    return None
                found = live
                break
        if not state.serving():
            return None
        self.rows_read += len(keys)
        if len(keys) == 1:
            self.traffic.count_read(partition_ids[0], keys[0], len(found[0] or b""))
        else:
            ids = np.array(partition_ids, np.uint32)
            self.traffic.count_reads(ids, keys, [record or b"" for record in found])
        return found

    def _live(self, found: list[bytes | None]) -> list[bytes | None] | None:
        """Return these records without tombstones; None if one has expired."""
        now_ms = self._clock.now_ms()
        live: list[bytes | None] = []
        for data in found:
            record = records.decode_record(data) if data is not None else None
            if record is None or record.tombstone:
                live.append(None)
            elif record.expired(now_ms):
                return None
            else:
                live.append(data)
        return live

    async def _read_served(
        self,
        view: ServedPartitions,
        keys: Sequence[bytes],
        partition_ids: U32Array,
        answer: ReadAnswer,
        want_versions: bool,
    ) -> U32Array:
        """Read the rows that are not refused into their places; return their partitions."""
        refused = np.fromiter(answer.refusals, np.uint32, len(answer.refusals))
        rows = np.flatnonzero(~np.isin(partition_ids, refused)).tolist()
        part = ReadAnswer()
        served = partition_ids[rows]
        if rows:
            chosen = [keys[row] for row in rows]
            try:
                await self._read_rows(view, records.data_keys(served, chosen), part, want_versions)
            finally:
                answer.held_bytes = part.held_bytes
            self.traffic.count_reads(served, chosen, part.values)
        answer.values = [b""] * len(keys)
        if want_versions:
            answer.versions, answer.expires_at_ms = [0] * len(keys), [0] * len(keys)
        for index, row in enumerate(rows):
            answer.values[row] = part.values[index]
            if want_versions:
                answer.versions[row] = part.versions[index]
                answer.expires_at_ms[row] = part.expires_at_ms[index]
        answer.missing = [rows[index] for index in part.missing]
        return served

    async def _read_rows(
        self,
        view: ServedPartitions,
        data_keys: list[bytes],
        answer: ReadAnswer,
        want_versions: bool,
    ) -> None:
        """Append the rows to ``answer``, in steps bounded by rows and by bytes."""
        if self._writer.pending_rows:
            wanted = data_keys if len(data_keys) == 1 else set(data_keys)
            await self._complete(self._pending.overlapping(wanted), data_keys)
        incomplete: set[CommitGroup] = set()
        start, size, step = 0, 0, _FIRST_READ_ROWS
        with Expired(self._clock) as expired:
            while start < len(data_keys):
                keys = data_keys[start : start + step]
                read = self._read_step(keys, start, answer, want_versions, expired, incomplete)
                self._hold(answer, read)
                size += read
                if size > MAX_BATCH_BYTES:
                    raise ReplyTooLargeError(limit=MAX_BATCH_BYTES, actual=size)
                start += len(keys)
                mean = size // start + 1
                step = max(1, min(self._limits.step_rows, self._limits.step_bytes // mean))
                if start > self._limits.step_rows or size > self._limits.step_bytes:
                    await asyncio.sleep(0)
            await self._complete(incomplete, data_keys)
            if expired:
                await self.remove_expired(expired, view)

    async def _complete(self, groups: Collection[CommitGroup], data_keys: Sequence[bytes]) -> None:
        """Wait until what these groups write in the keys' partitions is complete."""
        if groups:
            partition_ids = np.unique(records.partitions_of_data_keys(data_keys))
            for group in groups:
                await self._replicator.group_done(group, partition_ids)

    def _hold(self, answer: ReadAnswer, size: int) -> None:
        """Count what an answer under way holds in memory against the bound of all of them."""
        others = self._reading_bytes - answer.held_bytes
        self._reading_bytes += size
        answer.held_bytes += size
        admission.hold(size)
        if others and self._reading_bytes > self._limits.reading_bytes:
            raise ResourceExhaustedError(
                resource="bytes being read", limit=self._limits.reading_bytes
            )

    def _read_step(
        self,
        keys: list[bytes],
        start: int,
        answer: ReadAnswer,
        want_versions: bool,
        expired: Expired,
        incomplete: set[CommitGroup],
    ) -> int:
        """Read some rows, append them to ``answer``, and return the bytes of their records.
        ``incomplete`` gets the groups that have to be complete before they may be shown.
        """
        rows = self._store.get_many(keys)
        incomplete.update(self._pending.seen(keys, rows))
        found = list(map(_second, rows))
        flags = set(map(_flags_of, found))
        if len(rows) == len(keys) and flags == {0} and not want_versions:
            answer.values += values_of(found, with_expiry=False)
            return sum(map(len, found))
        by_key = dict(rows)
        if flags <= {0} and not want_versions:
            for row, record in enumerate(map(by_key.get, keys), start):
                if record is None:
                    answer.missing.append(row)
                    answer.values.append(b"")
                else:
                    answer.values.append(record[records.HEADER_BYTES :])
            return sum(map(len, found))
        now_ms = self._clock.now_ms()
        for row, key in enumerate(keys, start):
            data = by_key.get(key)
            live = records.decode_record(data) if data is not None else None
            if live is not None and live.expired(now_ms) and not live.tombstone:
                expired.append(key)
                live = None
            _append_record(answer, row, live, want_versions)
        return sum(map(len, found))

    async def settle(self, partition_ids: Sequence[int]) -> None:
        """Wait until the store itself shows what is durable of these partitions."""
        await self._writer.settle(partition_ids)

    # --- scans -----------------------------------------------------------------------------

    async def scan(self, page: ScanPage) -> ScanAnswer:
        """Return one page. It sees every write acknowledged before it began; rows that change
        while it runs may be seen either way.
        """
        self._state.check_lease()
        view = self._state.served
        answer = ScanAnswer()
        limit = min(page.limit or self._limits.scan_rows, self._limits.scan_rows)
        if self._reading_rows and self._reading_rows + limit > self._limits.reading_rows:
            raise ResourceExhaustedError(
                resource="rows being read", limit=self._limits.reading_rows
            )
        self._reading_rows += limit
        try:
            with Expired(self._clock) as expired:
                visited = await self._scan_partitions(page, view, limit, answer, expired)
        finally:
            self._reading_rows -= limit
        if not self._state.still_serves(view, np.array(visited, np.uint32)):
            raise LeaseExpiredError(node_id=self._state.node_id)
        self.rows_read += len(answer.keys)
        return answer

    async def _scan_partitions(
        self,
        page: ScanPage,
        view: ServedPartitions,
        limit: int,
        answer: ScanAnswer,
        expired: Expired,
    ) -> list[int]:
        incomplete: set[CommitGroup] = set()
        visited: list[int] = []
        size, rows_seen, after_key = 0, 0, page.after_key
        await self._writer.settle(page.partition_ids)
        for index, partition_id in enumerate(page.partition_ids):
            if index % _PARTITIONS_PER_STEP == _PARTITIONS_PER_STEP - 1:
                await asyncio.sleep(0)
            if not view.epochs[partition_id] or self._state.stopped[partition_id]:
                answer.refusals[partition_id] = self._state.refusal(
                    view, partition_id, page.table_version
                )
                after_key = b""
                continue
            visited.append(partition_id)
            rows, more = self._store.scan(
                partition_id,
                page.prefix,
                after_key,
                limit - rows_seen,
                self._limits.scan_bytes - size,
                start=page.start,
                reverse=page.reverse,
            )
            incomplete.update(self._seen_in_scan(partition_id, page, after_key, rows, more=more))
            after_key = b""
            rows_seen += len(rows)
            size += self._append_page(rows, partition_id, page.keys_only, answer, expired)
            full = rows_seen >= limit or size >= self._limits.scan_bytes
            if more or (full and index + 1 < len(page.partition_ids)):
                last = rows[-1][0][records.KEY_AT :] if rows else b""
                answer.next_cursor = (partition_id, last)
                if not more:
                    answer.next_cursor = (page.partition_ids[index + 1], b"")
                break
        for group in incomplete:
            await self._replicator.group_done(group, np.array(visited, np.uint32))
        if expired:
            await self.remove_expired(expired, view)
        return visited

    def _seen_in_scan(
        self,
        partition_id: int,
        page: ScanPage,
        after_key: bytes,
        rows: list[tuple[bytes, bytes]],
        *,
        more: bool,
    ) -> list[CommitGroup]:
        own = records.head_of(partition_id)
        below, after = b"", own + max(after_key, page.start)
        if page.reverse:
            below = scan_end(partition_id, page.prefix, page.start, after_key)
        return self._pending.seen_in_scan(own + page.prefix, after, rows, more=more, below=below)

    def _append_page(
        self,
        rows: list[tuple[bytes, bytes]],
        partition_id: int,
        keys_only: bool,
        answer: ScanAnswer,
        expired: Expired,
    ) -> int:
        """Append live rows to the page, note expired ones, return the bytes that were read."""
        now_ms = self._clock.now_ms()
        size = live_bytes = 0
        live = -len(answer.keys)
        for key, data in rows:
            size += len(key) + len(data)
            record = records.decode_record(data)
            if record.tombstone:
                continue
            if record.expired(now_ms):
                expired.append(key)
                continue
            answer.keys.append(key[records.KEY_AT :])
            live_bytes += len(key) + len(record.value) - records.KEY_AT
            if not keys_only:
                answer.values.append(record.value)
            answer.partition_ids.append(partition_id)
            answer.versions.append(record.sequence)
            answer.expires_at_ms.append(record.expires_at_ms)
        self.traffic.count_scan(partition_id, live + len(answer.keys), live_bytes)
        return size

    # --- writes ----------------------------------------------------------------------------

    async def write(self, batch: WriteBatch) -> WriteAnswer:
        """Write the rows; returns when what was applied is as durable as asked for."""
        self._state.check_lease()
        if batch.is_one_put:
            return await self._write_one(batch)
        view = self._state.served
        count = len(batch.keys)
        answer = WriteAnswer(
            versions=np.zeros(count, np.uint64),
            refusals=self._state.refusals(view, batch.partition_ids, batch.table_version),
        )
        if self._state.any_too_few:
            self._refuse_too_few(batch.partition_ids, answer)
        rows = np.arange(count)
        if answer.refusals:
            refused = np.fromiter(answer.refusals, np.uint32, len(answer.refusals))
            rows = rows[~np.isin(batch.partition_ids, refused)]
        if not len(rows):
            return answer
        sizes = np.fromiter(map(len, batch.keys), np.int64, count)
        sizes += np.fromiter(map(len, batch.values), np.int64, count)
        sizes += _ROW_OVERHEAD_BYTES
        if batch.updates:
            rows = self._size_updates(batch, rows, sizes, answer)
        tickets = await self._write_steps(batch, rows, sizes, view, answer)
        await self._await_tickets(tickets, batch, view, answer)
        if not self._state.serving():
            raise UnknownFateError(reason=_LEASE_ENDED)
        self.rows_written += len(rows)
        if batch.kind == records.USER:
            self._count_writes(batch, rows, sizes - _ROW_OVERHEAD_BYTES)
        return answer

    async def put(
        self,
        key: bytes,
        value: bytes,
        partition_id: int,
        *,
        ttl_ms: int = 0,
        table_version: int = 0,
        durability: Durability = Durability.ALL_IN_SYNC,
    ) -> int:
        """Put one row and return its version: as a batch of one, and in less than half the time.

        Raises:
            KoinonError: why ``write`` would refuse the batch, its partition or its row.
        """
        self._state.check_lease()
        view = self._state.served
        if (refusal := self._refusal(view, partition_id, table_version)) is not None:
            raise refusal
        return await self._put(view, key, value, partition_id, ttl_ms, durability)

    def _refusal(
        self, view: ServedPartitions, partition_id: int, table_version: int
    ) -> KoinonError | None:
        """Return why nothing may be written in the partition."""
        state = self._state
        is_led = partition_id < len(view.led) and view.led[partition_id]
        if not is_led or (state.any_stopped and state.stopped[partition_id]):
            return state.refusal(view, partition_id, table_version)
        if state.any_too_few and state.too_few[partition_id]:
            return self._replicator.not_enough(partition_id)
        return None

    async def _put(
        self,
        view: ServedPartitions,
        key: bytes,
        value: bytes,
        partition_id: int,
        ttl_ms: int,
        durability: Durability,
    ) -> int:
        """Put one row of a partition that is served in ``view``: the agent's thread may have
        published another by now, and what was written then is of unknown fate. No step makes an
        array where it could do without: a put alone would spend most of its time in these.
        """
        state = self._state
        size = len(key) + len(value) + _ROW_OVERHEAD_BYTES
        self._writer.check_room(1, size, size)
        self._writer.begin(size)
        expires_at_ms = self._clock.now_ms() + ttl_ms if ttl_ms else 0
        version, effects = write_decisions.decide_put(
            partition_id,
            records.heads(len(view.led))[partition_id] + key,
            value,
            expires_at_ms,
            self._primaries,
        )
        ticket = self._replicator.submit(effects, size)
        assert ticket is not None  # it writes a record
        await self._replicator.finish(ticket, all_in_sync=durability is Durability.ALL_IN_SYNC)
        if not state.serving():
            raise UnknownFateError(reason=_LEASE_ENDED)
        touched = effects.touched
        if not (
            state.still_leads(view, touched) or self._led_when_complete(view, touched, ticket).all()
        ):
            raise UnknownFateError(reason=_HANDED_ON)
        self.rows_written += 1
        self.traffic.count_write(partition_id, key, len(key) + len(value))
        return version

    async def _write_one(self, batch: WriteBatch) -> WriteAnswer:
        """As ``write``, of a batch that is one put."""
        view, p = self._state.served, batch.partition_ids.item()
        if (refusal := self._refusal(view, p, batch.table_version)) is not None:
            return WriteAnswer(versions=np.zeros(1, np.uint64), refusals={p: refusal})
        ttl_ms = batch.ttl_ms[0] if batch.ttl_ms is not None else 0
        key, value = batch.keys[0], batch.values[0]
        version = await self._put(view, key, value, p, ttl_ms, batch.durability)
        return WriteAnswer(versions=np.array((version,), np.uint64))

    def _size_updates(
        self, batch: WriteBatch, rows: np.ndarray, sizes: np.ndarray, answer: WriteAnswer
    ) -> np.ndarray:
        """Add to ``sizes`` what updates look at and write, as far as that is known before they are
        decided; return the rows that fit into the bound of a batch. The others are refused.
        """
        updated = [row for row in rows.tolist() if row in batch.updates]
        keys = [batch.keys[row] for row in updated]
        lengths = self.lengths_now(keys, batch.partition_ids[updated].tolist())
        for row, length in zip(updated, lengths, strict=True):
            sizes[row] += batch.updates[row].size + length
        fits = np.cumsum(sizes[rows]) <= MAX_BATCH_BYTES
        fits[0] = True  # so that it does some day
        error = ResourceExhaustedError(
            resource="bytes of the records that a batch updates", limit=MAX_BATCH_BYTES
        )
        answer.row_errors.update(dict.fromkeys(rows[~fits].tolist(), error))
        return rows[fits]

    def lengths_now(self, keys: Sequence[bytes], partition_ids: Sequence[int]) -> list[int]:
        """Return the bytes of the record of each key, stored or pending, whichever is longer; 0
        where there is none.
        """
        data_keys = [records.head_of(p) + key for p, key in zip(partition_ids, keys, strict=True)]
        pending = (self._pending.find(key)[1] for key in data_keys)
        lengths = self._store.lengths(data_keys)
        return [max(n, len(record or b"")) for n, record in zip(lengths, pending, strict=True)]

    def _count_writes(self, batch: WriteBatch, rows: np.ndarray, sizes: np.ndarray) -> None:
        partition_ids, keys = batch.partition_ids, batch.keys
        if len(rows) < len(keys):
            partition_ids, sizes = partition_ids[rows], sizes[rows]
            keys = [keys[row] for row in rows.tolist()]
        self.traffic.count_writes(partition_ids, keys, sizes)

    def _refuse_too_few(self, partition_ids: U32Array, answer: WriteAnswer) -> None:
        """Refuse what has too few replicas for a write, partition by partition."""
        few = self._state.too_few[partition_ids]
        if few.any():
            for partition_id in np.unique(partition_ids[few]).tolist():
                answer.refusals.setdefault(partition_id, self._replicator.not_enough(partition_id))

    async def _write_steps(
        self,
        batch: WriteBatch,
        rows: np.ndarray,
        sizes: np.ndarray,
        view: ServedPartitions,
        answer: WriteAnswer,
    ) -> list[tuple[np.ndarray, Ticket | None]]:
        """Queue the rows step by step; room for all of them is set aside before the first."""
        count = len(batch.keys)
        tickets: list[tuple[np.ndarray, Ticket | None]] = []
        rows_left, size_left = len(rows), int(sizes[rows].sum())
        self._writer.promise(rows_left, size_left, size_left if len(batch.deletes) < count else 0)
        try:
            for index, step in enumerate(self._steps(rows, sizes)):
                if index:
                    await asyncio.sleep(0)
                part = batch if len(step) == count else batch.taking(step)
                try:
                    if part.deletes or part.conditions or part.updates:
                        await self.unclaimed(part.partition_ids)
                    size = int(sizes[step].sum())
                    self._writer.redeem(len(step), size)
                    rows_left, size_left = rows_left - len(step), size_left - size
                    ticket = self._write_step(part, step, size, view, answer)
                except KoinonError as error:
                    if not index:
                        raise
                    answer.row_errors.update(dict.fromkeys(step.tolist(), error))
                else:
                    tickets.append((step, ticket))
        finally:
            self._writer.redeem(rows_left, size_left)
        return tickets

    def _steps(self, rows: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
        """Cut the rows into steps bounded by rows and bytes."""
        if len(rows) <= self._limits.step_rows and sizes.sum() <= self._limits.step_bytes:
            return [rows]
        by_size = np.cumsum(sizes[rows]) // self._limits.step_bytes
        by_count = np.arange(len(rows)) // self._limits.step_rows
        changed = (np.diff(by_size) != 0) | (np.diff(by_count) != 0)
        return np.split(rows, np.flatnonzero(changed) + 1)

    def _write_step(
        self,
        batch: WriteBatch,
        rows: np.ndarray,
        size: int,
        view: ServedPartitions,
        answer: WriteAnswer,
    ) -> Ticket | None:
        """Decide on these rows and queue what they change, without a pause in between."""
        if not self._state.still_serves(view, batch.partition_ids):
            raise LeaseExpiredError(node_id=self._state.node_id)
        if batch.load_id:
            self._state.check_load(batch.load_id)
        if self._state.any_too_few:
            few = self._state.too_few[batch.partition_ids]
            if few.any():
                raise self._replicator.not_enough(int(batch.partition_ids[few][0]))
        count = len(batch.keys)
        self._writer.check_room(count, size, size if len(batch.deletes) < count else 0)
        self._writer.begin(size)
        now_ms = self._clock.now_ms()
        expires = None
        if batch.ttl_ms is not None:
            expires = [now_ms + ttl if ttl else 0 for ttl in batch.ttl_ms]
        effects = write_decisions.decide_write(
            WriteRows(
                partition_ids=batch.partition_ids,
                keys=records.data_keys(batch.partition_ids, batch.keys, batch.kind),
                values=batch.values,
                deletes=batch.deletes,
                expires_at_ms=expires,
                conditions=batch.conditions,
                updates=batch.updates,
            ),
            self._primaries,
            self._pending,
            self._stored,
            now_ms,
        )
        answer.versions[rows] = effects.versions
        answer.absent += rows[effects.absent].tolist()
        for row, error in effects.failed.items():
            answer.row_errors[int(rows[row])] = error
        for row, result in effects.results.items():
            answer.results[int(rows[row])] = result
        if batch.updates:  # a record may have grown since its size was asked for
            size = max(size, records.put_bytes(list(filter(None, effects.records.values()))))
        return self._replicator.submit(effects, size)

    async def _await_tickets(
        self,
        tickets: list[tuple[np.ndarray, Ticket | None]],
        batch: WriteBatch,
        view: ServedPartitions,
        answer: WriteAnswer,
    ) -> None:
        """Wait for all; rows that failed get their error (all of the batch's raise it).

        What was written to a partition that this node has ceased to lead meanwhile is of unknown
        fate, and only that: moves go on under batches that write many partitions. A step is judged
        when it is complete itself: its partitions may be handed on while others are waited for.
        """
        fates = [self._await_ticket(rows, ticket, batch, view) for rows, ticket in tickets]
        ended = [await fates[0]] if len(fates) == 1 else await asyncio.gather(*fates)
        whole: KoinonError | None = None
        for failed, error in ended:
            if error is None or not len(failed):
                continue
            if len(failed) == len(batch.keys):
                whole = error
                continue
            answer.versions[failed] = 0
            lost = set(failed.tolist())
            answer.absent = [row for row in answer.absent if row not in lost]
            answer.results = {r: v for r, v in answer.results.items() if r not in lost}
            answer.row_errors.update(dict.fromkeys(lost, error))
        if whole is not None:
            raise whole

    async def _await_ticket(
        self, rows: np.ndarray, ticket: Ticket | None, batch: WriteBatch, view: ServedPartitions
    ) -> tuple[np.ndarray, KoinonError | None]:
        """Wait for one step; return its rows that failed, and why."""
        all_in_sync = batch.durability is Durability.ALL_IN_SYNC
        try:
            if ticket is not None:
                await self._replicator.finish(ticket, all_in_sync=all_in_sync)
        except KoinonError as error:
            return rows, error
        partition_ids = batch.partition_ids[rows]
        if self._state.still_leads(view, partition_ids):
            return rows[:0], None
        known = self._state.led_as(view, partition_ids)
        known |= self._led_when_complete(view, partition_ids, ticket)
        return rows[~known], UnknownFateError(reason=_HANDED_ON)

    def _led_when_complete(
        self, view: ServedPartitions, partition_ids: U32Array, ticket: Ticket | None
    ) -> BoolArray:
        """Return which of the partitions were led, in the epochs of ``view`` and under the lease,
        when all that the ticket wrote was complete. They may have been handed on before whoever
        waits for the ticket had its turn, to a replica that was in sync then: it holds the write.
        """
        group = ticket.group if ticket is not None and not ticket.observed else None
        if group is None or group.led_in is None or len(group.led_in) != len(view.epochs):
            return np.zeros(len(partition_ids), np.bool_)
        led: BoolArray = group.led_in[partition_ids] == view.epochs[partition_ids]
        return led

    async def unclaimed(self, partition_ids: U32Array) -> None:
        """Wait until no merge step is under way in these partitions: what they hold is not known
        here before. Whoever decides on it does so without a pause after this. (A write without
        conditions comes after the step in any case, in a later group.) While somebody ``waits``,
        no further step is begun there.
        """
        if not self._pending.claimed:
            return
        ids = np.unique(partition_ids)
        prefixes = {records.prefix_of(p) for p in ids.tolist()}
        self.waits[ids] += 1
        try:
            while groups := self._pending.claiming(prefixes):
                for group in groups:
                    await self._replicator.group_done(group, ids)
        finally:
            self.waits[ids] -= 1

    def now_ms(self) -> int:
        """Return the Unix time by which records expire here."""
        return self._clock.now_ms()

    def _stored(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        return dict(self._store.get_many(keys))

    # --- expiry ----------------------------------------------------------------------------

    async def remove_expired(self, keys: list[bytes], view: ServedPartitions) -> None:
        """Queue the sequenced removal of those that are still expired, and wait for it.

        What is no longer served as in ``view`` is left alone: its sequences are another's to give,
        and the reader is refused anyway. On a disk too full even for a removal, reads go on: this
        process's clock keeps it expired. So they do where too few replicas are left for a write.
        """
        keys = list(dict.fromkeys(keys))
        partition_ids = np.fromiter(map(records.partition_of_data_key, keys), np.uint32, len(keys))
        await self.unclaimed(partition_ids)
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
        ticket = self._replicator.submit(effects, len(keys) * _ROW_OVERHEAD_BYTES)
        if ticket is not None:
            try:
                await self._replicator.finish(ticket)
            except (StorageFullError, UnavailableError, UnknownFateError):
                self._clock.keep_told()


def _append_record(
    answer: ReadAnswer, row: int, record: Record | None, want_versions: bool
) -> None:
    if record is None or record.tombstone:
        answer.missing.append(row)
        record = records.Record(0, 0, 0, b"")
    answer.values.append(record.value)
    if want_versions:
        answer.versions.append(record.sequence)
        answer.expires_at_ms.append(record.expires_at_ms)
