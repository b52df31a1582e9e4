"""Threads that work beside a test."""

from __future__ import annotations

import threading
from typing import Self


class Beside:
    """Threads beside a test: they run while it is entered, and end soon after ``_stop`` is set."""

    _stop: threading.Event
    _threads: list[threading.Thread]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._close()

    def _close(self) -> None:
        """Release what they used, once they have ended."""
