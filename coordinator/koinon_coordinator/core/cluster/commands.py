"""The commands of the replicated log, and their results.

The leader decides on a command, the log carries it, and every member applies it. A command names
the epochs of the decision, so that it has an effect at most once, however often a retry or a resend
puts it into the log:

=======================  ==========================================================
``CreateCluster``        only while there is no cluster
``RegisterNode``         only at ``known_node_epoch``; a copy of the registration that
                         made the current epoch (same ``registration_id``, not yet
                         confirmed) answers that epoch again
``ConfirmRegistration``  only at ``node_epoch``; the second changes nothing
``AssignPartitions``     only while no partition is assigned
``FenceNode``            only at ``node_epoch``, only if not fenced already
``PartitionsHosted``     each row only at its ``primary_epoch`` and ``partition_epoch``
``AlterPartitions``      only at ``node_epoch``; each row only at its two epochs
``AcceptPlan``           only if every row has the replicas that its move begins with and
                         no move yet
``StartMoves``           each only while it is queued
``FinishMoves``          each only while it runs and everything that it needs is in sync
``CancelMoves``          each only while it is queued, or runs and enough replicas are in
                         sync where it turns to; turning back twice is once
``SetMoveSettings``      sets the same again
``SetNodeStatus``        sets the same again; LEFT only while no row names the node
``WantPrimaries``        sets the same again
``ForcePrimary``         only at ``partition_epoch``, only while the partition is offline
``SetReplicationFactor`` sets the same again
``CreateKeyspace``       only while no keyspace has its name or one of its partitions
``AlterKeyspace``        sets the same again; only while there is that keyspace
``DropKeyspace``         once an id; only while no bulk load is under way in it
``ForgetKeyspace``       only while it is being dropped
``OpenLoad``             once a ``job_id``, and once a batch of a streaming query
``CommitLoad``           only while the load is open; the same attempts once more change nothing
``AbortLoad``            only while the load is open; the second changes nothing
``PartitionsMerged``     each partition only while it waits to be merged
``PutRole``, ``PutUser`` set the same again; these and those below only at
                         ``expected_version``, where that is given
``AddToken``             once an id; the same token once more changes nothing
``DropRole`` …           only while there is such a role, user or token
``RevokeCertificate`` …  sets the same again
``CreateGroup``          once a name
``RaiseGeneration``      only at the group's ``generation``
``DeleteGroup``          only while there is the group
=======================  ==========================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from koinon_proto.contract.access import Role, Token, User
from koinon_proto.contract.bulk_loads import LOAD_TIMEOUT_MS, LoadMode, LoadState, StreamBatch
from koinon_proto.contract.groups import GroupStrategy
from koinon_proto.contract.keyspaces import DEFAULT_ID, Keyspace, KeyspaceId
from koinon_proto.contract.table import (
    DEFAULT_WEIGHT,
    NO_NODE,
    ClusterConfig,
    MoveSettings,
    NodeId,
    NodeNumber,
    NodeStatus,
    PartitionId,
    RedisPort,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateCluster:
    """Create the cluster: its id, and the settings that never change afterwards."""

    config: ClusterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisterNode:
    """Begin a new epoch of a node; ``members`` has the effects on its partitions.

    ``last_node_epoch`` is the epoch in the node's store, ``known_node_epoch`` the epoch in the
    leader's state at the decision (0: no such node).
    """

    node_id: NodeId
    address: str
    rack: str
    store_id: str
    last_node_epoch: int
    registration_id: str
    known_node_epoch: int
    weight: int = DEFAULT_WEIGHT
    redis_address: str = ""
    pool: str = ""
    redis_ports: tuple[RedisPort, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfirmRegistration:
    """Record that the node knows its epoch: it has sent a heartbeat with it. Committed before the
    first heartbeat of an epoch is acknowledged, hence before the first lease under it.
    """

    node_number: NodeNumber
    node_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignPartitions:
    """The replicas of every partition of ``default``, by ``partition_id``; the first is the
    preferred primary. The leader's placer decides, and the command carries the whole result, so
    that a later version of the placer does not change history.
    """

    replicas: tuple[tuple[NodeNumber, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FenceNode:
    """End a node's epoch: it leads nothing until it registers anew."""

    node_number: NodeNumber
    node_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedPartition:
    """A host command that a node has carried out, with the epochs of the command."""

    partition_id: PartitionId
    primary_epoch: int
    partition_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionsHosted:
    """Record that the node serves these partitions: they are online."""

    node_number: NodeNumber
    node_epoch: int
    hosted: tuple[HostedPartition, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionChange:
    """A primary's proposal for its row: the whole new ``in_sync``, and the node to hand over to
    (``NO_NODE``: none). Valid only at these two epochs.
    """

    partition_id: PartitionId
    primary_epoch: int
    partition_epoch: int
    in_sync: tuple[NodeNumber, ...]
    hand_over_to: NodeNumber = NO_NODE


@dataclass(frozen=True, kw_only=True, slots=True)
class AlterPartitions:
    """Change rows as their primary proposes. Each row is accepted or rejected by itself."""

    node_number: NodeNumber
    node_epoch: int
    changes: tuple[PartitionChange, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """The change of a partition's replicas from ``origin`` to ``target``. Rebalance, drain,
    replace, re-replication and a change of the replication factor all consist of moves.

    ``running`` once the row has been changed; ``cancelled`` once it was turned back, with
    ``origin`` and ``target`` exchanged.
    """

    partition_id: PartitionId
    origin: tuple[NodeNumber, ...]
    target: tuple[NodeNumber, ...]
    reason: str
    plan_id: str
    plan_moves: int = 0
    running: bool = False
    cancelled: bool = False

    @property
    def added(self) -> tuple[NodeNumber, ...]:
        """The nodes that get a replica by the move."""
        return tuple(n for n in self.target if n not in self.origin)

    @property
    def removed(self) -> tuple[NodeNumber, ...]:
        """The nodes that lose their replica by the move."""
        return tuple(n for n in self.origin if n not in self.target)


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptPlan:
    """Queue all of these moves, or none."""

    plan_id: str
    moves: tuple[Move, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartMoves:
    """Start queued moves: they change their rows."""

    partition_ids: tuple[PartitionId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishMoves:
    """Finish moves whose target is in sync and led: the other replicas are removed."""

    partition_ids: tuple[PartitionId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelMoves:
    """Drop queued moves, and turn running ones back to their origin
    (``move_steps.can_turn_back``).
    """

    partition_ids: tuple[PartitionId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SetMoveSettings:
    settings: MoveSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class SetNodeStatus:
    """Set a node's status. ``DRAINING``: it gets no more replicas; ``ACTIVE``: it does again;
    ``LEFT``: it has left for good.
    """

    node_number: NodeNumber
    status: NodeStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class WantPrimaries:
    """Set the wanted primaries, which should lead as soon as they are in sync (``NO_NODE``: no
    wish).
    """

    wishes: tuple[tuple[PartitionId, NodeNumber], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForcePrimary:
    """Elect a replica by an operator's order, although it may lack acknowledged writes. It alone is
    in sync then.
    """

    partition_id: PartitionId
    node_number: NodeNumber
    partition_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SetReplicationFactor:
    """Set the number of replicas that plans aim at in a keyspace. ``min_in_sync`` becomes half of
    it, rounded up.
    """

    replication_factor: int
    keyspace_id: KeyspaceId = DEFAULT_ID


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateKeyspace:
    """Create a keyspace. ``apply`` gives it an id (0 in this command). ``replicas`` as in
    ``AssignPartitions``, for each of its partitions.
    """

    keyspace: Keyspace
    replicas: tuple[tuple[NodeNumber, ...], ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlterKeyspace:
    """Set all settings of a keyspace that can be altered (``keyspaces.ALTERABLE``)."""

    keyspace: Keyspace


@dataclass(frozen=True, kw_only=True, slots=True)
class DropKeyspace:
    """Drop a keyspace: clients cannot use it any more, and nodes erase their copies."""

    keyspace_id: KeyspaceId


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetKeyspace:
    """Free the partition ids of a dropped keyspace: no node that may come back holds any of its
    data.
    """

    keyspace_id: KeyspaceId


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLoad:
    """Begin a bulk load, whose id is this command's log index; see ``load_rules.py``."""

    job_id: str
    mode: LoadMode
    prefix: bytes = b""
    stream_batch: StreamBatch | None = None
    description: str = ""
    timeout_ms: int = LOAD_TIMEOUT_MS
    owner: str = ""
    keyspace_id: KeyspaceId = DEFAULT_ID


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitLoad:
    """Commit a load: the rows staged by these attempts will be merged, in the partitions with
    staged rows (``partition_ids``, ascending) or, for an overwriting load, in all.
    """

    load_id: int
    attempts: tuple[int, ...] = field(repr=False)
    partition_ids: tuple[PartitionId, ...] = field(repr=False)
    rows: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortLoad:
    """End a load without an effect on records."""

    load_id: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionsMerged:
    """Record that the rows which a load has staged in these partitions are readable."""

    load_id: int
    partition_ids: tuple[PartitionId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PutRole:
    """Create a role, or replace the role of this name. ``expected_version``, here and below: apply
    only at this version of the access state; None: at any.
    """

    role: Role
    expected_version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DropRole:
    name: str
    expected_version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PutUser:
    """Create a user, or replace the user of this name."""

    user: User
    expected_version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DropUser:
    """Drop a user and its tokens."""

    name: str
    expected_version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AddToken:
    token: Token
    expected_version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DropToken:
    token_id: str
    expected_version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RevokeCertificate:
    """Refuse the certificate with this serial number (``access.serial_text``)."""

    serial: str
    expected_version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreCertificate:
    """Take a revocation back."""

    serial: str
    expected_version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateGroup:
    """Create a consumer group, unless there is one with this name. ``created_at_ms``: Unix time."""

    name: str
    strategy: GroupStrategy
    created_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RaiseGeneration:
    """Raise a group's generation by one from ``generation``. ``session_ms``: the longest session of
    the members that will be granted something with it; 0: there is no member.
    """

    group_id: int
    generation: int
    session_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteGroup:
    group_id: int


GroupCommand = CreateGroup | RaiseGeneration | DeleteGroup
AccessCommand = (
    PutRole
    | DropRole
    | PutUser
    | DropUser
    | AddToken
    | DropToken
    | RevokeCertificate
    | RestoreCertificate
)
LoadCommand = OpenLoad | CommitLoad | AbortLoad | PartitionsMerged
Command = (
    CreateCluster
    | RegisterNode
    | ConfirmRegistration
    | AssignPartitions
    | FenceNode
    | PartitionsHosted
    | AlterPartitions
    | AcceptPlan
    | StartMoves
    | FinishMoves
    | CancelMoves
    | SetMoveSettings
    | SetNodeStatus
    | WantPrimaries
    | ForcePrimary
    | SetReplicationFactor
    | CreateKeyspace
    | AlterKeyspace
    | DropKeyspace
    | ForgetKeyspace
    | LoadCommand
    | AccessCommand
    | GroupCommand
)


class Reason(Enum):
    """The reason why a command had no effect."""

    NO_CLUSTER = "the cluster has not been created"
    CLUSTER_EXISTS = "the cluster has been created already"
    STALE_EPOCH = "the node's epoch is another by now"
    UNKNOWN_NODE = "no node has this number"
    NODE_LEFT = "the node has left the cluster"
    ALREADY_FENCED = "the node is fenced already"
    ALREADY_CONFIRMED = "the epoch is confirmed already"
    ALREADY_ASSIGNED = "the partitions are assigned already"
    BAD_ASSIGNMENT = "the assignment does not fit the cluster or names a node that is not live"
    NOTHING_CURRENT = "none of the rows is at the named epochs any more"
    MOVED_ON = "a row of the plan has changed or is being moved already"
    BAD_TARGET = "a target does not fit the cluster: a node is unknown, has left, or is there twice"
    NODE_IN_USE = "the node is still a replica of something, or a move's target"
    UNKNOWN_PARTITION = "there is no such partition"
    NOT_A_REPLICA = "the node is not a live replica of the partition"
    NOT_OFFLINE = "the partition is not offline: nothing has to be forced"
    BAD_VALUE = "the value does not fit the cluster"
    LOAD_UNKNOWN = "there is no such load, or it ended long ago"
    LOAD_CLOSED = "the load has ended, or was committed with other attempts"
    LOAD_DIFFERS = "the load was opened with another mode, prefix or batch"
    BATCH_APPLIED = "this batch of the streaming query, or a later one, has been applied"
    TOO_MANY_LOADS = "too many loads are open or being merged"
    TOO_MANY_ATTEMPTS = "too many attempts are being merged"
    TOO_MANY_QUERIES = "too many streaming queries have applied a batch"
    KEYSPACE_EXISTS = "a keyspace has this name, or one of these partitions"
    KEYSPACE_UNKNOWN = "there is no such keyspace, or it has been dropped"
    KEYSPACE_LOADING = "a bulk load is under way in the keyspace"
    ACCESS_CHANGED = "access has been changed meanwhile"
    BAD_ACCESS = "access cannot be changed so"
    GROUP_UNKNOWN = "there is no such consumer group"
    GENERATION_RAISED = "the group's generation has been raised meanwhile"
    TOO_MANY_GROUPS = "too many consumer groups"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """The command had no effect."""

    reason: Reason


class StoreStanding(Enum):
    """Relation of the store that a node registers to the store known for that node."""

    KNOWN = "known"
    OLD = "old"
    """The known store at an earlier epoch: a disk that was rolled back, or an old copy."""
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """The node's number and epoch. ``copies_lost`` counts the copies removed from ``in_sync``
    because the store is not the known one, ``stranded`` the partitions that lost their last copy by
    that, ``reclaimed`` the partitions that came back with their lost store. ``repeated``: the
    registration was applied before. ``store`` compares the store with the known one.
    ``known_epoch`` is the node's epoch before (0: none).
    """

    node_number: NodeNumber
    node_epoch: int
    copies_lost: int = 0
    stranded: int = 0
    reclaimed: int = 0
    repeated: bool = False
    store: StoreStanding = StoreStanding.KNOWN
    known_epoch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """The command changed ``rows_changed`` rows (or queued moves of rows). ``rejected`` are the
    named rows on which it had no effect.
    """

    rows_changed: int = 0
    rejected: tuple[PartitionId, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOutcome:
    """The load and its state after the command. ``load_id`` 0: the batch of the streaming query was
    applied before.
    """

    load_id: int
    state: LoadState


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyspaceChanged:
    """The keyspace has the settings of the command, by it or before it."""

    keyspace_id: KeyspaceId


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessChanged:
    """The access state has the contents of the command, by it or before it. ``version``: of the
    access state.
    """

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChanged:
    """The group after the command, or as the command found it."""

    group_id: int
    generation: int


Result = (
    Rejected | Registered | Applied | LoadOutcome | KeyspaceChanged | AccessChanged | GroupChanged
)
