"""Keeps gRPC's core alone in forked children, which cannot use their parent's.

gRPC's core runs on threads, which a fork does not take along: in the child of a process that has
used it, it sends nothing and waits for ever. Worse, what it holds must not even be freed there: the
child would take the parent's connections out of the set of descriptors on which both wait. So what
was open at a fork is never freed in the child, and the child's own channels do without the core
(``koinon.driver.rpc.http2``).
"""

from __future__ import annotations

import ctypes  # before any fork, like all else that is needed after one
import importlib
import os
import sys
from pathlib import Path
from weakref import WeakSet

_THREADS = ("grpc_", "event_engine")  # what the core's threads call themselves, once they run
_IMPORTED_LATER = ("koinon.driver.rpc.http2", "koinon_proto.key_columns")
"""Modules that clients import only when they need them, NumPy with them."""

_holders: WeakSet[object] = WeakSet()  # of channels and calls
_used = False  # the core runs here, or ran in a parent
_lost = False  # it ran in a parent


def holds_channels(holder: object) -> None:
    """Let what ``holder`` refers to outlive every forked child. Call before a channel is opened."""
    global _used
    _used = True
    _holders.add(holder)


def core_is_lost() -> bool:
    """Return whether this process was forked from one in which gRPC's core was used."""
    return _lost


def _before() -> None:
    """Import what a child's clients may need: an import that another thread is in the middle of
    would never end in the child. And look whether anybody else in this process uses the core: it
    has such a thread while it runs.
    """
    global _used
    if _used:
        for name in _IMPORTED_LATER:
            importlib.import_module(name)
    if not _used and "grpc" in sys.modules:
        names = (task.joinpath("comm") for task in Path("/proc/self/task").glob("*"))
        _used = any(_text(name).startswith(_THREADS) for name in names)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""


def _in_child() -> None:
    global _lost
    _lost = _used
    for holder in list(_holders):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))


os.register_at_fork(before=_before, after_in_child=_in_child)
