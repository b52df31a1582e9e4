"""Keyspaces in the replicated state: created, altered, dropped and forgotten. Pure.

    (created) --DropKeyspace--> dropping --ForgetKeyspace--> (gone, its partition ids are free)

* An id is given once. A name, or a range of partition ids, may be another keyspace's later.
* ``DropKeyspace`` takes all replicas out of its rows. From then on no node may serve them, and
  each erases its copy as it does after a move. The leader proposes ``ForgetKeyspace`` once every
  node that may come back has said that it holds nothing of it. So the first primary of a keyspace
  that gets these ids begins with nothing.
* Rows that come back go on at higher epochs: what is late from the keyspace before is refused.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from koinon_coordinator.core.cluster.commands import CreateKeyspace, Reason
from koinon_coordinator.core.cluster.election import PRIMARY_EPOCH_MAX
from koinon_proto.contract.keyspaces import (
    ALTERABLE,
    DEFAULT_ID,
    KEYSPACES_MAX,
    Keyspace,
    KeyspaceId,
    KeyspaceList,
    Keyspaces,
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
    """Return why the keyspace cannot be created, or None."""
    wanted = command.keyspace
    ids = wanted.partition_ids
    if (
        wanted.keyspace_id != DEFAULT_ID
        or wanted.is_dropping
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
    version: int,
) -> PartitionRow | None:
    """Return the first row of a partition, or of its next life; None: its epochs are used up."""
    primary_epoch = before.primary_epoch + 1 if before is not None else 1
    partition_epoch = before.partition_epoch + 1 if before is not None else 1
    if primary_epoch > PRIMARY_EPOCH_MAX:
        return None
    return PartitionRow(
        partition_id=PartitionId(partition_id),
        replicas=replicas,
        in_sync=replicas,
        primary=replicas[0],
        primary_epoch=primary_epoch,
        partition_epoch=partition_epoch,
        status=PartitionStatus.ASSIGNED,
        changed_at=version,
    )


def dropped_row(row: PartitionRow, version: int) -> PartitionRow:
    """Return the row of a partition that no node keeps."""
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
    """Return the keyspace as it is wanted; None if that would change what never does, or is out
    of bounds.
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
    """Return the cluster's configuration with what it has of the keyspace ``default``."""
    if keyspace.keyspace_id != DEFAULT_ID:
        return config
    return replace(config, **{name: getattr(keyspace, name) for name in _OF_CONFIG})


def with_keyspace(known: KeyspaceList, keyspace: Keyspace, version: int) -> KeyspaceList:
    """Return the list in which the keyspace is so."""
    others = [k for k in known.keyspaces if k.keyspace_id != keyspace.keyspace_id]
    ordered = sorted((*others, keyspace), key=lambda k: (k.base, k.keyspace_id))
    return KeyspaceList(changed_at=version, keyspaces=tuple(ordered))


def without_keyspace(known: KeyspaceList, keyspace_id: KeyspaceId, version: int) -> KeyspaceList:
    """Return the list without the keyspace."""
    left = tuple(k for k in known.keyspaces if k.keyspace_id != keyspace_id)
    return KeyspaceList(changed_at=version, keyspaces=left)
