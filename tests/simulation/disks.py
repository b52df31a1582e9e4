"""Disks of simulated nodes: real stores in memory, written as late as a disk may be.

A group is committed by the real writer's code, a random time after it was sent. When its process
is killed, the group that is being written may still be committed (the writer process ends when it
sees that its node has gone), those behind it never are.

Half of the seeds have a write-ahead log in front of the stores: the real one, on files in memory.
When a process is killed, of what it wrote there and did not sync any blocks of 512 bytes survive,
as if the machine's power had failed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from koinon_node.core.formats.writer_frames import GroupFrame
from koinon_node.storage import directory
from koinon_node.storage.directory import read_identity
from koinon_node.storage.environment import DATA_DB, open_databases
from koinon_node.storage.log_files import Stretch
from koinon_node.storage.logged_channel import Bounds, LoggedChannel
from koinon_node.storage.store import Store
from koinon_node.storage.write_ahead_log import WriteAheadLog
from koinon_node.storage.writer_channel import Answer
from koinon_node.storage.writer_process import GROUP, LOG_STRETCHES, WriterLoop
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeInfo
from tests.simulation.loop import Process, VirtualLoop

MIB = 1024 * 1024
LOGGED: bool | None = None
"""Whether stores have a write-ahead log. None: in every other seed."""
_BLOCK = 512
T = TypeVar("T")
Frame = tuple[int, Any]  # kind and content
COMMIT_S_MAX = 5.0  # a disk is slow for so long, and not for as long as a run lasts


class Disk:
    """A node's data directory: it outlives processes, and may be replaced by an empty one."""

    def __init__(self, root: Path, name: str, *, logged: bool = False) -> None:
        self.logged = logged
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
        self._stalled: list[Callable[[], None]] = []  # what waits for it: a commit, a log's sync
        self._ids = 0  # of stores that were made here
        self.kept_at_epoch = 0  # of the node, when ``keep`` was called; 0: nothing is kept
        self.old_at_epoch = 0  # of the node, when an old copy was put back
        self._make()

    @property
    def directory(self) -> Path:
        return self._root / f"{self.name}-{self._number}"

    def _make(self) -> None:
        self.directory.mkdir(mode=0o700)

    def open(self) -> Store:
        """Open the store; what makes one gives it an id that is the same in every run."""
        with patch.object(directory, "new_store_id", self._new_store_id):
            config = StoreConfig(
                directory=self.directory, map_size_bytes=16 * MIB, write_ahead_log=self.logged
            )
            return Store(config)

    def _new_store_id(self) -> str:
        name = self.directory.name + f".{self._ids}" * bool(self._ids)
        self._ids += 1
        return f"{zlib.crc32(name.encode()):032x}"

    @property
    def store_id(self) -> str:
        """The store's id; "" while there is none."""
        try:
            return read_identity(self.directory)
        except KoinonError:
            return ""

    def is_known_as(self, info: NodeInfo) -> bool:
        """Return whether the coordinators know that the node has this store, as it is: not before
        it has registered with another one, or with an old copy.
        """
        return self.store_id == info.store_id and self.old_at_epoch < info.node_epoch

    def hang(self) -> None:
        """Let no commit return before the disk is released."""
        self._hangs = True

    def slow_down(self, seconds: float) -> None:
        """Let each commit take so long at least."""
        self._least_s = seconds

    def release(self) -> None:
        """Let writes that wait go on now."""
        self._hangs, self._least_s, self.stalled_at = False, 0.0, 0.0
        stalled, self._stalled = self._stalled, []
        for go_on in stalled:
            go_on()

    def holds_back(self, commit: Callable[[], None], now: float) -> bool:
        """Return whether the disk hangs; then the commit is done when it is released."""
        if self._hangs:
            self._stalled.append(commit)
            self.stalled_at = self.stalled_at or now
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
        self._ids = 0
        self._make()

    @property
    def _kept(self) -> Path:
        return self._root / f"{self.name}-kept"

    def keep(self, node_epoch: int) -> None:
        """Copy the directory aside, whether or not a process has it open."""
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self.directory, self._kept)
        self.kept_at_epoch = node_epoch

    def put_back(self, node_epoch: int, *, as_a_volume: bool) -> None:
        """Let the directory be what it was at ``keep``: by a copy of its files, or as a volume that
        is rolled back, where the files are the same ones. No process has it open.
        """
        if as_a_volume:
            for path in sorted(self._kept.rglob("*")):
                place = self.directory / path.relative_to(self._kept)
                if path.is_dir():
                    place.mkdir(exist_ok=True)
                else:
                    place.touch(0o600)
                    place.write_bytes(path.read_bytes())
            for path in sorted(self.directory.rglob("*"), reverse=True):
                if not (self._kept / path.relative_to(self.directory)).exists():
                    path.rmdir() if path.is_dir() else path.unlink()
        else:
            shutil.rmtree(self.directory)
            shutil.copytree(self._kept, self.directory)
        self.old_at_epoch = node_epoch


class _Applier(WriterLoop):
    """The writer process's decisions, on the environment that the store has open here."""

    def __init__(self, store: Store, disk: Disk) -> None:
        self.environment = store.env
        self._databases = open_databases(store.env)
        self._directory = disk.directory
        self._disk = disk
        self._failed_group = 0
        self._by_interval = False

    def apply(self, frame: Frame) -> Answer:
        number, failures, _ = self.carry_out(*frame)
        return number, failures, 0

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
        self._queue: deque[Frame] = deque()
        self._on_answer: Callable[[Answer], None] = lambda _: None
        self._gone = False

    async def open(self, on_answer: Callable[[Answer], None], on_lost: Callable[[], None]) -> None:
        self._on_answer = on_answer

    def send(self, group: GroupFrame) -> None:
        self._send((GROUP, group))

    def take_over(self, life: int, position: int, stretches: list[Stretch]) -> None:
        self._send((LOG_STRETCHES, (life, position, stretches)))

    async def settle(self) -> None:
        """Do nothing: there is nothing in front of the store."""

    def _send(self, frame: Frame) -> None:
        if self._gone or not self._process.alive:
            return
        self._queue.append(frame)
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


class SimulatedLogDisk:
    """Does a log's jobs, each a random time after it was queued."""

    def __init__(
        self, loop: VirtualLoop, rng: random.Random, process: Process, disk: Disk, commit_s: float
    ) -> None:
        self._loop = loop
        self._rng = rng
        self._process = process
        self.disk = self._disk = disk
        self._commit_s = commit_s
        self._jobs: deque[tuple[Callable[[], Any], Callable[[Any], None] | None]] = deque()
        self._unsynced: list[tuple[int, int, bytes, bytes]] = []  # file, offset, before, after
        self._gone = False

    def put(self, job: Callable[[], T], then: Callable[[T], None] | None = None) -> None:
        if self._gone or not self._process.alive:
            return
        self._jobs.append((job, then))
        if len(self._jobs) == 1:
            self._do_later()

    def write(self, descriptor: int, data: bytes | bytearray, offset: int) -> None:
        before = os.pread(descriptor, len(data), offset)
        os.pwrite(descriptor, data, offset)
        self._unsynced.append((descriptor, offset, before, bytes(data)))

    def sync(self, descriptor: int) -> None:
        self._unsynced = [one for one in self._unsynced if one[0] != descriptor]

    def close(self) -> bool:
        return False

    def _do_later(self) -> None:
        slow = 20 if self._rng.random() < 0.01 else 1
        delay_s = self._rng.uniform(0.1, 1.9) * self._commit_s * slow / 2
        self._loop.call_later(self._disk.delay_s(delay_s, self._loop.now), self._do)

    def _do(self) -> None:
        if self._gone or self._disk.holds_back(self._do, self._loop.now):
            return
        job, then = self._jobs.popleft()
        result = job()
        if then is not None:
            self._process.call_soon(then, result)
        if self._jobs:
            self._do_later()

    def kill(self) -> None:
        """The power fails: of what was not synced some blocks are there, and some are not."""
        self._gone = True
        if self._jobs:
            with contextlib.suppress(_PowerFailedError):
                self.sync = _fail  # type: ignore[method-assign, assignment]
                self._jobs[0][0]()
        for descriptor, offset, before, after in reversed(self._unsynced):
            end = offset + len(after)
            start = offset
            while start < end:
                until = min(start - start % _BLOCK + _BLOCK, end)
                if self._rng.random() < 0.5:
                    os.pwrite(descriptor, before[start - offset : until - offset], start)
                start = until
        self._jobs.clear()


class _Log(WriteAheadLog):
    """On a disk that may be full."""

    def __init__(self, disk: Disk, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._full_disk = disk

    def has_room(self, size: int) -> bool:
        return not self._full_disk.full and super().has_room(size)


class _PowerFailedError(Exception):
    pass


def _fail(_: int) -> None:
    raise _PowerFailedError


def logged(
    channel: SimulatedChannel, store: Store, rng: random.Random, disk: SimulatedLogDisk
) -> LoggedChannel:
    """Return a log in front of the store, so small that all of it is used again and again."""
    wal = _Log(
        disk.disk,
        store.config.directory,
        store.log_life,
        segment_bytes=rng.choice([16 * 1024, 64 * 1024]),
        segments_max=rng.choice([2, 4]),
    )
    bounds = Bounds(
        layer_rows=rng.choice([8, 64, 1_000]),
        overlay_rows=rng.choice([40, 2_000]),
        take_over_s=rng.choice([0.01, 0.2, 2.0]),
        spare_bytes=0,
        page_bytes=rng.choice([100, 64 * 1024]),
        large_group_bytes=rng.choice([600, 512 * 1024]),
        large_row_bytes=rng.choice([100, 2_048]),
    )
    return LoggedChannel(channel, wal, store, lambda _: disk, bounds)
