"""The costs of a plan: the bytes copied to each node, and an estimate of the time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from koinon.operate.json_form import HIDDEN
from koinon.operate.plans import CopyProgress, MovesView, MoveView, NodeBalance, Plan, Stage
from koinon.operate.replicas import PartitionSize
from koinon.operate.views import view
from koinon.operate.wording import bytes_text, duration_text, node_name
from koinon_proto.contract.table import MoveSettings, Table

ASSUMED_BYTES_PER_SECOND = 30_000_000
ASSUMED_MOVE_S = 0.3
"""The time of a move of an empty partition, between its steps, each of which a coordinator commits.
Measured with 774 moves, 64 and 8 at once: 5 s to 9 s, and 28 s to 31 s.
"""


@dataclass(frozen=True, kw_only=True)
class Costed:
    """A plan with the known sizes of the partitions that it moves."""

    plan: Plan
    table: Table
    sizes: Mapping[int, PartitionSize]

    @property
    def bytes_by_receiver(self) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        for move in self.plan.moves:
            for number in move.added:
                found[number] += self.sizes[move.partition_id].bytes
        return dict(found)

    def guessed_of(self, receiver: int | None = None) -> bool:
        """Return whether any size that this node receives is an estimate; None: that any node
        receives.
        """
        return any(
            self.sizes[move.partition_id].guessed
            for move in self.plan.moves
            if receiver is None or receiver in move.added
        )

    @property
    def bytes_total(self) -> int:
        return sum(self.bytes_by_receiver.values())

    def seconds(self) -> tuple[float, str]:
        """Estimate the duration of the moves, and describe the basis: the time that the node with
        the most moves needs for their steps, and the node with the most bytes for receiving them.
        """
        settings = self.table.moves
        moves = Counter(n for move in self.plan.moves for n in (*move.added, *move.dropped))
        turns = math.ceil(max(moves.values(), default=1) / settings.moves_per_node)
        turns = turns if self.plan.moves else 0
        rate = settings.bytes_per_second or ASSUMED_BYTES_PER_SECOND
        copying_s = max(self.bytes_by_receiver.values(), default=0) / rate
        basis = "the throttle" if settings.bytes_per_second else "assumed"
        said = (
            f"{duration_text(ASSUMED_MOVE_S)} a move, {settings.moves_per_node:,} at once "
            f"for a node; {bytes_text(rate)}/s a node, {basis}"
        )
        return turns * ASSUMED_MOVE_S + copying_s, said

    def name(self, number: int | None) -> str:
        return "-" if number is None else node_name(self.table, number)


# --- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlannedMoveAnswer:
    """One partition's change of replicas, and its size."""

    partition_id: int
    from_: list[str]
    to: list[str]
    reason: str
    records: int
    bytes: int
    guessed: bool


@dataclass(frozen=True, kw_only=True)
class LoadAnswer:
    """The load of a node, in cores or bytes, before the plan and after it, and what it has for its
    capacity over the mean of all nodes (None: it takes no replicas).
    """

    before: float
    after: float
    times_mean: float | None
    times_mean_after: float | None


@dataclass(frozen=True, kw_only=True)
class BalanceAnswer:
    """The replicas and primaries of a node before the plan and after it; ``load``: of plans by load
    or bytes.
    """

    id: str
    replicas: int
    replicas_after: int
    primaries: int
    primaries_after: int
    receives_bytes: int
    load: LoadAnswer | None
    guessed: bool = field(metadata=HIDDEN)


@dataclass(frozen=True, kw_only=True)
class RefusalAnswer:
    """A change that a plan cannot make."""

    code: str
    reason: str
    node: str | None
    partition_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """A plan: its moves, the nodes' replicas before and after them, and its costs."""

    plan_id: str
    table_version: int
    moves: list[PlannedMoveAnswer]
    nodes: list[BalanceAnswer]
    refusals: list[RefusalAnswer]
    bytes: int
    records: int
    seconds: float
    executed: bool


def plan_answer(costed: Costed, *, executed: bool) -> PlanAnswer:
    plan, name, sizes = costed.plan, costed.name, costed.sizes
    loads = _loads(plan)
    after = {balance.node_number: balance for balance in plan.after}
    return view(
        PlanAnswer,
        plan,
        moves=[
            view(
                PlannedMoveAnswer,
                sizes[move.partition_id],
                partition_id=move.partition_id,
                from_=list(map(name, move.origin)),
                to=list(map(name, move.target)),
                reason=move.reason,
            )
            for move in plan.moves
        ],
        nodes=[
            view(
                BalanceAnswer,
                before,
                id=name(before.node_number),
                replicas_after=after.get(before.node_number, before).replicas,
                primaries_after=after.get(before.node_number, before).primaries,
                receives_bytes=costed.bytes_by_receiver.get(before.node_number, 0),
                load=loads.get(before.node_number),
                guessed=costed.guessed_of(before.node_number),
            )
            for before in plan.before
        ],
        refusals=[
            view(
                RefusalAnswer,
                refusal,
                node=name(refusal.node_number) if refusal.node_number else None,
            )
            for refusal in plan.refusals
        ],
        bytes=costed.bytes_total,
        records=sum(len(m.added) * sizes[m.partition_id].records for m in plan.moves),
        seconds=round(costed.seconds()[0], 1),
        executed=executed,
    )


def _loads(plan: Plan) -> dict[int, LoadAnswer]:
    """Return the load of each node; nothing for plans by counts."""
    before, after = _times_mean(plan.before), _times_mean(plan.after)
    if not before:
        return {}
    return {
        had.node_number: LoadAnswer(
            before=round(had.load, 4),
            after=round(has.load, 4),
            times_mean=before.get(had.node_number),
            times_mean_after=after.get(had.node_number),
        )
        for had, has in zip(plan.before, plan.after, strict=True)
    }


def _times_mean(balances: Sequence[NodeBalance]) -> dict[int, float]:
    """Return each node's load for its capacity, over the mean; nothing for plans by counts."""
    takers = [balance for balance in balances if balance.capacity]
    load = sum(balance.load for balance in takers)
    if not load:
        return {}
    mean = load / sum(balance.capacity for balance in takers)
    return {one.node_number: round(one.load / one.capacity / mean, 3) for one in takers}


@dataclass(frozen=True, kw_only=True)
class CopyAnswer:
    """The part of a new replica that its node has received; totals are None where unknown."""

    node: str
    stage: Stage
    records: int
    bytes: int
    records_total: int | None
    bytes_total: int | None


@dataclass(frozen=True, kw_only=True)
class MoveAnswer:
    """One move: ``state`` is queued, running or turning_back."""

    partition_id: int
    from_: list[str]
    to: list[str]
    reason: str
    plan_id: str
    state: str
    waits_for: str | None
    copies: list[CopyAnswer]
    move: MoveView = field(metadata=HIDDEN)


@dataclass(frozen=True, kw_only=True)
class MovesAnswer(MoveSettings):
    """The moves that are queued or under way, and their settings."""

    moves: list[MoveAnswer]


def moves_answer(found: MovesView, table: Table) -> MovesAnswer:
    return view(MovesAnswer, found.settings, moves=[_move(move, table) for move in found.moves])


def _move(found: MoveView, table: Table) -> MoveAnswer:
    state = "running" if found.running else "queued"
    return view(
        MoveAnswer,
        found,
        partition_id=found.move.partition_id,
        from_=[node_name(table, number) for number in found.move.origin],
        to=[node_name(table, number) for number in found.move.target],
        reason=found.move.reason,
        state="turning_back" if found.cancelled else state,
        waits_for=found.waits_for or None,
        copies=[_copy(copy, table) for copy in found.progress],
        move=found,
    )


def _copy(copy: CopyProgress, table: Table) -> CopyAnswer:
    return view(
        CopyAnswer,
        copy,
        node=node_name(table, copy.node_number),
        records_total=copy.records_total or None,
        bytes_total=copy.bytes_total or None,
    )
