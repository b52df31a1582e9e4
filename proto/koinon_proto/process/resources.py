"""Resources that the system limits for this process: descriptors, threads, memory."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final, NamedTuple

NEARLY: Final = 0.9
"""A resource of which so much is used is about to run out."""
_CGROUP: Final = Path("/sys/fs/cgroup")
_DESCRIPTORS: Final = Path("/proc/self/fd")


class Use(NamedTuple):
    """The use of a resource; ``limit`` 0: unlimited or unknown."""

    name: str
    used: int
    limit: int

    @property
    def is_scarce(self) -> bool:
        return 0 < self.limit * NEARLY <= self.used


def uses() -> list[Use]:
    """Return how much this process uses of what the system gives it. Needs no descriptor, where
    there is none: then all are used.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        # One of them is the folder's own.
        descriptors = Use("file descriptors", len(list(_DESCRIPTORS.iterdir())) - 1, limit)
    except OSError:
        return [Use("file descriptors", limit, limit)]
    return [
        descriptors,
        Use("threads", _number(_CGROUP / "pids.current"), _number(_CGROUP / "pids.max")),
        _memory(),
    ]


def _memory() -> Use:
    """Return the memory use of this process's container, without reclaimable caches; of the
    machine, if there is no container.
    """
    limit = _number(_CGROUP / "memory.max")
    if limit:
        file = _lines(_CGROUP / "memory.stat").get("inactive_file", 0)
        return Use("bytes of memory", _number(_CGROUP / "memory.current") - file, limit)
    machine = _lines(Path("/proc/meminfo"))
    total = 1024 * machine.get("MemTotal:", 0)
    return Use("bytes of memory", total - 1024 * machine.get("MemAvailable:", 0), total)


def _number(path: Path) -> int:
    """Return the number in a file; 0 if it has none (``max``), or does not exist."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _lines(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines have a name and a number each."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
