"""An engine over a real store, with a writer whose process is the test, and what can come between.

``HeldWriter`` is the real group commit up to its socket: groups are sealed, ordered and answered as
ever, but a group is committed and answered only when the test releases it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from koinon_node.batches import ReadAnswer, ScanAnswer, ScanPage, WriteAnswer, WriteBatch
from koinon_node.config import Limits, StoreConfig
from koinon_node.core.assignment import Adoption, ServedPartitions
from koinon_node.core.lease import NO_LEASE, Lease
from koinon_node.core.records import U32Array
from koinon_node.core.replica import PendingWrites
from koinon_node.engine import Engine
from koinon_node.state import NodeState, WallClock
from koinon_node.storage import Store, open_databases
from koinon_node.writer import Writer

WAIT_S = 10.0
PARTITIONS = 4
EPOCH = 3
MIB = 1024 * 1024
Answer = TypeVar("Answer")


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

    def scan(
        self, partition_id: int, prefix: bytes, after_key: bytes, rows_max: int, bytes_max: int
    ) -> tuple[list[tuple[bytes, bytes]], bool]:
        page = super().scan(partition_id, prefix, after_key, rows_max, bytes_max)
        self._interrupt()
        return page

    def _interrupt(self) -> None:
        interrupt, self.after_read = self.after_read, None
        if interrupt is not None:
            interrupt()


class HeldWriter(Writer):
    """The writer without its process. While ``held``, nothing is committed or answered."""

    def __init__(self, store: Store, pending: PendingWrites, limits: Limits) -> None:
        self.lost: list[str] = []
        super().__init__(store, pending, "n1", limits, self.lost.append)
        self.held = False
        self.waiting: list[Any] = []  # group frames that have been sent and not answered
        self.groups_sent = 0
        self._env = store.env
        self._databases = open_databases(store.env)

    def _send(self, message: Any) -> None:
        self.waiting.append(message)
        self.groups_sent += 1
        if not self.held:
            asyncio.get_running_loop().call_soon(self._commit_first)

    def release(self) -> None:
        """Commit and answer what waits, and all that follows."""
        self.held = False
        self._commit_first()

    def _commit_first(self) -> None:
        if self.held or not self.waiting:
            return
        number, _, tickets = self.waiting.pop(0)
        with self._env.begin(write=True) as txn:
            for _, writes in tickets:
                for database, keys, values in writes:
                    for key, value in zip(keys, values, strict=True):
                        if value is None:
                            txn.delete(key, db=self._databases[database])
                        else:
                            txn.put(key, value, db=self._databases[database])
        self._on_answer((number, {}, 0))


class Bench:
    """The parts, and their calls with the arguments that most tests need."""

    def __init__(self, directory: Path, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.store = InterruptedStore(StoreConfig(directory=directory, map_size_bytes=16 * MIB))
        self.pending = PendingWrites()
        self.writer = HeldWriter(self.store, self.pending, limits)
        self.clock = SetClock()
        self.state = NodeState("n1", now=lambda: 0.0)
        self.engine = Engine(self.state, self.store, self.writer, self.pending, limits, self.clock)

    async def lead_all(self) -> None:
        """Lead every partition, under a lease that lasts."""
        await self.engine.adopt([Adoption(p, EPOCH) for p in range(PARTITIONS)])
        self.state.served = ServedPartitions(
            node_epoch=1, epochs=np.full(PARTITIONS, EPOCH, np.uint64)
        )
        self.state.lease = Lease(node_epoch=1, until_s=1.0)

    def lose_lease(self) -> None:
        self.state.lease = NO_LEASE

    def lose_partition_0(self) -> None:
        epochs = self.state.served.epochs.copy()
        epochs[0] = 0
        self.state.served = ServedPartitions(node_epoch=1, epochs=epochs)

    async def put(
        self, *keys: bytes, value: bytes = b"v", ttl_ms: int = 0, partition_id: int = 0
    ) -> WriteAnswer:
        rows = len(keys)
        return await self.engine.write(
            WriteBatch(
                table_version=1,
                keys=keys,
                values=[value] * rows,
                partition_ids=in_partition(partition_id, rows),
                ttl_ms=[ttl_ms] * rows if ttl_ms else None,
            )
        )

    async def get(self, *keys: bytes, want_versions: bool = False) -> ReadAnswer:
        ids = in_partition(0, len(keys))
        return await self.engine.read(keys, ids, 1, want_versions=want_versions)

    async def scan(self, *partition_ids: int) -> ScanAnswer:
        return await self.engine.scan(
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


def with_engine(
    directory: Path,
    use: Callable[[Bench], Awaitable[Answer]],
    *,
    limits: Limits | None = None,
    lead: bool = True,
) -> Answer:
    """Run ``use`` over a fresh store of which all partitions are led (or none)."""

    async def run() -> Answer:
        bench = Bench(directory, limits)
        try:
            if lead:
                await bench.lead_all()
            return await asyncio.wait_for(use(bench), WAIT_S)
        finally:
            bench.store.close(clean=False)

    return asyncio.run(run())
