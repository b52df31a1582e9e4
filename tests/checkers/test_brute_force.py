"""The checker and the one that tries everything say the same of small random histories."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.checkers.brute_force import compare, fits, random_history
from tests.checkers.history import Kind, Operation, Outcome
from tests.checkers.linearizability import check_key

HISTORIES = 5_000  # of the 100,000 that are compared by hand: python -m tests.checkers.brute_force
CHUNKS = 5


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_checker_agrees_with_brute_force(chunk: int) -> None:
    size = HISTORIES // CHUNKS
    counts, differing = compare(range(chunk * size, (chunk + 1) * size))
    assert [str(one) for one in differing] == []
    assert counts["fit"] > size / 3
    assert counts["violations"] > size / 10


def without_stale_reads(operations: list[Operation]) -> object:
    """The checker with a hole: gets are not looked at."""
    return check_key([op for op in operations if op.kind is not Kind.GET])


def test_checker_that_overlooks_gets_is_found_out() -> None:
    _, differing = compare(range(500), without_stale_reads)
    assert any(not one.fits for one in differing)


def test_history_is_made_by_its_seed_alone() -> None:
    assert random_history(7) == random_history(7) != random_history(8)


def test_stale_read_does_not_fit_by_brute_force() -> None:
    def put(number: int, at: float) -> Operation:
        return Operation(
            number=number,
            caller="c",
            kind=Kind.PUT,
            key=b"k",
            value=b"%d" % number,
            invoked_at=at,
            completed_at=at + 1,
            outcome=Outcome.OK,
            version=number,
        )

    get = replace(put(1, 4), number=3, kind=Kind.GET)
    assert not fits([put(1, 0), put(2, 2), get])
    assert fits([put(1, 0), put(2, 2), replace(get, invoked_at=2.5)])
