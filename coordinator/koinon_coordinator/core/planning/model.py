"""The planner's input and output: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from koinon_proto.contract.table import NO_NODE, NodeNumber, PartitionId

Replicas = tuple[NodeNumber, ...]
UNBOUNDED = 1 << 62
"""The room of a node that reports no bound."""
TARGET = 1.3
"""The load of the busiest node over the mean, for plans by load that name none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanNode:
    """A node as the planner sees it.

    ``takes``: it may get replicas (live, neither draining nor gone). ``gives``: it will be emptied
    (draining, gone, or of another pool). A node with neither is down: it keeps its replicas, since
    it is expected back. ``weight`` is its share relative to the others', at least 1. ``pool``: it
    holds replicas of the keyspaces of this pool. ``gives_because`` is text for operators.
    """

    number: NodeNumber
    rack: str
    weight: int
    takes: bool
    gives: bool = False
    pool: str = ""
    gives_because: str = "is being drained"
    # The bytes that the node may still take after all moves that are queued or under way; negative
    # if it holds too many already. It changes all the time, so comparisons ignore it.
    room: int = field(default=UNBOUNDED, compare=False)
    room_limit: str = field(default="", compare=False)  # the bound behind ``room``, as text
    room_known: bool = field(default=True, compare=False)  # whether the node has reported it
    replicas_max: int = UNBOUNDED  # of one keyspace; more would not fit into ``room``


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The replicas of each partition, and the nodes.

    ``replicas[p]`` are partition ``p``'s replicas after all moves that are queued or under way,
    preferred primary first. Partitions with such a move are ``fixed``: they are counted and not
    touched. ``names`` are for texts only. ``sizes[p]`` estimates the bytes of a replica of ``p``;
    (): all are 0.
    """

    nodes: tuple[PlanNode, ...]
    replicas: tuple[Replicas, ...]
    fixed: frozenset[PartitionId]
    replication_factor: int
    names: Mapping[NodeNumber, str] = field(default_factory=dict)
    sizes: tuple[int, ...] = field(default=(), compare=False)
    rest_by_size: bool = field(default=False, compare=False)  # see ``room.place_by_size``


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMove:
    """One partition's change of replicas. A target with the same members in another order changes
    the preferred primary and copies nothing. ``reason`` is text for operators.
    """

    partition_id: PartitionId
    origin: Replicas
    target: Replicas
    reason: str


class RefusalCode(Enum):
    """Reasons why a plan leaves a change undone."""

    NOT_ENOUGH_NODES = "not_enough_nodes"
    """Partitions keep fewer replicas than wanted, or a replica on a node that should be emptied."""
    NOT_ENOUGH_RACKS = "not_enough_racks"
    """Partitions have two replicas on one rack, since too few racks take replicas."""
    NO_TARGET = "no_target"
    """The named node cannot take the place: the node or its rack has a replica of the partition."""
    MOVE_UNDER_WAY = "move_under_way"
    """Partitions need a change and have a move queued or under way: plan again after it."""
    NODE_DOWN = "node_down"
    """A node is down: it keeps its replicas, or it cannot take any."""
    NO_ROOM = "no_room"
    """A node has no room for replicas that it should get. Partitions are listed if no other node
    could take them either.
    """
    ROOM_UNKNOWN = "room_unknown"
    """The room of a node that gets replicas is unknown: the plan is complete, but the node's moves
    wait for its report.
    """
    HOT_PARTITION = "hot_partition"
    """A node stays too busy by one partition, which would make any other node as busy."""
    NO_GAIN = "no_gain"
    """A node stays too busy: no move of its partitions brings a gain that pays."""
    RESTING = "resting"
    """A node stays too busy for now: its partitions are moving, or have moved just before."""
    LOAD_UNKNOWN = "load_unknown"
    """A node has not reported its load yet, so nothing is planned by load."""
    SLOW_NODE = "slow_node"
    """A node works more slowly, or faster, than its weight says: a weight is proposed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A change left undone. ``node_number`` is ``NO_NODE`` if no single node is the cause."""

    code: RefusalCode
    reason: str
    node_number: NodeNumber = NO_NODE
    partition_ids: tuple[PartitionId, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """The replica counts of one node; ``primaries`` are preferred ones. Of plans by load also its
    load, and its capacity relative to the other nodes' (0: it takes no replicas).
    """

    node_number: NodeNumber
    replicas: int
    primaries: int
    load: float = 0.0
    capacity: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Moves in order of partitions, and the counts before and after. The same layout and request
    give the same plan and ``plan_id``; another layout gives another id, even for the same moves.
    """

    plan_id: str
    moves: tuple[PlannedMove, ...]
    before: tuple[Balance, ...]
    after: tuple[Balance, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadLayout:
    """The nodes of one pool, and the partitions of the keyspaces in it, in columns.

    ``lead[i]`` is the load of partition ``partition_ids[i]`` on its primary, ``follow[i]`` that on
    each other replica, ``sizes[i]`` the bytes of a replica. ``speeds``: of nodes that proved to be
    slower than their weights say, a part of 1. ``least``: a node with less load than this needs no
    relief.
    """

    nodes: tuple[PlanNode, ...]
    partition_ids: tuple[PartitionId, ...]
    replicas: tuple[Replicas, ...]
    lead: tuple[float, ...]
    follow: tuple[float, ...]
    sizes: tuple[int, ...]
    still: frozenset[PartitionId] = frozenset()
    speeds: Mapping[NodeNumber, float] = field(default_factory=dict)
    names: Mapping[NodeNumber, str] = field(default_factory=dict)
    least: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadAim:
    """The target of a plan by load, and the kinds of moves that the plan may use."""

    target: float = TARGET
    leaders_only: bool = False

    @property
    def aim(self) -> float:
        """The pressure over the mean that relieved nodes get to."""
        return 1 + (self.target - 1) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """The part of a plan that concerns one pool."""

    moves: tuple[PlannedMove, ...]
    before: tuple[Balance, ...]
    after: tuple[Balance, ...]
    refusals: tuple[Refusal, ...]
