"""The service of consumer groups. It converts messages; other modules make all decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.core.groups.group_members import Member
from koinon_coordinator.core.groups.group_requests import AttendWish
from koinon_coordinator.leader.group_sharing import GroupView
from koinon_coordinator.services.admin_service import CALLS_MAX
from koinon_proto.contract.access import Action
from koinon_proto.contract.codec import codec
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.keyspaces import Keyspaces
from koinon_proto.contract.table import PartitionId
from koinon_proto.process.clock import boottime
from koinon_proto.security.authorization import caller
from koinon_proto.server import admission
from koinon_proto.server.admission import Places
from koinon_proto.server.rpc import bounded, typed_errors, typed_wait
from koinon_proto.v1 import groups_pb2, groups_pb2_grpc

WAITING_MAX = 4_096
_WISH = codec(
    AttendWish,
    groups_pb2.AttendGroupRequest,
    given=["peer", "user"],
    filled=["cluster_id", "held"],
)


class GroupsService(groups_pb2_grpc.GroupsServicer):
    """Requests about groups. The leader answers."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._waiting = Places(
            "members of groups that wait for news",
            places=WAITING_MAX,
            host=WAITING_MAX // 2,
            connection=256,
        )

    @typed_wait
    async def Attend(  # noqa: N802 (the generated servicer's name)
        self, request: groups_pb2.AttendGroupRequest, context: Any
    ) -> groups_pb2.AttendGroupResponse:
        wish = _WISH.decode(request, peer=context.peer(), user=caller.get().user)
        for keyspace_id in wish.keyspace_ids:
            caller.get().check_prefix(Action.FEED, keyspace_id, b"")
        groups = self._coordinator.serving.groups
        held = _held_of(request.held, self._coordinator.state.keyspaces)
        admission.wait_apart()
        with self._waiting.place(context.peer()):
            attended = await self._coordinator.led(groups.attend(wish, held, request.cluster_id))
        return groups_pb2.AttendGroupResponse(
            group_id=attended.group.group_id,
            generation=attended.group.generation,
            revision=attended.revision,
            granted=_by_keyspace(attended.granted, self._coordinator.state.keyspaces),
            members=attended.members,
            is_idle=attended.is_idle,
            strategy=cast(Any, int(attended.group.strategy)),
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def Leave(  # noqa: N802
        self, request: groups_pb2.LeaveGroupRequest, _context: Any
    ) -> groups_pb2.LeaveGroupResponse:
        leaving = self._coordinator.serving.groups.leave(
            request.group,
            request.member_id,
            request.incarnation,
            caller.get().user,
            request.cluster_id,
        )
        await self._coordinator.led(leaving)
        return groups_pb2.LeaveGroupResponse()

    @typed_errors
    @bounded(CALLS_MAX)
    async def GetGroups(  # noqa: N802
        self, request: groups_pb2.GetGroupsRequest, _context: Any
    ) -> groups_pb2.GetGroupsResponse:
        viewed = self._coordinator.serving.groups.views(request.group, request.cluster_id)
        views = await self._coordinator.led(viewed)
        keyspaces = self._coordinator.state.keyspaces
        with_members = bool(request.group)
        return groups_pb2.GetGroupsResponse(
            groups=[_status(view, keyspaces, with_members=with_members) for view in views]
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def RaiseGeneration(  # noqa: N802
        self, request: groups_pb2.RaiseGenerationRequest, _context: Any
    ) -> groups_pb2.RaiseGenerationResponse:
        raising = self._coordinator.serving.groups.raise_generation(
            request.group, request.pause_ms, request.cluster_id, forced=request.forced
        )
        raised = await self._coordinator.led(raising)
        return groups_pb2.RaiseGenerationResponse(
            group_id=raised.group_id, generation=raised.generation
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def DeleteGroup(  # noqa: N802
        self, request: groups_pb2.DeleteGroupRequest, _context: Any
    ) -> groups_pb2.DeleteGroupResponse:
        deleting = self._coordinator.serving.groups.delete(request.group, request.cluster_id)
        deleted = await self._coordinator.led(deleting)
        return groups_pb2.DeleteGroupResponse(group_id=deleted.group_id)


# --- messages ---------------------------------------------------------------------------------


def _held_of(held: Iterable[groups_pb2.Held], keyspaces: Keyspaces) -> dict[PartitionId, int]:
    """Return the generations of held partitions, without those of keyspaces that are gone.

    Raises:
        InvalidArgumentError: the columns differ in length.
    """
    found: dict[PartitionId, int] = {}
    for one in held:
        if len(one.partition_ids) != len(one.generations):
            raise InvalidArgumentError(
                field="held.generations",
                reason="there has to be one for each partition",
                limit=len(one.partition_ids),
                actual=len(one.generations),
            )
        keyspace = keyspaces.by_id(one.keyspace_id)
        if keyspace is not None and not keyspace.is_dropping:
            found.update(
                (PartitionId(p), generation)
                for p, generation in zip(one.partition_ids, one.generations, strict=True)
                if p in keyspace.partition_ids
            )
    return found


def _by_keyspace(
    generations: Mapping[PartitionId, int], keyspaces: Keyspaces
) -> list[groups_pb2.Held]:
    """Return partitions with their generations, keyspace by keyspace."""
    found: dict[int, groups_pb2.Held] = {}
    for partition_id in sorted(generations):
        keyspace = keyspaces.of(partition_id)
        if keyspace is not None:
            held = found.setdefault(
                keyspace.keyspace_id, groups_pb2.Held(keyspace_id=keyspace.keyspace_id)
            )
            held.partition_ids.append(partition_id)
            held.generations.append(generations[partition_id])
    return [found[keyspace_id] for keyspace_id in sorted(found)]


def _status(view: GroupView, keyspaces: Keyspaces, *, with_members: bool) -> groups_pb2.GroupStatus:
    now = boottime()
    group, core = view.group, view.core
    status = groups_pb2.GroupStatus(
        group_id=group.group_id,
        name=group.name,
        strategy=cast(Any, int(group.strategy)),
        generation=group.generation,
        created_at_ms=group.created_at_ms,
    )
    if core is not None:
        status.member_count = len(core.members)
        status.partition_count = sum(map(len, core.subscribed().values()))
        status.unowned_count = core.unowned()
        status.changed_ms_ago = _ms(now - core.changed_at)
        status.waits_ms = _ms(max(core.waits_until, core.paused_until) - now)
        if with_members:
            status.members.extend(
                _member(core.members[member_id], keyspaces, now)
                for member_id in sorted(core.members)
            )
    return status


def _member(member: Member, keyspaces: Keyspaces, now: float) -> groups_pb2.GroupMember:
    newest = member.newest
    releasing = dict.fromkeys(member.may_hold - member.granted.keys(), 0)
    return groups_pb2.GroupMember(
        member_id=newest.member_id,
        incarnation=newest.incarnation,
        client_name=newest.client_name,
        peer=newest.peer,
        user=newest.user,
        is_static=newest.is_static,
        session_ms=round(newest.session_s * 1000),
        heard_ms_ago=_ms(now - member.heard_at),
        keyspace_ids=sorted(newest.keyspace_ids),
        granted=_by_keyspace(member.granted, keyspaces),
        releasing=_by_keyspace(releasing, keyspaces),
    )


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
