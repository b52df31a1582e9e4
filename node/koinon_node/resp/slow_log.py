"""The recent slow commands, for SLOWLOG: their names and senders. Arguments are not kept: they are
users' data. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

SLOWER_THAN_S = 0.01
ENTRIES_MAX = 128


class SlowCommand(NamedTuple):
    """One slow command."""

    number: int
    unix_s: int
    elapsed_us: int
    command: bytes
    peer: bytes
    client_name: bytes


class SlowLog:
    """The latest ``ENTRIES_MAX`` slow commands, the latest first."""

    def __init__(self) -> None:
        self.entries: deque[SlowCommand] = deque(maxlen=ENTRIES_MAX)
        self._count = 0

    def add(self, unix_ms: int, elapsed_s: float, command: str, peer: str, name: bytes) -> None:
        """Add a command that has ended now."""
        took_us, sent_by = int(1_000_000 * elapsed_s), peer.partition(":")[2].encode()
        at_s = unix_ms // 1_000
        entry = SlowCommand(self._count, at_s, took_us, command.encode(), sent_by, name)
        self.entries.appendleft(entry)
        self._count += 1
