"""A consumer of a group, in a process of its own: ``python -m demo.consumer COORDINATORS GROUP``.

It prints a line of JSON for each partition that is granted or revoked, and for each change.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from typing import Any

import koinon

SESSION_MS = 3_000
TIMEOUT_MS = 30_000


class Consumer:
    """A consumer's process, and what it has printed so far."""

    def __init__(self, coordinators: str, group: str) -> None:
        self.partitions: set[int] = set()
        self.values: dict[bytes, int] = {}  # the newest of each key
        self.changes = 0
        self.disorders = 0  # values below an earlier one of their key, while a partition was owned
        self._process = subprocess.Popen(
            [sys.executable, "-m", "demo.consumer", coordinators, group],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill -9 the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self.partitions = set()

    def _read(self) -> None:
        assert self._process.stdout is not None
        newest: dict[bytes, int] = {}  # since partitions came last
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said.get("granted"):
                newest = {}  # what was not committed comes again
            self.partitions |= set(said.get("granted", ()))
            self.partitions -= set(said.get("revoked", ()))
            for text, number in said.get("changes", ()):
                key = text.encode()
                self.disorders += number < newest.get(key, 0)
                newest[key] = number
                self.values[key] = max(number, self.values.get(key, 0))
                self.changes += 1


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201 (the parent process reads it)


def main(coordinators: str, name: str) -> None:
    """Follow until the process is killed."""
    with (
        koinon.connect(coordinators, timeout_ms=TIMEOUT_MS) as client,
        client.group(
            name,
            start="now",
            session_ms=SESSION_MS,
            on_granted=lambda partitions: say(granted=list(partitions)),
            on_revoked=lambda partitions: say(revoked=list(partitions)),
        ) as group,
    ):
        for batch in group:
            say(changes=[(c.key.decode(), int(c.value or 0)) for c in batch])
            with contextlib.suppress(koinon.StaleGenerationError):
                batch.commit()


if __name__ == "__main__":
    main(*sys.argv[1:])
