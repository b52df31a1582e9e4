"""Decides on requests about groups by the replicated state, before the leader proposes. Decisions
only read: they return what is wanted, or raise a typed error.
"""

from __future__ import annotations

from dataclasses import dataclass

from koinon_coordinator.core.cluster.commands import CreateGroup, Reason
from koinon_coordinator.core.cluster.group_rules import GROUPS_MAX, Group
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.admin_requests import check_bootstrapped
from koinon_coordinator.core.decide.registrations import check_printable
from koinon_coordinator.core.groups.assignors import PartitionsOf
from koinon_coordinator.core.groups.group_members import Attendance
from koinon_proto.contract.cluster_errors import UnknownGroupError
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownKeyspaceError,
)
from koinon_proto.contract.groups import (
    GROUP_KEYSPACES_MAX,
    GROUP_NAME_CHARS_MAX,
    GROUP_PAUSE_MS_MAX,
    GROUP_SESSION_MS_MAX,
    GROUP_SESSION_MS_MIN,
    GROUP_STATIC_SESSION_MS_MAX,
    GROUP_TEXT_CHARS_MAX,
    GroupStrategy,
)
from koinon_proto.contract.keyspaces import KeyspaceId, Keyspaces
from koinon_proto.process.printable import printable


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendWish:
    """A member's request as it came. ``strategy`` 0: the group's, or STICKY for a new group."""

    group: str
    member_id: str
    incarnation: int
    number: int
    is_static: bool
    client_name: str
    keyspace_ids: tuple[KeyspaceId, ...]
    strategy: int
    session_ms: int
    known_revision: int
    is_joining: bool = False
    peer: str = ""
    user: str = ""


def decide_attendance(state: ClusterState, wish: AttendWish) -> Attendance:
    """Return the member's request.

    Raises:
        ClusterNotReadyError, InvalidArgumentError
        UnknownKeyspaceError: none of the keyspaces can be used.
    """
    check_bootstrapped(state)
    check_name("group", wish.group)
    check_name("member_id", wish.member_id)
    if wish.strategy and wish.strategy not in GroupStrategy.__members__.values():
        raise InvalidArgumentError(field="strategy", reason=f"{wish.strategy} is no strategy")
    group = state.groups.by_name.get(wish.group)
    if group is not None and wish.strategy not in (0, group.strategy):
        raise InvalidArgumentError(
            field="strategy", reason=f"group {group.name!r} has {group.strategy.name.lower()}"
        )
    longest_ms = GROUP_STATIC_SESSION_MS_MAX if wish.is_static else GROUP_SESSION_MS_MAX
    check_range("session_ms", wish.session_ms, GROUP_SESSION_MS_MIN, longest_ms)
    check_range("keyspace_ids", len(wish.keyspace_ids), 1, GROUP_KEYSPACES_MAX)
    known = map(state.keyspaces.by_id, wish.keyspace_ids)
    if not any(keyspace is not None and not keyspace.is_dropping for keyspace in known):
        raise UnknownKeyspaceError()
    return Attendance(
        member_id=wish.member_id,
        incarnation=wish.incarnation,
        number=wish.number,
        keyspace_ids=frozenset(wish.keyspace_ids),
        session_s=wish.session_ms / 1000,
        known_revision=wish.known_revision,
        is_static=wish.is_static,
        is_joining=wish.is_joining,
        client_name=printable(wish.client_name)[:GROUP_TEXT_CHARS_MAX],
        peer=wish.peer,
        user=wish.user,
    )


def decide_creation(wish: AttendWish, now_ms: int) -> CreateGroup:
    """Return the command that creates the member's group. ``now_ms``: Unix time."""
    strategy = GroupStrategy(wish.strategy or GroupStrategy.STICKY)
    return CreateGroup(name=wish.group, strategy=strategy, created_at_ms=now_ms)


def decide_pause(pause_ms: int) -> float:
    """Return the pause of a group's grants in seconds.

    Raises:
        InvalidArgumentError.
    """
    check_range("pause_ms", pause_ms, 0, GROUP_PAUSE_MS_MAX)
    return pause_ms / 1000


def named_group(state: ClusterState, name: str) -> Group:
    """Return the group of this name.

    Raises:
        UnknownGroupError.
    """
    group = state.groups.by_name.get(name)
    if group is None:
        raise UnknownGroupError(group=printable(name)[:GROUP_NAME_CHARS_MAX])
    return group


def refusal(reason: Reason, name: str) -> KoinonError:
    """Return the typed error for a command about the named group that was rejected."""
    if reason is Reason.TOO_MANY_GROUPS:
        return ResourceExhaustedError(resource="consumer groups", limit=GROUPS_MAX)
    if reason is Reason.GROUP_UNKNOWN:
        return UnknownGroupError(group=name)
    return UnavailableError(reason=f"refused, the group has changed: {reason.value}")


def partitions_of(keyspaces: Keyspaces) -> PartitionsOf:
    """Return the partitions of each keyspace that can be used."""
    return {keyspace.keyspace_id: keyspace.partition_ids for keyspace in keyspaces}


def check_name(field: str, name: str) -> None:
    """Raise InvalidArgumentError unless ``name`` can be a group's name or a member's id."""
    if not name:
        raise InvalidArgumentError(field=field, reason="must not be empty")
    check_printable(field, name)
    if len(name) > GROUP_NAME_CHARS_MAX:
        raise InvalidArgumentError(
            field=field, reason="too long", limit=GROUP_NAME_CHARS_MAX, actual=len(name)
        )


def check_range(field: str, value: int, low: int, high: int) -> None:
    """Raise InvalidArgumentError unless ``low <= value <= high``."""
    if not low <= value <= high:
        is_low = value < low
        raise InvalidArgumentError(
            field=field,
            reason="too small" if is_low else "too large",
            limit=low if is_low else high,
            actual=value,
        )
