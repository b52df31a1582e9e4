"""Consumer groups in the replicated state: created, their generation raised, deleted. Pure.

* A group's id is the log index of the command that created it, above the base of the load ids. It
  is never reused, so that the cursors of a deleted group are no later group's.
* The generation rises by one with each ``RaiseGeneration`` that names the present one. So the
  proposer of a command that was applied is the only one that ever has this generation to grant
  with.
* ``session_ms`` is the longest session of the members that may be granted something with the
  generation: a new leader, which knows no member, waits for so long.

Members and grants are soft state of the leader (``core/groups``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from koinon_coordinator.core.cluster.commands import (
    CreateGroup,
    DeleteGroup,
    GroupChanged,
    GroupCommand,
    RaiseGeneration,
    Reason,
    Rejected,
)
from koinon_proto.contract.groups import GroupStrategy

GROUPS_MAX = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A consumer group. ``created_at_ms`` is Unix time, by the clock of the leader then."""

    group_id: int
    name: str
    strategy: GroupStrategy
    generation: int = 0
    session_ms: int = 0
    created_at_ms: int = 0


class Groups:
    """The groups of the cluster, as the Raft log has made them; part of ``ClusterState``.

    Only ``apply`` changes anything.
    """

    def __init__(self, groups: tuple[Group, ...] = ()) -> None:
        self._by_name = {group.name: group for group in groups}
        self._names = {group.group_id: group.name for group in groups}

    @property
    def by_name(self) -> Mapping[str, Group]:
        """The groups by their names, in the order of their ids. A view, not a copy."""
        return MappingProxyType(self._by_name)

    def get(self, group_id: int) -> Group | None:
        name = self._names.get(group_id)
        return None if name is None else self._by_name[name]

    def image(self) -> tuple[Group, ...]:
        """Return all groups by their ids; ``Groups(image)`` equals this object."""
        return tuple(self._by_name.values())

    def apply(self, command: GroupCommand, group_id: int) -> GroupChanged | Rejected:
        """Apply a committed command; return its result. ``group_id``: of a group that this command
        creates.
        """
        if isinstance(command, CreateGroup):
            return self._create(command, group_id)
        group = self.get(command.group_id)
        if group is None:
            return Rejected(reason=Reason.GROUP_UNKNOWN)
        if isinstance(command, DeleteGroup):
            del self._by_name[group.name], self._names[group.group_id]
            return _changed(group)
        if command.generation != group.generation:
            return Rejected(reason=Reason.GENERATION_RAISED)
        return self._put(_raised(group, command))

    def _create(self, command: CreateGroup, group_id: int) -> GroupChanged | Rejected:
        group = self._by_name.get(command.name)
        if group is not None:
            return _changed(group)
        if len(self._by_name) >= GROUPS_MAX:
            return Rejected(reason=Reason.TOO_MANY_GROUPS)
        return self._put(
            Group(
                group_id=group_id,
                name=command.name,
                strategy=command.strategy,
                created_at_ms=command.created_at_ms,
            )
        )

    def _put(self, group: Group) -> GroupChanged:
        self._by_name[group.name] = group
        self._names[group.group_id] = group.name
        return _changed(group)


def _raised(group: Group, command: RaiseGeneration) -> Group:
    return replace(group, generation=group.generation + 1, session_ms=command.session_ms)


def _changed(group: Group) -> GroupChanged:
    return GroupChanged(group_id=group.group_id, generation=group.generation)
