"""The choice of the moves that go on, and what the others wait for: the leader's part. Pure.

A queued move starts when every node that it adds or removes has fewer than ``moves_per_node`` moves
running that add or remove it, what it adds is live and has room for the copy (``room``), and a node
leads the partition (else there is no node to copy from, and it would only take another's place).
A running one is finished as soon as nothing of it is missing, and turned back when a node that it
waits for has been fenced for ``TURN_BACK_AFTER_S``. While an operator has paused moves, nothing of
this is done.

``moves.py`` says what each step makes of a row; here is only when. How long a node has been fenced
is soft: the leader counts it, from the fence or from its own beginning.
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
"""A process that only restarts is back in a few seconds, and goes on where it was. One that stays
away for longer may never come back, and keeps other moves from a place among ``moves_per_node``.
"""
REPAIR_PREFIX = "repair-"
"""Of the ``plan_id`` of moves that replace a node which stayed away: they are dropped if it is back
before they have begun.
"""


class Fences:
    """For how long each fenced node has been fenced, as far as this leader knows."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._since: dict[tuple[NodeNumber, int], float] = {}

    @property
    def any(self) -> bool:
        return bool(self._since)

    def observe(self, state: ClusterState, now: float) -> None:
        """Take note of who is fenced now."""
        self._since = {
            key: self._since.get(key, now)
            for record in state.nodes
            if record.info.status is NodeStatus.FENCED
            for key in ((record.info.number, record.info.node_epoch),)
        }

    def tick(self, now: float, *, pause_s: float) -> None:
        """Leave out the time in which this process stood still: no node could register
        meanwhile."""
        gap, self._looked_at = now - self._looked_at, now
        if gap > pause_s:
            self._since = {key: since + gap for key, since in self._since.items()}

    def fenced_s(self, now: float) -> dict[NodeNumber, float]:
        """Return the fenced nodes, and for how many seconds each has been."""
        return {number: now - since for (number, _), since in self._since.items()}


def next_step(
    state: ClusterState,
    fenced_s: Mapping[NodeNumber, float],
    rereplicate_after_s: float,
    room: Room,
    but: Collection[type[Command]] = (),
) -> Command | None:
    """Return the command that takes moves on, for as many as it can, and is of none of the kinds
    ``but``; None: all have to wait. What it finishes makes room for what it starts next.

    ``rereplicate_after_s`` 0: a node that stays away is waited for.
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
    """Return whether a running move waits for a node that has gone, and can do without it."""
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
    """Return what the move waits for, in words; "" if it is about to go on by itself.

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
    """Return the shortage of each move that does not go on for want of room."""
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
    """Return what makes a queued move useless, beside the number of others; "": nothing."""
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
