"""Elects primaries, and changes a row when a member leaves, returns or proposes. Pure.

The primary is the first live member of ``in_sync`` in ``replicas`` order; replicas that a move will
remove come last in it. Every member of ``in_sync`` holds every acknowledged write, and only such a
member may lead. A partition without a live member is offline, with a reason, until one comes back.

A changed row gets ``partition_epoch`` + 1 and, if the primary changed or begins a new epoch,
``primary_epoch`` + 1. The functions about members return the row itself if nothing changes; the
functions that may refuse return None.

``primary_epoch`` is the upper part of a record's sequence and has 24 bits, enough for 190 days with
a new primary every second. A partition that has used them up stays offline, since used numbers must
not come again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import replace

from koinon_coordinator.core.cluster.commands import (
    AlterPartitions,
    Applied,
    AssignPartitions,
    CreateCluster,
    ForcePrimary,
    PartitionChange,
    PartitionsHosted,
    Reason,
    Rejected,
    Result,
)
from koinon_coordinator.core.cluster.data import ClusterData, Handlers
from koinon_proto.contract.table import (
    NO_NODE,
    SEQUENCE_COUNTER_BITS,
    NodeNumber,
    OfflineReason,
    PartitionId,
    PartitionRow,
    PartitionStatus,
)

PRIMARY_EPOCH_MAX = (1 << (64 - SEQUENCE_COUNTER_BITS)) - 1


def elect(
    replicas: Sequence[NodeNumber], in_sync: Collection[NodeNumber], live: Set[NodeNumber]
) -> NodeNumber:
    """Return the node that should lead, or ``NO_NODE``."""
    for node in replicas:
        if node in in_sync and node in live:
            return node
    return NO_NODE


def changed(
    row: PartitionRow,
    version: int,
    *,
    in_sync: tuple[NodeNumber, ...],
    primary: NodeNumber,
    primary_epoch: int,
    status: PartitionStatus,
    offline_reason: OfflineReason,
    wanted_primary: NodeNumber,
) -> PartitionRow:
    """Return the next row. All fields are named, since ``replace`` takes twice as long: a fence
    changes every row, on every coordinator's event loop.
    """
    return PartitionRow(
        partition_id=row.partition_id,
        replicas=row.replicas,
        in_sync=in_sync,
        primary=primary,
        primary_epoch=primary_epoch,
        partition_epoch=row.partition_epoch + 1,
        adding=row.adding,
        removing=row.removing,
        status=status,
        offline_reason=offline_reason,
        changed_at=version,
        wanted_primary=wanted_primary,
    )


def online(row: PartitionRow, *, version: int) -> PartitionRow:
    """Return the row once its primary serves."""
    return changed(
        row,
        version,
        in_sync=row.in_sync,
        primary=row.primary,
        primary_epoch=row.primary_epoch,
        status=PartitionStatus.ONLINE,
        offline_reason=row.offline_reason,
        wanted_primary=row.wanted_primary,
    )


# --- members -----------------------------------------------------------------------------------


def without_fenced(
    row: PartitionRow, node: NodeNumber, live: Set[NodeNumber], *, min_in_sync: int, version: int
) -> PartitionRow:
    """Return the row after ``node`` was fenced (``live`` no longer has it).

    The node leaves ``in_sync`` unless that would shrink it below ``min_in_sync``, or leave no live
    node in it: the last members that hold every acknowledged write stay in it, live or not.
    """
    in_sync = row.in_sync
    others = tuple(n for n in in_sync if n != node)
    if len(others) >= max(min_in_sync, 1) and not live.isdisjoint(others):
        in_sync = others
    if in_sync == row.in_sync and row.primary != node:
        return row
    return _settle(row, in_sync, live, version, begins_anew=row.primary == node)


def with_registered(
    row: PartitionRow, node: NodeNumber, live: Set[NodeNumber], *, version: int
) -> PartitionRow:
    """Return the row after ``node`` registered again with its known store.

    If the node led the partition, an election begins a new ``primary_epoch``. If the partition was
    offline without the node, it gets a primary again. If the node is a backup the row stays: the
    primary waits for it before it acknowledges a write, so it still holds all acknowledged writes.
    """
    if row.primary != node and (row.primary != NO_NODE or node not in row.in_sync):
        return row
    return _settle(row, row.in_sync, live, version, begins_anew=True)


def with_store_lost(
    row: PartitionRow, node: NodeNumber, live: Set[NodeNumber], *, version: int
) -> PartitionRow:
    """Return the row after ``node`` registered with another store than the known one.

    Its copy did not acknowledge the writes. So the node leaves ``in_sync`` whatever the minimum (a
    lost copy in the set could be elected). Without another member the partition stays offline. If

    the node was a replica that was not in sync, the row's epoch still rises: its primary may just
    be proposing to add the lost copy.
    """
    if node not in row.in_sync and (row.primary == NO_NODE or node not in row.replicas):
        return row
    in_sync = tuple(n for n in row.in_sync if n != node)
    return _settle(row, in_sync, live, version, begins_anew=row.primary == node)


def with_store_returned(
    row: PartitionRow, node: NodeNumber, live: Set[NodeNumber], *, version: int
) -> PartitionRow:
    """Return the row of a stranded partition after its lost store came back.

    That store was the last one in sync, and no node has led since: it holds all acknowledged
    writes.
    """
    if row.in_sync or node not in row.replicas:
        return row
    return _settle(row, (node,), live, version, begins_anew=True)


# --- proposals ---------------------------------------------------------------------------------


def altered(
    row: PartitionRow,
    change: PartitionChange,
    proposer: NodeNumber,
    live: Set[NodeNumber],
    *,
    min_in_sync: int,
    version: int,
) -> PartitionRow | None:
    """Return the row after its primary's proposal, or None if that is stale or breaks a rule.

    The new set may be below ``min_in_sync`` only if the old one was, and if it loses no member.
    """
    in_sync, successor = change.in_sync, change.hand_over_to
    is_current = (
        row.primary == proposer
        and row.primary_epoch == change.primary_epoch
        and row.partition_epoch == change.partition_epoch
    )
    added = set(in_sync).difference(row.in_sync)
    is_set = (
        len(set(in_sync)) == len(in_sync)
        and set(row.replicas).issuperset(in_sync)
        and live >= added
        and (len(in_sync) >= min_in_sync or set(row.in_sync).issubset(in_sync))
    )
    leads = successor if successor != NO_NODE else proposer
    if not (is_current and is_set and leads in in_sync and leads in live):
        return None
    if successor == NO_NODE:
        return _with_in_sync(row, in_sync, version)
    return _led_anew(row, in_sync, successor, version)


def forced(row: PartitionRow, node: NodeNumber, *, version: int) -> PartitionRow | None:
    """Return the row led by ``node``, alone in sync whatever it holds; None if no primary epoch is
    left.
    """
    return _led_anew(row, (node,), node, version)


# --- helpers -----------------------------------------------------------------------------------


def _with_in_sync(row: PartitionRow, in_sync: tuple[NodeNumber, ...], version: int) -> PartitionRow:
    """Return the row with another ``in_sync`` and the same primary."""
    return changed(
        row,
        version,
        in_sync=in_sync,
        primary=row.primary,
        primary_epoch=row.primary_epoch,
        status=row.status,
        offline_reason=row.offline_reason,
        wanted_primary=row.wanted_primary,
    )


def _led_anew(
    row: PartitionRow, in_sync: tuple[NodeNumber, ...], primary: NodeNumber, version: int
) -> PartitionRow | None:
    """Return the row under a new primary epoch, which no node has acknowledged yet."""
    if row.primary_epoch >= PRIMARY_EPOCH_MAX:
        return None
    return changed(
        row,
        version,
        in_sync=in_sync,
        primary=primary,
        primary_epoch=row.primary_epoch + 1,
        status=PartitionStatus.ASSIGNED,
        offline_reason=OfflineReason.NONE,
        wanted_primary=NO_NODE if row.wanted_primary == primary else row.wanted_primary,
    )


def _settle(
    row: PartitionRow,
    in_sync: tuple[NodeNumber, ...],
    live: Set[NodeNumber],
    version: int,
    *,
    begins_anew: bool,
) -> PartitionRow:
    """Elect a primary if the old one is gone or must begin a new epoch; raise the row's epochs."""
    if not begins_anew and row.primary != NO_NODE:
        return _with_in_sync(row, in_sync, version)
    primary = elect(row.replicas, in_sync, live)
    led = _led_anew(row, in_sync, primary, version) if primary != NO_NODE else None
    if led is not None:
        return led
    return changed(
        row,
        version,
        in_sync=in_sync,
        primary=NO_NODE,
        primary_epoch=min(row.primary_epoch + begins_anew, PRIMARY_EPOCH_MAX),
        status=PartitionStatus.OFFLINE,
        offline_reason=OfflineReason.NO_LIVE_REPLICA if in_sync else OfflineReason.STORE_LOST,
        wanted_primary=row.wanted_primary,
    )


# --- commands ----------------------------------------------------------------------------------


def _create_cluster(data: ClusterData, command: CreateCluster) -> Result:
    if data.config is not None:
        return Rejected(reason=Reason.CLUSTER_EXISTS)
    data.config = command.config
    data.version += 1
    return Applied()


def _assign_partitions(data: ClusterData, command: AssignPartitions) -> Result:
    config = data.config
    if config is None:
        return Rejected(reason=Reason.NO_CLUSTER)
    if data.rows:
        return Rejected(reason=Reason.ALREADY_ASSIGNED)
    fits = len(command.replicas) == config.partition_count and all(
        len(set(replicas)) == len(replicas) == config.replication_factor
        and data.live.issuperset(replicas)
        for replicas in command.replicas
    )
    if not fits:
        return Rejected(reason=Reason.BAD_ASSIGNMENT)
    data.version += 1
    for partition_id, replicas in enumerate(command.replicas):
        data.put_row(
            PartitionRow(
                partition_id=PartitionId(partition_id),
                replicas=replicas,
                in_sync=replicas,
                primary=replicas[0],
                primary_epoch=1,
                partition_epoch=1,
                status=PartitionStatus.ASSIGNED,
                changed_at=data.version,
            )
        )
    return Applied(rows_changed=len(data.rows))


def _partitions_hosted(data: ClusterData, command: PartitionsHosted) -> Result:
    record = data.node_at_epoch(command.node_number, command.node_epoch)
    if isinstance(record, Rejected):
        return record
    current = {
        row.partition_id: row
        for hosted in command.hosted
        if (row := data.row(hosted.partition_id)) is not None
        and row.status is PartitionStatus.ASSIGNED
        and row.primary == command.node_number
        and row.primary_epoch == hosted.primary_epoch
        and row.partition_epoch == hosted.partition_epoch
    }
    if not record.confirmed:
        data.put_node(replace(record, confirmed=True))
    if not current:
        return Rejected(reason=Reason.NOTHING_CURRENT)
    data.version += 1
    for row in current.values():
        data.put_row(online(row, version=data.version))
    return Applied(rows_changed=len(current))


def _alter_partitions(data: ClusterData, command: AlterPartitions) -> Result:
    record = data.node_at_epoch(command.node_number, command.node_epoch)
    if isinstance(record, Rejected):
        return record
    after: dict[PartitionId, PartitionRow] = {}
    rejected: list[PartitionId] = []
    for change in command.changes:
        row = data.row(change.partition_id)
        wanted = row and altered(
            row,
            change,
            command.node_number,
            data.live,
            min_in_sync=data.keyspaces.min_in_sync(row),
            version=data.version + 1,
        )
        if wanted is None or change.partition_id in after:
            rejected.append(change.partition_id)
        else:
            after[change.partition_id] = wanted
    return data.change_to(after.values(), rejected)


def _force_primary(data: ClusterData, command: ForcePrimary) -> Result:
    row = data.row(command.partition_id)
    if row is None:
        return Rejected(reason=Reason.UNKNOWN_PARTITION)
    if row.partition_epoch != command.partition_epoch:
        return Rejected(reason=Reason.NOTHING_CURRENT)
    if row.status is not PartitionStatus.OFFLINE:
        return Rejected(reason=Reason.NOT_OFFLINE)
    node = command.node_number
    if node not in row.replicas or node not in data.live:
        return Rejected(reason=Reason.NOT_A_REPLICA)
    after = forced(row, node, version=data.version + 1)
    if after is None:
        return Rejected(reason=Reason.BAD_VALUE)
    return data.change_to([after])


HANDLERS: Handlers = {
    CreateCluster: _create_cluster,
    AssignPartitions: _assign_partitions,
    PartitionsHosted: _partitions_hosted,
    AlterPartitions: _alter_partitions,
    ForcePrimary: _force_primary,
}
