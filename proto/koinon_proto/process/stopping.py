"""Ends a server's process on a signal: gracefully, and within a time limit in any case.

SIGTERM, SIGINT and SIGQUIT are alike. Until the server runs they end the process at once: nothing
has begun. SIGHUP, of a terminal that closes or a log that is rotated, ends nothing: the server
opens and reads its files again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

END_S_MAX = 25.0
"""After so long the process ends as it is. What was acknowledged is durable without an end."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_FORCED = 1


def end_at_once() -> None:
    """Let the signals end the process with code 0, until ``on_signal`` takes them over."""
    for number in _SIGNALS:
        signal.signal(number, lambda _number, _frame: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nothing was read yet


def on_signal(
    stop: Callable[[], None],
    read_again: Sequence[Callable[[], None]] = (),
    end_s_max: float = END_S_MAX,
) -> None:
    """On the running loop: call ``stop`` when a signal comes that ends the process, each time. The
    process ends with code 1, by force, if it has not ended so long after the first. Each SIGHUP
    calls ``read_again``.
    """
    told = threading.Event()

    def handle() -> None:
        if not told.is_set():
            told.set()
            forced = threading.Timer(end_s_max, _force, (end_s_max,))
            forced.daemon = True
            forced.start()
        stop()

    def hang_up() -> None:
        log.info("SIGHUP: files are opened and read again")
        for read in read_again:
            read()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, handle)
    loop.add_signal_handler(signal.SIGHUP, hang_up)


def _force(after_s: float) -> None:
    log.critical("did not end by itself: ends by force after_s=%g", after_s)
    logging.shutdown()
    os._exit(_FORCED)
