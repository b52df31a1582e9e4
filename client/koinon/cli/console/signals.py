"""Signals that ask a command to stop, as something that can be waited for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Remembers Ctrl-C, so that work stops between two pieces; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class StopSignals:
    """Ctrl-C (SIGINT), SIGTERM and SIGHUP, within ``with``, on the main thread.

    They interrupt what runs (KeyboardInterrupt). That alone would not do: an interrupt that meets
    a finalizer or a callback is lost with it. So what runs for long does so ``deferred``, and looks
    by ``wait``. The handler takes no lock, for it may run while its own thread holds it: it writes
    to a pipe.
    """

    def __init__(self) -> None:
        self._interrupts = True
        self._before: list[Any] = []
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)

    def __enter__(self) -> Self:
        self._before = [signal.signal(number, self._on_signal) for number in _NUMBERS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(_NUMBERS, self._before, strict=True):
            signal.signal(number, handler)
        os.close(self._reading)
        os.close(self._writing)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Interrupt at the end of this, if one has come by then, and not before."""
        self._interrupts = False
        yield
        self._interrupts = True
        if self.wait(0):
            raise KeyboardInterrupt

    def wait(self, seconds: float) -> bool:
        """Return True once one has come, be it long ago; False if none does for so long."""
        return bool(select.select([self._reading], [], [], seconds)[0])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing, b"!")
        if self._interrupts:
            raise KeyboardInterrupt
