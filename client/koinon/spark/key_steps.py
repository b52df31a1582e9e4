"""Chooses the number of keys to read at once, to limit the bytes of their values."""

from __future__ import annotations

from typing import Final

BYTES: Final = 64 * 1024 * 1024
"""The target for the values of one step, in bytes, by the mean size so far."""
_FIRST_KEYS: Final = 32


class KeySteps:
    """Begins with few keys, since the size of their values is unknown; then uses their mean
    size.
    """

    def __init__(self, keys_max: int, bytes_max: int = BYTES) -> None:
        self._keys_max = keys_max
        self._bytes_max = bytes_max
        self._keys = self._bytes = 0

    @property
    def keys(self) -> int:
        """The limit on the next step's keys."""
        if not self._keys:
            return min(_FIRST_KEYS, self._keys_max)
        mean = self._bytes // self._keys + 1
        return max(1, min(self._keys_max, self._bytes_max // mean))

    def took(self, keys: int, size: int) -> None:
        """Record the total size in bytes of the values of these keys."""
        self._keys += keys
        self._bytes += size
