"""Calls a function with a ticket's outcome, as ``Replicator.finish`` returns it, without a task.

A single put waits for one ticket. An asyncio task with two futures, one for the disk and one for
the followers, would cost as much CPU as all the rest of the put.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from koinon_node.core.writes.commit_group import GroupState, Ticket
from koinon_proto.contract.errors import KoinonError, StorageFullError, UnknownFateError

End = Callable[[KoinonError | None], None]


class TicketCallback:
    """The waiter of one ticket that read no pending group. The event loop calls ``on_end`` once, in
    a later turn, so that it runs after the answers of the whole group are known.
    """

    __slots__ = ("_is_done", "_loop", "_on_end", "_timeout_s", "ticket")

    def __init__(self, on_end: End, timeout_s: float | None) -> None:
        """``timeout_s``: how long followers may take once the ticket is durable here. With None the
        callback does not wait for followers.
        """
        self.ticket: Ticket | None = None  # set by the caller right after the write is queued
        self._on_end = on_end
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def set_result(self, _: None = None, /) -> None:
        """The ticket is durable here."""
        assert self.ticket is not None
        self._is_done = True
        group = self.ticket.group
        assert group is not None  # a ticket without a group gets an error instead
        if self._timeout_s is None or group.state is GroupState.COMPLETE:
            self._loop.call_soon(self._on_end, None)
        else:
            group.waiting.append((self.ticket.touched, _Completion(self._on_end, self._timeout_s)))

    def set_exception(self, error: BaseException, /) -> None:
        """The ticket failed, or its fate is unknown."""
        assert isinstance(error, KoinonError)
        self._is_done = True
        ticket = self.ticket
        fate = fate_of(error, ticket) if ticket is not None else error
        self._loop.call_soon(self._on_end, fate)


class _Completion:
    """Waits until the partition of a durable ticket is complete, or the timeout passes."""

    __slots__ = ("_is_done", "_loop", "_on_end", "_timer")

    def __init__(self, on_end: End, timeout_s: float) -> None:
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(timeout_s, self._time_out)
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def set_result(self, _: None = None, /) -> None:
        self._end(None)

    def set_exception(self, error: BaseException, /) -> None:
        assert isinstance(error, KoinonError)
        self._end(error)

    def _time_out(self) -> None:
        if not self._is_done:
            self._end(too_late())

    def _end(self, error: KoinonError | None) -> None:
        self._is_done = True
        self._timer.cancel()
        self._loop.call_soon(self._on_end, error)


def fate_of(error: KoinonError, ticket: Ticket) -> KoinonError:
    """Return the client's error for a ticket that failed here. The fate is unknown if a follower
    may have stored the write.
    """
    if not (isinstance(error, StorageFullError) and ticket.spilled):
        return error
    unknown = UnknownFateError(reason=f"followers may have stored it, this node could not: {error}")
    unknown.__cause__ = error
    return unknown


def too_late() -> UnknownFateError:
    """Build the error of a write that is durable here, but not on all in-sync replicas in time."""
    return UnknownFateError(reason="not every in-sync replica has it in time")
