"""Quotas in simulated time: shares, what is let in under overload, debt, cuts, changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from koinon_node.core.quotas import BURST_S, Quota, Quotas, Share, shares_of
from koinon_proto.contract.errors import QuotaExceededError
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceId, KeyspaceList, Keyspaces
from koinon_proto.contract.table import ClusterConfig

CONFIG = ClusterConfig(
    cluster_id="c",
    partitioner="murmur2",
    partition_count=16,
    replication_factor=1,
    min_in_sync=1,
    bootstrap_nodes=1,
    max_value_bytes=1_000_000,
)


def keyspace(number: int = 1, base: int = 16, count: int = 8, **limits: int) -> Keyspace:
    return Keyspace(
        keyspace_id=KeyspaceId(number),
        name=f"k{number}",
        base=base,
        partition_count=count,
        partitioner="murmur2",
        replication_factor=1,
        min_in_sync=1,
        max_value_bytes=1_000_000,
        max_rows_per_s=limits.get("rows", 0),
        max_bytes_per_s=limits.get("size", 0),
    )


def quota(part: float = 1.0, **limits: int) -> Quota:
    return Quota(Share(keyspace(**limits), part))


def sizes(count: int, each: int = 1) -> np.ndarray:
    return np.full(count, each, np.int64)


def ids(*partition_ids: int) -> np.ndarray:
    return np.array(partition_ids, np.uint32)


def let_in(of: Quota, times: Iterable[float], rows: int = 1, size: int = 1) -> int:
    """Return how many rows are let in of requests at these times."""
    return sum(rows for now in times if of.refusal(now, rows, size) is None)


# --- shares ------------------------------------------------------------------------------------


def known(*keyspaces: Keyspace) -> Keyspaces:
    return Keyspaces(CONFIG, KeyspaceList(keyspaces=keyspaces))


def test_shares_are_those_of_the_partitions_led_and_add_up_to_the_limit() -> None:
    all_of_them = known(keyspace(1, rows=900), keyspace(2, base=24, count=4))
    epochs = np.zeros((3, 28), np.uint64)  # of three nodes
    epochs[0, [0, 16, 17, 24]] = 5
    epochs[1, [18, 19, 20]] = 5
    epochs[2, [21, 22, 23, 27]] = 5
    shares = [shares_of(all_of_them, node) for node in epochs]
    assert [[share.keyspace.name for share in of_node] for of_node in shares] == [["k1"]] * 3
    assert [of_node[0].part for of_node in shares] == [2 / 8, 3 / 8, 3 / 8]


def test_no_limit_anywhere_gives_no_shares() -> None:
    assert shares_of(known(keyspace()), np.ones(24, np.uint64)) == ()
    gone = replace(keyspace(rows=5), is_dropping=True)
    assert shares_of(known(gone), np.ones(24, np.uint64)) == ()


def test_partitions_come_under_the_quota_of_their_own_keyspace() -> None:
    quotas = Quotas()
    limited = known(keyspace(1, rows=10), keyspace(2, base=30, rows=20))
    shares = shares_of(limited, np.ones(38, np.uint64))
    found = [quotas.of(shares, p) for p in (0, 15, 16, 23, 24, 29, 30, 37)]
    assert [of.name if of else None for of in found] == [
        *(None, None, "k1", "k1", None, None, "k2", "k2")
    ]


# --- overload ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "rows"), [(300, 1), (1_000, 1), (1_000, 3), (20_000, 30), (20_000, 400)]
)
def test_ten_seconds_of_overload_let_in_the_limit_within_two_percent(limit: int, rows: int) -> None:
    """Of three nodes, each with its share. It had not been used before."""
    parts, asked_per_s = (2 / 8, 3 / 8, 3 / 8), 1_500
    nodes = [quota(part, rows=limit) for part in parts]
    times = [n / asked_per_s for n in range(10 * asked_per_s)]
    let = sum(let_in(node, times, rows) for node in nodes)
    assert 10 * limit * 0.98 <= let <= 10 * limit * 1.02
    assert let <= limit * (10 + BURST_S) + len(parts) * rows


def test_bytes_are_held_to_as_rows_are() -> None:
    of = quota(rows=1_000_000, size=100_000)
    let = let_in(of, (n / 1_000 for n in range(10_000)), size=700)
    assert let * 700 == pytest.approx(10 * 100_000, rel=0.02)
    refused = of.refusal(10.0, 1, 700)
    assert refused is not None
    assert (refused.unit, refused.limit, refused.keyspace) == ("bytes", 100_000, "k1")


def test_use_below_the_limit_is_never_refused() -> None:
    of = quota(rows=1_000)
    assert let_in(of, (n / 990 for n in range(5_000))) == 5_000
    assert of.refused_rows == 0


# --- debt --------------------------------------------------------------------------------------


def test_what_is_larger_than_the_bucket_is_let_in_and_paid_for_later() -> None:
    of = quota(rows=100)
    assert of.refusal(0.0, 510) is None
    refused = of.refusal(0.0)
    assert refused is not None
    assert refused.retry_after_ms == pytest.approx(5_000, abs=2)
    assert of.refusal((refused.retry_after_ms - 3) / 1_000) is not None
    assert of.refusal(refused.retry_after_ms / 1_000) is None


def test_bytes_that_a_read_finds_are_paid_for_by_the_next() -> None:
    of = quota(size=1_000)
    assert of.fits(0.0, 50)
    of.spend(50, 3_100)
    assert not of.fits(0.0, 1)
    assert of.cut(0.0, ids(16), sizes(1, 0))[16].retry_after_ms == pytest.approx(3_000, abs=2)
    assert of.fits(3.01, 1)


def test_room_is_what_is_left_and_one_at_least() -> None:
    of = quota(rows=100, size=10_000)
    assert of.room(0.0) == (10, 1_000)
    of.spend(9, 1_000)
    with pytest.raises(QuotaExceededError) as refused:
        of.room(0.0)
    assert refused.value.unit == "bytes"
    assert of.room(0.0002) == (1, 2)
    assert quota(rows=100).room(0.0)[1] > 1 << 30


# --- cuts --------------------------------------------------------------------------------------


def test_request_over_many_partitions_is_cut_between_them() -> None:
    of = quota(rows=60)
    partition_ids = ids(16, 17, 18, 16, 17, 18, 16, 19)  # 6 may pass: 3 and 2, and 1 more
    refusals = of.cut(0.0, partition_ids, sizes(8))
    assert set(refusals) == {19}
    assert of.refused_rows == 1
    assert refusals[19].retry_after_ms == pytest.approx(1000 / 60, abs=2)
    assert set(of.cut(0.0, partition_ids, sizes(8))) == {16, 17, 18, 19}
    assert of.refused_rows == 9


def test_cut_begins_where_the_last_one_ended() -> None:
    of, now, let = quota(rows=1_000), 0.0, dict.fromkeys(range(16, 24), 0)
    wanted = ids(*range(16, 24)).repeat(50)
    for _ in range(400):
        refusals = of.cut(now, wanted, sizes(len(wanted)))
        for p in let.keys() - refusals.keys():
            let[p] += 50
        now += 0.025
    assert sum(let.values()) == pytest.approx(10_000, rel=0.02)
    assert max(let.values()) - min(let.values()) <= 50


def test_chunks_of_a_load_count_for_their_rows_and_bytes() -> None:
    of = quota(rows=100, size=1_000)
    refusals = of.cut(0.0, ids(16, 17, 18), sizes(3, 60), np.array([4, 5, 700]))
    assert set(refusals) == {18}
    assert refusals[18].unit == "bytes"
    assert of.refused_rows == 700


def test_cut_of_what_fits_refuses_nothing() -> None:
    of = quota(rows=100)
    assert of.cut(0.0, ids(*range(16, 24)), sizes(8)) == {}
    assert of.refused_rows == 0


# --- changes -----------------------------------------------------------------------------------


def test_another_limit_or_share_counts_at_once_and_debt_stays() -> None:
    quotas = Quotas()
    epochs = np.ones(24, np.uint64)

    def now_with(rows: int, led: int = 8) -> Quota | None:
        epochs[16:] = np.arange(8) < led
        return quotas.of(shares_of(known(keyspace(rows=rows)), epochs), 16)

    of = now_with(100)
    assert of is not None
    assert of.refusal(0.0, 210) is None  # 2 s of debt
    assert now_with(1_000) is of
    refused = of.refusal(0.0)
    assert refused is not None
    assert refused.limit == 1_000
    assert refused.retry_after_ms == pytest.approx(200, abs=2)
    assert now_with(1_000, led=4) is of
    refused = of.refusal(0.0)
    assert refused is not None
    assert refused.limit == 1_000
    assert refused.retry_after_ms == pytest.approx(400, abs=2)
    assert let_in(of, (1 + n / 1_000 for n in range(10_000))) == pytest.approx(5_000, rel=0.02)


def test_limit_that_is_taken_away_lets_all_in_and_what_was_refused_stays_counted() -> None:
    quotas, epochs = Quotas(), np.ones(24, np.uint64)
    of = quotas.of(shares_of(known(keyspace(rows=100, size=10)), epochs), 16)
    assert of is not None
    assert let_in(of, [0.0] * 5, size=1_000) == 1
    assert of.refusal(60.0, size=1) is not None
    assert quotas.of(shares_of(known(keyspace(rows=100)), epochs), 16) is of
    assert of.refusal(60.0) is None
    assert quotas.of(shares_of(known(keyspace(rows=100, size=10)), epochs), 16) is of
    assert of.refusal(60.0) is None, "what was overspent is forgotten with the limit"
    assert quotas.refused_rows() == {"k1": 5}
    other = keyspace(2, rows=5)
    assert quotas.of(shares_of(known(other), epochs), 16) is not of
    assert quotas.refused_rows() == {"k1": 5, "k2": 0}
