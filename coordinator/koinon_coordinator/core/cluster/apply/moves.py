"""Applies plans, the steps of their moves, and the settings of moves: rules in ``moves``."""

from __future__ import annotations

from dataclasses import replace

from koinon_coordinator.core.cluster import moves
from koinon_coordinator.core.cluster.commands import (
    AcceptPlan,
    Applied,
    CancelMoves,
    FinishMoves,
    Reason,
    Rejected,
    Result,
    SetMoveSettings,
    StartMoves,
)
from koinon_coordinator.core.cluster.data import ClusterData, Handlers
from koinon_proto.contract.table import PartitionId, PartitionRow


def _accept_plan(data: ClusterData, command: AcceptPlan) -> Result:
    reason = moves.plan_refusal(command.moves, data.row, data.moves, data.nodes)
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
        after.append(moves.started(data.rows[p], move, version=data.version + 1))
        data.moves[p] = replace(move, running=True)
    return data.change_to(after, rejected)


def _finish_moves(data: ClusterData, command: FinishMoves) -> Result:
    after: list[PartitionRow] = []
    rejected: list[PartitionId] = []
    for p in command.partition_ids:
        move = data.moves.get(p)
        keyspace = data.keyspaces.of(p) if move is not None else None
        if not (move and keyspace and moves.can_finish(keyspace, data.rows[p], move)):
            rejected.append(p)
            continue
        after.append(moves.finished(data.rows[p], move, version=data.version + 1))
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
        elif move and keyspace and moves.can_turn_back(keyspace, data.rows[p], move):
            row, data.moves[p] = moves.turned_back(data.rows[p], move, version=data.version + 1)
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


HANDLERS: Handlers = {
    AcceptPlan: _accept_plan,
    StartMoves: _start_moves,
    FinishMoves: _finish_moves,
    CancelMoves: _cancel_moves,
    SetMoveSettings: _set_move_settings,
}
