"""The write-ahead log on the disk: segments that are appended to, synced, and used again.

    log/0, log/1, ...   segments of one size (core/formats/log_format.py has what is in them)

Space is taken when a segment is made, so that appending neither grows a file nor fails for lack of
room, and a sync of a segment that was used before writes no metadata. A segment is used again once
the store has all of it.

Writing and syncing run on a thread of their own, without the GIL. A failed write or sync is never
tried again: what it was for is neither durable nor known not to be.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from koinon_node.core.formats import log_format
from koinon_node.core.formats.log_format import HEAD_BYTES, RECORD_HEAD_BYTES, Head
from koinon_node.core.formats.writer_frames import Writes
from koinon_node.storage.directory import sync_directory
from koinon_node.storage.log_files import LOG, NO_ROOM, Stretch, segment_paths
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.process.private_files import FILE_MODE

SEGMENT_BYTES = 64 * 1024 * 1024
SEGMENTS_MAX = 8
_SPARE_SEGMENTS = 2  # are kept for when much is written again
_CLOSE_S = 5.0
_RETRY_S = 10.0  # after there was no room for a segment

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Segment:
    """One file of the log."""

    name: str
    descriptor: int
    end: int = HEAD_BYTES  # where the next record goes
    written: int = HEAD_BYTES  # the end of what is as durable as records are
    told: int = HEAD_BYTES  # up to where the store was told to take it over
    last: int = 0  # position of the last record; 0 while there is none


class LogDisk(Protocol):
    """Does a log's writing: one job after the other, beside the event loop."""

    def put(self, job: Callable[[], T], then: Callable[[T], None] | None = None) -> None:
        """Queue a job; ``then`` is called with its result on the event loop."""

    def write(self, descriptor: int, data: bytes | bytearray, offset: int) -> None:
        """Write all of it. Only in a job. Raises OSError."""

    def sync(self, descriptor: int) -> None:
        """Make durable what was written to the file. Only in a job. Raises OSError."""

    def close(self) -> bool:
        """End, once all that was queued is done; return whether it is. One that hangs is left."""


class LogThread:
    """Does the jobs on a thread. After one that failed no other is done."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        """``on_failure`` is called on the event loop, once."""
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None] | None] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], T], then: Callable[[T], None] | None = None) -> None:
        self._jobs.put((job, then))

    def write(self, descriptor: int, data: bytes | bytearray, offset: int) -> None:
        done = os.pwrite(descriptor, data, offset)
        while done < len(data):
            done += os.pwrite(descriptor, memoryview(data)[done:], offset + done)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def close(self) -> bool:
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (queued := self._jobs.get()) is not None:
                job, then = queued
                result = job()
                if then is not None:
                    self._tell(then, result)
        except Exception as error:  # whatever it is: nothing after it is durable
            self._tell(self._on_failure, f"the write-ahead log failed: {error}")

    def _tell(self, call: Callable[[Any], None], argument: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, argument)


class WriteAheadLog:
    """Appends to the log of one store. All methods belong to the event loop's thread."""

    def __init__(
        self,
        directory: Path,
        life: int,
        *,
        sync_interval_s: float = 0.0,
        segment_bytes: int = SEGMENT_BYTES,
        segments_max: int = SEGMENTS_MAX,
    ) -> None:
        """``sync_interval_s`` 0: each record is durable before it is told of; else what was written
        is synced so often, and at once where that is asked for.
        """
        self._directory = directory / LOG
        self._life = life
        self._sync_interval_s = sync_interval_s
        self._segment_bytes = segment_bytes
        self._segments_max = segments_max
        self._position = 0  # of the last record
        self._synced = 0  # and of the last that is durable
        self._used: deque[Segment] = deque()  # hold what the store lacks; the last is appended to
        self._free: list[Segment] = []
        self._make_again_at = 0.0  # when another segment may be made: not while one is
        self._files = 0  # made so far
        self._disk: LogDisk | None = None
        self.on_progress: Callable[[], None] = lambda: None  # the disk has done some other job
        self._sync_due = False

    # --- its files -------------------------------------------------------------------------

    def open(self, disk: LogDisk) -> None:
        """Take the segments that are there, of which the store has all by now.

        Raises:
            DataDirectoryError: the directory cannot be made or read.
        """
        self._disk = disk
        try:
            for path in segment_paths(self._directory):
                if path.stat().st_size == self._segment_bytes:
                    self._free.append(self._open_file(path))
                    os.fsync(self._free[-1].descriptor)  # it may have been made just before an end
                    self._files = max(self._files, int(path.name) + 1)
                else:
                    path.unlink()
            if not self._free and (made := self._make_file()) is not None:
                self._free.append(made)
            sync_directory(self._directory)
        except OSError as error:
            raise DataDirectoryError(path=str(self._directory), reason=str(error)) from error

    def close(self) -> None:
        """Release the files, once all is written; if the disk hangs, leave them."""
        if self._disk is not None and self._disk.close():
            for segment in (*self._used, *self._free):
                os.close(segment.descriptor)

    def _open_file(self, path: Path) -> Segment:
        return Segment(path.name, os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE))

    def _make_file(self) -> Segment | None:
        """Make a segment; None if there is no room for one."""
        path = self._directory / str(self._files)
        self._files += 1
        segment = self._open_file(path)
        try:
            os.posix_fallocate(segment.descriptor, 0, self._segment_bytes)
            os.fsync(segment.descriptor)
            sync_directory(self._directory)
        except BaseException as error:
            os.close(segment.descriptor)
            path.unlink()
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                return None
            raise
        return segment

    def _make_ahead(self) -> None:
        """Have a segment made before it is needed."""
        loop = asyncio.get_running_loop()
        if self._free or len(self._used) >= self._segments_max or loop.time() < self._make_again_at:
            return
        self._make_again_at = float("inf")

        def made(segment: Segment | None) -> None:
            self.on_progress()
            if segment is not None:
                self._free.append(segment)
            self._make_again_at = loop.time() + (0.0 if segment is not None else _RETRY_S)

        assert self._disk is not None
        self._disk.put(self._make_file, made)

    # --- appending -------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """Return whether a record of which the body has this size can be appended now."""
        needed = RECORD_HEAD_BYTES + size
        if needed > self._segment_bytes - HEAD_BYTES:
            return False
        if self._used and self._used[-1].end + needed <= self._segment_bytes:
            return True
        if not self._free:
            self._make_ahead()
        return bool(self._free)

    def append(
        self, tickets: Sequence[Writes], on_written: Callable[[int, int], None], *, urgent: bool
    ) -> None:
        """Append a record; there has to be room. ``on_written`` is called on the loop with its
        position and size once it is as durable as records are; with ``urgent``, durable.
        """
        disk = self._disk
        assert disk is not None
        position = self._position = self._position + 1
        record = log_format.encode_record(tickets, self._life, position, self._synced)
        if not self._used or self._used[-1].end + len(record) > self._segment_bytes:
            self._next_segment(position)
        segment, offset = self._used[-1], self._used[-1].end
        descriptor, end = segment.descriptor, offset + len(record)
        segment.end, segment.last = end, position
        if end > self._segment_bytes // 2:
            self._make_ahead()
        sync = urgent or not self._sync_interval_s

        def write() -> None:
            disk.write(descriptor, record, offset)
            if sync:
                disk.sync(descriptor)

        def written(_: None) -> None:
            if sync:
                self._synced = position
            elif not self._sync_due:
                self._sync_due = True
                asyncio.get_running_loop().call_later(self._sync_interval_s, self._sync)
            segment.written = end
            on_written(position, len(record))

        disk.put(write, written)

    def _sync(self) -> None:
        """Make durable what was written since the last sync. (What is in segments before the last
        is durable.)
        """
        disk, descriptor, position = self._disk, self._used[-1].descriptor, self._position
        assert disk is not None

        def synced(_: None) -> None:
            self._synced = max(self._synced, position)

        self._sync_due = False
        disk.put(lambda: disk.sync(descriptor), synced)

    def _next_segment(self, first_position: int) -> None:
        """Begin the next segment, after all that is in this one is durable."""
        disk = self._disk
        assert disk is not None
        before = self._used[-1].descriptor if self._used and self._sync_interval_s else None
        segment = self._free.pop()
        segment.end = segment.written = segment.told = HEAD_BYTES
        segment.last = 0
        self._used.append(segment)
        descriptor = segment.descriptor
        head = log_format.encode_head(Head(self._life, first_position, self._segment_bytes))

        def begin() -> None:
            if before is not None:
                disk.sync(before)
            disk.write(descriptor, head, 0)

        disk.put(begin, self._progress)

    # --- what the store takes over ---------------------------------------------------------

    def take_over(self) -> list[Stretch]:
        """Return where the written records are that the store was not told of yet."""
        stretches = []
        for segment in self._used:
            if segment.written > segment.told:
                stretches.append((segment.name, segment.told, segment.written))
                segment.told = segment.written
        return stretches

    def release(self, position: int) -> None:
        """The store has all up to this position: use again what holds nothing else."""
        while len(self._used) > 1 and self._used[0].last <= position:
            self._free.append(self._used.popleft())
        if len(self._used) == 1 and len(self._free) > _SPARE_SEGMENTS:
            self._remove(self._free.pop())

    def _remove(self, segment: Segment) -> None:
        """Give back the room of a segment that much writing has needed."""

        def remove() -> None:
            os.close(segment.descriptor)
            (self._directory / segment.name).unlink()

        assert self._disk is not None
        self._disk.put(remove, self._progress)

    def _progress(self, _: None) -> None:
        self.on_progress()
