"""Atomic updates of several records of one partition by one Redis command. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_, xor

from koinon_node.core.formats.records import Record
from koinon_node.core.writes.atomic_batch import Joint
from koinon_node.core.writes.updates import Change, Decided, Put, Result

Changes = Sequence[tuple[int, Decided]]
_NOTHING: Changes = ()


@dataclass(frozen=True, slots=True)
class PutAllIfAbsent(Joint):
    """Write a value to each key if none of them has a record. The result is whether the values were
    written.
    """

    puts: Sequence[Put]

    @property
    def parts(self) -> int:
        return len(self.puts) - 1

    @property
    def size(self) -> int:
        return sum(put.size for put in self.puts)

    def decide_all(self, records: Sequence[Record | None], now_ms: int) -> tuple[Result, Changes]:
        if any(record is not None for record in records):
            return False, _NOTHING
        return True, [(at, put.decide(None, now_ms)) for at, put in enumerate(self.puts)]


@dataclass(frozen=True, slots=True)
class Copy(Joint):
    """Copy the first key's value and expiry to the second key, and with ``moved`` delete the first
    record. A record of the second key is overwritten only with ``replaced``. The result is whether
    the copy was made, or None if the first key has no record.
    """

    moved: bool
    replaced: bool

    @property
    def parts(self) -> int:
        return 1

    @property
    def size(self) -> int:
        return 0

    def decide_all(self, records: Sequence[Record | None], now_ms: int) -> tuple[Result, Changes]:
        source, target = records
        if source is None:
            return None, _NOTHING
        if target is not None and not self.replaced:
            return False, _NOTHING
        changes = [(1, Decided(Change.PUT, None, source.value, source.expires_at_ms))]
        if self.moved:
            changes.insert(0, (0, Decided(Change.DELETE, None)))
        return True, changes


_BITWISE: dict[str, Callable[[int, int], int]] = {"AND": and_, "OR": or_, "XOR": xor}


@dataclass(frozen=True, slots=True)
class CombineBits(Joint):
    """Combine the values of the other keys bit by bit (AND, OR or XOR of all, NOT of the only one),
    and write the result to the first key. Shorter values are padded with zeros. If all are empty
    the record is deleted. The result is the length.
    """

    operation: str
    sources: int
    ttl_ms: int = 0  # of the written record; 0: never expires

    @property
    def parts(self) -> int:
        return self.sources

    @property
    def size(self) -> int:
        return 0

    def decide_all(self, records: Sequence[Record | None], now_ms: int) -> tuple[Result, Changes]:
        values = [record.value if record is not None else b"" for record in records[1:]]
        length = max(map(len, values))
        # One after the other, the shortest first, and equal values once: so few numbers are in
        # memory at once, and the time is in proportion to the bytes.
        counts = sorted(Counter(values).items(), key=lambda pair: len(pair[0]))
        used = [value for value, count in counts if self.operation != "XOR" or count % 2]
        numbers = (int.from_bytes(value, "little") for value in used)
        if not length:
            change = Change.LEAVE if records[0] is None else Change.DELETE
            return 0, ((0, Decided(change, None)),)
        if self.operation == "NOT":
            number = next(numbers) ^ ((1 << 8 * length) - 1)
        else:
            number = reduce(_BITWISE[self.operation], numbers) if used else 0
        put = Put(number.to_bytes(length, "little"), self.ttl_ms)
        return length, ((0, put.decide(None, now_ms)),)
