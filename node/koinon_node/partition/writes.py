"""Writes rows to partitions that this node leads.

Rules that hold here:
- No write is acknowledged without a lease, checked before and again after (rule 10). A write that
  became complete after the lease or the epoch ended is answered with unknown fate. A write that was
  complete before is acknowledged, even if another node leads the partition by then.
- A write is refused before it gets a sequence if its partition has too few replicas.
- An atomic batch (``commit``) is one ticket, which is never cut.
- A single put takes a short path (``begin_put``). Large batches are written in steps, with yields
  to the event loop between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.formats.records import BoolArray, U32Array
from koinon_node.core.membership.assignment import ServedPartitions
from koinon_node.core.quotas import Quota
from koinon_node.core.writes import write_decisions
from koinon_node.core.writes.atomic_batch import AtomicSteps, Check, Decided, decide_batch
from koinon_node.core.writes.commit_group import Ticket
from koinon_node.core.writes.updates import Look, Remove
from koinon_node.core.writes.write_decisions import WriteRows
from koinon_node.partition import quota_costs
from koinon_node.partition.batches import (
    AtomicAnswer,
    AtomicBatch,
    Durability,
    LonePut,
    WriteAnswer,
    WriteBatch,
)
from koinon_node.partition.serving_context import ServingContext
from koinon_node.replication.ticket_callback import TicketCallback
from koinon_proto.contract.errors import (
    KoinonError,
    LeaseExpiredError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import MAX_BATCH_BYTES

_ROW_OVERHEAD_BYTES = 48
_LEASE_ENDED = "the node's lease ended before the answer"
_HANDED_OVER = "its partition was handed over before the answer"


class Writes:
    """Writes and updates records of the partitions that this node leads. Belongs to the event
    loop.
    """

    def __init__(self, context: ServingContext) -> None:
        self._state = context.state
        self._store = context.store
        self._writer = context.writer
        self._pending = context.pending
        self._primaries = context.primaries
        self._replicator = context.replicator
        self._claims = context.claims
        self._traffic = context.traffic
        self._limits = context.limits
        self._clock = context.clock

    async def write(self, batch: WriteBatch) -> WriteAnswer:
        """Write the rows; return when the changes have the requested durability."""
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
        if batch.refused:
            answer.row_errors.update({r: e for r in rows.tolist() if (e := batch.refused.get(r))})
            rows = np.setdiff1d(rows, list(answer.row_errors))
        if not len(rows):
            return answer
        sizes = np.fromiter(map(len, batch.keys), np.int64, count)
        sizes += np.fromiter(map(len, batch.values), np.int64, count)
        if view.shares and batch.kind != records.STAGED:
            rows = self._within_quota(batch, rows, sizes, view, answer)
            if not len(rows):
                return answer
        sizes += _ROW_OVERHEAD_BYTES
        if batch.updates:
            rows = self._size_updates(batch, rows, sizes, answer)
        tickets = await self._write_steps(batch, rows, sizes, view, answer)
        await self._await_tickets(tickets, batch, view, answer)
        if not self._state.serving():
            raise UnknownFateError(reason=_LEASE_ENDED)
        quota = self._state.quota(view, int(batch.partition_ids[0])) if batch.updates else None
        if quota is not None:
            quota.spend(0, quota_costs.answered(answer.results.values()))
        self._traffic.rows_written += len(rows)
        if batch.kind == records.USER:
            self._count_writes(batch, rows, sizes - _ROW_OVERHEAD_BYTES)
        return answer

    async def put(self, put: LonePut) -> int:
        """Put one row and return its version.

        Raises:
            KoinonError: the errors of ``begin_put``, raised or passed to ``ended``.
        """
        fate: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def ended(end: int | KoinonError) -> None:
            if fate.done():  # the caller was cancelled
                return
            if isinstance(end, KoinonError):
                fate.set_exception(end)
            else:
                fate.set_result(end)

        self.begin_put(put, ended)
        return await fate

    def begin_put(self, put: LonePut, ended: Callable[[int | KoinonError], None]) -> None:
        """Put one row without a task and without arrays, in a fraction of the time of a batch.
        ``ended`` is called in a later turn of the loop with the row's version, once it has the
        requested durability, or with the error.

        Raises:
            KoinonError: the put was refused, and had no effect.
        """
        state, p = self._state, put.partition_id
        state.check_lease()
        view = state.served  # the agent's thread may publish another before the put is durable
        if (refusal := self._refusal(view, p, put.table_version)) is not None:
            raise refusal
        row_bytes = len(put.key) + len(put.value)
        size = row_bytes + _ROW_OVERHEAD_BYTES
        if view.shares:
            self._take_quota(view, p, 1, row_bytes)
        self._writer.check_room(1, size, size)
        self._writer.begin(size)
        expires_at_ms = self._clock.now_ms() + put.ttl_ms if put.ttl_ms else 0
        data_key = records.heads(len(view.led))[p] + put.key
        version, effects = write_decisions.decide_put(
            p, data_key, put.value, expires_at_ms, self._primaries
        )

        def on_end(error: KoinonError | None) -> None:
            if error is None:
                error = self._fate_of_put(view, p, callback.ticket)
            if error is None:
                self._traffic.rows_written += 1
                self._traffic.count_write(p, put.key, row_bytes)
            ended(version if error is None else error)

        waits = put.durability is Durability.ALL_IN_SYNC
        timeout_s = self._limits.write_timeout_ms / 1000 if waits else None
        callback = TicketCallback(on_end, timeout_s)
        self._replicator.submit(effects, size, callback=callback)

    def _refusal(
        self, view: ServedPartitions, partition_id: int, table_version: int
    ) -> KoinonError | None:
        """Return the reason why the partition takes no writes, or None."""
        state = self._state
        is_led = partition_id < len(view.led) and view.led[partition_id]
        if not is_led or (state.any_stopped and state.stopped[partition_id]):
            return state.refusal(view, partition_id, table_version)
        if state.any_too_few and state.too_few[partition_id]:
            return self._replicator.not_enough(partition_id)
        return None

    def _fate_of_put(
        self, view: ServedPartitions, partition_id: int, ticket: Ticket | None
    ) -> UnknownFateError | None:
        """Return the error if a complete put may not be acknowledged, or None."""
        if not self._state.serving():
            return UnknownFateError(reason=_LEASE_ENDED)
        if self._state.served.epochs is view.epochs:
            return None
        touched = np.array((partition_id,), np.uint32)
        known = self._state.led_as(view, touched)
        if known.all() or self._led_when_complete(view, touched, ticket).all():
            return None
        return UnknownFateError(reason=_HANDED_OVER)

    async def commit(self, batch: AtomicBatch) -> AtomicAnswer:
        """Write the batch atomically; return when it has the requested durability.

        Raises:
            CheckFailedError, NotANumberError, NumberOverflowError: an operation of the batch
            failed. KoinonError: the partition or a row is refused, as by ``write``.
        """
        self._state.check_lease()
        view, p = self._state.served, batch.partition_id
        if (refusal := self._refusal(view, p, batch.table_version)) is not None:
            raise refusal
        quota = self._take_quota(view, p, *quota_costs.of_batch(batch))
        partition_ids = np.array((p,), np.uint32)
        await self._claims.released(partition_ids)
        decided, ticket = self._decide_batch(batch, view, partition_ids)
        await self._await_batch(decided, ticket, batch, view, partition_ids)
        if decided.refusal is not None:
            raise decided.refusal
        results = decided.results if batch.cursor is None else decided.results[1:]
        if quota is not None:
            quota.spend(0, quota_costs.answered(results))
            quota.spend(0, quota_costs.copied(batch, decided.effects.records))
        written = decided.effects.records
        self._traffic.rows_written += len(written)
        keys = list(dict.fromkeys(batch.keys))
        data_keys = [records.head_of(p) + key for key in keys]
        sizes = [len(written.get(data_key) or b"") for data_key in data_keys]
        ids = np.full(len(keys), p, np.uint32)
        self._traffic.count_writes(ids, keys, np.array(sizes, np.int64))
        return AtomicAnswer(decided.version, results)

    def _decide_batch(
        self, batch: AtomicBatch, view: ServedPartitions, partition_ids: U32Array
    ) -> tuple[Decided, Ticket | None]:
        """Decide on the batch and queue its effects, without an await in between."""
        p, rows = batch.partition_id, len(batch.keys) + (batch.cursor is not None)
        if not self._state.still_serves(view, partition_ids):
            raise LeaseExpiredError(node_id=self._state.node_id)
        if self._state.any_too_few and self._state.too_few[p]:
            raise self._replicator.not_enough(p)
        size = self._size_of_batch(batch)
        puts = batch.cursor is not None or any(
            not isinstance(step, Check | Look | Remove) for step in batch.steps
        )
        self._writer.check_room(rows, size, size if puts else 0)
        self._writer.begin(size)
        data_keys = [records.head_of(p) + key for key in batch.keys]
        steps = batch.steps
        if batch.cursor is not None:  # first, so that a replaced consumer learns that it is one
            key, commit = batch.cursor
            data_keys.insert(0, records.head_of(p, records.CURSOR) + key)
            steps = [commit, *steps]
        atomic = AtomicSteps(partition_id=p, keys=data_keys, steps=steps, goes_on=batch.goes_on)
        decided = decide_batch(
            atomic, self._primaries, self._pending, self._stored, self._clock.now_ms()
        )
        return decided, self._replicator.submit(decided.effects, size)

    def _size_of_batch(self, batch: AtomicBatch) -> int:
        """Return the most bytes that the batch may write: each update may keep the present value.

        Raises:
            ResourceExhaustedError: they exceed one message to followers.
        """
        keys = list(dict.fromkeys(batch.keys))
        size = sum(self.lengths_now(keys, [batch.partition_id] * len(keys)))
        size += sum(map(len, batch.keys)) + _ROW_OVERHEAD_BYTES * len(batch.keys)
        size += sum(step.size for step in batch.steps if not isinstance(step, Check))
        if batch.cursor is not None:
            size += batch.cursor[1].size + _ROW_OVERHEAD_BYTES
        if size > MAX_BATCH_BYTES:
            raise ResourceExhaustedError(
                resource="bytes of the records that a batch updates", limit=MAX_BATCH_BYTES
            )
        return size

    async def _await_batch(
        self,
        decided: Decided,
        ticket: Ticket | None,
        batch: AtomicBatch,
        view: ServedPartitions,
        partition_ids: U32Array,
    ) -> None:
        """Wait for the batch's writes, and for the groups that its decision read.

        Raises:
            UnknownFateError: the batch may have been written.
            KoinonError: nothing was written.
        """
        all_in_sync = batch.durability is Durability.ALL_IN_SYNC
        try:
            if ticket is not None:
                await self._replicator.finish(ticket, all_in_sync=all_in_sync)
            if not self._state.serving():
                raise UnknownFateError(reason=_LEASE_ENDED)
            led = self._state.still_leads(view, partition_ids)
            if not (led or self._led_when_complete(view, partition_ids, ticket).all()):
                raise UnknownFateError(reason=_HANDED_OVER)
        except UnknownFateError as error:
            if decided.version:
                raise
            reason = (
                f"nothing of the batch was written; an earlier write that it read: {error.reason}"
            )
            raise UnavailableError(reason=reason) from error

    async def _write_one(self, batch: WriteBatch) -> WriteAnswer:
        """Write a batch that is a single put, like ``write``."""
        p = batch.partition_ids.item()
        if (refusal := self._refusal(self._state.served, p, batch.table_version)) is not None:
            return WriteAnswer(versions=np.zeros(1, np.uint64), refusals={p: refusal})
        put = LonePut(
            batch.keys[0],
            batch.values[0],
            p,
            ttl_ms=batch.ttl_ms[0] if batch.ttl_ms is not None else 0,
            table_version=batch.table_version,
            durability=batch.durability,
        )
        return WriteAnswer(versions=np.array((await self.put(put),), np.uint64))

    def _size_updates(
        self, batch: WriteBatch, rows: np.ndarray, sizes: np.ndarray, answer: WriteAnswer
    ) -> np.ndarray:
        """Add to ``sizes`` the bytes that updates read and write, as far as they are known before
        the decision. Return the rows that fit into the bound of a batch; the others are refused.
        """
        updated = [row for row in rows.tolist() if row in batch.updates]
        keys = [batch.keys[row] for row in updated]
        lengths = self.lengths_now(keys, batch.partition_ids[updated].tolist(), batch.kind)
        for row, length in zip(updated, lengths, strict=True):
            sizes[row] += batch.updates[row].size + length
        fits = np.cumsum(sizes[rows]) <= MAX_BATCH_BYTES
        fits[0] = True  # so that every row is written at some time
        error = ResourceExhaustedError(
            resource="bytes of the records that a batch updates", limit=MAX_BATCH_BYTES
        )
        answer.row_errors.update(dict.fromkeys(rows[~fits].tolist(), error))
        return rows[fits]

    def lengths_now(
        self, keys: Sequence[bytes], partition_ids: Sequence[int], kind: int = records.USER
    ) -> list[int]:
        """Return the bytes of each key's record, stored or pending, whichever is longer; 0 for no
        record.
        """
        heads = (records.head_of(p, kind) for p in partition_ids)
        data_keys = [head + key for head, key in zip(heads, keys, strict=True)]
        pending = (self._pending.find(key)[1] for key in data_keys)
        lengths = self._store.lengths(data_keys)
        return [max(n, len(record or b"")) for n, record in zip(lengths, pending, strict=True)]

    def _count_writes(self, batch: WriteBatch, rows: np.ndarray, sizes: np.ndarray) -> None:
        partition_ids, keys = batch.partition_ids, batch.keys
        if len(rows) < len(keys):
            partition_ids, sizes = partition_ids[rows], sizes[rows]
            keys = [keys[row] for row in rows.tolist()]
        self._traffic.count_writes(partition_ids, keys, sizes)

    def _take_quota(
        self, view: ServedPartitions, partition_id: int, rows: int, size: int
    ) -> Quota | None:
        """Count rows of one partition against their keyspace's quota; return the quota, if any.

        Raises:
            QuotaExceededError: the quota is exhausted now.
        """
        quota = self._state.quota(view, partition_id)
        if quota is not None:
            refusal = quota.refusal(self._state.now(), rows, size)
            if refusal is not None:
                raise refusal
        return quota

    def _within_quota(
        self,
        batch: WriteBatch,
        rows: np.ndarray,
        sizes: np.ndarray,
        view: ServedPartitions,
        answer: WriteAnswer,
    ) -> np.ndarray:
        """Return the rows that the keyspace's quota admits; refuse the partitions of the others.
        ``sizes`` are the bytes of keys and values.
        """
        partition_ids = batch.partition_ids[rows]
        quota = self._state.quota(view, int(partition_ids[0]))
        if quota is None:
            return rows
        costs = quota_costs.of_rows(batch, rows, sizes)
        refusals = quota.cut(self._state.now(), partition_ids, costs)
        if not refusals:
            return rows
        answer.refusals.update(refusals)
        return rows[~np.isin(partition_ids, list(refusals))]

    def _refuse_too_few(self, partition_ids: U32Array, answer: WriteAnswer) -> None:
        """Refuse the partitions with too few replicas for a write."""
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
        """Queue the rows step by step. Room for all of them is reserved before the first step."""
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
                        await self._claims.released(part.partition_ids)
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
        """Split the rows into steps bounded by rows and bytes."""
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
        """Decide on these rows and queue the effects, without an await in between."""
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
                list_present=batch.list_present,
                updates=batch.updates,
            ),
            self._primaries,
            self._pending,
            self._stored,
            now_ms,
        )
        answer.versions[rows] = effects.versions
        answer.absent += rows[effects.absent].tolist()
        answer.present += rows[effects.present].tolist()
        for row, error in effects.failed.items():
            answer.row_errors[int(rows[row])] = error
        for row, result in effects.results.items():
            answer.results[int(rows[row])] = result
        if batch.updates:  # a record may have grown since its size was read
            size = max(size, records.put_bytes(list(filter(None, effects.records.values()))))
        return self._replicator.submit(effects, size)

    async def _await_tickets(
        self,
        tickets: list[tuple[np.ndarray, Ticket | None]],
        batch: WriteBatch,
        view: ServedPartitions,
        answer: WriteAnswer,
    ) -> None:
        """Wait for all tickets. Failed rows get their error; if all rows failed it is raised.

        Only writes to partitions that this node has ceased to lead meanwhile have an unknown fate:
        partitions may move while a batch writes many of them. A step is judged when it is complete
        itself: its partitions may be handed over while other steps are still under way. Rows that
        wrote nothing (their condition did not hold, or there was nothing to delete) are refused
        instead, like reads.
        """
        fates = [self._await_ticket(rows, ticket, batch, view) for rows, ticket in tickets]
        ended = [await fates[0]] if len(fates) == 1 else await asyncio.gather(*fates)
        whole: KoinonError | None = None
        for failed, error in chain.from_iterable(self._errors_of(*end, answer) for end in ended):
            if len(failed) == len(batch.keys):
                whole = error
                continue
            answer.versions[failed] = 0
            lost = set(failed.tolist())
            answer.absent = [row for row in answer.absent if row not in lost]
            answer.present = [row for row in answer.present if row not in lost]
            answer.results = {r: v for r, v in answer.results.items() if r not in lost}
            answer.row_errors.update(dict.fromkeys(lost, error))
        if whole is not None:
            raise whole

    def _errors_of(
        self, rows: np.ndarray, error: KoinonError | None, answer: WriteAnswer
    ) -> list[tuple[np.ndarray, KoinonError]]:
        """Return the errors for these rows after an error: if the fate of written rows is unknown,
        rows that wrote nothing get another error.
        """
        if error is None or not len(rows):
            return []
        if not isinstance(error, UnknownFateError):
            return [(rows, error)]
        wrote = answer.versions[rows] != 0
        again = LeaseExpiredError(node_id=self._state.node_id)
        return [(part, e) for part, e in ((rows[wrote], error), (rows[~wrote], again)) if len(part)]

    async def _await_ticket(
        self, rows: np.ndarray, ticket: Ticket | None, batch: WriteBatch, view: ServedPartitions
    ) -> tuple[np.ndarray, KoinonError | None]:
        """Wait for one step; return its failed rows, and the error."""
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
        return rows[~known], UnknownFateError(reason=_HANDED_OVER)

    def _led_when_complete(
        self, view: ServedPartitions, partition_ids: U32Array, ticket: Ticket | None
    ) -> BoolArray:
        """Return a mask of the partitions that this node led, in the epochs of ``view`` and under
        its lease, when the ticket's writes there became complete. A partition may have been handed
        over before the waiting caller ran, to a replica that was in sync: it holds the write.
        """
        led: BoolArray = np.zeros(len(partition_ids), np.bool_)
        group = ticket.group if ticket is not None and not ticket.observed else None
        if group is None:
            return led
        epochs = view.epochs[partition_ids]
        if group.led_in is not None and len(group.led_in) == len(view.epochs):
            led = group.led_in[partition_ids] == epochs
        if group.led_early:
            early = [group.led_early.get(p, 0) for p in partition_ids.tolist()]
            led |= np.array(early, np.uint64) == epochs
        return led

    def _stored(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        return dict(self._store.get_many(keys))
