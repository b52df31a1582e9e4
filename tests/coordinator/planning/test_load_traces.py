"""The planner by load in the loop of virtual clusters: it evens out, and does not oscillate."""

from __future__ import annotations

import pytest

from koinon_coordinator.core.planning.model import LoadAim
from tests.coordinator.planning.load_traces import KINDS, Planner, traced

LONG_SEEDS = 200
"""Of each of five kinds: a thousand traces."""


@pytest.mark.parametrize("kind", KINDS)
def test_trace_settles(kind: str) -> None:
    assert traced(0, kind).complaints() == []


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", range(0, LONG_SEEDS, 20))
def test_many_traces_settle(kind: str, first: int) -> None:
    broken = {seed: traced(seed, kind).complaints() for seed in range(first, first + 20)}
    assert not any(broken.values()), {s: c for s, c in broken.items() if c}


def test_completed_work_alone_leaves_a_slow_node_busy() -> None:
    complaints = traced(1, "slow", Planner(sees_speed=False)).complaints()
    assert any("times the mean" in complaint for complaint in complaints), complaints


def test_planner_without_a_threshold_oscillates() -> None:
    planner = Planner(aim=LoadAim(target=1.0), rests=False)
    complaints = traced(0, "steady", planner).complaints()
    assert any("oscillates" in complaint for complaint in complaints), complaints
    assert any("moved twice" in complaint for complaint in complaints), complaints
