"""Keyspaces, as operators create, alter and drop them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from koinon.operate.access import Behind
from koinon_proto.contract import convert
from koinon_proto.contract.errors import ClusterNotReadyError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.leader_search import Repeat
from koinon_proto.contract.table import Table
from koinon_proto.v1 import admin_pb2, table_pb2

if TYPE_CHECKING:
    from koinon.operate.admin import Admin, ClusterStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyspaceMade:
    """A keyspace as it is after a change; ``behind`` has not said that it goes by it."""

    keyspace: Keyspace
    behind: Behind


def table_of(status: ClusterStatus) -> Table:
    """Return the table, which names the keyspaces; raise ClusterNotReadyError if there is none."""
    table = status.table
    if table is None or not table.bootstrapped:
        raise ClusterNotReadyError(
            registered_nodes=0 if table is None else len(table.nodes),
            bootstrap_nodes=0 if table is None else table.cluster.bootstrap_nodes,
        )
    return table


class KeyspaceAdmin:
    """Changes keyspaces; the table names them. Methods raise what the calls of ``Admin`` raise, and
    UnknownKeyspaceError, KeyspaceChangeError and InvalidArgumentError where nothing was changed.
    A change is in force when its method returns; ``behind`` names what has not said so.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    def create(
        self,
        name: str,
        *,
        partition_count: int = 0,
        partitioner: str = "",
        replication_factor: int = 0,
        min_in_sync: int = 0,
        max_value_bytes: int = 0,
        pool: str = "",
        default_ttl_ms: int = 0,
        max_ttl_ms: int = 0,
        max_rows_per_s: int = 0,
        max_bytes_per_s: int = 0,
    ) -> KeyspaceMade:
        """Create a keyspace; one that is there already, and is so, is returned. What is 0 or "" is
        as usual: 64 partitions, the hash without a router, the numbers of ``default``, no
        default and no maximum of the time to live, and no limit of rows and bytes a second.
        """
        keyspace = table_pb2.Keyspace(
            name=name,
            partition_count=partition_count,
            partitioner=partitioner,
            replication_factor=replication_factor,
            min_in_sync=min_in_sync,
            max_value_bytes=max_value_bytes,
            pool=pool,
            default_ttl_ms=default_ttl_ms,
            max_ttl_ms=max_ttl_ms,
            max_rows_per_s=max_rows_per_s,
            max_bytes_per_s=max_bytes_per_s,
        )
        return self._ask("CreateKeyspace", admin_pb2.CreateKeyspaceRequest(keyspace=keyspace))

    def alter(
        self,
        name: str,
        *,
        min_in_sync: int | None = None,
        max_value_bytes: int | None = None,
        pool: str | None = None,
        default_ttl_ms: int | None = None,
        max_ttl_ms: int | None = None,
        max_rows_per_s: int | None = None,
        max_bytes_per_s: int | None = None,
    ) -> KeyspaceMade:
        """Alter what is given; 0 takes a time to live or a limit a second away. (A plan changes the
        replication factor.)
        """
        request = admin_pb2.AlterKeyspaceRequest(
            name=name,
            min_in_sync=min_in_sync,
            max_value_bytes=max_value_bytes,
            pool=pool,
            default_ttl_ms=default_ttl_ms,
            max_ttl_ms=max_ttl_ms,
            max_rows_per_s=max_rows_per_s,
            max_bytes_per_s=max_bytes_per_s,
        )
        return self._ask("AlterKeyspace", request)

    def drop(self, name: str, keyspace_id: int = 0) -> KeyspaceMade:
        """Drop a keyspace and all of its records; only the one with this id, unless that is 0."""
        request = admin_pb2.DropKeyspaceRequest(name=name, keyspace_id=keyspace_id)
        return self._ask("DropKeyspace", request)

    def _ask(self, method: str, request: Any) -> KeyspaceMade:
        reply = self._admin.ask(method, request, Repeat.CHANGE)
        return KeyspaceMade(
            keyspace=convert.KEYSPACE.decode(reply.keyspace),
            behind=Behind(tuple(reply.nodes_behind), reply.behind_serve_ms),
        )
