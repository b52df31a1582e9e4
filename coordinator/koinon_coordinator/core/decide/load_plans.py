"""The planner's input for plans by load or by bytes, from the nodes' reports. Pure.

A partition's load is the sum over all live nodes' reports: while it moves, the old primary's mean
falls as the new one's rises. Reports are soft state of the leader, like the nodes' room: a new
leader has all of them within seconds. It does not know which partitions moved before its term.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from statistics import median

from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.room import Room
from koinon_coordinator.core.planning.model import (
    TARGET,
    Balance,
    LoadAim,
    LoadLayout,
    LoadPlan,
    Plan,
    PlanNode,
    Refusal,
    RefusalCode,
    Replicas,
)
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.table import NO_NODE, NodeNumber, PartitionId

TARGET_PERCENT_MIN, TARGET_PERCENT_MAX = 100, 1_000
REST_S = 600.0
"""A partition that has moved stays for so long, so that the effect is seen before the next move."""
DECAY_S = 120.0
"""The time constant of the nodes' means, as membership.proto has it."""
LEAST_CORES, LEAST_BYTES = 0.01, 1e6
"""A node with less than that is not relieved: its figures are mostly chance."""
MEASURED_BUSY = 0.1
"""A node's speed is measured while its event loop is busy for this part of the time at least."""
SLOW, FAST = 0.75, 1.5
"""Speeds over the median from which a node counts as slow, or fast."""
_SPEED_MIN = 0.25
_MILLION = 1e6


class PlanBy(Enum):
    """The measures by which a rebalance makes nodes even."""

    COUNT = "count"
    LOAD = "load"
    BYTES = "bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLoad:
    """A node's last report; loads are in millionths of a core. ``lead`` and ``follow``: by
    partition that it led, for the primary and for each follower.
    """

    observed_s: float = math.inf  # since the means began with 0
    work: int = 0
    busy: int = 0  # millionths of the time
    lead: Mapping[int, int] = field(default_factory=dict)
    follow: Mapping[int, int] = field(default_factory=dict)
    rest_lead: int = 0  # the sums over the partitions that are not listed
    rest_follow: int = 0


LoadOf = Mapping[NodeNumber, NodeLoad]


class RecentMoves:
    """Remembers for a while which partitions have moved."""

    def __init__(self) -> None:
        self._under_way: frozenset[PartitionId] = frozenset()
        self._ended: dict[PartitionId, float] = {}  # when the last move ended

    def observe(self, moving: Collection[PartitionId], now: float) -> None:
        """Note the partitions with a move queued or under way now."""
        ended = self._under_way.difference(moving)
        self._under_way = frozenset(moving)
        if ended:
            self._ended = {p: at for p, at in self._ended.items() if now - at < REST_S}
            self._ended.update(dict.fromkeys(ended, now))

    def resting(self, now: float) -> frozenset[PartitionId]:
        """Return the partitions whose move ended less than REST_S ago."""
        return frozenset(p for p, at in self._ended.items() if now - at < REST_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFacts:
    """The leader's soft state that plans by load rest on."""

    room: Room
    loads: LoadOf
    resting: frozenset[PartitionId] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadTask:
    """The input of planning: the layout of each pool, and refusals that are known already."""

    aim: LoadAim
    layouts: tuple[LoadLayout, ...]
    refusals: tuple[Refusal, ...] = ()

    @property
    def places(self) -> tuple[tuple[tuple[PlanNode, ...], tuple[Replicas, ...]], ...]:
        """The nodes and the replicas, without the load: a plan is stale once these change."""
        return tuple((layout.nodes, layout.replicas) for layout in self.layouts)


def load_aim(target_percent: int, leaders_only: bool) -> LoadAim:
    """Return the aim of a request.

    Raises:
        InvalidArgumentError: the target is out of its bounds.
    """
    if not target_percent:
        return LoadAim(target=TARGET, leaders_only=leaders_only)
    if not TARGET_PERCENT_MIN <= target_percent <= TARGET_PERCENT_MAX:
        raise InvalidArgumentError(
            field="target_percent",
            reason=f"must be from {TARGET_PERCENT_MIN} to {TARGET_PERCENT_MAX}",
            limit=TARGET_PERCENT_MAX,
            actual=target_percent,
        )
    return LoadAim(target=target_percent / 100, leaders_only=leaders_only)


def load_task(
    state: ClusterState, nodes: Sequence[PlanNode], by: PlanBy, aim: LoadAim, facts: LoadFacts
) -> LoadTask:
    """Return the input of planning. ``nodes``: with their room."""
    layouts, refusals = [], []
    loads = {n: load for n, load in facts.loads.items() if n in state.live_numbers}
    for pool in sorted({keyspace.pool for keyspace in state.keyspaces}):
        members = tuple(node for node in nodes if node.pool == pool)
        layout = _layout(state, pool, members, by, loads, facts)
        if by is PlanBy.LOAD:
            unknown = [n for n in members if n.takes and n.number not in loads]
            refusals += [_unknown(layout, node) for node in unknown]
            if unknown:
                layout = replace(layout, still=frozenset(layout.partition_ids))
            speeds = node_speeds(members, loads)
            layout = replace(layout, speeds=slow_ones(speeds))
            refusals += _proposals(layout, speeds, loads)
        layouts.append(layout)
    return LoadTask(aim=aim, layouts=tuple(layouts), refusals=tuple(refusals))


def planned_by_load(task: LoadTask) -> Plan:
    """Return the plan over all pools. Reads only the task, so it may run in any thread."""
    from koinon_coordinator.core.planning.by_load import plan_pool  # loads NumPy

    plans = [plan_pool(layout, task.aim) for layout in task.layouts]
    moves = sorted((m for plan in plans for m in plan.moves), key=lambda m: m.partition_id)
    changes = [(m.partition_id, m.origin, m.target) for m in moves]
    digest = blake2b(repr((task.aim, task.places, changes)).encode(), digest_size=8)
    return Plan(
        plan_id=digest.hexdigest(),
        moves=tuple(moves),
        before=_in_order(plan.before for plan in plans),
        after=_in_order(plan.after for plan in plans),
        refusals=(*task.refusals, *_known_once(task, plans)),
    )


def _known_once(task: LoadTask, plans: Iterable[LoadPlan]) -> Iterable[Refusal]:
    """Yield the plans' refusals, unless an unknown load is the reason."""
    if any(refusal.code is RefusalCode.LOAD_UNKNOWN for refusal in task.refusals):
        return ()
    return (refusal for plan in plans for refusal in plan.refusals)


def _in_order(balances: Iterable[Sequence[Balance]]) -> tuple[Balance, ...]:
    every = [one for balance in balances for one in balance]
    return tuple(sorted(every, key=lambda one: one.node_number))


def _layout(
    state: ClusterState,
    pool: str,
    members: tuple[PlanNode, ...],
    by: PlanBy,
    loads: LoadOf,
    facts: LoadFacts,
) -> LoadLayout:
    ids, replicas, still = [], [], set(facts.resting)
    for keyspace in state.keyspaces:
        if keyspace.pool != pool:
            continue
        for p in map(PartitionId, keyspace.partition_ids):
            row, move = state.row(p), state.moves.get(p)
            assert row is not None, "every partition of a keyspace has a row"
            ids.append(p)
            replicas.append(row.replicas if move is None else move.target)
            if move is not None or row.primary != row.replicas[0]:
                still.add(p)
    sizes = tuple(facts.room.size(p) for p in ids)
    if by is PlanBy.BYTES:
        lead = follow = tuple(float(size) for size in sizes)
    else:
        lead, follow = _loads_of(state, ids, loads)
    return LoadLayout(
        nodes=members,
        partition_ids=tuple(ids),
        replicas=tuple(replicas),
        lead=lead,
        follow=follow,
        sizes=sizes,
        still=frozenset(still),
        names={record.info.number: record.info.node_id for record in state.nodes},
        least=LEAST_BYTES if by is PlanBy.BYTES else LEAST_CORES,
    )


def _loads_of(
    state: ClusterState, ids: Sequence[PartitionId], loads: LoadOf
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return each partition's load in cores, on its primary and on each follower. The means of a
    young cluster are too small; those of a node that has just been started again stay so for a
    while.
    """
    oldest_s = max((load.observed_s for load in loads.values()), default=math.inf)
    whole = _MILLION * max(1e-6, 1 - math.exp(-oldest_s / DECAY_S))
    led: Counter[NodeNumber] = Counter()  # by node: the partitions that it leads and did not list
    primaries: list[NodeNumber] = []
    for p in ids:
        row = state.row(p)
        primary = NO_NODE if row is None else row.primary
        listed = primary not in loads or p in loads[primary].lead
        primaries.append(NO_NODE if listed else primary)
        led[primary] += not listed
    columns = []
    for name, rest in (("lead", "rest_lead"), ("follow", "rest_follow")):
        reports = [getattr(load, name) for load in loads.values()]
        shares = {n: getattr(loads[n], rest) / count for n, count in led.items() if count}
        columns.append(
            tuple(
                (sum(report.get(p, 0) for report in reports) + shares.get(primary, 0.0)) / whole
                for p, primary in zip(ids, primaries, strict=True)
            )
        )
    return columns[0], columns[1]


def node_speeds(nodes: Sequence[PlanNode], loads: LoadOf) -> dict[NodeNumber, float]:
    """Return the speeds of the nodes that are busy enough, by their weights, over the median."""
    measured = {
        node.number: load.work / load.busy / max(1, node.weight)
        for node in nodes
        if node.takes
        and (load := loads.get(node.number)) is not None
        and load.busy >= MEASURED_BUSY * _MILLION
        and load.work
    }
    if len(measured) < 2:
        return {}
    middle = median(measured.values())
    return {number: speed / middle for number, speed in measured.items()}


def slow_ones(speeds: Mapping[NodeNumber, float]) -> dict[NodeNumber, float]:
    """Return the speeds that plans go by: those of nodes that are slow beyond doubt."""
    return {n: max(_SPEED_MIN, round(speed, 2)) for n, speed in speeds.items() if speed < SLOW}


def _proposals(
    layout: LoadLayout, speeds: Mapping[NodeNumber, float], loads: LoadOf
) -> list[Refusal]:
    found = []
    for node in layout.nodes:
        speed = speeds.get(node.number, 1.0)
        if SLOW <= speed <= FAST:
            continue
        weight = max(1, round(node.weight * speed))
        does = (
            f"{layout.names[node.number]} works at {speed:.2f} of the others' speed for its weight "
            f"of {node.weight} (its event loop is busy {loads[node.number].busy / _MILLION:.0%} of "
            "the time)"
        )
        then = (
            f"this plan gives it less; if that is to stay, restart it with --weight {weight}"
            if speed < SLOW
            else f"restarted with --weight {weight} it would get more"
        )
        found.append(
            Refusal(code=RefusalCode.SLOW_NODE, reason=f"{does}: {then}", node_number=node.number)
        )
    return found


def _unknown(layout: LoadLayout, node: PlanNode) -> Refusal:
    reason = f"{layout.names[node.number]} has not reported its load to this leader yet"
    return Refusal(
        code=RefusalCode.LOAD_UNKNOWN,
        reason=f"{reason}: nothing is planned for its pool; try again in some seconds",
        node_number=node.number,
    )
