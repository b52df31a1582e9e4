"""The interfaces of a node's replication to other nodes and to the coordinators.

The real implementations are in replication/peers.py and membership/coordinator_calls.py; simulated
ones, over a seeded network, clock and disk, are in tests/simulation. v1/replication.proto has the
messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

from koinon_node.core.replication.in_sync_and_hand_over import RowChange as RowChange
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeInfo
from koinon_proto.security.authentication import StandingCaller
from koinon_proto.server.framed_stream import PeerLostError as PeerLostError
from koinon_proto.v1 import loads_pb2, replication_pb2

FOLLOW = "/koinon.v1.Replication/ReadPage"
"""The gRPC method whose callers may also follow this node (KOINON.FOLLOW)."""

Sent = TypeVar("Sent", contravariant=True)
Received = TypeVar("Received", covariant=True)


class Stream(Protocol[Sent, Received]):
    """One end of an ordered stream. It may end at any time, and lose the messages in flight."""

    def send(self, message: Sent) -> None:
        """Queue the message, in order. Raises PeerLostError once the stream has ended."""

    @property
    def queued_bytes(self) -> int:
        """The bytes queued here and not handed to the network yet."""

    async def receive(self) -> Received:
        """Return the next message. Raises PeerLostError, or the typed error with which the other
        side ended the stream.
        """

    def close(self, error: KoinonError | None = None) -> None:
        """End the stream; a primary may give the reason. Queued messages may be lost."""


class FollowerEnd(Stream[replication_pb2.FollowRequest, replication_pb2.FollowResponse], Protocol):
    """The calling node's end."""

    async def connected(self) -> None:
        """Return once the stream is established. Raises the errors of ``receive``."""


class PrimaryEnd(Stream[replication_pb2.FollowResponse, replication_pb2.FollowRequest], Protocol):
    """The called node's end."""

    def send_encoded(self, parts: Sequence[bytes]) -> None:
        """Queue an encoded message, in parts. Raises the errors of ``send``."""


class Peers(Protocol):
    """A follower's calls to primaries. They raise PeerLostError or the other side's typed error."""

    async def follow(self, node: NodeInfo) -> FollowerEnd:
        """Open a stream to the node. Raises PeerLostError if it cannot be reached."""

    async def read_page(
        self, node: NodeInfo, request: replication_pb2.ReadPageRequest
    ) -> replication_pb2.RecordPage: ...

    async def read_keys(
        self, node: NodeInfo, request: replication_pb2.ReadKeysRequest
    ) -> replication_pb2.RecordPage: ...


class TakesFollowers(Protocol):
    """Accepts followers' streams on connections of another protocol."""

    def take_follower(self, follower: StandingCaller, peer: str) -> asyncio.Protocol:
        """Return the protocol object that serves the follower on this connection from now on."""


class CoordinatorCalls(Protocol):
    """A primary's calls to the coordinators' leader."""

    async def alter_partitions(self, changes: Sequence[RowChange]) -> frozenset[int]:
        """Propose the changes; return the partitions whose change was rejected. The newer table has
        been handed to the node before this returns.

        Raises:
            UnknownFateError: the changes may be committed, now or later.
            KoinonError: nothing was proposed.
        """


class LoadCalls(Protocol):
    """A primary's calls to the coordinators' leader about bulk loads. Both may be retried."""

    async def load_manifest(self, cluster_id: str, load_id: int) -> loads_pb2.LoadManifest:
        """Return the manifest of a committed load.

        Raises:
            LoadClosedError: the load is not being merged.
            KoinonError: the leader could not be reached.
        """

    async def report_merged(
        self, cluster_id: str, load_id: int, partition_ids: Sequence[int]
    ) -> None:
        """Report that these partitions are merged on all in-sync replicas.

        Raises:
            KoinonError: the report may or may not have arrived.
        """


class EmptyingCalls(Protocol):
    """A node's calls to the coordinators' leader to empty a keyspace."""

    async def empty_keyspace(
        self, cluster_id: str, keyspace_id: int, job_id: str, description: str
    ) -> loads_pb2.EmptyKeyspaceResponse:
        """Empty a keyspace by a bulk load; return once that load is committed.

        Raises:
            UnknownFateError: the load may be committed, now or later: retry with the same
            ``job_id``. KoinonError: nothing was emptied.
        """
