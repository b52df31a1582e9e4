"""Rates, skew and the blame for heat, from counters and samples."""

from __future__ import annotations

import numpy as np
import pytest

from koinon.operate.judge.hotspots import (
    MEASURES,
    READS,
    WRITES,
    FollowerLag,
    KeySample,
    NodeCounters,
    RankBy,
    Rates,
    SampledKey,
    behind,
    blame,
    group_of,
    hottest,
    rates,
    skew_of,
)
from koinon_proto.partitioner import partitioner

PARTITIONS = 8


def counters(
    elapsed_s: float, *reads: tuple[int, int], lags: tuple[FollowerLag, ...] = ()
) -> NodeCounters:
    counts = np.zeros((MEASURES, PARTITIONS))
    for partition_id, count in reads:
        counts[READS, partition_id] = count
    return NodeCounters(elapsed_s=elapsed_s, counts=counts, followers=lags)


def rates_of(*reads: float, rows: int = 100_000) -> Rates:
    columns = np.zeros((MEASURES, len(reads)))
    columns[READS] = reads
    return Rates(partitions=columns, rows=rows)


def key(partition_id: int, name: bytes, reads: float, taken: float = 100) -> SampledKey:
    return SampledKey(
        partition_id=partition_id,
        key=name,
        reads_per_second=reads,
        writes_per_second=0.0,
        taken=taken,
    )


def test_rates_are_what_was_counted_by_each_nodes_own_time() -> None:
    before = {1: counters(10.0, (0, 100)), 2: counters(50.0, (1, 7))}
    after = {1: counters(12.0, (0, 300)), 2: counters(52.5, (1, 7), (0, 50))}
    found = rates(before, after, partitions=PARTITIONS, seconds=2.0)
    assert found.partitions[READS, 0] == 100 + 20  # it has moved in between
    assert found.nodes[1][READS] == 100
    assert found.nodes[2][READS] == 20
    assert found.rows == 250


def test_rates_of_a_node_that_started_anew_are_of_its_new_process() -> None:
    found = rates(
        {1: counters(500.0, (0, 10**6))},
        {1: counters(1.0, (0, 40))},
        partitions=PARTITIONS,
        seconds=2.0,
    )
    assert found.nodes[1][READS] == 40


def test_rates_of_a_node_that_was_silent_before_are_unknown() -> None:
    found = rates({}, {1: counters(500.0, (0, 10**6))}, partitions=PARTITIONS, seconds=2.0)
    assert found.nodes == {}
    assert found.total[READS] == 0


def test_lag_of_a_follower_is_that_behind_all_its_primaries() -> None:
    def lag(records: int, oldest_s: float) -> FollowerLag:
        return FollowerLag(node_number=3, records=records, bytes=records, oldest_s=oldest_s)

    found = behind({1: counters(1.0, lags=(lag(5, 0.5),)), 2: counters(1.0, lags=(lag(2, 0.9),))})
    assert (found[3].records, found[3].oldest_s) == (7, 0.9)


def test_skew_of_even_and_of_one_hot_partition() -> None:
    even = skew_of(np.full(8, 10.0))
    assert (even.max_over_mean, even.coefficient_of_variation) == (1.0, 0.0)
    one = skew_of(np.array([80.0, 0, 0, 0, 0, 0, 0, 0]))
    assert one.max_over_mean == 8.0
    assert one.coefficient_of_variation == pytest.approx(7**0.5)
    assert skew_of(np.zeros(8)).max_over_mean == 0.0


def test_hottest_have_shares_and_their_keys() -> None:
    # a key that was taken four times may be there by chance
    sample = KeySample(
        keys=[key(1, b"a", 10), key(1, b"hot", 500), key(2, b"b", 90), key(1, b"rare", 900, 4)]
    )
    found = hottest(rates_of(0, 600, 100, 100), RankBy.ALL, 2, sample=sample, keys_max=1)
    assert [(one.partition_id, one.share, one.times_mean) for one in found] == [
        (1, 0.75, 3.0),
        (2, 0.125, 0.5),
    ]
    (top,) = found[0].keys
    assert top.key == b"hot"
    assert top.share == pytest.approx(5 / 6)
    assert hottest(rates_of(0, 0), RankBy.ALL, 5) == []


def test_hottest_by_writes_ignores_reads() -> None:
    both = rates_of(500, 1, 0)
    both.partitions[WRITES] = (1, 20, 0)
    found = hottest(both, RankBy.WRITES, 5)
    assert [one.partition_id for one in found] == [1, 0]


def test_blame_names_the_key_that_makes_the_heat_else_none() -> None:
    sample = KeySample(keys=[key(0, b"hot", 900), key(1, b"a", 10)])
    heat = rates_of(1000, 800, *[1] * 14)
    found = blame(hottest(heat, RankBy.ALL, 9, sample=sample, keys_max=3), rows=100_000)
    assert [(one.partition.partition_id, one.key and one.key.key) for one in found] == [
        (0, b"hot"),
        (1, None),
    ]


def test_blame_of_few_rows_is_nothing() -> None:
    heat = rates_of(1000, *[1] * 14, rows=40)
    assert blame(hottest(heat, RankBy.ALL, 9), rows=40) == []
    assert blame(hottest(rates_of(1000, *[1] * 14), RankBy.ALL, 9), rows=999) == []
    chance = rates_of(4, *[1] * 200, rows=2_000)  # some 40 rows: may be chance
    assert blame(hottest(chance, RankBy.ALL, 1), rows=2_000) == []


def test_group_is_blamed_where_several_keys_of_one_router_make_the_heat() -> None:
    sample = [key(0, b"shop7/%d" % n, 10) for n in range(20)] + [key(0, b"other/1", 30)]
    sample += [key(1, b"other/%d" % n, 500) for n in range(9)]
    until = partitioner("murmur2(until:2f)", PARTITIONS).routing_bytes
    found = group_of(0, sample, until)
    assert found is not None
    assert (found.routing_bytes, round(found.share, 2)) == (b"shop7", 0.87)
    assert group_of(0, sample, lambda whole: whole) is None, "no key alone has so much"
    assert group_of(0, [key(0, b"shop7/1", 10)], until) is None, "it is one key"
    assert group_of(2, sample, until) is None
