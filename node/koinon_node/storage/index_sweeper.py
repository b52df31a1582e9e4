"""Paces the work on the expiry index: one step after another, whatever else the node does.

Expired records must be removed as fast as new ones are written, or the store fills with records
that nobody can read. So the work does not wait for idle time: while there is work, each step checks
twice as many entries as the one before. A step waits for its own commit, so it never takes more
than a part of a group beside clients' writes; between its parts it yields to the event loop. Due
entries that must stay (for example while moves are paused) are checked slowly, and less and less
often. If the store is so full that a step finds no room for the pages that it must copy, smaller
steps are tried, down to one entry: removals are what frees room.
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
_STEPS_TO_GROW = 64  # successful steps before the size that found no room is tried again

Look = Callable[[bytes, int], tuple[bytes, Sequence[Awaitable[None]]]]
"""Checks so many due entries from the given entry on, and queues their removals. Returns the entry
to continue from (b"" at the end), and the removals to wait for.
"""


class StepResult(NamedTuple):
    """A step's result. True if more entries may be due now; ``worked``: the step removed
    something.
    """

    more: bool
    worked: bool

    def __bool__(self) -> bool:
        return self.more


class IndexSweeper:
    """Runs one pass over the index after another."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._from = b""  # the entry at which the next step begins

    async def run(self) -> None:
        """Make steps until cancelled."""
        await in_steps(self.step)

    async def step(self, rows_max: int) -> StepResult:
        """Check ``rows_max`` entries of the index.

        Raises:
            StorageFullError: some removals found no room. Their entries stay, and the next step
            begins
                where this one did, unless it was of one entry.
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
        # The removals of one part make room, even if another part finds none.
        for error in await asyncio.gather(*queued, return_exceptions=True):
            if isinstance(error, StorageFullError) and rows_max > 1:
                self._from = began
            if error is not None and not isinstance(error, UnknownFateError):
                raise error
            more &= error is None  # expired records stay, but are not served
        return StepResult(more, bool(queued))


async def in_steps(
    step: Callable[[int], Awaitable[StepResult]], *, rows: int = ROWS, rows_max: int = ROWS_MAX
) -> None:
    """Run steps until cancelled; ``rows`` is the size of the first one."""
    size, ceiling, found_room = rows, rows_max, 0
    interval_s = _INTERVAL_S
    in_vain = worked = False  # a step of this pass found no room; or removed something
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
