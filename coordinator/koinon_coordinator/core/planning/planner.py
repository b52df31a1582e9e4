"""The planner of moves: rebalance, drain, replace, another replication factor, repair.

Goals, in this order:

1. Every partition has its replicas, on distinct nodes.
2. No two of them stand in one rack while there are enough racks; with fewer racks than replicas, no
   rack has more of a partition than it must. Rows that break this are repaired by a rebalance.
3. Counts of replicas are fair: each node has its share by weight, rounded down or up. So nodes of
   equal weight are within 1 of one another. Where a rack is full (three racks, three replicas:
   each rack has one replica of every partition), the share is that of the rack's own nodes.
4. As few replicas move as possible, and none that is fair where it is.
5. Counts of preferred primaries are fair in the same way, by changing the order within rows only:
   that copies no data.

Constraints: partitions with a move queued or under way are counted and not touched. A node that is
down keeps its replicas, and the nodes that take replicas share the others. No plan leaves a
partition with fewer replicas than it had unless fewer are wanted, and none gives a node more bytes
than it has room for (``room``): what cannot be done is refused, with a code. Pure and
deterministic: the same layout gives the same plan. Executed, a rebalance leaves nothing for the
next one.

Algorithm. Shares come first: max-min fair by weight, clipped to what a node or a rack can hold
(``shares``). Then what must change changes: a replica on a node that is to be emptied, a second one
in a rack, a missing one; each place goes to the node furthest below its share that may have it.
Then counts are evened out: units go along shortest paths (over nodes; an edge from u to v is a
partition of u that v may take) from nodes above their share rounded up, or to nodes below theirs
rounded down; mostly a path is one step, and longer where a rack or a replica of the same partition
is in the way (``leveling``). Replicas that are new in the plan go first, since to redirect them
costs nothing; old ones move only where these do not suffice. At last the leads are evened out by
the same search, over rows that change anyway, then over all.

What is optimal: the counts. When no path is left, no other assignment is nearer to the shares, and
without nodes that are down the shares themselves, rounded, can always be reached. The number of
replicas that move: for nodes of equal weight in one rack it is the least possible, the sum of what
is above the shares (or below them, if that is more). With racks or weights each path is a shortest
one, but the sum of them is a heuristic: it might exceed the least where paths of several steps are
needed (of 15,000 small layouts, none did). The number of changes of order is a heuristic too: rows
that change anyway are used first.

Worked example, replication factor 2, one rack; node 4 is new, so every share is 2:

    p0 → 1,2   p1 → 2,3   p2 → 3,1   p3 → 1,2      counts 3,3,2,0, primaries 2,1,1,0

Nodes 1 and 2 are one above. Node 1 leads one partition too many and node 4 lacks one: it gives a
lead, p0 → 4,2. Node 2 leads as many as it should, so it gives a replica that does not lead,
p3 → 1,4. Counts are 2,2,2,2 and primaries 1,1,1,1: no order has to change. Two replicas are copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from koinon_coordinator.core.planning.model import (
    Balance,
    Layout,
    Plan,
    PlannedMove,
    PlanNode,
    Refusal,
    RefusalCode,
    Replicas,
)
from koinon_coordinator.core.planning.plan_builder import PlanBuilder
from koinon_coordinator.core.planning.room import within_room
from koinon_proto.contract.table import NodeNumber

__all__ = [
    "Balance",
    "Layout",
    "Plan",
    "PlanNode",
    "PlannedMove",
    "Refusal",
    "RefusalCode",
    "Replicas",
    "plan_drain",
    "plan_rebalance",
    "plan_repair",
    "plan_replace",
    "plan_replication_factor",
]


def plan_rebalance(layout: Layout) -> Plan:
    """Return the moves that reach all goals of the module's docstring."""
    return within_room(_rebalanced, layout)


def _rebalanced(layout: Layout) -> Plan:
    builder = PlanBuilder(layout)
    nodes, rows = builder.draft.nodes, builder.draft.rows
    factor = layout.replication_factor
    for i, node in enumerate(nodes):
        if node.gives and not node.takes:
            builder.leave(i, f"{builder.name(i)} {node.gives_because}")
    for p in builder.free():
        down = [i for i in rows[p] if not nodes[i].takes and not nodes[i].gives]
        # Too many replicas: those on nodes that are down are dropped before live ones.
        takers = sum(nodes[i].takes for i in rows[p])
        builder.open(p, down[: max(0, factor - takers)] if len(rows[p]) > factor else down, factor)
    builder.compute_shares()
    builder.settle(repair_racks=True)
    builder.even_replicas(copies=True)
    builder.even_leads(everywhere=True)
    _refuse_moving(
        builder,
        (p for p in layout.fixed if len(rows[p]) != factor or any(nodes[i].gives for i in rows[p])),
    )
    builder.refuse_leftovers()
    for i, node in enumerate(nodes):
        kept = [] if node.takes or node.gives else [p for p, row in enumerate(rows) if i in row]
        if kept:
            reason = f"{builder.name(i)} is down and keeps its {len(kept)} replicas"
            builder.refuse(RefusalCode.NODE_DOWN, reason, node=i, partitions=kept)
    return builder.finish()


def plan_drain(layout: Layout, node: NodeNumber) -> Plan:
    """Return the moves that take all replicas off ``node``, and no others.

    In ``layout`` the node already takes no replicas. A replica without another possible node stays,
    and is refused.
    """
    return within_room(partial(_plan_leave, reasons={node: "is being drained"}), layout)


def plan_repair(layout: Layout, dead: frozenset[NodeNumber]) -> Plan:
    """Return the moves that replace the replicas of dead nodes, as far as other nodes may take
    them, and no other moves.
    """
    return within_room(partial(_plan_leave, reasons=dict.fromkeys(dead, "is lost")), layout)


def plan_replace(layout: Layout, old: NodeNumber, new: NodeNumber) -> Plan:
    """Return the moves by which ``new`` takes every place of ``old``, in the same order.

    If ``new`` or its rack has a replica already, or ``new`` has no room, ``old`` keeps its replica,
    and the place is refused.
    """
    builder = PlanBuilder(layout)
    draft = builder.draft
    if old not in draft.index:
        return builder.finish()
    leaving, coming = draft.index[old], draft.index.get(new)
    if coming is None or not draft.takes[coming]:
        name = layout.names.get(new, f"node {new}")
        builder.refuse(RefusalCode.NODE_DOWN, f"{name} takes no replicas", node=coming)
        return builder.finish()
    held = [p for p, row in enumerate(draft.rows) if leaving in row]
    double, crowded = [], []
    for p in held:
        if p in layout.fixed:
            continue
        others = [i for i in draft.rows[p] if i != leaving]
        builder.open(p, others, len(others) + 1)
        if coming in others:
            double.append(p)
        elif draft.may_replace(p, leaving, coming):
            draft.replace(p, leaving, coming)
            builder.cause(p, f"{builder.name(leaving)} is replaced by {builder.name(coming)}")
        else:
            crowded.append(p)
    if double:
        reason = f"{builder.name(coming)} has a replica of {len(double)} of the partitions already"
        builder.refuse(RefusalCode.NO_TARGET, reason, node=coming, partitions=double)
    if crowded:
        reason = f"the rack of {builder.name(coming)} has a replica of {len(crowded)} already"
        builder.refuse(RefusalCode.NO_TARGET, reason, node=coming, partitions=crowded)
    _refuse_moving(builder, (p for p in held if p in layout.fixed))
    return builder.finish()


def plan_replication_factor(layout: Layout, factor: int) -> Plan:
    """Return the moves that give every partition ``factor`` replicas, and no others.

    Added replicas go to the nodes furthest below their shares. Removed are first replicas on nodes
    that take none, then on racks with two, then on the nodes furthest above their shares.
    """
    return within_room(partial(_with_factor, factor=factor), layout)


def _with_factor(layout: Layout, factor: int) -> Plan:
    builder = PlanBuilder(layout)
    draft = builder.draft
    staying = sum(not node.gives for node in draft.nodes)
    if staying < factor:
        reason = f"{factor} replicas need {factor} nodes, there are {staying}"
        builder.refuse(RefusalCode.NOT_ENOUGH_NODES, reason)
        return builder.finish()
    for p in builder.free():
        row = draft.rows[p]
        takers = [i for i in row if draft.takes[i]]
        others = [i for i in row if not draft.takes[i]]
        if len(row) < factor:
            builder.open(p, row, factor)
        elif len(row) > factor:
            builder.open(p, others[: max(0, factor - len(takers))], factor)
    builder.compute_shares()
    builder.settle(repair_racks=False)
    builder.even_replicas(copies=False)
    builder.even_leads(everywhere=False)
    _refuse_moving(builder, (p for p in layout.fixed if len(draft.rows[p]) != factor))
    builder.refuse_leftovers()
    return builder.finish()


def _plan_leave(layout: Layout, reasons: dict[NodeNumber, str]) -> Plan:
    leaving_numbers = reasons.keys()
    builder = PlanBuilder(_without(layout, leaving_numbers))
    draft = builder.draft
    leaving = {draft.index[n] for n in leaving_numbers if n in draft.index}
    for i in leaving:
        builder.leave(i, f"{builder.name(i)} {reasons[draft.nodes[i].number]}")
    held = [p for p, row in enumerate(draft.rows) if not leaving.isdisjoint(row)]
    for p in held:
        if p not in layout.fixed:
            row = draft.rows[p]
            builder.open(p, [i for i in row if i not in leaving], len(row))
    builder.compute_shares()
    builder.settle(repair_racks=False)
    builder.even_replicas(copies=False)
    builder.even_leads(everywhere=False)
    _refuse_moving(builder, (p for p in held if p in layout.fixed))
    builder.refuse_leftovers()
    return builder.finish()


def _without(layout: Layout, leaving: Iterable[NodeNumber]) -> Layout:
    """Return the layout in which these nodes take no replicas."""
    nodes = tuple(
        replace(node, takes=False) if node.number in set(leaving) else node for node in layout.nodes
    )
    return replace(layout, nodes=nodes)


def _refuse_moving(builder: PlanBuilder, partitions: Iterable[int]) -> None:
    if moving := sorted(partitions):
        reason = f"{len(moving)} partitions have a move queued or under way: plan again after it"
        builder.refuse(RefusalCode.MOVE_UNDER_WAY, reason, partitions=moving)
