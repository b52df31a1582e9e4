"""Signals that ask a command to stop, as something that can be waited for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], None]


def _take_over(handler: Handler) -> dict[signal.Signals, Any]:
    """Have the handler called by each signal that asks a command to stop; return the handlers
    before. SIGHUP is left alone where nohup has it ignored.
    """
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, handler)
    return before


class Interrupt:
    """Remembers a signal that asks the command to stop, so that work stops between two pieces; a
    second signal stops it at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = _take_over(self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class StopSignals:
    """Ctrl-C (SIGINT), SIGTERM, SIGQUIT and SIGHUP, within ``with``, on the main thread.

    They interrupt what runs (KeyboardInterrupt). That alone would not do: an interrupt that meets
    a finalizer or a callback is lost with it. So what runs for long does so ``deferred``, and looks
    by ``wait``. The handler takes no lock, for it may run while its own thread holds it: it writes
    to a pipe.
    """

    def __init__(self) -> None:
        self._interrupts = True
        self._before: dict[signal.Signals, Any] = {}
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)

    def __enter__(self) -> Self:
        self._before = _take_over(self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
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
