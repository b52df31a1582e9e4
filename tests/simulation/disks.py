"""Disks of simulated nodes: real stores in memory, written as late as a disk may be.

A group is committed by the real writer's code, a random time after it was sent. When its process
is killed, the group that is being written may still be committed (the writer process ends when it
sees that its node has gone), those behind it never are.
"""

from __future__ import annotations

import random
import shutil
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from koinon_node.config import StoreConfig
from koinon_node.core.commit_group import GroupFrame
from koinon_node.storage import directory
from koinon_node.storage.directory import read_identity
from koinon_node.storage.store import DATA_DB, Store, open_databases
from koinon_node.storage.writer import Answer
from koinon_node.storage.writer_process import WriterLoop
from koinon_proto.contract.errors import KoinonError
from tests.simulation.loop import Process, VirtualLoop

MIB = 1024 * 1024
COMMIT_S_MAX = 5.0  # a disk is slow for so long, and not for as long as a run lasts


class Disk:
    """A node's data directory: it outlives processes, and may be replaced by an empty one."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self.name = name
        self._number = 0
        self.full = False
        self.slowness = 1.0  # how many times as long as usual a commit takes
        self.stalled_at = (
            0.0  # since when a commit has not returned from a disk that hangs or slows
        )
        self._hangs = False
        self._least_s = 0.0  # that a commit takes
        self._stalled: Callable[[], None] | None = None  # that commit
        self._make()

    @property
    def directory(self) -> Path:
        return self._root / f"{self.name}-{self._number}"

    def _make(self) -> None:
        self.directory.mkdir(mode=0o700)

    def open(self) -> Store:
        """Open the store; an empty directory gets an id that is the same in every run."""
        store_id = f"{zlib.crc32(self.directory.name.encode()):032x}"
        with patch.object(directory, "new_store_id", lambda: store_id):
            return Store(StoreConfig(directory=self.directory, map_size_bytes=16 * MIB))

    @property
    def store_id(self) -> str:
        """The store's id; "" while there is none."""
        try:
            return read_identity(self.directory)
        except KoinonError:
            return ""

    def hang(self) -> None:
        """Let no commit return before the disk is released."""
        self._hangs = True

    def slow_down(self, seconds: float) -> None:
        """Let each commit take so long at least."""
        self._least_s = seconds

    def release(self) -> None:
        """What waits is written now."""
        self._hangs, self._least_s, self.stalled_at = False, 0.0, 0.0
        stalled, self._stalled = self._stalled, None
        if stalled is not None:
            stalled()

    def holds_back(self, commit: Callable[[], None], now: float) -> bool:
        """Return whether the disk hangs; then the commit is done when it is released."""
        if self._hangs:
            self._stalled, self.stalled_at = commit, self.stalled_at or now
        return self._hangs

    def delay_s(self, delay_s: float, now: float) -> float:
        """Return how long a commit takes that would take so long on a disk that is well."""
        if self._least_s:
            self.stalled_at = self.stalled_at or now
        return max(min(delay_s * self.slowness, COMMIT_S_MAX), self._least_s)

    def replace(self) -> None:
        """An empty disk in its place."""
        shutil.rmtree(self.directory)
        self._number += 1
        self._make()


class _Applier(WriterLoop):
    """The writer process's decisions, on the environment that the store has open here."""

    def __init__(self, store: Store, disk: Disk) -> None:
        self.environment = store.env
        self._databases = open_databases(store.env)
        self._directory = disk.directory
        self._disk = disk
        self._failed_group = 0

    def apply(self, group: GroupFrame) -> Answer:
        number, _, tickets = group
        return number, self._apply(number, tickets), 0

    def _commit(
        self, tickets: list[tuple[tuple[int, list[bytes], list[bytes | None]], ...]]
    ) -> str:
        puts = any(
            database == DATA_DB and any(value is not None for value in values)
            for writes in tickets
            for database, _, values in writes
        )
        return "the disk is full" if puts and self._disk.full else super()._commit(tickets)


class SimulatedChannel:
    """The writer's channel to a disk."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        process: Process,
        store: Store,
        disk: Disk,
        commit_s: float,
    ) -> None:
        self._loop = loop
        self._rng = rng
        self._process = process
        self._disk = disk
        self._applier = _Applier(store, disk)
        self._commit_s = commit_s
        self._queue: deque[GroupFrame] = deque()
        self._on_answer: Callable[[Answer], None] = lambda _: None
        self._gone = False

    async def open(self, on_answer: Callable[[Answer], None], on_lost: Callable[[], None]) -> None:
        self._on_answer = on_answer

    def send(self, group: GroupFrame) -> None:
        if self._gone or not self._process.alive:
            return
        self._queue.append(group)
        if len(self._queue) == 1:
            self._write_later()

    def _write_later(self) -> None:
        slow = 20 if self._rng.random() < 0.01 else 1
        delay_s = self._rng.uniform(0.1, 1.9) * self._commit_s * slow
        self._loop.call_later(self._disk.delay_s(delay_s, self._loop.now), self._write)

    def _write(self) -> None:
        if self._gone or self._disk.holds_back(self._write, self._loop.now):
            return
        answer = self._applier.apply(self._queue.popleft())
        self._process.call_soon(self._on_answer, answer)
        if self._queue:
            self._write_later()

    async def close(self) -> bool:
        return True

    def kill(self) -> None:
        """The node's process has gone."""
        self._gone = True
        if self._queue and self._rng.random() < 0.5:
            self._applier.apply(self._queue[0])
        self._queue.clear()
