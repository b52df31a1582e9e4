"""Memory that a task uses again and again stays its own until it ends.

A task makes and drops columns of up to some 64 MB all the time. Arrow's pool, and malloc as it is
set by default, give such blocks back to the system at once, and each page of the next block is a
fault and is zeroed: that was a fifth of a load's time.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_KEPT: Final = 1 << 30
_USUAL: Final = 32 << 20
"""What glibc lets the threshold grow to by itself; it trims from twice of that on."""


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep freed memory within this; give it back at the end. Does nothing where the C library is
    not glibc. Holds for the whole process.
    """
    try:
        libc = ctypes.CDLL(None)
        adjust, trim = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):
        yield
        return
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    adjust(_MMAP_THRESHOLD, _KEPT)
    adjust(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        adjust(_MMAP_THRESHOLD, _USUAL)
        adjust(_TRIM_THRESHOLD, 2 * _USUAL)
        pa.set_memory_pool(before)
        trim(0)
