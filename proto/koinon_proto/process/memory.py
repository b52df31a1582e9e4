"""Keeps freed memory in the process, for reuse.

malloc, as glibc sets it by default, gives large blocks back to the system as soon as they are free,
and each page of the next such block is a fault and is zeroed: serialising 16 MB took four times as
long as with memory that was there already.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any, Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_COLLECTED_EVERY: Final = (20_000, 20, 50)
_USUAL: Final = 32 << 20
"""The bytes that glibc lets the threshold grow to by itself; it trims from twice of that on."""


def keep_freed(size: int) -> bool:
    """Keep freed blocks of up to ``size`` bytes, and as many free bytes at the heap's end. Holds
    for the whole process. Returns False, and does nothing, where the C library is not glibc.
    """
    libc = _libc()
    if libc is None:
        return False
    if not libc.mallopt(_MMAP_THRESHOLD, size):  # glibc before 2.35 refuses more than the usual
        libc.mallopt(_MMAP_THRESHOLD, _USUAL)
    libc.mallopt(_TRIM_THRESHOLD, size)
    return True


def collect_rarely() -> None:
    """Have Python look for garbage in cycles less often, and at what there is now never again. A
    server keeps hundreds of thousands of small objects (rows, histories, replicas), and a failover
    makes as many: a fifth of its CPU went into looking at them, in vain. Garbage without cycles is
    freed at once as ever.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTED_EVERY)


def give_back() -> None:
    """Return freed memory to the system now, and from now on keep only as much as by default."""
    libc = _libc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, _USUAL)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _USUAL)
        libc.malloc_trim(0)


def trim(kept: int) -> None:
    """Return freed memory to the system now, except for ``kept`` bytes at the heap's end."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(ctypes.c_size_t(kept))


def _libc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):
        return None
