"""Empties a keyspace, as a bulk load that overwrites with nothing: all of it, or nothing.

The coordinators open and commit the load in one call, which may be repeated by the job's name. From
then on the load ends merged, whoever dies. The caller is answered once it is merged everywhere, so
that nobody reads afterwards what was there before.
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
"""For so long the leader is asked again: shorter than an open load of this kind lasts."""
_POLL_S = 0.01


class Emptier:
    """Empties keyspaces for clients. For the event loop only."""

    def __init__(self, state: NodeState, calls: EmptyingCalls) -> None:
        self._state = state
        self._calls = calls

    async def empty(self, keyspace_id: KeyspaceId, description: str) -> None:
        """Empty the keyspace; return once every partition of it is. ``description``: for people,
        who wants it.

        Raises:
            UnknownFateError: it may be emptied, now or later; to empty it again does no harm.
            KoinonError: nothing is emptied.
        """
        load = await self._committed(keyspace_id, description)
        if load.state == loads_pb2.LOAD_STATE_DONE:
            return
        while not self._has_ended(load):
            if not self._state.serving():
                raise UnknownFateError(
                    reason=f"load {load.load_id} empties the keyspace, but this node has lost its "
                    "lease and cannot tell when it has done so"
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
        """Return whether a table that knows of the load names it no more."""
        table = self._state.table()
        if table.table_version < load.table_version:
            return False
        return all(active.load_id != load.load_id for active in table.loads)
