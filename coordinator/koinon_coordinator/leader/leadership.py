"""What a coordinator does while it leads: one ``Leadership`` for each term that it wins.

It decides on the replicated state and its own soft state (sessions, host commands, how far
replicas have come), proposes, and answers when the commands have been applied. It ends with the
term; nothing of it is kept, and the next leader begins by giving every node a full session.

Its parts: ``members`` (registrations, heartbeats, fences, what primaries propose), ``mover`` (moves
under way, re-replication), ``operations`` (what operators ask) and ``loading`` (bulk loads).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from random import Random

from koinon_coordinator.config import BootstrapConfig, TimingConfig
from koinon_coordinator.core.cluster.commands import (
    CreateCluster,
    HostedPartition,
    PartitionChange,
    Registered,
)
from koinon_coordinator.core.decide.decisions import Registration
from koinon_coordinator.core.decide.move_scheduler import Progress
from koinon_coordinator.core.decide.sessions import Sessions
from koinon_coordinator.leader.bulk_loads import Loading
from koinon_coordinator.leader.context import NEVER_APPENDED, Group, LeaderContext
from koinon_coordinator.leader.membership import HeartbeatAnswer, Members
from koinon_coordinator.leader.mover import Mover
from koinon_coordinator.leader.operations import Operations
from koinon_coordinator.state_machine import ReplicatedState
from koinon_proto.contract.table import PartitionId
from koinon_proto.process.clock import boottime
from koinon_proto.v1.membership_pb2 import NodeStats

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.1


class Leadership:
    """One term's leader. ``run`` until the term ends; everything else meanwhile."""

    def __init__(
        self,
        *,
        term: int,
        group: Group,
        replicated: ReplicatedState,
        bootstrap: BootstrapConfig,
        timing: TimingConfig,
        clock: Callable[[], float] = boottime,
        random: Random | None = None,
    ) -> None:
        """Begin the term, whose no-op has been applied here: all earlier commands have been too.

        Raises:
            ConfigurationError: ``timing`` contradicts the replicated times.
        """
        self._term = LeaderContext(
            number=term,
            group=group,
            replicated=replicated,
            clock=clock,
            random=random or Random(),
        )
        self._bootstrap = bootstrap
        self._given_timing = timing
        config = replicated.state.config
        self.timing = timing.in_force(config) if config is not None else timing
        self.members = Members(self._term, self.timing)
        pause_s = self.timing.session_times().pause_s
        self.mover = Mover(self._term, pause_s=pause_s)
        self.operations = Operations(self._term, self.mover)
        self.loading = Loading(self._term, pause_s=pause_s)

    @property
    def term(self) -> int:
        return self._term.number

    @property
    def began_at(self) -> float:
        return self._term.began_at

    @property
    def is_open(self) -> bool:
        """Whether requests are answered: there is a cluster, and the term goes on."""
        return self._term.is_open

    @property
    def sessions(self) -> Sessions:
        return self.members.sessions

    # --- the term -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Create the cluster if there is none, then watch sessions and moves until cancelled."""
        try:
            await self._ensure_cluster()
            self._term.is_open = True
            state = self._term.state
            log.info(
                "leadership begun term=%d table_version=%d nodes=%d moves=%d loads=%d",
                self.term,
                state.table_version,
                len(state.nodes),
                len(state.moves),
                len(state.loads.active),
            )
            self._term.spawn(self.mover.run())
            while True:
                self._tick()
                await asyncio.sleep(self.timing.tick_s)
        finally:
            await self._term.end()

    def _tick(self) -> None:
        now = self._term.clock()
        self.members.tick(now)
        self.mover.tick(now)
        self.loading.tick(now)

    async def _ensure_cluster(self) -> None:
        while self._term.state.config is None:
            cluster_id = f"{self._term.random.getrandbits(128):032x}"
            config = self._bootstrap.cluster(cluster_id, self._given_timing)
            try:
                await self._term.propose(CreateCluster(config=config))
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
        differences = self._bootstrap.differences(self._given_timing, self._term.state.config)
        for name, (ours, replicated) in differences.items():
            log.warning(
                "setting ignored setting=%s given=%s in_force=%s why=%s",
                name,
                ours,
                replicated,
                "set when the cluster is created, not by a coordinator that joins or restarts",
            )

    # --- what nodes ask -----------------------------------------------------------------------

    async def register(self, request: Registration, cluster_id: str) -> Registered:
        """See ``Members.register``."""
        return await self.members.register(request, cluster_id)

    async def heartbeat(
        self,
        *,
        cluster_id: str,
        node_id: str,
        node_epoch: int,
        hosted: list[HostedPartition],
        received_at: float,
        stats: NodeStats | None = None,
        progress: Sequence[Progress] = (),
        registration_id: str = "",
    ) -> HeartbeatAnswer:
        """See ``Members.heartbeat``. ``progress`` is of replicas that are not in sync."""
        answer = await self.members.heartbeat(
            cluster_id=cluster_id,
            node_id=node_id,
            node_epoch=node_epoch,
            hosted=hosted,
            received_at=received_at,
            stats=stats,
            registration_id=registration_id,
        )
        self.mover.take_progress(answer.record.info.number, progress)
        return answer

    async def leave(
        self, *, cluster_id: str, node_id: str, node_epoch: int, registration_id: str = ""
    ) -> None:
        """See ``Members.leave``."""
        await self.members.leave(
            cluster_id=cluster_id,
            node_id=node_id,
            node_epoch=node_epoch,
            registration_id=registration_id,
        )

    async def alter_partitions(
        self,
        *,
        cluster_id: str,
        node_id: str,
        node_epoch: int,
        changes: Sequence[PartitionChange],
        registration_id: str = "",
    ) -> tuple[PartitionId, ...]:
        """See ``Members.alter_partitions``."""
        return await self.members.alter_partitions(
            cluster_id=cluster_id,
            node_id=node_id,
            node_epoch=node_epoch,
            changes=changes,
            registration_id=registration_id,
        )
