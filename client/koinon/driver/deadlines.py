"""The deadlines of single operations, with one timer for all of them.

A timer for each operation would cost more than everything else that the loop does for it.
Operations are kept by the hundredth of a second of their deadline; an operation that ends earlier
is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush

from koinon.core.batching import PendingOperation

_TICKS_PER_S = 100


class Deadlines:
    """Calls ``expire`` of operations whose deadline has passed: up to a tick late, never early.
    Belongs to one event loop; ``now`` is the clock of the deadlines.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, set[PendingOperation]] = {}  # by the tick at whose end they expire
        self._ticks: list[int] = []  # the keys of ``_due``, as a heap
        self._timer: asyncio.TimerHandle | None = None
        self._timer_tick = 0  # the tick for which the timer is set

    def add(self, single: PendingOperation) -> None:
        tick = int(single.deadline * _TICKS_PER_S) + 1
        due = self._due.get(tick)
        if due is None:
            due = self._due[tick] = set()
            heappush(self._ticks, tick)
            if self._timer is None or tick < self._timer_tick:
                self._set_timer(tick)
        due.add(single)
        single.due = due

    @staticmethod
    def discard(single: PendingOperation) -> None:
        """Remove an operation that has ended. An empty set is removed when its tick comes."""
        single.due.discard(single)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, tick: int) -> None:
        self.close()
        self._timer_tick = tick
        left_s = tick / _TICKS_PER_S - self._now()
        self._timer = self._loop.call_later(max(0.0, left_s), self._expire)

    def _expire(self) -> None:
        self._timer = None
        ticks, past = self._ticks, self._now() * _TICKS_PER_S
        while ticks and (ticks[0] <= past or not self._due[ticks[0]]):
            for single in list(self._due.pop(heappop(ticks))):
                single.expire()
        if ticks and self._timer is None:
            self._set_timer(ticks[0])
