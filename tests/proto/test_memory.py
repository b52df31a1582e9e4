"""Servers look for garbage in cycles rarely."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from koinon_proto.process.memory import collect_rarely


@pytest.fixture(autouse=True)
def _usual_collector() -> Iterator[None]:
    usual = gc.get_threshold()
    yield
    gc.set_threshold(*usual)
    gc.unfreeze()


def test_thousands_of_new_objects_are_not_searched_for_garbage() -> None:
    collect_rarely()
    begun = [one["collections"] for one in gc.get_stats()]
    kept = [[number] for number in range(10_000)]
    assert [one["collections"] for one in gc.get_stats()] == begun
    assert len(kept) == 10_000


def test_garbage_in_cycles_is_found_in_the_end() -> None:
    collect_rarely()
    begun = gc.get_stats()[0]["collected"]
    for _ in range(30_000):
        cycle: list[object] = []
        cycle.append(cycle)
    assert gc.get_stats()[0]["collected"] > begun
