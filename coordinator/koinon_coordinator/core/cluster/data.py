"""The data of the replicated state, and its elementary changes.

Only ``ClusterState`` has this object; the ``HANDLERS`` of each subject's module change it. They
raise ``version``: a command raises it at most once, and every row, node or keyspace that the
command changes gets the new version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from koinon_coordinator.core.cluster.commands import Applied, Reason, Rejected, Result
from koinon_coordinator.core.cluster.group_rules import Groups
from koinon_coordinator.core.cluster.image import NodeRecord, StateImage
from koinon_coordinator.core.cluster.load_rules import Loads
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceId, KeyspaceList, Keyspaces
from koinon_proto.contract.table import (
    ClusterConfig,
    NodeId,
    NodeNumber,
    PartitionId,
    PartitionRow,
    PartitionStatus,
)


class ClusterData:
    """The parts of the state. The methods keep derived parts (``numbers``, ``live``, the keyspaces,
    assigned rows) consistent with the others.
    """

    def __init__(self, image: StateImage) -> None:
        self.version = image.table_version
        self.last_number = image.last_node_number  # of nodes; numbers are never reused
        self.nodes = {record.info.number: record for record in image.nodes}
        self.numbers = {record.info.node_id: record.info.number for record in image.nodes}
        self.live = {number for number, record in self.nodes.items() if record.live}
        self.rows = list(image.rows)  # by partition id; empty before the first assignment
        self.moves = {move.partition_id: move for move in image.moves}  # queued and running
        self.move_settings = image.move_settings
        self.stranded = {entry.partition_id: entry for entry in image.stranded}
        self.loads = Loads(image.loads)
        self.groups = Groups(image.groups)
        self.access = image.access
        self.last_keyspace_id = image.last_keyspace_id
        self._config = image.config
        self._keyspace_list = image.keyspaces
        self._keyspaces: Keyspaces | None = None  # derived from config and list, on demand
        self._assigned: dict[NodeNumber, tuple[PartitionRow, ...]] | None = None  # from the rows

    # --- configuration and keyspaces ----------------------------------------------------------

    @property
    def config(self) -> ClusterConfig | None:
        return self._config

    @config.setter
    def config(self, config: ClusterConfig) -> None:
        self._config = config
        self._keyspaces = None

    @property
    def keyspace_list(self) -> KeyspaceList:
        return self._keyspace_list

    @keyspace_list.setter
    def keyspace_list(self, keyspace_list: KeyspaceList) -> None:
        self._keyspace_list = keyspace_list
        self._keyspaces = None

    @property
    def keyspaces(self) -> Keyspaces:
        """The keyspaces. Requires that the cluster exists."""
        if self._keyspaces is None:
            assert self._config is not None, "there is no cluster yet"
            self._keyspaces = Keyspaces(self._config, self._keyspace_list)
        return self._keyspaces

    def usable_keyspace(self, keyspace_id: KeyspaceId) -> Keyspace | None:
        """The keyspace, or None if there is none with this id or it is being dropped."""
        found = self.keyspaces.by_id(keyspace_id)
        return None if found is None or found.is_dropping else found

    # --- nodes --------------------------------------------------------------------------------

    def node_by_id(self, node_id: str) -> NodeRecord | None:
        number = self.numbers.get(NodeId(node_id))
        return None if number is None else self.nodes[number]

    def node_at_epoch(self, number: NodeNumber, node_epoch: int) -> NodeRecord | Rejected:
        """The live node's record if ``node_epoch`` is its current epoch, else the rejection."""
        record = self.nodes.get(number)
        if record is None:
            return Rejected(reason=Reason.UNKNOWN_NODE)
        if record.info.node_epoch != node_epoch:
            return Rejected(reason=Reason.STALE_EPOCH)
        if not record.live:
            return Rejected(reason=Reason.ALREADY_FENCED)
        return record

    def put_node(self, record: NodeRecord) -> None:
        number = record.info.number
        self.nodes[number] = record
        self.numbers[record.info.node_id] = number
        (self.live.add if record.live else self.live.discard)(number)

    def is_in_use(self, number: NodeNumber) -> bool:
        """Return whether the node has replicas, or a move will give it some."""
        return any(number in row.replicas for row in self.rows) or any(
            number in move.target for move in self.moves.values()
        )

    # --- rows ---------------------------------------------------------------------------------

    def row(self, partition_id: int) -> PartitionRow | None:
        """The partition's row; None if there is no such partition or no table yet."""
        return self.rows[partition_id] if 0 <= partition_id < len(self.rows) else None

    def assigned_to(self, number: NodeNumber) -> tuple[PartitionRow, ...]:
        """The rows that name the node as primary and that the node has not acknowledged yet."""
        if self._assigned is None:
            found: dict[NodeNumber, list[PartitionRow]] = {}
            for row in self.rows:
                if row.status is PartitionStatus.ASSIGNED:
                    found.setdefault(row.primary, []).append(row)
            self._assigned = {node: tuple(rows) for node, rows in found.items()}
        return self._assigned.get(number, ())

    def put_row(self, row: PartitionRow) -> None:
        """Set the partition's row; it may extend the table by one row."""
        if row.partition_id == len(self.rows):
            self.rows.append(row)
        self.rows[row.partition_id] = row
        if row.in_sync:
            self.stranded.pop(row.partition_id, None)
        self._assigned = None

    def change_rows(self, change: Callable[[PartitionRow], PartitionRow]) -> int:
        """Replace each row by ``change(row)`` where that differs; return the number of changed
        rows.
        """
        after = [(row, change(row)) for row in self.rows]
        changed = [row for was, row in after if row is not was]
        for row in changed:
            self.put_row(row)
        return len(changed)

    def change_to(
        self, rows: Iterable[PartitionRow], rejected: Iterable[PartitionId] = ()
    ) -> Applied:
        """Set rows that carry the next version, and raise the version if there are any."""
        changed = list(rows)
        for row in changed:
            self.put_row(row)
        self.version += bool(changed)
        return Applied(rows_changed=len(changed), rejected=tuple(rejected))

    # ------------------------------------------------------------------------------------------

    def image(self) -> StateImage:
        """Return the whole data; ``ClusterData(image)`` equals this object."""
        return StateImage(
            config=self._config,
            table_version=self.version,
            last_node_number=self.last_number,
            nodes=tuple(self.nodes[number] for number in sorted(self.nodes)),
            rows=tuple(self.rows),
            moves=tuple(self.moves.values()),
            move_settings=self.move_settings,
            stranded=tuple(self.stranded[p] for p in sorted(self.stranded)),
            loads=self.loads.image(),
            access=self.access,
            keyspaces=self._keyspace_list,
            last_keyspace_id=self.last_keyspace_id,
            groups=self.groups.image(),
        )


Handlers = dict[type[Any], Callable[[ClusterData, Any], Result]]
"""The function that applies a command, by the command's class."""
