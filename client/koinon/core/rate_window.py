"""The rate of growth of a counter over the last few seconds."""

from __future__ import annotations

from collections import deque


class RateWindow:
    """Computes a counter's rate from its values over time. Times are arguments, in seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()  # time and value, the oldest first

    def rate(self, number: float, now: float) -> float | None:
        """Add the counter's present value; return its growth per second, or None if there is no
        earlier value.
        """
        samples = self._samples
        samples.append((now, number))
        while len(samples) > 2 and samples[0][0] < now - self._window_s:
            samples.popleft()
        (began, first), (ended, last) = samples[0], samples[-1]
        return max(0.0, last - first) / (ended - began) if ended > began else None
