"""Applies changes of keyspaces, ``default`` among them: rules in ``keyspaces``."""

from __future__ import annotations

from dataclasses import replace

from koinon_coordinator.core.cluster import keyspaces
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
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceId, half_of
from koinon_proto.contract.table import PartitionId


def _create_keyspace(data: ClusterData, command: CreateKeyspace) -> Result:
    if data.config is None or not data.rows:
        return Rejected(reason=Reason.NO_CLUSTER)
    refusal = keyspaces.creation_refusal(command, data.keyspaces, data.rows, data.live)
    if refusal is not None:
        return Rejected(reason=refusal)
    rows = [
        keyspaces.created_row(p, replicas, data.row(p), data.version + 1)
        for p, replicas in zip(command.keyspace.partition_ids, command.replicas, strict=True)
    ]
    made = [row for row in rows if row is not None]
    if len(made) < len(rows):
        return Rejected(reason=Reason.BAD_VALUE)
    data.last_keyspace_id += 1
    keyspace_id = KeyspaceId(data.last_keyspace_id)
    _set_keyspace(data, replace(command.keyspace, keyspace_id=keyspace_id))
    for row in made:
        data.put_row(row)
    return KeyspaceChanged(keyspace_id=keyspace_id)


def _alter_keyspace(data: ClusterData, command: AlterKeyspace) -> Result:
    if data.config is None:
        return Rejected(reason=Reason.NO_CLUSTER)
    before = data.usable_keyspace(command.keyspace.keyspace_id)
    if before is None:
        return Rejected(reason=Reason.KEYSPACE_UNKNOWN)
    after = keyspaces.altered(before, command.keyspace)
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
        data.put_row(keyspaces.dropped_row(data.rows[p], data.version))
    return KeyspaceChanged(keyspace_id=keyspace.keyspace_id)


def _forget_keyspace(data: ClusterData, command: ForgetKeyspace) -> Result:
    if data.config is None:
        return Rejected(reason=Reason.NO_CLUSTER)
    keyspace = data.keyspaces.by_id(command.keyspace_id)
    if keyspace is None or not keyspace.is_dropping:
        return Rejected(reason=Reason.KEYSPACE_UNKNOWN)
    data.version += 1
    data.keyspace_list = keyspaces.without_keyspace(
        data.keyspace_list, keyspace.keyspace_id, data.version
    )
    return KeyspaceChanged(keyspace_id=keyspace.keyspace_id)


def _set_keyspace(data: ClusterData, keyspace: Keyspace) -> None:
    """Let the keyspace be so; a version, if that is a change."""
    if data.keyspaces.by_id(keyspace.keyspace_id) == keyspace:
        return
    assert data.config is not None
    data.version += 1
    data.config = keyspaces.with_settings(data.config, keyspace)
    if data.keyspaces.by_id(keyspace.keyspace_id) != keyspace:  # more than the config says
        data.keyspace_list = keyspaces.with_keyspace(data.keyspace_list, keyspace, data.version)


HANDLERS: Handlers = {
    CreateKeyspace: _create_keyspace,
    AlterKeyspace: _alter_keyspace,
    SetReplicationFactor: _set_replication_factor,
    DropKeyspace: _drop_keyspace,
    ForgetKeyspace: _forget_keyspace,
}
