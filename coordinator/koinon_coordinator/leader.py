"""What a coordinator does while it leads: one ``Leadership`` for each term that it wins.

It decides on the replicated state and its own soft state (sessions, host commands), proposes, and
answers when the commands have been applied. It ends with the term; nothing of it is kept, and the
next leader begins by giving every node a full session.

The fate of a registration
--------------------------
A proposal whose leader loses its place may or may not be committed later. The node is then told
to look for the leader, and sends the same ``registration_id`` again: if the first one was applied,
the second finds its epoch made by that id and unconfirmed, and answers the same epoch; if it was
not, it is applied now. Both may be in the log: the second is then a copy. A copy that is applied
only after the node began to use the epoch carries an epoch that is over by then, and is rejected.

The first heartbeat of an epoch is acknowledged only when ``ConfirmRegistration`` has been applied,
so no lease, hence no acknowledged write, exists under an unconfirmed epoch.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar, cast

from koinon_proto.clock import boottime
from koinon_proto.errors import (
    InvalidArgumentError,
    KoinonError,
    MembershipChangeError,
    NodeFencedError,
    NotLeaderError,
    RegistrationPendingError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownFateError,
    WrongClusterError,
)
from koinon_proto.table import NO_NODE, ClusterConfig, NodeId, NodeNumber
from koinon_proto.v1.membership_pb2 import NodeStats

from .config import BootstrapConfig, TimingConfig
from .convert import command_to_bytes
from .core.commands import (
    Applied,
    Command,
    ConfirmRegistration,
    CreateCluster,
    FenceNode,
    HostedPartition,
    PartitionsHosted,
    Reason,
    Registered,
    RegisterNode,
    Rejected,
    Result,
)
from .core.decisions import (
    HELD_RETRY_MS,
    Registration,
    decide_bootstrap,
    decide_heartbeat,
    decide_hosted,
    decide_registration,
)
from .core.hosting import HostCommands
from .core.sessions import Sessions, may_acknowledge
from .core.state import ClusterState, NodeRecord
from .replicated import ReplicatedState

log = logging.getLogger(__name__)

REGISTER_ATTEMPTS_MAX = 4
NEVER_APPENDED = (NotLeaderError, ResourceExhaustedError, UnavailableError, InvalidArgumentError)
"""What ``propose`` raises for a command that is in nobody's log and never will be."""
RETRY_PAUSE_S = 0.1
T = TypeVar("T")


class Group(Protocol):
    """What a leader needs of the Raft member."""

    async def propose(self, command: bytes) -> object: ...

    def quorum_contact_at(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatAnswer:
    """What an acknowledged heartbeat brings, beside the table."""

    record: NodeRecord
    commands: list[HostedPartition]


class Leadership:
    """One term's leader. ``run`` until the term ends; ``register`` and ``heartbeat`` meanwhile."""

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
        self.term = term
        self._group = group
        self._replicated = replicated
        self._bootstrap = bootstrap
        self._given_timing = timing
        config = self._state.config
        self.timing = timing.in_force(config) if config is not None else timing
        self._clock = clock
        self._times = self.timing.session_times()
        self._open = False  # until there is a cluster
        self.began_at = clock()
        self.stats: dict[NodeNumber, NodeStats] = {}
        self.sessions = Sessions(
            self._times,
            self.began_at,
            live=[(r.info.number, r.confirmed) for r in self._state.live_nodes],
        )
        self._hosting = HostCommands(self.timing.hosting_times(), random or Random())
        self._hosted: dict[tuple[NodeNumber, int], dict[int, HostedPartition]] = {}
        self._hosted_arrived = asyncio.Event()
        self._confirming: dict[tuple[NodeNumber, int], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._assigning = False

    @property
    def _state(self) -> ClusterState:
        return self._replicated.state

    # --- the term -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Create the cluster if there is none, then watch sessions until cancelled."""
        try:
            await self._ensure_cluster()
            self._open = True
            log.info(
                "leadership begun term=%d table_version=%d nodes=%d",
                self.term,
                self._state.table_version,
                len(self._state.nodes),
            )
            self._spawn(self._report_hosted())
            while True:
                self._tick()
                await asyncio.sleep(self.timing.tick_s)
        finally:
            self._open = False
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ensure_cluster(self) -> None:
        while self._state.config is None:
            config = self._bootstrap.cluster(uuid.uuid4().hex, self._given_timing)
            try:
                await self._propose(CreateCluster(config=config))
            except NEVER_APPENDED:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            log.info(
                "cluster created cluster_id=%s partitions=%d replication_factor=%d",
                config.cluster_id,
                config.partition_count,
                config.replication_factor,
            )
        differences = self._bootstrap.differences(self._given_timing, self._state.config)
        for name, (ours, replicated) in differences.items():
            log.warning(
                "setting ignored setting=%s given=%s in_force=%s why=%s",
                name,
                ours,
                replicated,
                "chosen once, when the cluster was created",
            )

    def _tick(self) -> None:
        now = self._clock()
        quorum = may_acknowledge(now, self._group.quorum_contact_at(), self._times)
        for number in self.sessions.tick(now, quorum=quorum):
            record = self._state.node(number)
            if record is None or not record.live:
                self.sessions.close(number)
                continue
            self.sessions.hold(number)
            self._spawn(self._fence(record))
        if not self._state.bootstrapped and not self._assigning:
            self._maybe_assign(now)

    async def _fence(self, record: NodeRecord) -> None:
        """Propose once, and hold the session until the fate is known. If it never is, the term is
        over, and so is this session.
        """
        number, epoch = record.info.number, record.info.node_epoch
        try:
            result = await self._propose(FenceNode(node_number=number, node_epoch=epoch))
        except NEVER_APPENDED:
            self.sessions.release(number)
            return
        self.sessions.close(number)
        self._hosting.forget(number)
        if isinstance(result, Applied):
            log.warning(
                "node fenced node=%s epoch=%d partitions=%d why=%s",
                record.info.node_id,
                epoch,
                result.rows_changed,
                "silent for the session timeout",
            )

    def _maybe_assign(self, now: float) -> None:
        command = decide_bootstrap(self._state, self.sessions, now)
        if command is not None:
            self._assigning = True
            self._spawn(self._assign(command))

    async def _assign(self, command: Command) -> None:
        try:
            result = await self._propose(command)
            if isinstance(result, Applied):
                nodes = len(self._state.live_nodes)
                log.info("partitions assigned partitions=%d nodes=%d", result.rows_changed, nodes)
        finally:
            self._assigning = False

    # --- registration -------------------------------------------------------------------------

    async def register(self, request: Registration, cluster_id: str) -> Registered:
        """Register the node; see the module's text on retries.

        Raises:
            NotLeaderError: this term is over, or the proposal's fate is unknown: ask the leader,
                with the same registration_id.
            WrongClusterError, DuplicateNodeError, RegistrationPendingError, InvalidArgumentError,
            MembershipChangeError, ResourceExhaustedError: see their classes.
        """
        self.check_cluster(cluster_id)
        for _ in range(REGISTER_ATTEMPTS_MAX):
            command = decide_registration(self._state, self.sessions, request, self._clock())
            result = await self._outcome(self._spawn(self._commit_registration(command)))
            if isinstance(result, Registered):
                return result
            if isinstance(result, Rejected) and result.reason is Reason.NODE_LEFT:
                raise MembershipChangeError(reason=f"node {request.node_id!r} has left the cluster")
        raise RegistrationPendingError(node_id=request.node_id, retry_after_ms=HELD_RETRY_MS)

    async def _commit_registration(self, command: RegisterNode) -> Result:
        """Propose; while it is under way, no heartbeat of the old epoch is acknowledged. Runs in a
        task of the term, so that a caller who gives up leaves nothing half-done.
        """
        known = self._state.node_by_id(command.node_id)
        number = known.info.number if known is not None else NO_NODE
        self.sessions.hold(number)
        try:
            result = await self._propose(command)
        except NEVER_APPENDED:
            self.sessions.release(number)
            raise
        if isinstance(result, Registered):
            self._on_registered(command, result)
        else:
            self.sessions.release(number)
        return result

    def _on_registered(self, command: RegisterNode, result: Registered) -> None:
        self.sessions.open(result.node_number, self._clock())
        self._hosting.forget(result.node_number)
        log.info(
            "node registered node=%s number=%d epoch=%d address=%s rack=%s repeated=%s",
            command.node_id,
            result.node_number,
            result.node_epoch,
            command.address,
            command.rack,
            result.repeated,
        )
        if result.reclaimed:
            log.warning(
                "the store that partitions waited for is back node=%s partitions=%d",
                command.node_id,
                result.reclaimed,
            )
        if result.copies_lost:
            log.warning(
                "store is not the one known node=%s store_id=%s copies_lost=%d stranded=%d",
                command.node_id,
                command.store_id,
                result.copies_lost,
                result.stranded,
            )

    # --- heartbeats ---------------------------------------------------------------------------

    async def heartbeat(
        self,
        *,
        cluster_id: str,
        node_id: str,
        node_epoch: int,
        hosted: list[HostedPartition],
        received_at: float,
        stats: NodeStats | None = None,
    ) -> HeartbeatAnswer:
        """Acknowledge the heartbeat: the node's lease is extended from when it sent it.

        Raises:
            NotLeaderError: not the leader, or cut off from its quorum.
            UnknownNodeError, NodeFencedError: the node must register.
            WrongClusterError: the node belongs elsewhere.
        """
        self.check_cluster(cluster_id)
        record = decide_heartbeat(self._state, node_id, node_epoch)
        number = record.info.number
        self.sessions.heard(number, received_at)
        if not record.confirmed:
            await self._confirmed(record)
            record = decide_heartbeat(self._state, node_id, node_epoch)
        now = self._clock()
        if not self._open or not may_acknowledge(now, self._group.quorum_contact_at(), self._times):
            raise self._not_leader()
        if not self.sessions.acknowledge(number, received_at):
            raise NodeFencedError(
                node_id=node_id,
                node_epoch=node_epoch,
                current_node_epoch=record.info.node_epoch,
            )
        if stats is not None:
            self.stats[number] = stats
        if hosted:
            self._take_hosted(record, hosted, now)
        commands = self._hosting.due(number, self._state.assigned_to(number), now)
        return HeartbeatAnswer(record=record, commands=commands)

    async def _confirmed(self, record: NodeRecord) -> None:
        """Wait until the epoch is confirmed; one proposal however many heartbeats wait for it."""
        key = (record.info.number, record.info.node_epoch)
        task = self._confirming.get(key)
        if task is None:
            task = self._spawn(self._confirm(*key))
            self._confirming[key] = task
            task.add_done_callback(lambda _: self._confirming.pop(key, None))
        await self._outcome(task)

    async def _confirm(self, number: NodeNumber, node_epoch: int) -> None:
        await self._propose(ConfirmRegistration(node_number=number, node_epoch=node_epoch))

    def _take_hosted(self, record: NodeRecord, hosted: list[HostedPartition], now: float) -> None:
        """Queue what is new for the log, bounded by the partitions that the node leads."""
        new = decide_hosted(self._state, record, hosted)
        if new:
            key = (record.info.number, record.info.node_epoch)
            self._hosted.setdefault(key, {}).update({h.partition_id: h for h in new})
            self._hosting.acknowledged(record.info.number, new, now)
            self._hosted_arrived.set()

    async def _report_hosted(self) -> None:
        """Propose what nodes say they host, in batches. What fails is sent to the node again."""
        while True:
            await self._hosted_arrived.wait()
            self._hosted_arrived.clear()
            batches, self._hosted = self._hosted, {}
            await asyncio.gather(*(self._report_batch(*key, rows) for key, rows in batches.items()))

    async def _report_batch(
        self, number: NodeNumber, node_epoch: int, rows: dict[int, HostedPartition]
    ) -> None:
        command = PartitionsHosted(
            node_number=number, node_epoch=node_epoch, hosted=tuple(rows.values())
        )
        try:
            result = await self._propose(command)
        except (*NEVER_APPENDED, UnknownFateError) as e:
            log.debug("hosted partitions not recorded node_number=%d error=%s", number, e)
            return
        if isinstance(result, Applied):
            name = self._node_name(number)
            log.info("partitions online node=%s partitions=%d", name, result.rows_changed)

    # --- helpers ------------------------------------------------------------------------------

    def check_cluster(self, cluster_id: str) -> ClusterConfig:
        """Return the configuration; refuse another cluster's caller, or everyone before it."""
        config = self._state.config
        if config is None or not self._open:
            raise self._not_leader()
        if cluster_id and cluster_id != config.cluster_id:
            raise WrongClusterError(
                expected_cluster_id=config.cluster_id, actual_cluster_id=cluster_id
            )
        return config

    async def _propose(self, command: Command) -> Result:
        return cast(Result, await self._group.propose(command_to_bytes(command)))

    async def _outcome(self, task: asyncio.Task[T]) -> T:
        """Wait for work of this term; the caller may give up, the work goes on.

        Raises:
            NotLeaderError: the term ended first; whether the work took effect is not known.
        """
        try:
            return await asyncio.shield(task)
        except (UnknownFateError, UnavailableError) as error:
            raise self._not_leader() from error
        except asyncio.CancelledError:
            if task.cancelled():
                raise self._not_leader() from None
            raise

    def _not_leader(self) -> NotLeaderError:
        return NotLeaderError(leader_id="", leader_address="", term=self.term)

    def _node_name(self, number: NodeNumber) -> NodeId | NodeNumber:
        record = self._state.node(number)
        return record.info.node_id if record is not None else number

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KoinonError):
            log.error("background work failed term=%d", self.term, exc_info=error)
