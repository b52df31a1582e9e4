"""What can be committed, and what comes of it.

A command is decided by the leader, carried by the log, and applied by every member. It names the
epochs that it was decided on, so that it has an effect once at most, however often a retry or a
resend puts it into the log:

=======================  ==========================================================
``CreateCluster``        only while there is no cluster
``RegisterNode``         only at ``known_node_epoch``; a copy of the registration that
                         made the current epoch (same ``registration_id``, not yet
                         confirmed) answers that epoch again
``ConfirmRegistration``  only at ``node_epoch``; the second changes nothing
``AssignPartitions``     only while no partition is assigned
``FenceNode``            only at ``node_epoch``, only if not fenced already
``PartitionsHosted``     each row only at its ``primary_epoch`` and ``partition_epoch``
=======================  ==========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from koinon_proto.table import ClusterConfig, NodeId, NodeNumber, PartitionId


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateCluster:
    """Give the group its cluster: an id and what never changes afterwards."""

    config: ClusterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisterNode:
    """Begin a new epoch of a node; see ``ClusterState`` for what becomes of its partitions.

    ``last_node_epoch`` is what the node's store says, ``known_node_epoch`` what the leader's state
    said when it decided (0: no such node).
    """

    node_id: NodeId
    address: str
    rack: str
    store_id: str
    last_node_epoch: int
    registration_id: str
    known_node_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfirmRegistration:
    """The node has its epoch: it heartbeats with it. Committed before the first heartbeat of an
    epoch is acknowledged, hence before the first lease under it.
    """

    node_number: NodeNumber
    node_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignPartitions:
    """The replicas of every partition, by ``partition_id``, first = preferred primary. Decided by
    the leader's placer and carried whole, so that another placer never changes history.
    """

    replicas: tuple[tuple[NodeNumber, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FenceNode:
    """End a node's epoch: it leads nothing until it registers anew."""

    node_number: NodeNumber
    node_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedPartition:
    """A host command that was carried out, at the epochs it was given with."""

    partition_id: PartitionId
    primary_epoch: int
    partition_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionsHosted:
    """The node serves these partitions: they are online."""

    node_number: NodeNumber
    node_epoch: int
    hosted: tuple[HostedPartition, ...]


Command = (
    CreateCluster
    | RegisterNode
    | ConfirmRegistration
    | AssignPartitions
    | FenceNode
    | PartitionsHosted
)


class Reason(Enum):
    """Why a command had no effect."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """Nothing was changed."""

    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """The node's number and epoch. ``copies_lost`` counts the copies that were put out of
    ``in_sync`` because the store is not the one known, ``stranded`` the partitions left without
    any copy by that, ``reclaimed`` those that came back with the store that they had waited for;
    ``repeated``: this was a copy of a registration applied before.
    """

    node_number: NodeNumber
    node_epoch: int
    copies_lost: int = 0
    stranded: int = 0
    reclaimed: int = 0
    repeated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """The command took effect on ``rows_changed`` rows."""

    rows_changed: int = 0


Result = Rejected | Registered | Applied
