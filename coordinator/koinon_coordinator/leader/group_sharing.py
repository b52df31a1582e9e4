"""Consumer groups while this coordinator leads: the members' requests, which wait for news, and the
generations of their grants. ``core/groups`` decides.

Nothing about members outlives the term: a new leader hears of them by their next requests. An
answer leaves only while a quorum answers this leader, so that no other leader can have given the
partitions away; ``core/decide/sessions.py`` has the proof, with a member's session as the lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from koinon_coordinator.core.cluster.commands import (
    DeleteGroup,
    GroupChanged,
    GroupCommand,
    RaiseGeneration,
    Reason,
    Rejected,
)
from koinon_coordinator.core.cluster.group_rules import Group
from koinon_coordinator.core.decide.sessions import SessionTimes, may_acknowledge
from koinon_coordinator.core.groups.group_members import Attendance, GroupMembers, Held, Member
from koinon_coordinator.core.groups.group_requests import (
    AttendWish,
    decide_attendance,
    decide_creation,
    decide_pause,
    named_group,
    partitions_of,
    refusal,
)
from koinon_coordinator.leader.context import NEVER_APPENDED, LeaderContext
from koinon_proto.contract.cluster_errors import GroupInUseError
from koinon_proto.contract.errors import (
    MemberFencedError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.groups import POLLS_A_SESSION
from koinon_proto.contract.table import PartitionId

log = logging.getLogger(__name__)

MEMBERS_MAX = 4_096
"""The most members of all groups."""
RAISE_ATTEMPTS_MAX = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Attended:
    """The answer to a member. ``granted``: the generation of each partition's grant."""

    group: Group
    granted: Mapping[PartitionId, int]
    revision: int
    members: int
    is_idle: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupView:
    """A group, and what this leader knows of it; ``core`` None: nothing yet."""

    group: Group
    core: GroupMembers | None


class GroupSharing:
    """Shares partitions among the members of groups, during one term.

    Every method raises NotLeaderError outside the term, and WrongClusterError for a caller of
    another cluster; those that propose also ResourceExhaustedError, UnavailableError (nothing was
    changed), UnknownFateError.
    """

    def __init__(self, term: LeaderContext, times: SessionTimes) -> None:
        self._term = term
        self._times = times
        self._cores: dict[int, GroupMembers] = {}  # by group id
        self._raising: set[int] = set()  # groups whose generation is proposed
        self._deleting: set[int] = set()  # groups whose deletion is proposed: nothing is granted
        # The requests that wait for news, by group id and member id.
        self._waiting: dict[tuple[int, str], asyncio.Event] = {}
        self._keyspaces: object = None  # as the groups know them

    # --- what members ask ---------------------------------------------------------------------

    async def attend(self, wish: AttendWish, held: Held, cluster_id: str) -> Attended:
        """Take in a member's request; return the member's grants once they differ from those that
        the member knows, or after a part of its session.

        Raises:
            ClusterNotReadyError, InvalidArgumentError, MemberFencedError, PermissionDeniedError,
            UnknownKeyspaceError.
        """
        term = self._term
        self._check_quorum(cluster_id)
        received_at = term.clock()
        request = decide_attendance(term.state, wish)
        group = term.state.groups.by_name.get(wish.group)
        if group is None:
            group = await self._created(wish)
        core = self._core(group)
        self._check_room(core, wish.member_id)
        member = core.attend(request, held, group.generation, received_at)
        self._tell(group.group_id, core)
        await self._news(group.group_id, core, member, request)
        self._check_quorum(cluster_id)
        found = term.state.groups.get(group.group_id)
        if found is None:
            raise UnavailableError(reason="the group was deleted: the member may join anew")
        granted = dict(core.answer(member))
        return Attended(
            group=found,
            granted=granted,
            revision=member.revision,
            members=len(core.members),
            is_idle=core.is_idle(wish.member_id),
        )

    async def _created(self, wish: AttendWish) -> Group:
        await self._term.caught_up()
        if wish.group not in self._term.state.groups.by_name:
            made = await self._committed(
                decide_creation(wish, round(time.time() * 1000)), wish.group
            )
            log.info("group created group=%s id=%d", wish.group, made.group_id)
        decide_attendance(self._term.state, wish)  # by the strategy of the group that there is now
        return named_group(self._term.state, wish.group)

    async def _news(
        self, group_id: int, core: GroupMembers, member: Member, request: Attendance
    ) -> None:
        """Return once the member's grants differ from those that it knows, or it is time to answer.

        Raises:
            MemberFencedError: a later process has taken the member's place.
            UnavailableError: a later request of the member has come, or its session has ended.
        """
        key = (group_id, request.member_id)
        if (before := self._waiting.pop(key, None)) is not None:
            before.set()
        event = self._waiting[key] = asyncio.Event()
        try:
            async with asyncio.timeout(request.session_s / POLLS_A_SESSION):
                while member.revision == request.known_revision:
                    await event.wait()
                    event.clear()
                    if not self._term.is_open:
                        raise self._term.not_leader()
                    self._check_newest(core, member, request)
        except TimeoutError:
            self._check_newest(core, member, request)
        finally:
            if self._waiting.get(key) is event:
                del self._waiting[key]

    def _check_newest(self, core: GroupMembers, member: Member, request: Attendance) -> None:
        now = core.members.get(request.member_id)
        if now is not member and now is not None:
            raise MemberFencedError(group=core.name, member_id=request.member_id)
        if now is None:
            raise UnavailableError(reason="the member's session has ended: it may join anew")
        if member.newest is not request:
            raise UnavailableError(reason="a later request of this member has come")

    async def leave(
        self, name: str, member_id: str, incarnation: int, user: str, cluster_id: str
    ) -> None:
        """End a member's session.

        Raises:
            PermissionDeniedError: the member is another user's.
        """
        self._check_quorum(cluster_id)
        group = self._term.state.groups.by_name.get(name)
        core = None if group is None else self._cores.get(group.group_id)
        if group is not None and core is not None:
            core.leave(member_id, incarnation, user, self._term.clock())
            self._tell(group.group_id, core)

    # --- what operators ask -------------------------------------------------------------------

    async def views(self, name: str, cluster_id: str) -> list[GroupView]:
        """Return the group, or with "" all groups, by name.

        Raises:
            UnknownGroupError.
        """
        await self._caught_up(cluster_id)
        groups = self._term.state.groups.by_name
        wanted = [named_group(self._term.state, name)] if name else groups.values()
        return [
            GroupView(group=group, core=self._cores.get(group.group_id))
            for group in sorted(wanted, key=lambda group: group.name)
        ]

    async def raise_generation(
        self, name: str, pause_ms: int, cluster_id: str, *, forced: bool
    ) -> GroupChanged:
        """Raise the group's generation, take all grants, and make none for ``pause_ms``.

        Raises:
            InvalidArgumentError, UnknownGroupError
            GroupInUseError: the group has members, and the call is not ``forced``.
        """
        await self._caught_up(cluster_id)
        pause_s = decide_pause(pause_ms)
        for attempt in range(RAISE_ATTEMPTS_MAX):
            group = named_group(self._term.state, name)
            core = self._core(group)
            if not forced:
                self._check_unused(core)
            command = RaiseGeneration(
                group_id=group.group_id,
                generation=group.generation,
                session_ms=group.session_ms,
            )
            result = await self._term.committed(command)
            if isinstance(result, GroupChanged):
                core.pause(self._term.clock(), pause_s)
                self._tell(group.group_id, core)
                log.info("group reset group=%s generation=%d", name, result.generation)
                return result
            log.debug("group has changed group=%s attempt=%d", name, attempt)
        raise UnavailableError(reason=f"the generation of group {name!r} was raised meanwhile")

    async def delete(self, name: str, cluster_id: str) -> GroupChanged:
        """Delete the group.

        Raises:
            UnknownGroupError
            GroupInUseError: the group has members.
        """
        await self._caught_up(cluster_id)
        group = named_group(self._term.state, name)
        core = self._core(group)
        self._check_unused(core)
        self._deleting.add(group.group_id)
        try:
            result = await self._committed(DeleteGroup(group_id=group.group_id), name)
        finally:
            self._deleting.discard(group.group_id)
        self._cores.pop(group.group_id, None)
        for newest in [member.newest for member in core.members.values()]:  # they came meanwhile
            core.leave(newest.member_id, newest.incarnation, newest.user, self._term.clock())
        self._tell(group.group_id, core)
        log.info("group deleted group=%s id=%d", name, group.group_id)
        return result

    def _check_unused(self, core: GroupMembers) -> None:
        if core.members:
            raise GroupInUseError(group=core.name, members=len(core.members))
        wait_s = core.waits_until - self._term.clock()
        if wait_s > 0:
            raise UnavailableError(
                reason=f"a new leader still waits for the members of group {core.name!r}: ask "
                f"again in {math.ceil(wait_s)} s"
            )

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """End sessions that are over, and share anew what is due."""
        if not self._cores:
            return
        quorum = self._may_acknowledge()
        keyspaces = self._term.state.keyspaces
        partitions = partitions_of(keyspaces) if keyspaces is not self._keyspaces else None
        self._keyspaces = keyspaces
        for group_id, core in self._cores.items():
            if partitions is not None:
                core.set_partitions(partitions, now)
            core.tick(now, pause_s=self._times.pause_s, quorum=quorum)
            if now >= core.due_at(now) and group_id not in self._raising:
                self._act(group_id, core, now)
            self._tell(group_id, core)

    def _act(self, group_id: int, core: GroupMembers, now: float) -> None:
        group = self._term.state.groups.get(group_id)
        if group is None or group_id in self._deleting:
            return
        has_left = not core.members and group.session_ms and now >= core.waits_until
        if core.act(now) or has_left:
            self._raising.add(group_id)
            self._term.spawn(self._raise(group, core))

    async def _raise(self, group: Group, core: GroupMembers) -> None:
        """Have the generation raised once, and grant with it."""
        session_s = core.session_s
        command = RaiseGeneration(
            group_id=group.group_id,
            generation=group.generation,
            session_ms=math.ceil(session_s * 1000),
        )
        result = None
        try:
            result = await self._term.propose(command)
        except NEVER_APPENDED:
            pass
        except UnknownFateError:
            return  # the term is over
        finally:
            self._raising.discard(group.group_id)
        now = self._term.clock()
        if not isinstance(result, GroupChanged) or group.group_id in self._deleting:
            core.retry(now)
            return
        count = core.grant(result.generation, session_s, now)
        self._tell(group.group_id, core)
        log.info(
            "group shared group=%s generation=%d members=%d grants=%d unowned=%d",
            group.name,
            result.generation,
            len(core.members),
            count,
            core.unowned(),
        )

    # --- helpers ------------------------------------------------------------------------------

    @property
    def cores(self) -> Mapping[int, GroupMembers]:
        """The groups that this leader has heard of, by their ids. Read only."""
        return self._cores

    async def _wake_at_end(self) -> None:
        """Wake all requests at the end of the term: their members find the next leader."""
        try:
            await asyncio.Event().wait()
        finally:
            for event in self._waiting.values():
                event.set()

    def _core(self, group: Group) -> GroupMembers:
        if not self._cores:
            self._term.spawn(self._wake_at_end())
        core = self._cores.get(group.group_id)
        if core is None:
            now = self._term.clock()
            wait_s = group.session_ms / 1000 + self._times.check_quorum_s
            core = self._cores[group.group_id] = GroupMembers(
                group.name,
                group.strategy,
                partitions_of(self._term.state.keyspaces),
                now,
                self._term.began_at + wait_s if group.session_ms else 0.0,
            )
        return core

    def _check_room(self, core: GroupMembers, member_id: str) -> None:
        count = sum(len(other.members) for other in self._cores.values())
        if count >= MEMBERS_MAX and member_id not in core.members:
            raise ResourceExhaustedError(resource="members of groups", limit=MEMBERS_MAX)

    def _tell(self, group_id: int, core: GroupMembers) -> None:
        """Wake the requests of members whose grants have changed."""
        for member_id in core.take_news():
            event = self._waiting.get((group_id, member_id))
            if event is not None:
                event.set()

    def _may_acknowledge(self) -> bool:
        contact_at = self._term.group.quorum_contact_at()
        return may_acknowledge(self._term.clock(), contact_at, self._times)

    def _check_quorum(self, cluster_id: str) -> None:
        """Raise NotLeaderError if another coordinator may lead by now."""
        self._term.check_cluster(cluster_id)
        if not self._may_acknowledge():
            raise self._term.not_leader()

    async def _caught_up(self, cluster_id: str) -> None:
        self._term.check_cluster(cluster_id)
        await self._term.caught_up()

    async def _committed(self, command: GroupCommand, name: str) -> GroupChanged:
        result = await self._term.committed(command)
        if isinstance(result, GroupChanged):
            return result
        raise refusal(result.reason if isinstance(result, Rejected) else Reason.BAD_VALUE, name)
