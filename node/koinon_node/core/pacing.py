"""Paces a transfer: bytes are spent when they are asked for, what came instead is settled then, and
what was overspent is waited out.

Pure: the time and the rate are arguments, so that a rate that changes counts at once.
"""

from __future__ import annotations

_BURST_S = 0.25
_PAGE_S = 0.025
_PAGE_BYTES_MIN = 64 * 1024


def page_bytes(rate: float, most: int) -> int:
    """Return how much to ask for at once, of ``most``: what is slow goes in small pages, since
    clients wait for the transaction of each.
    """
    return min(most, max(_PAGE_BYTES_MIN, int(rate * _PAGE_S))) if rate > 0 else most


class TokenBucket:
    """Bounds the mean rate; what was not used is kept for a quarter of a second."""

    def __init__(self) -> None:
        self._balance = 0.0  # below zero: overspent
        self._counted_at: float | None = None

    def spend(self, amount: int) -> None:
        """Take so much, or give it back if it is negative; it may overdraw."""
        self._balance -= amount

    def wait_s(self, rate: float, now: float) -> float:
        """Return how long to wait before more may come. ``rate`` is a second's; 0: no limit."""
        elapsed = now - self._counted_at if self._counted_at is not None else 0.0
        self._counted_at = now
        if rate <= 0:
            self._balance = 0.0
            return 0.0
        self._balance = min(self._balance + elapsed * rate, rate * _BURST_S)
        return -self._balance / rate if self._balance <= -1 else 0.0  # not for parts of a byte
