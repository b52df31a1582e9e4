"""The keyspace that operations are in, as a client has opened it."""

from __future__ import annotations

from dataclasses import dataclass

from koinon.core.routing import Routing
from koinon_proto.contract.errors import UnknownKeyspaceError
from koinon_proto.contract.keyspaces import DEFAULT, DEFAULT_ID, Keyspace
from koinon_proto.partitioner import Partitioner, partitioner_of


@dataclass(frozen=True, slots=True)
class OpenedKeyspace:
    """A keyspace as one process has opened it, so that other processes use exactly the same
    keyspace. It is in every table of ``table_version`` or newer, unless it has been dropped.
    """

    keyspace_id: int = DEFAULT_ID
    name: str = DEFAULT
    table_version: int = 0


DEFAULT_OPENED = OpenedKeyspace()
"""``default``, which always exists."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One keyspace, by its id: a keyspace that is dropped and created anew under the same name is a
    different one. Its partitions never change; its other settings are those of the newest table.
    """

    keyspace_id: int
    name: str
    partitioner: Partitioner

    @property
    def is_default(self) -> bool:
        return self.keyspace_id == DEFAULT_ID

    def settings(self, routing: Routing) -> Keyspace:
        """Return the keyspace with its present settings.

        Raises:
            UnknownKeyspaceError: it has been dropped.
        """
        found = routing.table.keyspaces.by_id(self.keyspace_id)
        if found is None or found.is_dropping:
            raise UnknownKeyspaceError(keyspace=self.name)
        return found


def target_named(name: str, routing: Routing) -> Target:
    """Return the keyspace of this name; "" is ``default``.

    Raises:
        UnknownKeyspaceError: the table has no such keyspace.
        ConfigurationError, PartitionerMismatchError: this build places its keys otherwise.
    """
    return _target(routing.table.keyspaces.named(name))


def target_of(opened: OpenedKeyspace, routing: Routing) -> Target:
    """Return the keyspace that another process opened. The routing's table must not be older than
    ``opened.table_version``.

    Raises:
        UnknownKeyspaceError: it has been dropped, even if a new keyspace has its name.
        ConfigurationError, PartitionerMismatchError: as ``target_named``.
    """
    found = routing.table.keyspaces.by_id(opened.keyspace_id)
    if found is None or found.is_dropping:
        raise UnknownKeyspaceError(keyspace=opened.name)
    return _target(found)


def _target(found: Keyspace) -> Target:
    return Target(found.keyspace_id, found.name, partitioner_of(found))
