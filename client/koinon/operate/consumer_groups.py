"""Operators' calls about consumer groups: at the coordinators' leader their members and
generations, at the partitions' primaries their cursors.

A cursor is changed by an operator in three steps: the leader raises the group's generation and
pauses its grants, each primary sets its cursors with this generation, the leader ends the pause. No
member can come in between: a commit needs the cursor's generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from koinon.core.feeds import PartitionPosition
from koinon.driver.rpc.channels import Channels
from koinon.operate.changes import Ask
from koinon_proto.contract import convert
from koinon_proto.contract.errors import KoinonError, UnavailableError
from koinon_proto.contract.groups import GroupStrategy
from koinon_proto.contract.keyspaces import Keyspaces
from koinon_proto.contract.leader_search import Repeat
from koinon_proto.contract.table import Table
from koinon_proto.server import rpc
from koinon_proto.v1 import feed_pb2, groups_pb2, groups_pb2_grpc

PAUSE_MS = 30_000
"""For which a group is without grants while its cursors are changed, if nobody ends that."""
_CALL_S_MAX = 5.0
_AGAIN_S = 0.2
_EPOCH_BITS = 40
"""Sequences count the writes under one primary epoch in so many bits."""
TableOf = Callable[[], Table]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberView:
    """A member; ``granted`` and ``releasing`` are partition ids of the cluster."""

    member_id: str
    client_name: str
    peer: str
    user: str
    is_static: bool
    session_ms: int
    heard_ms_ago: int
    keyspaces: Sequence[str]
    granted: Sequence[int]
    releasing: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupView:
    """A group. ``waits_ms``: for which the leader grants nothing new."""

    group_id: int
    name: str
    strategy: str
    generation: int
    created_at_ms: int
    member_count: int
    partition_count: int
    unowned_count: int
    changed_ms_ago: int
    waits_ms: int
    members: Sequence[MemberView] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorView:
    """A group's cursor in one partition. ``behind``: writes after it, those of cursors included;
    None: not known, since the partition has had another primary since.
    """

    partition_id: int
    keyspace: str
    generation: int
    member_id: str
    sequence: int
    committed_at_ms: int | None
    completed_sequence: int
    behind: int | None


class GroupAdmin:
    """Reads and changes groups. Methods raise the errors of ``Admin``'s calls, and
    UnknownGroupError.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def all(self) -> list[GroupView]:
        """Return all groups by name, without their members."""
        reply = self._ask("GetGroups", groups_pb2.GetGroupsRequest())
        return [_group(status, None) for status in reply.groups]

    def get(self, name: str, keyspaces: Keyspaces) -> GroupView:
        """Return the group of this name with its members."""
        reply = self._ask("GetGroups", groups_pb2.GetGroupsRequest(group=name))
        return _group(reply.groups[0], keyspaces)

    def raise_generation(self, name: str, *, forced: bool, pause_ms: int) -> tuple[int, int]:
        """Void all grants, and have none made for ``pause_ms``; return the group's id and its new
        generation.

        Raises:
            GroupInUseError: the group has members, and the call is not ``forced``.
        """
        request = groups_pb2.RaiseGenerationRequest(group=name, forced=forced, pause_ms=pause_ms)
        reply = self._ask("RaiseGeneration", request, Repeat.CHANGE)
        return reply.group_id, reply.generation

    def delete(self, name: str) -> None:
        """Delete a group. Its cursors can then be deleted, by its id.

        Raises:
            GroupInUseError: the group has members.
        """
        self._ask("DeleteGroup", groups_pb2.DeleteGroupRequest(group=name), Repeat.NOTHING)


class CursorNodes(Channels):
    """Connections to the nodes, for groups' cursors. Thread-safe. Each call asks the partitions'
    primaries, and asks again after a refusal that may pass.

    Methods raise UnavailableError if a partition could not be reached in time, and the errors that
    its primary refuses with.
    """

    def read(self, table_of: TableOf, group_id: int, *, timeout_s: float) -> list[CursorView]:
        """Return the group's cursors in all partitions of all keyspaces, by partition id."""
        table = table_of()
        found: list[CursorView] = []

        def request(ids: Sequence[int], **common: Any) -> Any:
            return groups_pb2.ReadCursorsRequest(partition_ids=ids, **common)

        def on_reply(reply: Any, keyspace: str) -> None:
            found.extend(_cursor(one, keyspace) for one in reply.cursors if one.generation)

        wanted = [p for keyspace in table.keyspaces for p in keyspace.partition_ids]
        self._at_primaries("Read", table_of, wanted, group_id, request, on_reply, timeout_s)
        return sorted(found, key=lambda cursor: cursor.partition_id)

    def reset(
        self,
        table_of: TableOf,
        group: tuple[int, int],
        positions: Mapping[int, PartitionPosition],
        *,
        timeout_s: float,
    ) -> None:
        """Set the positions of partitions. ``group``: its id, and the generation that was raised
        for this.
        """
        group_id, generation = group

        def request(ids: Sequence[int], **common: Any) -> Any:
            places = [feed_pb2.FeedPosition(partition_id=p, **positions[p]._asdict()) for p in ids]
            return groups_pb2.ResetCursorsRequest(generation=generation, positions=places, **common)

        self._at_primaries("Reset", table_of, positions, group_id, request, None, timeout_s)

    def delete(
        self,
        table_of: TableOf,
        group_id: int,
        partition_ids: Iterable[int],
        *,
        timeout_s: float,
    ) -> None:
        """Delete the group's cursors in these partitions."""

        def request(ids: Sequence[int], **common: Any) -> Any:
            return groups_pb2.DeleteCursorsRequest(partition_ids=ids, **common)

        self._at_primaries("Delete", table_of, partition_ids, group_id, request, None, timeout_s)

    def _at_primaries(
        self,
        method: str,
        table_of: TableOf,
        wanted: Iterable[int],
        group_id: int,
        request: Callable[..., Any],
        on_reply: Callable[[Any, str], None] | None,
        timeout_s: float,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        left = sorted(wanted)
        reason = ""
        while left:
            table = table_of()
            calls = []
            for (keyspace_id, number), ids in _by_primary(table, left).items():
                message = request(
                    ids,
                    table_version=table.table_version,
                    cluster_id=table.cluster.cluster_id,
                    keyspace_id=keyspace_id,
                    group_id=group_id,
                )
                stub: Any = groups_pb2_grpc.CursorsStub(self.channel(table.nodes[number].address))
                call = getattr(stub, method).future(message, timeout=_CALL_S_MAX)
                calls.append((call, ids, table.keyspaces.name_of(keyspace_id)))
            for call, ids, keyspace in calls:
                done, reason = _answered(call, ids, keyspace, on_reply, reason)
                left = sorted(set(left) - done)
            if left and time.monotonic() >= deadline:
                raise UnavailableError(
                    reason=f"{len(left)} partitions were not reached, partition {left[0]} first: "
                    f"{reason or 'they have no primary'}"
                )
            if left:
                time.sleep(_AGAIN_S)


def _answered(
    call: Any,
    ids: Sequence[int],
    keyspace: str,
    on_reply: Callable[[Any, str], None] | None,
    reason: str,
) -> tuple[set[int], str]:
    """Return the partitions that a call has dealt with, and why others were refused.

    Raises:
        KoinonError: a refusal that does not pass.
    """
    try:
        reply = call.result()
    except grpc.RpcError as failure:
        fate = rpc.fate_of(failure)
        if not (fate.retriable or fate.maybe_applied):
            raise fate from None
        return set(), str(fate)
    refused: dict[int, KoinonError] = {
        refusal.partition_id: convert.error_from_proto(refusal.error) for refusal in reply.refusals
    }
    for error in refused.values():
        if not (error.retriable or error.maybe_applied):
            raise error
        reason = str(error)
    if on_reply is not None:
        on_reply(reply, keyspace)
    return set(ids) - refused.keys(), reason


def _by_primary(table: Table, partition_ids: Iterable[int]) -> dict[tuple[int, Any], list[int]]:
    """Return partitions by keyspace and primary; those without a primary are left out."""
    found: dict[tuple[int, Any], list[int]] = {}
    for p in partition_ids:
        keyspace = table.keyspaces.of(p)
        if keyspace is not None and (primary := table.rows[p].primary) in table.nodes:
            found.setdefault((keyspace.keyspace_id, primary), []).append(p)
    return found


def _group(status: groups_pb2.GroupStatus, keyspaces: Keyspaces | None) -> GroupView:
    known = int(status.strategy) in GroupStrategy.__members__.values()
    strategy = GroupStrategy(int(status.strategy)).name if known else "unknown"
    return GroupView(
        group_id=status.group_id,
        name=status.name,
        strategy=strategy.lower().replace("_", "-"),
        generation=status.generation,
        created_at_ms=status.created_at_ms,
        member_count=status.member_count,
        partition_count=status.partition_count,
        unowned_count=status.unowned_count,
        changed_ms_ago=status.changed_ms_ago,
        waits_ms=status.waits_ms,
        members=[_member(one, keyspaces) for one in status.members if keyspaces is not None],
    )


def _member(one: groups_pb2.GroupMember, keyspaces: Keyspaces) -> MemberView:
    return MemberView(
        member_id=one.member_id,
        client_name=one.client_name,
        peer=one.peer,
        user=one.user,
        is_static=one.is_static,
        session_ms=one.session_ms,
        heard_ms_ago=one.heard_ms_ago,
        keyspaces=[keyspaces.name_of(k) or f"id:{k} (dropped)" for k in one.keyspace_ids],
        granted=[p for held in one.granted for p in held.partition_ids],
        releasing=[p for held in one.releasing for p in held.partition_ids],
    )


def _cursor(one: groups_pb2.Cursor, keyspace: str) -> CursorView:
    sequence, completed = one.position.sequence, one.completed_sequence
    behind = None
    if sequence >= completed:
        behind = 0
    elif sequence >> _EPOCH_BITS == completed >> _EPOCH_BITS and not one.position.bound:
        behind = completed - sequence - 1  # the cursor's own last write is no change to follow
    return CursorView(
        partition_id=one.position.partition_id,
        keyspace=keyspace,
        generation=one.generation,
        member_id=one.member_id,
        sequence=sequence,
        committed_at_ms=one.committed_at_ms or None,
        completed_sequence=completed,
        behind=behind,
    )
