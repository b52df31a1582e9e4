"""Paces the work on the expiry index: step after step, whatever else the node does.

What is written with a time to live has to go as fast as it comes, or the store fills with what is
never read. So the work does not wait for quiet: as long as there is something to do, each step
looks at twice as many entries as the one before. A step waits for its own commit, and so never
takes more than its part of a group, beside what clients write; the loop is given back between its
parts. What is due and has to stay (until moves go on, say) is looked at slowly, and ever less
often. Where the store is so full that the pages which a step has to copy find no room, smaller ones
are tried, down to one entry: they are what makes room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from koinon_proto.contract.errors import KoinonError, StorageFullError, UnknownFateError

log = logging.getLogger(__name__)

ROWS: Final = 128
ROWS_MAX: Final = 8_192
_PART_ROWS = 256
_PAUSE_S = 0.02
_INTERVAL_S, _INTERVAL_S_MAX = 0.5, 16.0
_STEPS_TO_GROW = 64  # that found room, before larger ones than those that did not are tried again

Look = Callable[[bytes, int], tuple[bytes, Sequence[Awaitable[None]]]]
"""Looks at so many entries that are due, from an entry on, and queues what they ask for; returns
from where to go on, b"" at the end, and what to wait for.
"""


class StepResult(NamedTuple):
    """A step's result. True if there may be more now; ``worked``: there was something to do."""

    more: bool
    worked: bool

    def __bool__(self) -> bool:
        return self.more


class IndexSweeper:
    """Passes over the index, one after the other."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._from = b""  # the entry at which the next step begins

    async def run(self) -> None:
        """Make steps until cancelled."""
        await in_steps(self.step)

    async def step(self, rows_max: int) -> StepResult:
        """Look at so many entries of the index.

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
        return StepResult(more, bool(queued))


async def in_steps(
    step: Callable[[int], Awaitable[StepResult]], *, rows: int = ROWS, rows_max: int = ROWS_MAX
) -> None:
    """Make steps of so many entries until cancelled."""
    size, ceiling, found_room = rows, rows_max, 0
    interval_s = _INTERVAL_S
    in_vain = worked = False  # in this pass
    while True:
        more = False
        try:
            made = await step(size)
        except StorageFullError as error:
            log.debug("no room for a step entries=%d error=%s", size, error)
            more, worked = size > 1, True
            size = ceiling = max(size // 2, 1)
            found_room = 0
        except KoinonError as error:
            log.debug("a step failed error=%s", error)
            size = min(rows, ceiling)
        else:
            more = made.more
            worked |= made.worked
            in_vain |= made.more and not made.worked
            found_room += 1
            if found_room % _STEPS_TO_GROW == 0:
                ceiling = min(2 * ceiling, rows_max)
            size = min(2 * size if made.more and made.worked else rows, ceiling)
        if more:
            await asyncio.sleep(_PAUSE_S)
            continue
        interval_s = min(2 * interval_s, _INTERVAL_S_MAX) if in_vain and not worked else _INTERVAL_S
        in_vain = worked = False
        await asyncio.sleep(interval_s)
