"""Merges what committed bulk loads have staged in the partitions led here, and deletes the rest.

Driven by the table, which names the loads that are open or being merged. Of a load that is being
merged each partition led here is taken through its steps, a few partitions at a time: the next ones
are planned on a thread while the writer is busy with those before. What is merged, on all in-sync
replicas, is reported; a node that takes a partition over goes on by the mark that its records hold.

What is staged of a load that the table does not name is deleted. A load is never opened again, and
no task stages for it any more: once this node knows the table, its own stages are refused, and what
they had queued comes before (the barrier).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from koinon_node.bulk_load import staged_chunks
from koinon_node.bulk_load.staged_chunks import Manifest
from koinon_node.core.formats import records
from koinon_node.core.membership.assignment import ServedPartitions
from koinon_node.core.writes.commit_group import Ticket
from koinon_node.partition.batches import WriteBatch
from koinon_node.partition.engine import Engine
from koinon_node.ports import LoadCalls
from koinon_node.replication.applier import retrieved
from koinon_node.storage.writer_process import MERGES
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import KoinonError, ResourceExhaustedError, StorageFullError
from koinon_proto.contract.table import NodeNumber, Table
from koinon_proto.v1.replication_pb2 import MergeStep

log = logging.getLogger(__name__)

_RETRY_S = 0.25
_NOTHING_TAKEN_S = 0.01
_REPORT_S = 0.5
_BATCH_PARTITIONS = 64
_SWEEP_PAUSE_S = 2.0
_DELETE_KEYS = 16  # of a load that has ended, at once: its chunks are read to be deleted
_DELETE_DUTY = 0.3  # of the time


class _UnderWay(NamedTuple):
    """A step that was queued, and what this node led then."""

    step: MergeStep
    ticket: Ticket
    view: ServedPartitions


class MergeScheduler:
    """Background work. All methods belong to the event loop's thread."""

    def __init__(self, engine: Engine, calls: LoadCalls) -> None:
        context = engine.context
        self._engine = engine
        self._calls = calls
        self._state = context.state
        self._store = context.store
        self._writer = context.writer
        self._primaries = context.primaries
        self._replicator = context.replicator
        self._clock = context.clock
        self._merge_due, self._sweep_due = asyncio.Event(), asyncio.Event()
        self._manifests: dict[int, Manifest] = {}
        self._merged: dict[int, set[int]] = {}  # reported, by load
        self._swept: ServedPartitions | None = None  # what it was done for
        self._swept_at = 0.0
        self._announced = False  # to the writer, that there will be steps
        self.rows_merged = 0

    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        """Loads or rows have changed: look again at what is to be done."""
        if table.loads and not self._announced:
            self._announced = True
            self._writer.submit(((MERGES, [], []),), 0, 0).add_done_callback(retrieved)
        self._merge_due.set()
        self._sweep_due.set()

    async def run(self) -> None:
        """Work until cancelled. What is to be merged does not wait for what is to be deleted."""
        async with asyncio.TaskGroup() as group:
            group.create_task(_whenever(self._merge_due, self._merge_all))
            group.create_task(_whenever(self._sweep_due, self._sweep))

    # --- merging ---------------------------------------------------------------------------

    async def _merge_all(self) -> float | None:
        """Merge what is led here of all loads; return when to look again, in seconds, if something
        is left.
        """
        earlier: set[int] = set()  # what loads that were committed before have not merged
        again_s: float | None = None
        for load_id in self._merging():
            if await self._merge(load_id, earlier):
                again_s = _RETRY_S
        return again_s

    def _merging(self) -> list[int]:
        """Return the loads that are being merged, in the order of their commits."""
        table = self._state.served.table
        merging = [load for load in table.loads if load.merging] if table else []
        merging.sort(key=lambda load: (load.committed_at, load.load_id))
        loads = [load.load_id for load in merging]
        for known in (self._manifests, self._merged):
            for load_id in [one for one in known if one not in loads]:
                del known[load_id]
        return loads

    async def _merge(self, load_id: int, earlier: set[int]) -> bool:
        """Merge what is led here of a load, but for the partitions that ``earlier`` loads have not
        merged; add to these. Return whether something is left that could be merged.
        """
        epochs = self._state.served.epochs
        if not self._served_of(range(len(epochs))):
            earlier.update(range(len(epochs)))  # they may be served before the next load's turn
            return bool(epochs.any())  # no table tells when they are served
        manifest = await self._manifest(load_id)
        if manifest is None:
            return False
        reported = self._merged.setdefault(load_id, set())
        under_way: list[_UnderWay] = []
        ended: set[int] = set()  # merged, or failed
        done: list[int] = []  # merged, and not reported yet
        clock = asyncio.get_running_loop().time
        report_at = clock() + _REPORT_S
        while True:
            busy = {queued.step.partition_id for queued in under_way}
            wanted = manifest.partition_ids - reported - ended - busy - earlier
            view = self._state.served
            chosen = self._at_rest(self._served_of(wanted)) if self._is_merging(load_id) else []
            steps, known = await self._plan(manifest, chosen)
            merged, failed = await self._finish(under_way)
            is_over = not chosen and not under_way
            done += known + merged
            ended.update(done, failed)
            if done and (is_over or clock() >= report_at):
                await self._report(load_id, done)
                reported.update(done)
                done, report_at = [], clock() + _REPORT_S
            if is_over:
                earlier |= manifest.partition_ids - reported
                led = any(self._state.served.epochs[p] for p in manifest.partition_ids - reported)
                return led and self._is_merging(load_id)
            under_way, refused = self._submit(view, steps)
            ended |= refused
            if steps and not under_way and not refused:
                await asyncio.sleep(_NOTHING_TAKEN_S)

    async def _manifest(self, load_id: int) -> Manifest | None:
        known = self._manifests.get(load_id)
        if known is None:
            table = self._state.table()
            try:
                message = await self._calls.load_manifest(table.cluster.cluster_id, load_id)
            except LoadClosedError:
                return None  # the table that says so is on its way here
            known = self._manifests[load_id] = Manifest.of(message)
        return known

    def _served_of(self, partition_ids: Iterable[int]) -> list[int]:
        """Return which of the partitions are served here and take writes now."""
        ids = np.array(sorted(partition_ids), np.uint32)
        view = self._state.served
        if not len(ids) or not len(view.epochs):
            return []
        served = self._state.served_as(view, ids) & ~self._state.too_few[ids]
        found: list[int] = ids[served].tolist()
        return found

    def _is_merging(self, load_id: int) -> bool:
        """Return whether the newest table says so. It is no older than the one by which this node
        leads what it leads: where the load is over, its marks are gone.
        """
        table = self._state.served.table
        loads = table.loads if table is not None else ()
        return any(load.load_id == load_id and load.merging for load in loads)

    def _at_rest(self, partition_ids: Iterable[int]) -> list[int]:
        """Return some of the partitions in which no step is under way. One that no caller waits for
        any more may be: what it has merged here is not on every in-sync replica yet.
        """
        at_rest = (p for p in partition_ids if not self._replicator.is_merging(p))
        return list(itertools.islice(at_rest, _BATCH_PARTITIONS))

    async def _plan(
        self, manifest: Manifest, partition_ids: Sequence[int]
    ) -> tuple[list[MergeStep], list[int]]:
        """Return the next steps of some of the partitions, and which of these are merged."""

        def plan() -> tuple[list[MergeStep], list[int]]:
            steps: list[MergeStep] = []
            done: list[int] = []
            size = 0
            for p in partition_ids:
                step = staged_chunks.next_step(self._store, manifest, p)
                if step is None:
                    done.append(p)
                    continue
                steps.append(step)
                size += staged_chunks.weight(step.rows, step.bytes)
                if size >= staged_chunks.STEP_BYTES:
                    break
            return steps, done

        if not partition_ids:
            return [], []
        await self._writer.settle(partition_ids)
        return await asyncio.to_thread(plan)

    def _submit(
        self, view: ServedPartitions, steps: Sequence[MergeStep]
    ) -> tuple[list[_UnderWay], set[int]]:
        """Queue those steps that can be taken now, as planned in ``view``; return them, and the
        partitions for which there was no room.
        """
        under_way: list[_UnderWay] = []
        refused: set[int] = set()
        now_ms = self._clock.now_ms()
        for step in steps:
            p = step.partition_id
            ids = np.array([p], np.uint32)
            wanted = self._engine.context.claims.waits[p] or self._replicator.is_merging(p)
            if wanted or self._state.too_few[p] or not self._state.still_serves(view, ids):
                continue
            if not self._is_merging(step.load_id):
                break
            rows, size = step.rows + 1, step.bytes + 1
            try:
                self._writer.check_room(rows, size, size)
            except (ResourceExhaustedError, StorageFullError):
                refused.add(p)
                continue
            step.sequence = self._primaries.take(p)
            if self._primaries.keeps_tombstones(p):
                step.tombstone_at_ms = now_ms + self._primaries.tombstone_ms
            else:
                self._primaries.purge_floors[p] = step.sequence
            ticket = self._replicator.submit_merge(p, step.SerializeToString(), rows, size)
            under_way.append(_UnderWay(step, ticket, view))
        self._writer.end_group()  # what clients write from now on comes after the steps
        return under_way, refused

    async def _finish(self, under_way: Sequence[_UnderWay]) -> tuple[list[int], set[int]]:
        """Wait for the steps; return the partitions that are merged, and those to leave alone for
        a while.
        """
        merged: list[int] = []
        failed: set[int] = set()
        for step, ticket, view in under_way:
            ids = np.array([step.partition_id], np.uint32)
            try:
                await self._replicator.finish(ticket)
            except KoinonError as error:
                log.warning(
                    "merge step failed load=%d partition=%d error=%s",
                    step.load_id,
                    step.partition_id,
                    error,
                )
                failed.add(step.partition_id)
                continue
            if not self._state.still_leads(view, ids):
                failed.add(step.partition_id)  # without a wait for its followers
                continue
            self.rows_merged += step.rows
            self._engine.context.traffic.count_merge(step.partition_id, step.rows, step.bytes)
            if step.last:
                merged.append(step.partition_id)
        return merged, failed

    async def _report(self, load_id: int, partition_ids: Sequence[int]) -> None:
        cluster_id = self._state.table().cluster.cluster_id
        await self._calls.report_merged(cluster_id, load_id, partition_ids)

    # --- what is left of loads that have ended ---------------------------------------------

    async def _sweep(self) -> float | None:
        """Delete what is staged here for loads that have ended; return when to look again, in
        seconds, if that is to be soon. Loads that end are looked after at once, other changes of
        what is led here every now and then.
        """
        view, before = self._state.served, self._swept
        table = view.table
        if table is None or not len(view.epochs):
            return None
        loads_before = before.table.loads if before is not None and before.table else None
        if loads_before == table.loads:
            assert before is not None
            if before.epochs is view.epochs:
                return None
            wait_s = self._swept_at + _SWEEP_PAUSE_S - asyncio.get_running_loop().time()
            if wait_s > 0:
                return wait_s
        await self._writer.barrier()
        served = self._served_of(range(len(view.epochs)))
        await self._writer.settle(served)
        found = await asyncio.to_thread(staged_chunks.staged_loads, self._store, served)
        for p, loads in found.items():
            for load_id in loads:
                if not self._is_active(load_id):
                    await self._delete(p, load_id)
        self._swept_at = asyncio.get_running_loop().time()
        if len(served) < int(np.count_nonzero(view.epochs)):
            return _SWEEP_PAUSE_S
        self._swept = view
        return None

    def _is_active(self, load_id: int) -> bool:
        """Return whether the load is open or being merged, by the table as it is now, which is no
        older than the one under which anything that is found here was staged.
        """
        table = self._state.served.table
        return table is None or any(load.load_id == load_id for load in table.loads)

    async def _delete(self, partition_id: int, load_id: int) -> None:
        """Delete all that the load has staged in the partition, in bounded steps."""
        loop = asyncio.get_running_loop()
        await self._writer.settle((partition_id,))
        while keys := staged_chunks.staged_keys(self._store, partition_id, load_id, _DELETE_KEYS):
            began = loop.time()
            answer = await self._engine.writes.write(
                WriteBatch(
                    table_version=0,
                    keys=keys,
                    values=[b""] * len(keys),
                    partition_ids=np.full(len(keys), partition_id, np.uint32),
                    deletes=frozenset(range(len(keys))),
                    kind=records.STAGED,
                )
            )
            for error in (*answer.refusals.values(), *answer.row_errors.values()):
                raise error
            await self._writer.settle((partition_id,))
            await asyncio.sleep((loop.time() - began) * (1 / _DELETE_DUTY - 1))


async def _whenever(due: asyncio.Event, work: Callable[[], Awaitable[float | None]]) -> None:
    """Work whenever it is due, and again after the seconds that it returns; until cancelled."""
    while True:
        due.clear()
        try:
            again_s = await work()
        except KoinonError as error:
            log.warning("bulk loads wait error=%s", error)
            again_s = _RETRY_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(again_s):
                await due.wait()
