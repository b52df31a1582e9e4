"""Writers that remember what was acknowledged, for tests that break things meanwhile."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

from koinon.client import Client
from koinon.local import LocalCluster
from koinon_proto.contract.errors import KoinonError
from tests.kit.threads import Beside

BATCH_ROWS = 200
PAUSE_S = 0.008
BATCH_PAUSE_S = 0.05
"""Some 3,000 rows a second: the tests that use up a machine do so by other means."""


class Workload(Beside):
    """Single and batch writers under one prefix; writes inside its ``with`` block.

    ``acknowledged`` must be there afterwards; ``unknown`` may be there or not; ``refused`` were
    given up on, and must not be there.
    """

    def __init__(
        self, cluster: LocalCluster, prefix: str, *, timeout_ms: int = 30_000, threads: int = 2
    ) -> None:
        self.acknowledged: dict[bytes, bytes] = {}
        self.unknown: dict[bytes, bytes] = {}
        self.refused: dict[bytes, KoinonError] = {}
        self.errors: list[KoinonError] = []
        self._client = cluster.client(timeout_ms=timeout_ms)
        self._prefix = prefix.encode()
        self._stop = threading.Event()
        works: list[Callable[[], None]] = [
            functools.partial(self._write_singles, number) for number in range(threads)
        ]
        self._threads = [threading.Thread(target=work) for work in [*works, self._write_batches]]

    def _close(self) -> None:
        self._client.close()

    def wait_for_progress(self, rows: int = 50, timeout_s: float = 90.0) -> None:
        """Wait until so many more writes have been acknowledged."""
        target = len(self.acknowledged) + rows
        deadline = time.monotonic() + timeout_s
        while len(self.acknowledged) < target:
            assert time.monotonic() < deadline, f"fewer than {rows} more writes in {timeout_s} s"
            time.sleep(PAUSE_S)

    def check(self, client: Client) -> None:
        """Assert that the cluster holds exactly what it must."""
        found = dict(zip(self.acknowledged, client.get_many(self.acknowledged), strict=True))
        lost = [key for key, value in self.acknowledged.items() if found[key] != value]
        assert not lost, f"{len(lost)} of {len(found)} acknowledged writes lost: {lost[:5]}"
        for key, value in self.unknown.items():
            assert client.get(key) in (None, value)
        for key in self.refused:
            assert client.get(key) is None

    def _write_singles(self, thread: int) -> None:
        number = 0
        while not self._stop.wait(PAUSE_S):
            number += 1
            key = self._prefix + b"/%d/%d" % (thread, number)
            value = b"value of " + key
            try:
                self._client.put(key, value)
                self.acknowledged[key] = value
            except KoinonError as error:
                self._note(key, value, error)

    def _write_batches(self) -> None:
        number = 0
        while not self._stop.wait(BATCH_PAUSE_S):
            number += 1
            rows = {
                self._prefix + b"/batch/%d/%d" % (number, row): b"%d" % row
                for row in range(BATCH_ROWS)
            }
            result = self._client.put_many(rows)
            for failure in result.refused + result.unknown:
                self._note(failure.key, rows.pop(failure.key), failure.error)
            self.acknowledged.update(rows)

    def _note(self, key: bytes, value: bytes, error: KoinonError) -> None:
        self.errors.append(error)
        if error.maybe_applied:
            self.unknown[key] = value
        else:
            self.refused[key] = error
