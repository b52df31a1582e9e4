"""An engine over a real store, with a test for a writer process, and what can come between.

``HeldChannel`` stands behind the real group commit: groups are sealed, ordered and answered as
ever, but a group is committed and answered only when the test releases it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from koinon_node.config import Limits
from koinon_node.core.formats.records import U32Array
from koinon_node.core.formats.writer_frames import GroupFrame, TicketFrame
from koinon_node.core.membership.assignment import Adoption, ServedPartitions
from koinon_node.core.membership.lease import NO_LEASE, Lease
from koinon_node.partition.batches import (
    Durability,
    ReadAnswer,
    ScanAnswer,
    ScanPage,
    WriteAnswer,
    WriteBatch,
)
from koinon_node.partition.engine import Engine
from koinon_node.partition.serving_context import ServingContext
from koinon_node.ports import RowChange
from koinon_node.replication.commit_tracker import CommitTracker
from koinon_node.replication.replicator import Replicator
from koinon_node.state import NodeState, WallClock
from koinon_node.storage.environment import DATA_DB, EXPIRY_DB, open_databases
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_node.storage.merge_executor import merge
from koinon_node.storage.sizes import SizeEstimates
from koinon_node.storage.store import Store
from koinon_node.storage.transactions import stored_entries
from koinon_node.storage.writer import Writer
from koinon_node.storage.writer_channel import Answer as Answered
from koinon_node.storage.writer_process import MERGES
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.table import (
    NO_NODE,
    ActiveLoad,
    MoveSettings,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
    PartitionStatus,
    Table,
    registration_digest,
)
from koinon_proto.v1.replication_pb2 import MergeStep
from tests.kit.tables import config_of, node_of

WAIT_S = 60.0
PARTITIONS = 4
EPOCH = 3
ME, F2, F3 = NodeNumber(1), NodeNumber(2), NodeNumber(3)
MIB = 1024 * 1024
Answer = TypeVar("Answer")


def row_of(
    partition_id: int,
    replicas: Sequence[int] = (1,),
    in_sync: Sequence[int] | None = None,
    *,
    primary: int = 1,
    epoch: int = EPOCH,
    partition_epoch: int = 1,
    adding: Sequence[int] = (),
    removing: Sequence[int] = (),
    wanted: NodeNumber = NO_NODE,
) -> PartitionRow:
    """Return a row of nodes by their numbers."""
    return PartitionRow(
        partition_id=PartitionId(partition_id),
        replicas=_nodes(replicas),
        in_sync=_nodes(replicas if in_sync is None else in_sync),
        primary=NodeNumber(primary),
        primary_epoch=epoch,
        partition_epoch=partition_epoch,
        adding=_nodes(adding),
        removing=_nodes(removing),
        status=PartitionStatus.ONLINE,
        changed_at=partition_epoch,
        wanted_primary=wanted,
    )


def table_of(
    *rows: PartitionRow,
    version: int = 1,
    min_in_sync: int = 1,
    fenced: Sequence[int] = (),
    paused: bool = False,
    node_epochs: dict[int, int] | None = None,
    registration_ids: dict[int, str] | None = None,
    loads: Sequence[ActiveLoad] = (),
) -> Table:
    """Return a table of these rows (or of all partitions with this node alone) and three nodes."""
    rows = rows or tuple(row_of(p) for p in range(PARTITIONS))
    nodes = {
        NodeNumber(n): node_of(
            n,
            node_epoch=(node_epochs or {}).get(n, 1),
            status=NodeStatus.FENCED if n in fenced else NodeStatus.ACTIVE,
            changed_at=version,
            registration_digest=registration_digest((registration_ids or {}).get(n, "")),
        )
        for n in (1, 2, 3)
    }
    cluster = config_of(
        len(rows), replication_factor=3, min_in_sync=min_in_sync, max_value_bytes=1024
    )
    return Table(
        cluster=cluster,
        table_version=version,
        nodes=nodes,
        rows=rows,
        moves=MoveSettings(paused=paused),
        loads=tuple(loads),
    )


def _nodes(numbers: Sequence[int]) -> tuple[NodeNumber, ...]:
    return tuple(map(NodeNumber, numbers))


class SetClock(WallClock):
    """A wall clock that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms


class InterruptedStore(Store):
    """A store that calls ``after_read`` once, after the next read of records."""

    after_read: Callable[[], None] | None = None

    def get_many(self, data_keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        rows = super().get_many(data_keys)
        self._interrupt()
        return rows

    def scan(self, *args: Any, **options: Any) -> tuple[list[tuple[bytes, bytes]], bool]:
        page = super().scan(*args, **options)
        self._interrupt()
        return page

    def _interrupt(self) -> None:
        interrupt, self.after_read = self.after_read, None
        if interrupt is not None:
            interrupt()


class HeldChannel:
    """A channel whose groups the test applies. While ``held``, nothing is committed or answered;
    tickets whose places are in ``failing`` find no room.
    """

    def __init__(self, store: Store) -> None:
        self.held = False
        self.waiting: list[Any] = []  # group frames that have been sent and not answered
        self.groups_sent = 0
        self.failing: dict[int, str] = {}  # of the next group that is committed
        self._stored = 0  # the last group that is in the store
        self._env = store.env
        self._databases = open_databases(store.env)
        self._on_answer: Callable[[Answered], None]

    async def open(
        self, on_answer: Callable[[Answered], None], on_lost: Callable[[], None]
    ) -> None:
        self._on_answer = on_answer

    def send(self, group: GroupFrame) -> None:
        self.waiting.append(group)
        self.groups_sent += 1
        if not self.held:
            asyncio.get_running_loop().call_soon(self._commit_first)

    def kill(self) -> None:
        pass

    async def settle(self) -> None:
        pass

    async def close(self) -> bool:
        return True

    def release(self) -> None:
        """Commit and answer what waits, and all that follows."""
        self.held = False
        self._commit_first()

    def commit_one(self) -> None:
        """Commit and answer the oldest group that waits."""
        self._commit()

    def _commit_first(self) -> None:
        if not self.held and self.waiting:
            self._commit()

    def store_one(self) -> None:
        """Store the oldest group that waits; it is answered when it is committed."""
        number, _, tickets = self.waiting[0]
        self._store(tickets, {})
        self._stored = number

    def _commit(self) -> None:
        number, _, tickets = self.waiting.pop(0)
        failing, self.failing = self.failing, {}
        if number > self._stored:
            self._store(tickets, failing)
        self._on_answer((number, failing, 0))

    def _store(self, tickets: Sequence[TicketFrame], failing: Container[int]) -> None:
        with self._env.begin(write=True) as txn:
            for index, (_, _, writes) in enumerate(tickets):
                if index in failing:
                    continue
                for database, keys, values in writes:
                    if database == MERGES:
                        self._merge(txn, keys)
                        continue
                    for key, value in zip(keys, values, strict=True):
                        if value is None:
                            txn.delete(key, db=self._databases[database])
                        else:
                            txn.put(key, value, db=self._databases[database])

    def _merge(self, txn: Any, steps: Sequence[bytes]) -> None:
        data, expiry = self._databases[DATA_DB], self._databases[EXPIRY_DB]
        with self._env.begin(data, buffers=True) as before:
            for step in steps:
                merge(
                    txn, data, expiry, MergeStep.FromString(step), partial(stored_entries, before)
                )


class NoCoordinator:
    """A coordinator that the test answers for: calls wait until it does."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[RowChange, ...], asyncio.Future[frozenset[int]]]] = []

    async def alter_partitions(self, changes: Sequence[RowChange]) -> frozenset[int]:
        future: asyncio.Future[frozenset[int]] = asyncio.get_running_loop().create_future()
        self.calls.append((tuple(changes), future))
        return await future


class Bench:
    """The parts, and their calls with the arguments that most tests need."""

    def __init__(self, directory: Path, limits: Limits | None = None) -> None:
        self.limits = limits = limits or Limits()
        self.store = InterruptedStore(StoreConfig(directory=directory, map_size_bytes=16 * MIB))
        self.channel = HeldChannel(self.store)
        self.lost: list[str] = []
        self.now = 0.0
        self.clock = SetClock()
        self.state = NodeState("n1", lambda: self.now, lambda: self.now, self.clock)
        self.local = local = LocalReplicas(self.store, "n1", limits)
        self.pending, self.copies = local.pending, local.copies
        self.primaries, self.journal = local.primaries, local.journal
        self.coordinator = NoCoordinator()
        self.ready: list[Adoption] = []
        self.sizes = SizeEstimates()
        self.commits = CommitTracker(local, self.state, self.on_ready)
        self.writer = Writer(
            local, self.commits, limits, self.lost.append, self.channel, lambda: self.now
        )
        self.replicator = Replicator(
            local, self.commits, self.writer, self.coordinator, limits, self.sizes
        )
        self.engine = Engine(
            ServingContext(local, self.state, self.writer, self.replicator, limits)
        )

    def on_ready(self, adoptions: Sequence[Adoption]) -> None:
        """Do as the agent does: serve it from now on, if the table still says so."""
        self.ready += adoptions
        epochs = self.state.served.epochs.copy()
        for partition_id, epoch in adoptions:
            epochs[partition_id] = epoch
        self.state.served = replace(self.state.served, epochs=epochs)

    def take_table(self, table: Table) -> None:
        """Take a newer table as the agent does: published first, then the replicator's."""
        old = self.state.served.epochs
        epochs = np.array(
            [
                row.primary_epoch
                if row.primary == ME and p < len(old) and row.primary_epoch == old[p]
                else 0
                for p, row in enumerate(table.rows)
            ],
            np.uint64,
        )
        self.state.served = ServedPartitions(
            table=table, node_number=ME, node_epoch=1, epochs=epochs
        )
        self.replicator.on_table(table, ME, 1)

    async def lead_all(self, table: Table | None = None) -> None:
        """Lead every partition, under a lease that lasts."""
        self.take_table(table or table_of())
        rows = self.state.table().rows
        await self.replicator.adopt([Adoption(p, rows[p].primary_epoch) for p in range(len(rows))])
        self.state.lease = Lease(node_epoch=1, until_s=1e9)

    def lose_lease(self) -> None:
        self.state.lease = NO_LEASE

    def lose_partition_0(self) -> None:
        epochs = self.state.served.epochs.copy()
        epochs[0] = 0
        self.state.served = replace(self.state.served, epochs=epochs)

    async def put(
        self,
        *keys: bytes,
        value: bytes = b"v",
        ttl_ms: int = 0,
        partition_id: int = 0,
        durability: Durability = Durability.ALL_IN_SYNC,
        if_version: int | None = None,
        delete: bool = False,
    ) -> WriteAnswer:
        rows = len(keys)
        return await self.engine.writes.write(
            WriteBatch(
                table_version=1,
                keys=keys,
                values=[value] * rows,
                partition_ids=in_partition(partition_id, rows),
                ttl_ms=[ttl_ms] * rows if ttl_ms else None,
                durability=durability,
                conditions={} if if_version is None else {0: if_version},
                deletes=frozenset(range(rows)) if delete else frozenset(),
            )
        )

    async def get(self, *keys: bytes, want_versions: bool = False) -> ReadAnswer:
        ids = in_partition(0, len(keys))
        return await self.engine.reads.read(keys, ids, 1, want_versions=want_versions)

    async def scan(self, *partition_ids: int) -> ScanAnswer:
        return await self.engine.scans.scan(
            ScanPage(
                table_version=1,
                partition_ids=partition_ids or (0,),
                prefix=b"",
                after_key=b"",
                limit=0,
                keys_only=False,
            )
        )


def in_partition(partition_id: int, rows: int) -> U32Array:
    return np.full(rows, partition_id, np.uint32)


async def settle(task: asyncio.Future[Any]) -> None:
    """Let everything run that can; with a held writer, that is all until it is released."""
    for _ in range(50):
        if task.done():
            return
        await asyncio.sleep(0)


@asynccontextmanager
async def engine_bench(
    directory: Path,
    *,
    limits: Limits | None = None,
    lead: bool = True,
    table: Table | None = None,
) -> AsyncIterator[Bench]:
    """Start a bench over a fresh store. Its node leads all partitions, none, or those that the
    table gives it; a partition with other replicas in sync is not served yet.
    """
    bench = Bench(directory, limits)
    await bench.writer.start()
    try:
        if lead:
            await bench.lead_all(table)
        yield bench
    finally:
        bench.store.close(clean=False)


def with_engine(
    directory: Path,
    use: Callable[[Bench], Awaitable[Answer]],
    *,
    limits: Limits | None = None,
    lead: bool = True,
) -> Answer:
    """Run ``use`` over a bench of a fresh store."""

    async def run() -> Answer:
        async with engine_bench(directory, limits=limits, lead=lead) as bench:
            return await asyncio.wait_for(use(bench), WAIT_S)

    return asyncio.run(run())
