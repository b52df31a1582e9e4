"""Ends a local cluster's processes when the program that started them is gone.

It runs as a script of its own (``python -I -S guardian.py``), so it starts in milliseconds and
imports nothing of Koinon. Its standard input is a pipe from the owner; when that closes, for
whatever reason (a normal end, an exception, ``kill -9``), it ends every process still on its list.
Lines:

``watch PID STARTED``   end this process if the owner dies; STARTED is the start time of its
                        identity, so that a reused pid is never signalled
``forget PID``          the process has been ended and reaped
``remove DIRECTORY``    delete this directory at the end (the temporary data of a test cluster)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

REMOVE_ATTEMPTS = 50
REMOVE_PAUSE_S = 0.1


def start_time(pid: int) -> str:
    """Return the start time of a process in kernel ticks; '' if there is none (or no /proc)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def end(pid: int, started: str) -> None:
    """Kill the process if it is still the watched one."""
    if start_time(pid) == started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def remove(directory: str) -> None:
    """Delete the directory; dying processes may still be writing to it."""
    for _ in range(REMOVE_ATTEMPTS):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):  # noqa: PTH110
            return
        time.sleep(REMOVE_PAUSE_S)


def main() -> None:
    """Follow the owner's lines until the pipe closes, then clean up."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    watched: dict[int, str] = {}
    directories: list[str] = []
    for line in sys.stdin:
        verb, _, rest = line.rstrip("\n").partition(" ")
        if verb == "watch":
            pid, _, started = rest.partition(" ")
            watched[int(pid)] = started
        elif verb == "forget":
            watched.pop(int(rest), None)
        elif verb == "remove":
            directories.append(rest)
    for pid, started in watched.items():
        end(pid, started)
    for directory in directories:
        remove(directory)


if __name__ == "__main__":
    main()
