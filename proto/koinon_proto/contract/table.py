"""The partition table as every process holds it: immutable, versioned, mergeable.

A table says which node leads each partition, at which epoch. The higher ``table_version`` wins
within one ``cluster_id``; tables of different clusters never mix. Every node entry and every row
carries the version at which it last changed, so any holder can say what changed since a version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple, NewType

from koinon_proto.contract.errors import (
    InvalidArgumentError,
    NotPrimaryError,
)
from koinon_proto.contract.keyspaces import (
    DEFAULT,
    DEFAULT_ID,
    NO_KEYSPACES,
    KeyspaceId,
    KeyspaceList,
    Keyspaces,
)
from koinon_proto.contract.keyspaces import ClusterConfig as ClusterConfig

NodeId = NewType("NodeId", str)
"""A node's name, chosen by its operator and unique in the cluster."""
NodeNumber = NewType("NodeNumber", int)
"""A node's number in table rows: given at first registration, from 1 up, never reused."""
PartitionId = NewType("PartitionId", int)

NO_NODE = NodeNumber(0)
MAX_PARTITION_COUNT = 65_536
"""A stored key begins with its partition as a big-endian u16."""
SLOT_COUNT = 16_384
"""Of Redis Cluster's hash slots, which the partitions of ``crc16`` divide evenly."""
MAX_KEY_BYTES = 500
MAX_TTL_MS = 100 * 366 * 24 * 3600 * 1000
"""A hundred years: more is a mistake in the unit."""
MAX_BATCH_ROWS = 100_000
MAX_BATCH_BYTES = 16 * 1024 * 1024
MAX_ATOMIC_OPERATIONS = 1_000
MAX_ATOMIC_BYTES = 4 * 1024 * 1024
"""The bounds of an atomic batch: its operations, and the bytes of their keys and values."""
MAX_MESSAGE_BYTES = MAX_BATCH_BYTES + 4 * 1024 * 1024
"""The gRPC message bound: a full batch and what the columns beside it need."""

SEQUENCE_COUNTER_BITS = 40


def partition_count_fault(partitioner: str, count: int) -> str:
    """Return why a cluster with this partitioner cannot have ``count`` partitions; '' if it can."""
    if not 1 <= count <= MAX_PARTITION_COUNT:
        return f"must be from 1 to {MAX_PARTITION_COUNT}"
    if partitioner.partition("(")[0] == "crc16" and (count > SLOT_COUNT or count & (count - 1)):
        return f"must be a power of two up to {SLOT_COUNT} with the partitioner crc16"
    return ""


def first_sequence(primary_epoch: int) -> int:
    """Return the sequence that precedes the first record written in ``primary_epoch``."""
    return primary_epoch << SEQUENCE_COUNTER_BITS


class NodeStatus(IntEnum):
    """A member's standing; numbers are those of the wire."""

    FENCED = 1
    ACTIVE = 2
    DRAINING = 3
    LEFT = 4


class PartitionStatus(IntEnum):
    """The states of a partition; numbers are those of the wire."""

    ASSIGNED = 1
    ONLINE = 2
    OFFLINE = 3


class OfflineReason(IntEnum):
    """The reason why a partition is offline; numbers are those of the wire."""

    NONE = 0
    NO_LIVE_REPLICA = 1
    STORE_LOST = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveSettings:
    """The settings by which replicas move. ``bytes_per_second`` bounds what each node receives as a
    new replica (0: no limit), ``moves_per_node`` the moves at once that a node gives to or takes
    from.
    """

    paused: bool = False
    bytes_per_second: int = 0
    moves_per_node: int = 64


DEFAULT_WEIGHT = 100


class RedisPort(NamedTuple):
    """A node's port for clients of Redis in a keyspace other than ``default``, which it names."""

    keyspace: str
    address: str  # host:port


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """One storage node as the table knows it. ``weight`` is its share of partitions, relative to
    the others'. ``registration_digest`` is of the registration that made ``node_epoch``
    (``registration_digest``): the id itself only the node and the coordinators know.
    ``redis_address`` is where it speaks the Redis protocol; '': nowhere. ``redis_ports``: the
    same of other keyspaces than ``default``, one each. ``pool``: it takes replicas of the
    keyspaces of this pool.
    """

    number: NodeNumber
    node_id: NodeId
    address: str
    rack: str
    node_epoch: int
    status: NodeStatus
    store_id: str
    changed_at: int
    weight: int = DEFAULT_WEIGHT
    registration_digest: bytes = b""
    redis_address: str = ""
    pool: str = ""
    redis_ports: tuple[RedisPort, ...] = ()

    def redis_address_in(self, keyspace: str) -> str:
        """Return where clients of Redis are served in the keyspace of this name; '': nowhere."""
        if keyspace == DEFAULT:
            return self.redis_address
        return next((port.address for port in self.redis_ports if port.keyspace == keyspace), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionRow:
    """One partition's row. ``replicas`` is ordered, the first is the preferred primary; during a
    move it holds the target's replicas first, then those that are to be removed.
    ``wanted_primary``: the primary hands over to it as soon as it is in sync (``NO_NODE``: to
    none). A partition of no keyspace is ``unused``: it has no replicas.
    """

    partition_id: PartitionId
    replicas: tuple[NodeNumber, ...]
    in_sync: tuple[NodeNumber, ...]
    primary: NodeNumber
    primary_epoch: int
    partition_epoch: int
    adding: tuple[NodeNumber, ...] = ()
    removing: tuple[NodeNumber, ...] = ()
    status: PartitionStatus
    offline_reason: OfflineReason = OfflineReason.NONE
    changed_at: int
    wanted_primary: NodeNumber = NO_NODE

    @property
    def unused(self) -> bool:
        """True if the partition is of no keyspace: no node has a copy of it, or is to have one."""
        return not self.replicas

    @property
    def target(self) -> tuple[NodeNumber, ...]:
        """The replicas once the move under way is over; all replicas if there is no move."""
        return tuple(n for n in self.replicas if n not in self.removing)

    @property
    def settled(self) -> tuple[NodeNumber, ...]:
        """The replicas that were there before the move under way."""
        return tuple(n for n in self.replicas if n not in self.adding)


def registration_digest(registration_id: str) -> bytes:
    """Return the digest of a registration's id for the table; empty for an empty id."""
    return sha256(registration_id.encode()).digest() if registration_id else b""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveLoad:
    """A bulk load that is open (rows may be staged) or ``merging`` (it is committed). In each
    partition loads are merged in the order of their commits: ``committed_at`` is the log index.
    """

    load_id: int
    merging: bool
    committed_at: int = 0
    owner_digest: bytes = b""  # bulk_loads.owner_digest of the user that it is of
    keyspace_id: KeyspaceId = DEFAULT_ID


@dataclass(frozen=True, kw_only=True, slots=True)
class TableUpdate:
    """A whole table (``base_version`` 0) or what changed since ``base_version``."""

    cluster: ClusterConfig
    base_version: int
    table_version: int
    nodes: tuple[NodeInfo, ...]
    rows: tuple[PartitionRow, ...]
    moves: MoveSettings = MoveSettings()
    loads: tuple[ActiveLoad, ...] = ()
    keyspaces: KeyspaceList | None = None
    """None: as the base has them; of a whole table, none beside ``default``."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The whole table at one version. ``rows`` is empty until the cluster is bootstrapped,
    afterwards ``rows[p].partition_id == p``, as far as any keyspace ever reached. Rows of no
    keyspace are ``unused``.
    """

    cluster: ClusterConfig
    table_version: int
    nodes: Mapping[NodeNumber, NodeInfo]
    rows: Sequence[PartitionRow]
    moves: MoveSettings = MoveSettings()
    loads: tuple[ActiveLoad, ...] = ()
    keyspace_list: KeyspaceList = NO_KEYSPACES

    @property
    def bootstrapped(self) -> bool:
        return bool(self.rows)

    @cached_property
    def keyspaces(self) -> Keyspaces:
        """The keyspaces, ``default`` included."""
        return Keyspaces(self.cluster, self.keyspace_list)

    @cached_property
    def used_rows(self) -> Sequence[PartitionRow]:
        """The rows that belong to a keyspace."""
        return [row for row in self.rows if not row.unused]

    def check_partitions(self, partition_ids: Collection[int]) -> None:
        """Raise InvalidArgumentError if a request names a partition that does not exist."""
        greatest = int(max(partition_ids, default=0))
        if greatest >= len(self.rows):
            raise InvalidArgumentError(
                field="partition_ids",
                reason="no such partition",
                limit=len(self.rows) - 1,
                actual=greatest,
            )

    @cached_property
    def by_id(self) -> Mapping[NodeId, NodeInfo]:
        """The nodes by their names."""
        return {node.node_id: node for node in self.nodes.values()}

    def primary_of(self, partition_id: int) -> NodeInfo | None:
        """Return the node that leads the partition, or None."""
        return self.nodes.get(self.rows[partition_id].primary)

    def not_primary(self, partition_id: int) -> NotPrimaryError:
        """Return the refusal that names the partition's primary."""
        primary = self.primary_of(partition_id)
        return NotPrimaryError(
            partition_id=partition_id,
            primary=primary.node_id if primary else "",
            primary_address=primary.address if primary else "",
            primary_epoch=self.rows[partition_id].primary_epoch,
            table_version=self.table_version,
        )

    def since(self, version: int) -> TableUpdate:
        """Return the changes since ``version``; the whole table for 0 or a version unknown here.

        A version above this table's own gives an empty update that carries this table's version.
        """
        base = version if version > 0 else 0
        return TableUpdate(
            cluster=self.cluster,
            base_version=base,
            table_version=self.table_version,
            nodes=tuple(n for n in self.nodes.values() if not base or n.changed_at > base),
            rows=tuple(r for r in self.rows if not base or r.changed_at > base),
            moves=self.moves,
            loads=self.loads,
            keyspaces=self.keyspace_list if self.keyspace_list.changed_at > base else None,
        )


def apply_update(table: Table | None, update: TableUpdate) -> Table | None:
    """Return the table after ``update``; the old one unchanged if the update is not newer.

    Updates may be late, doubled or out of order. One whose base is above what is held cannot be
    applied and is ignored: the holder asks again by its own version.

    Raises:
        WrongClusterError: the update belongs to another cluster.
    """
    if table is None:
        if update.base_version:
            return None
        return Table(
            cluster=update.cluster,
            table_version=update.table_version,
            nodes={node.number: node for node in update.nodes},
            rows=_ordered(update.rows),
            moves=update.moves,
            loads=update.loads,
            keyspace_list=update.keyspaces or NO_KEYSPACES,
        )
    table.cluster.check_id(update.cluster.cluster_id, required=True)
    if update.table_version <= table.table_version or update.base_version > table.table_version:
        return table
    if not update.base_version or not table.rows:
        rows = _ordered(update.rows)
    else:
        rows = _changed(table.rows, update.rows)
    old_nodes = table.nodes if update.base_version else {}
    keyspaces = update.keyspaces
    if keyspaces is None:
        keyspaces = table.keyspace_list if update.base_version else NO_KEYSPACES
    after = replace(
        table,
        cluster=update.cluster,
        table_version=update.table_version,
        nodes={**old_nodes, **{node.number: node for node in update.nodes}},
        rows=rows,
        moves=update.moves,
        loads=update.loads,
        keyspace_list=keyspaces,
    )
    if keyspaces is table.keyspace_list and update.cluster == table.cluster:
        vars(after)["keyspaces"] = table.keyspaces  # with what they have found out of partitions
    return after


def _changed(
    rows: Sequence[PartitionRow], changed: Sequence[PartitionRow]
) -> tuple[PartitionRow, ...]:
    """Return the rows with the changed ones replaced; new rows follow the last."""
    after = list(rows)
    for row in _ordered(changed):
        if row.partition_id < len(after):
            after[row.partition_id] = row
        else:
            after.append(row)
    return tuple(after)


def _ordered(rows: Sequence[PartitionRow]) -> tuple[PartitionRow, ...]:
    return tuple(sorted(rows, key=lambda row: row.partition_id))
