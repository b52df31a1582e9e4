"""The steps of moves, which change a partition's replicas, as functions of its row. Pure.

A move is queued (only ``ClusterState.moves`` knows it), then runs (the row names the replicas of
``origin`` and of ``target``), then is finished (the row is the target's) or turned back: then
it runs the other way. While it runs,

* ``replicas`` are the target's, in its order, then the replicas to be removed;
* ``adding`` are the target's new replicas; none for a move that was turned back, whose target were
  replicas all along;
* the primary adds to ``in_sync``. Only the last step removes from it, and keeps at least
  ``min_in_sync`` members, including the primary. So no step can lose an acknowledged write.

Each step is one committed command. If a process dies between two steps, the row and the move
together determine the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from koinon_coordinator.core.cluster.commands import (
    AcceptPlan,
    Applied,
    CancelMoves,
    FinishMoves,
    Move,
    Reason,
    Rejected,
    Result,
    SetMoveSettings,
    StartMoves,
    WantPrimaries,
)
from koinon_coordinator.core.cluster.data import ClusterData, Handlers
from koinon_coordinator.core.cluster.image import NodeRecord
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import (
    NO_NODE,
    NodeNumber,
    PartitionId,
    PartitionRow,
    PartitionStatus,
)


def plan_refusal(
    plan: Iterable[Move],
    row_of: Callable[[int], PartitionRow | None],
    moves: Mapping[PartitionId, Move],
    nodes: Mapping[NodeNumber, NodeRecord],
) -> Reason | None:
    """Return the reason why a plan cannot be queued as a whole, or None."""
    seen: set[PartitionId] = set()
    for move in plan:
        row = row_of(move.partition_id)
        if row is None:
            return Reason.UNKNOWN_PARTITION
        is_taken = move.partition_id in moves or move.partition_id in seen
        if is_taken or row.replicas != move.origin or row.adding or row.removing:
            return Reason.MOVED_ON
        if not _is_target(move.target, nodes):
            return Reason.BAD_TARGET
        seen.add(move.partition_id)
    return None


def started(row: PartitionRow, move: Move, *, version: int) -> PartitionRow:
    """Return the row on its way from ``move.origin`` to ``move.target``."""
    return _redirected(row, move.target, move.added, version)


def can_finish(keyspace: Keyspace, row: PartitionRow, move: Move) -> bool:
    """Return whether the replicas to be removed are not needed any more."""
    return (
        move.running
        and row.status is PartitionStatus.ONLINE
        and row.primary in move.target
        and set(row.in_sync).issuperset(row.adding)
        and _is_held_by(keyspace, row, move.target)
    )


def finished(row: PartitionRow, move: Move, *, version: int) -> PartitionRow:
    """Return the row with only the target's replicas, and a wish for the preferred primary."""
    in_sync = tuple(n for n in row.in_sync if n in move.target)
    preferred, wanted = move.target[0], row.wanted_primary
    if preferred in in_sync:
        wanted = preferred
    return replace(
        row,
        replicas=move.target,
        in_sync=in_sync,
        adding=(),
        removing=(),
        partition_epoch=row.partition_epoch + 1,
        changed_at=version,
        wanted_primary=NO_NODE if wanted == row.primary else wanted,
    )


def can_turn_back(keyspace: Keyspace, row: PartitionRow, move: Move) -> bool:
    """Return whether a running move may be turned back.

    Only if enough replicas of its origin are in sync: otherwise it would wait for copies that may
    never come back. A move that was turned back already is turned again only if too few replicas of
    its present target are in sync.
    """
    return (
        move.running
        and _is_held_by(keyspace, row, move.origin)
        and not (move.cancelled and _is_held_by(keyspace, row, move.target))
    )


def turned_back(row: PartitionRow, move: Move, *, version: int) -> tuple[PartitionRow, Move]:
    """Return the row, and the move in the opposite direction."""
    back = replace(move, origin=move.target, target=move.origin, cancelled=not move.cancelled)
    adding = () if back.cancelled else back.added
    return _redirected(row, back.target, adding, version), back


def wished(row: PartitionRow, node: NodeNumber, *, version: int) -> PartitionRow | None:
    """Return the row with ``node`` as wanted primary (``NO_NODE``, or the present primary: no
    wish); the same row if nothing changes, None if the node is no replica that stays.
    """
    if node != NO_NODE and node not in row.target:
        return None
    wanted = NO_NODE if node == row.primary else node
    if wanted == row.wanted_primary:
        return row
    return replace(
        row,
        wanted_primary=wanted,
        partition_epoch=row.partition_epoch + 1,
        changed_at=version,
    )


def _redirected(
    row: PartitionRow,
    target: tuple[NodeNumber, ...],
    adding: tuple[NodeNumber, ...],
    version: int,
) -> PartitionRow:
    """Return the row with another target. The target's first replica should lead if the primary has
    to go, or if another node was preferred so far.
    """
    removing = tuple(n for n in row.replicas if n not in target)
    wanted = row.wanted_primary
    if row.primary in removing or target[0] != row.target[0]:
        wanted = target[0]
    return replace(
        row,
        replicas=target + removing,
        adding=adding,
        removing=removing,
        partition_epoch=row.partition_epoch + 1,
        changed_at=version,
        wanted_primary=NO_NODE if wanted == row.primary or wanted in removing else wanted,
    )


def _is_held_by(keyspace: Keyspace, row: PartitionRow, replicas: Sequence[NodeNumber]) -> bool:
    """Return whether enough of ``replicas`` are in sync for them to be the only replicas."""
    in_sync = sum(n in row.in_sync for n in replicas)
    return in_sync >= keyspace.min_in_sync_among(len(replicas))


def _is_target(target: Sequence[NodeNumber], nodes: Mapping[NodeNumber, NodeRecord]) -> bool:
    return (
        bool(target)
        and len(set(target)) == len(target)
        and all((record := nodes.get(n)) is not None and not record.left for n in target)
    )


# --- commands ----------------------------------------------------------------------------------


def _accept_plan(data: ClusterData, command: AcceptPlan) -> Result:
    reason = plan_refusal(command.moves, data.row, data.moves, data.nodes)
    if reason is not None:
        return Rejected(reason=reason)
    for move in command.moves:
        data.moves[move.partition_id] = replace(move, running=False, cancelled=False)
    return Applied(rows_changed=len(command.moves))


def _start_moves(data: ClusterData, command: StartMoves) -> Result:
    after: list[PartitionRow] = []
    rejected: list[PartitionId] = []
    for p in command.partition_ids:
        move = data.moves.get(p)
        if move is None or move.running:
            rejected.append(p)
            continue
        after.append(started(data.rows[p], move, version=data.version + 1))
        data.moves[p] = replace(move, running=True)
    return data.change_to(after, rejected)


def _finish_moves(data: ClusterData, command: FinishMoves) -> Result:
    after: list[PartitionRow] = []
    rejected: list[PartitionId] = []
    for p in command.partition_ids:
        move = data.moves.get(p)
        keyspace = data.keyspaces.of(p) if move is not None else None
        if not (move and keyspace and can_finish(keyspace, data.rows[p], move)):
            rejected.append(p)
            continue
        after.append(finished(data.rows[p], move, version=data.version + 1))
        del data.moves[p]
    return data.change_to(after, rejected)


def _cancel_moves(data: ClusterData, command: CancelMoves) -> Result:
    after: list[PartitionRow] = []
    rejected: list[PartitionId] = []
    dropped = 0
    for p in command.partition_ids:
        move = data.moves.get(p)
        keyspace = data.keyspaces.of(p) if move is not None else None
        if move is not None and not move.running:
            del data.moves[p]
            dropped += 1
        elif move and keyspace and can_turn_back(keyspace, data.rows[p], move):
            row, data.moves[p] = turned_back(data.rows[p], move, version=data.version + 1)
            after.append(row)
        else:
            rejected.append(p)
    turned = data.change_to(after, rejected)
    return replace(turned, rows_changed=turned.rows_changed + dropped)


def _set_move_settings(data: ClusterData, command: SetMoveSettings) -> Result:
    settings = command.settings
    if data.config is None:
        return Rejected(reason=Reason.NO_CLUSTER)
    if settings.moves_per_node < 1 or settings.bytes_per_second < 0:
        return Rejected(reason=Reason.BAD_VALUE)
    if settings != data.move_settings:
        data.move_settings = settings
        data.version += 1
    return Applied()


def _want_primaries(data: ClusterData, command: WantPrimaries) -> Result:
    after: list[PartitionRow] = []
    rejected: list[PartitionId] = []
    for p, node in dict(command.wishes).items():
        row = data.row(p)
        wanted = row and wished(row, node, version=data.version + 1)
        if wanted is None:
            rejected.append(p)
        elif wanted is not row:
            after.append(wanted)
    return data.change_to(after, rejected)


HANDLERS: Handlers = {
    AcceptPlan: _accept_plan,
    StartMoves: _start_moves,
    FinishMoves: _finish_moves,
    CancelMoves: _cancel_moves,
    SetMoveSettings: _set_move_settings,
    WantPrimaries: _want_primaries,
}
