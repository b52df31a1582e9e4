"""Fate rules: what is tried again, and what the caller is told (safety rule 17)."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon.core.retry import (
    RetryAfter,
    RetryPolicy,
    decide,
    final_error,
)
from koinon_proto.contract import errors
from koinon_proto.contract.errors import KoinonError, NotSentError
from tests.client.kit.tables import not_primary

UNKNOWN = errors.UnknownFateError(reason="cut")
INTERNAL = errors.InternalError(reason="bug")
FULL = errors.StorageFullError(node_id="n1", reason="map")
OFFLINE = errors.PartitionOfflineError(partition_id=1, reason="no live replica")
LEASE = errors.LeaseExpiredError(node_id="n1")
BEHIND = errors.TableBehindError(table_version=1, required_version=2)
BUSY = errors.ResourceExhaustedError(resource="writer queue", limit=9)
NOT_READY = errors.ClusterNotReadyError(registered_nodes=1, bootstrap_nodes=3)
TOO_FEW = errors.NotEnoughReplicasError(partition_id=1, in_sync=1, min_in_sync=2)
NOT_SENT = NotSentError(reason="no connection")
CONDITION = errors.ConditionFailedError(expected_version=1, current_version=2)


def over_quota(retry_after_ms: int) -> errors.QuotaExceededError:
    return errors.QuotaExceededError(
        keyspace="k", unit="rows", limit=9, retry_after_ms=retry_after_ms
    )


def decided(error: KoinonError, *, idempotent: bool = False, attempt: int = 0) -> RetryAfter | None:
    return decide(
        error, attempt=attempt, idempotent=idempotent, policy=RetryPolicy(), random=Random(1)
    )


@pytest.mark.parametrize("error", [not_primary(1), OFFLINE, LEASE, NOT_READY, NOT_SENT])
def test_decide_stale_table_or_unsent_refreshes_and_retries(error: KoinonError) -> None:
    again = decided(error)
    assert again is not None
    assert again.refresh


@pytest.mark.parametrize("error", [BEHIND, BUSY])
def test_decide_other_retriable_refusal_only_backs_off(error: KoinonError) -> None:
    again = decided(error)
    assert again is not None
    assert not again.refresh
    assert again.delay_s > 0


@pytest.mark.parametrize("attempt", [0, 3, 50])
def test_decide_over_quota_waits_for_what_it_says_and_a_backoff_on_top(attempt: int) -> None:
    again = decided(over_quota(300), attempt=attempt)
    assert again is not None
    assert not again.refresh
    assert 0.3 < again.delay_s <= 1.0
    assert (again.delay_s > 0.5) == (attempt == 50)


@pytest.mark.parametrize("attempt", [0, 3, 50])
def test_decide_over_quota_looks_again_within_a_second_at_a_time_of_its_own(attempt: int) -> None:
    found = [
        decide(
            over_quota(3_600_000),
            attempt=attempt,
            idempotent=False,
            policy=RetryPolicy(),
            random=Random(seed),
        )
        for seed in range(20)
    ]
    delays = {again.delay_s for again in found if again is not None}
    assert len(delays) == 20
    assert min(delays) >= 0.5
    assert max(delays) <= 1.0
    assert {again.not_before_s for again in found if again is not None} == {3_600}


def test_final_error_over_quota_at_the_deadline_is_itself() -> None:
    error = over_quota(7_000)
    assert final_error(error, write=True, maybe_applied=False, timed_out_ms=5_000) is error
    unknown = final_error(error, write=True, maybe_applied=True, timed_out_ms=5_000)
    assert isinstance(unknown, errors.UnknownFateError)


@pytest.mark.parametrize("error", [INTERNAL, FULL, CONDITION])
@pytest.mark.parametrize("idempotent", [False, True])
def test_decide_final_refusal_is_never_retried(error: KoinonError, idempotent: bool) -> None:
    assert decided(error, idempotent=idempotent) is None


def test_decide_unknown_fate_is_retried_only_if_idempotent() -> None:
    assert decided(UNKNOWN) is None
    assert decided(UNKNOWN, idempotent=True) is not None


@given(attempt=st.integers(0, 1_000), seed=st.integers())
def test_backoff_any_attempt_is_bounded_and_jittered(attempt: int, seed: int) -> None:
    policy = RetryPolicy(first_s=0.02, max_s=0.5)
    delay = policy.backoff_s(attempt, Random(seed))
    ceiling = min(0.5, 0.02 * 2 ** min(attempt, 16))
    assert ceiling / 2 <= delay <= ceiling


@pytest.mark.parametrize("error", [not_primary(1), OFFLINE, LEASE, BEHIND, NOT_SENT])
def test_decide_partition_that_changes_hands_is_asked_for_often(error: KoinonError) -> None:
    again = decided(error, attempt=20)
    assert again is not None
    assert 0.05 <= again.delay_s <= 0.1


@pytest.mark.parametrize("error", [BUSY, TOO_FEW])
def test_decide_lack_that_may_last_is_asked_for_rarely(error: KoinonError) -> None:
    again = decided(error, attempt=20)
    assert again is not None
    assert again.delay_s >= 0.25


@pytest.mark.parametrize("last", [UNKNOWN, FULL, OFFLINE, NOT_SENT])
def test_final_error_after_an_unknown_attempt_of_a_write_is_unknown(last: KoinonError) -> None:
    told = final_error(last, write=True, maybe_applied=True, timed_out_ms=5)
    assert told.maybe_applied


def test_final_error_of_a_defect_is_unknown_to_a_write_only() -> None:
    assert final_error(INTERNAL, write=True, maybe_applied=False).maybe_applied
    assert final_error(INTERNAL, write=False, maybe_applied=False) is INTERNAL


@pytest.mark.parametrize("last", [OFFLINE, LEASE, BEHIND, NOT_SENT, not_primary(1)])
def test_final_error_at_the_deadline_is_unavailable_and_names_the_reason(
    last: KoinonError,
) -> None:
    told = final_error(last, write=True, maybe_applied=False, timed_out_ms=70)
    assert type(told) is errors.UnavailableError
    assert str(last) in str(told)
    assert "70 ms" in str(told)
    assert told.__cause__ is last


@pytest.mark.parametrize("last", [NOT_READY, BUSY, FULL, CONDITION])
def test_final_error_that_says_more_than_unavailable_is_kept(last: KoinonError) -> None:
    assert final_error(last, write=True, maybe_applied=False, timed_out_ms=70) is last


def test_final_error_of_an_unanswered_read_is_unavailable() -> None:
    told = final_error(UNKNOWN, write=False, maybe_applied=False)
    assert type(told) is errors.UnavailableError


def test_decide_wrong_cluster_refreshes_the_table_and_tries_again() -> None:
    again = decided(errors.WrongClusterError(expected_cluster_id="b", actual_cluster_id="a"))
    assert again is not None
    assert again.refresh
