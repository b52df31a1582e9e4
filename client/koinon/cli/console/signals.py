"""Turns signals that ask a command to stop into conditions that code can wait for."""

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
    """Install the handler for each signal that asks a command to stop; return the former handlers.
    SIGHUP is left alone if nohup has it ignored.
    """
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, handler)
    return before


class Interrupt:
    """Remembers a first signal that asks the command to stop, so that work stops at a good point; a
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
    """Handles Ctrl-C (SIGINT), SIGTERM, SIGQUIT and SIGHUP within ``with``, on the main thread.

    A signal raises KeyboardInterrupt. If that happens in a finalizer or a callback, the exception
    is lost. So long work runs ``deferred`` and polls ``wait``. The handler may run while its own
    thread holds a lock, so it takes none: it writes to a pipe.
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
        """A context that delays a signal's KeyboardInterrupt until its end."""
        self._interrupts = False
        yield
        self._interrupts = True
        if self.wait(0):
            raise KeyboardInterrupt

    def wait(self, seconds: float) -> bool:
        """Return True once a signal has come, before or during the call; False after ``seconds``
        without one.
        """
        return bool(select.select([self._reading], [], [], seconds)[0])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing, b"!")
        if self._interrupts:
            raise KeyboardInterrupt
