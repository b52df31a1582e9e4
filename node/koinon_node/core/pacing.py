"""Paces a transfer: bytes are spent when they are requested, corrected when the answer shows the
real size, and overspending is waited out.

Pure: the time and the rate are arguments, so that a changed rate applies at once.
"""

from __future__ import annotations

BURST_S = 0.25
_PAGE_S = 0.025
_PAGE_BYTES_MIN = 64 * 1024


def page_bytes(rate: float, most: int) -> int:
    """Return how many bytes, of at most ``most``, to request at once at this rate (bytes per
    second): a slow transfer uses small pages, since clients wait for the transaction of each page.
    """
    return min(most, max(_PAGE_BYTES_MIN, int(rate * _PAGE_S))) if rate > 0 else most


class TokenBucket:
    """Bounds the mean rate. Unused tokens are kept for ``burst_s`` seconds. With ``full`` it begins
    with these tokens.
    """

    def __init__(self, burst_s: float = BURST_S, *, full: bool = False) -> None:
        self._burst_s = burst_s
        self._balance = 0.0  # below zero: overspent
        self._idle_s = burst_s if full else 0.0  # the time credited at the first count
        self._counted_at: float | None = None

    def spend(self, amount: int) -> None:
        """Take ``amount`` tokens, or give them back if it is negative. The balance may fall below
        zero.
        """
        self._balance -= amount

    def wait_s(self, rate: float, now: float) -> float:
        """Return the seconds to wait before the next transfer. ``rate`` is per second; 0: no
        limit.
        """
        if rate <= 0:
            self._balance, self._counted_at = 0.0, now
            return 0.0
        balance = self.balance(rate, now)
        return -balance / rate if balance <= -1 else 0.0  # not for parts of a byte

    def balance(self, rate: float, now: float) -> float:
        """Return the tokens that may be spent now at this rate; below zero: the overspent ones."""
        elapsed = now - self._counted_at if self._counted_at is not None else self._idle_s
        self._counted_at = now
        self._balance = min(self._balance + elapsed * rate, rate * self._burst_s)
        return self._balance
