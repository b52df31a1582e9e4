"""Plans at a leader over a group of one: made, executed and carried out."""

from __future__ import annotations

from collections.abc import Sequence

from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.plan_requests import (
    PlanKind,
    PlanWish,
)
from koinon_proto.contract.table import NO_NODE, PartitionId, PartitionRow

from .states import row_of
from .support import (
    LeaderContext,
    bootstrapped,
    register,
)

P0 = PartitionId(0)


REBALANCE = PlanWish(kind=PlanKind.REBALANCE)


THREE = [(1, 2), (2, 3), (3, 1), (1, 3), (2, 1), (3, 2)]


def with_newcomer(replicas: Sequence[tuple[int, ...]] = THREE) -> ClusterState:
    """Three nodes that hold everything, and a fourth that holds nothing."""
    state = bootstrapped(replicas)
    state.apply(register("n4"))
    return state


async def execute(term: LeaderContext, wish: PlanWish) -> str:
    planned = await term.leadership.operations.plan(wish)
    await term.leadership.operations.execute(wish, planned.plan.plan_id)
    return planned.plan.plan_id


async def carry_out(term: LeaderContext, *node_ids: str) -> None:
    """Do what the nodes do: copy, widen, hand over, take over, until no moves are left. Every node
    that is named lives.
    """
    for _ in range(200):
        await term.live(0.2, *node_ids)
        state = term.replicated.state
        if not state.moves:
            return
        for p, move in list(state.moves.items()):
            row = row_of(state, p)
            if not move.running or row.primary == NO_NODE:
                continue
            missing = [n for n in row.adding if n not in row.in_sync]
            if missing:
                await term.propose(p, *row.in_sync, *missing)
            elif row.wanted_primary in row.in_sync:
                await term.propose(p, to=row.wanted_primary)
    raise AssertionError(dict(term.replicated.state.moves))


def rows(term: LeaderContext) -> tuple[PartitionRow, ...]:
    return term.replicated.state.image().rows


def counts(term: LeaderContext) -> dict[int, int]:
    numbers = [n for row in rows(term) for n in row.replicas]
    return {int(n): numbers.count(n) for n in sorted(set(numbers))}
