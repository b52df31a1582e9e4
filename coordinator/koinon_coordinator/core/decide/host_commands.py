"""The host commands in a heartbeat's answer: "you are the primary of these partitions".

A command is due when it was never sent at its epochs, and again after an exponential backoff (with
jitter, so that nodes do not repeat in step) until the row leaves ``ASSIGNED``: the node
acknowledged it, was fenced, or registered again. This is soft state of one leader; a new leader
sends all commands again, and nodes acknowledge commands that they have already carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from koinon_coordinator.core.cluster.commands import HostedPartition
from koinon_proto.contract.table import NodeNumber, PartitionRow


@dataclass(frozen=True, kw_only=True, slots=True)
class HostingTimes:
    first_retry_s: float
    last_retry_s: float


@dataclass(slots=True)
class _Sent:
    command: HostedPartition
    times: int
    due_at: float

    def is_of(self, row: PartitionRow) -> bool:
        """Return whether the row still says what the command does."""
        of_row = row.primary_epoch, row.partition_epoch
        return of_row == (self.command.primary_epoch, self.command.partition_epoch)


def _command(row: PartitionRow) -> HostedPartition:
    return HostedPartition(
        partition_id=row.partition_id,
        primary_epoch=row.primary_epoch,
        partition_epoch=row.partition_epoch,
    )


class HostCommands:
    """The host commands sent to each node, and when each is due again."""

    def __init__(self, times: HostingTimes, random: Random) -> None:
        self._times = times
        self._random = random
        self._sent: dict[NodeNumber, dict[int, _Sent]] = {}

    def due(
        self, number: NodeNumber, assigned: Sequence[PartitionRow], now: float
    ) -> list[HostedPartition]:
        """Return the commands to send to the node now, and count them as sent.

        ``assigned`` are all rows that the node leads in status ``ASSIGNED``.
        """
        if not assigned:
            self._sent.pop(number, None)
            return []
        before = self._sent.get(number, {})
        after: dict[int, _Sent] = {}
        due: list[HostedPartition] = []
        jitter = self._random.uniform(0.75, 1.25)  # one for all, so that they stay due together
        for row in assigned:
            sent = before.get(row.partition_id)
            if sent is None or not sent.is_of(row):
                sent = _Sent(_command(row), 0, now)
            if now >= sent.due_at:
                due.append(sent.command)
                sent.due_at = now + jitter * self._backoff(sent.times)
                sent.times += 1
            after[row.partition_id] = sent
        self._sent[number] = after
        return due

    def acknowledged(
        self, number: NodeNumber, hosted: Iterable[HostedPartition], now: float
    ) -> None:
        """Note that the node has carried these out; do not repeat them until the log had time to
        record it.
        """
        sent = self._sent.get(number, {})
        for command in hosted:
            entry = sent.get(command.partition_id)
            if entry is not None and entry.command == command:
                entry.due_at = max(entry.due_at, now + self._times.last_retry_s)

    def forget(self, number: NodeNumber) -> None:
        """Forget a node that was fenced or has registered again."""
        self._sent.pop(number, None)

    def _backoff(self, times_sent: int) -> float:
        doubled = self._times.first_retry_s * float(2 ** min(times_sent, 16))
        return min(doubled, self._times.last_retry_s)
