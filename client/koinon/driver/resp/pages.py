"""Pages of scans that were asked for on connections of the loop's, as these see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from koinon.core.batching import PendingOperation
from koinon.core.exchange import PendingPage
from koinon.core.routing import Routing
from koinon.driver.resp.connection import Operations
from koinon_proto.contract.errors import KoinonError, UnknownFateError, UnsupportedVersionError


class PageRequests:
    """The attempts at pages that one node is asked for. Each ends with what it came to: it is the
    scan that asks again. ``operations`` have the clock and the table.
    """

    def __init__(self, operations: Operations[PendingOperation]) -> None:
        self.now: Callable[[], float] = operations.now
        self.routing: Callable[[], Routing] = operations.routing
        self.watch_answers = operations.watch_answers
        self.answered = True
        """True until the node says that its build does not know the command."""
        self._live: set[PendingPage] = set()

    def begin(self, page: PendingPage) -> None:
        self._live.add(page)

    def end(self, page: PendingPage) -> None:
        """Give an attempt up: a reply is dropped when it comes."""
        page.done = True
        self._live.discard(page)

    def send_again(self, singles: Sequence[PendingPage]) -> None:
        for page in singles:
            page.end(None)

    def settle_failed(self, failed: list[tuple[PendingPage, KoinonError]]) -> None:
        for page, error in failed:
            self.answered &= not isinstance(error, UnsupportedVersionError)
            page.end(error if self.answered else None)

    def close(self, reason: str) -> None:
        """End every attempt."""
        for page in list(self._live):
            page.end(UnknownFateError(reason=reason))
