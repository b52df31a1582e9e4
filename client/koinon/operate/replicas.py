"""Asks the nodes about their copies: sizes of partitions, and checksums.

Nodes are asked concurrently. A node that does not answer costs its timeout, and its copies count as
unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from koinon.driver.rpc.channels import Channels
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.views import view
from koinon_proto.contract.table import NodeNumber, Table
from koinon_proto.server import rpc
from koinon_proto.v1 import replication_pb2, replication_pb2_grpc

SIZES_S_MAX = 3.0
CHECKSUMS_S_MAX = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Checksum:
    """The checksum of one copy. Two copies that are complete through the same sequence are
    identical if records and digest are equal. Not ``usable``: there is no copy, or it is being
    replaced.
    """

    usable: bool
    complete_through: int
    records: int
    bytes: int
    digest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionSize:
    """The size of a partition; ``guessed``: it may differ by now, since it was counted before the
    last writes, or computed as a share of its node's total.
    """

    records: int
    bytes: int
    guessed: bool = False


class Replicas(Channels):
    """Connections to the nodes of a cluster. Thread-safe."""

    def checksums(
        self,
        table: Table,
        wanted: Mapping[int, Sequence[int]],
        *,
        positions_only: bool = False,
        timeout_s: float = CHECKSUMS_S_MAX,
    ) -> tuple[dict[tuple[int, int], Checksum], dict[int, str]]:
        """Ask nodes (by number) for the checksums of their copies of partitions, concurrently.

        ``positions_only``: no records are read; records, bytes and digest are 0.

        Returns:
            The checksums by (node, partition), and the reasons of nodes that did not answer.
        """
        calls = {
            number: self._stub(table, number).Checksums.future(
                replication_pb2.ChecksumsRequest(
                    cluster_id=table.cluster.cluster_id,
                    partition_ids=partition_ids,
                    positions_only=positions_only,
                ),
                timeout=timeout_s,
            )
            for number, partition_ids in wanted.items()
            if partition_ids
        }
        found: dict[tuple[int, int], Checksum] = {}
        silent: dict[int, str] = {}
        for number, call in calls.items():
            try:
                copies = call.result().copies
            except grpc.RpcError as failure:
                silent[number] = rpc.in_words(failure)
                continue
            for copy in copies:
                found[number, copy.partition_id] = view(Checksum, copy)
        return found, silent

    def sizes(
        self, status: ClusterStatus, partition_ids: Iterable[int]
    ) -> dict[int, PartitionSize]:
        """Return the sizes of partitions as their primaries have counted them. If a primary does
        not answer, or has not counted a partition yet, use the average of its node.
        """
        table = status.table
        assert table is not None, "there are partitions"
        wanted = {p: table.rows[p].primary for p in partition_ids}
        request = replication_pb2.PartitionSizesRequest(cluster_id=table.cluster.cluster_id)
        calls = {
            number: self._stub(table, number).PartitionSizes.future(request, timeout=SIZES_S_MAX)
            for number in set(wanted.values())
            if number in table.nodes
        }
        said: dict[tuple[int, int], PartitionSize] = {}
        for number, call in calls.items():
            try:
                reply = call.result()
            except grpc.RpcError:
                continue
            columns = zip(reply.partition_ids, reply.records, reply.bytes, reply.stale, strict=True)
            for partition_id, records, size, guessed in columns:
                said[number, partition_id] = PartitionSize(
                    records=records, bytes=size, guessed=guessed
                )
        averages = _averages(status, table)
        overall = averages.get(0, PartitionSize(records=0, bytes=0, guessed=True))
        return {
            p: said.get((number, p)) or averages.get(number, overall)
            for p, number in wanted.items()
        }

    def _stub(self, table: Table, number: int) -> Any:
        channel = self.channel(table.nodes[NodeNumber(number)].address)
        return replication_pb2_grpc.ReplicationStub(channel)


def _averages(status: ClusterStatus, table: Table) -> dict[int, PartitionSize]:
    """Return the average size of a copy on each node that has reported its total; key 0: over all
    nodes.
    """
    held = dict.fromkeys(table.nodes, 0)
    for row in table.used_rows:
        for number in row.replicas:
            held[number] = held.get(number, 0) + 1
    found: dict[int, PartitionSize] = {}
    copies = records = size = 0
    for session in status.sessions:
        number = NodeNumber(session.node_number)
        if (count := held.get(number, 0)) and session.map_bytes:
            copies, records = copies + count, records + session.records
            size += session.used_bytes
            found[number] = PartitionSize(
                records=session.records // count, bytes=session.used_bytes // count, guessed=True
            )
    if copies:
        found[0] = PartitionSize(records=records // copies, bytes=size // copies, guessed=True)
    return found
