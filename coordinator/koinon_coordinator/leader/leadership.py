"""The leader's work: one ``Leadership`` for each term that this coordinator wins.

It decides by the replicated state and its own soft state (sessions, host commands, progress of
replicas), proposes, and answers once the commands have been applied. It ends with the term; none of
its soft state is kept, and the next leader begins by giving every node a full session.

Its parts: ``members`` (registrations, heartbeats, fences, primaries' proposals), ``mover`` (moves,
re-replication), ``admin_requests`` (operators' requests), ``access`` (users, roles, tokens),
``keyspaces``, ``loading`` (bulk loads) and ``groups`` (of consumers).
"""

from __future__ import annotations

import asyncio
import logging

from koinon_coordinator.config import BootstrapConfig, TimingConfig
from koinon_coordinator.core.cluster.commands import CreateCluster
from koinon_coordinator.leader.access_changes import AccessChanges
from koinon_coordinator.leader.admin_requests import AdminRequests
from koinon_coordinator.leader.context import NEVER_APPENDED, LeaderContext
from koinon_coordinator.leader.group_sharing import GroupSharing
from koinon_coordinator.leader.keyspace_changes import KeyspaceChanges
from koinon_coordinator.leader.loading import Loading
from koinon_coordinator.leader.membership import Members
from koinon_coordinator.leader.mover import Mover
from koinon_proto.contract.table import ClusterConfig

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.1


def warn_of_ignored(
    bootstrap: BootstrapConfig, timing: TimingConfig, cluster: ClusterConfig
) -> None:
    """Log each setting of this coordinator that differs from the cluster's."""
    for name, (ours, replicated) in bootstrap.differences(timing, cluster).items():
        log.warning(
            "setting ignored setting=%s given=%s in_force=%s why=%s",
            name,
            ours,
            replicated,
            "set when the cluster is created, not by a coordinator that joins or restarts",
        )


class Leadership:
    """The leadership of one term. Run ``run`` until the term ends."""

    def __init__(
        self, term: LeaderContext, bootstrap: BootstrapConfig, timing: TimingConfig
    ) -> None:
        """Begin the term. Its no-op has been applied here, hence all earlier commands.

        Raises:
            ConfigurationError: ``timing`` contradicts the replicated times.
        """
        # The state, clock and tasks of this term; ``is_open`` while requests are answered.
        self.term = term
        self._bootstrap = bootstrap
        self._given_timing = timing
        config = term.state.config
        self.timing = timing.in_force(config) if config is not None else timing
        pause_s = self.timing.session_times().pause_s
        self.mover = Mover(self.term, pause_s=pause_s)
        self.members = Members(self.term, self.timing, self.mover)
        self.operations = AdminRequests(self.term, self.mover)
        times = self.timing.session_times()
        self.access = AccessChanges(self.term, times, self.members.behind_in_access)
        self.keyspaces = KeyspaceChanges(
            self.term, times, self.members.behind_in_table, self.members.has_erased
        )
        self.loading = Loading(self.term, pause_s=pause_s)
        self.groups = GroupSharing(self.term, times)

    # --- the term -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Create the cluster if there is none, then watch sessions and moves until cancelled."""
        try:
            await self._ensure_cluster()
            self.term.is_open = True
            state = self.term.state
            log.info(
                "leadership begun term=%d table_version=%d nodes=%d moves=%d loads=%d",
                self.term.number,
                state.table_version,
                len(state.nodes),
                len(state.moves),
                len(state.loads.active),
            )
            self.term.spawn(self.mover.run())
            while True:
                self._tick()
                await asyncio.sleep(self._next_tick_s())
        finally:
            await self.term.end()

    def _tick(self) -> None:
        now = self.term.clock()
        self.members.tick(now)
        self.mover.tick(now)
        self.loading.tick(now)
        self.keyspaces.tick()
        self.groups.tick(now)

    def _next_tick_s(self) -> float:
        """Return how long to wait: until the next session may end, within bounds."""
        if not self.term.state.bootstrapped:
            return self.timing.tick_s
        due_s = self.members.sessions.due_at() - self.term.clock()
        return min(max(due_s, self.timing.tick_s), self.timing.resting_tick_s)

    async def _ensure_cluster(self) -> None:
        while self.term.state.config is None:
            cluster_id = f"{self.term.random.getrandbits(128):032x}"
            config = self._bootstrap.cluster(cluster_id, self._given_timing)
            try:
                await self.term.propose(CreateCluster(config=config))
            except NEVER_APPENDED:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            log.info(
                "cluster created cluster_id=%s partitions=%d replication_factor=%d",
                config.cluster_id,
                config.partition_count,
                config.replication_factor,
            )
            warning = self._bootstrap.few_copies_warning()
            if warning:
                log.warning(
                    "few copies replication_factor=%d why=%s", config.replication_factor, warning
                )
        warn_of_ignored(self._bootstrap, self._given_timing, self.term.state.config)
