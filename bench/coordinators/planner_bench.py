"""The planner: the time that a plan takes, and its result.

    python -m bench.coordinators.planner_bench [--json]

Each line is one plan: seconds, replicas copied, rows in which only the order changes, and
afterwards the least and the greatest count of the nodes that take replicas.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

from koinon_coordinator.core.planning.initial_placement import place
from koinon_coordinator.core.planning.planner import (
    Layout,
    Plan,
    PlanNode,
    plan_drain,
    plan_rebalance,
    plan_replication_factor,
)
from koinon_proto.contract.table import NodeNumber

SIZES = ((1_024, 1_000), (65_536, 100))
FACTOR = 3


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One plan. ``replicas`` and ``primaries``: the least and the greatest count of a node."""

    title: str
    seconds: float
    copies: int
    order_only: int
    replicas: tuple[int, int]
    primaries: tuple[int, int]


def bootstrapped(partitions: int, nodes: int, racks: int, used: int) -> Layout:
    """Return a layout of which only the first ``used`` nodes hold anything."""
    members = tuple(
        PlanNode(number=NodeNumber(n), rack=f"r{n % racks}", weight=100, takes=True)
        for n in range(1, nodes + 1)
    )
    rows = place(
        {node.number: node.rack for node in members[:used]},
        partition_count=partitions,
        replication_factor=FACTOR,
    )
    return Layout(nodes=members, replicas=rows, fixed=frozenset(), replication_factor=FACTOR)


def executed(layout: Layout, plan: Plan) -> Layout:
    rows = list(layout.replicas)
    for move in plan.moves:
        rows[move.partition_id] = move.target
    return replace(layout, replicas=tuple(rows))


def measure(title: str, layout: Layout, make: Callable[[Layout], Plan]) -> tuple[Figure, Plan]:
    began = time.perf_counter()
    plan = make(layout)
    seconds = time.perf_counter() - began
    takers = {node.number for node in layout.nodes if node.takes}
    after = [balance for balance in plan.after if balance.node_number in takers]
    replicas, primaries = [b.replicas for b in after], [b.primaries for b in after]
    figure = Figure(
        title=title,
        seconds=round(seconds, 3),
        copies=sum(len(set(m.target) - set(m.origin)) for m in plan.moves),
        order_only=sum(set(m.target) == set(m.origin) for m in plan.moves),
        replicas=(min(replicas), max(replicas)),
        primaries=(min(primaries), max(primaries)),
    )
    return figure, plan


def figures() -> Iterator[Figure]:
    for partitions, nodes in SIZES:
        for racks in (1, 3, 10, nodes):
            what = f"{partitions:,} x {FACTOR}, {racks} racks"
            for used in (nodes - 1, nodes // 2, FACTOR):
                layout = bootstrapped(partitions, nodes, racks, used)
                title = f"{what}: rebalance {used:,} to {nodes:,} nodes"
                figure, plan = measure(title, layout, plan_rebalance)
                yield figure
            settled = executed(layout, plan)
            yield measure(f"{what}: rebalance again", settled, plan_rebalance)[0]
            first, *rest = settled.nodes
            draining = replace(settled, nodes=(replace(first, takes=False, gives=True), *rest))
            yield measure(f"{what}: drain one", draining, lambda at: plan_drain(at, NodeNumber(1)))[
                0
            ]
            for factor in (FACTOR - 1, FACTOR + 1):
                title = f"{what}: replication factor {factor}"
                yield measure(title, settled, partial(plan_replication_factor, factor=factor))[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.json:
        print(json.dumps([asdict(figure) for figure in figures()]))
        return 0
    print(f"{'':60} {'s':>7} {'copies':>8} {'order':>6} {'replicas':>13} {'primaries':>11}")
    for f in figures():
        replicas, primaries = ("-".join(map(str, pair)) for pair in (f.replicas, f.primaries))
        print(
            f"{f.title:60} {f.seconds:7.2f} {f.copies:8,} {f.order_only:6,} "
            f"{replicas:>13} {primaries:>11}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
