"""A program whose signal handler raises in the middle of calls of a blocking client.

    python -m tests.integration.interrupted COORDINATORS TRANSPORT TIMES REPEATS

Each call is interrupted by a timer at a random moment, ``TIMES`` times in all; with ``REPEATS`` the
handler raises so often in a row, in whatever cleans up after the first time. Prints JSON: how often
the handler raised, what else came out of the calls, and how many calls returned though it raised.
"""

from __future__ import annotations

import gc
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import koinon
from koinon.options import Transport

CHECK_EVERY = 100
LONGEST_S = 0.002
AGAIN_S = 0.00005


class Interrupted(Exception):  # noqa: N818 (of a program, as soft time limits are)
    """The program's own."""


class Alarm:
    """Raises in the main thread while it is armed, ``left`` times."""

    def __init__(self) -> None:
        self.left = self.raised = 0
        signal.signal(signal.SIGALRM, self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        if self.left:
            self.left -= 1
            self.raised += 1
            raise Interrupted

    def interrupt(
        self, work: Callable[[], Any], after_s: float, times: int
    ) -> BaseException | None:
        """Do the work and return what came out of it."""
        came: BaseException | None = None
        try:
            try:
                self.left = times
                signal.setitimer(signal.ITIMER_REAL, after_s, AGAIN_S)
                work()
                self.left = 0
            except BaseException as error:
                self.left, came = 0, error
        except Interrupted as error:  # between the last two lines
            self.left, came = 0, error
        signal.setitimer(signal.ITIMER_REAL, 0)
        return came


def main() -> None:
    gc.disable()  # gRPC's calls end in Python code, which loses what is raised while they are freed
    coordinators, transport, times, repeats = sys.argv[1:]
    client = koinon.connect(
        coordinators, transport=cast(Transport, transport), timeout_ms=20_000, retry_unknown=True
    )
    choice, alarm = random.Random(1), Alarm()
    foreign: Counter[str] = Counter()
    lost = checks = 0
    client.delete(b"checks")
    client.put_many({b"k%d" % number: b"v" for number in range(200)}).raise_for_errors()
    works: list[Callable[[], Any]] = [
        lambda: client.get(b"k1"),
        lambda: client.put(b"k2", b"w"),
        lambda: client.increment(b"count"),
        lambda: client.get_many([b"k%d" % number for number in range(50)]),
        lambda: client.put_many({b"many%d" % number: b"v" for number in range(20)}),
        lambda: client.batch(b"k3").put(b"k3", b"x").commit(),
        lambda: list(client.scan(prefix=b"k", page_rows=50)),
        lambda: client.keyspace("default").get(b"k4"),
    ]
    while alarm.raised < int(times):
        before = alarm.raised
        came = alarm.interrupt(
            choice.choice(works), choice.uniform(0.00002, LONGEST_S), 1 + int(repeats)
        )
        if came is not None and not isinstance(came, Interrupted):
            foreign[f"{type(came).__name__}: {came}"[:200]] += 1
        lost += came is None and alarm.raised > before
        if alarm.raised // CHECK_EVERY > checks:
            checks += 1
            value = b"%d" % checks
            client.put(b"checked", value)
            assert client.get(b"checked") == value
            assert client.get_many([b"k1", b"checked", b"none"]) == [b"v", value, None]
            assert len(list(client.scan(prefix=b"k"))) == 200
            assert client.increment(b"checks") == checks
    client.close()
    print(json.dumps({"raised": alarm.raised, "foreign": foreign, "lost": lost, "checks": checks}))


if __name__ == "__main__":
    main()
