"""Counts of clients' reads and writes, samples that find hot keys, and replication lag."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from koinon_node.core.formats import records
from koinon_node.core.formats.records import U32Array
from koinon_node.partition import traffic as traffic_module
from koinon_node.partition.batches import WriteBatch
from koinon_node.partition.traffic import RankBy, Traffic, hottest, since
from koinon_node.replication.group_sender import Batches, FollowerStream, GroupRows
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    LeaseExpiredError,
    ResourceExhaustedError,
    WrongClusterError,
)
from koinon_proto.contract.table import NodeNumber
from koinon_proto.partitioner import partitioner as partitioner_of
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc, traffic_pb2, traffic_pb2_grpc
from tests.node.kit.held_writer import Bench, in_partition
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import NodeProcess, partitions_of, refusal, running_node

NOT_OURS = 5


class SetTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ids(*partition_ids: int) -> U32Array:
    return np.array(partition_ids, np.uint32)


def counted(traffic: Traffic, partition_id: int) -> tuple[int, int, int, int]:
    """Return (reads, writes, bytes read, bytes written)."""
    traffic.flush()
    columns = (traffic.reads, traffic.writes, traffic.read_bytes, traffic.written_bytes)
    reads, writes, read, written = (int(column[partition_id]) for column in columns)
    return reads, writes, read, written


# --- counters -----------------------------------------------------------------------------------


def test_rows_and_bytes_count_for_their_partitions() -> None:
    traffic = Traffic()
    traffic.count_reads(ids(3), [b"key"], [b"value"])
    traffic.count_reads(ids(3, 4, 3), [b"a", b"bb", b"c"], [b"1", b"", b"333"])
    traffic.count_writes(ids(3), [b"key"], np.array([8]))
    traffic.count_writes(ids(9, 9), [b"a", b"b"], np.array([5, 6]))
    traffic.count_scan(4, 10, 1_000)
    traffic.count_merge(9, 100, 5_000)
    assert counted(traffic, 3) == (3, 1, 14, 8)
    assert counted(traffic, 4) == (11, 0, 1_002, 0)
    assert counted(traffic, 9) == (0, 102, 0, 5_011)
    assert int(traffic.reads.sum() + traffic.writes.sum()) == 117


def test_bytes_of_large_batches_come_to_what_was_read() -> None:
    """Partition 0's values are ten times as long; each row's size counts equally often."""
    traffic = Traffic()
    partition_ids = np.arange(1_000, dtype=np.uint32) % 10
    keys = [b"%04d" % n for n in range(1_000)]
    values = [b"v" * (1_000 if n % 10 == 0 else 100) for n in range(1_000)]
    batches = 630
    for _ in range(batches):
        traffic.count_reads(partition_ids, keys, values)
    assert counted(traffic, 0)[0] == 100 * batches
    assert counted(traffic, 0)[2] == pytest.approx(batches * 100 * 1_004, rel=0.02)
    assert counted(traffic, 1)[2] == pytest.approx(batches * 100 * 104, rel=0.02)


def test_batches_are_counted_without_a_flush_once_there_are_some() -> None:
    traffic = Traffic()
    partition_ids, keys = in_partition(1, 2), [b"a", b"b"]
    for _ in range(traffic_module._FLUSH_BATCHES):
        traffic.count_reads(partition_ids, keys, keys)
    assert int(traffic.reads[1]) == 2 * traffic_module._FLUSH_BATCHES
    rows = traffic_module._FLUSH_ROWS
    traffic.count_writes(in_partition(2, rows), [b"k"] * rows, np.ones(rows, np.int64))
    assert int(traffic.writes[2]) == rows


async def test_engine_counts_what_it_served_as_primary(bench: Bench) -> None:
    traffic = bench.engine.context.traffic
    await bench.put(b"k", b"kk", value=b"12345")
    await bench.get(b"k", b"missing")
    await bench.get(b"k", want_versions=True)
    await bench.scan(0)
    await bench.put(b"kk", value=b"", delete=True)
    assert counted(traffic, 0) == (5, 3, (6 + 7) + 6 + (6 + 7), 6 + 7 + 2)
    staged = WriteBatch(
        table_version=1,
        keys=[b"chunk"],
        values=[b"v" * 1_000],
        partition_ids=in_partition(0, 1),
        kind=records.STAGED,
    )
    await bench.engine.writes.write(staged)
    bench.lose_lease()
    with pytest.raises(LeaseExpiredError):
        await bench.get(b"k")
    assert counted(traffic, 0)[:2] == (5, 3)


async def test_rows_of_refused_partitions_do_not_count(bench: Bench) -> None:
    bench.lose_partition_0()
    both = ids(0, 1)
    await bench.engine.reads.read([b"a", b"b"], both, 1, want_versions=False)
    await bench.engine.writes.write(
        WriteBatch(table_version=1, keys=[b"a", b"b"], values=[b"1", b"22"], partition_ids=both)
    )
    assert counted(bench.engine.context.traffic, 0) == (0, 0, 0, 0)
    assert counted(bench.engine.context.traffic, 1) == (1, 1, 1, 3)


def test_hottest_partitions_are_ranked_by_what_is_asked_for() -> None:
    traffic = Traffic()
    before = traffic.copy()
    traffic.count_scan(1, 100, 10)
    traffic.count_merge(2, 50, 20)
    traffic.count_scan(3, 10, 5_000)
    counts = since(before, traffic)
    assert hottest(counts.heat(RankBy.ROWS), (), 2) == [1, 2]
    assert hottest(counts.heat(RankBy.READS), (), 9) == [1, 3]
    assert hottest(counts.heat(RankBy.WRITES), (), 9) == [2]
    assert hottest(counts.heat(RankBy.BYTES), (), 1) == [3]
    assert hottest(counts.heat(RankBy.ROWS), (3, 7), 9) == [3, 7]


# --- samples ------------------------------------------------------------------------------------


def test_sample_finds_the_hot_key_and_about_its_rate_at_any_load() -> None:
    """A tenth of the rows is of one key; so much goes by that few rows are taken."""
    time, rng = SetTime(), random.Random(1)
    traffic = Traffic(time)
    partitioner = partitioner_of("murmur2", 16)
    rows, batches = 1_000, 400
    with traffic.sampling() as sampler:
        for _ in range(batches):
            keys = [
                b"hot" if rng.random() < 0.1 else b"%d" % rng.randrange(10**6) for _ in range(rows)
            ]
            traffic.count_reads(partitioner.partitions_of(keys), keys, keys)
            time.now += 0.001
    home = partitioner.partition_of(b"hot")
    found = sampler.hottest([home], 1)
    assert [(key.partition_id, key.key, key.writes) for key in found] == [(home, b"hot", 0)]
    assert found[0].reads == pytest.approx(rows * batches / 10, rel=0.2)
    slots = 0.4 / traffic_module.SLOT_S + 1
    assert sampler.reads.offered == rows * batches
    assert sampler.reads.taken <= slots * traffic_module.SLOT_ROWS * 6
    assert sampler.writes.taken == 0


def test_sample_of_little_traffic_takes_every_row() -> None:
    traffic = Traffic(SetTime())
    with traffic.sampling() as sampler:
        for _ in range(50):
            traffic.count_writes(ids(1, 2), [b"a", b"b"], np.array([1, 1]))
            traffic.count_writes(ids(1), [b"a"], np.array([1]))
    assert sampler.writes.counts == {(1, b"a"): 100, (2, b"b"): 50}


def test_sample_forgets_rare_keys_and_says_by_how_much_counts_may_be_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic_module, "KEYS_KEPT", 10)
    monkeypatch.setattr(traffic_module, "SLOT_ROWS", 10**9)
    traffic = Traffic(SetTime())
    true = 0
    with traffic.sampling() as sampler:
        for n in range(3_000):
            often = n % 3 == 0
            true += often
            key = b"often" if often else b"%d" % n
            traffic.count_reads(ids(1), [key], [b""])
            assert len(sampler.reads.counts) <= 21
    assert true - sampler.reads.missed_max <= sampler.reads.counts[1, b"often"] <= true
    assert sampler.reads.missed_max < 3_000 / 10


def test_sample_of_some_partitions_takes_only_theirs() -> None:
    traffic = Traffic(SetTime())
    with traffic.sampling([2]) as sampler:
        traffic.count_reads(ids(1, 2, 1), [b"a", b"b", b"c"], [b"", b"", b""])
        traffic.count_reads(ids(1), [b"a"], [b""])
    assert (sampler.reads.counts, sampler.reads.offered) == ({(2, b"b"): 1}, 1)


def test_sampling_ends_with_its_context_and_is_bounded_in_number() -> None:
    traffic = Traffic(SetTime())
    with traffic.sampling() as first:
        more = [traffic.sampling() for _ in range(traffic_module.SAMPLERS_MAX - 1)]
        for one in more:
            one.__enter__()
        with pytest.raises(ResourceExhaustedError), traffic.sampling():
            pass
        for one in more:
            one.__exit__(None, None, None)
    traffic.count_reads(ids(1), [b"a"], [b""])
    assert first.reads.offered == 0


# --- over gRPC ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    script = Script(primaries={NOT_OURS: 2}, max_value_bytes=1024 * 1024)
    data = tmp_path_factory.mktemp("traffic") / "n1"
    with ScriptedCoordinator(script) as coordinator, running_node(data, coordinator) as running:
        yield running


def stub_of(node: NodeProcess) -> traffic_pb2_grpc.TrafficStub:
    return traffic_pb2_grpc.TrafficStub(node.channel)


def put(node: NodeProcess, *keys: bytes) -> None:
    stub = kv_pb2_grpc.KeyValueStub(node.channel)
    stub.BatchWrite(
        kv_pb2.BatchWriteRequest(
            table_version=1,
            keys=keys,
            values=[b"v" * 10] * len(keys),
            partition_ids=partitions_of(list(keys)),
        ),
        timeout=60,
    )


def key_here(tag: str) -> bytes:
    return next(k for n in range(99) if partitions_of([k := b"%s%d" % (tag.encode(), n)]) != [5])


def test_get_traffic_tells_counters_of_this_process(node: NodeProcess) -> None:
    stub, key = stub_of(node), key_here("counted")
    before = stub.GetTraffic(traffic_pb2.GetTrafficRequest(), timeout=60)
    put(node, key, key)
    after = stub.GetTraffic(traffic_pb2.GetTrafficRequest(), timeout=60)
    home = partitions_of([key])[0]
    old = dict(zip(before.partition_ids, before.writes, strict=True))
    written = dict(zip(after.partition_ids, after.written_bytes, strict=True))
    new = dict(zip(after.partition_ids, after.writes, strict=True))
    assert new[home] - old.get(home, 0) == 2
    assert written[home] >= 2 * (10 + len(key))
    assert after.elapsed_us > before.elapsed_us
    assert NOT_OURS not in new


def test_sample_keys_answers_when_the_time_is_over(node: NodeProcess) -> None:
    stub, key = stub_of(node), key_here("sampled")
    request = traffic_pb2.SampleKeysRequest(
        duration_ms=1_500, partitions_max=4, keys_max=2, rank_by=traffic_pb2.RANK_BY_WRITES
    )
    call = stub.SampleKeys.future(request, timeout=60)
    wrote = 0
    while not call.done():
        put(node, key)
        wrote += 1
    sample = call.result()
    assert sample.elapsed_us >= 1_490_000  # a timer may be a little early
    rows = zip(sample.partition_ids, sample.keys, sample.writes, strict=True)
    found = {(p, k): writes for p, k, writes in rows}
    assert 0 < found[partitions_of([key])[0], key] <= wrote
    assert 0 < sample.written.taken <= sample.written.rows <= wrote


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"duration_ms": 49}, InvalidArgumentError),
        ({"duration_ms": 60_001}, InvalidArgumentError),
        ({"partitions_max": 0}, InvalidArgumentError),
        ({"partitions_max": 65}, InvalidArgumentError),
        ({"keys_max": 101}, InvalidArgumentError),
        ({"partition_ids": [70_000]}, InvalidArgumentError),
        ({"rank_by": 7}, InvalidArgumentError),
        ({"cluster_id": "another"}, WrongClusterError),
    ],
)
def test_sample_keys_refuses_what_is_out_of_bounds(
    node: NodeProcess, fields: dict[str, object], kind: type[KoinonError]
) -> None:
    given = {"duration_ms": 50, "partitions_max": 1, "keys_max": 1, **fields}
    request = traffic_pb2.SampleKeysRequest(**given)  # type: ignore[arg-type]
    assert isinstance(refusal(lambda: stub_of(node).SampleKeys(request, timeout=60)), kind)


# --- replication lag ----------------------------------------------------------------------------


class Sink:
    """A follower's end that takes everything."""

    queued_bytes = 0

    def send(self, message: Any) -> None:
        pass

    def send_encoded(self, parts: Any) -> None:
        pass


def test_lag_is_what_was_sent_and_not_acknowledged_and_how_old_that_is() -> None:
    stream = FollowerStream(cast(Any, Sink()), NodeNumber(2), 1, 0, 1 << 20)

    def send(number: int, rows: int, at: float) -> None:
        of_group = (ids(1), np.ones((4, 1), np.uint64), [b"%03d" % n for n in range(rows)])
        touched, columns, keys = of_group
        epochs, previous, lasts, _ = columns
        group = GroupRows(
            number, touched, epochs, previous, lasts, keys, keys, in_partition(1, rows), {}, at
        )
        stream.send_batch(Batches(group), np.array([True]))

    assert stream.lag(50.0) == (2, 0, 0, 0.0)
    send(7, 3, 10.0)
    send(8, 2, 11.0)
    assert stream.lag(12.5)[:2] == (2, 5)
    assert stream.lag(12.5).age_s == 2.5
    list(stream.acknowledged(7))
    assert stream.lag(12.5)[:2] == (2, 2)
    assert stream.lag(12.5).age_s == 1.5
    list(stream.acknowledged(8))
    assert stream.lag(12.5) == (2, 0, 0, 0.0)
