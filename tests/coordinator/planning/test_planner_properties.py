"""Any layout, with racks, weights, nodes down and draining, moves under way: what plans promise."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from koinon_coordinator.core.planning.planner import (
    Layout,
    Plan,
    PlanNode,
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
    copies,
    executed,
    layout,
    nodes,
    primaries_of,
    racks_of,
    replicas_of,
    spread,
    with_nodes,
)

EXAMPLES = settings(max_examples=100, deadline=None)


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    racks: str = "abcd",
    weights: bool = True,
    troubled: bool = True,
    whole: bool = False,
) -> Layout:
    """``troubled``: nodes down or draining and moves under way among them; ``whole``: every row
    has the replicas that it should.
    """
    size = draw(st.integers(2 if whole else 1, 9))
    factor = draw(st.integers(1, min(4, size) if whole else 4))
    numbers = range(1, size + 1)
    standing = st.sampled_from(["takes"] * 6 + ["down", "draining"] if troubled else ["takes"])
    stands = {n: draw(standing) for n in numbers}
    partitions = draw(st.integers(1, 40))
    rows = [
        draw(st.permutations(numbers))[
            : factor if whole else draw(st.integers(1, min(size, factor + 1)))
        ]
        for _ in range(partitions)
    ]
    return layout(
        nodes(
            {n: draw(st.sampled_from(racks)) for n in numbers},
            weights={
                n: draw(st.sampled_from([50, 100, 100, 300])) if weights else 100 for n in numbers
            },
            down={n for n in numbers if stands[n] == "down"},
            draining={n for n in numbers if stands[n] == "draining"},
        ),
        rows,
        factor,
        fixed=draw(st.sets(st.integers(0, partitions - 1), max_size=4)) if troubled else (),
    )


def takers(state: Layout) -> list[PlanNode]:
    return [node for node in state.nodes if node.takes]


def refused(plan: Plan, code: RefusalCode) -> set[int]:
    return {p for refusal in plan.refusals if refusal.code is code for p in refusal.partition_ids}


def check_rows(before: Layout, plan: Plan) -> Layout:
    """Check what every plan promises; return the layout after it."""
    after = executed(before, plan)
    takes = {node.number for node in takers(before)}
    assert [m.partition_id for m in plan.moves] == sorted({m.partition_id for m in plan.moves})
    for move in plan.moves:
        assert len(set(move.target)) == len(move.target)
        assert added(move) <= takes
        assert move.reason
        assert not added(move) or not move.reason.startswith("only the order")
    counts, primaries = replicas_of(after), primaries_of(after)
    assert {b.node_number: b.replicas for b in plan.after} == counts
    assert {b.node_number: b.primaries for b in plan.after} == primaries
    return after


@EXAMPLES
@given(layouts())
def test_rebalance_any_layout_keeps_what_it_must_and_settles(before: Layout) -> None:
    plan = plan_rebalance(before)
    after = check_rows(before, plan)
    down = {n.number for n in before.nodes if not n.takes and not n.gives}
    draining = {n.number for n in before.nodes if n.gives}
    short = refused(plan, RefusalCode.NOT_ENOUGH_NODES)
    factor = before.replication_factor
    for p, (old, new) in enumerate(zip(before.replicas, after.replicas, strict=True)):
        if p in before.fixed:
            continue
        if len(old) <= factor:
            assert set(old) & down <= set(new)
            assert len(new) >= len(old)
        if p not in short:
            assert len(new) == factor
            assert draining.isdisjoint(new)
    again = plan_rebalance(after)
    assert not again.moves
    assert again.refusals == plan.refusals


@EXAMPLES
@given(layouts())
def test_plans_are_the_same_whatever_the_order_of_nodes(before: Layout) -> None:
    turned = with_nodes(before, tuple(reversed(before.nodes)))
    assert plan_rebalance(before) == plan_rebalance(turned)
    assert plan_replication_factor(before, 2) == plan_replication_factor(turned, 2)


@EXAMPLES
@given(layouts(troubled=False))
def test_rebalance_racks_hold_no_more_of_a_partition_than_they_must(before: Layout) -> None:
    after = check_rows(before, plan_rebalance(before))
    sizes = Counter(node.rack for node in before.nodes)
    wanted = min(before.replication_factor, len(before.nodes))
    most = next(c for c in range(1, 10) if sum(min(c, n) for n in sizes.values()) >= wanted)
    for row in after.replicas:
        assert max(Counter(racks_of(after, row)).values()) <= most
    if len(sizes) >= before.replication_factor:
        assert most == 1


@EXAMPLES
@given(layouts(weights=False, troubled=False))
def test_rebalance_nodes_of_equal_weight_in_a_rack_are_within_one(before: Layout) -> None:
    after = check_rows(before, plan_rebalance(before))
    counts = replicas_of(after)
    for rack in {node.rack for node in after.nodes}:
        assert spread([counts[n.number] for n in after.nodes if n.rack == rack]) <= 1


@EXAMPLES
@given(layouts(racks="a", weights=False, troubled=False))
def test_rebalance_equal_nodes_are_within_one_in_replicas_and_primaries(before: Layout) -> None:
    after = check_rows(before, plan_rebalance(before))
    assert spread(replicas_of(after).values()) <= 1
    assert spread(primaries_of(after).values()) <= 1


@EXAMPLES
@given(layouts(racks="a", troubled=False, whole=True))
def test_rebalance_weighted_nodes_are_within_one_of_their_shares(before: Layout) -> None:
    after = check_rows(before, plan_rebalance(before))
    partitions, factor = len(before.replicas), before.replication_factor
    weight = sum(node.weight for node in before.nodes)
    if any(factor * node.weight > weight for node in before.nodes):
        return  # a share above one replica of every partition is cut
    counts, primaries = replicas_of(after), primaries_of(after)
    for node in before.nodes:
        assert abs(counts[node.number] - partitions * factor * node.weight / weight) < 1
        assert abs(primaries[node.number] - partitions * node.weight / weight) < 1


@EXAMPLES
@given(layouts(racks="a", weights=False, troubled=False, whole=True))
def test_rebalance_copies_only_what_is_above_or_below_the_shares(before: Layout) -> None:
    counts = replicas_of(before).values()
    low, rest = divmod(sum(counts), len(counts))
    high = low + (rest > 0)
    over = sum(max(0, count - high) for count in counts)
    under = sum(max(0, low - count) for count in counts)
    assert copies(plan_rebalance(before)) == max(over, under)


@EXAMPLES
@given(layouts(racks="a", weights=False, troubled=False, whole=True))
def test_rebalance_a_node_added_to_a_settled_layout_takes_and_nobody_else_does(
    before: Layout,
) -> None:
    settled = executed(before, plan_rebalance(before))
    number = NodeNumber(len(before.nodes) + 1)
    new = PlanNode(number=number, rack="a", weight=100, takes=True)
    grown = with_nodes(settled, (*settled.nodes, new))
    after = check_rows(grown, plan := plan_rebalance(grown))
    share = sum(replicas_of(grown).values()) // len(grown.nodes)
    assert all(added(move) <= {number} for move in plan.moves)
    assert copies(plan) == replicas_of(after)[number]
    assert copies(plan) in (share, share + 1)


@EXAMPLES
@given(layouts(), st.data())
def test_drain_empties_the_node_and_leaves_the_rest(before: Layout, data: st.DataObject) -> None:
    number = data.draw(st.sampled_from([node.number for node in before.nodes]))
    members = tuple(
        replace(n, takes=False, gives=True) if n.number == number else n for n in before.nodes
    )
    draining = with_nodes(before, members)
    plan = plan_drain(draining, number)
    assert plan.moves == plan_drain(before, number).moves
    after = check_rows(draining, plan)
    excused = refused(plan, RefusalCode.NOT_ENOUGH_NODES) | set(before.fixed)
    for p, (old, new) in enumerate(zip(before.replicas, after.replicas, strict=True)):
        assert len(new) == len(old)
        assert set(old) - {number} <= set(new)
        if number not in old:
            assert new == old
        else:
            assert number not in new or p in excused
            _check_racks_not_worse(draining, old, new, number)
    assert not plan_drain(after, number).moves


def _check_racks_not_worse(
    state: Layout, old: tuple[NodeNumber, ...], new: tuple[NodeNumber, ...], gone: NodeNumber
) -> None:
    """A new replica shares a rack only if every rack that takes replicas has one."""
    kept = [n for n in old if n != gone]
    others = set(racks_of(state, kept))
    open_racks = {node.rack for node in takers(state)} - others
    for number in set(new) - set(old):
        if open_racks:
            assert racks_of(state, [number])[0] not in others


@EXAMPLES
@given(layouts(), st.data())
def test_repair_replaces_the_dead_and_leaves_the_rest(before: Layout, data: st.DataObject) -> None:
    numbers = [node.number for node in before.nodes]
    dead = frozenset(data.draw(st.sets(st.sampled_from(numbers), max_size=3)))
    plan = plan_repair(before, dead)
    members = tuple(replace(n, takes=n.takes and n.number not in dead) for n in before.nodes)
    after = check_rows(with_nodes(before, members), plan)
    excused = refused(plan, RefusalCode.NOT_ENOUGH_NODES) | set(before.fixed)
    for p, (old, new) in enumerate(zip(before.replicas, after.replicas, strict=True)):
        assert len(new) == len(old)
        assert set(old) - dead <= set(new)
        assert new == old or not dead.isdisjoint(old)
        assert dead.isdisjoint(new) or p in excused


@EXAMPLES
@given(layouts(), st.data())
def test_replace_exchanges_one_node_for_another(before: Layout, data: st.DataObject) -> None:
    numbers = st.sampled_from([node.number for node in before.nodes])
    old, new = data.draw(numbers), data.draw(numbers)
    plan = plan_replace(before, old, new)
    check_rows(before, plan)
    for move in plan.moves:
        assert move.target == tuple(new if n == old else n for n in move.origin)
    named = {p for refusal in plan.refusals for p in refusal.partition_ids}
    if takes := new in {node.number for node in takers(before)}:
        held = {p for p, row in enumerate(before.replicas) if old in row}
        assert held == {m.partition_id for m in plan.moves} | named
    assert takes or not plan.moves


@EXAMPLES
@given(layouts(), st.integers(1, 5))
def test_replication_factor_adds_or_drops_and_leaves_the_rest(before: Layout, factor: int) -> None:
    plan = plan_replication_factor(before, factor)
    after = check_rows(before, plan)
    short = refused(plan, RefusalCode.NOT_ENOUGH_NODES)
    if not plan.moves and plan.refusals and not plan.refusals[0].partition_ids:
        assert sum(not node.gives for node in before.nodes) < factor
        return
    calm = len(takers(before)) == len(before.nodes)
    for p, (old, new) in enumerate(zip(before.replicas, after.replicas, strict=True)):
        if p in before.fixed or len(old) == factor:
            assert new == old
        elif len(old) > factor:
            assert set(new) < set(old)
            assert len(new) == factor
            if calm and len({node.rack for node in before.nodes}) >= factor:
                had = len(set(racks_of(before, old)))
                assert len(set(racks_of(before, new))) == min(factor, had)
        else:
            assert set(old) <= set(new)
            assert len(new) == factor or p in short
