"""Calls back with a ticket's fate, as ``Replicator.finish`` returns it, without task and futures.

A put alone waits for one ticket. A task that waits for two futures, one of the disk and one of the
followers, costs a node as much as all else that it does for such a put.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from koinon_node.core.writes.commit_group import GroupState, Ticket
from koinon_proto.contract.errors import KoinonError, StorageFullError, UnknownFateError

End = Callable[[KoinonError | None], None]


class TicketCallback:
    """The waiter of one ticket that looked at no group. ``on_end`` is called once, on a later turn
    of the loop: nothing that it does comes between the answers of one group.
    """

    __slots__ = ("_is_done", "_loop", "_on_end", "_timeout_s", "ticket")

    def __init__(self, on_end: End, timeout_s: float | None) -> None:
        """``timeout_s``: how long followers may take once the ticket is durable here; None: they
        are not waited for.
        """
        self.ticket: Ticket | None = None  # set as soon as there is one
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
        assert group is not None  # what was refused on the spot has an error
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
    """The waiter for a durable ticket's partition to be complete."""

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
    """Return what a client is told of a ticket that failed here: a follower may have it."""
    if not (isinstance(error, StorageFullError) and ticket.spilled):
        return error
    unknown = UnknownFateError(reason=f"followers may have stored it, this node could not: {error}")
    unknown.__cause__ = error
    return unknown


def too_late() -> UnknownFateError:
    """Return the fate of a write that is durable here and was not held by all in time."""
    return UnknownFateError(reason="not every in-sync replica has it in time")
