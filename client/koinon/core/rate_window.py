"""The growth of a number over the last few seconds."""

from __future__ import annotations

from collections import deque


class RateWindow:
    """Takes what a number is at one time after the other. Times are arguments, in seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()  # time and number, the oldest first

    def rate(self, number: float, now: float) -> float | None:
        """Return the growth per second with what the number is now; None while it is not known."""
        samples = self._samples
        samples.append((now, number))
        while len(samples) > 2 and samples[0][0] < now - self._window_s:
            samples.popleft()
        (began, first), (ended, last) = samples[0], samples[-1]
        return max(0.0, last - first) / (ended - began) if ended > began else None
