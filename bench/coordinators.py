"""Benchmarks of the coordinator: Raft between three processes, and the planner."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.figures import Aim, Figure
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
from tests.raft.processes import Cluster

COMMAND_BYTES = 100
TARGETS = {1: 500, 16: 5_000, 64: 15_000}
SIZES = ((1_024, 1_000), (65_536, 100))
FACTOR = 3
AIMS = tuple(Aim("durable proposals", f"{n} callers", rate) for n, rate in TARGETS.items())


def raft(*, seconds: float = 5.0, failovers: int = 10) -> Iterator[Figure]:
    """Measure durable proposals, and failovers by kill -9 under load, of three real members.

    Raises AssertionError if an acknowledged entry is lost.
    """
    with tempfile.TemporaryDirectory() as scratch, Cluster(Path(scratch), size=3) as cluster:
        for callers in TARGETS:
            load = {"proposers": callers, "size": COMMAND_BYTES}
            leader = cluster.wait_for_leader()
            leader.call("load", seconds=0.5, tag="warm", **load)
            result = leader.call("load", seconds=seconds, tag="rate", **load)
            rate = result["acknowledged"] / result["seconds"]
            yield Figure("durable proposals", f"{callers} callers", rate, "/s")
        acknowledged: set[str] = set()
        for turn in range(failovers):
            yield Figure("failover", "kill -9", _fail_over(cluster, turn, acknowledged), "s")
        leader = cluster.wait_for_leader()
        leader.call("barrier")
        lost = acknowledged - set(leader.call("dump"))
        assert not lost, f"{len(lost)} of {len(acknowledged)} acknowledged entries were lost"


def _fail_over(cluster: Cluster, turn: int, acknowledged: set[str]) -> float:
    """Kill the leader under load; return the seconds until another leader accepts a proposal."""
    leader = cluster.wait_for_leader()
    tag = f"t{turn}-"
    load = leader.begin("load", proposers=16, seconds=30, size=COMMAND_BYTES, tag=tag, report=True)
    leader.wait_for_progress(200)
    killed_at = cluster.clock()
    leader.kill()
    acknowledged |= load.acknowledged_so_far()
    cluster.wait_for_leader(timeout_s=30).call("propose", command=f"after-{turn}")
    took = cluster.clock() - killed_at
    acknowledged.add(f"after-{turn}")
    leader.start()
    return float(took)


def planner() -> Iterator[Figure]:
    """Measure the seconds of planning, the replicas to copy, and the balance of the nodes after."""
    for partitions, nodes in SIZES:
        for racks in (1, 3, 10, nodes):
            column = f"{partitions:,} x {FACTOR} on {nodes:,}, {racks} racks"
            for used in (nodes - 1, nodes // 2, FACTOR):
                layout = _placed(partitions, nodes, racks, used)
                plan = yield from _planned(f"rebalance from {used:,}", column, layout,
                                           plan_rebalance)  # fmt: skip
            rows = list(layout.replicas)
            for move in plan.moves:
                rows[move.partition_id] = move.target
            settled = replace(layout, replicas=tuple(rows))
            yield from _planned("rebalance again", column, settled, plan_rebalance)
            first, *rest = settled.nodes
            draining = replace(settled, nodes=(replace(first, takes=False, gives=True), *rest))
            drain: Callable[[Layout], Plan] = lambda at: plan_drain(at, NodeNumber(1))  # noqa: E731
            yield from _planned("drain one", column, draining, drain)
            for factor in (FACTOR - 1, FACTOR + 1):
                make = partial(plan_replication_factor, factor=factor)
                yield from _planned(f"replication factor {factor}", column, settled, make)


def _placed(partitions: int, nodes: int, racks: int, used: int) -> Layout:
    """Return a layout in which only the first ``used`` nodes have replicas."""
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


def _planned(
    row: str, column: str, layout: Layout, make: Callable[[Layout], Plan]
) -> Generator[Figure, None, Plan]:
    began = time.perf_counter()
    plan = make(layout)
    took = time.perf_counter() - began
    takers = {node.number for node in layout.nodes if node.takes}
    counts = [balance.replicas for balance in plan.after if balance.node_number in takers]
    yield Figure(row, column, took, "s")
    copies = sum(len(set(move.target) - set(move.origin)) for move in plan.moves)
    yield Figure(f"{row}, copies", column, copies)
    yield Figure(f"{row}, greatest over mean", column, max(counts) / statistics.mean(counts))
    return plan
