"""Group commit: all that is queued goes into one transaction with one fsync, then all are answered.

The transactions are made by a process of their own (writer_process.py), fed over a socket pair from
the event loop. py-lmdb takes and drops the GIL at every row, so that a thread that writes and a
loop that serves slow one another down. Measured on 2 cores with a client process that keeps 8
batches of 1,000 rows (16 B keys, 100 B values) of writes in flight, and 12 of reads beside them;
"stall" is the longest that the loop kept a timer waiting:

    writes alone     mixed: writes   reads        stall
    108,000 rows/s   88,700 rows/s   489,000/s    20.4 ms   a thread
    115,000          94,000          404,000       9.9 ms   a thread, switch interval 0.5 ms
    119,500          97,500          451,000      20.5 ms   a thread, switch interval 0.1 ms
     88,000          81,000           53,000      29.7 ms   putting and committing on the loop
    120,000         115,300          483,000      28.3 ms   a process, fed by a thread
    119,000         115,000          587,000       4.0 ms   a process, fed by the loop (this)

(Putting on the loop and committing on a thread is not to be had: LMDB's write lock belongs to the
thread that took it. The mixed reads of the fourth line are from a run with 2 batches in flight.)

Invariant: groups are applied and answered in order. Every queue is bounded: what does not fit is
refused before it is sequenced.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from koinon_node.config import Limits
from koinon_node.core.replica import PendingWrites
from koinon_node.storage import META_DB, Store
from koinon_node.writer_process import LENGTH, TicketFrame, Writes
from koinon_proto.errors import ResourceExhaustedError, StorageFullError, UnknownFateError

log = logging.getLogger(__name__)

_GROUPS_IN_FLIGHT = 1  # 2 and 3 gave no more rows, only smaller groups and more fsyncs
_STOP_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Group:
    tickets: list[TicketFrame] = field(default_factory=list)
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    done: asyncio.Future[None] | None = None
    rows: int = 0
    size: int = 0
    urgent: bool = False


class Writer:
    """The event loop's end of the writer process. All methods belong to the loop's thread."""

    def __init__(
        self,
        store: Store,
        pending: PendingWrites,
        node_id: str,
        limits: Limits,
        on_failure: Callable[[str], None],
    ) -> None:
        self._store = store
        self._pending = pending
        self._node_id = node_id
        self._limits = limits
        self._on_failure = on_failure
        self._groups: dict[int, _Group] = {pending.open_group: _Group()}
        self._in_flight = 0
        self._rows = self._size = 0  # queued and in flight
        self._promised_rows = self._promised_size = 0  # of batches that are being queued
        self._used_bytes = store.used_bytes()
        self._kick_due = False
        self._failed = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Start the process."""
        ours, theirs = socket.socketpair()
        lock = self._store.lock_descriptor
        self._process = subprocess.Popen(  # noqa: ASYNC220  # at start, nothing is served yet
            [sys.executable, "-m", "koinon_node.writer_process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), lock),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024 * 1024)
        loop = asyncio.get_running_loop()
        protocol = _AnswerProtocol(self._on_answer, self._on_lost)
        transport, _ = await loop.create_unix_connection(lambda: protocol, sock=ours)
        self._transport = transport
        config = self._store.config
        self._send({**asdict(config), "directory": str(config.directory)})

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def pending_rows(self) -> int:
        return self._rows

    def check_room(self, rows: int, size: int, put_size: int) -> None:
        """Check that so many more rows and bytes may be queued, ``put_size`` of them to be stored.

        Called before sequences are given. Twice the pending size is set aside for pages that are
        half full.

        Raises:
            ResourceExhaustedError: the queue is full.
            StorageFullError: the store is full.
        """
        if self._failed:
            raise UnknownFateError(reason=self._failed)
        held_rows, held_size = self._rows + self._promised_rows, self._size + self._promised_size
        if held_rows and held_rows + rows > self._limits.pending_rows:
            raise ResourceExhaustedError(
                resource="rows waiting to be written", limit=self._limits.pending_rows
            )
        if held_size and held_size + size > self._limits.pending_bytes:
            raise ResourceExhaustedError(
                resource="bytes waiting to be written", limit=self._limits.pending_bytes
            )
        limit = self._store.config.map_size_bytes
        if put_size and self._used_bytes + 2 * (held_size + put_size) > limit:
            raise StorageFullError(
                node_id=self._node_id,
                reason=f"the store holds {self._used_bytes} of {limit} bytes, "
                f"{put_size} more do not fit",
            )

    def promise(self, rows: int, size: int, put_size: int) -> None:
        """Set room aside for a batch that is queued in steps, so that batches side by side are
        refused at once or taken whole. To be given back, step by step, with ``redeem``.

        Raises:
            As ``check_room``.
        """
        self.check_room(rows, size, put_size)
        self._promised_rows += rows
        self._promised_size += size

    def redeem(self, rows: int, size: int) -> None:
        """Give back promised room: what it was for is queued now, or will not be."""
        self._promised_rows -= rows
        self._promised_size -= size

    def submit(
        self, writes: Writes, rows: int, size: int, *, after_group: int = 0, urgent: bool = False
    ) -> asyncio.Future[None]:
        """Queue one ticket: all of it is applied or none. The future ends when it is durable.

        The future's errors: StorageFullError (nothing was applied), UnknownFateError (the writer
        is gone).
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._failed:
            future.set_exception(UnknownFateError(reason=self._failed))
            return future
        group = self._groups[self._pending.open_group]
        group.tickets.append((after_group, writes))
        group.waiters.append(future)
        group.rows += rows
        group.size += size
        group.urgent |= urgent
        self._rows += rows
        self._size += size
        self._idle.clear()
        if group.rows >= self._limits.group_rows or group.size >= self._limits.group_bytes:
            self._seal()
        elif not self._kick_due and self._in_flight < _GROUPS_IN_FLIGHT:
            self._kick_due = True
            asyncio.get_running_loop().call_soon(self._kick)
        return future

    async def put_meta(self, values: Mapping[bytes, str]) -> None:
        """Store facts about the node, durably whatever the durability of records is."""
        keys = list(values)
        encoded: list[bytes | None] = [value.encode() for value in values.values()]
        await self.submit(((META_DB, keys, encoded),), len(keys), 0, urgent=True)

    async def group_done(self, group: int) -> None:
        """Wait until the pending group is durable (or has failed)."""
        waiting = self._groups.get(group)
        if waiting is None:
            return
        if waiting.done is None:
            waiting.done = asyncio.get_running_loop().create_future()
        await asyncio.shield(waiting.done)

    async def drain(self) -> None:
        """Wait until nothing is queued."""
        await self._idle.wait()

    async def stop(self) -> bool:
        """Drain and end the process; return whether it ended clean."""
        if not self._failed:
            await self.drain()
        self._failed = self._failed or "the node is stopping"
        process, transport = self._process, self._transport
        if process is None or transport is None:
            return True
        transport.close()
        loop = asyncio.get_running_loop()
        try:
            code = await loop.run_in_executor(None, process.wait, _STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return code == 0

    # --- inside --------------------------------------------------------------------------------

    def _seal(self) -> int:
        """Close the open group; it waits in ``_groups`` until it may be sent."""
        sealed = self._pending.seal()
        self._groups[self._pending.open_group] = _Group()
        self._pump()
        return sealed

    def _kick(self) -> None:
        self._kick_due = False
        group = self._groups[self._pending.open_group]
        if group.tickets and self._in_flight < _GROUPS_IN_FLIGHT and self._sealed_waiting() == 0:
            self._seal()
        else:
            self._pump()

    def _sealed_waiting(self) -> int:
        return len(self._groups) - 1 - self._in_flight

    def _pump(self) -> None:
        """Send sealed groups, oldest first, while the process may have more."""
        while self._in_flight < _GROUPS_IN_FLIGHT and self._sealed_waiting() > 0:
            number = next(n for i, n in enumerate(self._groups) if i == self._in_flight)
            group = self._groups[number]
            self._in_flight += 1
            self._send((number, group.urgent, group.tickets))
            group.tickets = []

    def _send(self, message: Any) -> None:
        assert self._transport is not None
        body = marshal.dumps(message)
        self._transport.writelines((LENGTH.pack(len(body)), body))

    def _on_answer(self, answer: tuple[int, dict[int, str], int]) -> None:
        number, failures, self._used_bytes = answer
        group = self._groups.pop(number)
        self._in_flight -= 1
        self._rows -= group.rows
        self._size -= group.size
        self._pending.resolve(number)
        for index, waiter in enumerate(group.waiters):
            if waiter.done():
                continue
            if index in failures:
                waiter.set_exception(
                    StorageFullError(node_id=self._node_id, reason=failures[index])
                )
            else:
                waiter.set_result(None)
        if group.done is not None and not group.done.done():
            group.done.set_result(None)
        if failures:
            log.warning(
                "store full: writes refused count=%d reason=%s",
                len(failures),
                next(iter(failures.values())),
            )
        self._pump()
        if self._groups[self._pending.open_group].tickets:
            self._kick()
        elif len(self._groups) == 1:
            self._idle.set()

    def _on_lost(self) -> None:
        if self._failed:
            return
        self._failed = "the writer process ended"
        for group in self._groups.values():
            for waiter in group.waiters:
                if not waiter.done():
                    waiter.set_exception(UnknownFateError(reason=self._failed))
            if group.done is not None and not group.done.done():
                group.done.set_result(None)
        self._idle.set()
        self._on_failure(self._failed)


class _AnswerProtocol(asyncio.Protocol):
    """Cuts the stream into answers."""

    def __init__(self, on_answer: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._buffer = bytearray()
        self._on_answer = on_answer
        self._on_lost = on_lost

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            answer = marshal.loads(memoryview(self._buffer)[LENGTH.size : end])
            del self._buffer[:end]
            self._on_answer(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()


def columns(keys: Sequence[bytes], value: bytes | None) -> tuple[list[bytes], list[bytes | None]]:
    """Return ``keys`` and as many times ``value``."""
    return list(keys), [value] * len(keys)
