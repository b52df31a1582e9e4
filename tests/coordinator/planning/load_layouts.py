"""Layouts with loads, what a plan by load makes of them, and the optimum by brute force."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, product

from koinon_coordinator.core.planning.model import LoadLayout, LoadPlan, PlanNode, Replicas
from koinon_proto.contract.table import NodeNumber, PartitionId


def members(count: int, *, racks: int = 1, weights: Sequence[int] = ()) -> tuple[PlanNode, ...]:
    return tuple(
        PlanNode(
            number=NodeNumber(i + 1),
            rack=f"r{i % racks}",
            weight=weights[i] if weights else 100,
            takes=True,
        )
        for i in range(count)
    )


def loaded(
    nodes: tuple[PlanNode, ...],
    rows: Iterable[Sequence[int]],
    lead: Sequence[float],
    *,
    follow: float = 0.2,
    sizes: Sequence[int] = (),
) -> LoadLayout:
    """Return a layout; each follower has the part ``follow`` of its primary's load."""
    replicas = tuple(tuple(NodeNumber(n) for n in row) for row in rows)
    return LoadLayout(
        nodes=nodes,
        partition_ids=tuple(PartitionId(p) for p in range(len(replicas))),
        replicas=replicas,
        lead=tuple(lead),
        follow=tuple(follow * each for each in lead),
        sizes=tuple(sizes) or (1,) * len(replicas),
        names={node.number: f"n{node.number}" for node in nodes},
    )


def zipf(count: int, exponent: float, rng: random.Random) -> list[float]:
    """Return loads that fall by a power of their rank, in random order."""
    loads = [1 / rank**exponent for rank in range(1, count + 1)]
    rng.shuffle(loads)
    return loads


def spread(
    nodes: tuple[PlanNode, ...], partitions: int, copies: int, rng: random.Random
) -> list[tuple[int, ...]]:
    """Return random rows without two replicas in one rack, if there are enough racks."""
    rows: list[tuple[int, ...]] = []
    distinct = len({node.rack for node in nodes}) >= copies
    while len(rows) < partitions:
        chosen = rng.sample(nodes, copies)
        if not distinct or len({node.rack for node in chosen}) == copies:
            rows.append(tuple(int(node.number) for node in chosen))
    return rows


def executed(layout: LoadLayout, plan: LoadPlan) -> LoadLayout:
    rows = dict(zip(layout.partition_ids, layout.replicas, strict=True))
    for move in plan.moves:
        assert rows[move.partition_id] == move.origin
        rows[move.partition_id] = move.target
    return replace(layout, replicas=tuple(rows.values()))


def pressures(layout: LoadLayout, rows: Iterable[Replicas] | None = None) -> dict[int, float]:
    """Return each node's load over its weight."""
    load: dict[int, float] = {node.number: 0.0 for node in layout.nodes}
    rows = layout.replicas if rows is None else rows
    for row, lead, follow in zip(rows, layout.lead, layout.follow, strict=True):
        for place, node in enumerate(row):
            load[node] += follow if place else lead
    return {
        node.number: load[node.number] / (node.weight / 100) for node in layout.nodes if node.takes
    }


def skew(layout: LoadLayout) -> float:
    """Return the pressure of the busiest node over the mean."""
    found = pressures(layout)
    return max(found.values()) / (sum(found.values()) / len(found))


def least_by_leads(layout: LoadLayout) -> float:
    """Return the least pressure of the busiest node that other orders of the rows reach."""
    best = float("inf")
    for leads in product(*(range(len(row)) for row in layout.replicas)):
        rows = [
            (row[at], *row[:at], *row[at + 1 :])
            for row, at in zip(layout.replicas, leads, strict=True)
        ]
        best = min(best, max(pressures(layout, rows).values()))
    return best


def least_of_all(layout: LoadLayout) -> float:
    """Return the least load of the busiest node that any placement reaches; equal weights."""
    numbers = [node.number for node in layout.nodes]
    copies = len(layout.replicas[0])
    order = sorted(range(len(layout.replicas)), key=lambda p: -layout.lead[p])
    load: dict[int, float] = defaultdict(float)
    rows = [
        (first, *others)
        for first in numbers
        for others in combinations([n for n in numbers if n != first], copies - 1)
    ]
    mean = (sum(layout.lead) + (copies - 1) * sum(layout.follow)) / len(numbers)
    best = max(pressures(layout).values())

    def place(at: int) -> None:
        nonlocal best
        if best <= mean * 1.001 or (load and max(load.values()) >= best):
            return
        if at == len(order):
            best = max(load.values())
            return
        p = order[at]
        for row in sorted(rows, key=lambda row: load[row[0]]):
            for slot, node in enumerate(row):
                load[node] += layout.follow[p] if slot else layout.lead[p]
            place(at + 1)
            for slot, node in enumerate(row):
                load[node] -= layout.follow[p] if slot else layout.lead[p]

    place(0)
    return best
