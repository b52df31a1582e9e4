"""Makes the state of a new coordinator group when the majority of the old one is lost. Pure.

Every table that a node or a surviving member holds is a prefix of one history, so the one of the
highest ``table_version`` is the newest that anybody acted on; none of those who are asked has seen
what was committed after it. The new history begins far above it, so that nothing the old group may
have given out collides: versions and epochs jump, every node is fenced and must register anew, and
no partition has a primary until a node that its row calls in sync has registered.

A member's log may end in entries that were never committed, because others committed something else
in their place. A node is told of committed versions only, so its table, where it differs, tells
from which entry on the member's log is none of the history (``Committed``).

Of bulk loads a table tells only which are open and which are being merged. A surviving member
knows the rest of those that it has seen in the same state; they go on. Any other is given up: nodes
delete what was staged for it. One that was being merged may then have been merged in part, and
which attempts were to be merged is not known: the operator is told, and the job has to be run
again.
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
"""Of 16 million primary epochs that a partition has in all."""
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
    """Return the state that a node's table lets one know."""
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
    """The rows and nodes that the nodes' tables show for the versions up to their own."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables: dict[int, list[Table]] = {}
        self._rows: dict[int, set[PartitionRow]] = {}  # by the version that made them so
        self._nodes: dict[int, set[NodeInfo]] = {}
        for table in tables:
            self._tables.setdefault(table.table_version, []).append(table)
            for row in table.rows:
                self._rows.setdefault(row.changed_at, set()).add(row)
            for info in table.nodes.values():
                self._nodes.setdefault(info.changed_at, set()).add(info)

    def contradicts(self, state: ClusterState) -> bool:
        """Return whether the state is not the one that was committed as its version. False proves
        nothing: a node that missed a version, or has seen its rows change again, tells nothing of
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
    """Return the image of the highest version; of equal ones the first, so name members first."""
    return max(images, key=lambda image: image.table_version)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadsFound:
    """The bulk loads that can go on, with what is known of those that ended; the ids of those that
    are given up: ``merging``, whose rows are readable in part, and ``open``. ``is_whole``: nothing
    newer about loads can be missing.
    """

    image: LoadsImage
    merging: tuple[int, ...] = ()
    open: tuple[int, ...] = ()
    is_whole: bool = True


def loads_found(survivor: StateImage | None, table: Table | None) -> LoadsFound:
    """Return what is known of loads, by a surviving member and the newest of the nodes' tables."""
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
    """Return the state that the new group begins with."""
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
        # The table's version is above that of every recovery before, also if those lost this one.
        access=replace(image.access, version=max(image.access.version + VERSION_JUMP, version)),
        keyspaces=replace(image.keyspaces, changed_at=version),
        last_keyspace_id=image.last_keyspace_id + KEYSPACE_ID_JUMP,
    )


def copies_at_risk(image: StateImage, reached: Iterable[NodeNumber]) -> list[PartitionRow]:
    """Return the rows of which no in-sync replica is on a node that was reached."""
    there = set(reached)
    rows = [row for row in image.rows if not row.unused]
    return [row for row in rows if not there.intersection(row.in_sync)]


def _fenced(record: NodeRecord, version: int) -> NodeRecord:
    if record.info.status is NodeStatus.LEFT:
        return record
    # An epoch whose answer was lost stays unconfirmed: its store asks for it again.
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
    """The move that a row is on, where the state that knew of it is lost."""
    return Move(
        partition_id=row.partition_id,
        origin=row.settled,
        target=row.target,
        reason="under way when the coordinators were lost",
        plan_id=PLAN_ID,
        plan_moves=1,
        running=True,
    )
