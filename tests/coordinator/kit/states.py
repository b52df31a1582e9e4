"""Short forms for tests of ``ClusterState`` with several replicas and moves."""

from __future__ import annotations

from koinon_coordinator.core.cluster.commands import (
    AcceptPlan,
    AlterPartitions,
    Applied,
    CancelMoves,
    Command,
    ConfirmRegistration,
    FinishMoves,
    ForcePrimary,
    Move,
    PartitionChange,
    PartitionsHosted,
    Reason,
    Registered,
    Rejected,
    Result,
    StartMoves,
    WantPrimaries,
)
from koinon_coordinator.core.cluster.image import NodeRecord
from koinon_coordinator.core.cluster.move_steps import can_finish
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.copy_progress import ProgressOf
from koinon_coordinator.core.decide.room import NodeUse, Room
from koinon_proto.contract.table import (
    NO_NODE,
    NodeNumber,
    PartitionId,
    PartitionRow,
    PartitionStatus,
)

from .support import bootstrapped, hosted_of, register, registered

P0 = PartitionId(0)


def numbers(*nodes: int) -> tuple[NodeNumber, ...]:
    return tuple(NodeNumber(n) for n in nodes)


def rejected(result: object) -> Reason:
    assert isinstance(result, Rejected), result
    return result.reason


def applied(result: object, *, rows: int = 1) -> None:
    assert isinstance(result, Applied), result
    assert (result.rows_changed, result.rejected) == (rows, ()), result


def row_of(state: ClusterState, partition_id: int = 0) -> PartitionRow:
    row = state.row(partition_id)
    assert row is not None
    return row


def record_of(state: ClusterState, number: int) -> NodeRecord:
    record = state.node(NodeNumber(number))
    assert record is not None
    return record


def change_of(
    row: PartitionRow, *in_sync: int, to: int = NO_NODE, skew: tuple[int, int] = (0, 0)
) -> PartitionChange:
    """The row's primary wants this ``in_sync`` (none given: as it is)."""
    return PartitionChange(
        partition_id=row.partition_id,
        primary_epoch=row.primary_epoch + skew[0],
        partition_epoch=row.partition_epoch + skew[1],
        in_sync=numbers(*in_sync) or row.in_sync,
        hand_over_to=NodeNumber(to),
    )


def alter(
    state: ClusterState, *in_sync: int, to: int = NO_NODE, partition_id: int = 0, by: int = NO_NODE
) -> Result:
    """The primary (or ``by``) of a partition proposes."""
    row = row_of(state, partition_id)
    record = record_of(state, by or row.primary)
    return state.apply(
        AlterPartitions(
            node_number=record.info.number,
            node_epoch=record.info.node_epoch,
            changes=(change_of(row, *in_sync, to=to),),
        )
    )


def plan_of(*ways: tuple[tuple[int, ...], tuple[int, ...]]) -> AcceptPlan:
    """A plan that moves partitions 0, 1, … from the first replicas to the second."""
    moves = tuple(
        Move(
            partition_id=PartitionId(p),
            origin=numbers(*origin),
            target=numbers(*target),
            reason="balance",
            plan_id="plan",
            plan_moves=len(ways),
        )
        for p, (origin, target) in enumerate(ways)
    )
    return AcceptPlan(plan_id="plan", moves=moves)


def queue(state: ClusterState, target: tuple[int, ...]) -> Result:
    return state.apply(plan_of((row_of(state).replicas, target)))


def start(state: ClusterState) -> Result:
    return state.apply(StartMoves(partition_ids=(P0,)))


def finish(state: ClusterState) -> Result:
    return state.apply(FinishMoves(partition_ids=(P0,)))


def cancel(state: ClusterState) -> Result:
    return state.apply(CancelMoves(partition_ids=(P0,)))


def moving(state: ClusterState, target: tuple[int, ...]) -> ClusterState:
    """The state with partition 0 on its way to ``target``."""
    applied(queue(state, target))
    applied(start(state))
    return state


def force(state: ClusterState, number: int, *, partition_id: int = 0, skew: int = 0) -> Result:
    epoch = row_of(state, partition_id).partition_epoch + skew
    return state.apply(
        ForcePrimary(
            partition_id=PartitionId(partition_id),
            node_number=NodeNumber(number),
            partition_epoch=epoch,
        )
    )


def ample_room(state: ClusterState, progress: ProgressOf | None = None) -> Room:
    """Return the room of nodes that were all heard and say no bound."""
    return Room(state, {r.info.number: NodeUse() for r in state.nodes}, progress or {})


def restart(state: ClusterState, number: int, *, store: str = "") -> Registered:
    """The node registers anew, with the store known for it or with another one."""
    info = record_of(state, number).info
    epoch = info.node_epoch
    command = register(
        info.node_id,
        store=store or info.store_id,
        last=0 if store else epoch,
        known=epoch,
        registration=f"r{epoch + 1}",
    )
    return registered(state.apply(command))


def next_step(state: ClusterState, partition_id: int = 0) -> Command | None:
    """Return the next command of the leader or the partition's primary; None: all is well."""
    row, config = row_of(state, partition_id), state.config
    move = state.moves.get(row.partition_id)
    assert config is not None
    for record in state.live_nodes:
        if not record.confirmed:
            number, epoch = record.info.number, record.info.node_epoch
            return ConfirmRegistration(node_number=number, node_epoch=epoch)
    if row.primary == NO_NODE:
        return None
    epoch = record_of(state, row.primary).info.node_epoch
    if row.status is PartitionStatus.ASSIGNED:
        return PartitionsHosted(node_number=row.primary, node_epoch=epoch, hosted=hosted_of([row]))
    if move is not None and not move.running:
        return StartMoves(partition_ids=(row.partition_id,))
    if move is not None and can_finish(state.keyspaces.default, row, move):
        return FinishMoves(partition_ids=(row.partition_id,))
    change = None
    missing = [n for n in row.replicas if n not in row.in_sync and record_of(state, n).live]
    if missing:
        change = change_of(row, *row.in_sync, missing[0])
    elif row.wanted_primary in row.in_sync and record_of(state, row.wanted_primary).live:
        change = change_of(row, to=row.wanted_primary)
    elif row.primary in row.removing and set(row.adding) <= set(row.in_sync):
        staying = [n for n in row.target if n in row.in_sync and record_of(state, n).live]
        change = change_of(row, to=staying[0]) if staying else None
    if change is None:
        return None
    return AlterPartitions(node_number=row.primary, node_epoch=epoch, changes=(change,))


def three(**kwargs: int) -> ClusterState:
    """Partition 0 on nodes 1, 2, 3 of four; everything in sync and online; at least 2 in sync."""
    return bootstrapped([(1, 2, 3)], nodes=4, **kwargs)


def wish(state: ClusterState, node: int, partition_id: int = 0) -> object:
    return state.apply(WantPrimaries(wishes=((PartitionId(partition_id), NodeNumber(node)),)))
