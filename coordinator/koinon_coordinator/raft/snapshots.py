"""The snapshots that a member makes of its state: when, and how, beside the event loop.

A snapshot bounds the log, and so the duration of a restart. It is due after a number of entries, of
their bytes, or of seconds spent applying them: in a large table one entry may change every row.
The event loop only captures the state after some entry. Encoding it may take longer than a leader
may be silent, so another thread does it, one snapshot at a time, while further entries are applied.
"""

import asyncio
from collections.abc import Callable

from koinon_coordinator.raft.member_config import RaftConfig


class Snapshots:
    """The work since the last snapshot, and the snapshot that is being encoded."""

    def __init__(self, config: RaftConfig) -> None:
        self._config = config
        self._bytes = 0  # of the entries applied since the last snapshot
        self._apply_s = 0.0  # CPU seconds spent applying them
        self._encoding: asyncio.Future[bytes] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._encoding is not None

    def applied(self, size_bytes: int, apply_s: float) -> None:
        """Count an applied entry."""
        self._bytes += size_bytes
        self._apply_s += apply_s

    def counted_anew(self) -> None:
        """Reset the counts: the state was replaced by a snapshot's."""
        self._bytes, self._apply_s = 0, 0.0

    def is_due(self, entries: int) -> bool:
        """Return whether a snapshot is due, so many entries after the last one."""
        config = self._config
        return (
            entries > 0
            and self._encoding is None
            and (
                entries >= config.snapshot_every_entries
                or self._bytes >= config.snapshot_every_bytes
                or self._apply_s >= config.snapshot_every_apply_ms / 1000
            )
        )

    def begin(
        self, encode: Callable[[], bytes], done: Callable[[bytes | BaseException], None]
    ) -> None:
        """Encode the captured state; ``done`` is called on the loop with the bytes or the error."""

        def ended(encoding: asyncio.Future[bytes]) -> None:
            self._encoding = None
            if not encoding.cancelled():
                done(encoding.exception() or encoding.result())

        self.counted_anew()
        self._encoding = asyncio.get_running_loop().run_in_executor(None, encode)
        self._encoding.add_done_callback(ended)
