"""Decides on operators' requests by the state, before the leader proposes; explains refused
commands. Decisions only read: they return a command, or raise a typed error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from koinon_coordinator.core.cluster.commands import (
    CancelMoves,
    ForcePrimary,
    Reason,
    SetMoveSettings,
    SetNodeStatus,
    WantPrimaries,
)
from koinon_coordinator.core.cluster.image import NodeRecord
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_proto.contract.cluster_errors import (
    MembershipChangeError,
    PlanStaleError,
    UnknownNodeError,
)
from koinon_proto.contract.errors import (
    ClusterNotReadyError,
    InvalidArgumentError,
    KoinonError,
    UnavailableError,
)
from koinon_proto.contract.table import (
    NO_NODE,
    ClusterConfig,
    MoveSettings,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
    PartitionStatus,
)

REPLICATION_FACTOR_MAX = 7
MOVES_PER_NODE_MAX = 1_024
BYTES_PER_SECOND_MAX = (1 << 63) - 1
NAMED_MAX = 10  # partitions that a text names one by one
SETTABLE = (NodeStatus.ACTIVE, NodeStatus.DRAINING, NodeStatus.LEFT)


def named_node(state: ClusterState, node_id: str, field: str = "node_id") -> NodeRecord:
    """Return the node that a request names.

    Raises:
        InvalidArgumentError, UnknownNodeError.
    """
    if not node_id:
        raise InvalidArgumentError(field=field, reason="must not be empty")
    record = state.node_by_id(node_id)
    if record is None:
        raise UnknownNodeError(node_id=node_id)
    return record


def check_bootstrapped(state: ClusterState) -> ClusterConfig:
    """Return the configuration; raise ClusterNotReadyError before the partitions are assigned."""
    config = state.config
    if config is None or not state.bootstrapped:
        raise ClusterNotReadyError(
            registered_nodes=len(state.nodes),
            bootstrap_nodes=0 if config is None else config.bootstrap_nodes,
        )
    return config


def decide_settings(
    state: ClusterState,
    *,
    paused: bool | None,
    bytes_per_second: int | None,
    moves_per_node: int | None,
) -> SetMoveSettings:
    """Return the command that changes the given settings and keeps the others.

    Raises:
        InvalidArgumentError: a number is out of its bounds.
    """
    now = state.move_settings
    settings = MoveSettings(
        paused=now.paused if paused is None else paused,
        bytes_per_second=now.bytes_per_second if bytes_per_second is None else bytes_per_second,
        moves_per_node=now.moves_per_node if moves_per_node is None else moves_per_node,
    )
    if not 1 <= settings.moves_per_node <= MOVES_PER_NODE_MAX:
        raise InvalidArgumentError(
            field="moves_per_node",
            reason="must be at least 1; to stop all moves, pause them"
            if settings.moves_per_node < 1
            else "too many at once",
            limit=MOVES_PER_NODE_MAX,
            actual=settings.moves_per_node,
        )
    if settings.bytes_per_second > BYTES_PER_SECOND_MAX:
        raise InvalidArgumentError(
            field="bytes_per_second",
            reason="too large; 0 means no limit",
            limit=BYTES_PER_SECOND_MAX,
            actual=settings.bytes_per_second,
        )
    return SetMoveSettings(settings=settings)


def decide_status(state: ClusterState, node_id: str, status: int) -> SetNodeStatus:
    """Return the command that sets a node's status.

    Raises:
        InvalidArgumentError, UnknownNodeError, MembershipChangeError.
    """
    record = named_node(state, node_id)
    if status not in SETTABLE:
        names = ", ".join(s.name for s in SETTABLE)
        raise InvalidArgumentError(field="status", reason=f"{status} is not one of {names}")
    number = record.info.number
    wanted = NodeStatus(status)
    if record.left and wanted is not NodeStatus.LEFT:
        raise MembershipChangeError(reason=f"{node_id} has left the cluster for good")
    if wanted is NodeStatus.LEFT and state.is_in_use(number):
        raise MembershipChangeError(reason=in_use(state, number))
    return SetNodeStatus(node_number=number, status=wanted)


def decide_cancel(state: ClusterState, partition_ids: Sequence[int]) -> CancelMoves | None:
    """Return the command that cancels these moves (empty: all), or None if there are none.

    A move that is being turned back already is turned again only if its id is given.

    Raises:
        InvalidArgumentError: there is no such partition.
    """
    if not partition_ids:
        chosen = [m.partition_id for m in state.moves.values() if not m.cancelled]
    else:
        for partition_id in partition_ids:
            check_partition(state, partition_id)
        chosen = [PartitionId(p) for p in dict.fromkeys(partition_ids) if p in state.moves]
    return CancelMoves(partition_ids=tuple(chosen)) if chosen else None


def decide_restore(state: ClusterState) -> WantPrimaries | None:
    """Return the command that gives the lead back to preferred replicas that are live and in sync,
    or None if all of them lead.
    """
    wishes = tuple(
        (row.partition_id, preferred)
        for row in all_rows(state)
        if not row.unused
        and row.primary not in (NO_NODE, preferred := row.replicas[0])
        and preferred in row.in_sync
        and (record := state.node(preferred)) is not None
        and record.live
    )
    return WantPrimaries(wishes=wishes) if wishes else None


def decide_force(state: ClusterState, partition_id: int, node_id: str) -> ForcePrimary:
    """Return the command that elects this replica by force.

    Raises:
        ClusterNotReadyError, InvalidArgumentError, UnknownNodeError
        MembershipChangeError: the partition has a primary, or the node cannot become primary.
    """
    check_bootstrapped(state)
    row = check_partition(state, partition_id)
    record = named_node(state, node_id)
    number = record.info.number
    if row.status is not PartitionStatus.OFFLINE:
        raise MembershipChangeError(
            reason=f"partition {partition_id} is led by {names(state, (row.primary,))}: "
            "nothing has to be forced"
        )
    if row.unused:
        raise MembershipChangeError(reason=f"partition {partition_id} belongs to no keyspace")
    if number not in row.replicas:
        raise MembershipChangeError(
            reason=f"{node_id} is not a replica of partition {partition_id}; its replicas are "
            f"{names(state, row.replicas)}"
        )
    if not record.live:
        raise MembershipChangeError(reason=f"{node_id} is down: it cannot lead anything")
    return ForcePrimary(
        partition_id=row.partition_id, node_number=number, partition_epoch=row.partition_epoch
    )


def refusal(
    reason: Reason, *, state: ClusterState, node: NodeNumber = NO_NODE, plan_id: str = ""
) -> KoinonError:
    """Return the typed error for a command that was refused when it was applied."""
    name = names(state, (node,)) if node != NO_NODE else ""
    if reason is Reason.NODE_IN_USE:
        return MembershipChangeError(reason=in_use(state, node))
    if reason is Reason.NODE_LEFT:
        return MembershipChangeError(reason=f"{name} has left the cluster for good")
    if reason is Reason.UNKNOWN_NODE:
        return UnknownNodeError(node_id=name)
    if reason in (Reason.MOVED_ON, Reason.BAD_TARGET):
        return PlanStaleError(plan_id=plan_id, current_plan_id="")
    if reason in (Reason.BAD_VALUE, Reason.UNKNOWN_PARTITION):
        return InvalidArgumentError(field="request", reason=reason.value)
    if reason in (Reason.NOT_A_REPLICA, Reason.NOT_OFFLINE, Reason.NOTHING_CURRENT):
        return MembershipChangeError(reason=f"refused, the partition has changed: {reason.value}")
    return UnavailableError(reason=f"refused, the cluster has changed: {reason.value}")


# --- nodes in use ------------------------------------------------------------------------------


def in_use(state: ClusterState, number: NodeNumber) -> str:
    """Return what still keeps a node in the cluster, and what the operator can do about it."""
    name = names(state, (number,))
    held = [row for row in all_rows(state) if number in row.replicas]
    if not held:
        moves = sum(number in move.target for move in state.moves.values())
        return f"{name} is part of {counted(moves, 'move')} under way: wait for them or cancel them"
    last = [row.partition_id for row in held if row.in_sync == (number,)]
    only = ""
    if last:
        verb = "hold" if len(last) > 1 else "holds"
        only = f" ({len(last)} of them {verb} the last in-sync copy: {listed(last)})"
    return f"{name} is still a replica of {counted(len(held), 'partition')}{only}: drain it first"


# --- helpers -----------------------------------------------------------------------------------


def all_rows(state: ClusterState) -> list[PartitionRow]:
    table = state.table()
    return list(table.rows) if table is not None else []


def check_partition(state: ClusterState, partition_id: int) -> PartitionRow:
    """Return the row; raise InvalidArgumentError if there is no such partition."""
    row = state.row(partition_id)
    if row is None:
        count = len(all_rows(state))
        raise InvalidArgumentError(
            field="partition_id",
            reason=f"there is no such partition; they are 0 to {count - 1}",
            limit=max(0, count - 1),
            actual=partition_id,
        )
    return row


def names(state: ClusterState, numbers: Iterable[NodeNumber]) -> str:
    """Return the nodes' ids, for people."""
    records = [(n, state.node(n)) for n in numbers]
    return ", ".join(f"node {n}" if r is None else r.info.node_id for n, r in records)


def listed(partition_ids: Sequence[int]) -> str:
    """Return the first partition ids as text, and the number of the others."""
    text = ", ".join(str(p) for p in partition_ids[:NAMED_MAX])
    more = len(partition_ids) - NAMED_MAX
    return f"{text} and {more} more" if more > 0 else text


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
