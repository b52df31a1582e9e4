"""The requests that wait until an entry is applied here: proposals, reads, transfers.

Every request ends: with its result, or with an error when the leadership it depends on is lost.
"""

import asyncio
from collections.abc import Callable

from koinon_coordinator.core.raft import Entry, LogPosition
from koinon_coordinator.raft.errors import ProposalUnknownError


class _Pending:
    """A proposal that waits to be applied here."""

    __slots__ = ("future", "proposed_at", "term")

    def __init__(self, term: int, proposed_at: float, future: asyncio.Future[object]) -> None:
        self.term = term
        self.proposed_at = proposed_at
        self.future = future


class Waiting:
    """The open requests of one member, on its event loop."""

    def __init__(self) -> None:
        self._proposals: dict[int, _Pending] = {}
        self._reads: set[asyncio.Future[int]] = set()
        self._transfers: list[asyncio.Future[None]] = []

    async def for_proposal(self, position: LogPosition, now: float) -> object:
        """Return the result of `apply` for the entry. Raises ProposalUnknownError."""
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._proposals[position.index] = _Pending(position.term, now, future)
        return await future

    async def for_read(self, future: asyncio.Future[int]) -> int:
        """Return the index of the read; raise the error given to `fail_reads`."""
        self._reads.add(future)
        try:
            return await future
        finally:
            self._reads.discard(future)

    async def for_transfer(self) -> None:
        """Return once leadership is gone; raise the error given to `settle_transfers`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transfers.append(future)
        await future

    def on_applied(self, entry: Entry, result: object) -> float | None:
        """Answer the proposal of the applied entry, if the entry is indeed the proposed one; return
        when it was proposed.
        """
        pending = self._proposals.pop(entry.index, None)
        if pending is None or pending.future.done():
            return None
        if pending.term != entry.term:
            pending.future.set_exception(ProposalUnknownError(reason="leadership was lost"))
            return None
        pending.future.set_result(result)
        return pending.proposed_at

    def fail_proposals(self, reason: str, before_term: int) -> None:
        """End the proposals of earlier terms: their fate is unknown."""
        lost = {i: p for i, p in self._proposals.items() if p.term < before_term}
        for index, pending in lost.items():
            del self._proposals[index]
            if not pending.future.done():
                pending.future.set_exception(ProposalUnknownError(reason=reason))

    def fail_reads(self, error: Callable[[], Exception]) -> None:
        for read in self._reads:
            if not read.done():
                read.set_exception(error())
        self._reads.clear()

    def settle_transfers(self, error: Callable[[], Exception] | None) -> None:
        """End the transfers. `error` None: leadership is gone, as requested."""
        for transfer in self._transfers:
            if transfer.done():
                continue
            if error is None:
                transfer.set_result(None)
            else:
                transfer.set_exception(error())
        self._transfers.clear()
