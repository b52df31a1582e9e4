"""The source of the partition table, for both clients: lists the addresses to ask, and applies
replies to a router. Coordinators and nodes both serve the table.
"""

from __future__ import annotations

from collections.abc import Sequence

from koinon.core.routing import Router
from koinon_proto.contract import convert
from koinon_proto.contract.errors import ClusterNotReadyError, KoinonError
from koinon_proto.v1 import table_pb2

_NODES_ASKED_MAX = 8


class TableRequests:
    """The addresses that serve the table, and the request for the changes that the router lacks."""

    def __init__(self, seeds: Sequence[str], router: Router) -> None:
        self._seeds = list(dict.fromkeys(seeds))
        self._router = router
        self._turn = 0  # how often ``addresses`` was called

    @property
    def cluster_id(self) -> str:
        """The cluster that this client has joined; '' before its first table."""
        routing = self._router.routing
        return routing.table.cluster.cluster_id if routing else ""

    def addresses(self) -> list[str]:
        """Return the addresses in the order to ask: the seeds, beginning with another one at each
        call, then the nodes.
        """
        start = self._turn % len(self._seeds)
        self._turn += 1
        routing = self._router.routing
        nodes = list(routing.addresses[1:]) if routing else []
        if nodes:
            at = self._turn % len(nodes)
            nodes = (nodes[at:] + nodes[:at])[:_NODES_ASKED_MAX]
        return list(dict.fromkeys([*self._seeds[start:], *self._seeds[:start], *nodes]))

    def request(self) -> table_pb2.GetTableRequest:
        """Build the request for the changes since the router's table."""
        return table_pb2.GetTableRequest(
            cluster_id=self.cluster_id, known_version=self._router.table_version
        )

    def apply_reply(self, reply: table_pb2.TableUpdate) -> KoinonError | None:
        """Apply a reply to the router; return the error if the table cannot be used."""
        try:
            self._router.on_update(convert.update_from_proto(reply))
        except KoinonError as error:
            return error
        if self._router.routing is None:
            return ClusterNotReadyError(
                registered_nodes=len(reply.nodes), bootstrap_nodes=reply.cluster.bootstrap_nodes
            )
        return None
