"""Builds the state of a new coordinator group after the loss of the old one's majority. Pure.

The tables of nodes and surviving members are prefixes of one history, so the table with the highest
``table_version`` is the newest that any of them acted on; none of them has seen a later commit. The
new history begins far above it, so that it cannot collide with numbers that the old group gave:
versions and epochs jump, every node is fenced and must register again, and no partition has a
primary until a node of its in_sync has registered.

A member's log may end with entries that were never committed, since other members committed other
entries in their place. Nodes get only committed versions. So where a node's table differs from a
member's log, that part of the log is not part of the history (``Committed``).

A table has only the ids and states of bulk loads. A surviving member knows the rest of the loads
that it has seen in the same state; these continue. All other loads are abandoned, and nodes delete
their staged rows. An abandoned load that was being merged may be merged in part, and its attempts
are unknown: the operator is told, and the job has to run again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from koinon_coordinator.core.cluster.commands import Move
from koinon_coordinator.core.cluster.image import NodeRecord, StateImage
from koinon_coordinator.core.cluster.load_rules import NO_LOADS, Load, LoadsImage
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_proto.contract.bulk_loads import LoadState
from koinon_proto.contract.table import (
    NO_NODE,
    NodeInfo,
    NodeNumber,
    NodeStatus,
    OfflineReason,
    PartitionRow,
    PartitionStatus,
    Table,
)

VERSION_JUMP = 1_000_000
EPOCH_JUMP = 1_000
"""A partition has 16 million primary epochs in all."""
LOAD_ID_SHIFT = 20
"""The new group's load ids begin above its table version, shifted by so many bits. Each recovery
raises the version by at least ``VERSION_JUMP``, so that the ids that the old group may have given
out, its log indices above the base that it began with, are all below.
"""
KEYSPACE_ID_JUMP = 100_000
"""Far more than the keyspaces that the old group can have created unseen."""
PLAN_ID = "recovered"
LOST_REASON = "it was being merged when the coordinators were lost: run its job again"


def image_of(table: Table) -> StateImage:
    """Return the part of the state that a node's table contains."""
    return StateImage(
        config=table.cluster,
        table_version=table.table_version,
        last_node_number=max(table.nodes, default=0),
        nodes=tuple(
            NodeRecord(
                info=info,
                registration_id="",
                base_node_epoch=info.node_epoch - 1,
                confirmed=True,
                draining=info.status is NodeStatus.DRAINING,
            )
            for _, info in sorted(table.nodes.items())
        ),
        rows=tuple(table.rows),
        move_settings=table.moves,
        keyspaces=table.keyspace_list,
        last_keyspace_id=max((k.keyspace_id for k in table.keyspace_list.keyspaces), default=0),
    )


class Committed:
    """The rows and nodes in the nodes' tables, by the versions that made them."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables: dict[int, list[Table]] = {}
        self._rows: dict[int, set[PartitionRow]] = {}  # by the version of the row's last change
        self._nodes: dict[int, set[NodeInfo]] = {}
        for table in tables:
            self._tables.setdefault(table.table_version, []).append(table)
            for row in table.rows:
                self._rows.setdefault(row.changed_at, set()).add(row)
            for info in table.nodes.values():
                self._nodes.setdefault(info.changed_at, set()).add(info)

    def contradicts(self, state: ClusterState) -> bool:
        """Return whether the state certainly differs from the committed state of its version. False
        proves nothing: a node that missed a version, or whose rows changed again, has no trace of
        it.
        """
        version = state.table_version
        if any(row != state.row(row.partition_id) for row in self._rows.get(version, ())):
            return True
        for info in self._nodes.get(version, ()):
            record = state.node(info.number)
            if record is None or record.info != info:
                return True
        return any(table != state.table() for table in self._tables.get(version, ()))


def newest(images: Iterable[StateImage]) -> StateImage:
    """Return the image with the highest version; of equal ones the first, so list members first."""
    return max(images, key=lambda image: image.table_version)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadsFound:
    """The bulk loads that can continue, with the known ended ones; and the ids of abandoned loads:
    ``merging``, whose rows may be readable in part, and ``open``. ``is_whole``: no newer facts
    about loads can be missing.
    """

    image: LoadsImage
    merging: tuple[int, ...] = ()
    open: tuple[int, ...] = ()
    is_whole: bool = True


def loads_found(survivor: StateImage | None, table: Table | None) -> LoadsFound:
    """Return the known loads, from a surviving member and the newest of the nodes' tables."""
    known = NO_LOADS if survivor is None else survivor.loads
    if table is None or (survivor and survivor.table_version >= table.table_version):
        return LoadsFound(image=known)
    by_id = {load.load_id: load for load in known.active}
    going_on: list[Load] = []
    ended = list(known.ended)
    lost: dict[bool, list[int]] = {True: [], False: []}
    for shown in table.loads:
        load = by_id.get(shown.load_id)
        if load is not None and (load.state is LoadState.MERGING) == shown.merging:
            going_on.append(load)
            continue
        lost[shown.merging].append(shown.load_id)
        if load is not None:
            ended.append(replace(load, state=LoadState.ABORTED, reason=LOST_REASON))
    image = replace(known, active=tuple(going_on), ended=tuple(ended))
    return LoadsFound(
        image=image, merging=tuple(lost[True]), open=tuple(lost[False]), is_whole=False
    )


def recovered(image: StateImage) -> StateImage:
    """Return the first state of the new group."""
    version = image.table_version + VERSION_JUMP
    rows = tuple(_without_primary(row, version) for row in image.rows)
    known = {move.partition_id for move in image.moves}
    orphans = [
        _move_of(row)
        for row in image.rows
        if (row.adding or row.removing) and row.partition_id not in known
    ]
    moves = sorted((*image.moves, *orphans), key=lambda move: move.partition_id)
    return replace(
        image,
        table_version=version,
        nodes=tuple(_fenced(record, version) for record in image.nodes),
        rows=rows,
        moves=tuple(moves),
        loads=replace(image.loads, id_base=version << LOAD_ID_SHIFT),
        # The table's version is above the version of every earlier recovery, even a forgotten one.
        access=replace(image.access, version=max(image.access.version + VERSION_JUMP, version)),
        keyspaces=replace(image.keyspaces, changed_at=version),
        last_keyspace_id=image.last_keyspace_id + KEYSPACE_ID_JUMP,
        groups=tuple(
            replace(group, generation=group.generation + VERSION_JUMP) for group in image.groups
        ),
    )


def copies_at_risk(image: StateImage, reached: Iterable[NodeNumber]) -> list[PartitionRow]:
    """Return the rows without an in-sync replica on a reached node."""
    there = set(reached)
    rows = [row for row in image.rows if not row.unused]
    return [row for row in rows if not there.intersection(row.in_sync)]


def _fenced(record: NodeRecord, version: int) -> NodeRecord:
    if record.info.status is NodeStatus.LEFT:
        return record
    # An epoch whose answer was lost stays unconfirmed: its store will ask for it again.
    return replace(record, info=replace(record.info, status=NodeStatus.FENCED, changed_at=version))


def _without_primary(row: PartitionRow, version: int) -> PartitionRow:
    lost = row.offline_reason is OfflineReason.STORE_LOST
    reason = OfflineReason.STORE_LOST if lost else OfflineReason.NO_LIVE_REPLICA
    return replace(
        row,
        primary=NO_NODE,
        primary_epoch=row.primary_epoch + EPOCH_JUMP,
        partition_epoch=row.partition_epoch + EPOCH_JUMP,
        status=PartitionStatus.OFFLINE,
        offline_reason=OfflineReason.NONE if row.unused else reason,
        changed_at=version,
    )


def _move_of(row: PartitionRow) -> Move:
    """Return the move that a row is on, for a state that lost its moves."""
    return Move(
        partition_id=row.partition_id,
        origin=row.settled,
        target=row.target,
        reason="under way when the coordinators were lost",
        plan_id=PLAN_ID,
        plan_moves=1,
        running=True,
    )
