"""How work on the expiry index is paced: step after step, whatever else the node does.

What is written with a time to live has to go as fast as it comes, or the store fills with what
nobody reads. So the work does not wait for quiet: as long as there is more, each step looks at
twice as many entries as the one before. A step waits for its own commit, and so never takes more
than its part of a group, beside what clients write. Where the store is so full that the pages which
a step has to copy find no room, smaller ones are tried, down to one entry: they are what makes
room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from koinon_proto.errors import KoinonError, StorageFullError

log = logging.getLogger(__name__)

ROWS: Final = 128
ROWS_MAX: Final = 1_024
_PAUSE_S = 0.02
_INTERVAL_S = 0.5

Step = Callable[[int], Awaitable[bool]]
"""Looks at so many entries that are due, goes on after them the next time, and returns whether
there may be more now. After StorageFullError it begins where this one began, unless it was of one.
"""


async def in_steps(step: Step, *, rows: int = ROWS, rows_max: int = ROWS_MAX) -> None:
    """Make steps until cancelled."""
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
