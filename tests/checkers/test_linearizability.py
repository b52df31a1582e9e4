"""The checker: it catches what was planted, and accepts what one copy could have done."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from tests.checkers.history import History, Kind
from tests.checkers.linearizability import check

KEY = b"k"
Call = tuple[float, float, str, Callable[[History, int], None]]


class Script:
    """Calls with their times, on one key; ``None`` as the end: never answered."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.history = History(lambda: self._now)

    def _call(
        self,
        begin: float,
        end: float | None,
        kind: Kind,
        answer: Callable[[int], None],
        value: bytes | None = None,
        condition: int | None = None,
        expires: bool = False,
    ) -> None:
        numbers: list[int] = []

        def invoke() -> None:
            numbers.append(
                self.history.invoke("c", kind, KEY, value, condition=condition, expires=expires)
            )

        self._events.append((begin, 0, invoke))
        if end is not None:
            self._events.append((end, 1, lambda: answer(numbers[0])))

    def put(
        self,
        begin: float,
        end: float | None,
        value: bytes,
        version: int = 0,
        *,
        condition: int | None = None,
        expires: bool = False,
    ) -> None:
        def answer(number: int) -> None:
            self.history.ok(number, version=version)

        self._call(begin, end, Kind.PUT, answer, value, condition, expires)

    def failed_put(self, begin: float, end: float, value: bytes) -> None:
        self._call(begin, end, Kind.PUT, self.history.failed, value)

    def refused_put(self, begin: float, end: float, condition: int, current: int) -> None:
        def answer(number: int) -> None:
            self.history.refused(number, current_version=current)

        self._call(begin, end, Kind.PUT, answer, b"refused", condition)

    def delete(self, begin: float, end: float | None, version: int | None = None) -> None:
        def answer(number: int) -> None:
            self.history.ok(number, version=version)

        self._call(begin, end, Kind.DELETE, answer)

    def get(
        self, begin: float, end: float, value: bytes | None, version: int | None = None
    ) -> None:
        found = 0 if value is None else version

        def answer(number: int) -> None:
            self.history.ok(number, version=found, value=value)

        self._call(begin, end, Kind.GET, answer)

    def reasons(self) -> str:
        for at, _, action in sorted(self._events, key=lambda event: event[:2]):
            self._now = at
            action()
        return "\n".join(violation.reason for violation in check(self.history))


def stale_read(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.put(2, 3, b"b", 2)
    s.get(4, 5, b"a", 1)


def stale_read_without_versions(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.put(2, 3, b"b", 2)
    s.get(4, 5, b"a")


def new_then_old(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.put(2, 9, b"b", 2)
    s.get(3, 4, b"b", 2)
    s.get(5, 6, b"a", 1)


def lost_write(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.get(2, 3, None)


def lost_write_seen_by_a_condition(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.put(2, 3, b"b", 2, condition=0)


def lost_write_seen_by_a_delete(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.delete(2, 3, 0)


def lost_write_below_another(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.put(2, 3, b"b", 2, condition=1)
    s.put(4, 5, b"c", 3, condition=1)


def resurrected(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.delete(2, 3, 2)
    s.get(4, 5, b"a", 1)


def resurrected_after_an_open_delete(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.delete(2, 3)
    s.get(4, 5, b"a", 1)


def failed_write_found(s: Script) -> None:
    s.failed_put(0, 1, b"a")
    s.get(2, 3, b"a", 1)


def failed_write_found_without_a_version(s: Script) -> None:
    s.failed_put(0, 1, b"a")
    s.get(2, 3, b"a")


def versions_that_fall(s: Script) -> None:
    s.put(0, 1, b"a", 5)
    s.put(2, 3, b"b", 4)


def a_version_given_twice(s: Script) -> None:
    s.put(0, 1, b"a", 5)
    s.put(2, 3, b"b", 5)


def never_written(s: Script) -> None:
    s.get(0, 1, b"x", 7)


def another_value_under_a_version(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.put(2, 3, b"b", 2)
    s.get(4, 5, b"a", 2)


def read_before_the_write(s: Script) -> None:
    s.get(0, 1, b"a", 1)
    s.put(2, 3, b"a", 1)


def unknown_write_seen_and_lost(s: Script) -> None:
    s.put(0, None, b"a")
    s.get(1, 2, b"a", 1)
    s.get(3, 4, None)


def unknown_write_seen_before_it_began(s: Script) -> None:
    s.get(1, 2, b"a", 1)
    s.put(3, None, b"a")


def one_unknown_delete_used_twice(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.delete(2, None)
    s.get(3, 4, None)
    s.put(5, 6, b"b", 2)
    s.get(7, 8, None)


def condition_held_by_mistake(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.put(2, 3, b"b", 2)
    s.put(4, 5, b"c", 3, condition=1)


def refused_though_it_held(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.put(2, 3, b"b", 2)
    s.refused_put(4, 5, 2, 1)


def open_delete_of_nothing(s: Script) -> None:
    s.delete(0, 1)


def expired_and_back(s: Script) -> None:
    s.put(0, 1, b"a", 1, expires=True)
    s.get(2, 3, None)
    s.get(4, 5, b"a", 1)


CAUGHT: dict[Callable[[Script], None], str] = {
    stale_read: "stale",
    stale_read_without_versions: "stale",
    new_then_old: "stale",
    lost_write: "lost",
    lost_write_seen_by_a_condition: "condition",
    lost_write_seen_by_a_delete: "lost",
    lost_write_below_another: "condition",
    resurrected: "resurrected",
    resurrected_after_an_open_delete: "",
    failed_write_found: "failed",
    failed_write_found_without_a_version: "failed",
    versions_that_fall: "versions do not rise",
    a_version_given_twice: "two writes",
    never_written: "nobody ever wrote",
    another_value_under_a_version: "another value",
    read_before_the_write: "had not begun",
    unknown_write_seen_and_lost: "lost",
    unknown_write_seen_before_it_began: "had not begun",
    one_unknown_delete_used_twice: "lost",
    condition_held_by_mistake: "condition",
    refused_though_it_held: "condition",
    open_delete_of_nothing: "when there was none",
    expired_and_back: "stale",
}


@pytest.mark.parametrize("write", CAUGHT, ids=lambda write: write.__name__)
def test_planted_violation_is_caught(write: Callable[[Script], None]) -> None:
    script = Script()
    write(script)
    reasons = script.reasons()
    assert reasons
    assert CAUGHT[write] in reasons


def concurrent_reads_see_either(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.put(2, 9, b"b", 2)
    s.get(3, 4, b"a", 1)
    s.get(5, 6, b"b", 2)
    s.get(7, 8, b"b", 2)


def unknown_write_appears_late(s: Script) -> None:
    s.put(0, None, b"a")
    s.get(1, 2, None)
    s.put(3, 4, b"b", 2)
    s.get(5, 6, b"b", 2)
    s.get(7, 8, b"a", 3)


def unknown_delete_appears_late(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.delete(2, None)
    s.get(3, 4, b"a", 1)
    s.get(5, 6, None)
    s.put(7, 8, b"b", 2, condition=0)


def unknown_write_is_deleted(s: Script) -> None:
    s.put(0, None, b"a")
    s.delete(1, 2, 5)
    s.get(3, 4, None)


def unknown_write_is_seen_without_a_version(s: Script) -> None:
    s.put(0, None, b"a")
    s.get(1, 2, None)
    s.get(3, 4, b"a")
    s.delete(5, 6)


def unknown_write_is_seen_by_a_refusal(s: Script) -> None:
    s.put(0, None, b"a")
    s.refused_put(1, 2, 0, 9)
    s.get(3, 4, b"a", 9)


def open_delete_before_a_write_beside_it(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.delete(2, 9)
    s.put(3, 4, b"b", 5)
    s.get(5, 6, b"b", 5)
    s.get(10, 11, b"b", 5)


def wild_delete_after_the_conditional_write(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.delete(2, None)
    s.put(3, 9, b"b", 2, condition=1)
    s.get(4, 5, None)


def expired(s: Script) -> None:
    s.put(0, 1, b"a", 1, expires=True)
    s.get(2, 3, b"a", 1)
    s.get(4, 5, None)
    s.put(6, 7, b"b", 9, condition=0)


def failed_write_leaves_nothing(s: Script) -> None:
    s.put(0, 1, b"a", 1)
    s.failed_put(2, 3, b"b")
    s.get(4, 5, b"a", 1)


ACCEPTED = [
    concurrent_reads_see_either,
    unknown_write_appears_late,
    unknown_delete_appears_late,
    unknown_write_is_deleted,
    unknown_write_is_seen_without_a_version,
    unknown_write_is_seen_by_a_refusal,
    open_delete_before_a_write_beside_it,
    wild_delete_after_the_conditional_write,
    expired,
    failed_write_leaves_nothing,
]


@pytest.mark.parametrize("write", ACCEPTED, ids=lambda write: write.__name__)
def test_valid_history_is_accepted(write: Callable[[Script], None]) -> None:
    script = Script()
    write(script)
    assert script.reasons() == ""


class OneCopy:
    """A register that is what it should be: calls take effect at a point of their time."""

    def __init__(self, seed: int, *, names_versions: bool) -> None:
        self.random = random.Random(seed)
        self.names_versions = names_versions
        self.now = 0.0
        self.history = History(lambda: self.now)
        self.value: bytes | None = None
        self.version = self.newest = self.written = 0
        self.kept: list[tuple[bytes | None, int]] = []  # what was there before

    def run(self, calls: int, concurrency: int) -> None:
        in_flight: list[tuple[float, Callable[[], None]]] = []
        for _ in range(calls):
            begin = self.now + self.random.expovariate(1.0)
            in_flight.sort(key=lambda event: event[0])
            while in_flight and (in_flight[0][0] < begin or len(in_flight) > 2 * concurrency):
                self.now, action = in_flight.pop(0)
                action()
            self.now = max(self.now, begin)
            in_flight += self._call()
        for self.now, action in sorted(in_flight, key=lambda event: event[0]):
            action()

    def _call(self) -> list[tuple[float, Callable[[], None]]]:
        kind = self.random.choice([Kind.GET, Kind.GET, Kind.PUT, Kind.PUT, Kind.DELETE])
        self.written += 1
        value = b"%d" % self.written if kind is Kind.PUT else None
        condition = None
        if kind is Kind.PUT and self.random.random() < 0.3:
            condition = self.random.choice([0, self.version])
        number = self.history.invoke("c", kind, KEY, value, condition=condition)
        point = self.now + self.random.expovariate(0.5)
        end = point + self.random.expovariate(0.5)
        fate = self.random.random()
        answers: list[Callable[[], None]] = []

        def effect() -> None:
            if kind is Kind.GET:
                found, version = self.value, self.version if self.value is not None else 0
                named = version if self.names_versions or found is None else None
                answers.append(lambda: self.history.ok(number, version=named, value=found))
            elif condition is not None and condition != self.version:
                current = self.version
                answers.append(lambda: self.history.refused(number, current_version=current))
            else:
                answers.append(self._write(number, kind, value))

        if fate < 0.03:
            return []  # unknown, and never happens
        if fate < 0.06 and kind is not Kind.GET:  # unknown, and happens late
            return [(point + self.random.expovariate(0.05), effect)]
        return [(point, effect), (end, lambda: answers[0]())]

    def _write(self, number: int, kind: Kind, value: bytes | None) -> Callable[[], None]:
        self.kept.append((self.value, self.version))
        if kind is Kind.DELETE and self.value is None:
            return lambda: self.history.ok(number, version=0)
        self.newest += self.random.choice([1, 1, 5])
        version = self.newest
        self.value, self.version = value, version if value is not None else 0
        named = version if kind is Kind.PUT or self.names_versions else None
        return lambda: self.history.ok(number, version=named)


@pytest.mark.parametrize("names_versions", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_random_valid_histories_are_accepted(seed: int, names_versions: bool) -> None:
    copy = OneCopy(seed, names_versions=names_versions)
    copy.run(300, concurrency=4)
    assert [str(violation) for violation in check(copy.history)] == []


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_that_forgets_is_caught_in_a_random_history(seed: int) -> None:
    copy = OneCopy(seed, names_versions=True)
    copy.run(100, concurrency=3)
    number = copy.history.invoke("c", Kind.PUT, KEY, b"acknowledged")
    copy.now += 1.0
    copy.newest += 1
    copy.history.ok(number, version=copy.newest)
    copy.now += 1.0
    copy.value, copy.version = next(kept for kept in reversed(copy.kept) if kept[1])
    number = copy.history.invoke("c", Kind.GET, KEY)
    copy.now += 1.0
    copy.history.ok(number, version=copy.version, value=copy.value)
    copy.run(100, concurrency=3)
    assert check(copy.history)


def test_long_history_is_judged_in_seconds() -> None:
    copy = OneCopy(1, names_versions=True)
    copy.run(10_000, concurrency=10)
    began_at = time.monotonic()
    assert check(copy.history) == []
    assert time.monotonic() - began_at < 20.0


def test_history_takes_calls_from_many_threads() -> None:
    history = History()

    def call(name: str) -> None:
        for number in range(200):
            key = f"{name}-{number}".encode()
            history.ok(history.invoke(name, Kind.PUT, key, b"v"), version=1)
            history.ok(history.invoke(name, Kind.GET, key), version=1, value=b"v")

    threads = [threading.Thread(target=call, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(history.operations()) == 1600
    assert check(history) == []
