"""Runs a process's periodic work in common rounds, so that it shares wake-ups.

A process that has nothing to do costs what its wake-ups cost, far more than the little work that is
done in each. So work that is due every so often, and need not be done to the millisecond, is done
in rounds: at the multiples of its interval, by a clock that all of it shares.
"""

from __future__ import annotations

import asyncio

_SOONEST = 0.1
"""Of an interval: a round that is nearer is left out. Timers may be a millisecond early."""


def until_round_s(now: float, interval_s: float) -> float:
    """Return the seconds to the next round: 0.1 to 1.1 intervals."""
    left_s = interval_s - now % interval_s
    return left_s if left_s > _SOONEST * interval_s else left_s + interval_s


async def next_round(interval_s: float) -> None:
    """Sleep until the next round, by the running event loop's clock."""
    await asyncio.sleep(until_round_s(asyncio.get_running_loop().time(), interval_s))
