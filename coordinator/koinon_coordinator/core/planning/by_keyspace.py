"""One plan for all keyspaces: each is planned by itself, on the nodes of its pool. Pure.

So every keyspace is spread evenly over its nodes, independent of the others, since each has its own
load. Counts over all keyspaces differ by the rounding of each: at most one replica per keyspace and
node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from koinon_coordinator.core.planning.model import Balance, Layout, Plan, PlanNode, Refusal
from koinon_proto.contract.table import NodeNumber, PartitionId


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyspaceLayout:
    """A keyspace's layout, in which partitions are counted from ``base``."""

    name: str
    base: int
    layout: Layout


def in_pool(nodes: Sequence[PlanNode], pool: str) -> tuple[PlanNode, ...]:
    """Return the nodes as a keyspace of the pool sees them: nodes of other pools count as being
    emptied.
    """
    return tuple(
        node
        if node.pool == pool
        else replace(
            node,
            takes=False,
            gives=True,
            gives_because=node.gives_because if node.gives else f"is not in pool {pool!r}",
        )
        for node in nodes
    )


def plan_each(parts: Sequence[KeyspaceLayout], make: Callable[[Layout], Plan]) -> Plan:
    """Return the plans of all keyspaces as one. Each plan has the room that the ones before it
    leave.
    """
    plans: list[tuple[KeyspaceLayout, Plan]] = []
    taken: Counter[NodeNumber] = Counter()  # bytes, by the plans so far
    for part in parts:
        plan = make(_with_less_room(part.layout, taken))
        plans.append((part, plan))
        taken.update(_bytes_taken(part.layout, plan))
    if len(plans) == 1 and not plans[0][0].base:
        return plans[0][1]
    return Plan(
        plan_id=_digest(plan.plan_id for _, plan in plans),
        moves=tuple(
            replace(move, partition_id=PartitionId(part.base + move.partition_id))
            for part, plan in plans
            for move in plan.moves
        ),
        before=_summed(plan.before for _, plan in plans),
        after=_summed(plan.after for _, plan in plans),
        refusals=tuple(
            _of_keyspace(refusal, part) for part, plan in plans for refusal in plan.refusals
        ),
    )


def _with_less_room(layout: Layout, taken: Counter[NodeNumber]) -> Layout:
    nodes = tuple(replace(node, room=node.room - taken[node.number]) for node in layout.nodes)
    return replace(layout, nodes=nodes)


def _bytes_taken(layout: Layout, plan: Plan) -> Counter[NodeNumber]:
    """Return the bytes that the plan adds to each node, less the bytes that it removes."""
    taken: Counter[NodeNumber] = Counter()
    if layout.sizes:
        for move in plan.moves:
            size = layout.sizes[move.partition_id]
            taken.update(dict.fromkeys(set(move.target) - set(move.origin), size))
            taken.subtract(dict.fromkeys(set(move.origin) - set(move.target), size))
    return taken


def _summed(balances: Iterable[Sequence[Balance]]) -> tuple[Balance, ...]:
    """Return each node's totals over all keyspaces."""
    replicas: Counter[int] = Counter()
    primaries: Counter[int] = Counter()
    nodes = {}
    for balance in balances:
        for one in balance:
            nodes[one.node_number] = one
            replicas[one.node_number] += one.replicas
            primaries[one.node_number] += one.primaries
    return tuple(
        replace(nodes[n], replicas=replicas[n], primaries=primaries[n]) for n in sorted(nodes)
    )


def _of_keyspace(refusal: Refusal, part: KeyspaceLayout) -> Refusal:
    return replace(
        refusal,
        reason=f"keyspace {part.name}: {refusal.reason}",
        partition_ids=tuple(PartitionId(part.base + p) for p in refusal.partition_ids),
    )


def _digest(plan_ids: Iterable[str]) -> str:
    return blake2b("".join(plan_ids).encode(), digest_size=8).hexdigest()
