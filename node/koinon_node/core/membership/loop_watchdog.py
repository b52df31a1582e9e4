"""Judges, on the agent's thread, whether the event loop turns: by the answers that it gives."""

from __future__ import annotations

from koinon_proto.process.running_time import RunningTime

PATIENCE_LEASES = 3.0
"""For so many leases the loop may give no sign: far longer than its longest piece of work."""
_STEP_S_MAX = 0.5
"""Between two looks no more than this counts: a process that was paused finds its loop as it left
it, and gives it time to answer."""


class LoopWatchdog:
    """Counts for how long the loop has answered nothing, in time in which this process ran."""

    def __init__(self, now: float) -> None:
        self._running = RunningTime(now, _STEP_S_MAX)
        self._answers = 0  # that were known at the last look
        self._answered_at = 0.0  # by the running time

    def silent_s(self, answers: int, now: float) -> float:
        """Return for how many seconds the number of answers has not grown. To be asked several
        times a second.
        """
        ran_s = self._running.at(now)
        if answers != self._answers:
            self._answers, self._answered_at = answers, ran_s
        return ran_s - self._answered_at
