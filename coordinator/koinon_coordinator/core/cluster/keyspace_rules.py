"""Keyspaces in the replicated state: created, altered, dropped and forgotten. Pure.

    (created) --DropKeyspace--> dropping --ForgetKeyspace--> (gone, its partition ids are free)

* An id is never reused. Another keyspace may get the name, or the range of partition ids, later.
* ``DropKeyspace`` removes all replicas from its rows. From then on no node may serve them, and each
  erases its copy as after a move. The leader proposes ``ForgetKeyspace`` once every node that may
  come back has reported that it holds none of it.
* Reused rows begin at one epoch above all earlier ones, the keyspace's ``first_epoch``. So late
  messages of the former keyspace are refused. A copy of the former keyspace, on a disk that was set
  back since, has a lower epoch: nodes erase it before they lead or follow the partition.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from koinon_coordinator.core.cluster.commands import (
    AlterKeyspace,
    Applied,
    CreateKeyspace,
    DropKeyspace,
    ForgetKeyspace,
    KeyspaceChanged,
    Reason,
    Rejected,
    Result,
    SetReplicationFactor,
)
from koinon_coordinator.core.cluster.data import ClusterData, Handlers
from koinon_coordinator.core.cluster.election import PRIMARY_EPOCH_MAX
from koinon_proto.contract.keyspaces import (
    ALTERABLE,
    DEFAULT_ID,
    KEYSPACES_MAX,
    Keyspace,
    KeyspaceId,
    KeyspaceList,
    Keyspaces,
    half_of,
)
from koinon_proto.contract.table import (
    MAX_PARTITION_COUNT,
    NO_NODE,
    ClusterConfig,
    NodeNumber,
    OfflineReason,
    PartitionId,
    PartitionRow,
    PartitionStatus,
    partition_count_fault,
)

_OF_CONFIG = ("replication_factor", "min_in_sync", "max_value_bytes")


def creation_refusal(
    command: CreateKeyspace,
    keyspaces: Keyspaces,
    rows: Sequence[PartitionRow],
    live: Set[NodeNumber],
) -> Reason | None:
    """Return the reason why the keyspace cannot be created, or None."""
    wanted = command.keyspace
    ids = wanted.partition_ids
    if (
        wanted.keyspace_id != DEFAULT_ID
        or wanted.is_dropping
        or wanted.first_epoch
        or len(keyspaces.all) > KEYSPACES_MAX
        or not 0 < wanted.base <= len(rows)
        or ids.stop > MAX_PARTITION_COUNT
        or partition_count_fault(wanted.partitioner, wanted.partition_count)
        or not 1 <= wanted.min_in_sync <= wanted.replication_factor
        or not _ttls_fit(wanted)
    ):
        return Reason.BAD_VALUE
    is_taken = any(
        other.base < ids.stop and ids.start < other.partition_ids.stop for other in keyspaces.all
    )
    if is_taken or keyspaces.get(wanted.name) is not None:
        return Reason.KEYSPACE_EXISTS
    is_placed = len(command.replicas) == len(ids) and all(
        len(set(replicas)) == len(replicas) == wanted.replication_factor and set(replicas) <= live
        for replicas in command.replicas
    )
    return None if is_placed else Reason.BAD_ASSIGNMENT


def created_row(
    partition_id: int,
    replicas: tuple[NodeNumber, ...],
    before: PartitionRow | None,
    first_epoch: int,
    version: int,
) -> PartitionRow:
    """Return the first row of a partition in a keyspace that begins with this epoch."""
    partition_epoch = before.partition_epoch + 1 if before is not None else 1
    return PartitionRow(
        partition_id=PartitionId(partition_id),
        replicas=replicas,
        in_sync=replicas,
        primary=replicas[0],
        primary_epoch=first_epoch,
        partition_epoch=partition_epoch,
        status=PartitionStatus.ASSIGNED,
        changed_at=version,
    )


def dropped_row(row: PartitionRow, version: int) -> PartitionRow:
    """Return the row of a partition without replicas."""
    return PartitionRow(
        partition_id=row.partition_id,
        replicas=(),
        in_sync=(),
        primary=NO_NODE,
        primary_epoch=row.primary_epoch,
        partition_epoch=row.partition_epoch + 1,
        status=PartitionStatus.OFFLINE,
        offline_reason=OfflineReason.NONE,
        changed_at=version,
    )


def altered(before: Keyspace, wanted: Keyspace) -> Keyspace | None:
    """Return the keyspace with the wanted settings; None if an unalterable setting differs, or a
    value is out of bounds.
    """
    after = replace(before, **{name: getattr(wanted, name) for name in ALTERABLE})
    fits = (
        after == wanted
        and 1 <= after.min_in_sync <= after.replication_factor
        and after.max_value_bytes >= 1
        and _ttls_fit(after)
    )
    return after if fits else None


def _ttls_fit(keyspace: Keyspace) -> bool:
    return not keyspace.max_ttl_ms or keyspace.default_ttl_ms <= keyspace.max_ttl_ms


def with_settings(config: ClusterConfig, keyspace: Keyspace) -> ClusterConfig:
    """Return the cluster's configuration with the settings that it keeps of the keyspace
    ``default``.
    """
    if keyspace.keyspace_id != DEFAULT_ID:
        return config
    return replace(config, **{name: getattr(keyspace, name) for name in _OF_CONFIG})


def with_keyspace(known: KeyspaceList, keyspace: Keyspace, version: int) -> KeyspaceList:
    """Return the list with this keyspace put in."""
    others = [k for k in known.keyspaces if k.keyspace_id != keyspace.keyspace_id]
    ordered = sorted((*others, keyspace), key=lambda k: (k.base, k.keyspace_id))
    return KeyspaceList(changed_at=version, keyspaces=tuple(ordered))


def without_keyspace(known: KeyspaceList, keyspace_id: KeyspaceId, version: int) -> KeyspaceList:
    """Return the list without the keyspace."""
    left = tuple(k for k in known.keyspaces if k.keyspace_id != keyspace_id)
    return KeyspaceList(changed_at=version, keyspaces=left)


# --- commands ----------------------------------------------------------------------------------


def _create_keyspace(data: ClusterData, command: CreateKeyspace) -> Result:
    if data.config is None or not data.rows:
        return Rejected(reason=Reason.NO_CLUSTER)
    refusal = creation_refusal(command, data.keyspaces, data.rows, data.live)
    if refusal is not None:
        return Rejected(reason=refusal)
    ids = command.keyspace.partition_ids
    before = [data.row(p) for p in ids]
    first_epoch = 1 + max(row.primary_epoch if row is not None else 0 for row in before)
    if first_epoch > PRIMARY_EPOCH_MAX:
        return Rejected(reason=Reason.BAD_VALUE)
    data.last_keyspace_id += 1
    keyspace_id = KeyspaceId(data.last_keyspace_id)
    made = replace(command.keyspace, keyspace_id=keyspace_id, first_epoch=first_epoch)
    _set_keyspace(data, made)
    for p, replicas, row in zip(ids, command.replicas, before, strict=True):
        data.put_row(created_row(p, replicas, row, first_epoch, data.version))
    return KeyspaceChanged(keyspace_id=keyspace_id)


def _alter_keyspace(data: ClusterData, command: AlterKeyspace) -> Result:
    if data.config is None:
        return Rejected(reason=Reason.NO_CLUSTER)
    before = data.usable_keyspace(command.keyspace.keyspace_id)
    if before is None:
        return Rejected(reason=Reason.KEYSPACE_UNKNOWN)
    after = altered(before, command.keyspace)
    if after is None:
        return Rejected(reason=Reason.BAD_VALUE)
    _set_keyspace(data, after)
    return KeyspaceChanged(keyspace_id=after.keyspace_id)


def _set_replication_factor(data: ClusterData, command: SetReplicationFactor) -> Result:
    config, factor = data.config, command.replication_factor
    if config is None:
        return Rejected(reason=Reason.NO_CLUSTER)
    keyspace = data.usable_keyspace(command.keyspace_id)
    if keyspace is None:
        return Rejected(reason=Reason.KEYSPACE_UNKNOWN)
    if not 1 <= factor <= sum(not record.left for record in data.nodes.values()):
        return Rejected(reason=Reason.BAD_VALUE)
    _set_keyspace(data, replace(keyspace, replication_factor=factor, min_in_sync=half_of(factor)))
    return Applied()


def _drop_keyspace(data: ClusterData, command: DropKeyspace) -> Result:
    if data.config is None:
        return Rejected(reason=Reason.NO_CLUSTER)
    keyspace = data.keyspaces.by_id(command.keyspace_id)
    if keyspace is None:
        return Rejected(reason=Reason.KEYSPACE_UNKNOWN)
    if keyspace.is_dropping:
        return KeyspaceChanged(keyspace_id=keyspace.keyspace_id)
    if keyspace is data.keyspaces.default:
        return Rejected(reason=Reason.BAD_VALUE)
    if data.loads.are_active_in(keyspace.keyspace_id):
        return Rejected(reason=Reason.KEYSPACE_LOADING)
    _set_keyspace(data, replace(keyspace, is_dropping=True))
    for p in map(PartitionId, keyspace.partition_ids):
        data.moves.pop(p, None)
        data.stranded.pop(p, None)
        data.put_row(dropped_row(data.rows[p], data.version))
    return KeyspaceChanged(keyspace_id=keyspace.keyspace_id)


def _forget_keyspace(data: ClusterData, command: ForgetKeyspace) -> Result:
    if data.config is None:
        return Rejected(reason=Reason.NO_CLUSTER)
    keyspace = data.keyspaces.by_id(command.keyspace_id)
    if keyspace is None or not keyspace.is_dropping:
        return Rejected(reason=Reason.KEYSPACE_UNKNOWN)
    data.version += 1
    data.keyspace_list = without_keyspace(data.keyspace_list, keyspace.keyspace_id, data.version)
    return KeyspaceChanged(keyspace_id=keyspace.keyspace_id)


def _set_keyspace(data: ClusterData, keyspace: Keyspace) -> None:
    """Set the keyspace; raise the version if that is a change."""
    if data.keyspaces.by_id(keyspace.keyspace_id) == keyspace:
        return
    assert data.config is not None
    data.version += 1
    data.config = with_settings(data.config, keyspace)
    if data.keyspaces.by_id(keyspace.keyspace_id) != keyspace:  # settings outside the configuration
        data.keyspace_list = with_keyspace(data.keyspace_list, keyspace, data.version)


HANDLERS: Handlers = {
    CreateKeyspace: _create_keyspace,
    AlterKeyspace: _alter_keyspace,
    SetReplicationFactor: _set_replication_factor,
    DropKeyspace: _drop_keyspace,
    ForgetKeyspace: _forget_keyspace,
}
