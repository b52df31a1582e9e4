"""Plans and moves of replicas as plain values, converted from replies.

A *plan* lists the partitions whose replicas would change, with the reasons. Its *moves* are queued
when it is executed; each adds replicas, waits until they are in sync, and then drops others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

from koinon.operate.views import view
from koinon_proto.contract import convert
from koinon_proto.contract.table import MoveSettings
from koinon_proto.v1 import admin_pb2


class PlanKind(IntEnum):
    """The aim of a plan; numbers are those of the wire."""

    REBALANCE = 1
    DRAIN = 2
    REPLACE = 3
    REPLICATION_FACTOR = 4


class PlanBy(IntEnum):
    """The measure by which a rebalance makes nodes even; numbers are those of the wire."""

    COUNT = 0
    LOAD = 1
    BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """A request for a plan: ``node_id`` for a drain, both nodes for a replacement; of a rebalance
    by load or bytes, the percentage of the mean that the busiest node may have (0: 130), and
    whether only leaders may change.
    """

    kind: PlanKind
    node_id: str = ""
    with_node_id: str = ""
    replication_factor: int = 0
    keyspace: str = ""
    by: PlanBy = PlanBy.COUNT
    target_percent: int = 0
    leaders_only: bool = False

    def to_proto(self) -> admin_pb2.PlanRequest:
        return admin_pb2.PlanRequest(
            kind=cast(Any, int(self.kind)),
            node_id=self.node_id,
            with_node_id=self.with_node_id,
            replication_factor=self.replication_factor,
            keyspace=self.keyspace,
            by=cast(Any, int(self.by)),
            target_percent=self.target_percent,
            leaders_only=self.leaders_only,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMove:
    """One partition's change of replicas, as node numbers; the first number of each list leads."""

    partition_id: int
    origin: tuple[int, ...]
    target: tuple[int, ...]
    reason: str

    @property
    def added(self) -> tuple[int, ...]:
        return tuple(n for n in self.target if n not in self.origin)

    @property
    def dropped(self) -> tuple[int, ...]:
        return tuple(n for n in self.origin if n not in self.target)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeBalance:
    """The numbers of a node's replicas, and of the partitions whose preferred primary it is. Of
    plans by load (in cores) or bytes also the load, and the part of the whole that the node should
    have, relative to other nodes' parts.
    """

    node_number: int
    replicas: int
    primaries: int
    load: float = 0.0
    capacity: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRefusal:
    """A change that a plan cannot make; ``node_number`` 0: it concerns no particular node."""

    code: str
    reason: str
    node_number: int
    partition_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The moves, and the nodes' replicas before and after them."""

    plan_id: str
    table_version: int
    moves: tuple[PlannedMove, ...]
    before: tuple[NodeBalance, ...]
    after: tuple[NodeBalance, ...]
    refusals: tuple[PlanRefusal, ...]


class Stage(IntEnum):
    """The stage of a new replica; numbers are those of the wire."""

    UNKNOWN = 0
    WAITING = 1
    SNAPSHOT = 2
    CATCH_UP = 3
    LIVE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyProgress:
    """The part of a new replica that its node has received; totals are 0 where unknown."""

    node_number: int
    stage: Stage
    records: int
    bytes: int
    records_total: int
    bytes_total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveView:
    """One move that is queued or under way. ``plan_moves``: the number of moves that its plan began
    with. ``waits_for``: why it does not proceed; '' if it does.
    """

    move: PlannedMove
    plan_id: str
    plan_moves: int
    running: bool
    cancelled: bool
    progress: tuple[CopyProgress, ...]
    waits_for: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MovesView:
    """All moves, and their settings."""

    settings: MoveSettings
    moves: tuple[MoveView, ...]


def plan_from_proto(message: admin_pb2.Plan) -> Plan:
    return view(
        Plan,
        message,
        moves=tuple(view(PlannedMove, move) for move in message.moves),
        before=tuple(view(NodeBalance, balance) for balance in message.before),
        after=tuple(view(NodeBalance, balance) for balance in message.after),
        refusals=tuple(view(PlanRefusal, refusal) for refusal in message.refusals),
    )


def moves_from_proto(message: admin_pb2.MovesStatus) -> MovesView:
    return MovesView(
        settings=convert.settings_from_proto(message.settings),
        moves=tuple(
            view(
                MoveView,
                status,
                move=view(PlannedMove, status.move),
                progress=tuple(map(_progress, status.progress_nodes, status.progress)),
            )
            for status in message.moves
        ),
    )


def _progress(node_number: int, message: Any) -> CopyProgress:
    known = message.stage in Stage.__members__.values()
    stage = Stage(message.stage) if known else Stage.UNKNOWN
    return view(CopyProgress, message, node_number=node_number, stage=stage)
