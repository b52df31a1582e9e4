"""A steady client load that remembers what it was told, to be judged afterwards.

Each thread reads and writes some shared keys (the history of which is checked for
linearizability) and writes keys of its own once (every acknowledged one must be there at the end).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from koinon.client import Client
from koinon_proto.contract.errors import KoinonError
from tests.kit.threads import Beside

from .history import History, Kind

KEYS = 150
POLL_S = 0.002
PAUSE_S = 0.03
FULL_PAUSE_S = 0.002
TIMEOUT_MS = 15_000


class RecordedLoad(Beside):
    """Runs inside its ``with`` block. ``connect`` makes one client a thread. All keys begin with
    ``prefix``; none of them may be there before. After each two operations a thread pauses: so
    that a few hundred are done a second, and the machine is left to what the test does, or for
    ``FULL_PAUSE_S``.
    """

    def __init__(
        self,
        connect: Callable[..., Client],
        *,
        prefix: bytes = b"",
        threads: int = 4,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.history = History()
        self.acknowledged: dict[bytes, bytes] = {}
        self.errors: list[KoinonError] = []
        self._connect = connect
        self._prefix = prefix
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(threads)]

    def wait_for_progress(self, writes: int = 60, timeout_s: float = 90.0) -> None:
        """Wait until so many more writes have been acknowledged."""
        target = len(self.acknowledged) + writes
        deadline = time.monotonic() + timeout_s
        while len(self.acknowledged) < target:
            assert time.monotonic() < deadline, f"fewer than {writes} writes in {timeout_s} s"
            time.sleep(POLL_S)

    def lost(self, client: Client) -> list[bytes]:
        """Return the keys whose acknowledged value is not there."""
        expected = dict(self.acknowledged)
        found = client.get_many(list(expected))
        return [k for (k, v), there in zip(expected.items(), found, strict=True) if there != v]

    def _run(self, number: int) -> None:
        choice = random.Random(number)
        count = 0
        with self._connect(timeout_ms=TIMEOUT_MS) as client:
            while not self._stop.wait(self._pause_s):
                count += 1
                key = self._prefix + b"load/%d" % choice.randrange(KEYS)
                action = choice.random()
                if action < 0.4:
                    self._put(client, number, key, b"%d/%d" % (number, count))
                elif action < 0.5:
                    self._delete(client, number, key)
                else:
                    self._get(client, number, key)
                once = self._prefix + b"once/%d/%d" % (number, count)
                try:
                    client.put(once, b"value of " + once)
                    self.acknowledged[once] = b"value of " + once
                except KoinonError as error:  # its fate is not claimed
                    self.errors.append(error)

    def _put(self, client: Client, number: int, key: bytes, value: bytes) -> None:
        operation = self.history.invoke(f"thread {number}", Kind.PUT, key, value)
        try:
            self.history.ok(operation, version=client.put(key, value))
        except KoinonError as error:
            self._end(operation, error)

    def _delete(self, client: Client, number: int, key: bytes) -> None:
        operation = self.history.invoke(f"thread {number}", Kind.DELETE, key)
        try:
            found = client.delete(key)
        except KoinonError as error:
            self._end(operation, error)
            return
        self.history.ok(operation, version=None if found else 0)

    def _get(self, client: Client, number: int, key: bytes) -> None:
        operation = self.history.invoke(f"thread {number}", Kind.GET, key)
        try:
            entry = client.get_entry(key)
        except KoinonError as error:
            self._end(operation, error)
            return
        version, value = (entry.version, entry.value) if entry is not None else (0, None)
        self.history.ok(operation, version=version, value=value)

    def _end(self, operation: int, error: KoinonError) -> None:
        self.errors.append(error)
        (self.history.unknown if error.maybe_applied else self.history.failed)(operation)
