"""Layouts for the planner's tests, and what holds of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from koinon_coordinator.core.planning.initial_placement import place
from koinon_coordinator.core.planning.planner import Layout, Plan, PlannedMove, PlanNode
from koinon_proto.contract.table import NodeNumber, PartitionId


def nodes(
    racks: Mapping[int, str],
    *,
    weights: Mapping[int, int] | None = None,
    down: Collection[int] = (),
    draining: Collection[int] = (),
) -> tuple[PlanNode, ...]:
    return tuple(
        PlanNode(
            number=NodeNumber(number),
            rack=rack,
            weight=(weights or {}).get(number, 100),
            takes=number not in down and number not in draining,
            gives=number in draining,
        )
        for number, rack in racks.items()
    )


def layout(
    members: tuple[PlanNode, ...],
    rows: Sequence[Sequence[int]],
    factor: int,
    *,
    fixed: Collection[int] = (),
) -> Layout:
    return Layout(
        nodes=members,
        replicas=tuple(tuple(NodeNumber(n) for n in row) for row in rows),
        fixed=frozenset(PartitionId(p) for p in fixed),
        replication_factor=factor,
        names={node.number: f"n{node.number}" for node in members},
    )


def bootstrapped(racks: Mapping[int, str], partitions: int, factor: int) -> Layout:
    """Return the layout by which ``place`` spreads partitions over the nodes."""
    rows = place(racks, partition_count=partitions, replication_factor=factor)
    return layout(nodes(racks), rows, factor)


def with_nodes(before: Layout, members: tuple[PlanNode, ...]) -> Layout:
    names = {node.number: f"n{node.number}" for node in members}
    return replace(before, nodes=members, names=names)


def executed(before: Layout, plan: Plan) -> Layout:
    """The layout once the plan's moves are over; each must begin with what is there."""
    rows = list(before.replicas)
    for move in plan.moves:
        assert rows[move.partition_id] == move.origin
        assert move.target != move.origin
        assert move.partition_id not in before.fixed
        rows[move.partition_id] = move.target
    return replace(before, replicas=tuple(rows))


def added(move: PlannedMove) -> set[NodeNumber]:
    return set(move.target) - set(move.origin)


def copies(plan: Plan) -> int:
    """Return how many replicas the plan copies."""
    return sum(len(added(move)) for move in plan.moves)


def replicas_of(state: Layout) -> dict[int, int]:
    counts = Counter(n for row in state.replicas for n in row)
    return {node.number: counts[node.number] for node in state.nodes}


def primaries_of(state: Layout) -> dict[int, int]:
    counts = Counter(row[0] for row in state.replicas if row)
    return {node.number: counts[node.number] for node in state.nodes}


def racks_of(state: Layout, row: Sequence[int]) -> list[str]:
    rack = {node.number: node.rack for node in state.nodes}
    return [rack[NodeNumber(n)] for n in row]


def spread(counts: Collection[int]) -> int:
    return max(counts) - min(counts)
