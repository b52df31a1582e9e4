"""Facts that heartbeats carry now and then: when they are due; and the lag of the event loop."""

from __future__ import annotations

_LAG_KEPT = 0.98
"""The part of the mean lag that each new one leaves: the mean decays over some 50 callbacks."""


class Report:
    """Decides when a report is due: a new leader gets one at once, the same one now and then."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._term = 0  # of the leader that has the last report
        self._at = float("-inf")  # when that was sent

    def is_due(self, term: int, now: float) -> bool:
        """Return whether the leader of this term lacks a recent report."""
        return term != self._term or now - self._at >= self._interval_s

    def told(self, term: int, at: float) -> None:
        """Note that the leader of this term has acknowledged the report sent at ``at``."""
        self._term, self._at = term, at


class LoopLag:
    """Measures how late an event loop runs a callback that another thread schedules."""

    def __init__(self) -> None:
        self._scheduled_at = 0.0
        self.waits = False  # whether a callback was scheduled and has not run
        self.runs = 0  # callbacks that have run
        self.mean_s = 0.0  # decayed

    def scheduled(self, now: float) -> None:
        """Note that the callback was scheduled."""
        self._scheduled_at, self.waits = now, True

    def ran(self, now: float) -> None:
        """Note that the callback runs."""
        self.waits = False
        self.runs += 1
        lag_s = max(0.0, now - self._scheduled_at)
        self.mean_s = _LAG_KEPT * self.mean_s + (1 - _LAG_KEPT) * lag_s
