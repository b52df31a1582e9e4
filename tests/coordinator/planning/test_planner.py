from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import pytest

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
from koinon_coordinator.core.planning.shares import fair_shares, fair_shares_by_rack
from koinon_proto.contract.table import NodeNumber
from tests.coordinator.planning.layouts import (
    added,
    bootstrapped,
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

ONE_RACK = dict.fromkeys(range(1, 5), "")


def moves_of(plan: Plan) -> dict[int, tuple[tuple[int, ...], tuple[int, ...], str]]:
    return {m.partition_id: (m.origin, m.target, m.reason) for m in plan.moves}


def codes_of(plan: Plan) -> list[RefusalCode]:
    return [refusal.code for refusal in plan.refusals]


def only_refusal(plan: Plan, code: RefusalCode) -> tuple[str, int, tuple[int, ...]]:
    assert codes_of(plan) == [code]
    return plan.refusals[0].reason, plan.refusals[0].node_number, plan.refusals[0].partition_ids


# ---------------------------------------------------------------------- rebalance


def test_rebalance_new_node_follows_the_worked_example() -> None:
    before = layout(nodes(ONE_RACK), [(1, 2), (2, 3), (3, 1), (1, 2)], 2)
    plan = plan_rebalance(before)
    reason = "n4 has 0 of its share of 2 partitions"
    assert moves_of(plan) == {0: ((1, 2), (4, 2), reason), 3: ((1, 2), (1, 4), reason)}
    assert [(b.node_number, b.replicas, b.primaries) for b in plan.before] == [
        (1, 3, 2),
        (2, 3, 1),
        (3, 2, 1),
        (4, 0, 0),
    ]
    assert [(b.replicas, b.primaries) for b in plan.after] == [(2, 1)] * 4
    assert not plan.refusals


@pytest.mark.parametrize("racks", [1, 3])
def test_rebalance_node_added_moves_only_its_share_and_only_to_it(racks: int) -> None:
    old = {n: f"r{n % racks}" for n in range(1, 10)}
    before = bootstrapped(old, 1026, 3)
    assert spread(replicas_of(before).values()) == 0
    new = with_nodes(before, nodes({**old, 10: "r1"} if racks > 1 else {**old, 10: "r0"}))
    plan = plan_rebalance(new)
    after = executed(new, plan)
    assert {n for move in plan.moves for n in added(move)} == {10}
    # One of ten nodes; with racks, one of the four that share what a full rack holds.
    share = 3 * 1026 // 10 if racks == 1 else 1026 // 4
    assert copies(plan) == len(plan.moves) in (share, share + 1)
    assert spread(primaries_of(after).values()) <= 1


def test_rebalance_order_alone_is_said_to_copy_nothing() -> None:
    before = layout(nodes({1: "", 2: ""}), [(1, 2)] * 4, 2)
    plan = plan_rebalance(before)
    assert len(plan.moves) == 2
    assert copies(plan) == 0
    assert {m.reason for m in plan.moves} == {
        "only the order changes, no data is copied: n2 is first in 0 of its share of 2 partitions"
    }


def test_rebalance_giver_above_its_share_is_the_reason_where_nobody_lacks() -> None:
    rows = [(1,), (1,), (1,), (2,), (3,)]
    plan = plan_rebalance(layout(nodes({1: "", 2: "", 3: ""}), rows, 1))
    ((_, _, reason),) = moves_of(plan).values()
    assert reason == "n1 has 3 of its share of 1 or 2 partitions"


def test_rebalance_two_replicas_on_a_rack_are_parted() -> None:
    before = layout(nodes({1: "r1", 2: "r1", 3: "r2"}), [(1, 2), (3, 2)], 2)
    plan = plan_rebalance(before)
    ((origin, target, reason),) = moves_of(plan).values()
    assert (origin, sorted(target), reason) == ((1, 2), [1, 3], "rack r1 held two replicas")


def test_rebalance_full_rack_shares_among_its_own_nodes() -> None:
    """Three replicas, three racks: the lone nodes hold everything, and that is no imbalance."""
    racks = {1: "a", 2: "b", 3: "c", 4: "c", 5: "c"}
    after = executed(start := bootstrapped(racks, 30, 3), plan_rebalance(start))
    assert replicas_of(after) == {1: 30, 2: 30, 3: 10, 4: 10, 5: 10}
    assert set(primaries_of(after).values()) == {6}


def test_rebalance_fewer_racks_than_replicas_spreads_as_far_as_they_go() -> None:
    racks = {1: "a", 2: "a", 3: "a", 4: "b", 5: "b", 6: "b"}
    before = layout(nodes(racks), [(1, 2, 3)] * 4, 3)
    plan = plan_rebalance(before)
    after = executed(before, plan)
    assert all(len(set(racks_of(after, row))) == 2 for row in after.replicas)
    reason, _, partitions = only_refusal(plan, RefusalCode.NOT_ENOUGH_RACKS)
    assert reason == "4 partitions have replicas that share a rack: too few racks (2) take replicas"
    assert partitions == (0, 1, 2, 3)


def test_rebalance_weights_are_shares() -> None:
    before = layout(nodes(ONE_RACK, weights={1: 100, 2: 100, 3: 200, 4: 200}), [(1, 2)] * 60, 2)
    after = executed(before, plan_rebalance(before))
    assert replicas_of(after) == {1: 20, 2: 20, 3: 40, 4: 40}
    assert primaries_of(after) == {1: 10, 2: 10, 3: 20, 4: 20}


def test_rebalance_missing_replicas_are_added() -> None:
    before = layout(nodes(ONE_RACK), [(1, 2), (2, 1), (3, 4, 1)], 3)
    plan = plan_rebalance(before)
    assert moves_of(plan)[0][2] == "has 2 of 3 replicas"
    assert spread(replicas_of(executed(before, plan)).values()) <= 1


def test_rebalance_too_few_nodes_is_refused_with_the_partitions() -> None:
    before = layout(nodes({1: "", 2: ""}), [(1, 2), (2,)], 3)
    plan = plan_rebalance(before)
    assert {p: sorted(t) for p, (_, t, _) in moves_of(plan).items()} == {1: [1, 2]}
    reason, _, partitions = only_refusal(plan, RefusalCode.NOT_ENOUGH_NODES)
    assert reason == "2 partitions get too few replicas: only 2 nodes take any"
    assert partitions == (0, 1)


def test_rebalance_node_down_keeps_its_replicas() -> None:
    before = layout(nodes(ONE_RACK, down={4}), [(4, 1), (4, 1), (1, 4), (1, 2)], 2)
    plan = plan_rebalance(before)
    after = executed(before, plan)
    assert all(4 in row for row in after.replicas[:3])
    assert primaries_of(after)[4] == 2
    assert spread([replicas_of(after)[n] for n in (1, 2, 3)]) <= 1
    reason, node, partitions = only_refusal(plan, RefusalCode.NODE_DOWN)
    assert (reason, node, partitions) == ("n4 is down and keeps its 3 replicas", 4, (0, 1, 2))


def test_rebalance_moves_under_way_are_counted_and_not_touched() -> None:
    """Two partitions are on their way to node 3; it gets one more, not three."""
    members = nodes({1: "", 2: "", 3: ""})
    before = layout(
        members, [(3,), (3,), (1,), (1,), (1,), (1,), (2,), (2,), (2,)], 1, fixed={0, 1}
    )
    plan = plan_rebalance(before)
    assert {p: t for p, (_, t, _) in moves_of(plan).items()} == {2: (3,)}
    assert not plan.refusals


def test_rebalance_move_under_way_that_leaves_work_is_refused() -> None:
    before = layout(nodes(ONE_RACK, draining={4}), [(4, 1), (2, 3)], 2, fixed={0})
    plan = plan_rebalance(before)
    assert not plan.moves
    reason, _, partitions = only_refusal(plan, RefusalCode.MOVE_UNDER_WAY)
    assert (reason, partitions) == (
        "1 partitions have a move queued or under way: plan again after it",
        (0,),
    )


def test_rebalance_draining_node_is_emptied() -> None:
    before = layout(nodes(ONE_RACK, draining={4}), [(4, 1), (2, 4), (3, 1)], 2)
    after = executed(before, plan := plan_rebalance(before))
    assert replicas_of(after) == {1: 2, 2: 2, 3: 2, 4: 0}
    assert "n4 is being drained" in {m.reason for m in plan.moves}


def test_rebalance_a_node_that_the_layout_does_not_know_is_left() -> None:
    before = layout(nodes({1: "", 2: ""}), [(9, 1), (2, 1)], 2)
    assert sorted(executed(before, plan_rebalance(before)).replicas[0]) == [1, 2]


def test_rebalance_no_nodes_and_no_partitions_plans_nothing() -> None:
    assert not plan_rebalance(layout((), [], 3)).moves
    assert not plan_rebalance(layout(nodes(ONE_RACK), [], 3)).moves
    empty = plan_rebalance(layout((), [()], 1))
    assert codes_of(empty) == [RefusalCode.NOT_ENOUGH_NODES]


def test_rebalance_small_layouts_move_as_little_as_any_plan_could() -> None:
    """Against every assignment there is: seeded layouts with racks and weights."""
    for seed in range(120):
        rng = random.Random(seed)
        size = rng.randint(2, 4)
        factor, partitions = rng.randint(1, min(3, size)), rng.randint(1, 4)
        racks = {n: rng.choice("abc") for n in range(1, size + 1)}
        weights = {n: rng.choice([1, 1, 2, 3]) for n in racks}
        rows = [rng.sample(range(1, size + 1), rng.randint(1, size)) for _ in range(partitions)]
        before = layout(nodes(racks, weights=weights), rows, factor)
        plan = plan_rebalance(before)
        assert copies(plan) == _fewest_copies(before, executed(before, plan)), seed


def _fewest_copies(before: Layout, planned: Layout) -> int:
    """The fewest copies that reach counts no further from the shares than those planned."""
    factor = before.replication_factor
    numbers = [node.number for node in before.nodes]
    most = min(
        max(Counter(racks_of(before, row)).values()) for row in combinations(numbers, factor)
    )
    rows = [
        row
        for row in combinations(numbers, factor)
        if max(Counter(racks_of(before, row)).values()) <= most
    ]
    assert all(tuple(sorted(row)) in rows for row in planned.replicas)
    wanted = replicas_of(planned)
    same = [
        combo
        for combo in product(rows, repeat=len(before.replicas))
        if Counter(n for row in combo for n in row) == Counter(wanted)
    ]
    return min(
        sum(len(set(new) - set(old)) for new, old in zip(combo, before.replicas, strict=True))
        for combo in same
    )


# ---------------------------------------------------------------------- the others


def test_drain_moves_the_nodes_replicas_and_no_others() -> None:
    before = bootstrapped(dict.fromkeys(range(1, 6), ""), 40, 2)
    draining = with_nodes(before, nodes(dict.fromkeys(range(1, 6), ""), draining={2}))
    plan = plan_drain(draining, NodeNumber(2))
    after = executed(draining, plan)
    assert {m.partition_id for m in plan.moves} == {
        p for p, row in enumerate(before.replicas) if 2 in row
    }
    assert all(set(m.origin) - set(m.target) == {2} for m in plan.moves)
    assert {m.reason for m in plan.moves} == {"n2 is being drained"}
    assert replicas_of(after) == {1: 20, 2: 0, 3: 20, 4: 20, 5: 20}
    assert primaries_of(after) == {1: 10, 2: 0, 3: 10, 4: 10, 5: 10}


def test_drain_too_few_nodes_keeps_the_replicas_and_says_so() -> None:
    before = layout(nodes({1: "", 2: "", 3: ""}, draining={3}), [(1, 2, 3), (3, 1)], 3)
    plan = plan_drain(before, NodeNumber(3))
    assert set(moves_of(plan)) == {1}
    reason, node, partitions = only_refusal(plan, RefusalCode.NOT_ENOUGH_NODES)
    assert (node, partitions) == (3, (0,))
    assert reason == (
        "n3 keeps 1 replicas: every node that takes any (2) has one of these partitions already"
    )


def test_drain_move_under_way_is_refused() -> None:
    before = layout(nodes(ONE_RACK, draining={1}), [(1, 2), (1, 3)], 2, fixed={1})
    plan = plan_drain(before, NodeNumber(1))
    assert set(moves_of(plan)) == {0}
    assert only_refusal(plan, RefusalCode.MOVE_UNDER_WAY)[2] == (1,)


def test_drain_keeps_racks_apart() -> None:
    racks = {1: "a", 2: "a", 3: "b", 4: "b", 5: "c", 6: "c"}
    before = bootstrapped(racks, 60, 3)
    after = executed(
        before,
        plan_drain(with_nodes(before, nodes(racks, draining={1})), NodeNumber(1)),
    )
    assert all(len(set(racks_of(after, row))) == 3 for row in after.replicas)
    assert replicas_of(after)[2] == 60


def test_replace_takes_every_place_in_the_same_order() -> None:
    before = layout(nodes(ONE_RACK), [(1, 2), (2, 1), (2, 3)], 2)
    plan = plan_replace(before, NodeNumber(1), NodeNumber(4))
    reason = "n1 is replaced by n4"
    assert moves_of(plan) == {0: ((1, 2), (4, 2), reason), 1: ((2, 1), (2, 4), reason)}


def test_replace_where_the_new_node_or_its_rack_is_there_already_is_refused() -> None:
    members = nodes({1: "a", 2: "b", 3: "c", 4: "b", 5: "c"})
    before = layout(members, [(1, 4), (1, 2), (1, 3)], 2)
    plan = plan_replace(before, NodeNumber(1), NodeNumber(4))
    assert moves_of(plan).keys() == {2}
    assert [(r.code, r.partition_ids) for r in plan.refusals] == [
        (RefusalCode.NO_TARGET, (0,)),
        (RefusalCode.NO_TARGET, (1,)),
    ]


def test_replace_by_a_node_that_is_down_is_refused() -> None:
    before = layout(nodes(ONE_RACK, down={4}), [(1, 2)], 2)
    plan = plan_replace(before, NodeNumber(1), NodeNumber(4))
    assert not plan.moves
    assert only_refusal(plan, RefusalCode.NODE_DOWN)[:2] == ("n4 takes no replicas", 4)
    unknown = plan_replace(before, NodeNumber(1), NodeNumber(8))
    assert only_refusal(unknown, RefusalCode.NODE_DOWN)[:2] == ("node 8 takes no replicas", 0)


def test_replication_factor_up_only_adds() -> None:
    racks = {n: f"r{n % 3}" for n in range(1, 7)}
    before = bootstrapped(racks, 60, 2)
    plan = plan_replication_factor(before, 3)
    after = executed(before, plan)
    assert len(plan.moves) == 60
    assert all(set(m.origin) < set(m.target) and len(m.target) == 3 for m in plan.moves)
    assert all(len(set(racks_of(after, row))) == 3 for row in after.replicas)
    assert {m.reason for m in plan.moves} == {"has 2 of 3 replicas"}
    assert spread(primaries_of(after).values()) <= 1


def test_replication_factor_down_only_drops_and_stays_fair() -> None:
    before = bootstrapped(dict.fromkeys(range(1, 8), ""), 70, 3)
    plan = plan_replication_factor(before, 2)
    after = executed(before, plan)
    assert all(set(m.target) < set(m.origin) and len(m.target) == 2 for m in plan.moves)
    assert set(replicas_of(after).values()) == {20}
    assert set(primaries_of(after).values()) == {10}
    assert {m.reason for m in plan.moves} == {"has 3 replicas, 2 are wanted"}


def test_replication_factor_down_drops_what_is_down_and_what_shares_a_rack_first() -> None:
    members = nodes({1: "a", 2: "a", 3: "b", 4: "c"}, down={4})
    before = layout(members, [(4, 1, 3), (3, 1, 2)], 3)
    plan = plan_replication_factor(before, 2)
    after = executed(before, plan)
    assert set(after.replicas[0]) == {1, 3}
    assert sorted(racks_of(after, after.replicas[1])) == ["a", "b"]


def test_replication_factor_above_the_nodes_is_refused_whole() -> None:
    plan = plan_replication_factor(bootstrapped(ONE_RACK, 8, 2), 5)
    assert not plan.moves
    reason, _, _ = only_refusal(plan, RefusalCode.NOT_ENOUGH_NODES)
    assert reason == "5 replicas need 5 nodes, there are 4"


def test_repair_replaces_what_the_dead_held() -> None:
    before = layout(nodes(ONE_RACK, down={3, 4}), [(1, 3), (3, 2), (4, 1), (1, 2)], 2)
    plan = plan_repair(before, frozenset({NodeNumber(3)}))
    assert {p: sorted(t) for p, (_, t, _) in moves_of(plan).items()} == {0: [1, 2], 1: [1, 2]}
    assert {m.reason for m in plan.moves} == {"n3 is lost"}


def test_repair_without_a_node_to_take_it_is_refused() -> None:
    before = layout(nodes({1: "", 2: ""}, down={2}), [(1, 2)], 2)
    plan = plan_repair(before, frozenset({NodeNumber(2)}))
    assert not plan.moves
    assert only_refusal(plan, RefusalCode.NOT_ENOUGH_NODES)[1:] == (2, (0,))


# ---------------------------------------------------------------------- identity, shares


def test_plan_id_tells_layouts_apart_and_not_orders_of_nodes() -> None:
    members = nodes(ONE_RACK)
    before = layout(members, [(1, 2), (2, 3), (3, 1), (1, 2)], 2)
    plan = plan_rebalance(before)
    assert plan == plan_rebalance(with_nodes(before, tuple(reversed(members))))
    heavier = with_nodes(before, nodes(ONE_RACK, weights={1: 101}))
    assert plan.plan_id != plan_rebalance(heavier).plan_id
    assert len(plan.plan_id) == 16


def test_fair_shares_pass_on_what_bounds_do_not_take() -> None:
    assert fair_shares(9, [1, 1, 1], [0, 0, 0], [9, 9, 9]) == [3, 3, 3]
    assert fair_shares(9, [1, 1, 1], [5, 0, 0], [9, 9, 9]) == [5, 2, 2]
    assert fair_shares(9, [1, 1, 1], [0, 0, 0], [1, 9, 9]) == [1, 4, 4]
    assert fair_shares(7, [1, 2], [0, 0], [9, 9]) == [Fraction(7, 3), Fraction(14, 3)]
    assert fair_shares(9, [1, 1], [0, 0], [2, 3]) == [2, 3]
    assert fair_shares(0, [1, 1], [2, 3], [4, 4]) == [2, 3]


def test_fair_shares_by_rack_follow_the_worked_example() -> None:
    shares = fair_shares_by_rack(9, [1, 1, 1], [0, 0, 0], [9, 9, 9], [[0], [1, 2]], [9, 3])
    assert shares == [6, Fraction(3, 2), Fraction(3, 2)]
