"""A bench with the bulk paths and the driver of loads, and a coordinator for it to ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from koinon_node.bulk_load import merge_scheduler
from koinon_node.bulk_load.column_reader import ColumnReader, ColumnsAnswer, ColumnsPage
from koinon_node.bulk_load.merge_scheduler import MergeScheduler
from koinon_node.bulk_load.stager import StageBatch, Stager
from koinon_node.config import Limits
from koinon_node.core.formats import records
from koinon_proto.contract import columns
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import ActiveLoad, Table, first_sequence
from koinon_proto.v1.loads_pb2 import LOAD_MODE_APPEND, LOAD_MODE_OVERWRITE, LoadManifest
from tests.kit.waiting import until
from tests.node.kit.held_writer import EPOCH, ME, PARTITIONS, WAIT_S, Bench, in_partition, table_of
from tests.node.kit.held_writer import row_of as row
from tests.node.kit.played_follower import PlayedFollower
from tests.node.kit.staged_chunks import LOAD, Partition, Rows, chunk_of

Answer = TypeVar("Answer")
START = first_sequence(EPOCH)
ALL = range(PARTITIONS)
TURNS = 2_000  # of the loop, in which much would happen that must not
OPEN = ActiveLoad(load_id=LOAD, merging=False)
MERGING = ActiveLoad(load_id=LOAD, merging=True)


class LoadsCoordinator:
    """Answers about bulk loads what the test has said. Calls raise what is in ``errors``, one each,
    and wait while ``gate`` is not set.
    """

    def __init__(self) -> None:
        self.manifests: dict[int, LoadManifest] = {}
        self.asked: list[int] = []
        self.reports: list[tuple[int, list[int]]] = []
        self.errors: list[KoinonError] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def commit(
        self,
        *attempts: int,
        load_id: int = LOAD,
        partition_ids: Sequence[int] = (0,),
        replace: bool = False,
        prefix: bytes = b"",
    ) -> None:
        """The load is final, with these attempts in the order of their tasks."""
        self.manifests[load_id] = LoadManifest(
            load_id=load_id,
            mode=LOAD_MODE_OVERWRITE if replace else LOAD_MODE_APPEND,
            prefix=prefix,
            attempts=attempts,
            partition_ids=partition_ids,
        )

    def merged(self, load_id: int = LOAD) -> set[int]:
        """Return the partitions that were reported."""
        return {p for load, ids in self.reports if load == load_id for p in ids}

    async def load_manifest(self, cluster_id: str, load_id: int) -> LoadManifest:
        self.asked.append(load_id)
        await self._answer()
        if load_id not in self.manifests:
            raise LoadClosedError(load_id=load_id, state="done")
        return self.manifests[load_id]

    async def report_merged(
        self, cluster_id: str, load_id: int, partition_ids: Sequence[int]
    ) -> None:
        await self._answer()
        self.reports.append((load_id, list(partition_ids)))

    async def _answer(self) -> None:
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)


class LoadsBench(Bench):
    """The parts, with calls that have the arguments which most tests need."""

    def __init__(self, directory: Path, limits: Limits | None = None) -> None:
        super().__init__(directory, limits)
        self.stager = Stager(self.engine)
        self.column_reader = ColumnReader(self.engine)
        self.coordinators = LoadsCoordinator()
        self.merger = MergeScheduler(self.engine, self.coordinators)

    def take_table(self, table: Table) -> None:
        super().take_table(table)
        self.merger.on_table(table, ME, 1)

    def loads_are(self, *loads: ActiveLoad) -> None:
        """Take a newer table that names these loads, and is otherwise the last one."""
        table = self.state.table()
        self.take_table(replace(table, table_version=table.table_version + 1, loads=loads))

    def merge(self, *attempts: int, partition_ids: Sequence[int] = (0,)) -> None:
        """The load is final: the coordinators know, and the table says so."""
        self.coordinators.commit(*attempts, partition_ids=partition_ids)
        self.loads_are(MERGING)

    def partition(self, partition_id: int = 0) -> Partition:
        """Return what the store holds of a partition."""
        return Partition(self.store, partition_id)

    @contextlib.asynccontextmanager
    async def loading(self) -> AsyncIterator[asyncio.Task[None]]:
        """Have the driver of loads at work."""
        task = asyncio.create_task(self.merger.run())
        try:
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @contextlib.asynccontextmanager
    async def ticking(self) -> AsyncIterator[None]:
        """Have the replicator look at who is late, in a time that runs fast."""

        async def tick() -> None:
            while True:
                self.now += 0.1
                self.replicator.tick()
                await asyncio.sleep(0.001)

        task = asyncio.create_task(tick())
        try:
            yield
        finally:
            task.cancel()

    async def stage(
        self,
        rows: Rows,
        *,
        attempt: int = 1,
        number: int = 0,
        partition_id: int = 0,
        load_id: int = LOAD,
        orders: Sequence[int] | None = None,
        expiries: Sequence[int] | None = None,
        expires_at_ms: int = 0,
        table_version: int = 1,
    ) -> dict[int, KoinonError]:
        """Stage the rows as one chunk."""
        chunk = chunk_of(rows, orders=orders, expiries=expiries, expires_at_ms=expires_at_ms)
        return await self.stage_chunks(
            {(partition_id, number): chunk},
            attempt=attempt,
            load_id=load_id,
            table_version=table_version,
        )

    async def stage_chunks(
        self,
        chunks: dict[tuple[int, int], bytes],
        *,
        attempt: int = 1,
        load_id: int = LOAD,
        table_version: int = 1,
    ) -> dict[int, KoinonError]:
        """Stage chunks by (partition, number), in one call."""
        ids = in_partition(0, len(chunks))
        ids[:] = [partition_id for partition_id, _ in chunks]
        return await self.stager.stage(
            StageBatch(
                table_version=table_version,
                load_id=load_id,
                attempt=attempt,
                partition_ids=ids,
                numbers=[number for _, number in chunks],
                chunks=list(chunks.values()),
                gathered=columns.gather(list(chunks.values())),
            )
        )

    async def read_columns(
        self,
        *partition_ids: int,
        prefix: bytes = b"",
        after_key: bytes = b"",
        bytes_max: int = 0,
        keys_only: bool = False,
        want_versions: bool = False,
        table_version: int = 1,
    ) -> ColumnsAnswer:
        return await self.column_reader.read_columns(
            ColumnsPage(
                table_version=table_version,
                partition_ids=partition_ids or (0,),
                prefix=prefix,
                after_key=after_key,
                bytes_max=bytes_max,
                keys_only=keys_only,
                want_versions=want_versions,
            )
        )


@asynccontextmanager
async def loads_bench(
    directory: Path,
    *,
    table: Table | None = None,
    limits: Limits | None = None,
    lead: bool = True,
) -> AsyncIterator[LoadsBench]:
    """Make a bench of the store in ``directory`` while a load is open, or by another table; all of
    its partitions are led (or none). Pauses between attempts are short.
    """
    short: dict[str, Any] = {
        "_RETRY_S": 0.01,
        "_NOTHING_TAKEN_S": 0.001,
        "_SWEEP_PAUSE_S": 0.02,
        "_DELETE_DUTY": 1.0,
        "_REPORT_S": 0.0,
    }
    with mock.patch.multiple(merge_scheduler, **short):
        bench = LoadsBench(directory, limits)
        await bench.writer.start()
        try:
            if lead:
                await bench.lead_all(table or table_of(loads=[OPEN]))
            yield bench
        finally:
            bench.store.close(clean=False)


def with_loads(
    directory: Path,
    use: Callable[[LoadsBench], Awaitable[Answer]],
    *,
    table: Table | None = None,
    limits: Limits | None = None,
    lead: bool = True,
) -> Answer:
    """Run ``use`` over a bench of the store in ``directory``."""

    async def run() -> Answer:
        async with loads_bench(directory, table=table, limits=limits, lead=lead) as bench:
            return await asyncio.wait_for(use(bench), WAIT_S)

    return asyncio.run(run())


Use = Callable[[LoadsBench], Awaitable[None]]


async def many_turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def reported(bench: LoadsBench, *partition_ids: int, load_id: int = LOAD) -> None:
    await until(
        lambda: bench.coordinators.merged(load_id) == set(partition_ids),
        f"{partition_ids} of load {load_id} are reported",
    )


async def claimed(bench: LoadsBench, partition_id: int = 0) -> None:
    prefix = records.prefix_of(partition_id)
    await until(lambda: bench.pending.claiming({prefix}), "a step is under way")


def table(*rows: Any, load: ActiveLoad = OPEN, **facts: Any) -> Table:
    return table_of(*rows, loads=[load], **facts)


def with_one_replica_more(directory: Path, use: Use, **how: Any) -> None:
    """Run with partition 0 on two nodes, both in sync."""
    rows = [row(0, (1, 2)), *(row(p) for p in ALL[1:])]
    with_loads(directory, use, table=table(*rows), **how)


async def acknowledged(follower: PlayedFollower, work: Awaitable[Any]) -> Any:
    """Do the work, which the follower acknowledges as it comes."""
    task = asyncio.ensure_future(work)
    await until(lambda: task.done() or not follower.end.inbox.empty(), "something is streamed")
    while not task.done():
        await follower.acknowledge()
        await asyncio.sleep(0.001)
    return await task


def retried(bench: LoadsBench) -> bool:
    """Return whether the first look at the step is over."""
    return all(waiter.done() for group in bench.pending for _, waiter in group.waiting)
