"""Schedules are drawn from seeds alone, and hold what their kinds promise."""

from __future__ import annotations

import pytest

from tests.nemesis import means
from tests.nemesis.schedules import (
    BEGINS_S,
    CLIENTS,
    COORDINATORS,
    KINDS,
    NODES,
    Step,
    available,
    make_schedule,
)

ALL = [name for name, kind in KINDS.items() if kind.assumed]
SEEDS = 300


def overlap(one: Step, other: Step) -> bool:
    return one.at_s < other.at_s + other.lasts_s and other.at_s < one.at_s + one.lasts_s


def test_schedule_is_drawn_from_its_seed_alone() -> None:
    assert make_schedule(7, ALL) == make_schedule(7, ALL) != make_schedule(8, ALL)


def test_first_faults_of_consecutive_seeds_go_through_all_kinds() -> None:
    first = [make_schedule(seed, ALL).steps[0].kind for seed in range(len(ALL))]
    assert first == ALL


@pytest.mark.parametrize("name", KINDS)
def test_schedule_of_one_kind_has_no_other(name: str) -> None:
    assert make_schedule(3, [name]).kinds == [name]


def test_faults_that_destroy_a_copy_are_alone() -> None:
    for seed in range(SEEDS):
        steps = make_schedule(seed, ALL).steps
        for step in steps:
            if KINDS[step.kind].alone:
                assert not any(other is not step and overlap(step, other) for other in steps)


def test_faults_end_while_clients_go_on_and_name_what_there_is() -> None:
    names = {*NODES, *COORDINATORS, *CLIENTS, "leader", "primary", *(f"{n}.writer" for n in NODES)}
    for seed in range(SEEDS):
        schedule = make_schedule(seed, ALL)
        for step in schedule.steps:
            assert BEGINS_S <= step.at_s <= step.at_s + step.lasts_s <= schedule.seconds
            assert {target.partition("/")[0] for target in step.targets} <= names
            assert step.targets


def test_sides_of_a_split_each_have_a_client() -> None:
    """One goes on through the primary that is cut off; others go on beyond it."""
    for seed in range(SEEDS):
        for step in make_schedule(seed, ["split"]).steps:
            inside = [target for target in step.targets if target in CLIENTS]
            assert inside
            assert len(inside) < len(CLIENTS)
            assert step.targets[0].startswith("primary")


def test_kinds_that_the_machine_lacks_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        means, "missing", lambda needed: "no such thing" if needed == means.FREEZE else ""
    )
    kinds, left_out = available(ALL)
    assert left_out == {"frozen-disk": "fsfreeze: no such thing"}
    assert kinds == [name for name in ALL if name != "frozen-disk"]
