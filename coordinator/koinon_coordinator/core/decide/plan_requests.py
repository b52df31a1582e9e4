"""Builds the planner's input from the state, for operators' requests and for repairs. Pure.

Planning counts replicas where they will be after all moves, and does not touch partitions that are
being moved. Each keyspace is planned by itself (``by_keyspace``). A node that a plan will empty
(drain or replace) counts as draining already, so that the plan that was shown and the executed one
are the same.

Planning may take a second, so it has two steps: the first copies its input from the state; the
second may run in a thread while the state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from koinon_coordinator.core.cluster.commands import AcceptPlan, Move
from koinon_coordinator.core.cluster.image import NodeRecord
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.admin_requests import (
    REPLICATION_FACTOR_MAX,
    all_rows,
    check_bootstrapped,
    named_node,
)
from koinon_coordinator.core.decide.load_plans import (
    LoadFacts,
    LoadTask,
    PlanBy,
    load_aim,
    load_task,
)
from koinon_coordinator.core.decide.move_scheduler import REPAIR_PREFIX
from koinon_coordinator.core.decide.room import Room
from koinon_coordinator.core.planning.by_keyspace import KeyspaceLayout, in_pool, plan_each
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
from koinon_proto.contract.cluster_errors import MembershipChangeError
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import NO_NODE, NodeNumber, NodeStatus, PartitionId

MOVES_PER_COMMAND_MAX = 2_048
"""The most moves of one ``AcceptPlan``, which has to fit into a log entry. A larger plan is queued
in several commands, each of them atomic.
"""


class PlanKind(Enum):
    REBALANCE = "rebalance"
    DRAIN = "drain"
    REPLACE = "replace"
    REPLICATION_FACTOR = "replication factor"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanWish:
    """A request for a plan; fields that the kind does not need are ignored."""

    kind: PlanKind
    node_id: str = ""
    with_node_id: str = ""
    replication_factor: int = 0
    keyspace: str = ""
    """The keyspace for a change of the replication factor; "": ``default``. Other kinds of plans
    cover all keyspaces.
    """
    by: PlanBy = PlanBy.COUNT
    """The measure of a rebalance; so are the next two, for plans by load or by bytes."""
    target_percent: int = 0
    leaders_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan, and the node that it empties (``NO_NODE``: none)."""

    plan: Plan
    emptied: NodeNumber = NO_NODE


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTask:
    """The input of planning; equal tasks give the same plan as long as the nodes' room suffices.
    ``successor`` takes the places of ``emptied``; ``NO_NODE``: the kind has none.
    """

    wish: PlanWish
    layouts: tuple[KeyspaceLayout, ...]
    emptied: NodeNumber = NO_NODE
    successor: NodeNumber = NO_NODE


def plan_task(state: ClusterState, wish: PlanWish, room: Room) -> PlanTask:
    """Return the input of planning from the state and the nodes' room.

    Raises:
        ClusterNotReadyError, UnknownNodeError, InvalidArgumentError, UnknownKeyspaceError
        MembershipChangeError: the node cannot give or take replicas.
    """
    check_bootstrapped(state)
    if wish.kind is PlanKind.REBALANCE:
        return PlanTask(wish=wish, layouts=layouts_of(state, room))
    if wish.kind is PlanKind.REPLICATION_FACTOR:
        keyspace = state.keyspaces.named(wish.keyspace)
        _check_factor(state, keyspace, wish.replication_factor)
        return PlanTask(wish=wish, layouts=(layout_of(state, keyspace, room),))
    emptied = _member(named_node(state, wish.node_id)).info.number
    layouts = _holding(layouts_of(state, room, emptied=(emptied,)), emptied)
    if wish.kind is PlanKind.DRAIN:
        return PlanTask(wish=wish, layouts=layouts, emptied=emptied)
    successor = _member(named_node(state, wish.with_node_id, "with_node_id"))
    if successor.info.number == emptied:
        raise InvalidArgumentError(field="with_node_id", reason="must be another node")
    if successor.info.status is not NodeStatus.ACTIVE:
        raise MembershipChangeError(
            reason=f"{wish.with_node_id} is {successor.info.status.name.lower()}: "
            "it cannot take any replicas"
        )
    return PlanTask(wish=wish, layouts=layouts, emptied=emptied, successor=successor.info.number)


def plan_task_by_load(state: ClusterState, wish: PlanWish, facts: LoadFacts) -> LoadTask:
    """Return the input of planning by load or by bytes.

    Raises:
        ClusterNotReadyError, InvalidArgumentError
    """
    check_bootstrapped(state)
    nodes = _with_room(_plan_nodes(state, ()), facts.room)
    aim = load_aim(wish.target_percent, wish.leaders_only)
    return load_task(state, nodes, wish.by, aim, facts)


def planned(task: PlanTask) -> Planned:
    """Return the plan. Reads only the task, so it may run in any thread."""
    return Planned(plan=plan_each(task.layouts, _planner(task)), emptied=task.emptied)


def _planner(task: PlanTask) -> Callable[[Layout], Plan]:
    """Return the function that plans one keyspace."""
    kind = task.wish.kind
    if kind is PlanKind.REBALANCE:
        return plan_rebalance
    if kind is PlanKind.REPLICATION_FACTOR:
        return partial(plan_replication_factor, factor=task.wish.replication_factor)
    if kind is PlanKind.DRAIN:
        return partial(plan_drain, node=task.emptied)
    return partial(plan_replace, old=task.emptied, new=task.successor)


def plan(state: ClusterState, wish: PlanWish, room: Room) -> Planned:
    """Return the plan for the request, at once. Raises the errors of ``plan_task``."""
    return planned(plan_task(state, wish, room))


def accepted(plan_id: str, plan: Plan) -> list[AcceptPlan]:
    """Return the commands that queue the plan's moves; none for a plan without moves."""
    moves = [
        Move(
            partition_id=move.partition_id,
            origin=move.origin,
            target=move.target,
            reason=move.reason,
            plan_id=plan_id,
            plan_moves=len(plan.moves),
        )
        for move in plan.moves
    ]
    return [
        AcceptPlan(plan_id=plan_id, moves=tuple(moves[i : i + MOVES_PER_COMMAND_MAX]))
        for i in range(0, len(moves), MOVES_PER_COMMAND_MAX)
    ]


# --- repair ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairTask:
    """Replicas on abandoned nodes, in partitions with a primary to copy from. Equal tasks have
    equal plans.
    """

    nodes: tuple[PlanNode, ...]
    lost: frozenset[NodeNumber]
    partition_ids: frozenset[PartitionId]


def repair_task(state: ClusterState, lost: Collection[NodeNumber]) -> RepairTask | None:
    """Return the repairs that are due once these nodes are abandoned, or None."""
    if not lost or not state.bootstrapped or state.move_settings.paused:
        return None
    partition_ids = frozenset(
        row.partition_id
        for row in all_rows(state)
        if row.primary != NO_NODE
        and row.partition_id not in state.moves
        and any(n in lost for n in row.replicas)
    )
    if not partition_ids:
        return None
    return RepairTask(
        nodes=_plan_nodes(state, ()), lost=frozenset(lost), partition_ids=partition_ids
    )


def repair_layouts(state: ClusterState, task: RepairTask, room: Room) -> tuple[KeyspaceLayout, ...]:
    """Return the planner's input for a repair, in which only the task's partitions may move."""
    concerned = [
        keyspace
        for keyspace in state.keyspaces
        if not task.partition_ids.isdisjoint(keyspace.partition_ids)
    ]
    return tuple(
        layout_of(state, keyspace, room, movable=task.partition_ids) for keyspace in concerned
    )


def repair(layouts: tuple[KeyspaceLayout, ...], task: RepairTask) -> Plan:
    """Return the plan that replaces the lost nodes in the task's partitions. Partitions that are
    being moved or are offline are no refusals: they become a task of their own later. Reads only
    its arguments, so it may run in any thread.
    """
    plan = plan_each(layouts, partial(plan_repair, dead=task.lost))
    refusals = tuple(r for r in plan.refusals if r.code is not RefusalCode.MOVE_UNDER_WAY)
    return replace(plan, refusals=refusals)


def repair_plan_id(plan: Plan) -> str:
    return f"{REPAIR_PREFIX}{plan.plan_id}"


# --- layouts -----------------------------------------------------------------------------------


def layouts_of(
    state: ClusterState, room: Room, *, emptied: Collection[NodeNumber] = ()
) -> tuple[KeyspaceLayout, ...]:
    """Return the planner's input for all keyspaces, with ``emptied`` counted as draining."""
    return tuple(layout_of(state, keyspace, room, emptied=emptied) for keyspace in state.keyspaces)


def layout_of(
    state: ClusterState,
    keyspace: Keyspace,
    room: Room,
    *,
    emptied: Collection[NodeNumber] = (),
    movable: Container[PartitionId] | None = None,
) -> KeyspaceLayout:
    """Return the planner's input for a keyspace. ``movable``: only these partitions may move."""
    replicas: list[tuple[NodeNumber, ...]] = []
    fixed: set[PartitionId] = set()
    for place, p in enumerate(map(PartitionId, keyspace.partition_ids)):
        row, move = state.row(p), state.moves.get(p)
        assert row is not None, "every partition of a keyspace has a row"
        replicas.append(row.replicas if move is None else move.target)
        if move is not None or (movable is not None and p not in movable):
            fixed.add(PartitionId(place))
    layout = Layout(
        nodes=in_pool(_with_room(_plan_nodes(state, emptied), room), keyspace.pool),
        replicas=tuple(replicas),
        fixed=frozenset(fixed),
        replication_factor=keyspace.replication_factor,
        names={record.info.number: record.info.node_id for record in state.nodes},
        sizes=tuple(room.size(PartitionId(p)) for p in keyspace.partition_ids),
    )
    return KeyspaceLayout(name=keyspace.name, base=keyspace.base, layout=layout)


def _holding(layouts: tuple[KeyspaceLayout, ...], node: NodeNumber) -> tuple[KeyspaceLayout, ...]:
    """Return the layouts in which the node has replicas, or the first layout if it has none."""
    held = tuple(
        part for part in layouts if any(node in replicas for replicas in part.layout.replicas)
    )
    return held or layouts[:1]


def _plan_nodes(state: ClusterState, emptied: Collection[NodeNumber]) -> tuple[PlanNode, ...]:
    return tuple(
        PlanNode(
            number=info.number,
            rack=info.rack,
            weight=info.weight,
            takes=info.status is NodeStatus.ACTIVE and info.number not in emptied,
            gives=record.draining or info.number in emptied,
            pool=info.pool,
        )
        for record in state.nodes
        if not record.left
        for info in (record.info,)
    )


def _with_room(nodes: Sequence[PlanNode], room: Room) -> tuple[PlanNode, ...]:
    known = room.for_plans
    return tuple(
        replace(node, room=known[node.number][0], room_limit=known[node.number][1])
        if node.number in known
        else replace(node, room_known=False)
        for node in nodes
    )


def _member(record: NodeRecord) -> NodeRecord:
    if record.left:
        raise MembershipChangeError(reason=f"{record.info.node_id} has left the cluster for good")
    return record


def _check_factor(state: ClusterState, keyspace: Keyspace, factor: int) -> None:
    if not 1 <= factor <= REPLICATION_FACTOR_MAX:
        raise InvalidArgumentError(
            field="replication_factor",
            reason=f"must be from 1 to {REPLICATION_FACTOR_MAX}",
            limit=REPLICATION_FACTOR_MAX,
            actual=factor,
        )
    members = sum(not r.left and r.info.pool == keyspace.pool for r in state.nodes)
    if factor > members:
        of_pool = f" in pool {keyspace.pool!r}" if keyspace.pool else ""
        raise InvalidArgumentError(
            field="replication_factor",
            reason=f"above the number of nodes{of_pool}",
            limit=members,
            actual=factor,
        )
