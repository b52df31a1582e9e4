"""The clock of leases and elections."""

from __future__ import annotations

import time


def boottime() -> float:
    """Return seconds on a clock that only goes forward, and runs on while the machine is suspended:
    a lease must not outlast a pause of any kind.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)
