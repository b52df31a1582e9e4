"""Consumer groups in the replicated state."""

from __future__ import annotations

import pytest

from koinon_coordinator.core.cluster import group_rules
from koinon_coordinator.core.cluster.commands import (
    CreateGroup,
    DeleteGroup,
    GroupChanged,
    RaiseGeneration,
    Reason,
    Rejected,
)
from koinon_coordinator.core.cluster.recovery import recovered
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_proto.contract.groups import GroupStrategy
from tests.coordinator.kit.load_states import small_state


def create(name: str = "g", strategy: GroupStrategy = GroupStrategy.STICKY) -> CreateGroup:
    return CreateGroup(name=name, strategy=strategy, created_at_ms=7)


def up(group_id: int, generation: int, session_ms: int = 9) -> RaiseGeneration:
    return RaiseGeneration(group_id=group_id, generation=generation, session_ms=session_ms)


def test_group_is_created_once_a_name_and_is_no_version_of_the_table() -> None:
    state = small_state()
    version = state.table_version
    made = state.apply(create(), 40)
    assert made == GroupChanged(group_id=40, generation=0)
    assert state.apply(create(strategy=GroupStrategy.RANGE), 41) == made
    assert state.groups.by_name["g"].strategy is GroupStrategy.STICKY
    assert state.table_version == version


def test_generation_rises_once_for_each_that_names_the_present_one() -> None:
    state = small_state()
    state.apply(create(), 40)
    assert state.apply(up(40, 0)) == GroupChanged(group_id=40, generation=1)
    assert state.apply(up(40, 0)) == Rejected(reason=Reason.GENERATION_RAISED)
    assert state.apply(up(40, 2)) == Rejected(reason=Reason.GENERATION_RAISED)
    assert state.apply(up(40, 1, 300)) == GroupChanged(group_id=40, generation=2)
    group = state.groups.get(40)
    assert group is not None
    assert group.session_ms == 300


def test_deleted_group_is_gone_and_its_name_gets_another_id() -> None:
    state = small_state()
    state.apply(create(), 40)
    assert state.apply(DeleteGroup(group_id=40)) == GroupChanged(group_id=40, generation=0)
    for command in (DeleteGroup(group_id=40), up(40, 0)):
        assert state.apply(command) == Rejected(reason=Reason.GROUP_UNKNOWN)
    assert state.apply(create(), 50) == GroupChanged(group_id=50, generation=0)


def test_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_rules, "GROUPS_MAX", 2)
    state = small_state()
    for index in (40, 41):
        state.apply(create(str(index)), index)
    assert state.apply(create("more"), 42) == Rejected(reason=Reason.TOO_MANY_GROUPS)
    assert state.apply(create("40"), 43) == GroupChanged(group_id=40, generation=0)


def test_no_group_without_a_cluster() -> None:
    assert ClusterState().apply(create(), 1) == Rejected(reason=Reason.NO_CLUSTER)


def test_coordinators_made_anew_go_on_above_all_generations_and_ids_that_were_given() -> None:
    state = small_state()
    state.apply(create(), 40)
    state.apply(up(40, 0))
    again = ClusterState(recovered(state.image()))
    kept = again.groups.get(40)
    assert kept is not None
    assert kept.generation > 1_000
    made = again.apply(create("later"), 3)
    assert isinstance(made, GroupChanged)
    assert made.group_id > 1_000
