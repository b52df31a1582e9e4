"""Ends a server's process when it is told to: by its own means, and within a bound in any case.

SIGTERM and SIGINT are alike. Until the server runs they end the process at once: nothing has begun.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

END_S_MAX = 25.0
"""After so long the process ends as it is. What was acknowledged is durable without an end."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FORCED = 1


def end_at_once() -> None:
    """Let either signal end the process with code 0, until ``on_signal`` takes them over."""
    for number in _SIGNALS:
        signal.signal(number, lambda _number, _frame: os._exit(0))


def on_signal(stop: Callable[[], None], end_s_max: float = END_S_MAX) -> None:
    """On the running loop: call ``stop`` when either signal comes, each time. The process ends with
    code 1, by force, if it has not ended so long after the first.
    """
    told = threading.Event()

    def handle() -> None:
        if not told.is_set():
            told.set()
            forced = threading.Timer(end_s_max, _force, (end_s_max,))
            forced.daemon = True
            forced.start()
        stop()

    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, handle)


def _force(after_s: float) -> None:
    log.critical("did not end by itself: ends by force after_s=%g", after_s)
    logging.shutdown()
    os._exit(_FORCED)
