"""Adapts the time after which a member takes silence for a failure. Pure.

Messages of a leader with much work or little CPU come late, and so do its followers' answers. An
election then costs an overloaded group even more: the next leader has the same work and is as late.
So a member does not take a silence for a failure before it has lasted twice as long as the longest
recent silence that ended by itself. This time is bounded, and decays again.
"""

from __future__ import annotations

HALF_LIFE_S = 20.0  # of the longest silence's weight


class Patience:
    """Keeps the longest recent silence. Times are seconds in which this member ran."""

    def __init__(self, most_s: float) -> None:
        """``most_s``: the longest time to wait."""
        self._most_s = most_s
        self._longest_s = 0.0
        self._known_at = 0.0  # when that silence ended; its weight decays since then

    def ended(self, silence_s: float, now: float) -> None:
        """Note a silence that ended with a message."""
        if silence_s >= self._longest(now):
            self._longest_s, self._known_at = silence_s, now

    def least_s(self, usual_s: float, now: float) -> float:
        """Return how long a silence must last to count as a failure."""
        return max(usual_s, min(2 * self._longest(now), self._most_s))

    def _longest(self, now: float) -> float:
        return float(self._longest_s * 0.5 ** ((now - self._known_at) / HALF_LIFE_S))
