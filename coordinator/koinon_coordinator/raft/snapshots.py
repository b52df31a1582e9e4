"""The snapshots that a member makes of its state: when, and how, beside the event loop.

A snapshot bounds the log, and so the time that a restart takes. That goes by entries, by their
bytes, and by what it took to apply them: in a large table one entry may change every row. The loop
only captures the state, as it was after some entry. To encode it may take longer than a leader may
be silent, and is done on another thread, one snapshot at a time, while further entries are applied.
"""

import asyncio
from collections.abc import Callable

from koinon_coordinator.raft.member_config import RaftConfig


class Snapshots:
    """The work since the last snapshot, and the snapshot that is being encoded."""

    def __init__(self, config: RaftConfig) -> None:
        self._config = config
        self._bytes = 0  # of the entries applied since
        self._apply_s = 0.0  # the CPU that this took, in seconds
        self._encoding: asyncio.Future[bytes] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._encoding is not None

    def applied(self, size_bytes: int, apply_s: float) -> None:
        """Count an entry."""
        self._bytes += size_bytes
        self._apply_s += apply_s

    def counted_anew(self) -> None:
        """The state is that of a snapshot."""
        self._bytes, self._apply_s = 0, 0.0

    def is_due(self, entries: int) -> bool:
        """Return whether to begin one, so many entries after the last."""
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
        """Encode what was captured; ``done`` is called on the loop with the bytes, or the error."""

        def ended(encoding: asyncio.Future[bytes]) -> None:
            self._encoding = None
            if not encoding.cancelled():
                done(encoding.exception() or encoding.result())

        self.counted_anew()
        self._encoding = asyncio.get_running_loop().run_in_executor(None, encode)
        self._encoding.add_done_callback(ended)
