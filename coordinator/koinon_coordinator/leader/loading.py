"""Bulk loads while this coordinator leads: requests of jobs, nodes and operators, and the abort of
loads whose jobs are gone.

``core/decide/load_requests.py`` decides on the requests, by a state that has all earlier commits: a
load that it lacks was never opened. A command that is rejected when it is applied, because another
one came first, becomes the same typed error as a refusal before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from koinon_coordinator.core.cluster.commands import (
    AbortLoad,
    CommitLoad,
    LoadOutcome,
    OpenLoad,
    PartitionsMerged,
    Reason,
    Rejected,
)
from koinon_coordinator.core.cluster.load_rules import Load
from koinon_coordinator.core.decide.load_requests import (
    Activity,
    Decision,
    LoadWish,
    decide_abort,
    decide_commit,
    decide_merged,
    decide_open,
    load_in,
    refusal,
)
from koinon_coordinator.leader.context import NEVER_APPENDED, LeaderContext
from koinon_proto.contract.bulk_loads import LoadState
from koinon_proto.contract.errors import KoinonError, UnknownFateError

log = logging.getLogger(__name__)

MayUse = Callable[[Load], None]
"""Is called with a load; raises if the caller may not use it."""


def anybody(_load: Load) -> None:
    """Allow every caller to use the load, for clusters without users."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadView:
    """A load, its staged or committed rows and bytes, and the time since it was last touched (0
    unless it is open).
    """

    load: Load
    rows: int
    bytes: int
    idle_ms: int


class Loading:
    """Opens, commits, ends and forgets bulk loads, during one term.

    Every method raises NotLeaderError outside the term, and WrongClusterError for a caller
    of another cluster; those that propose also ResourceExhaustedError, UnavailableError (nothing
    was changed), UnknownFateError.
    """

    def __init__(self, term: LeaderContext, *, pause_s: float) -> None:
        self._term = term
        self._pause_s = pause_s
        self._activity = Activity(term.began_at)

    # --- what jobs ask ------------------------------------------------------------------------

    async def open(self, wish: LoadWish, cluster_id: str, may_use: MayUse = anybody) -> LoadOutcome:
        """Open a load, or return the existing one.

        Raises:
            ClusterNotReadyError, InvalidArgumentError.
            PermissionDeniedError: the load exists, and ``may_use`` refuses it.
        """
        await self._caught_up(cluster_id)
        outcome = await self._done(decide_open(self._term.state, wish))
        self._check_use(outcome.load_id, may_use)
        if outcome.state is LoadState.OPEN:
            self._activity.touch(outcome.load_id, self._term.clock())
        return outcome

    async def check(self, wish: LoadWish, cluster_id: str) -> None:
        """Raise the errors of ``open``, without opening a load."""
        await self._caught_up(cluster_id)
        decide_open(self._term.state, wish)

    async def touch(
        self,
        load_id: int,
        cluster_id: str,
        may_use: MayUse = anybody,
        *,
        attempt: int,
        rows: int,
        size_bytes: int,
    ) -> LoadState:
        """Note that a job works on an open load.

        Raises:
            LoadClosedError: the load is not open.
            PermissionDeniedError: as ``may_use`` says.
        """
        self._term.check_cluster(cluster_id)
        known = self._term.state.loads.get(load_id)
        if known is None or known.state is not LoadState.OPEN:
            await self._caught_up(cluster_id)
        self._check_use(load_id, may_use)
        load = load_in(self._term.state, load_id, LoadState.OPEN)
        self._activity.touch(
            load_id, self._term.clock(), attempt=attempt, rows=rows, size_bytes=size_bytes
        )
        return load.state

    async def commit(
        self, command: CommitLoad, cluster_id: str, may_use: MayUse = anybody
    ) -> LoadState:
        """Make a load final.

        Raises:
            ClusterNotReadyError, InvalidArgumentError, LoadClosedError, PartitionOfflineError.
            PermissionDeniedError: as ``may_use`` says.
        """
        await self._caught_up(cluster_id)
        self._check_use(command.load_id, may_use)
        decision = decide_commit(self._term.state, command)
        outcome = await self._done(decision)
        if decision is command:
            log.info(
                "load committed load=%d attempts=%d rows=%d bytes=%d state=%s",
                command.load_id,
                len(command.attempts),
                command.rows,
                command.bytes,
                outcome.state.name.lower(),
            )
        return outcome.state

    async def abort(
        self, load_id: int, reason: str, cluster_id: str, may_use: MayUse = anybody
    ) -> LoadState:
        """Abort a load: its rows become no records.

        Raises:
            ClusterNotReadyError, LoadClosedError.
            PermissionDeniedError: as ``may_use`` says.
        """
        await self._caught_up(cluster_id)
        self._check_use(load_id, may_use)
        decision = decide_abort(self._term.state, load_id, reason)
        outcome = await self._done(decision)
        if isinstance(decision, AbortLoad):
            log.info("load aborted load=%d why=%s", load_id, decision.reason)
        return outcome.state

    async def empty(self, wish: LoadWish, cluster_id: str) -> LoadOutcome:
        """Open an overwriting load and commit it without rows. May be repeated with the same
        job_id.

        Raises:
            ClusterNotReadyError, InvalidArgumentError, PartitionOfflineError, UnknownKeyspaceError:
            nothing is emptied.
        """
        await self._caught_up(cluster_id)
        outcome = await self._done(decide_open(self._term.state, wish))
        if outcome.state is not LoadState.OPEN:
            return outcome
        command = CommitLoad(load_id=outcome.load_id, attempts=(), partition_ids=())
        try:
            return await self._done(decide_commit(self._term.state, command))
        except KoinonError as error:
            if not error.maybe_applied:  # otherwise the caller asks again
                with contextlib.suppress(KoinonError):  # the load ends by its timeout
                    await self._done(decide_abort(self._term.state, outcome.load_id, str(error)))
            raise

    async def views(self, load_id: int, cluster_id: str) -> list[LoadView]:
        """Return the load, or with 0 all known loads, by id."""
        await self._caught_up(cluster_id)
        now = self._term.clock()
        loads = self._term.state.loads
        return [self._view(load, now) for load in loads if load_id in (0, load.load_id)]

    def staged(self) -> tuple[int, int]:
        """Return the rows and bytes of all loads that are open or merging, by reports to this
        leader.
        """
        views = [self._view(load, 0.0) for load in self._term.state.loads.active.values()]
        return sum(view.rows for view in views), sum(view.bytes for view in views)

    def _view(self, load: Load, now: float) -> LoadView:
        if load.state is not LoadState.OPEN:
            return LoadView(load=load, rows=load.rows, bytes=load.bytes, idle_ms=0)
        rows, size_bytes = self._activity.staged(load.load_id)
        idle_ms = round(self._activity.idle_s(load.load_id, now) * 1000)
        return LoadView(load=load, rows=rows, bytes=size_bytes, idle_ms=idle_ms)

    # --- what nodes ask -----------------------------------------------------------------------

    async def manifest(self, load_id: int, cluster_id: str) -> Load:
        """Return a load that is being merged.

        Raises:
            LoadClosedError: the load is not being merged.
        """
        await self._caught_up(cluster_id)
        return load_in(self._term.state, load_id, LoadState.MERGING)

    async def merged(
        self, load_id: int, partition_ids: Sequence[int], cluster_id: str, reporter: str = ""
    ) -> LoadState:
        """Note that the load is merged in these partitions, as far as the ``reporter`` leads them
        ('': reporters need not say who they are); return its state (UNKNOWN: it ended long ago, or
        never was).

        Raises:
            ClusterNotReadyError, InvalidArgumentError.
        """
        await self._caught_up(cluster_id)
        decision = decide_merged(self._term.state, load_id, partition_ids, reporter)
        outcome = await self._done(decision)
        if isinstance(decision, PartitionsMerged) and outcome.state is LoadState.DONE:
            log.info("load merged load=%d", load_id)
        return outcome.state

    # --- idle loads ---------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Abort the open loads that were not touched within their timeout."""
        active = self._term.state.loads.active
        for load in self._activity.tick(now, active, pause_s=self._pause_s):
            self._activity.hold(load.load_id)
            self._term.spawn(self._expire(load))

    async def _expire(self, load: Load) -> None:
        """Propose the abort once, and hold the load until the proposal's fate is known."""
        reason = (
            f"nobody touched it for {load.timeout_ms / 1000:g} s: the job is gone, or it must "
            "touch its load more often, or open it with a longer timeout"
        )
        try:
            result = await self._term.propose(AbortLoad(load_id=load.load_id, reason=reason))
        except NEVER_APPENDED:
            self._activity.release(load.load_id)
            return
        except UnknownFateError:
            return  # the term is over
        if isinstance(result, LoadOutcome) and result.state is LoadState.ABORTED:
            log.warning(
                "load aborted load=%d job=%s why=%s",
                load.load_id,
                load.job_id,
                f"untouched for {load.timeout_ms} ms",
            )

    # --- helpers ------------------------------------------------------------------------------

    def _check_use(self, load_id: int, may_use: MayUse) -> None:
        load = self._term.state.loads.get(load_id)
        if load is not None:
            may_use(load)

    async def _caught_up(self, cluster_id: str) -> None:
        self._term.check_cluster(cluster_id)
        await self._term.caught_up()

    async def _done(self, decision: Decision) -> LoadOutcome:
        """Commit the decision, if it is a command; raise if it is rejected."""
        if isinstance(decision, LoadOutcome):
            return decision
        result = await self._term.committed(decision)
        if isinstance(result, LoadOutcome):
            if isinstance(decision, OpenLoad):
                log.info(
                    "load opened load=%d job=%s mode=%s timeout_ms=%d",
                    result.load_id,
                    decision.job_id,
                    decision.mode.name.lower(),
                    decision.timeout_ms,
                )
            return result
        reason = result.reason if isinstance(result, Rejected) else Reason.BAD_VALUE
        raise refusal(reason, decision, self._term.state)
