"""Judges a small history of one key by trying every order: slow, and too simple to be wrong.

It shares nothing with linearizability.py but the meaning of an operation (history.py), so that one
may be held against the other. A state is the record that is there, and the highest version that any
write has had; operations take effect one after the other, each inside its time, and versions rise.
A write of unknown fate takes effect once or never, under any version that the history names or one
that it does not. ``random_history`` makes small histories of which some could have come from one
copy, and some could not.

    python -m tests.checkers.brute_force 100000     compares both checkers on so many histories
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from tests.checkers.history import ABSENT_VERSION, NEVER, Kind, Operation, Outcome
from tests.checkers.linearizability import UndecidedError, check_key

KEY = b"k"
CALLS_MAX = 7
_BETWEEN = Fraction(1, 1_000)  # a version that no answer names lies so far above the one before it
_DISAGREEMENTS_MAX = 5


@dataclass(frozen=True, slots=True)
class _State:
    done: frozenset[int]  # numbers of the operations that have taken effect
    highest: Fraction  # version of any write so far, deletes included
    version: Fraction | None = None  # of the record that is there; None: there is none
    value: bytes | None = None
    expires: bool = False  # the record may go by itself

    def without_record(self, done: frozenset[int]) -> _State:
        """The record is deleted under a version that no answer names."""
        return _State(done, self.highest + _BETWEEN)


def fits(operations: Iterable[Operation]) -> bool:
    """Return whether some order of these operations of one key explains every answer."""
    chosen = [op for op in operations if _matters(op)]
    named = {Fraction(v) for op in chosen for v in (op.version, op.condition) if v}
    answered = frozenset(op.number for op in chosen if op.outcome is not Outcome.UNKNOWN)
    start = _State(frozenset(), Fraction(0))
    visited, queue = {start}, [start]
    while queue:
        state = queue.pop()
        if answered <= state.done:
            return True
        for after in _after(state, chosen, named):
            if after not in visited:
                visited.add(after)
                queue.append(after)
    return False


def _matters(operation: Operation) -> bool:
    """Failed calls did nothing, and a get without an answer says nothing."""
    if operation.outcome is Outcome.FAILED:
        return False
    return operation.writes or operation.outcome is Outcome.OK


def _after(state: _State, operations: list[Operation], named: set[Fraction]) -> Iterator[_State]:
    """Yield every state that one more effect can make of this one."""
    left = [op for op in operations if op.number not in state.done]
    first_answer = min((op.completed_at for op in left), default=NEVER)
    for operation in left:
        if operation.invoked_at <= first_answer:  # else another has ended before it began
            yield from _effects(state, operation, named)
    if state.expires and state.version is not None:
        yield state.without_record(state.done)


def _effects(state: _State, op: Operation, named: set[Fraction]) -> Iterator[_State]:
    done = state.done | {op.number}
    here = state.version if state.version is not None else Fraction(ABSENT_VERSION)
    if op.outcome is Outcome.REFUSED:
        if here == op.version:
            yield replace(state, done=done)
    elif op.kind is Kind.GET:
        if op.value == state.value and (op.value is None or op.version in (None, state.version)):
            yield replace(state, done=done)
    elif op.condition is not None and op.condition != here:
        return
    elif op.kind is Kind.PUT:
        for version in _versions(state, op, named):
            yield _State(done, version, version, op.value, op.expires)
    else:
        yield from _deleted(state, op, done)


def _versions(state: _State, put: Operation, named: set[Fraction]) -> Iterator[Fraction]:
    """Yield the versions that the put may have: its own if it is known."""
    if put.outcome is Outcome.OK:
        candidates = {Fraction(put.version or 0)}
    else:
        candidates = named | {state.highest + _BETWEEN}
    yield from (version for version in candidates if version > state.highest)


def _deleted(state: _State, delete: Operation, done: frozenset[int]) -> Iterator[_State]:
    absent = state.version is None
    if delete.outcome is Outcome.UNKNOWN:
        yield replace(state, done=done) if absent else state.without_record(done)
    elif delete.version == ABSENT_VERSION:
        if absent:
            yield replace(state, done=done)
    elif not absent:
        if delete.version is None:
            yield state.without_record(done)
        elif delete.version > state.highest:
            yield _State(done, Fraction(delete.version))


# --- small histories ------------------------------------------------------------------------------


def random_history(seed: int) -> list[Operation]:
    """Return a history of one copy, and of two in three change a few answers or times."""
    choice = random.Random(seed)
    operations = _OneCopy(choice).history()
    if choice.random() < 2 / 3:
        for _ in range(choice.choice([1, 1, 2])):
            at = choice.randrange(len(operations))
            operations[at] = _changed(operations[at], operations, choice)
    return operations


class _OneCopy:
    """A register; each call takes effect at a time inside its own, and times are small numbers."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice
        self._names_versions = (
            choice.random() < 0.8
        )  # whether gets and deletes say which they found
        self._value: bytes | None = None
        self._version = self._highest = ABSENT_VERSION
        self._expires = False

    def history(self) -> list[Operation]:
        choice = self._choice
        calls = choice.randint(2, CALLS_MAX)
        crowded = choice.choice([1, 2, 4])  # how many calls are in flight at a time, about
        points = sorted(choice.sample(range(10, 10 * calls * 4), calls))
        answered = [self._call(number, point, crowded) for number, point in enumerate(points)]
        renumbered = sorted(answered, key=lambda op: op.invoked_at)
        return [replace(op, number=number) for number, op in enumerate(renumbered)]

    def _call(self, number: int, point: int, crowded: int) -> Operation:
        choice = self._choice
        if self._expires and choice.random() < 0.3:
            self._write(None)
        kind = choice.choice([Kind.GET, Kind.GET, Kind.PUT, Kind.PUT, Kind.DELETE])
        condition = None
        if kind is not Kind.GET and choice.random() < 0.3:
            condition = choice.choice([ABSENT_VERSION, self._version, self._version])
        operation = Operation(
            number=number,
            caller=f"c{number}",
            kind=kind,
            key=KEY,
            invoked_at=point - choice.randint(1, 20 * crowded),
            value=b"%d" % number if kind is Kind.PUT else None,
            condition=condition,
            expires=kind is Kind.PUT and choice.random() < 0.1,
        )
        if choice.random() < 0.1:  # it never takes effect
            outcome = choice.choice([Outcome.FAILED, Outcome.UNKNOWN])
            ends = point if outcome is Outcome.FAILED else NEVER
            return replace(operation, outcome=outcome, completed_at=ends)
        answered = self._effect(operation)
        if operation.writes and choice.random() < 0.2:  # it does, and no answer says so
            return operation
        return replace(answered, completed_at=point + choice.randint(1, 20 * crowded))

    def _effect(self, op: Operation) -> Operation:
        if op.kind is Kind.GET:
            version: int | None = self._version
            if self._value is not None and not self._names_versions:
                version = None
            return replace(op, outcome=Outcome.OK, value=self._value, version=version)
        if op.condition is not None and op.condition != self._version:
            return replace(op, outcome=Outcome.REFUSED, version=self._version)
        if op.kind is Kind.DELETE and self._value is None:
            return replace(op, outcome=Outcome.OK, version=ABSENT_VERSION)
        self._write(op.value, expires=op.expires)
        named = op.kind is Kind.PUT or self._names_versions
        return replace(op, outcome=Outcome.OK, version=self._highest if named else None)

    def _write(self, value: bytes | None, *, expires: bool = False) -> None:
        self._highest += self._choice.choice([1, 1, 3])
        self._value, self._expires = value, expires
        self._version = self._highest if value is not None else ABSENT_VERSION


def _changed(op: Operation, operations: list[Operation], choice: random.Random) -> Operation:
    """Return the operation with another answer, or at another time."""
    if op.outcome is Outcome.OK and op.kind is Kind.GET and choice.random() < 0.7:
        other = choice.choice(operations)
        if other.kind is Kind.PUT and choice.random() < 0.8:
            named = op.version is not None
            return replace(op, value=other.value, version=other.version if named else None)
        return replace(op, value=None, version=ABSENT_VERSION)
    if op.version is not None and choice.random() < 0.5:
        return replace(op, version=max(ABSENT_VERSION, op.version + choice.choice([-2, -1, 1, 2])))
    begin = op.invoked_at + choice.randint(-30, 30)
    if op.completed_at == NEVER:
        return replace(op, invoked_at=begin)
    return replace(op, invoked_at=begin, completed_at=begin + choice.randint(1, 40))


# --- one against the other ------------------------------------------------------------------------


@dataclass(frozen=True)
class Disagreement:
    """A history that one checker accepts, and the other does not."""

    seed: int
    fits: bool  # by brute force
    found: str  # by the checker
    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        lines = "\n".join(f"    {operation}" for operation in self.operations)
        verdict = "fits" if self.fits else "does not fit"
        return f"seed {self.seed}: {verdict} by brute force; the checker: {self.found}\n{lines}"


def compare(
    seeds: Iterable[int], judge: Callable[[list[Operation]], object] = check_key
) -> tuple[Counter[str], list[Disagreement]]:
    """Judge the history of each seed twice; return how many were of either kind, and where the
    verdicts differ. ``judge`` returns None for a history that fits.
    """
    counts: Counter[str] = Counter()
    differing: list[Disagreement] = []
    for seed in seeds:
        operations = random_history(seed)
        expected = fits(operations)
        try:
            found = judge(operations)
        except UndecidedError as error:
            found = error
        counts["fit" if expected else "violations"] += 1
        if (found is None) is not expected:
            differing.append(Disagreement(seed, expected, str(found), tuple(operations)))
    return counts, differing


def main() -> int:
    """Compare the checkers on many histories; exit code 1 if they differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.checkers.brute_force")
    parser.add_argument("count", type=int, help="histories", nargs="?", default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first one's seed (0)")
    options = parser.parse_args()
    counts, differing = compare(range(options.first, options.first + options.count))
    print(f"{counts['fit']:,} histories fit, {counts['violations']:,} do not")
    for one in differing[:_DISAGREEMENTS_MAX]:
        print(one)
    print(f"the checkers differ on {len(differing):,}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
