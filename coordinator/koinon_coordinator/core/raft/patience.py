"""The time that a member waits before it takes silence for a failure. Pure.

A leader that has much to do, or little CPU, is heard late, and so are the followers that it waits
for. An election then costs a group more that has too little already: the next leader has the same
work, and is as late. So a member takes no silence for a failure that is no longer than twice the
longest one that ended by itself lately. That is bounded, and forgotten again.
"""

from __future__ import annotations

HALF_LIFE_S = 20.0  # of what is known of a silence


class Patience:
    """Knows the longest silence of late. Times are seconds in which this member ran."""

    def __init__(self, most_s: float) -> None:
        """``most_s``: never wait for longer than this."""
        self._most_s = most_s
        self._longest_s = 0.0
        self._known_at = 0.0  # when that was so; since then it counts for less

    def ended(self, silence_s: float, now: float) -> None:
        """A silence has ended with a word of the one who was silent."""
        if silence_s >= self._longest(now):
            self._longest_s, self._known_at = silence_s, now

    def least_s(self, usual_s: float, now: float) -> float:
        """Return how long a silence has to last, at least, to count as a failure."""
        return max(usual_s, min(2 * self._longest(now), self._most_s))

    def _longest(self, now: float) -> float:
        return float(self._longest_s * 0.5 ** ((now - self._known_at) / HALF_LIFE_S))
