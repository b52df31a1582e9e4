"""Background work of the acts: the loader, the writer of single records, the leader watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

from koinon.client import Client
from koinon.operate.admin import Admin
from koinon.operate.wording import count
from koinon_proto.contract.errors import KoinonError, UnavailableError

SLAB_ROWS = 2_000
SLABS_IN_FLIGHT = 6
WATCH_S = 0.02
WRITE_S = 0.005

Row = tuple[bytes, bytes]


def write_all(
    client: Client, rows: Sequence[Row], on_progress: Callable[[int], None]
) -> tuple[int, list[str]]:
    """Write the rows in large pieces; return the number of acknowledged rows, and every error."""
    done = 0
    errors: list[str] = []
    slabs = _slabs(rows)
    with ThreadPoolExecutor(SLABS_IN_FLIGHT) as pool:
        under_way: set[Future[Any]] = set()
        while True:
            for slab in islice(slabs, SLABS_IN_FLIGHT - len(under_way)):
                under_way.add(pool.submit(client.put_many, slab))
            if not under_way:
                return done, errors
            finished, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in finished:
                result = future.result()
                done += result.applied
                errors += [str(failure.error) for failure in result.refused + result.unknown]
            on_progress(done)


def _slabs(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), SLAB_ROWS):
        yield rows[start : start + SLAB_ROWS]


class SingleWriter:
    """Writes one record after the other; keeps the acknowledged ones and the longest latency. As a
    context manager it writes inside the block.
    """

    def __init__(self, client: Client, prefix: bytes, timeout_ms: int) -> None:
        self.acknowledged: dict[bytes, bytes] = {}
        self.errors: list[KoinonError] = []
        self.slowest_s = 0.0
        self._client = client
        self._prefix = prefix
        self._timeout_ms = timeout_ms
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="single-writer")

    @property
    def told(self) -> str:
        """The number of errors as text, with the first of them."""
        if not self.errors:
            return "no error"
        return f"{count(len(self.errors), 'error')} ({self.errors[0]})"

    def __enter__(self) -> SingleWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(WRITE_S):
            number += 1
            key, value = self._prefix + b"%d" % number, b"written as number %d" % number
            began = time.monotonic()
            try:
                self._client.put(key, value, timeout_ms=self._timeout_ms)
                self.acknowledged[key] = value
            except KoinonError as error:
                self.errors.append(error)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)


class LeaderWatch:
    """Waits in the background until a coordinator other than ``old`` leads."""

    def __init__(self, coordinators: str, old: str, timeout_s: float) -> None:
        self.new_leader = ""
        self.seconds = 0.0
        self._coordinators = coordinators
        self._old = old
        self._began = time.monotonic()
        self._timeout_s = timeout_s
        self._thread = threading.Thread(target=self._run, name="leader-watch")
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        with Admin(self._coordinators, timeout_ms=1000) as admin:
            while (elapsed := time.monotonic() - self._began) < self._timeout_s:
                try:
                    status = admin.status()
                except UnavailableError:
                    continue
                if status.is_leader and status.member_id != self._old:
                    self.new_leader, self.seconds = status.member_id, elapsed
                    return
                time.sleep(WATCH_S)
