"""Starts, finishes and turns back moves while this coordinator leads, and replaces absent nodes.

It checks the moves whenever a command was applied, and once a second while a node is fenced;
``move_scheduler.py`` and ``plan_requests.py`` of ``core/decide`` decide. It has at most one
proposal under way, and each carries all moves that are due. Its memory need not survive: the next
leader finds the remaining work in the state, and counts absences from its own beginning.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from functools import partial

from koinon_coordinator.core.cluster.commands import (
    Applied,
    CancelMoves,
    Command,
    FinishMoves,
    StartMoves,
)
from koinon_coordinator.core.decide.admin_requests import names
from koinon_coordinator.core.decide.copy_progress import Pace, Progress, received_since
from koinon_coordinator.core.decide.load_plans import LoadFacts, NodeLoad, RecentMoves
from koinon_coordinator.core.decide.move_scheduler import Fences, next_step, short_of_room
from koinon_coordinator.core.decide.plan_requests import (
    RepairTask,
    accepted,
    repair,
    repair_layouts,
    repair_plan_id,
    repair_task,
)
from koinon_coordinator.core.decide.room import NodeUse, Room
from koinon_coordinator.core.planning.planner import RefusalCode
from koinon_coordinator.leader.context import LeaderContext
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeNumber, PartitionId

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
ROOM_RETRY_S = 10.0
"""Seconds between plans of a repair without room: no commit tells that room became free."""
RETRY_PAUSE_S = 0.1
BATCH_PAUSE_S = 0.15
"""Seconds to gather changes: a new table costs each node and client about the same, however many
rows it changes, and without a pause most tables would change one row.
"""
FAILURE_PAUSE_S = 5.0


class Mover:
    """Starts, finishes and turns back moves, during one term. ``run`` in a task of the term."""

    def __init__(self, term: LeaderContext, *, pause_s: float) -> None:
        self._term = term
        self._pause_s = pause_s  # ticks further apart mean that the leader was paused
        self.batch_pause_s = BATCH_PAUSE_S  # tests set it
        self._fences = Fences(term.began_at)
        self._fences.observe(term.state, term.began_at)
        self._looked_at = term.began_at  # time of the last periodic check, monotonic seconds
        self._wake: asyncio.Event | None = None  # wakes ``run``; None before it runs
        self._refused: tuple[Command, int] | None = None  # rejected at this table version
        self._tried: RepairTask | None = None  # the last planned repair: do not plan it again
        self._try_again_at = math.inf  # when ``_tried`` is forgotten, monotonic seconds
        self._waits_for_room = False  # whether a move waited for room at the last check
        self._plans: dict[str, tuple[int, float]] = {}  # plan under way -> (moves, begin)
        self.progress: dict[NodeNumber, dict[PartitionId, Progress]] = {}  # nodes' last reports
        self.uses: dict[NodeNumber, NodeUse] = {}  # of nodes that reported in this term
        self.loads: dict[NodeNumber, NodeLoad] = {}  # likewise
        self._recent = RecentMoves()
        self.pace = Pace(term.began_at)  # bytes per second, over all these replicas

    def note_progress(self, number: NodeNumber, progress: Sequence[Progress]) -> None:
        """Keep a node's last report of its replicas that are not in sync."""
        before = self.progress.get(number, {})
        self.pace.add(received_since(before, progress), self._term.clock())
        if progress:
            self.progress[number] = {p.partition_id: p for p in progress}
        else:
            self.progress.pop(number, None)

    def note_use(self, number: NodeNumber, use: NodeUse) -> None:
        """Keep a node's last report of its store and disk."""
        is_first = number not in self.uses
        self.uses[number] = use
        if is_first and self._wake is not None:
            self._wake.set()  # moves to the node waited for its first report

    def note_load(self, number: NodeNumber, load: NodeLoad) -> None:
        """Keep a node's last report of its load."""
        self.loads[number] = load

    def load_facts(self) -> LoadFacts:
        """Return the nodes' reports of load and the recent moves, which plans by load need."""
        now = self._term.clock()
        self._recent.observe(self._term.state.moves.keys(), now)
        return LoadFacts(room=self.room(), loads=self.loads, resting=self._recent.resting(now))

    def room(self) -> Room:
        """Return the nodes' room for replicas, by their reports."""
        return Room(self._term.state, self.uses, self.progress)

    def tick(self, now: float) -> None:
        """Count time; check the moves if a node has been absent long enough to matter, or moves
        wait for room. Progress reports of nodes that are down are dropped.
        """
        self._fences.tick(now, pause_s=self._pause_s)
        for number in self.progress.keys() - self._term.state.live_numbers:
            del self.progress[number]
        is_due = self._fences.any or self._waits_for_room
        if self._wake is not None and is_due and now - self._looked_at >= LOOK_EVERY_S:
            self._wake.set()

    async def run(self) -> None:
        """Start, finish and turn back moves until the term ends."""
        with self._term.replicated.watching() as wake:
            self._wake = wake
            while True:
                await wake.wait()
                wake.clear()
                await asyncio.sleep(0)  # waiters for the table run first
                self._recent.observe(self._term.state.moves.keys(), self._term.clock())
                self._log_ended_plans()
                try:
                    await self._advance_moves()
                except KoinonError as error:
                    log.debug("moves wait error=%s", error)
                    await asyncio.sleep(RETRY_PAUSE_S)
                    wake.set()
                except Exception:
                    log.exception("moves stand still for a while term=%d", self._term.number)
                    await asyncio.sleep(FAILURE_PAUSE_S)
                    wake.set()

    def _log_ended_plans(self) -> None:
        """Log the plans that have ended since the last check."""
        now, moves = self._term.clock(), self._term.state.moves
        left = {move.plan_id: move.plan_moves for move in moves.values()}
        for plan_id in [p for p in self._plans if p not in left]:
            count, since = self._plans.pop(plan_id)
            log.info("plan ended plan=%s moves=%d took_s=%.1f", plan_id, count, now - since)
        for plan_id, count in left.items():
            self._plans.setdefault(plan_id, (count, now))

    async def _advance_moves(self) -> None:
        """Propose the moves that are due, each type of command once. Moves that become due
        meanwhile go with the next round.
        """
        if self._term.state.moves:
            await asyncio.sleep(self.batch_pause_s)
        proposed: set[type[Command]] = set()
        while True:
            now = self._looked_at = self._term.clock()
            state = self._term.state
            self._fences.observe(state, now)
            fenced_s, after_s = self._fences.fenced_s(now), self._rereplicate_after_s()
            command = next_step(state, fenced_s, after_s, self.room(), proposed)
            if command is None:
                break
            await self._propose(command)
            proposed.add(type(command))  # refused or not: other types go on
        self._waits_for_room = bool(short_of_room(self._term.state, self.room()))
        lost = {number for number, seconds in fenced_s.items() if seconds >= after_s > 0}
        await self._repair(lost)

    async def _propose(self, command: Command) -> bool:
        """Propose; return whether the command had an effect. Otherwise it is not repeated in the
        same state.
        """
        version = self._term.state.table_version
        if self._refused == (command, version):
            return False
        result = await self._term.propose(command)
        if isinstance(result, Applied) and result.rows_changed:
            if isinstance(command, CancelMoves):
                log.info("moves turned back or dropped moves=%d", result.rows_changed)
            elif isinstance(command, StartMoves | FinishMoves):
                step = type(command).__name__
                log.debug("moves go on step=%s moves=%d", step, result.rows_changed)
            return True
        log.warning("moves refused command=%s result=%s", type(command).__name__, result)
        self._refused = (command, version)
        return False

    # --- absent nodes -------------------------------------------------------------------------

    async def _repair(self, lost: set[NodeNumber]) -> None:
        """Queue moves that replace these nodes, once for each repair task."""
        task = repair_task(self._term.state, lost)
        now = self._term.clock()
        if now >= self._try_again_at:
            self._tried, self._try_again_at = None, math.inf
        if task is None or task == self._tried:
            return
        layouts = repair_layouts(self._term.state, task, self.room())
        plan = await self._term.computed(partial(repair, layouts, task))
        if repair_task(self._term.state, lost) != task:
            return  # the state changed meanwhile, which wakes the mover again
        nodes = names(self._term.state, sorted(lost))
        for refusal in plan.refusals:
            log.warning(
                "re-replication refused nodes=%s code=%s partitions=%d why=%s",
                nodes,
                refusal.code.value,
                len(refusal.partition_ids),
                refusal.reason,
            )
        for command in accepted(repair_plan_id(plan), plan):
            if await self._propose(command):
                log.warning(
                    "re-replication begun nodes=%s moves=%d plan=%s why=%s",
                    nodes,
                    len(command.moves),
                    command.plan_id,
                    "down for rereplicate-after-ms",
                )
        self._tried = task
        if any(refusal.code is RefusalCode.NO_ROOM for refusal in plan.refusals):
            self._try_again_at = now + ROOM_RETRY_S

    def _rereplicate_after_s(self) -> float:
        config = self._term.state.config
        return config.rereplicate_after_ms / 1000 if config is not None else 0.0
