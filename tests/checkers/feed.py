"""A consumer of a change feed that keeps a copy, as docs/feed.md has it, and judges the feed.

Of each key, versions never fall; and once writers rest, the copy is what a scan finds: nothing was
skipped, and nothing was told that a failover took back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from koinon.client import Client
from koinon.core.feeds import ChangeBatch
from koinon_proto.contract.errors import (
    HistoryBranchedError,
    KoinonError,
    SnapshotNeededError,
    UnavailableError,
)
from tests.kit.threads import Beside

Copy = dict[bytes, tuple[bytes, int]]
TIMEOUT_MS = 60_000


class FeedCopy(Beside):
    """Follows all keys inside its ``with`` block. ``restart_after``: a consumer is given up after
    so many changes, and another goes on from the text of its positions.
    """

    def __init__(self, connect: Callable[..., Client], *, restart_after: int = 300) -> None:
        self.rows: Copy = {}
        self.faults: list[str] = []
        self.restarts = self.snapshots = self.changes = 0
        self._newest: dict[bytes, int] = {}  # versions, of deletes too
        self._connect = connect
        self._restart_after = restart_after
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run)]

    def judge(self, client: Client, timeout_s: float = 90.0) -> None:
        """Wait until the copy is what a scan finds; fail if it never is. Nobody may write."""
        deadline = time.monotonic() + timeout_s
        expected = {entry.key: (entry.value, entry.version) for entry in client.scan()}
        while (copy := dict(self.rows)) != expected and time.monotonic() < deadline:
            assert not self.faults, self.faults[:5]
            time.sleep(0.05)
        wrong = [key for key in copy.keys() | expected if copy.get(key) != expected.get(key)]
        named = [(key, copy.get(key), expected.get(key)) for key in wrong[:3]]
        assert not wrong, f"{len(wrong)} of {len(expected)} differ (copy, scan): {named}"
        assert not self.faults, self.faults[:5]

    def _run(self) -> None:
        since: str | None = None
        try:
            while not self._stop.is_set():
                try:
                    since = self._follow(since)
                    self.restarts += 1
                except (SnapshotNeededError, HistoryBranchedError):
                    since = None
                    self.snapshots += 1
                except UnavailableError as error:
                    self.faults.append(str(error))
        except (KoinonError, AssertionError) as error:
            self.faults.append(repr(error))

    def _follow(self, since: str | None) -> str:
        """Follow for a while; return the positions to go on from."""
        left = self._restart_after
        snapshot: set[bytes] | None = set() if since is None else None
        if snapshot is not None:
            self._newest = {}
        with self._connect(timeout_ms=TIMEOUT_MS) as client:
            for batch in client.changes(since=since):
                self._apply(batch)
                if snapshot is not None:
                    snapshot.update(batch.keys)
                    if not batch.caught_up:
                        continue  # no position of half a snapshot: its vanished keys are not known
                    for key in self.rows.keys() - snapshot:
                        del self.rows[key]
                    snapshot = None
                since = str(batch.positions)
                left -= len(batch)
                if left < 0 or self._stop.is_set():
                    break
        assert since is not None
        return since

    def _apply(self, batch: ChangeBatch) -> None:
        for change in batch:
            self.changes += 1
            before = self._newest.get(change.key, 0)
            if change.version < before:
                self.faults.append(f"{change.key!r}: {change.version} after {before}")
            self._newest[change.key] = change.version
            if change.value is None:
                self.rows.pop(change.key, None)
            else:
                self.rows[change.key] = change.value, change.version
