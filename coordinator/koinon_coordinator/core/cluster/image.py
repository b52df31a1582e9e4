"""The whole replicated state at one moment, immutable: what a snapshot of the Raft log holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from koinon_coordinator.core.cluster.bulk_loads import NO_LOADS, LoadsImage
from koinon_coordinator.core.cluster.commands import Move
from koinon_coordinator.core.cluster.members import NodeRecord, Stranded
from koinon_proto.contract.access import NO_ACCESS_STATE, AccessState
from koinon_proto.contract.keyspaces import NO_KEYSPACES, KeyspaceList
from koinon_proto.contract.table import ClusterConfig, MoveSettings, PartitionRow


@dataclass(frozen=True, kw_only=True, slots=True)
class StateImage:
    """All of the state."""

    config: ClusterConfig | None
    table_version: int
    last_node_number: int
    nodes: tuple[NodeRecord, ...]
    rows: tuple[PartitionRow, ...]
    moves: tuple[Move, ...] = ()
    move_settings: MoveSettings = field(default_factory=MoveSettings)
    stranded: tuple[Stranded, ...] = ()
    loads: LoadsImage = NO_LOADS
    access: AccessState = NO_ACCESS_STATE
    keyspaces: KeyspaceList = NO_KEYSPACES
    last_keyspace_id: int = 0


EMPTY_IMAGE = StateImage(config=None, table_version=0, last_node_number=0, nodes=(), rows=())
