"""Puts the write-ahead log in front of the writer process.

A group is durable once its record is synced in the log. From then on reads find its rows in the
overlay over the store, and the writer process, which reads the log itself, takes them over in large
sorted transactions. One such transaction costs about as much as one of a small group, and serves
thousands of groups.

    send ---> append, sync ---> overlay, answer
                                   :  by size, by time, or when a caller needs the store itself
                                   '--> the process takes over ---> an overlay layer is dropped

Some groups go directly to the store: merge steps, which only the process can execute; large values
and pages of a copy's catch-up, which the log would only write twice; and all groups while room is
short. The store first takes over the whole log, so the order is kept without a note in the log.

The overlay is bounded. At its bound a group waits until the process has caught up.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from koinon_node.core.formats.writer_frames import (
    BULK,
    CHAINED,
    LOOSE,
    GroupFrame,
    TicketFrame,
    Writes,
)
from koinon_node.core.writes.overlay import Layer
from koinon_node.storage import directory as files
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_node.storage.log_files import Stretch
from koinon_node.storage.store import Store
from koinon_node.storage.write_ahead_log import LogDisk, LogThread, WriteAheadLog
from koinon_node.storage.writer_channel import Answer, ProcessChannel, StoreChannel, WriterChannel
from koinon_node.storage.writer_process import MERGES
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.process.measures import Histogram

log = logging.getLogger(__name__)

_PAGE_BYTES = 4096  # of an LMDB page
_FORGOTTEN_AT_ONCE = 2_000  # rows of the overlay freed in one turn of the loop
_RETRY_S = 1.0  # between tries while the store has no room for the log's records
_SETTLE_S = 10.0
_CLOSE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The bounds of a take-over, of the overlay, and of the groups that go through the log."""

    layer_rows: int = 50_000  # the most rows taken over in one transaction
    layer_bytes: int = 16 * 1024 * 1024
    overlay_rows: int = 400_000  # beyond it groups wait until the store has caught up
    overlay_bytes: int = 64 * 1024 * 1024
    take_over_s: float = 1.0  # the longest time from the log to the start of a take-over
    spare_bytes: int = 32 * 1024 * 1024  # with less spare room all groups go directly
    hangs_s: float = 10.0  # after a take-over of this time the disk counts as hanging
    large_group_bytes: int = 512 * 1024  # a group of this size goes directly, if its rows have
    large_row_bytes: int = 2_048  # this many bytes on average
    page_bytes: int = 64 * 1024  # a group of this size with a catch-up page goes directly


class LoggedChannel:
    """A ``WriterChannel`` with a log in front of another channel. Belongs to the event loop's
    thread.
    """

    def __init__(
        self,
        inner: StoreChannel,
        wal: WriteAheadLog,
        store: Store,
        make_disk: Callable[[Callable[[str], None]], LogDisk] = LogThread,
        bounds: Bounds | None = None,
    ) -> None:
        self._bounds = bounds or Bounds()
        self.take_over_seconds = Histogram()
        self.on_progress: Callable[[], None] = lambda: None  # called when the disk did other work
        wal.on_progress = lambda: self.on_progress()
        self._inner = inner
        self._log = wal
        self._store = store
        self._make_disk = make_disk
        self._overlay = store.overlay
        self._used_bytes = 0  # of the store, by the process's last answer
        self._on_answer: Callable[[Answer], None] = lambda _: None
        self._on_lost: Callable[[], None] = lambda: None
        self._group: GroupFrame | None = None  # sent, and waiting for the store to catch up
        self._direct = False  # the process executes a group directly
        self._loose: set[int] = set()  # the indexes of that group's loose tickets
        self._taking = 0  # the position up to which a take-over is under way; 0: none is
        # Closed layers that the store lacks, oldest first: (last position, stretches of the log).
        self._closed: deque[tuple[int, list[Stretch]]] = deque()
        self._wanted = 0  # the position up to which a caller waits for the store
        self._taken = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._failed_group = 0  # the last group with a ticket that found no room
        self._failures: dict[int, str] = {}  # reasons of the direct group's tickets refused here
        self._is_lost = False  # the process has ended, or the log has failed
        self._no_room = ""  # why the store could not take over the log; '': it can
        self._taking_since = 0.0
        self._disk_free = 0  # bytes, by the last check
        self._disk: LogDisk | None = None
        self._retrying = False  # the timer will retry a take-over that found no room
        self._closing = False

    # --- WriterChannel ---------------------------------------------------------------------

    async def open(self, on_answer: Callable[[Answer], None], on_lost: Callable[[], None]) -> None:
        self._on_answer, self._on_lost = on_answer, on_lost
        self._used_bytes = self._store.used_bytes()
        await self._inner.open(self._on_process, self._lost)
        self._disk = self._make_disk(self._on_log_failure)
        self._log.open(self._disk)
        self._disk_free = self._free_bytes()

    def send(self, group: GroupFrame) -> None:
        assert self._group is None
        assert not self._direct
        self._group = group
        self._advance_group()

    async def close(self) -> bool:
        if not self._closing and not self._is_lost:
            self._closing = True
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self.settle()
            except (TimeoutError, UnavailableError):
                log.warning("the store lags behind its log; its next start takes the rest over")
                self._inner.kill()
        if self._timer is not None:
            self._timer.cancel()
        clean = await self._inner.close()
        await asyncio.to_thread(self._log.close)
        return clean and not self._overlay

    def kill(self) -> None:
        self._closing = True
        self._inner.kill()

    # --- waiting for the store -----------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until the store has taken over all records that are durable now.

        Raises:
            UnavailableError: the store has no room, or its disk does not answer.
        """
        if not self._overlay:
            return
        position = self._overlay.last
        self._wanted = max(self._wanted, position)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((position, future))
        self._take_over()
        try:
            async with asyncio.timeout(_SETTLE_S):
                await future
        except TimeoutError:
            reason = self._no_room or "the disk does not answer"
            raise UnavailableError(reason=f"the store lags behind its log: {reason}") from None

    # --- internal ------------------------------------------------------------------------------

    def _advance_group(self) -> None:
        """Log the waiting group or send it directly, if that is possible now."""
        group = self._group
        if group is None or self._direct:
            return
        number, urgent, tickets = group
        failures: dict[int, str] = {}
        left = tickets
        if self._failed_group or self._no_room:
            failures = refused(tickets, self._failed_group, self._no_room)
            left = [(0, 0, ()) if n in failures else ticket for n, ticket in enumerate(tickets)]
        direct = self._goes_direct(left)
        waits = bool(self._overlay) if direct else self._lags()
        if waits and self._no_room and not self._taking:
            failures = dict.fromkeys(range(len(tickets)), self._no_room)
        elif waits:
            self._catch_up()
            return
        self._group = None
        if failures and any(not tickets[index][1] & LOOSE for index in failures):
            self._failed_group = number
        if failures and len(failures) == len(tickets):
            asyncio.get_running_loop().call_soon(self._answer, number, failures)
        elif direct:
            self._direct, self._failures = True, failures
            self._loose = {index for index, (_, ties, _) in enumerate(tickets) if ties & LOOSE}
            self._inner.send((number, urgent, left))
        else:
            self._append(number, [writes for _, _, writes in left], failures, urgent=urgent)

    def _append(
        self, number: int, tickets: Sequence[Writes], failures: dict[int, str], *, urgent: bool
    ) -> None:
        def written(position: int, size: int) -> None:
            if self._is_lost:
                return
            self._overlay.add(position, tickets, size)
            newest, bounds = self._overlay.newest, self._bounds
            if newest.rows >= bounds.layer_rows or newest.size >= bounds.layer_bytes:
                self._close_layer()
            self._answer(number, failures)
            self._take_over()

        self._log.append(tickets, written, urgent=urgent)

    def _lags(self) -> bool:
        """Return whether the store must catch up before more is logged. A take-over that does not
        end counts as well: the disk hangs, and writers must notice.
        """
        overlay, bounds = self._overlay, self._bounds
        if overlay.rows >= bounds.overlay_rows or overlay.size >= bounds.overlay_bytes:
            return True
        now = asyncio.get_running_loop().time()
        return bool(self._taking) and now - self._taking_since > bounds.hangs_s

    def _catch_up(self) -> None:
        self._wanted = self._overlay.last
        self._take_over()

    def _goes_direct(self, tickets: Sequence[TicketFrame]) -> bool:
        """Return whether the group goes directly to the store."""
        bounds = self._bounds
        rows = size = ties = 0
        for _, bits, writes in tickets:
            ties |= bits
            for database, keys, values in writes:
                if database == MERGES:
                    return True
                if len(keys) == 1:
                    rows, size = rows + 1, size + len(keys[0]) + len(values[0] or b"")
                else:
                    rows += len(keys)
                    size += sum(map(len, keys)) + sum(map(len, filter(None, values)))
        if size >= bounds.large_group_bytes and size >= bounds.large_row_bytes * rows:
            return True
        if size >= bounds.page_bytes and ties & BULK:
            return True
        if not self._no_room and not self._has_spare_room(rows, size):
            return True
        columns = sum(len(writes) for _, _, writes in tickets)
        return not self._log.has_room(size + 8 * (rows + columns))

    def _has_spare_room(self, rows: int, size: int) -> bool:
        """Return whether the store surely has room for the log's records and so much more. If not,
        the group goes directly, so that a lack of room shows before the acknowledgement.

        A transaction copies each page that it changes: at worst one per row, at most all. The pages
        freed by the transaction before cannot be reused yet: hence the factor two.
        """
        overlay, used = self._overlay, self._used_bytes
        spare, added = self._bounds.spare_bytes, 2 * (overlay.size + size)
        copied = 2 * min((overlay.rows + rows) * _PAGE_BYTES, used)
        config = self._store.config
        is_room = spare + copied + added <= min(self._disk_free, config.mapped_bytes - used)
        return is_room and spare + added <= config.map_size_bytes - used

    def _free_bytes(self) -> int:
        found = os.statvfs(self._store.config.directory)
        return found.f_bavail * found.f_frsize

    def _look_at_room(self) -> None:
        """Check the free bytes of the disk, on the log's thread."""

        def looked(free: int) -> None:
            self.on_progress()
            self._disk_free = free

        assert self._disk is not None
        self._disk.put(self._free_bytes, looked)

    def _answer(self, number: int, failures: dict[int, str]) -> None:
        self._on_answer((number, failures, self._used_bytes))

    def _close_layer(self) -> None:
        """Close the present layer, which will be taken over in one transaction."""
        self._overlay.close_layer()
        self._closed.append((self._overlay.last_closed, self._log.take_over()))

    def _take_over(self) -> None:
        """Start a take-over of the oldest closed layer, unless one is under way."""
        if self._taking or self._direct or not self._overlay or self._retrying:
            return
        if not self._closed and self._wanted > self._taken and self._overlay.newest.rows:
            self._close_layer()
        if not self._closed:
            if self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._bounds.take_over_s, self._on_time)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._taking, stretches = self._closed[0]
        self._taking_since = asyncio.get_running_loop().time()
        self._inner.take_over(self._store.log_life, self._taking, stretches)

    def _on_time(self) -> None:
        self._timer, self._retrying = None, False
        self._catch_up()

    def _on_process(self, answer: Answer) -> None:
        number, failures, self._used_bytes = answer
        if self._is_lost:
            return
        if self._direct:
            self._direct = False
            self._on_direct(number, failures)
            return
        taken, self._taking = self._taking, 0
        self.take_over_seconds.observe(asyncio.get_running_loop().time() - self._taking_since)
        self.on_progress()
        if failures:
            self._on_no_room(failures[0])
        else:
            self._no_room = ""
            self._look_at_room()
            self._taken = taken
            self._closed.popleft()
            self._clear(self._overlay.drop_through(taken))
            self._log.release(taken)
            waiting, self._waiting = self._waiting, []
            for position, future in waiting:
                if position > taken:
                    self._waiting.append((position, future))
                elif not future.done():
                    future.set_result(None)
            self._take_over()
        self._advance_group()

    def _on_direct(self, number: int, failures: dict[int, str]) -> None:
        if any(index not in self._loose for index in failures):
            self._failed_group = number
        self._look_at_room()
        self._answer(number, {**failures, **self._failures})

    def _on_no_room(self, reason: str) -> None:
        if not self._no_room:
            log.error("no room in the store for what its log holds: tries again reason=%s", reason)
        self._no_room, self._retrying = reason, True
        if self._timer is None and not self._closing:
            self._timer = asyncio.get_running_loop().call_later(_RETRY_S, self._on_time)

    def _clear(self, layers: list[Layer]) -> None:
        """Free the rows of these layers, some at a time: freeing 50,000 at once takes 60 ms."""
        if layers and not layers[-1].forget(_FORGOTTEN_AT_ONCE):
            layers.pop()
        if layers:
            asyncio.get_running_loop().call_soon(self._clear, layers)

    def _lost(self) -> None:
        """Fail all waiters: no more answers will come."""
        if self._is_lost:
            return
        self._is_lost = True
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(UnavailableError(reason="the node is stopping"))
        self._on_lost()

    def _on_log_failure(self, reason: str) -> None:
        log.critical("the log failed reason=%s", reason)
        if self._store.config.durability == "interval":
            files.note_failed_sync(self._store.config.directory)
        self._lost()


def refused(tickets: Sequence[TicketFrame], failed_group: int, no_room: str) -> dict[int, str]:
    """Return the reasons of a group's refused tickets by index. Refused are: tickets that depend on
    ``failed_group``, the last group with a refused ticket, or a later one; with ``no_room`` (the
    reason) tickets that store a record; and tickets chained to these in their partition. The writer
    process applies the same rules (rule 8).
    """
    failures: dict[int, str] = {}
    gaps: set[bytes] = set()
    for index, (after, ties, writes) in enumerate(tickets):
        metadata = {key for db, keys, _ in writes if db == PARTITIONS_DB for key in keys}
        if after and after <= failed_group:
            failures[index] = "a write that this write depends on found no room"
        elif ties & CHAINED and not gaps.isdisjoint(metadata):
            failures[index] = "an earlier write of the partition found no room"
        elif no_room and _stores(writes):
            failures[index] = no_room
        if index in failures and not ties & LOOSE:
            gaps |= metadata
    return failures


def _stores(writes: Writes) -> bool:
    """Return whether the writes store a record, or execute a merge step, which stores some."""
    return any(
        db == MERGES or (db == DATA_DB and any(value is not None for value in values))
        for db, _, values in writes
    )


def in_front_of(process: ProcessChannel, store: Store) -> WriterChannel:
    """Return the channel to the writer process of an open store: through the log, if the store has
    one.
    """
    config = store.config
    if not store.logged:
        return process
    interval_s = config.sync_interval_ms / 1000 if config.durability == "interval" else 0.0
    wal = WriteAheadLog(config.directory, store.log_life, sync_interval_s=interval_s)
    return LoggedChannel(process, wal, store)
