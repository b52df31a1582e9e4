"""Keeps memory that a task frees in its process until the task ends.

A task makes and drops columns of up to some 64 MB all the time: to fault their pages in anew, each
time, was a fifth of a load's time. Arrow's own pool gives them back at once, whatever malloc does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from koinon_proto.process import memory

_KEPT: Final = 1 << 30


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep freed memory within this; give it back at the end. Does nothing where the C library is
    not glibc. Holds for the whole process.
    """
    if not memory.keep_freed(_KEPT):
        yield
        return
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)
        memory.give_back()
