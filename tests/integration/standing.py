"""Stops one thread of a process that runs on, as a debugger or a hanging call does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

_ATTACH, _DETACH = 16, 17
_EPOLL_WAITS = {"232", "281", "441", "22"}  # epoll_wait, epoll_pwait, epoll_pwait2; x86 and ARM
ATTEMPTS_MAX = 1_000
_WALL = 0x40000000  # wait for threads too
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _waits_for_events(thread: int) -> bool:
    """Tell whether it was stopped in a system call, not while it held Python's lock."""
    return Path(f"/proc/{thread}/syscall").read_text().split()[0] in _EPOLL_WAITS


@contextlib.contextmanager
def loop_stands_still(pid: int) -> Iterator[None]:
    """Stop the main thread of the process, where its event loop is, and leave the others running.

    Raises:
        PermissionError: this machine does not allow tracing.
    """
    for _ in range(ATTEMPTS_MAX):
        _ptrace(_ATTACH, pid)
        os.waitpid(pid, _WALL)
        if _waits_for_events(pid):
            break
        _ptrace(_DETACH, pid)
        time.sleep(0.001)
    else:
        raise AssertionError("the loop is always busy")
    try:
        yield
    finally:
        _ptrace(_DETACH, pid)
