"""The replicated state: the cluster's configuration, its nodes and its partition table.

Only ``ClusterState.apply`` changes the state. It is deterministic (the same commands give the same
state on every member) and total: a command that was valid when it was proposed may be stale when it
commits, so ``apply`` checks the epochs again and returns ``Rejected``; it never raises for a stale
or repeated command. The state has no time, sessions or leases. ``data`` has its parts; each
subject's module has its rules and its ``HANDLERS``, by command.

Registration and the stores
---------------------------
``members`` has the rules: which store a node comes back with, and what that does to its rows.

Moves
-----
A plan's moves are queued beside the table and change rows only once they are started; ``moves`` has
the steps. Nothing else changes the replicas of a row. ``table_version`` counts changes of what the
table shows: a queue that grows or shrinks is none.

Bulk loads
----------
``bulk_loads`` has their rules. The table shows which of them are open and which are being merged:
each change of that is a version, how far a merge has come is none.

Keyspaces
---------
``keyspaces`` has the rules. The table shows them whole.

Consumer groups
---------------
``group_rules`` has their rules. The table shows nothing of them.

Access
------
``access`` has the rules of users, roles and tokens. They have a version of their own, and the table
shows nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType

from koinon_coordinator.core.cluster import (
    access_rules,
    election,
    keyspace_rules,
    members,
    move_steps,
)
from koinon_coordinator.core.cluster.commands import (
    AccessChanged,
    AccessCommand,
    Command,
    GroupCommand,
    LoadCommand,
    Move,
    Reason,
    Rejected,
    Result,
)
from koinon_coordinator.core.cluster.data import ClusterData, Handlers
from koinon_coordinator.core.cluster.group_rules import Groups
from koinon_coordinator.core.cluster.image import EMPTY_IMAGE, NodeRecord, StateImage
from koinon_coordinator.core.cluster.load_rules import Loads
from koinon_proto.contract.access import Access
from koinon_proto.contract.keyspaces import Keyspaces
from koinon_proto.contract.table import (
    ClusterConfig,
    MoveSettings,
    NodeNumber,
    PartitionId,
    PartitionRow,
    Table,
)


class ClusterState:
    """The replicated state of the cluster. Only ``apply`` changes it."""

    def __init__(self, image: StateImage = EMPTY_IMAGE) -> None:
        self._data = ClusterData(image)
        # Derived from the data at one version, on demand.
        self._table: Table | None = None
        self._compiled = Access()

    # --- reading ------------------------------------------------------------------------------

    @property
    def config(self) -> ClusterConfig | None:
        return self._data.config

    @property
    def table_version(self) -> int:
        return self._data.version

    @property
    def bootstrapped(self) -> bool:
        return bool(self._data.rows)

    @property
    def live_nodes(self) -> list[NodeRecord]:
        """The nodes that are registered and not fenced, by number."""
        return [self._data.nodes[number] for number in sorted(self._data.live)]

    @property
    def live_numbers(self) -> Set[NodeNumber]:
        """The numbers of the live nodes. Read only."""
        return self._data.live

    @property
    def nodes(self) -> list[NodeRecord]:
        """Every node, by number."""
        return [self._data.nodes[number] for number in sorted(self._data.nodes)]

    def node(self, number: NodeNumber) -> NodeRecord | None:
        return self._data.nodes.get(number)

    def node_by_id(self, node_id: str) -> NodeRecord | None:
        return self._data.node_by_id(node_id)

    def row(self, partition_id: int) -> PartitionRow | None:
        """The partition's row; None if there is no such partition, or no table yet."""
        return self._data.row(partition_id)

    @property
    def moves(self) -> Mapping[PartitionId, Move]:
        """The moves that are queued or run, in the order of their plans. A view, not a copy."""
        return MappingProxyType(self._data.moves)

    @property
    def move_settings(self) -> MoveSettings:
        return self._data.move_settings

    @property
    def loads(self) -> Loads:
        """The bulk loads. Read only: ``apply`` changes them."""
        return self._data.loads

    @property
    def groups(self) -> Groups:
        """The consumer groups. Read only: ``apply`` changes them."""
        return self._data.groups

    @property
    def keyspaces(self) -> Keyspaces:
        """The keyspaces. Requires that the cluster exists."""
        return self._data.keyspaces

    @property
    def partition_ids_end(self) -> int:
        """The first partition id above all rows."""
        return len(self._data.rows)

    @property
    def access(self) -> Access:
        """The rights of users and roles, cached per version."""
        if self._compiled.state is not self._data.access:
            self._compiled = Access(self._data.access, self._compiled)
        return self._compiled

    def table(self) -> Table | None:
        """The table at the current version, cached; None before the cluster exists."""
        data = self._data
        if data.config is None:
            return None
        if self._table is None or self._table.table_version != data.version:
            self._table = Table(
                cluster=data.config,
                table_version=data.version,
                nodes={number: record.info for number, record in data.nodes.items()},
                rows=tuple(data.rows),
                moves=data.move_settings,
                loads=data.loads.shown(),
                keyspace_list=data.keyspace_list,
            )
        return self._table

    def assigned_to(self, number: NodeNumber) -> tuple[PartitionRow, ...]:
        """The rows that name the node as primary and that the node has not acknowledged yet."""
        return self._data.assigned_to(number)

    def is_in_use(self, number: NodeNumber) -> bool:
        """Return whether the node has replicas, or a move will give it some."""
        return self._data.is_in_use(number)

    def image(self) -> StateImage:
        """Return all of the state; ``ClusterState(image)`` equals this one."""
        return self._data.image()

    # --- applying -----------------------------------------------------------------------------

    def apply(self, command: Command, index: int = 0) -> Result:
        """Apply a committed command; return its result. ``index`` is the command's log index, which
        only OpenLoad, CommitLoad and CreateGroup need.
        """
        if isinstance(command, LoadCommand):
            return self._change_loads(command, index)
        if isinstance(command, AccessCommand):
            return self._change_access(command)
        if isinstance(command, GroupCommand):
            return self._change_groups(command, index)
        return _APPLY[type(command)](self._data, command)

    def _change_loads(self, command: LoadCommand, index: int) -> Result:
        data = self._data
        if data.config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        before = data.loads.shown()
        result = data.loads.apply(command, index=index, keyspaces=data.keyspaces)
        data.version += data.loads.shown() != before
        return result

    def _change_groups(self, command: GroupCommand, index: int) -> Result:
        data = self._data
        if data.config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        return data.groups.apply(command, data.loads.id_at(index))

    def _change_access(self, command: AccessCommand) -> Result:
        data = self._data
        if data.config is None:
            return Rejected(reason=Reason.NO_CLUSTER)
        fault = access_rules.fault(data.access, command, data.keyspaces)
        if fault is not None:
            return Rejected(reason=fault.reason)
        data.access = access_rules.changed(data.access, command)
        return AccessChanged(version=data.access.version)


_APPLY: Handlers = {
    **members.HANDLERS,
    **election.HANDLERS,
    **move_steps.HANDLERS,
    **keyspace_rules.HANDLERS,
}
