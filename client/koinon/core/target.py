"""The keyspace that operations are in, as a client has opened it."""

from __future__ import annotations

from dataclasses import dataclass

from koinon.core.routing import Routing
from koinon_proto.contract.errors import UnknownKeyspaceError
from koinon_proto.contract.keyspaces import DEFAULT, DEFAULT_ID, Keyspace
from koinon_proto.partitioner import Partitioner, partitioner_of


@dataclass(frozen=True, slots=True)
class OpenedKeyspace:
    """A keyspace as one process has opened it, for others to use the very same. A table of
    ``table_version`` or a newer one knows it, unless it has been dropped.
    """

    keyspace_id: int = DEFAULT_ID
    name: str = DEFAULT
    table_version: int = 0


DEFAULT_OPENED = OpenedKeyspace()
"""``default``, which is always there."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One keyspace, by its id: one that is dropped, and created anew under the same name, is
    another. Its partitions never change; its other settings are those of the newest table.
    """

    keyspace_id: int
    name: str
    partitioner: Partitioner

    @property
    def is_default(self) -> bool:
        return self.keyspace_id == DEFAULT_ID

    def settings(self, routing: Routing) -> Keyspace:
        """Return the keyspace as it is now.

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
        UnknownKeyspaceError: the table has none.
        ConfigurationError, PartitionerMismatchError: keys are placed otherwise there than here.
    """
    return _target(routing.table.keyspaces.named(name))


def target_of(opened: OpenedKeyspace, routing: Routing) -> Target:
    """Return the keyspace that was opened. The routing's table is not older than it.

    Raises:
        UnknownKeyspaceError: it has been dropped, whether or not there is another of its name.
        ConfigurationError, PartitionerMismatchError: as ``target_named``.
    """
    found = routing.table.keyspaces.by_id(opened.keyspace_id)
    if found is None or found.is_dropping:
        raise UnknownKeyspaceError(keyspace=opened.name)
    return _target(found)


def _target(found: Keyspace) -> Target:
    return Target(found.keyspace_id, found.name, partitioner_of(found))
