"""The whole replicated state at one moment, immutable: the contents of a Raft snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field

from koinon_coordinator.core.cluster.commands import Move, RegisterNode
from koinon_coordinator.core.cluster.group_rules import Group
from koinon_coordinator.core.cluster.load_rules import NO_LOADS, LoadsImage
from koinon_proto.contract.access import NO_ACCESS_STATE, AccessState
from koinon_proto.contract.keyspaces import NO_KEYSPACES, KeyspaceList
from koinon_proto.contract.table import (
    ClusterConfig,
    MoveSettings,
    NodeInfo,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
)

LIVE_STATUSES = frozenset({NodeStatus.ACTIVE, NodeStatus.DRAINING})


@dataclass(frozen=True, slots=True)
class StoreLife:
    """A store, and the node epoch of the last process on it."""

    store_id: str
    node_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stranded:
    """A partition that lost its last in-sync replica with a store, and that store. If the store's
    last epoch was never confirmed, ``registration_id`` made that epoch after ``base_node_epoch``;
    else "" and 0.
    """

    partition_id: PartitionId
    node: NodeNumber
    store: StoreLife
    registration_id: str = ""
    base_node_epoch: int = 0

    def waits_for(self, number: NodeNumber, command: RegisterNode) -> bool:
        """Return whether the node registers the very store that was lost. A node that never
        received the answer of its last registration states the epoch before, and repeats that
        registration.
        """
        if (number, command.store_id) != (self.node, self.store.store_id):
            return False
        unanswered = (self.registration_id, self.base_node_epoch)
        return command.last_node_epoch == self.store.node_epoch or (
            self.registration_id != ""
            and unanswered == (command.registration_id, command.last_node_epoch)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """A node, and the registration that made its current epoch. ``draining`` survives a fence,
    during which ``info.status`` does not show it.
    """

    info: NodeInfo
    registration_id: str
    base_node_epoch: int
    confirmed: bool
    draining: bool = False

    @property
    def live(self) -> bool:
        return self.info.status in LIVE_STATUSES

    @property
    def left(self) -> bool:
        return self.info.status is NodeStatus.LEFT

    @property
    def store(self) -> StoreLife:
        return StoreLife(self.info.store_id, self.info.node_epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateImage:
    """The whole state."""

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
    groups: tuple[Group, ...] = ()


EMPTY_IMAGE = StateImage(config=None, table_version=0, last_node_number=0, nodes=(), rows=())
