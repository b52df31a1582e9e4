"""The batches of one stream that a follower has taken, and what it acknowledges of them.

A batch is acknowledged when it and all batches before it are durable here, or need not be (they
were kept back, or ignored). One message acknowledges all that became durable in one turn of the
event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from koinon_proto.v1 import replication_pb2


@dataclass(slots=True)
class TakenBatch:
    """A batch that was taken. ``durable`` is set once nothing of it is waited for any more."""

    number: int
    durable: bool = False


class BatchAcks:
    """Acknowledges a stream's batches, in order, once durable. For the event loop only."""

    def __init__(self, send: Callable[[replication_pb2.FollowRequest], None]) -> None:
        self._send = send
        self.last_number = 0  # of the newest batch that was taken; 0: none yet on this stream
        self._taken: deque[TakenBatch] = deque()  # not acknowledged yet, in the stream's order
        self._flush_due = False  # whether this turn of the loop ends with an acknowledgement

    def begin(self) -> None:
        """Begin with a new stream, on which nothing was taken."""
        self.last_number = 0
        self._taken = deque()

    def take(self, number: int) -> TakenBatch:
        """Note the next batch."""
        self.last_number = number
        batch = TakenBatch(number)
        self._taken.append(batch)
        return batch

    def durable(self, batch: TakenBatch) -> None:
        """Acknowledge the batch with all that become durable in this turn of the loop."""
        batch.durable = True
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._acknowledge)

    def _acknowledge(self) -> None:
        self._flush_due = False
        number = 0
        while self._taken and self._taken[0].durable:
            number = self._taken.popleft().number
        if number:
            ack = replication_pb2.BatchAck(number=number)
            self._send(replication_pb2.FollowRequest(ack=ack))
