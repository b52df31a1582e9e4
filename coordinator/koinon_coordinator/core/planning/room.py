"""Keeps plans within the room of the nodes: no plan gives a node more bytes than it may take.

A plan first goes by counts of replicas (``planner``). If a node then gets more bytes than it has
room for, the moves onto it that do not fit are undone, the last partitions first, and the plan is
made again with that node's count as a bound on its share: so other nodes take the rest. Counts
ignore sizes: a node may be full of small replicas while another has room for a large one. So the
replicas that such a plan still refuses are placed by size, the largest first, on any node with
room, whatever its share. A replica for which no node has room stays, and is refused. If there is
room everywhere, the plan by counts is the result.

Bytes that a move removes from a node count as room there: a plan may exchange replicas between
nodes that are nearly full. The mover starts each move only once there is room for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from koinon_coordinator.core.planning.draft import Draft
from koinon_coordinator.core.planning.model import Layout, Plan, Refusal, RefusalCode
from koinon_proto.contract.table import NodeNumber

ROUNDS_MAX = 4
"""The most times a plan is made again. Each round bounds one more node, or one node more tightly;
replicas that do not fit after the last round are refused.
"""


def take_back_misfits(draft: Draft, sizes: Sequence[int]) -> tuple[dict[int, list[int]], list[int]]:
    """Restore the rows whose new replicas do not fit. Return their partitions by the full node, and
    the bytes that each node may still take.
    """
    left = [node.room for node in draft.nodes]
    coming: dict[int, list[int]] = defaultdict(list)
    for p in sorted(draft.pinned):
        for i in draft.added(p):
            coming[i].append(p)
            left[i] -= sizes[p]
        for i in draft.dropped(p):
            left[i] += sizes[p]
    refused: dict[int, list[int]] = {}
    full = [i for i in sorted(coming) if left[i] < 0]
    while full:
        node = full.pop()
        while left[node] < 0 and coming[node]:
            p = coming[node].pop()
            if node not in draft.added(p):
                continue  # restored already, since another node lacks room
            for i in draft.added(p):
                left[i] += sizes[p]
            for i in draft.dropped(p):
                left[i] -= sizes[p]
                full.append(i)
            draft.restore(p)
            refused.setdefault(node, []).append(p)
    return refused, left


def place_by_size(
    draft: Draft,
    partitions: Iterable[int],
    leaving: Container[int],
    sizes: Sequence[int],
    left: list[int],
) -> set[int]:
    """Give the places of ``leaving`` nodes in these restored rows to the nodes with the most room,
    the largest replicas first. Return the partitions that could not be placed. ``left`` is the room
    of each node in bytes, and is reduced here.
    """
    placed = set()
    for p in sorted(partitions, key=lambda p: (-sizes[p], p)):
        for old in [i for i in draft.rows[p] if i in leaving]:
            able = [i for i in draft.takers if left[i] >= sizes[p] and draft.may_replace(p, old, i)]
            if not able:
                break
            new = max(able, key=lambda i: (left[i], -i))
            draft.replace(p, old, new)
            left[new] -= sizes[p]
            left[old] += sizes[p]
        else:
            placed.add(p)
        draft.reorder(p)
    return placed


def within_room(make: Callable[[Layout], Plan], layout: Layout) -> Plan:
    """Return the plan of ``make`` for the layout, with bounds for nodes without room for all that
    the first plan gives them.
    """
    plan = make(layout)
    said: dict[NodeNumber, Refusal] = {}
    for _ in range(ROUNDS_MAX):
        short = {r.node_number: r for r in plan.refusals if r.code is RefusalCode.NO_ROOM}
        said = {**short, **said}  # the first text has the number that the node should have got
        if not short:
            break
        held = {balance.node_number: balance.replicas for balance in plan.after}
        bounded = replace(
            layout,
            nodes=tuple(
                replace(node, replicas_max=min(node.replicas_max, held[node.number]))
                if node.number in short
                else node
                for node in layout.nodes
            ),
        )
        before, plan, layout = plan, make(bounded), bounded
        if plan.moves == before.moves:
            break
    if any(r.partition_ids for r in plan.refusals if r.code is RefusalCode.NO_ROOM):
        plan = make(replace(layout, rest_by_size=True))
    left = {r.node_number: r.partition_ids for r in plan.refusals if r.code is RefusalCode.NO_ROOM}
    others = tuple(r for r in plan.refusals if r.code is not RefusalCode.NO_ROOM)
    room = (replace(r, partition_ids=left.get(n, ())) for n, r in sorted(said.items()))
    return replace(plan, refusals=(*others, *room))
