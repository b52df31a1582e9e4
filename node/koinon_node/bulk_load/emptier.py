"""Empties a keyspace by an overwriting bulk load without rows: atomically, all of it or nothing.

The coordinators open and commit the load in one call, which may be retried under the job's name.
After that the load will be merged, whichever process dies. The caller gets the answer once the load
is merged in every partition, so that later reads see no older record.
"""

from __future__ import annotations

import asyncio
import secrets

from koinon_node.ports import EmptyingCalls
from koinon_node.state import NodeState
from koinon_proto.contract.errors import UnknownFateError
from koinon_proto.contract.keyspaces import KeyspaceId
from koinon_proto.v1 import loads_pb2

_COMMIT_S = 8.0
"""For so many seconds the call is retried: less than the lifetime of such a load while open."""
_POLL_S = 0.01


class Emptier:
    """Empties keyspaces for clients. Belongs to the event loop."""

    def __init__(self, state: NodeState, calls: EmptyingCalls) -> None:
        self._state = state
        self._calls = calls

    async def empty(self, keyspace_id: KeyspaceId, description: str) -> None:
        """Empty the keyspace; return once every partition is empty. ``description`` tells operators
        who asked for it.

        Raises:
            UnknownFateError: the keyspace may be emptied, now or later; a retry does no harm.
            KoinonError: nothing was emptied.
        """
        load = await self._committed(keyspace_id, description)
        if load.state == loads_pb2.LOAD_STATE_DONE:
            return
        while not self._has_ended(load):
            if not self._state.serving():
                raise UnknownFateError(
                    reason=f"load {load.load_id} empties the keyspace, but this node has lost its "
                    "lease and cannot tell when the load is done"
                )
            await asyncio.sleep(_POLL_S)

    async def _committed(
        self, keyspace_id: KeyspaceId, description: str
    ) -> loads_pb2.EmptyKeyspaceResponse:
        job_id = f"empty-{self._state.node_id[:64]}-{secrets.token_hex(8)}"
        cluster_id = self._state.table().cluster.cluster_id
        until = self._state.now() + _COMMIT_S
        while True:
            try:
                return await self._calls.empty_keyspace(
                    cluster_id, keyspace_id, job_id, description
                )
            except UnknownFateError:
                if self._state.now() >= until:
                    raise
            await asyncio.sleep(_POLL_S)

    def _has_ended(self, load: loads_pb2.EmptyKeyspaceResponse) -> bool:
        """Return whether the load is over: a table new enough to know it does not list it."""
        table = self._state.table()
        if table.table_version < load.table_version:
            return False
        return all(active.load_id != load.load_id for active in table.loads)
