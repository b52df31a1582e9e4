"""Puts the write-ahead log in front of the writer process.

A group is durable once its record is synced in the log. From then on its rows lie over the store
(the overlay), and the writer process takes them over in large sorted transactions: it reads the
log itself. One such transaction costs about what one of a small group did, and serves thousands.

    send ---> append, sync ---> overlay, answer
                                   :  by size, by time, or when somebody needs the store itself
                                   '--> the process takes over ---> a layer of the overlay is let go

Some groups go to the store themselves, as all did before there was a log: merge steps, which only
the process can carry out; large values, and pages of a copy's catch-up, which the log would only
write twice; and everything while room is short. The store
takes over all that is in the log before that, so the order is kept, and the log needs no note of
it.

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

_PAGE_BYTES = 4096  # of LMDB
_FORGOTTEN_AT_ONCE = 2_000  # rows
_RETRY_S = 1.0  # while the store has no room for what the log holds
_SETTLE_S = 10.0
_CLOSE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The bounds at which the store takes over the log, and groups go to the store itself."""

    layer_rows: int = 50_000  # are taken over in one transaction; fewer where less is written
    layer_bytes: int = 16 * 1024 * 1024
    overlay_rows: int = 400_000  # with more a group waits until the store has caught up
    overlay_bytes: int = 64 * 1024 * 1024
    take_over_s: float = 1.0  # what is in the log is in the store after so long, if not before
    spare_bytes: int = 32 * 1024 * 1024  # with less room all goes to the store itself
    hangs_s: float = 10.0  # a take-over that takes longer is a disk that hangs
    large_group_bytes: int = 512 * 1024  # goes to the store itself, if its rows are as large as
    large_row_bytes: int = 2_048  # this on average
    page_bytes: int = 64 * 1024  # and so does a group of such a size with a page of a catch-up


class LoggedChannel:
    """A ``WriterChannel`` over another one. All methods belong to the event loop's thread."""

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
        self.on_progress: Callable[[], None] = lambda: None  # the disk has answered something else
        wal.on_progress = lambda: self.on_progress()
        self._inner = inner
        self._log = wal
        self._store = store
        self._make_disk = make_disk
        self._overlay = store.overlay
        self._used_bytes = 0  # of the store, as the process said last
        self._on_answer: Callable[[Answer], None] = lambda _: None
        self._on_lost: Callable[[], None] = lambda: None
        self._group: GroupFrame | None = None  # was sent, and waits: for the store to catch up
        self._direct = False  # a group is with the process
        self._loose: set[int] = set()  # of its tickets
        self._taking = 0  # up to which position the process takes over now; 0: it does not
        # Closed layers that the store lacks, oldest first: up to which position, and where that is.
        self._closed: deque[tuple[int, list[Stretch]]] = deque()
        self._wanted = 0  # up to which position somebody waits for the store
        self._taken = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._failed_group = 0  # the last of which a ticket found no room
        self._failures: dict[int, str] = {}  # of it: why tickets were refused before it was sent
        self._is_lost = False  # the process has ended, or the log has failed
        self._no_room = ""  # why the store could not take over what the log holds
        self._taking_since = 0.0
        self._disk_free = 0  # bytes, when that was last looked at
        self._disk: LogDisk | None = None
        self._retrying = False  # the timer tries again to take over what found no room
        self._closing = False

    # --- a writer's channel ----------------------------------------------------------------

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
        self._go_on()

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

    # --- what the store itself has to show ---------------------------------------------------

    async def settle(self) -> None:
        """Wait until the store has all that is durable now.

        Raises:
            UnavailableError: it has no room, or its disk does not answer.
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

    # --- inside ------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Send the group that waits on its way, if it may go."""
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
        """Return whether the store has to catch up before more is logged. A process that does not
        come to an end with what it takes over is a disk that hangs: who writes has to notice.
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
        """Return whether the group goes to the store itself."""
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
        """Return whether the store surely has room for what the log holds and so much more. Where
        it may have none, that is found out before anything is acknowledged.

        A transaction copies each page that it changes: one a row at worst, all of them at most. The
        pages that the one before has freed cannot be used again yet: hence twice as many.
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
        """See how much room the disk has, in time."""

        def looked(free: int) -> None:
            self.on_progress()
            self._disk_free = free

        assert self._disk is not None
        self._disk.put(self._free_bytes, looked)

    def _answer(self, number: int, failures: dict[int, str]) -> None:
        self._on_answer((number, failures, self._used_bytes))

    def _close_layer(self) -> None:
        """Have what was added last make a layer, which is taken over in one transaction."""
        self._overlay.close_layer()
        self._closed.append((self._overlay.last_closed, self._log.take_over()))

    def _take_over(self) -> None:
        """Have the process take over the oldest closed layer, if it is free."""
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
        self._go_on()

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
        """Forget the rows of these, some at a time: freeing 50,000 in one go takes 60 ms."""
        if layers and not layers[-1].forget(_FORGOTTEN_AT_ONCE):
            layers.pop()
        if layers:
            asyncio.get_running_loop().call_soon(self._clear, layers)

    def _lost(self) -> None:
        """Fail all that wait: nothing is answered any more."""
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
    """Return why which of a group's tickets are refused, by their places: those that build on a
    group of which a ticket was refused, ``failed_group`` being the last such one; with ``no_room``
    (why there is none) those that store a record; and of a partition what is chained to these. As
    the writer process refuses what finds no room (rule 8).
    """
    failures: dict[int, str] = {}
    gaps: set[bytes] = set()
    for index, (after, ties, writes) in enumerate(tickets):
        metadata = {key for db, keys, _ in writes if db == PARTITIONS_DB for key in keys}
        if after and after <= failed_group:
            failures[index] = "a write that this one builds on found no room"
        elif ties & CHAINED and not gaps.isdisjoint(metadata):
            failures[index] = "a write before this one in its partition found no room"
        elif no_room and _stores(writes):
            failures[index] = no_room
        if index in failures and not ties & LOOSE:
            gaps |= metadata
    return failures


def _stores(writes: Writes) -> bool:
    """Return whether a record is stored, or a merge step, which makes some."""
    return any(
        db == MERGES or (db == DATA_DB and any(value is not None for value in values))
        for db, _, values in writes
    )


def in_front_of(process: ProcessChannel, store: Store) -> WriterChannel:
    """Return the way to the writer process of an open store: by its log, if it is to have one."""
    config = store.config
    if not store.logged:
        return process
    interval_s = config.sync_interval_ms / 1000 if config.durability == "interval" else 0.0
    wal = WriteAheadLog(config.directory, store.log_life, sync_interval_s=interval_s)
    return LoggedChannel(process, wal, store)
