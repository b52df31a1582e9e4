"""Sends one attempt's chunks to the primaries of their partitions.

Chunks are collected into messages by owner; few messages are in flight at once. Chunks that a node
refuses or does not answer are sent again under the same numbers, to the partitions' present
primaries: staging a chunk twice has the effect of once. The first final error ends the attempt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from koinon.core.routing import Routing
from koinon.driver.rpc.kv_messages import refused
from koinon.spark.cluster import Cluster, Retries
from koinon.spark.writing.chunking import Chunk
from koinon_proto.contract.encoded_parts import with_bytes
from koinon_proto.contract.errors import KoinonError
from koinon_proto.v1 import loads_pb2

MESSAGE_BYTES: Final = 2 * 1024 * 1024
MESSAGE_BYTES_MIN: Final = 256 * 1024
GATHERING_BYTES: Final = 32 * 1024 * 1024
"""The limit of bytes in all unfinished messages: with many owners, messages are smaller."""
IN_FLIGHT_PER_OWNER: Final = 2
IN_FLIGHT: Final = 12
"""The limit of one attempt's messages in flight, over all owners."""
_CHUNKS: Final = loads_pb2.StageRequest.CHUNKS_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class Numbered:
    """A chunk with its number within the attempt."""

    number: int
    chunk: Chunk


@dataclass(slots=True)
class Message:
    """Chunks for one owner, in one request."""

    owner: str
    chunks: list[Numbered] = field(default_factory=list)
    size: int = 0

    def add(self, numbered: Numbered) -> None:
        self.chunks.append(numbered)
        self.size += len(numbered.chunk.data)


class Pace:
    """Limits the bytes a second (0: no limit), after a burst of one second's worth."""

    def __init__(self, bytes_per_second: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_second
        self._now = now
        self._free_at = now() - 1.0  # when the bytes so far are within the rate

    def delay_s(self, size: int) -> float:
        """Return the delay in seconds before this many bytes are sent."""
        if not self._rate:
            return 0.0
        now = self._now()
        self._free_at = max(self._free_at, now - 1.0) + size / self._rate
        return max(0.0, self._free_at - now)


class ChunkSender:
    """Stages the chunks of one attempt. Only one thread may call ``add`` and ``finish``."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        load_id: int,
        attempt: int,
        table_version: int,
        bytes_per_second_max: int = 0,
    ) -> None:
        """``table_version``: of the table in which the load is open."""
        self._cluster = cluster
        self._load_id = load_id
        self._attempt = attempt
        self._table_version = table_version
        self._pace = Pace(bytes_per_second_max)
        self._filling: dict[str, Message] = {}  # by owner
        self._next_number = 0  # of the attempt's next chunk
        self._senders = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="koinon-stage")
        self._changed = threading.Condition()  # guards the following fields, and the counts
        self._in_flight: dict[str, int] = {}  # messages by the owner that they were built for
        self._error: BaseException | None = None  # the first error; ends the attempt
        self._stopped = threading.Event()  # tells senders to stop
        self.rows = 0
        """Staged rows, as counted by their nodes."""
        self.bytes = 0

    def add(self, chunk: Chunk) -> None:
        """Add a chunk; wait while too many messages are in flight.

        Raises:
            KoinonError: the attempt has failed.
        """
        self._check()
        routing = self._cluster.routing()
        owner = routing.owner_of[chunk.partition_id]
        message = self._filling.get(owner)
        if message is None:
            message = self._filling[owner] = Message(owner)
        message.add(Numbered(self._next_number, chunk))
        self._next_number += 1
        if message.size >= _message_bytes(routing):
            del self._filling[owner]
            self._send_off(message)

    def finish(self) -> None:
        """Send the remaining chunks; return when all are staged. Raises as ``add`` does."""
        for message in self._filling.values():
            self._send_off(message)
        self._filling = {}
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._in_flight)
        self._check()

    def fail(self, error: BaseException) -> None:
        """Fail the attempt: messages in flight stop, ``add`` and ``finish`` raise. From any
        thread.
        """
        with self._changed:
            self._error = self._error or error
            self._stopped.set()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the messages in flight, and wait for them."""
        self._stopped.set()
        self._senders.shutdown(wait=True, cancel_futures=True)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _send_off(self, message: Message) -> None:
        self._stopped.wait(self._pace.delay_s(message.size))
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._has_room(message.owner))
            self._check()
            self._in_flight[message.owner] = self._in_flight.get(message.owner, 0) + 1
        self._senders.submit(self._send, message)

    def _has_room(self, owner: str) -> bool:
        return (
            self._in_flight.get(owner, 0) < IN_FLIGHT_PER_OWNER
            and sum(self._in_flight.values()) < IN_FLIGHT
        )

    def _send(self, message: Message) -> None:
        """Send a message until all its chunks are staged. Runs in a thread of its own."""
        try:
            self._deliver(message.chunks)
        except BaseException as error:  # any exception: the task's own thread raises it
            self.fail(error)
        finally:
            with self._changed:
                left = self._in_flight[message.owner] - 1
                if left:
                    self._in_flight[message.owner] = left
                else:
                    del self._in_flight[message.owner]
                self._changed.notify_all()

    def _deliver(self, chunks: list[Numbered]) -> None:
        retries = Retries(self._cluster, self._stopped)
        while chunks:
            routing = self._cluster.routing()
            left: list[Numbered] = []
            errors: list[KoinonError] = []
            for owner, mine in _by_owner(chunks, routing).items():
                refusals = self._stage(owner, mine, routing)
                again = [n for n in mine if n.chunk.partition_id in refusals]
                if len(again) < len(mine):
                    retries.progress()
                left += again
                errors += refusals.values()
            if errors:
                retries.after(list(dict.fromkeys(errors)), revision=routing.revision)
            chunks = left

    def _stage(
        self, owner: str, chunks: list[Numbered], routing: Routing
    ) -> dict[int, KoinonError]:
        """Send chunks to one node; return the errors of partitions that are not staged."""
        if not owner:
            return {n.chunk.partition_id: routing.offline(n.chunk.partition_id) for n in chunks}
        request = loads_pb2.StageRequest(
            cluster_id=routing.table.cluster.cluster_id,
            table_version=max(self._table_version, routing.table.table_version),
            load_id=self._load_id,
            attempt=self._attempt,
            partition_ids=[n.chunk.partition_id for n in chunks],
            numbers=[n.number for n in chunks],
        ).SerializeToString()
        parts = with_bytes(request, _CHUNKS, (n.chunk.data for n in chunks))
        reply = self._cluster.stage(owner, b"".join(parts))
        if isinstance(reply, KoinonError):
            return {n.chunk.partition_id: reply for n in chunks}
        refusals = refused(reply)
        staged = [n.chunk for n in chunks if n.chunk.partition_id not in refusals]
        with self._changed:
            self.rows += sum(chunk.rows for chunk in staged)
            self.bytes += sum(len(chunk.data) for chunk in staged)
        return refusals


def _by_owner(chunks: list[Numbered], routing: Routing) -> dict[str, list[Numbered]]:
    by_owner: dict[str, list[Numbered]] = {}
    for numbered in chunks:
        by_owner.setdefault(routing.owner_of[numbered.chunk.partition_id], []).append(numbered)
    return by_owner


def _message_bytes(routing: Routing) -> int:
    owners = max(1, len(routing.addresses) - 1)
    return max(MESSAGE_BYTES_MIN, min(MESSAGE_BYTES, GATHERING_BYTES // owners))
