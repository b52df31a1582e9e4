"""Keeps forked children from using gRPC's core, which does not survive a fork.

gRPC's core runs on threads, and a fork does not copy threads: in a child of a process that has used
the core, it sends nothing and waits for ever. Nor may the child free the core's objects: that would
remove the parent's connections from the set of descriptors that both processes wait on. So channels
that were open at a fork are never freed in the child, and the child's own channels do without the
core (``koinon.driver.rpc.http2``).
"""

from __future__ import annotations

import ctypes  # imported before any fork, like everything that a child needs
import importlib
import os
import sys
from pathlib import Path
from weakref import WeakSet

_THREADS = ("grpc_", "event_engine")  # the name of the core's threads, once they run
_IMPORTED_LATER = ("koinon.driver.rpc.http2", "koinon_proto.key_columns")
"""Modules that clients import only when they need them, and NumPy with them."""

_holders: WeakSet[object] = WeakSet()  # of channels and calls
_used = False  # the core runs here, or ran in a parent
_lost = False  # the core ran in a parent


def holds_channels(holder: object) -> None:
    """Keep the objects that ``holder`` refers to alive in every forked child. Call it before a
    channel is opened.
    """
    global _used
    _used = True
    _holders.add(holder)


def core_is_lost() -> bool:
    """Return whether this process was forked from one that had used gRPC's core."""
    return _lost


def _before() -> None:
    """Before a fork: import the modules that a child's clients may need, because an import that
    another thread has begun would never end in the child. Also find out whether other code of this
    process uses the core, by its threads.
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
