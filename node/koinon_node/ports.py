"""The interfaces of a node's replication to other nodes and to the coordinator.

The real ones are in transport/ and membership/coordinator_calls.py; the simulated ones,
over a seeded network, clock and disk, in tests/simulation. Messages are those of
v1/replication.proto.
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
"""The method of gRPC whose callers may also follow this node (KOINON.FOLLOW)."""

Sent = TypeVar("Sent", contravariant=True)
Received = TypeVar("Received", covariant=True)


class Stream(Protocol[Sent, Received]):
    """One end of an ordered stream. Either end may be lost at any time, with what is in flight."""

    def send(self, message: Sent) -> None:
        """Queue the message (its order is kept). Raises PeerLostError once the stream has ended."""

    @property
    def queued_bytes(self) -> int:
        """The bytes that were queued here and not yet handed to the network."""

    async def receive(self) -> Received:
        """Return the next message. Raises PeerLostError, or the typed error that the other side
        ended the stream with.
        """

    def close(self, error: KoinonError | None = None) -> None:
        """End the stream; a primary's end may say why. What was queued may be lost."""


class FollowerEnd(Stream[replication_pb2.FollowRequest, replication_pb2.FollowResponse], Protocol):
    """The caller's end."""

    async def connected(self) -> None:
        """Return once what is sent reaches the other node. Raises as ``receive`` does."""


class PrimaryEnd(Stream[replication_pb2.FollowResponse, replication_pb2.FollowRequest], Protocol):
    """The called node's end."""

    def send_encoded(self, parts: Sequence[bytes]) -> None:
        """Queue a message of which the bytes are at hand, in parts. Raises as ``send`` does."""


class Peers(Protocol):
    """A follower's way to primaries. Calls raise PeerLostError or the other side's typed error."""

    async def follow(self, node: NodeInfo) -> FollowerEnd:
        """Open a stream to the node. Raises PeerLostError if it cannot be reached."""

    async def read_page(
        self, node: NodeInfo, request: replication_pb2.ReadPageRequest
    ) -> replication_pb2.RecordPage: ...

    async def read_keys(
        self, node: NodeInfo, request: replication_pb2.ReadKeysRequest
    ) -> replication_pb2.RecordPage: ...


class TakesFollowers(Protocol):
    """A primary's side of streams that begin as connections of another protocol."""

    def take_follower(self, follower: StandingCaller, peer: str) -> asyncio.Protocol:
        """Return the protocol that the connection speaks from now on."""


class CoordinatorCalls(Protocol):
    """A primary's way to the coordinators' leader."""

    async def alter_partitions(self, changes: Sequence[RowChange]) -> frozenset[int]:
        """Propose the changes; return the partitions whose change was rejected. The newer table has
        been handed to the node before this returns.

        Raises:
            UnknownFateError: it may be committed, now or later.
            KoinonError: nothing was proposed.
        """


class LoadCalls(Protocol):
    """A primary's way to the coordinators' leader, about bulk loads. Both may be repeated."""

    async def load_manifest(self, cluster_id: str, load_id: int) -> loads_pb2.LoadManifest:
        """Return what is to be merged of a committed load.

        Raises:
            LoadClosedError: the load is not being merged.
            KoinonError: the leader could not be asked.
        """

    async def report_merged(
        self, cluster_id: str, load_id: int, partition_ids: Sequence[int]
    ) -> None:
        """Say that these partitions are merged, on all in-sync replicas.

        Raises:
            KoinonError: it is not known whether that has been taken.
        """


class EmptyingCalls(Protocol):
    """A node's way to have the coordinators' leader empty a keyspace."""

    async def empty_keyspace(
        self, cluster_id: str, keyspace_id: int, job_id: str, description: str
    ) -> loads_pb2.EmptyKeyspaceResponse:
        """Have a keyspace emptied by a load; return once that load is committed.

        Raises:
            UnknownFateError: it may be committed, now or later: ask again by the same ``job_id``.
            KoinonError: nothing is emptied.
        """
