"""A steady load of every kind of operation that must not notice anything: each one's time and error
is kept, and what it returns is checked at once.

Each worker has keys of its own and is their only writer, so that it knows what every read of them
has to return; conditional writes name the version that the last one returned, so that a write which
took effect unannounced, or twice, shows. Clients are a blocking one, an asyncio one, and some that
do something only now and then: what they know of the cluster is old each time.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from koinon import aio
from koinon.client import Client
from koinon.local import LocalCluster
from koinon_proto.contract.errors import KoinonError
from tests.kit.threads import Beside

KEYS = 64
BATCH_ROWS = 100
BATCH_PAUSE_S = 0.03
SCAN_ROWS = 300
SCAN_PAUSE_S = 0.2
PAUSE_S = 0.01
TASKS = 6
SELDOM_S = 0.7
PROGRESS_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class Done:
    """One operation that has ended; times are by ``time.monotonic``."""

    kind: str
    began_at: float
    ended_at: float
    error: KoinonError | None

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at

    def __str__(self) -> str:
        return f"{self.kind} ({self.seconds:.3f} s): {type(self.error).__name__}: {self.error}"


class SteadyLoad(Beside):
    """Runs inside its ``with`` block. ``wrong`` are results that cannot be right."""

    def __init__(self, cluster: LocalCluster, *, seldom: int = 3) -> None:
        self._cluster = cluster
        self.done: list[Done] = []
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._client = client = cluster.client()
        self._threads = [
            *(
                threading.Thread(target=self._repeat, args=work)
                for work in (
                    (self._singles(client), PAUSE_S),
                    (self._conditional(client), PAUSE_S),
                    (self._batches(client), BATCH_PAUSE_S),
                    (self._scans(client), SCAN_PAUSE_S),
                )
            ),
            *(threading.Thread(target=self._now_and_then, args=(n,)) for n in range(seldom)),
            threading.Thread(target=lambda: asyncio.run(self._asyncio())),
        ]

    def __enter__(self) -> Self:
        rows = {b"scan/%d" % n: b"%d" % n for n in range(SCAN_ROWS)}
        self._client.put_many(rows).raise_for_errors()
        return super().__enter__()

    def _close(self) -> None:
        self._client.close()

    @property
    def failed(self) -> list[Done]:
        """Operations that ended by an error, be it refusal or unknown fate."""
        return [one for one in list(self.done) if one.error is not None]

    @property
    def unknown(self) -> list[Done]:
        return [one for one in self.failed if one.error is not None and one.error.maybe_applied]

    def between(self, began_at: float, ended_at: float) -> list[Done]:
        """Return the operations of which any part lies between these times."""
        return [o for o in list(self.done) if o.began_at < ended_at and o.ended_at > began_at]

    def wait_for_progress(self, operations: int = 200) -> None:
        """Wait until so many more have succeeded."""
        target = self._succeeded() + operations
        deadline = time.monotonic() + PROGRESS_TIMEOUT_S
        while self._succeeded() < target:
            assert time.monotonic() < deadline, f"fewer than {operations} more operations"
            time.sleep(PAUSE_S)

    def judge(self) -> None:
        """Assert that nothing failed, and nothing was wrong."""
        assert not self.failed, "\n".join(map(str, [*self.failed[:20], *self.wrong[:5]]))
        assert not self.wrong, "\n".join(self.wrong[:20])

    # --- what every worker does --------------------------------------------------------------

    def _succeeded(self) -> int:
        return len(self.done) - len(self.failed)

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        """Note how the operation ended; an error of the cluster's does not leave the block."""
        began_at = time.monotonic()
        error: KoinonError | None = None
        try:
            yield
        except KoinonError as failure:
            error = failure
        self.done.append(Done(kind, began_at, time.monotonic(), error))

    def _expect(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            self.wrong.append(f"{what}: {found!r} instead of {expected!r}")

    def _repeat(self, work: Iterator[None], pause_s: float) -> None:
        """Go through the work, a step at a time, until the end."""
        for _ in work:
            if self._stop.wait(pause_s * random.uniform(0.5, 1.5)):
                return

    # --- blocking ----------------------------------------------------------------------------

    def _singles(self, client: Client, name: bytes = b"single") -> Iterator[None]:
        held: dict[bytes, bytes | None] = {}
        unsure: set[bytes] = set()  # the last operation has failed
        count = 0
        while True:
            count += 1
            key = b"%s/%d" % (name, random.randrange(KEYS))
            if count % 5 == 0:
                expected, known = held.pop(key, None), key not in unsure
                unsure.add(key)
                with self._timed("delete"):
                    found = client.delete(key)
                    held[key] = None
                    unsure.discard(key)
                    if known:
                        self._expect(f"delete {key!r}", found, expected is not None)
            elif count % 2:
                value = b"%d" % count
                held.pop(key, None)
                unsure.add(key)
                with self._timed("put"):
                    client.put(key, value)
                    held[key] = value
                    unsure.discard(key)
            elif key in held:
                with self._timed("get"):
                    self._expect(f"get {key!r}", client.get(key), held[key])
            yield

    def _conditional(self, client: Client) -> Iterator[None]:
        versions: dict[bytes, int] = {}
        while True:
            key = b"conditional/%d" % random.randrange(KEYS)
            if key not in versions:
                with self._timed("get_entry"):
                    entry = client.get_entry(key)
                    versions[key] = entry.version if entry else 0
            version = versions.pop(key, None)
            if version is not None:
                with self._timed("put if"):
                    versions[key] = client.put(key, b"v", if_version=version)
            yield

    def _batches(self, client: Client) -> Iterator[None]:
        count = 0
        while True:
            count += 1
            rows = {b"batch/%d" % n: b"%d of %d" % (count, n) for n in range(BATCH_ROWS)}
            with self._timed("put_many"):
                client.put_many(rows).raise_for_errors()
            yield
            with self._timed("get_many"):
                found = client.get_many(rows)
                if not self.failed:
                    self._expect("get_many", found, list(rows.values()))
            yield

    def _scans(self, client: Client) -> Iterator[None]:
        while True:
            with self._timed("scan"):
                found = sum(1 for _ in client.scan(prefix=b"scan/", page_rows=100))
                self._expect("rows of a scan", found, SCAN_ROWS)
            yield

    def _now_and_then(self, number: int) -> None:
        """A client of its own, that knows little of what happens between its operations."""
        with self._cluster.client() as client:
            self._repeat(self._singles(client, b"seldom%d" % number), SELDOM_S)

    # --- asyncio -----------------------------------------------------------------------------

    async def _asyncio(self) -> None:
        client = await aio.connect(self._cluster.coordinators)
        try:
            await asyncio.gather(*(self._tasks(client, n) for n in range(TASKS)))
        finally:
            await client.close()

    async def _tasks(self, client: aio.AsyncClient, number: int) -> None:
        held: dict[bytes, bytes] = {}
        count = 0
        while not self._stop.is_set():
            count += 1
            key, value = b"task/%d/%d" % (number, random.randrange(KEYS)), b"%d" % count
            held.pop(key, None)
            durability: Any = "primary" if number % 3 == 0 else "all_in_sync"
            with self._timed(f"aio put ({durability})"):
                await client.put(key, value, durability=durability)
                held[key] = value
            await self._read(client.get, held)
            await asyncio.sleep(PAUSE_S)

    async def _read(
        self, get: Callable[[bytes], Awaitable[bytes | None]], held: dict[bytes, bytes]
    ) -> None:
        if held:
            key = random.choice(list(held))
            with self._timed("aio get"):
                self._expect(f"aio get {key!r}", await get(key), held[key])
