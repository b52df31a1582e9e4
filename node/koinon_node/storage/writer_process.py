"""The writer process: applies groups of tickets to the store, one transaction per group.

Started by writer_channel.py as ``python -m koinon_node.storage.writer_process SOCKET_FD``, with its
settings as the first frame and the descriptor of the directory's lock inherited. Frames are
``u64 length || u64 length of large values || marshal || large values``; both ends are the same
build. Modules for merge steps are imported only when they are needed, since a node's start waits
for this process.

After the settings, a frame is (kind, content). The content of a GROUP is (group number, urgent,
tickets). A ticket is (after, ties, writes): ``writes`` holds (database, keys, values), a value of
None deletes; of the database MERGES the keys are merge steps (merge_executor.py). Within a group
what comes later wins. If a group finds no room, its tickets are tried one by one. ``after`` is the
oldest group whose pending records the ticket's decision looked at (0: none): it is refused if a
ticket of that group or a later one has failed, because its ground is gone. A ticket with the tie
CHAINED is refused if one before it in its group has failed that wrote metadata of a partition which
it writes too: a replica is complete through a sequence only without gaps.

With a write-ahead log in front of the store, most groups never come here. Instead, LOG_STRETCHES
with (life, position, stretches) asks to take over what the log has in these stretches, up to the
position.

The answer to a group is (group number, failures {ticket index: reason}, used bytes), to a frame of
the log the same with the position and failures {0: reason} where there was no room. Any error but
a lack of room ends the process, loudly; the node then stops too. It also ends when the node does
(end of file, or the signal of a dying parent), and keeps the directory locked until then: records
of a dead node can never arrive after its successor has begun.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import itertools
import marshal
import operator
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb

from koinon_node.core.formats.writer_frames import CHAINED, LOOSE, TicketFrame, Writes, put_large
from koinon_node.storage import directory as files
from koinon_node.storage.environment import (
    DATA_DB,
    EXPIRY_DB,
    META_DB,
    PARTITIONS_DB,
    open_databases,
    open_environment,
    tree_bytes,
)
from koinon_node.storage.log_files import (
    LOG,
    LOG_STATE,
    Stretch,
    decode_state,
    read_records,
    take_over,
)
from koinon_node.storage.transactions import Gathered, gathered, put, stored_entries
from koinon_node.store_config import KEPT_BYTES, StoreConfig
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.process.memory import keep_freed
from koinon_proto.process.printable import protect_streams
from koinon_proto.process.private_files import only_for_owner

LENGTHS = struct.Struct(">QQ")
GROUP, LOG_STRETCHES = 0, 1  # kinds of frames
MERGES = 4
"""The number that marks merge steps in the place of a database."""
_PR_SET_PDEATHSIG = 1
_key_of = operator.itemgetter(0)
_MERGING = "koinon_node.storage.merge_executor"
_NO_ROOM_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ROOM = tuple(map(os.strerror, _NO_ROOM_NUMBERS))
_IO_ERROR = os.strerror(errno.EIO)
_PROBE_BYTES_MIN = 1024 * 1024


class WriterLoop:
    """Reads groups, applies them, answers; syncs by interval if configured so."""

    def __init__(self, connection: socket.socket, config: StoreConfig) -> None:
        self._connection = connection
        self._directory = config.directory
        self._by_interval = config.durability == "interval"
        self._sync_interval_s = config.sync_interval_ms / 1000
        self.environment = open_environment(config, sync=not self._by_interval)
        self._databases = open_databases(self.environment)
        self._failed_group = 0
        self._sync_due: float | None = None

    def run(self) -> None:
        """Apply frames until the node closes its end.

        Raises:
            lmdb.Error: the disk failed. If unsynced writes were acknowledged, a note for the next
                start is left.
        """
        try:
            self._run()
        except lmdb.Error:
            if self._by_interval:
                files.note_failed_sync(self._directory)
            raise

    def _run(self) -> None:
        while (frame := self._next_frame()) is not None:
            number, failures, urgent = self.carry_out(*frame)
            if self._by_interval:
                if urgent:
                    self._sync()
                elif self._sync_due is None:
                    self._sync_due = time.monotonic() + self._sync_interval_s
            with self.environment.begin() as txn:
                used_bytes = tree_bytes(txn, self._databases)
            self._send((number, failures, used_bytes))
        self.environment.sync(True)
        self.environment.close()

    def carry_out(self, kind: int, content: Any) -> tuple[int, dict[int, str], bool]:
        """Execute a frame. Return the number of its group or its position, the failures, and
        whether to sync at once.
        """
        if kind == GROUP:
            number, urgent, tickets = content
            return number, self._apply(number, tickets), urgent
        life, position, stretches = content
        return position, self._take_over(life, position, stretches), False

    def _next_frame(self) -> Any:
        while self._sync_due is not None:
            wait_s = self._sync_due - time.monotonic()
            if wait_s <= 0:
                self._sync()
            elif select.select([self._connection], [], [], wait_s)[0]:
                break
        return receive(self._connection)

    def _sync(self) -> None:
        self.environment.sync(True)
        self._sync_due = None

    def _send(self, answer: Any) -> None:
        frame = marshal.dumps(answer)
        self._connection.sendall(LENGTHS.pack(len(frame), 0) + frame)

    def _apply(self, number: int, tickets: list[TicketFrame]) -> dict[int, str]:
        if all(not after or after > self._failed_group for after, _, _ in tickets):
            reason = self._commit([writes for _, _, writes in tickets])
            if not reason:
                return {}
        failures: dict[int, str] = {}
        gaps: set[bytes] = set()
        for index, (after, ties, writes) in enumerate(tickets):
            metadata = {
                key for database, keys, _ in writes if database == PARTITIONS_DB for key in keys
            }
            if after and after <= self._failed_group:
                reason = "a write that this write depends on found no room"
            elif ties & CHAINED and not gaps.isdisjoint(metadata):
                reason = "an earlier write of the partition found no room"
            else:
                reason = self._commit([writes])
            if reason:
                failures[index] = reason
                if not ties & LOOSE:
                    gaps |= metadata
                    self._failed_group = number
        return failures

    def _take_over(self, life: int, position: int, stretches: list[Stretch]) -> dict[int, str]:
        """Apply the log's records in these stretches, in one transaction if there is room."""
        done_life, done = decode_state(self._read_meta(LOG_STATE))
        records = read_records(self._directory, life, stretches)
        if done_life == life:  # a part was taken over before
            records = [record for record in records if record[0] > done]

        def put_rows(rows: Gathered, size: int) -> str:
            return self._try(
                lambda txn: put(self.environment, txn, self._databases, rows), lambda: size
            )

        last, reason = take_over(records, life, put_rows) if records else (done, "")
        if self._by_interval:
            self._sync()  # before the log reuses a segment
        if reason:
            return {0: reason}
        if last != position:
            raise DataDirectoryError(
                path=str(self._directory / LOG), reason=f"it ends with {last}, not {position}"
            )
        return {}

    def _read_meta(self, key: bytes) -> str:
        with self.environment.begin(self._databases[META_DB]) as txn:
            return bytes(txn.get(key) or b"").decode()

    def _commit(self, tickets: list[Writes]) -> str:
        """Apply the tickets in one transaction; return the reason if there was no room, else ''."""

        def apply(txn: lmdb.Transaction) -> None:
            merged = gathered()
            for database, keys, values in itertools.chain.from_iterable(tickets):
                if database == MERGES:
                    put(self.environment, txn, self._databases, merged)  # the writes before it
                    self._merge(txn, keys)
                else:
                    merged[database].update(zip(keys, values, strict=True))
            put(self.environment, txn, self._databases, merged)

        return self._try(apply, lambda: _size_of(tickets))

    def _try(self, apply: Callable[[lmdb.Transaction], None], size: Callable[[], int]) -> str:
        """Run ``apply`` in one transaction; return the reason if there was no room, else ''.
        ``size`` returns roughly how many bytes it puts.
        """
        try:
            with self.environment.begin(write=True) as txn:
                apply(txn)
        except (lmdb.MapFullError, lmdb.DiskError) as error:
            return str(error)
        except lmdb.Error as error:
            if any(text in str(error) for text in _NO_ROOM):
                return str(error)
            # On a disk that fills up, a write is short, which LMDB reports as an I/O error.
            needed = 2 * size() + _PROBE_BYTES_MIN
            if _IO_ERROR in str(error) and self._disk_full(needed):
                return f"the disk is full ({error})"
            raise
        return ""

    def _merge(self, txn: lmdb.Transaction, steps: list[bytes]) -> None:
        """Execute merge steps. An empty list only imports what they need, ahead of time. (Arrow
        takes half a second and 40 MB; a node without bulk loads needs none.)
        """
        if not steps:
            threading.Thread(target=importlib.import_module, args=(_MERGING,), daemon=True).start()
            return
        from koinon_node.storage.merge_executor import merge
        from koinon_proto.v1.replication_pb2 import MergeStep

        data, expiry = self._databases[DATA_DB], self._databases[EXPIRY_DB]
        with self.environment.begin(data, buffers=True) as before:
            entries = functools.partial(stored_entries, before)
            for step in steps:
                merge(txn, data, expiry, MergeStep.FromString(step), entries)

    def _disk_full(self, needed: int) -> bool:
        """Test with another file whether the data file could not grow by ``needed`` bytes.

        An I/O error may safely be judged so: the failed write came before the transaction's meta
        page, so the whole transaction is dropped, and the next one writes its pages anew.
        """
        size = (self._directory / files.DATA).stat().st_size
        try:
            probe = os.open(self._directory, os.O_TMPFILE | os.O_RDWR)
        except OSError as error:
            return error.errno == errno.ENOSPC
        try:
            os.posix_fallocate(probe, size, needed)
        except OSError as error:
            return error.errno in _NO_ROOM_NUMBERS
        finally:
            os.close(probe)
        return False


def _size_of(tickets: list[Writes]) -> int:
    """Return roughly how many bytes the tickets put."""
    from koinon_proto.v1.replication_pb2 import MergeStep

    size = 0
    for database, keys, values in itertools.chain.from_iterable(tickets):
        if database == MERGES:
            size += sum(MergeStep.FromString(step).bytes for step in keys)
        else:
            size += sum(map(len, keys)) + sum(len(value or b"") for value in values)
    return size


def receive(connection: socket.socket) -> Any:
    """Return the next frame; None at the end of the stream. Large values are memory views."""
    head = _receive_exactly(connection, LENGTHS.size)
    if head is None:
        return None
    body_bytes, large_bytes = LENGTHS.unpack(head)
    body = _receive_exactly(connection, body_bytes)
    large = _receive_exactly(connection, large_bytes)
    if body is None or large is None:
        return None
    frame = marshal.loads(body)
    if large:
        put_large(frame[1], memoryview(large))
    return frame


def _receive_exactly(connection: socket.socket, size: int) -> bytearray | None:
    buffer = bytearray(size)
    view, filled = memoryview(buffer), 0
    while filled < size:
        received = connection.recv_into(view[filled:])
        if not received:
            return None
        filled += received
    return buffer


def main() -> None:
    """Run one writer until its node ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # from a terminal; the node decides when to stop
    protect_streams()
    only_for_owner()
    keep_freed(KEPT_BYTES)
    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = receive(connection)
    if settings is None:
        return
    config = StoreConfig(**{**settings, "directory": Path(settings["directory"])})
    WriterLoop(connection, config).run()


if __name__ == "__main__":
    main()
