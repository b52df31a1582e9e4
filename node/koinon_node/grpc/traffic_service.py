"""The gRPC service of traffic: reads counters, and samples keys for the duration of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from koinon_node.partition.request_limits import table_of
from koinon_node.partition.traffic import (
    KeyCounts,
    KeySampler,
    RankBy,
    SampledKey,
    Traffic,
    hottest,
    since,
)
from koinon_node.replication.replicator import Replicator
from koinon_node.state import NodeState
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.server.rpc import bounded, typed_errors
from koinon_proto.v1 import traffic_pb2, traffic_pb2_grpc

CALLS_MAX = 64
DURATION_MS_MIN, DURATION_MS_MAX = 50, 60_000
PARTITIONS_MAX = 64
KEYS_MAX = 100


class TrafficService(traffic_pb2_grpc.TrafficServicer):
    """koinon.v1.Traffic."""

    def __init__(self, traffic: Traffic, replicator: Replicator, state: NodeState) -> None:
        self._traffic = traffic
        self._replicator = replicator
        self._state = state

    @typed_errors
    @bounded(CALLS_MAX)
    async def GetTraffic(  # noqa: N802 (the generated servicer's name)
        self, request: traffic_pb2.GetTrafficRequest, context: Any
    ) -> traffic_pb2.TrafficCounters:
        table_of(self._state, request)
        traffic = self._traffic
        traffic.flush()
        ids = np.flatnonzero(traffic.reads | traffic.writes)
        return traffic_pb2.TrafficCounters(
            elapsed_us=int(traffic.elapsed_s() * 1e6),
            partition_ids=ids.tolist(),
            reads=traffic.reads[ids].tolist(),
            writes=traffic.writes[ids].tolist(),
            read_bytes=traffic.read_bytes[ids].tolist(),
            written_bytes=traffic.written_bytes[ids].tolist(),
            followers=[
                traffic_pb2.FollowerLag(
                    node_number=lag.number,
                    records=lag.records,
                    bytes=lag.bytes,
                    oldest_us=int(lag.age_s * 1e6),
                )
                for lag in self._replicator.follower_lags()
            ],
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def SampleKeys(  # noqa: N802
        self, request: traffic_pb2.SampleKeysRequest, context: Any
    ) -> traffic_pb2.KeySample:
        table = table_of(self._state, request)
        wanted = frozenset(request.partition_ids)
        table.check_partitions(wanted)
        rank_by = _checked(request)
        traffic = self._traffic
        with traffic.sampling(wanted) as sampler:
            traffic.flush()
            before, began_s = traffic.copy(), traffic.elapsed_s()
            await asyncio.sleep(request.duration_ms / 1000)
            took_s = traffic.elapsed_s() - began_s
        traffic.flush()
        heat = since(before, traffic).heat(rank_by)
        chosen = hottest(heat, wanted, request.partitions_max)
        keys = sampler.hottest(chosen, request.keys_max)
        return _sample(took_s, keys, sampler)


def _checked(request: traffic_pb2.SampleKeysRequest) -> RankBy:
    """Check the bounds of a request; return its measure of heat."""
    for field, least, most in (
        ("duration_ms", DURATION_MS_MIN, DURATION_MS_MAX),
        ("partitions_max", 1, PARTITIONS_MAX),
        ("keys_max", 1, KEYS_MAX),
        ("rank_by", min(RankBy), max(RankBy)),
    ):
        actual = getattr(request, field)
        if not least <= actual <= most:
            raise InvalidArgumentError(
                field=field,
                reason=f"must be from {int(least)} to {int(most)}",
                limit=least if actual < least else most,
                actual=actual,
            )
    return RankBy(request.rank_by)


def _sample(
    took_s: float, keys: Sequence[SampledKey], sampler: KeySampler
) -> traffic_pb2.KeySample:
    return traffic_pb2.KeySample(
        elapsed_us=int(took_s * 1e6),
        partition_ids=[key.partition_id for key in keys],
        keys=[key.key for key in keys],
        reads=[key.reads for key in keys],
        writes=[key.writes for key in keys],
        read=_rows(sampler.reads),
        written=_rows(sampler.writes),
    )


def _rows(counts: KeyCounts) -> traffic_pb2.SampledRows:
    return traffic_pb2.SampledRows(
        rows=counts.offered, taken=counts.taken, missed_max=counts.missed_max
    )
