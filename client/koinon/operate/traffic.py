"""Asks the nodes about clients' traffic: counters, and sampled keys (``v1/traffic.proto``).

Nodes are asked concurrently. A node that does not answer costs its timeout, and is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import numpy as np

from koinon.driver.rpc.channels import Channels
from koinon.operate.judge.hotspots import (
    MEASURES,
    READ_BYTES,
    READS,
    WRITES,
    WRITTEN_BYTES,
    FollowerLag,
    KeySample,
    NodeCounters,
    RankBy,
    Rates,
    SampledKey,
    SampledRows,
    rates,
)
from koinon.operate.views import view
from koinon_proto.contract.table import NodeInfo, NodeStatus, Table
from koinon_proto.server import rpc
from koinon_proto.v1 import traffic_pb2, traffic_pb2_grpc

ANSWER_S_MAX = 2.0
TICK_S = 0.1
NODE_PARTITIONS_MAX, NODE_KEYS_MAX = 64, 100
"""The limits of a node: the partitions whose keys it samples, and the keys of each."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The nodes' counters by node number, and the reasons of nodes that did not answer."""

    nodes: Mapping[int, NodeCounters] = field(default_factory=dict)
    silent: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The traffic of the measured seconds."""

    seconds: float
    rates: Rates
    sample: KeySample
    silent: Mapping[int, str]


class TrafficClient(Channels):
    """Connections to the nodes of a cluster. Thread-safe."""

    def counters(self, table: Table, timeout_s: float = ANSWER_S_MAX) -> Counters:
        """Return the counters of the table's running nodes."""
        request = traffic_pb2.GetTrafficRequest(cluster_id=table.cluster.cluster_id)
        calls = {
            int(node.number): self._stub(node).GetTraffic.future(request, timeout=timeout_s)
            for node in running(table)
        }
        answers, silent = _answers(calls)
        count = len(table.rows)
        nodes = {number: _counters(answer, count) for number, answer in answers.items()}
        return Counters(nodes=nodes, silent=_with_those_down(table, silent))

    def survey(
        self,
        table: Table,
        seconds: float,
        *,
        by: RankBy,
        partitions_max: int,
        keys_max: int,
        on_tick: Callable[[float], None] = lambda _elapsed_s: None,
    ) -> Survey:
        """Count and sample for ``seconds`` (0.05 to 60). ``on_tick`` is called several times a
        second with the elapsed seconds. ``keys_max`` 0: no keys are sampled.
        """
        began, first = time.monotonic(), self.counters(table)
        calls = self._sample(table, seconds, by, partitions_max, keys_max) if keys_max else {}
        try:
            while (elapsed_s := time.monotonic() - began) < seconds:
                on_tick(elapsed_s)
                time.sleep(min(TICK_S, seconds - elapsed_s))
            on_tick(seconds)
            samples, unsampled = _answers(calls)
        except BaseException:
            for call in calls.values():
                call.cancel()
            raise
        last = self.counters(table)
        took_s = time.monotonic() - began
        return Survey(
            seconds=took_s,
            rates=rates(first.nodes, last.nodes, partitions=len(table.rows), seconds=took_s),
            sample=_merged(samples),
            silent={**first.silent, **unsampled, **last.silent},
        )

    def _sample(
        self, table: Table, seconds: float, by: RankBy, partitions_max: int, keys_max: int
    ) -> dict[int, Any]:
        request = traffic_pb2.SampleKeysRequest(
            cluster_id=table.cluster.cluster_id,
            duration_ms=int(seconds * 1000),
            partitions_max=min(partitions_max, NODE_PARTITIONS_MAX),
            keys_max=min(keys_max, NODE_KEYS_MAX),
            rank_by=cast(Any, int(by)),
        )
        return {
            int(node.number): self._stub(node).SampleKeys.future(
                request, timeout=seconds + ANSWER_S_MAX
            )
            for node in running(table)
        }

    def _stub(self, node: NodeInfo) -> Any:
        return traffic_pb2_grpc.TrafficStub(self.channel(node.address))


def running(table: Table) -> list[NodeInfo]:
    """Return the nodes to ask."""
    serving = (NodeStatus.ACTIVE, NodeStatus.DRAINING)
    return [node for node in table.nodes.values() if node.status in serving]


def _with_those_down(table: Table, silent: Mapping[int, str]) -> dict[int, str]:
    down = (node for node in table.nodes.values() if node.status is NodeStatus.FENCED)
    return {**{int(node.number): "down" for node in down}, **silent}


def _answers(calls: Mapping[int, Any]) -> tuple[dict[int, Any], dict[int, str]]:
    answers: dict[int, Any] = {}
    silent: dict[int, str] = {}
    for number, call in calls.items():
        try:
            answers[number] = call.result()
        except grpc.RpcError as failure:
            silent[number] = rpc.in_words(failure)
    return answers, silent


def _counters(message: traffic_pb2.TrafficCounters, partitions: int) -> NodeCounters:
    counts = np.zeros((MEASURES, partitions))
    ids = np.array(message.partition_ids, np.intp)
    known = ids < partitions
    for measure, column in (
        (READS, message.reads),
        (WRITES, message.writes),
        (READ_BYTES, message.read_bytes),
        (WRITTEN_BYTES, message.written_bytes),
    ):
        counts[measure, ids[known]] = np.array(column, np.float64)[known]
    return NodeCounters(
        elapsed_s=message.elapsed_us / 1e6,
        counts=counts,
        followers=tuple(
            FollowerLag(
                node_number=lag.node_number,
                records=lag.records,
                bytes=lag.bytes,
                oldest_s=lag.oldest_us / 1e6,
            )
            for lag in message.followers
        ),
    )


def _merged(samples: Mapping[int, traffic_pb2.KeySample]) -> KeySample:
    """Merge the nodes' samples. A key that two nodes have sampled (its partition has moved
    meanwhile) counts with both.
    """
    found: dict[tuple[int, bytes], tuple[float, float, float]] = {}
    read = written = SampledRows()
    for sample in samples.values():
        seconds = max(sample.elapsed_us / 1e6, 1e-3)
        rows = zip(sample.partition_ids, sample.keys, sample.reads, sample.writes, strict=True)
        for p, key, reads, writes in rows:
            taken = reads * _part(sample.read) + writes * _part(sample.written)
            more = (reads / seconds, writes / seconds, taken)
            before = found.get((p, key), (0.0, 0.0, 0.0))
            found[p, key] = (before[0] + more[0], before[1] + more[1], before[2] + more[2])
        read, written = read + _rows(sample.read), written + _rows(sample.written)
    return KeySample(
        keys=[
            SampledKey(
                partition_id=partition_id,
                key=key,
                reads_per_second=reads,
                writes_per_second=writes,
                taken=taken,
            )
            for (partition_id, key), (reads, writes, taken) in found.items()
        ],
        read=read,
        written=written,
    )


def _part(message: traffic_pb2.SampledRows) -> float:
    return message.taken / message.rows if message.rows else 0.0


def _rows(message: traffic_pb2.SampledRows) -> SampledRows:
    return view(SampledRows, message)
