"""The bucket that paces moves."""

from __future__ import annotations

import pytest

from koinon_node.core.pacing import TokenBucket, page_bytes


def test_bucket_mean_rate_is_the_rate() -> None:
    bucket, now, spent = TokenBucket(), 0.0, 0
    while now < 100.0:
        wait_s = bucket.wait_s(1_000.0, now)
        if wait_s:
            now += wait_s
            continue
        bucket.spend(700)
        spent += 700
    assert spent == pytest.approx(100_000, rel=0.02)


def test_bucket_without_a_limit_never_waits() -> None:
    bucket = TokenBucket()
    for step in range(10):
        assert bucket.wait_s(0, float(step)) == 0.0
        bucket.spend(1 << 30)


def test_bucket_rate_that_rises_counts_at_once() -> None:
    bucket = TokenBucket()
    bucket.wait_s(10, 0.0)
    bucket.spend(1_000)
    assert bucket.wait_s(10, 0.0) == pytest.approx(99.75, abs=0.5)
    assert bucket.wait_s(1_000, 0.0) < 1.1
    assert bucket.wait_s(0, 0.0) == 0.0


def test_bucket_idle_time_is_not_saved_up() -> None:
    bucket = TokenBucket()
    bucket.wait_s(1_000, 0.0)
    assert bucket.wait_s(1_000, 3_600.0) == 0.0
    bucket.spend(1_000)
    assert bucket.wait_s(1_000, 3_600.0) == pytest.approx(0.75)


def test_bucket_what_was_spent_in_advance_and_not_used_is_given_back() -> None:
    bucket = TokenBucket()
    bucket.wait_s(1_000, 0.0)
    bucket.spend(1_000)
    bucket.spend(-900)
    assert bucket.wait_s(1_000, 0.0) == pytest.approx(0.1)


def test_page_is_small_where_the_rate_is() -> None:
    most = 1 << 20
    sizes = [page_bytes(rate, most) for rate in (0, 1_000, 10_000_000, 10**9)]
    assert sizes == [most, 64 * 1024, 250_000, most]
