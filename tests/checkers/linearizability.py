"""A checker: could a history have come from one copy of the data? Exact, and key by key.

After Wing and Gong, and Lowe's just-in-time variant: operations take effect as late as they can,
and all that a state may still become is kept as a set of ``_Config``. What makes it fast is that
every write that took effect has a version, and that versions of a key must rise in the order in
which writes take effect. This is checked, not believed: the order by version is the only one that
is tried, and an operation that does not fit into it is a violation.

A key's writes of known version are its *steps*, in that order. Beside them there are *wild* ones:
writes of unknown fate that no answer shows, records that may expire, and deletes whose answer does
not name a version (the last ones must find their place). Observations (gets, refused conditions,
deletes that found nothing) take effect as soon as the state fits them, which costs nothing; all
else only when an answer, or what has to come before it, demands it. So the work grows with the
number of operations times what is in flight at once, not with the length of the history.

That hurry leaves out some orders (an expiry that makes room for a conditional write of unknown
fate, say), so what it finds no order for is judged again by *all* moves, as long as these are few
enough. A version that only conditions name is that of some wild put: each in turn is tried. With
both, the verdict is that of brute_force.py, which tries everything, on random small histories.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tests.checkers.history import ABSENT_VERSION, History, Kind, Operation, Outcome, version_text

CONFIGS_MAX = 20_000
NEIGHBOURS_MAX = 12
GUESSES_MAX = 64  # ways to share out versions that only conditions name; beyond, none is tried
_SOME_WILD_PUT = -(10**12)
_NOTHING = -1  # an override: there is no record, whatever the last step was


@dataclass(frozen=True, slots=True)
class Violation:
    """One key's history that no single copy could have produced."""

    key: bytes
    reason: str
    operations: tuple[Operation, ...]  # the one that does not fit first, then what was around it

    def __str__(self) -> str:
        lines = "\n".join(f"    {operation}" for operation in self.operations)
        return f"key {self.key!r}: {self.reason}\n{lines}"


class UndecidedError(Exception):
    """The history allows more states than can be followed."""


def check(history: History | Iterable[Operation]) -> list[Violation]:
    """Return one violation for each key whose operations do not fit together."""
    operations = history.operations() if isinstance(history, History) else history
    by_key: dict[bytes, list[Operation]] = defaultdict(list)
    for operation in operations:
        by_key[operation.key].append(operation)
    found = (check_key(by_key[key]) for key in sorted(by_key))
    return [violation for violation in found if violation is not None]


def check_key(operations: list[Operation]) -> Violation | None:
    """Check the operations of one key.

    Raises:
        UndecidedError: too many operations were in flight at once.
    """
    steps = _Steps(operations)
    found = _judge(operations, steps)
    if steps.violation is not None or not (steps.guessed or (steps.supposed and found)):
        return found
    unnamed = [*steps.guessed, *steps.supposed]
    owners: list[Operation | None] = [*steps.wild_puts, *(None for _ in steps.supposed)]
    if math.perm(len(owners), len(unnamed)) > GUESSES_MAX:
        return found
    for chosen in set(itertools.permutations(owners, len(unnamed))):
        if None in chosen[: len(steps.guessed)]:
            continue
        versions = {op.number: v for op, v in zip(chosen, unnamed, strict=True) if op is not None}
        known = [replace(op, version=versions.get(op.number, op.version)) for op in operations]
        violation = _judge(known, _Steps(known))
        if violation is None:
            return None
        found = found or violation
    return found


def _judge(operations: list[Operation], steps: _Steps) -> Violation | None:
    """Look for an order in a hurry, and then for any."""
    if steps.violation is not None:
        return steps.violation
    found = _Search(operations, steps).run()
    if found is None or not (steps.wild_puts or steps.wild_deletes):
        return found
    try:
        return found if _Search(operations, steps, all_moves=True).run() is not None else None
    except UndecidedError:  # the other verdict stands: it is of the orders that are likely
        return found


# --- what is known before the search -------------------------------------------------------------


class _Steps:
    """The writes of known version, by version, and the wild ones beside them."""

    def __init__(self, operations: list[Operation]) -> None:
        self.violation: Violation | None = None
        self.writes: list[Operation] = []  # in the order of their versions
        self.wild_puts: list[Operation] = []  # unseen, and of unknown fate
        self.wild_deletes: list[Operation] = []  # unseen deletes, and expiries
        self.open_deletes: list[Operation] = []  # done, of unknown version
        self.guessed: list[int] = []  # versions that only conditions that were judged name
        self.supposed: list[int] = []  # and those that only writes of unknown fate name
        self._by_version: dict[int, Operation] = {}
        self._sort(operations)
        if self.violation is None:
            self._learn_versions(operations)
        unknown = [op for op in operations if op.writes and op.outcome is Outcome.UNKNOWN]
        named = {op.condition for op in unknown if op.condition}
        self.supposed = sorted(named - self._by_version.keys())
        self.writes = [self._by_version[v] for v in sorted(self._by_version)]
        self.places = {write.number: place for place, write in enumerate(self.writes, 1)}
        self.wild_deletes += [_expiry_of(write) for write in self.writes if write.expires]
        self.sought = {  # values of which some get does not say the version
            op.value
            for op in operations
            if op.kind is Kind.GET and op.outcome is Outcome.OK and op.version is None
        }

    def _sort(self, operations: list[Operation]) -> None:
        for operation in operations:
            if not operation.writes or operation.outcome in (Outcome.FAILED, Outcome.REFUSED):
                continue
            if operation.outcome is Outcome.UNKNOWN and operation.version:
                self._add(operation, operation.version)
            elif operation.outcome is Outcome.UNKNOWN:
                wild = self.wild_puts if operation.kind is Kind.PUT else self.wild_deletes
                wild.append(operation)
            elif operation.version is None:
                if operation.kind is Kind.PUT:
                    raise ValueError(f"a put that was done needs its version: {operation}")
                self.open_deletes.append(operation)
            elif operation.version != ABSENT_VERSION:
                self._add(operation, operation.version)
            elif operation.kind is Kind.PUT:
                self._refuse(operation, "a put was done under version 0")

    def _add(self, write: Operation, version: int) -> None:
        other = self._by_version.get(version)
        if other is not None:
            self._refuse(write, f"two writes have version {version_text(version)}", other)
        self._by_version[version] = write

    def _learn_versions(self, operations: list[Operation]) -> None:
        """Give a version to the writes of unknown fate that somebody has seen."""
        written = {op.value: op for op in operations if op.kind is Kind.PUT}
        for operation in operations:
            if operation.kind is Kind.GET and operation.outcome is Outcome.OK:
                self._learn_from_get(operation, written)
        for operation in operations:
            if operation.outcome is Outcome.REFUSED:
                self._learn_from_condition(operation, operation.version)
            elif operation.outcome is Outcome.OK:
                self._learn_from_condition(operation, operation.condition)
                if operation.condition and operation.version == ABSENT_VERSION:
                    self._refuse(operation, "a condition held, and no record was found")

    def _learn_from_get(self, get: Operation, written: dict[bytes | None, Operation]) -> None:
        if get.value is None:
            return
        if get.version is None:
            if get.value not in written:
                self._refuse(get, "a get found what nobody ever wrote")
            elif written[get.value].outcome in (Outcome.FAILED, Outcome.REFUSED):
                self._refuse(get, "a get found a write that had failed", written[get.value])
            return
        write = self._by_version.get(get.version)
        if get.version == ABSENT_VERSION:
            self._refuse(get, "a get found a record under version 0")
        elif write is None:
            wild = next((w for w in self.wild_puts if w.value == get.value), None)
            if wild is not None:
                self.wild_puts.remove(wild)
                self._add(replace(wild, version=get.version), get.version)
            elif get.value not in written:
                self._refuse(get, "a get found what nobody ever wrote")
            elif written[get.value].outcome in (Outcome.FAILED, Outcome.REFUSED):
                self._refuse(get, "a get found a write that had failed", written[get.value])
            else:
                self._refuse(get, "a get found a write under another version", written[get.value])
        elif write.kind is Kind.DELETE or write.value != get.value:
            self._refuse(get, "a get found another value than was written by that version", write)

    def _learn_from_condition(self, operation: Operation, version: int | None) -> None:
        """A version that only conditions met is that of one of the wild puts; which one is not
        known, so it is a step beside them all (and one after the other is taken for it then).
        """
        if not version or version in self._by_version:
            return
        if len(self.guessed) == len(self.wild_puts):
            self._refuse(operation, "a condition found a version that nobody ever wrote")
            return
        self.guessed.append(version)
        first = min(self.wild_puts, key=lambda put: put.invoked_at)
        number = _SOME_WILD_PUT - len(self._by_version)
        step = replace(first, number=number, value=b"?", condition=None, version=version)
        self._add(step, version)

    def _refuse(self, operation: Operation, reason: str, *others: Operation) -> None:
        if self.violation is None:
            self.violation = Violation(operation.key, reason, (operation, *others))


def _expiry_of(write: Operation) -> Operation:
    """The delete that may happen by itself."""
    return replace(
        write,
        number=-2 - write.number,
        kind=Kind.DELETE,
        condition=write.version,
        outcome=Outcome.UNKNOWN,
    )


# --- the search ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Config:
    """One way in which it may have gone so far."""

    place: int = 0  # how many steps have taken effect
    override: int | None = None  # what a wild write left since then: _NOTHING or its number
    used: frozenset[int] = frozenset()  # wild writes that have taken effect
    seen: frozenset[int] = frozenset()  # observations in flight that have taken effect


class _Search:
    """``all_moves``: wild writes may take effect anywhere, not only where something asks for it."""

    def __init__(
        self, operations: list[Operation], steps: _Steps, *, all_moves: bool = False
    ) -> None:
        self._steps = steps
        self._all_moves = all_moves
        self._by_number = {op.number: op for op in (*operations, *steps.writes)}
        self._open_deletes = {op.number for op in steps.open_deletes}
        self._invoked: set[int] = set()
        self._watching: list[Operation] = []  # observations in flight
        self._configs = {_Config()}

    def run(self) -> Violation | None:
        for _, is_answer, number in sorted(self._events()):
            operation = self._by_number[number]
            if not is_answer:
                self._on_invoked(operation)
                continue
            reached: set[_Config] = set()
            for config in self._configs:
                reached |= self._reach(config, operation)
            if not reached:
                return self._explain(operation)
            if _observes(operation):
                self._watching.remove(operation)
                reached = {replace(c, seen=c.seen - {number}) for c in reached}
            elif number in self._open_deletes:
                self._invoked.discard(number)
                reached = {replace(c, used=c.used - {number}) for c in reached}
            self._configs = self._without_wasters(reached)
        return None

    def _without_wasters(self, configs: set[_Config]) -> set[_Config]:
        """Drop those that differ from another only in having used more wild writes."""
        if len(configs) == 1:
            return configs
        alike: dict[tuple[object, ...], list[_Config]] = defaultdict(list)
        for config in sorted(configs, key=lambda c: len(c.used)):
            must = config.used & self._open_deletes
            others = alike[config.place, config.override, config.seen, must]
            if not any(other.used <= config.used for other in others):
                others.append(config)
        return {config for group in alike.values() for config in group}

    def _events(self) -> Iterator[tuple[float, bool, int]]:
        """(time, whether it is the answer, number); at one time, calls come before answers."""
        for number, operation in self._by_number.items():
            observes = _observes(operation)
            if observes or operation.writes:
                if operation.outcome is Outcome.FAILED:
                    continue
                yield operation.invoked_at, False, number
                if operation.outcome in (Outcome.OK, Outcome.REFUSED):
                    yield operation.completed_at, True, number

    def _on_invoked(self, operation: Operation) -> None:
        self._invoked.add(operation.number)
        if operation.expires:
            self._invoked.add(-2 - operation.number)
        if _observes(operation):
            self._watching.append(operation)
            self._configs = {self._observe(config) for config in self._configs}

    # --- states ------------------------------------------------------------------------------

    def _current(self, config: _Config) -> Operation | None:
        """The put whose record is there; None if there is none."""
        if config.override is not None:
            return None if config.override == _NOTHING else self._by_number[config.override]
        if not config.place:
            return None
        write = self._steps.writes[config.place - 1]
        return write if write.kind is Kind.PUT else None

    def _fits(self, config: _Config, operation: Operation) -> bool:
        """Tell whether the observation holds in this state."""
        current = self._current(config)
        if operation.kind is Kind.GET:
            if operation.value is None or current is None:
                return operation.value is None and current is None
            if current.value != operation.value:
                return False
            return operation.version is None or current.version == operation.version
        if operation.outcome is Outcome.OK:  # a delete that found no record
            return current is None
        return _version_of(current) == operation.version  # a refused condition

    def _observe(self, config: _Config) -> _Config:
        """Let all take effect that can without changing anything."""
        seen = {op.number for op in self._watching if self._fits(config, op)}
        return replace(config, seen=config.seen | seen) if seen - config.seen else config

    # --- steps -------------------------------------------------------------------------------

    def _reach(self, start: _Config, target: Operation) -> set[_Config]:
        """Return the states in which ``target`` has taken effect, with no more than it needs."""
        found: set[_Config] = set()
        visited, queue = {start}, [start]
        while queue:
            config = queue.pop()
            if self._has_happened(config, target):
                found.add(config)
                continue
            for following in self._following(config, target):
                if following not in visited:
                    visited.add(following)
                    queue.append(following)
            if len(visited) > CONFIGS_MAX:
                raise UndecidedError(f"key {target.key!r}: more than {CONFIGS_MAX} states")
        return found

    def _has_happened(self, config: _Config, target: Operation) -> bool:
        if _observes(target):
            return target.number in config.seen
        if target.number in self._open_deletes:
            return target.number in config.used
        return config.place >= self._steps.places[target.number]

    def _following(self, config: _Config, target: Operation) -> Iterator[_Config]:
        current = self._current(config)
        step = self._next_step(config)
        waiting = [op for op in self._watching if op.number not in config.seen]
        deletes = [op for op in self._steps.open_deletes if self._usable(config, op, current)]
        if self._all_moves:
            yield from self._move_at_will(config, current)
        if current is not None:
            for delete in deletes:
                yield self._override(config, delete, _NOTHING)
            if any(map(_wants_nothing, waiting)) or (
                step is not None and step.condition == ABSENT_VERSION
            ):
                yield from self._use_wild_delete(config, current)
        elif deletes or (step is not None and step.kind is Kind.DELETE and step.condition is None):
            yield from self._use_any_wild_put(config)
        for watching in waiting:
            if watching.value in self._steps.sought:
                yield from self._use_wild_put(config, current, watching.value)
        if step is not None and self._step_is_possible(step, current):
            after = replace(config, place=config.place + 1, override=None)
            yield self._observe(after)

    def _move_at_will(self, config: _Config, current: Operation | None) -> Iterator[_Config]:
        """Let any wild write take effect."""
        for put in self._steps.wild_puts:
            if self._usable(config, put, current):
                yield self._override(config, put, put.number)
        if current is None:
            return
        yield from self._use_wild_delete(config, current)
        if current.expires and current.number == config.override:
            yield self._observe(replace(config, override=_NOTHING))

    def _next_step(self, config: _Config) -> Operation | None:
        if config.place == len(self._steps.writes):
            return None
        step = self._steps.writes[config.place]
        return step if step.number in self._invoked else None

    @staticmethod
    def _step_is_possible(step: Operation, current: Operation | None) -> bool:
        if step.kind is Kind.DELETE and current is None:
            return False
        return step.condition is None or step.condition == _version_of(current)

    def _use_wild_delete(self, config: _Config, current: Operation) -> Iterator[_Config]:
        """One of those without a condition is as good as any other."""
        took_any = False
        for delete in self._steps.wild_deletes:
            if self._usable(config, delete, current):
                if delete.condition is None:
                    if took_any:
                        continue
                    took_any = True
                yield self._override(config, delete, _NOTHING)

    def _use_wild_put(
        self, config: _Config, current: Operation | None, value: bytes | None
    ) -> Iterator[_Config]:
        for put in self._steps.wild_puts:
            if put.value == value and self._usable(config, put, current):
                yield self._override(config, put, put.number)

    def _use_any_wild_put(self, config: _Config) -> Iterator[_Config]:
        """Try wild puts; of those that no get looks for, one is as good as any other."""
        usable = [put for put in self._steps.wild_puts if self._usable(config, put, None)]
        unsought = [put for put in usable if put.value not in self._steps.sought]
        for put in unsought[:1] or usable:
            yield self._override(config, put, put.number)

    def _usable(self, config: _Config, wild: Operation, current: Operation | None) -> bool:
        return (
            wild.number in self._invoked
            and wild.number not in config.used
            and (wild.condition is None or wild.condition == _version_of(current))
        )

    def _override(self, config: _Config, wild: Operation, override: int) -> _Config:
        return self._observe(replace(config, override=override, used=config.used | {wild.number}))

    # --- explanations ------------------------------------------------------------------------

    def _explain(self, operation: Operation) -> Violation:
        config = max(self._configs, key=lambda c: c.place)
        reason = (
            self._explain_observation(operation, config)
            if _observes(operation)
            else self._explain_write(operation, config)
        )
        around = [
            other
            for other in self._by_number.values()
            if other.number != operation.number
            and other.completed_at >= operation.invoked_at
            and other.invoked_at <= operation.completed_at
        ]
        steps = self._steps.writes[max(0, config.place - 3) : config.place + 2]
        context = {op.number: op for op in (*steps, *around) if op.number != operation.number}
        chosen = sorted(context.values(), key=lambda op: op.invoked_at)[-NEIGHBOURS_MAX:]
        return Violation(operation.key, reason, (operation, *chosen))

    def _explain_observation(self, operation: Operation, config: _Config) -> str:
        newest = self._steps.writes[config.place - 1] if config.place else None
        then = f"though this was done before it: {newest}" if newest else "though nothing was there"
        if _wants_nothing(operation):
            return f"lost: a record was not found, {then}"
        if operation.kind is not Kind.GET:
            return f"a condition was judged by another version, {then}"
        place = next(
            (i for i, w in enumerate(self._steps.writes, 1) if w.value == operation.value), None
        )
        if place is None or place > config.place:
            return "a get found a write that had not begun, or could not have taken effect by then"
        if any(w.kind is Kind.DELETE for w in self._steps.writes[place : config.place]):
            return f"resurrected: a get found a deleted record, {then}"
        return f"stale: a get found an old value, {then}"

    def _explain_write(self, operation: Operation, config: _Config) -> str:
        if operation.number in self._open_deletes:
            return "a delete found a record when there was none"
        place = self._steps.places[operation.number]
        for write in self._steps.writes[config.place : place]:
            if write.number not in self._invoked:
                return (
                    f"versions do not rise: {version_text(operation.version or 0)} is above "
                    f"that of a write that began only after it was done: {write}"
                )
            if write.condition is not None:
                return f"a condition held by mistake, or a write before it was lost: {write}"
            if write.kind is Kind.DELETE:
                return f"a delete found a record when there was none: {write}"
        return "the write cannot have taken effect"


def _observes(operation: Operation) -> bool:
    """Tell whether it changes nothing, and says what was there."""
    if operation.outcome is Outcome.REFUSED:
        return True
    if operation.outcome is not Outcome.OK:
        return False
    return operation.kind is Kind.GET or (
        operation.kind is Kind.DELETE and operation.version == ABSENT_VERSION
    )


def _version_of(put: Operation | None) -> int | None:
    """The version of the record that is there; 0 if there is none, None if it is not known."""
    return ABSENT_VERSION if put is None else put.version


def _wants_nothing(observation: Operation) -> bool:
    """Tell whether it says that there was no record."""
    if observation.kind is Kind.GET:
        return observation.value is None
    return observation.outcome is Outcome.OK or observation.version == ABSENT_VERSION
