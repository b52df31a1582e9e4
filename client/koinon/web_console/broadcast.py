"""Hands the journal's entries on to browsers, each at its own pace and from its own place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from koinon.web_console.journal import Entry, Journal

READERS_MAX = 200


class Broadcast:
    """The readers of one journal. Every method must be called on the same event loop."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._news = asyncio.Event()  # set at the next entry; then replaced by a new event
        self._closed = False
        self.readers = 0

    def announce(self) -> None:
        """Wake the readers after an entry was added to the journal."""
        self._news.set()
        self._news = asyncio.Event()

    def close(self) -> None:
        """End all readers."""
        self._closed = True
        self.announce()

    @property
    def full(self) -> bool:
        """True while no further reader is accepted."""
        return self.readers >= READERS_MAX

    async def read(self, last_event_id: str) -> AsyncGenerator[Entry, None]:
        """Yield the entries after this one, or first the whole value of each topic if they are no
        longer kept. Yields nothing while there are too many readers.
        """
        if self.full:
            return
        self.readers += 1
        number = self._journal.number_of(last_event_id)
        try:
            while not self._closed:
                news = self._news
                for entry in self._journal.after(number):
                    yield entry
                    number = number if entry.number is None else entry.number
                if number is None or number == self._journal.last:
                    await news.wait()
        finally:
            self.readers -= 1
