"""The planner's input and output: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from koinon_proto.contract.table import NO_NODE, NodeNumber, PartitionId

Replicas = tuple[NodeNumber, ...]
UNBOUNDED = 1 << 62
"""The room of a node that says no bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanNode:
    """A node as the planner sees it.

    ``takes``: it may get replicas (live, neither draining nor gone). ``gives``: it is to be
    emptied (draining, gone, or of another pool). A node that does neither is down: it keeps what it
    has, for it is expected back. ``weight`` is its share relative to the others', at least 1.
    ``pool``: it holds replicas of the keyspaces of this pool. ``gives_because`` is for people.
    """

    number: NodeNumber
    rack: str
    weight: int
    takes: bool
    gives: bool = False
    pool: str = ""
    gives_because: str = "is being drained"
    # The bytes that it may still take once every move that is queued or under way is over; below 0
    # where it holds too many already. It changes all the time, and makes no two nodes differ.
    room: int = field(default=UNBOUNDED, compare=False)
    room_limit: str = field(default="", compare=False)  # the bound behind ``room``, for people
    room_known: bool = field(default=True, compare=False)  # whether the node was heard yet
    replicas_max: int = UNBOUNDED  # of one keyspace: more would not fit into ``room``


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The replicas that each node holds, and the nodes that may take some.

    ``replicas[p]`` are the replicas that partition ``p`` has once every move that is queued or
    under way is over, preferred primary first. The partitions that have such a move are ``fixed``:
    they are counted and not touched. ``names`` serve the texts only. ``sizes[p]`` estimates the
    bytes that a replica of ``p`` takes; (): none takes any.
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
    """One partition's change of replicas. A target of the same members in another order changes
    the preferred primary and copies nothing. ``reason`` is for people.
    """

    partition_id: PartitionId
    origin: Replicas
    target: Replicas
    reason: str


class RefusalCode(Enum):
    """Reasons for which a plan leaves something undone."""

    NOT_ENOUGH_NODES = "not_enough_nodes"
    """Partitions keep fewer replicas than wanted, or one on a node that was to be emptied."""
    NOT_ENOUGH_RACKS = "not_enough_racks"
    """Partitions have two replicas on one rack, for want of racks that take any."""
    NO_TARGET = "no_target"
    """The node named cannot take the place: it, or its rack, has a replica of the partition."""
    MOVE_UNDER_WAY = "move_under_way"
    """Partitions need a change and have a move queued or under way: plan again after it."""
    NODE_DOWN = "node_down"
    """A node is down: it keeps its replicas, or it cannot take any."""
    NO_ROOM = "no_room"
    """A node has no room for replicas that it was to get. Partitions are named where nobody else
    could take them either.
    """
    ROOM_UNKNOWN = "room_unknown"
    """The room of a node that gets replicas is not known: nothing is left undone, but its moves
    wait until the node is heard.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Something left undone. ``node_number`` is ``NO_NODE`` where no single node is the cause."""

    code: RefusalCode
    reason: str
    node_number: NodeNumber = NO_NODE
    partition_ids: tuple[PartitionId, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """The replicas of one node; ``primaries`` are preferred ones."""

    node_number: NodeNumber
    replicas: int
    primaries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Moves in order of partitions, and what they change. The same layout and wish give the same
    plan and the same ``plan_id``; another layout gives another id, even for the same moves.
    """

    plan_id: str
    moves: tuple[PlannedMove, ...]
    before: tuple[Balance, ...]
    after: tuple[Balance, ...]
    refusals: tuple[Refusal, ...]
