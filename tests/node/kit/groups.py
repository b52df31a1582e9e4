"""Commit groups without a writer, taken from state to state by the test; and without replicas."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from koinon_node.config import Limits
from koinon_node.core.writes.commit_group import CommitGroup, Ticket
from koinon_node.core.writes.pending_writes import PendingWrites
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from koinon_node.storage.writer_channel import WriterChannel


class Ending:
    """A waiter that keeps how it ended; "" as long as it has not, "done" without an error."""

    def __init__(self) -> None:
        self.how: str | BaseException = ""

    def done(self) -> bool:
        return self.how != ""

    def set_result(self, result: None, /) -> None:
        assert not self.done()
        self.how = "done"

    def set_exception(self, exception: BaseException, /) -> None:
        assert not self.done()
        self.how = exception

    def __await__(self) -> Generator[Any, None, None]:
        raise AssertionError("nobody waits here")


def join(pending: PendingWrites, ticket: Ticket, rows: int = 1, size: int = 1) -> Ticket:
    pending.join(ticket, rows, size, urgent=False)
    return ticket


def add(pending: PendingWrites, records: Mapping[bytes, bytes | None], **facts: Any) -> Ticket:
    """Have a primary's ticket with these records join the open group."""
    ticket = Ticket(durable=Ending(), sequenced=True, records=records, **facts)
    return join(pending, ticket, rows=len(records))


def claim(pending: PendingWrites, partition_id: int) -> Ticket:
    """Have a merge step of the partition join the open group."""
    touched = np.array([partition_id], np.uint32)
    ticket = Ticket(durable=Ending(), sequenced=True, touched=touched, merge=b"step")
    return join(pending, ticket)


def make_durable(pending: PendingWrites) -> CommitGroup:
    """Hand the oldest group over, and let the disk answer."""
    group = pending.hand_over(0.0)
    assert pending.made_durable(0.0) is group
    return group


def numbers(groups: Iterable[CommitGroup]) -> list[int]:
    return [group.number for group in groups]


class _Alone:
    """A node alone: nothing is replicated, so what is durable here is complete."""

    def __init__(self, pending: PendingWrites) -> None:
        self._pending = pending

    def on_handed_over(self, group: CommitGroup) -> None:
        pass

    def on_durable(self, group: CommitGroup, unstored: Sequence[Ticket], *, whole: bool) -> None:
        self._pending.complete(group)


def lone_writer(
    store: Store,
    on_failure: Callable[[str], None],
    limits: Limits | None = None,
    channel: WriterChannel | None = None,
) -> Writer:
    """Return a writer that nothing is replicated from."""
    limits = limits or Limits()
    return writer_of(LocalReplicas(store, "n1", limits), on_failure, limits, channel)


def writer_of(
    local: LocalReplicas,
    on_failure: Callable[[str], None],
    limits: Limits | None = None,
    channel: WriterChannel | None = None,
) -> Writer:
    """Return a writer of these replicas that nothing is replicated from."""
    return Writer(local, _Alone(local.pending), limits or Limits(), on_failure, channel)
