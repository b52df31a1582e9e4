"""The seeds that every run of the tests goes through. A failure names its seed; run more with
`python -m tests.raft.simulation --seeds A-B`."""

from __future__ import annotations

from collections import Counter

import pytest

from .simulation import run_seed

SEEDS_PER_CHUNK = 25
CHUNKS = 44
SHORT_CHUNKS = 6  # the others are long tests


@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(chunk, marks=() if chunk < SHORT_CHUNKS else pytest.mark.long)
        for chunk in range(CHUNKS)
    ],
)
def test_group_under_faults_stays_safe_and_converges(chunk: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        totals.update(run_seed(seed))
    # What a chunk of seeds has not been through, it has not tested.
    for happening in (
        "acknowledged",
        "all starved",
        "became leader",
        "changes",
        "compactions",
        "crashes",
        "isolations",
        "not listened to",
        "pauses",
        "reads",
        "removed",
        "snapshots installed",
        "starved",
        "transfers",
    ):
        assert totals[happening] > 0, happening


def test_simulation_same_seed_same_run() -> None:
    assert run_seed(7) == run_seed(7)
