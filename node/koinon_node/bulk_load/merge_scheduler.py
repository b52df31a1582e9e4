"""Merges staged rows of committed bulk loads in the partitions led here; deletes rows of ended
loads.

The table drives it: the table names the loads that are open or being merged. For a load that is
being merged, this node takes each partition that it leads through its merge steps, a few partitions
at a time. A thread plans the next steps while the writer writes the ones before. A partition that
is merged on all in-sync replicas is reported to the coordinators. A node that takes a partition
over continues from the mark among its records.

Rows staged for a load that the table does not name are deleted. A load is never opened again, and
no more rows are staged for it: once this node has the table, it refuses them, and a barrier lets
the writes that were queued before come first.
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
_NOTHING_TAKEN_S = 0.01  # the wait after a round in which no step could be queued
_REPORT_S = 0.5  # the longest time between two reports of merged partitions
_BATCH_PARTITIONS = 64  # whose steps are planned together
_SWEEP_PAUSE_S = 2.0
_DELETE_KEYS = 16  # chunks of an ended load deleted at once: a delete reads the chunk
_DELETE_DUTY = 0.3  # the share of time spent on deletes


class _UnderWay(NamedTuple):
    """A queued merge step, with the partitions served at that time."""

    step: MergeStep
    ticket: Ticket
    view: ServedPartitions


class MergeScheduler:
    """Runs merges and deletes in the background. Belongs to the event loop's thread."""

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
        self._merged: dict[int, set[int]] = {}  # by load: the partitions reported as merged
        self._swept: ServedPartitions | None = None  # the view of the last complete sweep
        self._swept_at = 0.0
        self._announced = False  # whether the writer process has imported the merge code
        self.rows_merged = 0

    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        """Check again which merges and deletes are due: loads or rows have changed."""
        if table.loads and not self._announced:
            self._announced = True
            self._writer.submit(((MERGES, [], []),), 0, 0).add_done_callback(retrieved)
        self._merge_due.set()
        self._sweep_due.set()

    async def run(self) -> None:
        """Work until cancelled. Merges do not wait for deletes."""
        async with asyncio.TaskGroup() as group:
            group.create_task(_whenever(self._merge_due, self._merge_all))
            group.create_task(_whenever(self._sweep_due, self._sweep))

    # --- merging ---------------------------------------------------------------------------

    async def _merge_all(self) -> float | None:
        """Merge all loads in the partitions led here. Return the seconds until the next try if some
        work is left, else None.
        """
        earlier: set[int] = set()  # partitions in which earlier loads are not merged yet
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
        """Merge a load in the partitions led here, except where ``earlier`` loads are not merged
        yet; add this load's unmerged partitions to ``earlier``. Return whether a merge is left to
        do.
        """
        epochs = self._state.served.epochs
        if not self._served_of(range(len(epochs))):
            earlier.update(range(len(epochs)))  # they may become served before the next load's turn
            return bool(epochs.any())  # no new table announces that they become served
        manifest = await self._manifest(load_id)
        if manifest is None:
            return False
        reported = self._merged.setdefault(load_id, set())
        under_way: list[_UnderWay] = []
        ended: set[int] = set()  # merged, or failed
        done: list[int] = []  # merged, not reported yet
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
                return None  # the load has ended; the new table will tell
            known = self._manifests[load_id] = Manifest.of(message)
        return known

    def _served_of(self, partition_ids: Iterable[int]) -> list[int]:
        """Return the partitions that this node serves and that take writes now."""
        ids = np.array(sorted(partition_ids), np.uint32)
        view = self._state.served
        if not len(ids) or not len(view.epochs):
            return []
        served = self._state.served_as(view, ids) & ~self._state.too_few[ids]
        found: list[int] = ids[served].tolist()
        return found

    def _is_merging(self, load_id: int) -> bool:
        """Return whether the load is being merged by the newest table. After the end of a load its
        marks are deleted, so no step may be planned by an older table.
        """
        table = self._state.served.table
        loads = table.loads if table is not None else ()
        return any(load.load_id == load_id and load.merging for load in loads)

    def _at_rest(self, partition_ids: Iterable[int]) -> list[int]:
        """Return some of the partitions without a merge step under way. A step whose waiter has
        gone may still be under way: its rows are not on every in-sync replica yet.
        """
        at_rest = (p for p in partition_ids if not self._replicator.is_merging(p))
        return list(itertools.islice(at_rest, _BATCH_PARTITIONS))

    async def _plan(
        self, manifest: Manifest, partition_ids: Sequence[int]
    ) -> tuple[list[MergeStep], list[int]]:
        """Return the next steps of some of the partitions, and the partitions that are merged."""

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
        """Queue the steps, planned in ``view``, that can be queued now. Return the queued steps,
        and the partitions without room for theirs.
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
        self._writer.end_group()  # later writes of clients join the next group, after the steps
        return under_way, refused

    async def _finish(self, under_way: Sequence[_UnderWay]) -> tuple[list[int], set[int]]:
        """Wait for the steps. Return the merged partitions, and the ones to retry later."""
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
                failed.add(step.partition_id)  # not waiting for its followers
                continue
            self.rows_merged += step.rows
            self._engine.context.traffic.count_merge(step.partition_id, step.rows, step.bytes)
            if step.last:
                merged.append(step.partition_id)
        return merged, failed

    async def _report(self, load_id: int, partition_ids: Sequence[int]) -> None:
        cluster_id = self._state.table().cluster.cluster_id
        await self._calls.report_merged(cluster_id, load_id, partition_ids)

    # --- rows left by ended loads ----------------------------------------------------------

    async def _sweep(self) -> float | None:
        """Delete the rows staged here for ended loads. Return the seconds until the next sweep if
        one is due soon, else None. The end of a load starts a sweep at once; other changes of the
        served partitions start one now and then.
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
        """Return whether the load is open or being merged by the present table, which is no older
        than the table under which any chunk found here was staged.
        """
        table = self._state.served.table
        return table is None or any(load.load_id == load_id for load in table.loads)

    async def _delete(self, partition_id: int, load_id: int) -> None:
        """Delete all rows that the load has staged in the partition, in bounded steps."""
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
    """Run ``work`` whenever ``due`` is set, and again after the seconds that it returns; until
    cancelled.
    """
    while True:
        due.clear()
        try:
            again_s = await work()
        except KoinonError as error:
            log.warning("bulk loads cannot proceed, retrying error=%s", error)
            again_s = _RETRY_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(again_s):
                await due.wait()
