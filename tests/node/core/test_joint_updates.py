"""Bits of several records combined in one step."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_, or_, xor
from random import Random
from time import perf_counter

import pytest

from koinon_node.core.formats.records import Record
from koinon_node.core.writes.joint_updates import CombineBits


def record(value: bytes) -> Record:
    return Record(1, 0, 0, value)


def combined(operation: str, values: list[bytes]) -> bytes:
    sources = [None, *map(record, values)]
    length, ((_, change),) = CombineBits(operation, len(values)).decide_all(sources, 0)
    assert length == len(change.value)
    return change.value


@pytest.mark.parametrize(("operation", "bits"), [("AND", and_), ("OR", or_), ("XOR", xor)])
def test_bits_of_values_of_all_lengths_also_repeated_are_combined(
    operation: str, bits: Callable[[int, int], int]
) -> None:
    random = Random(7)
    for _ in range(200):
        known = [random.randbytes(random.randrange(6)) for _ in range(4)]
        values = [*random.choices(known, k=random.randrange(1, 9)), b"x"]
        length = max(map(len, values))
        padded = [value.ljust(length, b"\0") for value in values]
        expected = bytes(reduce(bits, column) for column in zip(*padded, strict=True))
        assert combined(operation, values) == expected


@pytest.mark.parametrize("operation", ["AND", "OR", "XOR"])
def test_many_short_sources_beside_a_long_one_cost_what_their_bytes_cost(operation: str) -> None:
    short = [b"%d" % n for n in range(5_000)]
    long = bytes(1024 * 1024)
    began = perf_counter()
    combined(operation, [long, *short, *[long] * 2_000])
    assert perf_counter() - began < 2.0  # some ms; with all as long as the longest, 10 s
