"""Executes operators' requests while this coordinator leads: plans, moves, nodes, primaries.

Each request decides by the state (``plan_requests`` and ``admin_requests`` of ``core/decide``),
proposes, and answers once the command has been applied. A command that is rejected when it is
applied, because the state has changed in between, becomes a typed error. Planning runs in a thread,
since the event loop has to send the leader's heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from koinon_coordinator.core.cluster.commands import (
    Applied,
    Command,
    ForcePrimary,
    Move,
    Reason,
    Rejected,
    Result,
    SetMoveSettings,
    SetNodeStatus,
    SetReplicationFactor,
)
from koinon_coordinator.core.decide.admin_requests import (
    decide_cancel,
    decide_force,
    decide_restore,
    decide_settings,
    decide_status,
    refusal,
)
from koinon_coordinator.core.decide.copy_progress import Progress
from koinon_coordinator.core.decide.load_plans import LoadTask, PlanBy, planned_by_load
from koinon_coordinator.core.decide.move_scheduler import (
    moves_by_node,
    short_of_room,
    waits_for,
)
from koinon_coordinator.core.decide.plan_requests import (
    PlanKind,
    Planned,
    PlanWish,
    accepted,
    plan_task,
    plan_task_by_load,
    planned,
)
from koinon_coordinator.core.decide.room import Shortage
from koinon_coordinator.leader.context import LeaderContext
from koinon_coordinator.leader.mover import Mover
from koinon_proto.contract.cluster_errors import MembershipChangeError, PlanStaleError
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.contract.table import NO_NODE, MoveSettings, NodeNumber, NodeStatus

log = logging.getLogger(__name__)

SHOWN_MAX, SHOWN_S_MAX = 8, 600.0
"""Plans by load are kept to be executed: so many, for so long."""
PLANS_MAX = 3
"""The most times a plan is made while the state keeps changing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveView:
    """A move, the progress of the replicas that it adds, and its reason to wait."""

    move: Move
    progress: Mapping[NodeNumber, Progress]
    waits_for: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPlan:
    """A plan by load or bytes that was shown, with its input."""

    wish: PlanWish
    task: LoadTask
    made: Planned
    shown_at: float  # monotonic seconds


class AdminRequests:
    """Plans and executes operators' requests, during one term.

    Every method raises NotLeaderError outside the term; those that propose also
    ResourceExhaustedError, UnavailableError (nothing was changed), UnknownFateError.
    """

    def __init__(self, term: LeaderContext, mover: Mover) -> None:
        self._term = term
        self._mover = mover
        self._shown: dict[str, ShownPlan] = {}  # by plan id, oldest first

    # --- plans and moves ----------------------------------------------------------------------

    async def plan(self, wish: PlanWish) -> Planned:
        """Return the plan without executing it. The plan is for the state at the return, unless
        that keeps changing: then for the state shortly before.

        Raises:
            ClusterNotReadyError, UnknownNodeError, InvalidArgumentError, MembershipChangeError.
        """
        self._term.check_cluster("")
        if wish.by is not PlanBy.COUNT:
            return await self._plan_by_load(wish)
        task = plan_task(self._term.state, wish, self._mover.room())
        for _ in range(PLANS_MAX):
            made = await self._term.computed(partial(planned, task))
            self._term.check_cluster("")
            before, task = task, plan_task(self._term.state, wish, self._mover.room())
            if task == before:
                break
        return made

    async def _plan_by_load(self, wish: PlanWish) -> Planned:
        """Return a plan by load or bytes, and keep it: minutes later, planning would give another
        one.
        """
        task = plan_task_by_load(self._term.state, wish, self._mover.load_facts())
        made = Planned(plan=await self._term.computed(partial(planned_by_load, task)))
        self._term.check_cluster("")
        self._shown.pop(made.plan.plan_id, None)
        self._shown[made.plan.plan_id] = ShownPlan(
            wish=wish, task=task, made=made, shown_at=self._term.clock()
        )
        while len(self._shown) > SHOWN_MAX:
            del self._shown[next(iter(self._shown))]
        return made

    def _still_valid(self, wish: PlanWish, plan_id: str) -> Planned | None:
        """Return the plan by load that was shown for this wish, if it is not old, and all replicas
        and nodes are as they were then.
        """
        shown = self._shown.get(plan_id)
        if shown is None or shown.wish != wish:
            return None
        if self._term.clock() - shown.shown_at > SHOWN_S_MAX:
            return None
        self._term.check_cluster("")
        now = plan_task_by_load(self._term.state, wish, self._mover.load_facts())
        return shown.made if now.places == shown.task.places else None

    async def execute(self, wish: PlanWish, plan_id: str) -> None:
        """Queue the moves of the plan that was shown as ``plan_id``. A node that it empties is
        first set to draining, so that it gets no more replicas.

        Raises:
            PlanStaleError: planning now gives another plan.
            ClusterNotReadyError, UnknownNodeError, InvalidArgumentError, MembershipChangeError.
        """
        made = self._still_valid(wish, plan_id) or await self.plan(wish)
        if made.plan.plan_id != plan_id:
            raise PlanStaleError(plan_id=plan_id, current_plan_id=made.plan.plan_id)
        if made.plan.refusals and not made.plan.moves and wish.kind is not PlanKind.REBALANCE:
            raise MembershipChangeError(reason=made.plan.refusals[0].reason)
        record = self._term.state.node(made.emptied)
        if record is not None and not record.draining:
            await self._done(
                SetNodeStatus(node_number=made.emptied, status=NodeStatus.DRAINING),
                node=made.emptied,
            )
            log.info("node is being emptied node=%s plan=%s", record.info.node_id, plan_id)
        if wish.kind is PlanKind.REPLICATION_FACTOR:
            await self._set_replication_factor(wish.keyspace, wish.replication_factor)
            log.info(
                "replication factor set keyspace=%s replication_factor=%d plan=%s",
                wish.keyspace or DEFAULT,
                wish.replication_factor,
                plan_id,
            )
        for command in accepted(plan_id, made.plan):
            try:
                await self._done(command, plan_id=plan_id)
            except PlanStaleError:
                now = (await self.plan(wish)).plan.plan_id
                raise PlanStaleError(plan_id=plan_id, current_plan_id=now) from None
            log.info(
                "plan accepted plan=%s kind=%s moves=%d",
                plan_id,
                wish.kind.value,
                len(command.moves),
            )

    async def _set_replication_factor(self, keyspace: str, factor: int) -> None:
        """Set the replication factor that plans for the keyspace aim at."""

        def decide() -> SetReplicationFactor:
            keyspace_id = self._term.state.keyspaces.named(keyspace).keyspace_id
            return SetReplicationFactor(replication_factor=factor, keyspace_id=keyspace_id)

        _, result = await self._term.decided(decide)
        self._check(result)

    def moves(self) -> tuple[MoveSettings, list[MoveView]]:
        """Return the settings of moves, and the moves that are queued or running."""
        self._term.check_cluster("")
        state = self._term.state
        load = moves_by_node(state.moves.values())
        progress, room = self._mover.progress, self._mover.room()
        return state.move_settings, [
            MoveView(
                move=move,
                progress={
                    n: progress[n][move.partition_id]
                    for n in move.target
                    if move.partition_id in progress.get(n, {})
                },
                waits_for=waits_for(state, move, load, room),
            )
            for move in state.moves.values()
        ]

    def short_of_room(self) -> list[Shortage]:
        """Return the shortage of each move that waits for room."""
        return short_of_room(self._term.state, self._mover.room())

    async def cancel(self, partition_ids: Sequence[int]) -> tuple[int, int]:
        """Drop queued moves and turn running ones back (empty: all); return how many of each.

        Raises:
            InvalidArgumentError: there is no such partition.
        """
        self._term.check_cluster("")
        before = dict(self._term.state.moves)
        command = decide_cancel(self._term.state, partition_ids)
        if command is None:
            return 0, 0
        result = await self._done(command)
        left = set(result.rejected)
        ended = [before[p] for p in command.partition_ids if p not in left]
        turned = sum(move.running for move in ended)
        log.info("moves cancelled dropped=%d turned_back=%d", len(ended) - turned, turned)
        return len(ended) - turned, turned

    async def set_moves(
        self,
        *,
        paused: bool | None = None,
        bytes_per_second: int | None = None,
        moves_per_node: int | None = None,
    ) -> MoveSettings:
        """Change the given settings; return all settings.

        Raises:
            InvalidArgumentError: a number is out of its bounds.
        """
        self._term.check_cluster("")

        def decide() -> SetMoveSettings:
            return decide_settings(
                self._term.state,
                paused=paused,
                bytes_per_second=bytes_per_second,
                moves_per_node=moves_per_node,
            )

        if paused is bytes_per_second is moves_per_node is None:
            return self._term.state.move_settings
        command, result = await self._term.decided(decide)
        self._check(result)
        log.info("move settings set settings=%s", command.settings)
        return command.settings

    # --- nodes and primaries ------------------------------------------------------------------

    async def set_node_status(self, node_id: str, status: int) -> None:
        """Set a node's status: whether it gets replicas, or that it has left for good.

        Raises:
            UnknownNodeError, InvalidArgumentError
            MembershipChangeError: the node still holds replicas, or has left already.
        """
        self._term.check_cluster("")
        command = decide_status(self._term.state, node_id, status)
        await self._done(command, node=command.node_number)
        log.info("node status set node=%s status=%s", node_id, command.status.name.lower())

    async def restore_primaries(self) -> int:
        """Ask for the preferred primaries where they can lead; return the number of partitions."""
        self._term.check_cluster("")
        command = decide_restore(self._term.state)
        if command is None:
            return 0
        result = await self._done(command)
        log.info("preferred primaries wanted partitions=%d", result.rows_changed)
        return len(command.wishes) - len(result.rejected)

    async def force_primaries(self, wanted: Sequence[tuple[int, str]]) -> list[int | str]:
        """Elect replicas by partition and node id, even if they lack writes. Return for each
        partition the new primary epoch, or the reason of the refusal.

        Raises:
            ClusterNotReadyError, InvalidArgumentError, UnknownNodeError: nothing was changed.
        """
        self._term.check_cluster("")
        decided: list[ForcePrimary | str] = []
        for partition_id, node_id in wanted:
            try:
                decided.append(decide_force(self._term.state, partition_id, node_id))
            except MembershipChangeError as error:
                decided.append(str(error))
        return await asyncio.gather(*map(self._force, decided))

    async def _force(self, command: ForcePrimary | str) -> int | str:
        if isinstance(command, str):
            return command
        before = self._term.state.row(command.partition_id)
        try:
            await self._done(command, node=command.node_number)
        except MembershipChangeError as error:
            return str(error)
        log.warning(
            "primary forced by an operator partition=%d node=%s in_sync_before=%s why=%s",
            command.partition_id,
            self._term.node_name(command.node_number),
            [self._term.node_name(n) for n in before.in_sync] if before is not None else [],
            "an operator called ForcePrimaries; writes that this copy lacks are lost",
        )
        row = self._term.state.row(command.partition_id)
        return row.primary_epoch if row is not None else 0

    async def _done(
        self, command: Command, *, node: NodeNumber = NO_NODE, plan_id: str = ""
    ) -> Applied:
        """Commit the command; raise the typed error if it is refused."""
        return self._check(await self._term.committed(command), node=node, plan_id=plan_id)

    def _check(self, result: Result, *, node: NodeNumber = NO_NODE, plan_id: str = "") -> Applied:
        if isinstance(result, Applied):
            return result
        reason = result.reason if isinstance(result, Rejected) else Reason.BAD_VALUE
        raise refusal(reason, state=self._term.state, node=node, plan_id=plan_id)
