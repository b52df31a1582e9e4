"""The leader's part for nodes: registrations, heartbeats, fences, and primaries' proposals for
rows.

The fate of a registration
--------------------------
A proposal whose leader is deposed may or may not be committed later. The node is then told to find
the leader, and sends the same ``registration_id`` again. If the first proposal was applied, the
second finds an unconfirmed epoch with that id, and the answer is the same epoch; otherwise the
second is applied now. If both are in the log, the second is a copy. A copy that is applied after
the node began to use the epoch names an outdated epoch, and is rejected.

The first heartbeat of an epoch is acknowledged only when ``ConfirmRegistration`` has been applied,
so no lease, hence no acknowledged write, exists under an unconfirmed epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from koinon_coordinator.config import TimingConfig
from koinon_coordinator.core.cluster.commands import (
    AlterPartitions,
    Applied,
    Command,
    ConfirmRegistration,
    FenceNode,
    HostedPartition,
    PartitionChange,
    PartitionsHosted,
    Reason,
    Registered,
    RegisterNode,
    Rejected,
    Result,
    StoreStanding,
)
from koinon_coordinator.core.cluster.image import NodeRecord
from koinon_coordinator.core.decide.copy_progress import Progress
from koinon_coordinator.core.decide.host_commands import HostCommands
from koinon_coordinator.core.decide.load_plans import NodeLoad
from koinon_coordinator.core.decide.registrations import (
    HELD_RETRY_MS,
    Registration,
    Sender,
    check_changes,
    check_sender,
    decide_bootstrap,
    decide_hosted,
    decide_registration,
)
from koinon_coordinator.core.decide.room import NodeUse
from koinon_coordinator.core.decide.sessions import Sessions, may_acknowledge
from koinon_coordinator.leader.context import NEVER_APPENDED, LeaderContext
from koinon_coordinator.leader.mover import Mover
from koinon_proto.contract.cluster_errors import (
    MembershipChangeError,
    NodeFencedError,
    RegistrationPendingError,
    UnknownNodeError,
)
from koinon_proto.contract.errors import UnknownFateError
from koinon_proto.contract.table import NO_NODE, NodeId, NodeNumber, PartitionId
from koinon_proto.v1.membership_pb2 import NodeLoad as NodeLoadMessage
from koinon_proto.v1.membership_pb2 import NodeStats, PartitionSizes

log = logging.getLogger(__name__)

REGISTER_ATTEMPTS_MAX = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """A node's report in a heartbeat. ``progress``: of replicas that are not in sync. ``sizes``
    and ``load``: None if they are not reported now. ``access_version`` and ``table_version``: the
    versions that the node uses. ``erased``: ids of dropped keyspaces without data on the node.
    """

    stats: NodeStats = field(default_factory=NodeStats)
    hosted: Sequence[HostedPartition] = ()
    progress: Sequence[Progress] = ()
    sizes: PartitionSizes | None = None
    load: NodeLoadMessage | None = None
    access_version: int = 0
    table_version: int = 0
    erased: Sequence[int] = ()


@dataclass(kw_only=True, slots=True)
class Said:
    """The facts that one epoch of a node has reported in heartbeats, which may come out of order:
    the newest versions that it uses, and the dropped keyspaces without data on it. Such a node
    never gets data of that keyspace again.
    """

    node_epoch: int
    access_version: int = 0
    table_version: int = 0
    erased: set[int] = field(default_factory=set)


class Members:
    """The nodes by one term's leader: sessions, host commands, statistics."""

    def __init__(self, term: LeaderContext, timing: TimingConfig, mover: Mover) -> None:
        self._term = term
        self._mover = mover
        self._times = timing.session_times()
        self.stats: dict[NodeNumber, NodeStats] = {}  # of each node's last heartbeat
        self.fences = 0  # number of silent nodes fenced in this term
        self.old_stores = 0  # number of old copies of stores registered in this term
        self.sessions = Sessions(
            self._times,
            term.began_at,
            live=[(r.info.number, r.confirmed) for r in term.state.live_nodes],
        )
        self._hosting = HostCommands(timing.hosting_times(), term.random)
        # By (node, epoch): the proposal that confirms the epoch, while it is under way.
        self._confirming: dict[tuple[NodeNumber, int], asyncio.Task[None]] = {}
        self._assigning = False  # whether AssignPartitions is proposed
        self._said: dict[NodeNumber, Said] = {}  # reports of each node's newest epoch

    def tick(self, now: float) -> None:
        """Fence nodes that were silent for too long; assign the partitions once there are enough
        nodes.
        """
        for number in self.sessions.tick(now, quorum=self._may_acknowledge()):
            record = self._term.state.node(number)
            if record is None or not record.live:
                self.sessions.close(number)
                continue
            self.sessions.hold(number)
            self._term.spawn(self._fence(record))
        if not self._term.state.bootstrapped and not self._assigning:
            self._maybe_assign(now)

    def _may_acknowledge(self) -> bool:
        """Return whether a quorum has answered this leader recently, so that no other member
        leads.
        """
        contact_at = self._term.group.quorum_contact_at()
        return may_acknowledge(self._term.clock(), contact_at, self._times)

    async def _fence(self, record: NodeRecord, *, left: bool = False) -> None:
        """Propose the fence once, and hold the session until its fate is known. If the fate stays
        unknown, the term is over, and so is the session. ``left``: the node has asked for the
        fence.
        """
        number, epoch = record.info.number, record.info.node_epoch
        try:
            result = await self._term.propose(FenceNode(node_number=number, node_epoch=epoch))
        except NEVER_APPENDED:
            self.sessions.release(number)
            return
        now = self._term.state.node(number)
        if now is not None and now.live and now.info.node_epoch != epoch:
            return  # the node registered meanwhile: the session belongs to the new epoch
        self.sessions.close(number)
        self._hosting.forget(number)
        if isinstance(result, Applied) and left:
            log.info("node left node=%s epoch=%d", record.info.node_id, epoch)
        elif isinstance(result, Applied):
            self.fences += 1
            log.warning(
                "node fenced node=%s epoch=%d partitions=%d why=%s",
                record.info.node_id,
                epoch,
                result.rows_changed,
                "silent for the session timeout",
            )

    def _maybe_assign(self, now: float) -> None:
        command = decide_bootstrap(self._term.state, self.sessions, now)
        if command is not None:
            self._assigning = True
            self._term.spawn(self._assign(command))

    async def _assign(self, command: Command) -> None:
        try:
            result = await self._term.propose(command)
            if isinstance(result, Applied):
                nodes = len(self._term.state.live_nodes)
                log.info("partitions assigned partitions=%d nodes=%d", result.rows_changed, nodes)
        finally:
            self._assigning = False

    # --- registration -------------------------------------------------------------------------

    async def register(self, request: Registration, cluster_id: str) -> Registered:
        """Register the node; the module's docstring explains retries.

        Raises:
            NotLeaderError: this term is over, or the proposal's fate is unknown: retry at the
            leader
                with the same registration_id.
            WrongClusterError, DuplicateNodeError, RegistrationPendingError, InvalidArgumentError,
            MembershipChangeError, ResourceExhaustedError: see their classes.
        """
        self._term.check_cluster(cluster_id)
        for _ in range(REGISTER_ATTEMPTS_MAX):
            now = self._term.clock()
            command = decide_registration(self._term.state, self.sessions, request, now)
            result = await self._term.outcome(self._term.spawn(self._commit_registration(command)))
            if isinstance(result, Registered):
                return result
            if isinstance(result, Rejected) and result.reason is Reason.NODE_LEFT:
                raise MembershipChangeError(reason=f"node {request.node_id!r} has left the cluster")
        raise RegistrationPendingError(node_id=request.node_id, retry_after_ms=HELD_RETRY_MS)

    async def _commit_registration(self, command: RegisterNode) -> Result:
        """Propose the registration. Meanwhile no heartbeat of the old epoch is acknowledged. Runs
        in a task of the term, so that a cancelled caller leaves nothing half-done.
        """
        known = self._term.state.node_by_id(command.node_id)
        number = known.info.number if known is not None else NO_NODE
        self.sessions.hold(number)
        try:
            result = await self._term.propose(command)
        except NEVER_APPENDED:
            self.sessions.release(number)
            raise
        if isinstance(result, Registered):
            self._on_registered(command, result)
        else:
            self.sessions.release(number)
        return result

    def _on_registered(self, command: RegisterNode, result: Registered) -> None:
        self.sessions.open(result.node_number, self._term.clock())
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
        elif result.store is StoreStanding.OLD:
            self.old_stores += 1
            log.warning(
                "store is an old copy node=%s store_id=%s store_epoch=%d known_epoch=%d "
                "copies_lost=%d stranded=%d",
                command.node_id,
                command.store_id,
                command.last_node_epoch,
                result.known_epoch,
                result.copies_lost,
                result.stranded,
            )
        elif result.store is StoreStanding.OTHER:
            log.warning(
                "store is not the one known node=%s store_id=%s copies_lost=%d stranded=%d",
                command.node_id,
                command.store_id,
                result.copies_lost,
                result.stranded,
            )

    # --- heartbeats ---------------------------------------------------------------------------

    async def heartbeat(
        self, sender: Sender, report: NodeReport, received_at: float
    ) -> list[HostedPartition]:
        """Acknowledge a heartbeat: the node's lease is extended from the time of sending. Return
        the host commands that are due. ``received_at`` is in monotonic seconds.

        Raises:
            NotLeaderError: this coordinator does not lead, or is isolated from its quorum.
            UnknownNodeError, NodeFencedError: the node must register.
            WrongClusterError: the node belongs elsewhere.
        """
        term = self._term
        term.check_cluster(sender.cluster_id)
        try:
            record = check_sender(term.state, sender)
        except (UnknownNodeError, NodeFencedError):
            if not self._may_acknowledge():
                raise term.not_leader() from None  # another leader may have registered it since
            raise
        number = record.info.number
        self.sessions.heard(number, received_at)
        self._note_versions(record, report)
        if not record.confirmed:
            await self._confirmed(record)
            record = check_sender(term.state, sender)
        now = term.clock()
        if not term.is_open or not self._may_acknowledge():
            raise term.not_leader()
        if not self.sessions.acknowledge(number, received_at):
            raise NodeFencedError(
                node_id=sender.node_id,
                node_epoch=sender.node_epoch,
                current_node_epoch=record.info.node_epoch,
            )
        self._note_stats(number, report)
        if report.load is not None:
            self._mover.note_load(number, _load(report.load))
        self._record_hosted(record, report.hosted, now)
        self._mover.note_progress(number, report.progress)
        return self._hosting.due(number, term.state.assigned_to(number), now)

    def _note_stats(self, number: NodeNumber, report: NodeReport) -> None:
        """Keep the node's statistics, and the use of its store and disk. Sizes of partitions come
        seldom: the last ones are kept until the next.
        """
        stats = self.stats[number] = report.stats
        before = self._mover.uses.get(number, NodeUse())
        counted, counted_bytes = before.counted, before.counted_bytes
        if (sizes := report.sizes) is not None:
            counted = dict(zip(sizes.partition_ids, sizes.bytes, strict=False))
            counted_bytes = sum(sizes.bytes)
        use = NodeUse(
            used_bytes=stats.used_bytes,
            map_bytes=stats.map_bytes,
            reusable_bytes=stats.reusable_bytes,
            disk_free_bytes=stats.disk_free_bytes,
            disk_bytes=stats.disk_bytes,
            counted=counted,
            counted_bytes=counted_bytes,
        )
        self._mover.note_use(number, use)

    def _note_versions(self, record: NodeRecord, report: NodeReport) -> None:
        number, epoch = record.info.number, record.info.node_epoch
        said = self._said.get(number)
        if said is None or said.node_epoch != epoch:
            said = self._said[number] = Said(node_epoch=epoch)
        said.access_version = max(said.access_version, report.access_version)
        said.table_version = max(said.table_version, report.table_version)
        if report.erased:
            dropping = {keyspace.keyspace_id for keyspace in self._term.state.keyspaces.dropping}
            said.erased = (said.erased | set(report.erased)) & dropping

    def _heard(self, number: NodeNumber) -> Said | None:
        """Return the reports of the node's current epoch, or None."""
        record, said = self._term.state.node(number), self._said.get(number)
        is_current = record and said and said.node_epoch == record.info.node_epoch
        return said if is_current else None

    def behind_in_access(self, version: int) -> list[NodeId]:
        """Return the live nodes that have not reported that they use this version of access. Other
        nodes hold no lease: they have given it up, or were fenced after its end.
        """
        return [
            record.info.node_id
            for record in self._term.state.live_nodes
            if (said := self._heard(record.info.number)) is None or said.access_version < version
        ]

    def behind_in_table(self, version: int) -> list[NodeId]:
        """Return the live nodes that have not reported that they use this version of the table."""
        return [
            record.info.node_id
            for record in self._term.state.live_nodes
            if (said := self._heard(record.info.number)) is None or said.table_version < version
        ]

    def has_erased(self, number: NodeNumber, keyspace_id: int) -> bool:
        """Return whether the node's process has reported that it holds none of the keyspace."""
        said = self._heard(number)
        return said is not None and keyspace_id in said.erased

    async def leave(self, sender: Sender) -> None:
        """Fence a node that stops and has given up its lease.

        Raises:
            NotLeaderError: this term is over, or the fence's fate is unknown: retry at the leader.
            UnknownNodeError, NodeFencedError: there is nothing to fence.
            WrongClusterError: the node belongs elsewhere.
        """
        term = self._term
        term.check_cluster(sender.cluster_id)
        record = check_sender(term.state, sender)
        if self.sessions.is_held(record.info.number):
            raise term.not_leader()  # a proposal under way already ends this epoch: retry
        self.sessions.hold(record.info.number)
        await term.outcome(term.spawn(self._fence(record, left=True)))
        if term.state.node(record.info.number) is record:
            raise term.not_leader()

    async def _confirmed(self, record: NodeRecord) -> None:
        """Wait until the epoch is confirmed, by one proposal for all waiting heartbeats."""
        key = (record.info.number, record.info.node_epoch)
        task = self._confirming.get(key)
        if task is None:
            task = self._term.spawn(self._confirm(*key))
            self._confirming[key] = task
            task.add_done_callback(lambda _: self._confirming.pop(key, None))
        await self._term.outcome(task)

    async def _confirm(self, number: NodeNumber, node_epoch: int) -> None:
        await self._term.propose(ConfirmRegistration(node_number=number, node_epoch=node_epoch))

    def _record_hosted(
        self, record: NodeRecord, hosted: Sequence[HostedPartition], now: float
    ) -> None:
        """Propose new acknowledgements at once: a failed-over partition is served only then."""
        new = decide_hosted(self._term.state, record, hosted)
        if new:
            self._hosting.acknowledged(record.info.number, new, now)
            command = PartitionsHosted(
                node_number=record.info.number,
                node_epoch=record.info.node_epoch,
                hosted=tuple({h.partition_id: h for h in new}.values()),
            )
            self._term.spawn(self._report_hosted(command))

    async def _report_hosted(self, command: PartitionsHosted) -> None:
        """Record that the node serves these partitions. If that fails, the commands are sent to the
        node again.
        """
        number = command.node_number
        try:
            result = await self._term.propose(command)
        except (*NEVER_APPENDED, UnknownFateError) as e:
            log.debug("hosted partitions not recorded node_number=%d error=%s", number, e)
            return
        if isinstance(result, Applied):
            name = self._term.node_name(number)
            if all(h.partition_id in self._term.state.moves for h in command.hosted):
                log.debug(
                    "moved partitions online node=%s partitions=%d", name, len(command.hosted)
                )
            else:
                log.info("partitions online node=%s partitions=%d", name, result.rows_changed)

    # --- primaries' proposals -----------------------------------------------------------------

    async def alter_partitions(
        self, sender: Sender, changes: Sequence[PartitionChange]
    ) -> tuple[PartitionId, ...]:
        """Commit a primary's proposals for its rows; return the partitions that were not changed.
        They are one command, proposed at once: each row is a compare-and-set by itself, so
        proposals need not wait for others under way. Partitions are not handed over to a node that
        reports a hanging disk.

        Raises:
            NotLeaderError, ResourceExhaustedError, UnavailableError: nothing was changed.
            UnknownNodeError, NodeFencedError: the node must register; nothing was changed.
            WrongClusterError, InvalidArgumentError: nothing was changed.
            UnknownFateError: the changes may be committed, now or later.
        """
        self._term.check_cluster(sender.cluster_id)
        record = check_sender(self._term.state, sender)
        check_changes(changes, self._term.state.partition_ids_end)
        if not changes:
            return ()
        hanging = self._hanging()
        refused = tuple(c.partition_id for c in changes if c.hand_over_to in hanging)
        changes = [change for change in changes if change.hand_over_to not in hanging]
        if not changes:
            return refused
        command = AlterPartitions(
            node_number=record.info.number, node_epoch=sender.node_epoch, changes=tuple(changes)
        )
        result = await self._term.committed(command)
        if isinstance(result, Applied):
            return (*refused, *result.rejected)
        check_sender(self._term.state, sender)  # raises if the epoch has ended
        return (*refused, *(change.partition_id for change in changes))

    def _hanging(self) -> frozenset[NodeNumber]:
        """Return the nodes whose last report shows a disk that has not answered for long: about as
        long as the disk of a node that gives up its partitions, in case they share the disk.
        """
        hangs_ms = self._times.session_timeout_s * 1000 / 3
        return frozenset(n for n, stats in self.stats.items() if stats.commit_out_ms > hangs_ms)


def _load(message: NodeLoadMessage) -> NodeLoad:
    return NodeLoad(
        observed_s=message.observed_ms / 1000,
        work=message.work,
        busy=message.busy,
        lead=dict(zip(message.partition_ids, message.lead, strict=False)),
        follow=dict(zip(message.partition_ids, message.follow, strict=False)),
        rest_lead=message.rest_lead,
        rest_follow=message.rest_follow,
    )
