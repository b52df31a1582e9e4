"""Measures the time in which a process ran, without the time in which it was paused or starved."""

from __future__ import annotations


class RunningTime:
    """A clock that advances by a bounded step at most between two readings.

    A process that was paused, or starved of CPU, finds what the others sent meanwhile still unread:
    their silence is its own. So whatever ends by silence (an election time-out, a leader's patience
    with its quorum) is counted by this clock. What others rely on to have ended (a lease) is not:
    that goes by real time. Pure: ``now`` is in seconds and never falls.
    """

    def __init__(self, now: float, step_s_max: float) -> None:
        self._step_s_max = step_s_max
        self._looked_at = now
        self._ran_s = 0.0

    def at(self, now: float) -> float:
        """Read the clock; return the seconds for which the process has run, as far as is known.

        It must be looked at more often than a step is long while the process runs freely.
        """
        self._ran_s += min(max(0.0, now - self._looked_at), self._step_s_max)
        self._looked_at = now
        return self._ran_s
