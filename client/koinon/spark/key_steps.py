"""How many keys are asked for at once, so that their values are bounded by bytes."""

from __future__ import annotations

from typing import Final

BYTES: Final = 64 * 1024 * 1024
"""Of the values of one step, by the mean of those so far."""
_FIRST_KEYS: Final = 32


class KeySteps:
    """Begins with few keys, for nobody knows the size of their values; then goes by their mean."""

    def __init__(self, keys_max: int, bytes_max: int = BYTES) -> None:
        self._keys_max = keys_max
        self._bytes_max = bytes_max
        self._keys = self._bytes = 0

    @property
    def keys(self) -> int:
        """How many keys the next step has at most."""
        if not self._keys:
            return min(_FIRST_KEYS, self._keys_max)
        mean = self._bytes // self._keys + 1
        return max(1, min(self._keys_max, self._bytes_max // mean))

    def took(self, keys: int, size: int) -> None:
        """Note the bytes of the values of so many keys."""
        self._keys += keys
        self._bytes += size
