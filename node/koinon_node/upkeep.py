"""How work on the expiry index is paced: step after step, whatever else the node does.

What is written with a time to live has to go as fast as it comes, or the store fills with what
nobody reads. So the work does not wait for quiet: as long as there is more, each step looks at
twice as many entries as the one before. A step waits for its own commit, and so never takes more
than its part of a group, beside what clients write; the loop is given back between its parts. Where
the store is so full that the pages which a step has to copy find no room, smaller ones are tried,
down to one entry: they are what makes room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from koinon_proto.errors import KoinonError, StorageFullError, UnknownFateError

log = logging.getLogger(__name__)

ROWS: Final = 128
ROWS_MAX: Final = 8_192
_PART_ROWS = 1_024
_PAUSE_S = 0.02
_INTERVAL_S = 0.5

Look = Callable[[bytes, int], tuple[bytes, Sequence[Awaitable[None]]]]
"""Looks at so many entries that are due, from an entry on, and queues what they ask for; returns
from where to go on, b"" at the end, and what to wait for.
"""


class Upkeep:
    """Passes over the index, one after the other."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._from = b""

    async def run(self) -> None:
        """Make steps until cancelled."""
        await in_steps(self.step)

    async def step(self, rows_max: int) -> bool:
        """Look at so many entries of the index; return whether there may be more now.

        Raises:
            StorageFullError: for what some of them ask for there is no room. They stay, and the
                next step begins where this one did, unless it was of one.
        """
        began, left = self._from, rows_max
        queued: list[Awaitable[None]] = []
        while left > 0:
            self._from, work = self._look(self._from, min(left, _PART_ROWS))
            queued += work
            left -= _PART_ROWS
            if not self._from:
                break
            await asyncio.sleep(0)
        more = bool(self._from)
        # What one part removes makes room, even if another finds none.
        for error in await asyncio.gather(*queued, return_exceptions=True):
            if isinstance(error, StorageFullError) and rows_max > 1:
                self._from = began
            if error is not None and not isinstance(error, UnknownFateError):
                raise error
            more &= error is None  # what has expired stays, unserved
        return more


async def in_steps(
    step: Callable[[int], Awaitable[bool]], *, rows: int = ROWS, rows_max: int = ROWS_MAX
) -> None:
    """Make steps of so many entries until cancelled."""
    size = rows
    while True:
        more = False
        try:
            more = await step(size)
            size = min(2 * size, rows_max) if more else rows
        except StorageFullError as error:
            log.debug("no room for a step entries=%d error=%s", size, error)
            more = size > 1
            size = max(size // 2, 1)
        except KoinonError as error:
            log.debug("a step failed error=%s", error)
        await asyncio.sleep(_PAUSE_S if more else _INTERVAL_S)
