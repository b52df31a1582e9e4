"""Paces a transfer: bytes are spent when they are asked for, what came instead is settled then, and
what was overspent is waited out.

Pure: the time and the rate are arguments, so that a rate that changes counts at once.
"""

from __future__ import annotations

BURST_S = 0.25
_PAGE_S = 0.025
_PAGE_BYTES_MIN = 64 * 1024


def page_bytes(rate: float, most: int) -> int:
    """Return how much to ask for at once, of ``most``: what is slow goes in small pages, since
    clients wait for the transaction of each.
    """
    return min(most, max(_PAGE_BYTES_MIN, int(rate * _PAGE_S))) if rate > 0 else most


class TokenBucket:
    """Bounds the mean rate; what was not used is kept for ``burst_s``. It begins with as much as
    ``full`` says, of that.
    """

    def __init__(self, burst_s: float = BURST_S, *, full: bool = False) -> None:
        self._burst_s = burst_s
        self._balance = 0.0  # below zero: overspent
        self._idle_s = burst_s if full else 0.0  # before it was counted first
        self._counted_at: float | None = None

    def spend(self, amount: int) -> None:
        """Take so much, or give it back if it is negative; it may overdraw."""
        self._balance -= amount

    def wait_s(self, rate: float, now: float) -> float:
        """Return how long to wait before more may come. ``rate`` is a second's; 0: no limit."""
        if rate <= 0:
            self._balance, self._counted_at = 0.0, now
            return 0.0
        balance = self.balance(rate, now)
        return -balance / rate if balance <= -1 else 0.0  # not for parts of a byte

    def balance(self, rate: float, now: float) -> float:
        """Return what may be spent now at this rate, above 0; below zero: what is overspent."""
        elapsed = now - self._counted_at if self._counted_at is not None else self._idle_s
        self._counted_at = now
        self._balance = min(self._balance + elapsed * rate, rate * self._burst_s)
        return self._balance
