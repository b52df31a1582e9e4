"""Fate rules: what is tried again, and what the caller is told (safety rule 17)."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon.core.retry import RetryAfter, RetryPolicy, final_error
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
    return RetryPolicy(random=Random(1)).decide(error, attempt=attempt, idempotent=idempotent)


WRONG = errors.WrongClusterError(expected_cluster_id="b", actual_cluster_id="a")
SOON, LATER = (0.05, 0.1), (0.25, 0.5)  # of the 20th attempt


@pytest.mark.parametrize(
    ("error", "refreshes", "bounds_s"),
    [
        (not_primary(1), True, SOON),  # the partition changes hands
        (OFFLINE, True, SOON),
        (LEASE, True, SOON),
        (NOT_SENT, True, SOON),
        (BEHIND, False, SOON),
        (NOT_READY, True, LATER),
        (WRONG, True, LATER),
        (BUSY, False, LATER),  # the lack may last
        (TOO_FEW, False, LATER),
    ],
)
def test_decide_a_refusal_that_passes_is_tried_again_after_a_backoff(
    error: KoinonError, refreshes: bool, bounds_s: tuple[float, float]
) -> None:
    first, late = decided(error), decided(error, attempt=20)
    assert first is not None
    assert late is not None
    assert first.refresh is late.refresh is refreshes
    assert 0 < first.delay_s <= 0.02
    assert bounds_s[0] <= late.delay_s <= bounds_s[1]


@pytest.mark.parametrize("attempt", [0, 3, 50])
def test_decide_over_quota_waits_for_what_it_says_and_a_backoff_on_top(attempt: int) -> None:
    again = decided(over_quota(300), attempt=attempt)
    assert again is not None
    assert not again.refresh
    assert 0.3 < again.delay_s <= 1.0
    assert (again.delay_s > 0.5) == (attempt == 50)


@pytest.mark.parametrize("attempt", [0, 3, 50])
def test_decide_over_quota_looks_again_within_a_second_at_a_time_of_its_own(attempt: int) -> None:
    policies = [RetryPolicy(random=Random(seed)) for seed in range(20)]
    hour = over_quota(3_600_000)
    found = [policy.decide(hour, attempt=attempt, idempotent=False) for policy in policies]
    delays = {again.delay_s for again in found if again is not None}
    assert len(delays) == 20
    assert min(delays) >= 0.5
    assert max(delays) <= 1.0
    assert {again.not_before_s for again in found if again is not None} == {3_600}


@pytest.mark.parametrize("error", [INTERNAL, FULL, CONDITION])
@pytest.mark.parametrize("idempotent", [False, True])
def test_decide_final_refusal_is_never_retried(error: KoinonError, idempotent: bool) -> None:
    assert decided(error, idempotent=idempotent) is None


def test_decide_unknown_fate_is_retried_only_if_idempotent() -> None:
    assert decided(UNKNOWN) is None
    assert decided(UNKNOWN, idempotent=True) is not None


@given(attempt=st.integers(0, 1_000), seed=st.integers())
def test_backoff_any_attempt_is_bounded_and_jittered(attempt: int, seed: int) -> None:
    delay = RetryPolicy(first_s=0.02, max_s=0.5, random=Random(seed)).backoff_s(attempt)
    ceiling = min(0.5, 0.02 * 2 ** min(attempt, 16))
    assert ceiling / 2 <= delay <= ceiling


UNAVAILABLE, UNKNOWN_FATE = errors.UnavailableError, errors.UnknownFateError
AFTER_UNKNOWN: dict[str, object] = {"write": True, "maybe_applied": True, "timed_out_ms": 70}
WRITE: dict[str, object] = {"write": True, "maybe_applied": False}
READ: dict[str, object] = {"write": False, "maybe_applied": False}
AT_DEADLINE = WRITE | {"timed_out_ms": 70}


@pytest.mark.parametrize(
    ("last", "facts", "kind"),
    [
        *((last, AFTER_UNKNOWN, UNKNOWN_FATE) for last in (UNKNOWN, FULL, OFFLINE, NOT_SENT)),
        (over_quota(7_000), AFTER_UNKNOWN, UNKNOWN_FATE),
        *((last, AT_DEADLINE, UNAVAILABLE) for last in (OFFLINE, LEASE, BEHIND, NOT_SENT)),
        (not_primary(1), AT_DEADLINE, UNAVAILABLE),
        (NOT_SENT, WRITE, UNAVAILABLE),
        (UNKNOWN, READ, UNAVAILABLE),
        (INTERNAL, WRITE, UNKNOWN_FATE),  # a defect may have written
    ],
)
def test_final_error_says_what_became_of_the_operation_and_names_its_cause(
    last: KoinonError, facts: dict[str, Any], kind: type[KoinonError]
) -> None:
    told = final_error(last, **facts)
    assert type(told) is kind
    if told is not last:
        assert told.__cause__ is last
    if facts is AT_DEADLINE:
        assert str(last) in str(told)
        assert "70 ms" in str(told)


@pytest.mark.parametrize(
    ("last", "facts"),
    [
        *((last, AT_DEADLINE) for last in (NOT_READY, BUSY, FULL, CONDITION, over_quota(7_000))),
        (INTERNAL, READ),
    ],
)
def test_final_error_that_says_more_than_unavailable_is_kept(
    last: KoinonError, facts: dict[str, Any]
) -> None:
    assert final_error(last, **facts) is last
