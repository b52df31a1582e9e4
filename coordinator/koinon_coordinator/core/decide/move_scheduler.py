"""Chooses the moves that proceed, and explains what the others wait for. Pure.

A queued move starts when every node that it adds or removes takes part in fewer than
``moves_per_node`` running moves, the added nodes are live and have room for the copy (``room``),
and the partition has a primary (otherwise there is no source, and the move would only take a
place). A running move is finished once its target is in sync and led, and turned back when a node
that it waits for has been fenced for ``TURN_BACK_AFTER_S``. While an operator has paused moves,
none of this happens.

``move_steps.py`` has the steps; this module decides when they happen. The duration of a fence is
soft state: the leader counts it from the fence or from its own beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from koinon_coordinator.core.cluster.commands import (
    CancelMoves,
    Command,
    FinishMoves,
    Move,
    StartMoves,
)
from koinon_coordinator.core.cluster.move_steps import can_finish, can_turn_back
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.copy_progress import Progress, Stage
from koinon_coordinator.core.decide.room import Room, Shortage
from koinon_coordinator.core.planning.plan_builder import megabytes
from koinon_proto.contract.table import (
    NO_NODE,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionStatus,
)

TURN_BACK_AFTER_S = 30.0
"""A restarting process is back in a few seconds, and its moves continue. A node that is away for
longer may never come back, and its moves keep others from starting (``moves_per_node``).
"""
REPAIR_PREFIX = "repair-"
"""The prefix of the ``plan_id`` of moves that replace an absent node: queued ones are dropped if
the node comes back.
"""


class Fences:
    """The duration of each node's fence, by this leader's knowledge."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._since: dict[tuple[NodeNumber, int], float] = {}

    @property
    def any(self) -> bool:
        return bool(self._since)

    def observe(self, state: ClusterState, now: float) -> None:
        """Note which nodes are fenced now."""
        self._since = {
            key: self._since.get(key, now)
            for record in state.nodes
            if record.info.status is NodeStatus.FENCED
            for key in ((record.info.number, record.info.node_epoch),)
        }

    def tick(self, now: float, *, pause_s: float) -> None:
        """Leave out the time in which this process was paused: no node could register meanwhile."""
        gap, self._looked_at = now - self._looked_at, now
        if gap > pause_s:
            self._since = {key: since + gap for key, since in self._since.items()}

    def fenced_s(self, now: float) -> dict[NodeNumber, float]:
        """Return the fenced nodes, with the seconds since their fence."""
        return {number: now - since for (number, _), since in self._since.items()}


def next_step(
    state: ClusterState,
    fenced_s: Mapping[NodeNumber, float],
    rereplicate_after_s: float,
    room: Room,
    but: Collection[type[Command]] = (),
) -> Command | None:
    """Return a command that advances as many moves as possible and is of none of the types ``but``,
    or None if all moves have to wait. Finished moves make room for the next ones.

    ``rereplicate_after_s`` 0: absent nodes keep their replicas.
    """
    if not state.moves or state.move_settings.paused:
        return None
    for partition_ids, command in (
        (_to_cancel(state, fenced_s, rereplicate_after_s), CancelMoves),
        (_to_finish(state), FinishMoves),
        (_to_start(state, room), StartMoves),
    ):
        if partition_ids and command not in but:
            return command(partition_ids=partition_ids)
    return None


def _to_cancel(
    state: ClusterState, fenced_s: Mapping[NodeNumber, float], rereplicate_after_s: float
) -> tuple[PartitionId, ...]:
    gone = {n for n, seconds in fenced_s.items() if seconds >= TURN_BACK_AFTER_S}
    lost = {n for n, seconds in fenced_s.items() if seconds >= rereplicate_after_s > 0}
    return tuple(
        move.partition_id
        for move in state.moves.values()
        if (_is_stuck(state, move, gone) if move.running else _is_moot(state, move, lost))
    )


def _is_stuck(state: ClusterState, move: Move, gone: set[NodeNumber]) -> bool:
    """Return whether a running move waits for an absent node and can be turned back."""
    row, keyspace = state.row(move.partition_id), state.keyspaces.of(move.partition_id)
    if row is None or keyspace is None or gone.isdisjoint(_missing(state, move)):
        return False
    return can_turn_back(keyspace, row, move)


def _is_moot(state: ClusterState, move: Move, lost: set[NodeNumber]) -> bool:
    """Return whether a queued move's target is given up, or the node that it replaces is back."""
    if not lost.isdisjoint(move.added):
        return True
    return (
        move.plan_id.startswith(REPAIR_PREFIX)
        and bool(move.removed)
        and all(is_live(state, n) for n in move.removed)
    )


def _to_finish(state: ClusterState) -> tuple[PartitionId, ...]:
    return tuple(
        move.partition_id
        for move in state.moves.values()
        if move.running
        and (row := state.row(move.partition_id)) is not None
        and (keyspace := state.keyspaces.of(move.partition_id)) is not None
        and can_finish(keyspace, row, move)
    )


def _to_start(state: ClusterState, room: Room) -> tuple[PartitionId, ...]:
    limit = state.move_settings.moves_per_node
    load = moves_by_node(state.moves.values())
    started = []
    for move in state.moves.values():
        if move.running:
            continue
        touched = (*move.added, *move.removed)
        if (
            all(load[n] < limit for n in touched)
            and not _obstacle(state, move, room)
            and room.shortage(move) is None
        ):
            load.update(touched)
            room.reserve(move)
            started.append(move.partition_id)
    return tuple(started)


def moves_by_node(moves: Iterable[Move]) -> Counter[NodeNumber]:
    """Count the running moves that add or remove each node."""
    return Counter(n for move in moves if move.running for n in (*move.added, *move.removed))


# --- for people --------------------------------------------------------------------------------


def waits_for(state: ClusterState, move: Move, load: Mapping[NodeNumber, int], room: Room) -> str:
    """Return what the move waits for, as text; '' if it will proceed by itself. ``load`` is the
    result of ``moves_by_node``.

    ``load`` is what ``moves_by_node`` counts.
    """
    if state.move_settings.paused:
        return "paused"
    if move.running:
        return _running_waits_for(state, move, room)
    obstacle = _obstacle(state, move, room)
    if obstacle:
        return obstacle
    limit = state.move_settings.moves_per_node
    for node in (*move.added, *move.removed):
        count = load.get(node, 0)
        if count >= limit:
            of = f"one of the {count} moves" if count > 1 else "the move"
            return f"waits for {of} of {_name(state, node)}"
    shortage = room.shortage(move)
    return "" if shortage is None else _for_room(state, shortage)


def _for_room(state: ClusterState, shortage: Shortage) -> str:
    needs, has = megabytes(shortage.needs_bytes), megabytes(shortage.has_bytes)
    node = _name(state, shortage.node)
    return f"waits for room on {node} (needs {needs}, has {has}: {shortage.limit})"


def short_of_room(state: ClusterState, room: Room) -> list[Shortage]:
    """Return the shortage of each move that waits for room."""
    if state.move_settings.paused:
        return []
    found = (room.shortage(move) for move in state.moves.values())
    return [shortage for shortage in found if shortage is not None]


def _running_waits_for(state: ClusterState, move: Move, room: Room) -> str:
    row, keyspace = state.row(move.partition_id), state.keyspaces.of(move.partition_id)
    if row is None or keyspace is None or can_finish(keyspace, row, move):
        return ""
    missing = _missing(state, move)
    down = [n for n in missing if not is_live(state, n)]
    if down:
        return f"{_names(state, down)} {'is' if len(down) == 1 else 'are'} down"
    if row.primary == NO_NODE:
        return "the partition is offline"
    if row.status is not PartitionStatus.ONLINE:
        return f"{_name(state, row.primary)} is taking over as primary"
    shortage = room.shortage(move)
    if shortage is not None:
        return _for_room(state, shortage)
    if missing:
        return "; ".join(
            _copying(state, n, row.primary, room.progress.get(n, {}).get(move.partition_id))
            for n in missing
        )
    able = [n for n in (row.wanted_primary, *row.target) if n in row.in_sync and is_live(state, n)]
    successor = _name(state, able[0]) if able else "nobody yet"
    return f"{_name(state, row.primary)} hands over to {successor}"


def _copying(
    state: ClusterState, node: NodeNumber, primary: NodeNumber, progress: Progress | None
) -> str:
    name = _name(state, node)
    if progress is None or progress.stage is Stage.WAITING:
        return f"{name} waits for {_name(state, primary)}"
    if progress.stage is Stage.LIVE:
        return f"{name} has everything and is about to be in sync"
    return f"copying to {name}"


def _obstacle(state: ClusterState, move: Move, room: Room) -> str:
    """Return the reason why a queued move cannot start, apart from the number of other moves; '' if
    there is none.
    """
    down = [n for n in move.added if not is_live(state, n)]
    if down:
        return f"{_names(state, down)} {'is' if len(down) == 1 else 'are'} down"
    row = state.row(move.partition_id)
    if row is None or row.primary == NO_NODE:
        return "the partition is offline"
    unheard = [n for n in move.added if not room.is_known(n)]
    if unheard:
        return f"this leader has not heard yet how much room {_names(state, unheard)} has"
    return ""


# --- helpers -----------------------------------------------------------------------------------


def is_live(state: ClusterState, number: NodeNumber) -> bool:
    """Return whether the node is registered and not fenced."""
    record = state.node(number)
    return record is not None and record.live


def _missing(state: ClusterState, move: Move) -> list[NodeNumber]:
    """Return the nodes that a running move waits for to be in sync."""
    row, keyspace = state.row(move.partition_id), state.keyspaces.of(move.partition_id)
    if row is None or keyspace is None:
        return []
    missing = [n for n in row.adding if n not in row.in_sync]
    if missing:
        return missing
    missing = [n for n in move.target if n not in row.in_sync]
    needed = keyspace.min_in_sync_among(len(move.target))
    too_few = len(move.target) - len(missing) < needed
    return missing if too_few else []


def _name(state: ClusterState, number: NodeNumber) -> str:
    record = state.node(number)
    return record.info.node_id if record is not None else f"node {number}"


def _names(state: ClusterState, numbers: Iterable[NodeNumber]) -> str:
    return " and ".join(_name(state, n) for n in numbers)
