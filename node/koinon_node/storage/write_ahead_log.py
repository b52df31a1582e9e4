"""The write-ahead log on the disk: appends to segments, syncs them, and reuses them.

    log/0, log/1, ...   segments of one size (core/formats/log_format.py has their format)

Space is allocated when a segment is created. So appending neither grows a file nor fails for lack
of room, and a sync of a reused segment writes no metadata. A segment is reused once the store has
taken over all of it.

Writes and syncs run on a thread of their own, without the GIL. A failed write or sync is never
retried: afterwards its records may or may not be durable.
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
_SPARE_SEGMENTS = 2  # kept beyond the one in use
_CLOSE_S = 5.0
_RETRY_S = 10.0  # after a lack of room for a segment

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Segment:
    """One file of the log."""

    name: str
    descriptor: int
    end: int = HEAD_BYTES  # the offset of the next record
    written: int = HEAD_BYTES  # the end of the acknowledged records
    handed_out: int = HEAD_BYTES  # the end of the records handed out by ``take_over``
    last: int = 0  # position of the last record; 0 while there is none


class LogDisk(Protocol):
    """Writes and syncs for a log: one job after another, beside the event loop."""

    def put(self, job: Callable[[], T], then: Callable[[T], None] | None = None) -> None:
        """Queue a job. ``then`` gets its result on the event loop."""

    def write(self, descriptor: int, data: bytes | bytearray, offset: int) -> None:
        """Write all of the data. Only inside a job. Raises OSError."""

    def sync(self, descriptor: int) -> None:
        """Make the file's writes durable. Only inside a job. Raises OSError."""

    def close(self) -> bool:
        """Run the queued jobs and end; return whether they are done. A hanging job is abandoned."""


class LogThread:
    """Runs the jobs on a thread. After a job has failed no other runs."""

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
        except Exception as error:  # any error: no later job is durable
            self._tell(self._on_failure, f"the write-ahead log failed: {error}")

    def _tell(self, call: Callable[[Any], None], argument: object) -> None:
        with suppress(RuntimeError):  # the event loop has ended
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
        """``sync_interval_s`` 0: each record is synced before its callback; else written records
        are synced at this interval, and urgent ones at once.
        """
        self._directory = directory / LOG
        self._life = life
        self._sync_interval_s = sync_interval_s
        self._segment_bytes = segment_bytes
        self._segments_max = segments_max
        self._position = 0  # of the last record
        self._synced = 0  # of the last durable record
        self._used: deque[Segment] = deque()  # with records that the store lacks; the last is open
        self._free: list[Segment] = []
        self._make_again_at = 0.0  # the earliest time to create another segment
        self._files = 0  # created so far, which names the next
        self._disk: LogDisk | None = None
        self.on_progress: Callable[[], None] = lambda: None  # called when the disk did other work
        self._sync_due = False

    # --- files -----------------------------------------------------------------------------

    def open(self, disk: LogDisk) -> None:
        """Open the existing segments for reuse: the store has taken over all of their records.

        Raises:
            DataDirectoryError: the directory cannot be created or read.
        """
        self._disk = disk
        try:
            for path in segment_paths(self._directory):
                if path.stat().st_size == self._segment_bytes:
                    self._free.append(self._open_file(path))
                    os.fsync(self._free[-1].descriptor)  # it may be new and unsynced
                    self._files = max(self._files, int(path.name) + 1)
                else:
                    path.unlink()
            if not self._free and (made := self._make_file()) is not None:
                self._free.append(made)
            sync_directory(self._directory)
        except OSError as error:
            raise DataDirectoryError(path=str(self._directory), reason=str(error)) from error

    def close(self) -> None:
        """Close the files once all is written; leave them open if the disk hangs."""
        if self._disk is not None and self._disk.close():
            for segment in (*self._used, *self._free):
                os.close(segment.descriptor)

    def _open_file(self, path: Path) -> Segment:
        return Segment(path.name, os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE))

    def _make_file(self) -> Segment | None:
        """Create a segment; return None if there is no room for it."""
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
        """Create the next segment before it is needed."""
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
        """Return whether a record with a body of this size can be appended now."""
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
        """Append a record, for which there must be room. ``on_written`` gets its position and size
        on the event loop once it is written (synced, without a sync interval or with ``urgent``).
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
        """Sync the records written since the last sync. (Segments before the last one are
        durable.)
        """
        disk, descriptor, position = self._disk, self._used[-1].descriptor, self._position
        assert disk is not None

        def synced(_: None) -> None:
            self._synced = max(self._synced, position)

        self._sync_due = False
        disk.put(lambda: disk.sync(descriptor), synced)

    def _next_segment(self, first_position: int) -> None:
        """Open the next segment, after this one is durable."""
        disk = self._disk
        assert disk is not None
        before = self._used[-1].descriptor if self._used and self._sync_interval_s else None
        segment = self._free.pop()
        segment.end = segment.written = segment.handed_out = HEAD_BYTES
        segment.last = 0
        self._used.append(segment)
        descriptor = segment.descriptor
        head = log_format.encode_head(Head(self._life, first_position, self._segment_bytes))

        def begin() -> None:
            if before is not None:
                disk.sync(before)
            disk.write(descriptor, head, 0)

        disk.put(begin, self._progress)

    # --- take-over -------------------------------------------------------------------------

    def take_over(self) -> list[Stretch]:
        """Return the stretches of written records that were not returned before."""
        stretches = []
        for segment in self._used:
            if segment.written > segment.handed_out:
                stretches.append((segment.name, segment.handed_out, segment.written))
                segment.handed_out = segment.written
        return stretches

    def release(self, position: int) -> None:
        """Reuse the segments that hold only positions up to this one, which the store has taken
        over.
        """
        while len(self._used) > 1 and self._used[0].last <= position:
            self._free.append(self._used.popleft())
        if len(self._used) == 1 and len(self._free) > _SPARE_SEGMENTS:
            self._remove(self._free.pop())

    def _remove(self, segment: Segment) -> None:
        """Delete a spare segment, to free its space."""

        def remove() -> None:
            os.close(segment.descriptor)
            (self._directory / segment.name).unlink()

        assert self._disk is not None
        self._disk.put(remove, self._progress)

    def _progress(self, _: None) -> None:
        self.on_progress()
