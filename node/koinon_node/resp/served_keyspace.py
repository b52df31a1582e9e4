"""A connection's keyspace: finds the partitions of its keys, and the nodes that serve them.

A connection is bound to the keyspace's id. After a drop its commands are refused, even if a new
keyspace has the same name. The module does no I/O; it reads the node's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import ref

import numpy as np

from koinon_node.core.quotas import Quota
from koinon_node.partition.request_limits import known_keyspace
from koinon_node.resp.error_replies import CROSS_SLOT, RefusedError
from koinon_node.resp.topology import Topology
from koinon_node.state import NodeState, Standing, partitioner_of
from koinon_proto.contract.errors import KoinonError, NotPrimaryError, UnknownKeyspaceError
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceId
from koinon_proto.contract.table import Table
from koinon_proto.partitioner import Crc16Partitioner, Partitioner, slot_of


class _Found(NamedTuple):
    """The keyspace by one table. The reference is weak: an idle connection keeps no table alive."""

    table: ref[Table]
    keyspace: Keyspace
    partitioner: Partitioner


class ServedKeyspace:
    """One keyspace, by its id, in the newest table."""

    def __init__(self, state: NodeState, keyspace_id: KeyspaceId) -> None:
        self.keyspace_id = keyspace_id
        self._state = state
        self._topology: Topology | None = None  # cached for the table of the last call
        self._found: _Found | None = None  # likewise; every command needs it

    @property
    def name(self) -> str:
        """The keyspace's name; '' if the table does not have the keyspace any more."""
        table = self._state.served.table
        return table.keyspaces.name_of(self.keyspace_id) if table is not None else ""

    def keyspace(self, table_version: int = 0) -> Keyspace:
        """Return the keyspace's settings; ``table_version`` is the sender's (0: unknown).

        Raises:
            ClusterNotReadyError: this node has no table yet.
            UnknownKeyspaceError: the keyspace was dropped.
            TableBehindError: this node does not know the keyspace, and the sender's table is newer.
        """
        return self._newest(table_version).keyspace

    def partitioner(self, table_version: int = 0) -> Partitioner:
        """Return the keyspace's partitioner. Raises the errors of ``keyspace``."""
        return self._newest(table_version).partitioner

    def _newest(self, table_version: int) -> _Found:
        found, table = self._found, self._state.served.table
        if found is not None and table is not None and found.table() is table:
            return found
        table = self._state.table()
        keyspace = known_keyspace(table, self.keyspace_id, table_version)
        self._found = _Found(ref(table), keyspace, partitioner_of(keyspace))
        return self._found

    def topology(self) -> Topology:
        """Return the table as Redis Cluster's clients see it, cached per table. Raises the errors
        of ``keyspace``.
        """
        table, keyspace = self._state.table(), self.keyspace()
        if self._topology is None or self._topology.table is not table:
            self._topology = Topology(table, keyspace)
        return self._topology

    def led(self) -> list[int]:
        """Return the partitions of the keyspace that this node leads, ascending."""
        partition_ids = self.keyspace().partition_ids
        epochs = self._state.served.epochs[partition_ids.start : partition_ids.stop]
        led: list[int] = (np.flatnonzero(epochs) + partition_ids.start).tolist()
        return led

    def check_quota(self) -> None:
        """Raise QuotaExceededError if the keyspace's limits are reached now. Afterwards the command
        counts the returned keys by ``count_shown``.
        """
        if (quota := self._quota()) is not None:
            quota.room(self._state.now())

    def count_shown(self, keys: Sequence[bytes]) -> None:
        """Count keys against the keyspace's limits."""
        if (quota := self._quota()) is not None:
            quota.spend(len(keys), sum(map(len, keys)))

    def _quota(self) -> Quota | None:
        return self._state.quota(self._state.served, self.keyspace().base)

    def moved_to(self, key: bytes) -> str:
        """Return the key's slot and the address that serves it, ``slot host:port``; '' if there is
        none.
        """
        try:
            keyspace = self.keyspace()
        except UnknownKeyspaceError:
            return ""
        partition_id = partitioner_of(keyspace).partition_of(key)
        primary = self._state.table().primary_of(partition_id)
        address = primary.redis_address_in(keyspace.name) if primary is not None else ""
        return f"{slot_of(key)} {address}" if address else ""

    def redirected(self, error: KoinonError, key: bytes) -> KoinonError:
        """Return the error for a command on this key: a redirection if another node is known to
        serve the key.
        """
        moved_to = self.moved_to(key) if isinstance(error, NotPrimaryError) else ""
        if not moved_to:
            return error
        refused = RefusedError(f"MOVED {moved_to}")
        refused.__cause__ = error
        return refused

    def check_served(self, key: bytes) -> None:
        """Raise the reason why this node does not serve the key's partition, if it does not. A
        partition that changes its primary counts as served: EXEC waits for the end of the change.
        """
        partition_id = self.partitioner().partition_of(key)
        view = self._state.served
        if view.table is None:
            self._state.check_lease()
        elif self._state.standing(partition_id) in (Standing.ELSEWHERE, Standing.NOWHERE):
            raise self.redirected(self._state.refusal(view, partition_id, 0), key)

    def check_one_slot(self, keys: Sequence[bytes]) -> None:
        """Raise RefusedError unless the keys will always lie in one partition: in one slot or, with
        another router, with the same routing bytes.
        """
        known = self.partitioner()
        place = slot_of if known.name == Crc16Partitioner.hash_name else known.routing_bytes
        if len(set(map(place, keys))) > 1:
            raise RefusedError(CROSS_SLOT)
