"""Plans of nodes that have little room: none is over-filled, and ample room changes no plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_coordinator.core.planning.by_keyspace import KeyspaceLayout, plan_each
from koinon_coordinator.core.planning.planner import (
    Layout,
    Plan,
    RefusalCode,
    plan_drain,
    plan_rebalance,
    plan_repair,
    plan_replace,
    plan_replication_factor,
)
from koinon_proto.contract.table import NodeNumber
from tests.coordinator.planning.layouts import (
    added,
    bootstrapped,
    layout,
    nodes,
    replicas_of,
    with_nodes,
)
from tests.coordinator.planning.test_planner_properties import EXAMPLES, check_rows, layouts

N1, N2, N3, N4 = map(NodeNumber, (1, 2, 3, 4))
PLANS: dict[str, Callable[[Layout], Plan]] = {
    "rebalance": plan_rebalance,
    "drain": partial(plan_drain, node=N1),
    "repair": partial(plan_repair, dead=frozenset({N1, N2})),
    "replace": partial(plan_replace, old=N1, new=N2),
    "factor": partial(plan_replication_factor, factor=3),
}


def with_room(before: Layout, room: Mapping[int, int], size: int = 10) -> Layout:
    """Return the layout with so much room at these nodes; each replica takes ``size``."""
    members = tuple(replace(n, room=room.get(n.number, n.room)) for n in before.nodes)
    return replace(with_nodes(before, members), sizes=(size,) * len(before.replicas))


def bytes_gained(before: Layout, plan: Plan) -> dict[int, int]:
    gained: dict[int, int] = {node.number: 0 for node in before.nodes}
    for move in plan.moves:
        for number in added(move):
            gained[number] += before.sizes[move.partition_id]
        for number in set(move.origin) - set(move.target):
            gained[number] -= before.sizes[move.partition_id]
    return gained


@pytest.mark.parametrize("kind", PLANS)
@EXAMPLES
@given(before=layouts(), data=st.data())
def test_no_plan_gives_a_node_more_than_it_has_room_for(
    kind: str, before: Layout, data: st.DataObject
) -> None:
    sizes = data.draw(st.tuples(*[st.integers(0, 50)] * len(before.replicas)))
    members = tuple(replace(n, room=data.draw(st.integers(-50, 300))) for n in before.nodes)
    before = replace(with_nodes(before, members), sizes=sizes)
    plan = PLANS[kind](before)
    leaving = {N1, N2} if kind == "repair" else {N1} if kind == "drain" else set()
    takes = (replace(n, takes=n.takes and n.number not in leaving) for n in before.nodes)
    check_rows(with_nodes(before, tuple(takes)), plan)
    gained = bytes_gained(before, plan)
    receivers = {number for move in plan.moves for number in added(move)}
    for node in before.nodes:
        assert node.number not in receivers or gained[node.number] <= node.room
    assert not {r.node_number for r in plan.refusals if r.code is RefusalCode.ROOM_UNKNOWN}


@pytest.mark.parametrize("kind", PLANS)
@EXAMPLES
@given(before=layouts())
def test_ample_room_changes_no_plan(kind: str, before: Layout) -> None:
    needed = 10 * len(before.replicas)
    ample = with_room(before, {n.number: needed for n in before.nodes})
    assert PLANS[kind](ample) == PLANS[kind](before)


def test_rebalance_gives_a_small_node_as_much_as_fits_and_the_others_the_rest() -> None:
    settled = bootstrapped({1: "", 2: ""}, 60, 1)
    grown = with_nodes(settled, nodes({1: "", 2: "", 3: "", 4: ""}))
    plan = plan_rebalance(with_room(grown, {3: 45}))
    after = check_rows(grown, plan)
    assert replicas_of(after) == {1: 19, 2: 19, 3: 4, 4: 18}
    (refusal,) = plan.refusals
    assert (refusal.code, refusal.node_number, refusal.partition_ids) == (
        RefusalCode.NO_ROOM,
        N3,
        (),
    )
    assert refusal.reason.startswith("n3 has no room for 11 of the 15 replicas that it was to get")
    assert "--map-size-bytes" in refusal.reason


def test_rebalance_leaves_nothing_for_the_next_one_where_a_node_is_full() -> None:
    settled = bootstrapped({1: "", 2: ""}, 60, 1)
    grown = with_room(with_nodes(settled, nodes({1: "", 2: "", 3: ""})), {3: 45})
    after = check_rows(grown, plan_rebalance(grown))
    assert not plan_rebalance(with_room(after, {3: 5})).moves


def test_drain_gives_to_the_nodes_that_have_room() -> None:
    before = layout(nodes({1: "", 2: "", 3: ""}), [(1,)] * 10 + [(2,)] * 10 + [(3,)] * 10, 1)
    plan = plan_drain(with_room(before, {2: 20}), N1)
    after = check_rows(with_nodes(before, nodes({1: "", 2: "", 3: ""}, draining={1})), plan)
    assert replicas_of(after) == {1: 0, 2: 12, 3: 18}


@pytest.mark.parametrize("kind", ["drain", "repair", "replace"])
def test_plan_with_no_room_anywhere_moves_nothing_and_names_the_partitions(kind: str) -> None:
    before = layout(nodes({1: "", 2: ""}), [(1,)] * 3 + [(2,)] * 3, 1)
    make = partial(plan_repair, dead=frozenset({N1})) if kind == "repair" else PLANS[kind]
    plan = make(with_room(before, {2: 9}))
    assert not plan.moves
    (refusal,) = (r for r in plan.refusals if r.code is RefusalCode.NO_ROOM)
    assert (refusal.node_number, refusal.partition_ids) == (N2, (0, 1, 2))


@pytest.mark.parametrize("kind", ["drain", "repair"])
@pytest.mark.parametrize(
    ("room", "sizes", "moved"),
    [
        ({2: 38, 3: 26}, (100, 100, 20), {2}),
        ({2: 78, 3: 95}, (50, 20, 20, 10, 50), {0, 1, 2, 3, 4}),
        ({2: 34, 3: 135}, (50, 20, 100, 10, 50), {0, 1, 3, 4}),
    ],
)
def test_replica_that_no_count_has_placed_goes_to_the_node_that_has_room_for_it(
    room: dict[int, int], sizes: tuple[int, ...], moved: set[int], kind: str
) -> None:
    before = with_room(layout(nodes({1: "", 2: "", 3: ""}), [(1,)] * len(sizes), 1), room)
    make = partial(plan_repair, dead=frozenset({N1})) if kind == "repair" else PLANS[kind]
    plan = make(replace(before, sizes=sizes))
    assert {move.partition_id for move in plan.moves} == moved
    refused = {p for refusal in plan.refusals for p in refusal.partition_ids}
    assert refused == set(range(len(sizes))) - moved


def test_full_nodes_may_exchange_replicas() -> None:
    """Racks are repaired by an exchange, after which each node holds as much as before."""
    rows = [(1, 2), (3, 4)]
    before = layout(nodes({1: "a", 2: "a", 3: "b", 4: "b"}), rows, 2)
    plan = plan_rebalance(with_room(before, dict.fromkeys((1, 2, 3, 4), 0)))
    assert len(plan.moves) == 2
    assert not plan.refusals


def test_each_keyspace_has_the_room_that_those_before_it_leave() -> None:
    before = layout(nodes({1: "", 2: ""}), [(1,)] * 4, 1)
    small = with_room(before, {2: 20})
    parts = [
        KeyspaceLayout(name=name, base=base, layout=small) for name, base in (("a", 0), ("b", 4))
    ]
    plan = plan_each(parts, plan_rebalance)
    assert [move.partition_id < 4 for move in plan.moves] == [True, True]
    assert [r.reason.split(":")[0] for r in plan.refusals] == ["keyspace b"]


def test_node_that_was_not_heard_is_said_to_have_unknown_room() -> None:
    before = layout(nodes({1: "", 2: ""}), [(1,)] * 4, 1)
    members = tuple(replace(n, room_known=n.number == 1) for n in before.nodes)
    plan = plan_rebalance(with_nodes(before, members))
    assert len(plan.moves) == 2
    (refusal,) = plan.refusals
    assert (refusal.code, refusal.node_number) == (RefusalCode.ROOM_UNKNOWN, N2)
