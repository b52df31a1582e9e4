"""One coordinator: its Raft member, the replicated state, and its leadership while it leads.

Everything runs on one event loop, so a handler reads one consistent state between two awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Mapping
from contextlib import AbstractContextManager
from random import Random
from typing import TypeVar

from koinon_coordinator.config import CoordinatorConfig, TimingConfig
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.leader.context import LeaderContext
from koinon_coordinator.leader.leadership import Leadership, warn_of_ignored
from koinon_coordinator.raft import (
    MemberStoppedError,
    RaftConfig,
    RaftMember,
    RaftStatus,
    RaftTransport,
    StreamRaftTransport,
)
from koinon_coordinator.state_machine import ReplicatedState
from koinon_coordinator.wire.rows import RowForms
from koinon_proto.contract.access import Access
from koinon_proto.contract.cluster_errors import MembershipChangeError, NotLeaderError
from koinon_proto.contract.errors import ConfigurationError, KoinonError, UnavailableError
from koinon_proto.contract.table import ClusterConfig, Table

log = logging.getLogger(__name__)

PROMOTE_LAG_ENTRIES_MAX = 100
SAVE_TIMEOUT_MS_MIN = 1500  # a disk may stall for a second without being broken
POLL_S = 0.05
REDIRECT_S = 0.1  # added to a heartbeat interval, in which a stopping leader redirects callers
T = TypeVar("T")


class Coordinator:
    """One coordinator: Raft, the state machine, the leader's work, the services. Call ``start``
    once the transport's peer port is open.

    ``start`` after the transport's peer port is open.
    """

    def __init__(
        self, config: CoordinatorConfig, *, transport: RaftTransport | None = None
    ) -> None:
        self.config = config
        self.open_addresses: tuple[str, ...] = ()  # addresses open to other machines without TLS
        self.peer_port = 0  # the port of Raft's messages and heartbeats; 0: not open
        self._replicated = ReplicatedState(self._on_config)
        self._timing = config.timing
        self._random = Random()
        self._leadership: Leadership | None = None
        self._running: asyncio.Task[None] | None = None
        self._comparing: asyncio.Task[None] | None = None  # compares settings with the cluster's
        self._failed: asyncio.Future[None] | None = None
        self._fences_before = self._old_stores_before = 0  # counted in ended terms
        self.stopping = False
        self.transport = transport if transport is not None else StreamRaftTransport()
        self._raft = RaftMember(
            raft_config(config),
            self._replicated,
            self.transport,
            on_leader=self._on_leader,
            on_follower=self._on_follower,
        )

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the data directory and take part in the group.

        Raises:
            DataDirectoryError, UnsupportedVersionError: the directory cannot be used.
            ConfigurationError: this coordinator's times contradict the cluster's. (If it learns the
                cluster's times only later, ``stopped`` raises the error.)
        """
        self._failed = asyncio.get_running_loop().create_future()
        await self._raft.start()
        if self._failed.done():
            self._failed.result()
        # The member has stopped; ``stopped`` raises why.
        with contextlib.suppress(UnavailableError):
            self._warn_of_members()
        self._comparing = asyncio.ensure_future(self._warn_of_settings())

    async def stop(self, *, transfer_timeout_s: float = 1.0) -> None:
        """Hand leadership over if another member can take it, then stop. In between callers are
        told the new leader for a moment, which a broken connection would not tell them.
        """
        with contextlib.suppress(KoinonError, TimeoutError):  # the member may have ended by itself
            if self.leads and len(self.raft_status().members) > 1:
                await asyncio.wait_for(self._raft.transfer_leadership(None), transfer_timeout_s)
                await asyncio.sleep(self.timing.heartbeat_interval_ms / 1000 + REDIRECT_S)
        if self._comparing is not None:
            self._comparing.cancel()
        await self._raft.stop()
        await self._end_term()
        self.stopping = True  # the table cannot change here any more: watches end
        self._replicated.wake()

    async def stopped(self) -> None:
        """Wait until this coordinator cannot continue, and raise the error. Returns after
        ``stop``.
        """
        assert self._failed is not None
        member = asyncio.ensure_future(self._raft.stopped())
        await asyncio.wait([member, self._failed], return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            member.cancel()
            self._failed.result()
        await member

    # --- reading ------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self._leadership is not None

    @property
    def timing(self) -> TimingConfig:
        """The times in force: the replicated ones, once there is a cluster."""
        if self._leadership is not None:
            return self._leadership.timing
        return self._timing

    @property
    def leadership(self) -> Leadership:
        """The leadership of this coordinator.

        Raises:
            NotLeaderError: another coordinator leads, or none.
        """
        if self._leadership is None:
            raise self.not_leader()
        return self._leadership

    @property
    def serving(self) -> Leadership:
        """The leadership of this coordinator, once it answers requests: the cluster exists.

        Raises:
            NotLeaderError: this coordinator does not lead; the error names the leader.
        """
        leadership = self.leadership
        if not leadership.term.is_open:
            raise self.not_leader()
        return leadership

    @property
    def raft(self) -> RaftMember:
        return self._raft

    @property
    def state(self) -> ClusterState:
        """The replicated state as applied here. Read only."""
        return self._replicated.state

    @property
    def access(self) -> Access:
        """The rights of users and roles, as applied here, also on followers."""
        return self._replicated.state.access

    @property
    def fences(self) -> int:
        """Return how many nodes this coordinator has fenced since it started."""
        leadership = self._leadership
        return self._fences_before + (leadership.members.fences if leadership is not None else 0)

    @property
    def old_stores(self) -> int:
        """Return how many old copies of stores this coordinator has registered since it started."""
        leadership = self._leadership
        now = leadership.members.old_stores if leadership is not None else 0
        return self._old_stores_before + now

    def table(self) -> Table | None:
        """The table as applied here; None before the cluster is created."""
        return self._replicated.state.table()

    @property
    def row_forms(self) -> RowForms:
        """The wire forms of the table's rows, which snapshots and updates share."""
        return self._replicated.row_forms

    def watching(self) -> AbstractContextManager[asyncio.Event]:
        """Wake the caller whenever the table may have changed, and when ``stopping``; see
        ``ReplicatedState.watching``.
        """
        return self._replicated.watching()

    def disk_room(self) -> tuple[int, int]:
        """Return the free and all bytes on the file system of the data directory, for this user;
        (0, 0) if unknown.
        """
        try:
            disk = os.statvfs(self.config.data)
        except OSError:
            return 0, 0
        return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize

    def raft_status(self) -> RaftStatus:
        """Return the status of the Raft member.

        Raises:
            UnavailableError: the member is not running.
        """
        try:
            return self._raft.status()
        except MemberStoppedError as error:
            raise UnavailableError(reason=str(error)) from error

    def not_leader(self) -> NotLeaderError:
        """Return the refusal that names the leader. It names none if this member still believes
        that it leads (it is isolated from its quorum, or was only just elected).
        """
        try:
            status = self._raft.status()
        except MemberStoppedError:
            return NotLeaderError(leader_id="", leader_address="", term=0)
        if status.leader_id == self.config.member_id:
            return NotLeaderError(leader_id="", leader_address="", term=status.term)
        return NotLeaderError(
            leader_id=status.leader_id or "",
            leader_address=status.leader_address or "",
            term=status.term,
        )

    async def led(self, work: Awaitable[T]) -> T:
        """Await a leader's work; name the present leader in the refusal of a former one."""
        try:
            return await work
        except NotLeaderError:
            raise self.not_leader() from None

    # --- the group's members ------------------------------------------------------------------

    async def add_member(self, member_id: str, address: str, timeout_s: float) -> None:
        """Add a coordinator: as a learner until it has caught up, then as a voter. The call may be
        repeated after a timeout, a lost answer, or a change of leader: it continues with an
        existing learner, and succeeds for an existing voter at that address.

        An address where nothing listens is refused before any change: a member that does not run
        counts for the majority.

        Raises:
            NotLeaderError, MembershipChangeError, UnknownFateError, UnavailableError.
        """
        give_up_at = asyncio.get_running_loop().time() + 0.9 * timeout_s
        member = self.raft_status().members.get(member_id)
        _ = self.leadership
        if member is not None and member.address != address:
            role = "a voter" if member.is_voter else "a learner"
            raise MembershipChangeError(
                reason=f"{member_id} is {role} already, at {member.address}: remove it first, or "
                "add this one under another id"
            )
        if member is None:
            await check_listens(member_id, address, 0.5 * timeout_s)
            await _with_typed_errors(self._raft.add_learner(member_id, address))
            log.info("coordinator added as learner member=%s address=%s", member_id, address)
        try:
            async with asyncio.timeout_at(give_up_at):
                await self._promote(member_id)
        except TimeoutError:
            raise MembershipChangeError(
                reason=f"{member_id} at {address} has not caught up in time; it stays a learner: "
                "is it running with --join? Add it again to go on, or remove it"
            ) from None
        log.info("coordinator promoted member=%s address=%s", member_id, address)

    async def _promote(self, member_id: str) -> None:
        while True:
            _ = self.leadership
            status = self.raft_status()
            member = status.members.get(member_id)
            if member is not None and member.is_voter and not status.is_changing:
                return None  # by an earlier request
            lag = member.lag_entries if member is not None else None
            is_near = lag is not None and lag <= PROMOTE_LAG_ENTRIES_MAX
            is_ready = member is not None and not member.is_voter and member.is_active
            if member is not None and is_ready and member.match_index and is_near:
                return await _with_typed_errors(self._raft.promote(member_id))
            await asyncio.sleep(POLL_S)

    async def remove_member(self, member_id: str) -> None:
        """Remove a coordinator, voter or learner, possibly this one. Refused if this member does
        not reach a majority of the remaining voters, or if ``member_id`` is no member.

        Raises:
            NotLeaderError, MembershipChangeError, UnknownFateError, UnavailableError.
        """
        _ = self.leadership
        await _with_typed_errors(self._raft.remove_member(member_id))
        log.info("coordinator removed member=%s", member_id)

    async def transfer_leadership(self, to: str | None, timeout_s: float) -> str:
        """Hand leadership over; return the new leader's id. It succeeds at once if ``to`` leads
        already.

        Raises:
            NotLeaderError, MembershipChangeError, UnavailableError.
        """
        _ = self.leadership
        if to == self._raft.member_id:
            return to
        await _with_typed_errors(self._raft.transfer_leadership(to))
        try:
            async with asyncio.timeout(0.9 * timeout_s):
                while True:
                    leader_id = self.raft_status().leader_id
                    if leader_id is not None:
                        return leader_id
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise UnavailableError(reason="no leader has been elected in time") from None

    def _warn_of_members(self) -> None:
        """Warn of given member addresses that are ignored, since the group keeps its own."""
        known = {member: seen.address for member, seen in self.raft_status().members.items()}
        own_id = self.config.member_id
        given = dict(self.config.members) or {own_id: self.config.advertise}
        ours = known if self.config.members else {own_id: known.get(own_id, given[own_id])}
        if not known or ours == given or given.keys() == known.keys() == {own_id}:
            return  # new, or alone: then the group takes over the new address
        log.warning(
            "setting ignored setting=%s given=%s in_force=%s why=%s",
            "members" if self.config.members else "advertise",
            _listed(given),
            _listed(ours),
            "coordinators keep the addresses with which they joined their group. One that is to "
            "be elsewhere is added there under a new id, then the old one is removed (koinon admin "
            "coordinators); where none can reach another: koinon recover-coordinators",
        )

    async def _warn_of_settings(self) -> None:
        """Once all committed entries are applied here, warn of settings that differ from the
        cluster's. (A leader does so itself, in each of its terms.)
        """
        cluster = None
        with self.watching() as changed, contextlib.suppress(UnavailableError):
            while not self.leads:
                await changed.wait()
                changed.clear()
                cluster, status = self.state.config, self.raft_status()
                caught_up = status.applied_index >= status.commit_index > 0
                if cluster is not None and status.leader_id and caught_up:
                    break
        if cluster is not None and not self.leads:
            warn_of_ignored(self.config.bootstrap, self.config.timing, cluster)

    async def _take_own_address(self) -> None:
        """As the leader of a group of one, replicate the address with which this process was
        started: no other member would have to find it.
        """
        own_id, address = self.config.member_id, self.config.advertise
        members = self.raft_status().members
        if members.keys() == {own_id} and members[own_id].address != address:
            with contextlib.suppress(KoinonError):  # raised if the term is over
                await self._raft.change_own_address(address)
                log.info(
                    "coordinator has a new address member=%s before=%s now=%s",
                    own_id,
                    members[own_id].address,
                    address,
                )

    # --- called by the Raft member ------------------------------------------------------------

    def _on_config(self, cluster: ClusterConfig) -> None:
        """Apply the cluster's times. A coordinator that could not lead with them stops now, as a
        follower: later it would win an election and stop then, which costs a failover.
        """
        try:
            self._timing = self.config.timing.in_force(cluster)
        except ConfigurationError as error:
            self._fail(error)

    def _on_leader(self, term: int) -> None:
        try:
            context = LeaderContext(
                number=term,
                group=self._raft,
                replicated=self._replicated,
                random=self._random,
            )
            self._leadership = Leadership(context, self.config.bootstrap, self.config.timing)
        except ConfigurationError as error:
            self._fail(error)
            return
        self._leadership.term.spawn(self._take_own_address())
        self._running = asyncio.ensure_future(self._leadership.run())
        self._running.add_done_callback(self._on_term_ended)

    def _on_follower(self, term: int, leader_id: str | None) -> None:
        if self._leadership is not None:
            log.info("leadership ended term=%d leader=%s", term, leader_id or "unknown")
            self._fences_before, self._old_stores_before = self.fences, self.old_stores
        self._leadership = None
        if self._running is not None:
            self._running.cancel()

    def _on_term_ended(self, task: asyncio.Task[None]) -> None:
        """If the leadership failed with an error of its own, stop this process, so that another
        member leads.
        """
        error = None if task.cancelled() else task.exception()
        if error is None or isinstance(error, KoinonError):
            return
        log.error("leadership failed error=%r", error, exc_info=error)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stop this process with the error: another member can lead."""
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _end_term(self) -> None:
        self._leadership = None
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)


def _listed(members: Mapping[str, str]) -> str:
    return ",".join(f"{member}={address}" for member, address in sorted(members.items()))


async def check_listens(member_id: str, address: str, timeout_s: float) -> None:
    """Wait until a connection to the address can be made from here: a member may just be starting.

    Raises:
        MembershipChangeError: no connection within ``timeout_s``, or the host name is unknown.
    """
    host, _, port = address.rpartition(":")
    why = "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                except ConnectionRefusedError:
                    why = "connection refused"
                    await asyncio.sleep(POLL_S)
                except OSError as error:
                    why = error.strerror or str(error)
                    await asyncio.sleep(POLL_S)
                else:
                    return writer.close()
    except (TimeoutError, UnicodeError) as error:
        why = str(error) or why
        raise MembershipChangeError(
            reason=f"nothing listens at {address} ({why}): start {member_id} there with --join "
            "first. Nothing was changed"
        ) from None


async def _with_typed_errors(work: Awaitable[T]) -> T:
    """Await the Raft member; convert the error of a stopped member to a typed one."""
    try:
        return await work
    except MemberStoppedError as error:
        raise UnavailableError(reason=str(error)) from error


def raft_config(config: CoordinatorConfig) -> RaftConfig:
    """Return the Raft member's settings."""
    timing = config.timing
    return RaftConfig(
        member_id=config.member_id,
        data_dir=config.data,
        initial_members=dict(config.members),
        election_timeout_min_ms=timing.election_timeout_ms,
        election_timeout_max_ms=2 * timing.election_timeout_ms,
        heartbeat_interval_ms=timing.raft_heartbeat_ms,
        check_quorum_ms=timing.check_quorum_ms,
        save_timeout_ms=max(SAVE_TIMEOUT_MS_MIN, timing.session_timeout_ms),
        tick_interval_ms=max(1, min(15, timing.raft_heartbeat_ms // 2)),
    )
