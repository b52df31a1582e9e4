"""Plans by load from the state and the nodes' reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide import load_plans
from koinon_coordinator.core.decide.load_plans import (
    REST_S,
    LoadFacts,
    NodeLoad,
    PlanBy,
    RecentMoves,
    planned_by_load,
)
from koinon_coordinator.core.decide.plan_requests import (
    PlanKind,
    PlanWish,
    accepted,
    plan_task_by_load,
)
from koinon_coordinator.core.planning.model import Plan, RefusalCode
from koinon_node.partition import load as load_of_nodes
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import NodeNumber, PartitionId
from tests.coordinator.kit.states import ample_room, numbers
from tests.coordinator.kit.support import bootstrapped

N1, N2, N3 = numbers(1, 2, 3)
CORE = 1_000_000
BY_LOAD = PlanWish(kind=PlanKind.REBALANCE, by=PlanBy.LOAD)
ROWS = [(1, 2), (1, 3), (1, 2), (2, 3), (3, 1)]


def reports(**work: dict[int, int]) -> dict[NodeNumber, NodeLoad]:
    """Return reports of three nodes, by name, with the millionths of a core of each partition."""
    return {
        number: NodeLoad(
            work=sum(work.get(name, {}).values()),
            busy=sum(work.get(name, {}).values()),
            lead=work.get(name, {}),
        )
        for name, number in (("n1", N1), ("n2", N2), ("n3", N3))
    }


def planned(
    state: ClusterState,
    loads: dict[NodeNumber, NodeLoad],
    wish: PlanWish = BY_LOAD,
    resting: frozenset[PartitionId] = frozenset(),
) -> Plan:
    facts = LoadFacts(room=ample_room(state), loads=loads, resting=resting)
    return planned_by_load(plan_task_by_load(state, wish, facts))


def hot_first() -> dict[NodeNumber, NodeLoad]:
    third = CORE // 10
    return reports(n1={0: third, 1: third, 2: third}, n2={3: third // 2}, n3={4: third // 2})


def test_leads_go_off_the_busiest_node_and_the_plan_can_be_queued() -> None:
    state = bootstrapped(ROWS)
    plan = planned(state, hot_first())
    assert {move.origin[0] for move in plan.moves} == {N1}
    before = {balance.node_number: balance.load for balance in plan.before}
    assert before[N1] == pytest.approx(0.3)
    for command in accepted(plan.plan_id, plan):
        state.apply(command)
    assert state.moves.keys() == {move.partition_id for move in plan.moves}
    assert not planned(state, hot_first()).moves, "what is moving stays, and is counted at its end"


def test_load_of_a_partition_is_the_sum_of_all_reports_while_it_moves() -> None:
    state = bootstrapped(ROWS)
    whole = planned(state, hot_first())
    loads = hot_first()
    halves = {p: share // 2 for p, share in loads[N1].lead.items()}
    loads[N1] = replace(loads[N1], lead=halves)
    loads[N2] = replace(loads[N2], lead={**loads[N2].lead, **halves})
    assert [m.target for m in planned(state, loads).moves] == [m.target for m in whole.moves]


def test_partitions_that_are_not_listed_share_the_rest() -> None:
    state = bootstrapped(ROWS)
    loads = hot_first()
    third = loads[N1].lead[0]
    loads[N1] = replace(loads[N1], lead={0: third}, rest_lead=2 * third)
    before = {b.node_number: b.load for b in planned(state, loads).before}
    assert before[N1] == pytest.approx(0.3)


def test_young_means_are_made_whole() -> None:
    state = bootstrapped(ROWS)
    loads = {n: replace(load, observed_s=12.0) for n, load in hot_first().items()}
    before = {b.node_number: b.load for b in planned(state, loads).before}
    assert before[N1] == pytest.approx(0.3 / (1 - 2.718281828 ** (-12 / load_plans.DECAY_S)))
    assert load_plans.DECAY_S == load_of_nodes.DECAY_S


def test_partitions_rest_after_a_move() -> None:
    recent = RecentMoves()
    recent.observe([PartitionId(0), PartitionId(1)], 100.0)
    recent.observe([PartitionId(1)], 160.0)
    assert recent.resting(160.0) == {0}
    assert recent.resting(160.0 + REST_S) == frozenset()
    state = bootstrapped(ROWS)
    resting = frozenset(map(PartitionId, (0, 1, 2)))
    plan = planned(state, hot_first(), resting=resting)
    assert not plan.moves
    assert [refusal.code for refusal in plan.refusals] == [RefusalCode.RESTING]


def test_nothing_is_planned_while_a_node_has_not_reported() -> None:
    state, loads = bootstrapped(ROWS), hot_first()
    del loads[N3]
    plan = planned(state, loads)
    assert not plan.moves
    assert [(r.code, r.node_number) for r in plan.refusals] == [(RefusalCode.LOAD_UNKNOWN, N3)]


def test_slow_node_gets_less_and_a_weight_is_proposed() -> None:
    state = bootstrapped(ROWS)
    loads = hot_first()
    loads[N1] = replace(loads[N1], busy=CORE, work=CORE // 4)
    for n in (N2, N3):
        loads[n] = replace(loads[n], busy=CORE // 4, work=CORE // 4)
    plan = planned(state, loads)
    (slow,) = [r for r in plan.refusals if r.code is RefusalCode.SLOW_NODE]
    assert "--weight 25" in slow.reason
    capacity = {b.node_number: b.capacity for b in plan.after}
    assert capacity == {N1: 0.25, N2: 1.0, N3: 1.0}


@pytest.mark.parametrize("percent", [99, 1_001])
def test_targets_out_of_bounds_are_refused(percent: int) -> None:
    state = bootstrapped(ROWS)
    with pytest.raises(InvalidArgumentError, match="from 100 to 1000"):
        planned(state, hot_first(), replace(BY_LOAD, target_percent=percent))
