"""Single operations: lanes, what a batch's outcome means to each of its operations."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from koinon.core.batching import Deferred, Kind, NodeQueue, PendingOperation, settle_singles
from koinon.core.operations import ReadReply, WriteReply
from koinon.core.retry import AT_ONCE, RetryPolicy
from koinon.core.routing import Router
from koinon_proto.contract import errors
from koinon_proto.contract.errors import KoinonError, NotSentError, ReplyTooLargeError
from tests.client.kit.tables import not_primary, update

UNKNOWN = errors.UnknownFateError(reason="cut")
LEASE = errors.LeaseExpiredError(node_id="n1")


def over_quota(retry_after_ms: int) -> KoinonError:
    return errors.QuotaExceededError(
        keyspace="k", unit="rows", limit=9, retry_after_ms=retry_after_ms
    )


def single(kind: Kind = Kind.GET, partition_id: int = 0, **options: object) -> PendingOperation:
    return PendingOperation(
        kind,
        b"key",
        partition_id,
        deadline=5.0,
        timeout_ms=5_000,
        **options,  # type: ignore[arg-type]
    )


def lane(rows_max: int = 4, bytes_max: int = 1_000) -> NodeQueue:
    return NodeQueue("host1:1", write=True, rows_max=rows_max, bytes_max=bytes_max)


def settle(
    batch: list[PendingOperation], outcome: ReadReply | WriteReply | KoinonError
) -> Deferred | None:
    deferred = settle_all(batch, outcome)
    assert len(deferred) <= 1
    return deferred[0] if deferred else None


def settle_all(
    batch: list[PendingOperation], outcome: ReadReply | WriteReply | KoinonError
) -> list[Deferred]:
    router = Router()
    router.on_update(update())
    policy = RetryPolicy(random=Random(1))
    return settle_singles(batch, outcome, revision=1, router=router, policy=policy)


def written(rows: int, **fields: object) -> WriteReply:
    columns: dict[str, object] = {
        "versions": list(range(10, 10 + rows)),
        "absent": (),
        "present": (),
        "refused": {},
        "row_errors": {},
    }
    return WriteReply(**(columns | fields))  # type: ignore[arg-type]


def test_take_returns_in_order_up_to_the_rows_and_marks_as_sent() -> None:
    queue = lane(rows_max=4)
    operations = [single() for _ in range(6)]
    for operation in operations:
        queue.add(operation)
    assert queue.next_batch() == operations[:4]
    assert [operation.sent for operation in operations] == [True] * 4 + [False] * 2
    assert queue.next_batch() == operations[4:]
    assert queue.next_batch() == []


def test_take_stops_at_the_bytes_but_never_takes_nothing() -> None:
    queue = lane(bytes_max=100)
    for size in (300, 40, 40, 40):
        queue.add(single(Kind.PUT, value=b"x" * size))
    assert [len(queue.next_batch()) for _ in range(3)] == [1, 2, 1]


@pytest.mark.parametrize("emptied", [NodeQueue.next_batch, NodeQueue.drain])
def test_queue_gives_no_operation_whose_caller_is_gone(
    emptied: Callable[[NodeQueue], list[PendingOperation]],
) -> None:
    queue = lane()
    gone, stays = single(), single()
    queue.add(gone)
    queue.add(stays)
    gone.abandon()
    assert emptied(queue) == [stays]
    assert (len(queue), gone.sent) == (0, False)


def test_reply_too_large_halves_the_lane_and_small_ones_widen_it_again() -> None:
    queue = lane(rows_max=8)
    queue.on_reply_size(8, too_large=True)
    assert queue.rows_max == 4
    for _ in range(20):
        queue.on_reply_size(1, too_large=False)
    assert queue.rows_max == 8


def test_settle_reads_gives_each_its_own_result() -> None:
    batch = [single(), single(Kind.GET_ENTRY), single()]
    reply = ReadReply(
        values=[b"a", b"b", b""],
        missing=[2],
        versions=[1, 2, 0],
        expires_at_ms=[0, 9, 0],
        refused={},
    )
    assert settle(batch, reply) is None
    assert [operation.result for operation in batch] == [b"a", (b"key", b"b", 2, 9), None]


def test_settle_writes_gives_versions_and_whether_there_was_one() -> None:
    batch = [single(Kind.PUT), single(Kind.DELETE), single(Kind.DELETE)]
    assert settle(batch, written(3, absent=[2])) is None
    assert [operation.result for operation in batch] == [10, True, False]


def test_settle_partly_refused_parks_only_the_refused() -> None:
    batch = [single(partition_id=0), single(partition_id=1)]
    reply = ReadReply(
        values=[b"", b"b"], missing=[], versions=[], expires_at_ms=[], refused={0: not_primary(0)}
    )
    parked = settle(batch, reply)
    assert parked is not None
    assert parked.singles == [batch[0]]
    assert parked.again.refresh
    assert not batch[0].sent
    assert batch[1].result == b"b"


def test_settle_over_quota_parks_each_for_its_own_time_and_the_others_together() -> None:
    """If all came again at once, most of them would be refused again, and room go unused."""
    over = [single(Kind.PUT, partition_id=n) for n in range(200)]
    elsewhere = [single(Kind.PUT, partition_id=n) for n in range(200, 210)]
    refused: dict[int, KoinonError] = {n: over_quota(300) for n in range(200)}
    refused |= dict.fromkeys(range(200, 210), LEASE)
    for one in over:
        one.attempt = 5
    deferred = settle_all([*over, *elsewhere], written(210, refused=refused))
    (together,) = [d for d in deferred if d.again.refresh]
    assert together.singles == elsewhere
    apart = [d for d in deferred if not d.again.refresh]
    assert sorted(s.partition_id for d in apart for s in d.singles) == [*range(200)]
    assert len(apart) > 20
    assert all(0.3 < d.again.delay_s < 1.0 for d in apart)


def test_settle_row_error_fails_only_its_row() -> None:
    batch = [single(Kind.PUT, if_version=1), single(Kind.PUT)]
    failed = errors.ConditionFailedError(expected_version=1, current_version=2)
    assert settle(batch, written(2, row_errors={0: failed})) is None
    assert batch[0].error is failed
    assert batch[1].result == 11


@pytest.mark.parametrize(
    ("kind", "options", "repeated"),
    [
        (Kind.GET, {}, True),
        (Kind.PUT, {}, False),
        (Kind.DELETE, {}, False),
        (Kind.PUT, {"retry_unknown": True}, True),
        (Kind.PUT, {"retry_unknown": True, "if_version": 3}, False),
        (Kind.INCREMENT, {"retry_unknown": True}, False),
    ],
)
def test_settle_unknown_fate_is_repeated_only_where_that_does_no_harm(
    kind: Kind, options: dict[str, object], repeated: bool
) -> None:
    """One beside it in the batch does not change what becomes of an operation."""
    operation, other = single(kind, 0, **options), single(Kind.PUT, if_version=3)
    parked = settle([other, operation], UNKNOWN)
    assert (parked is not None and parked.singles == [operation]) is repeated
    assert other.error is UNKNOWN
    assert operation.error is (None if repeated else UNKNOWN)


def test_settle_final_refusal_after_an_unknown_attempt_is_unknown() -> None:
    operation = single(Kind.PUT, retry_unknown=True)
    settle([operation], UNKNOWN)
    settle([operation], errors.StorageFullError(node_id="n1", reason="map"))
    assert isinstance(operation.error, errors.UnknownFateError)


@pytest.mark.parametrize("rows", [1, 2])
def test_settle_reply_too_large_is_retried_while_it_can_shrink(rows: int) -> None:
    batch = [single() for _ in range(rows)]
    parked = settle(batch, ReplyTooLargeError(limit=9, actual=10))
    assert (parked is not None) == (rows > 1)


def test_settle_abandoned_operation_is_left_alone() -> None:
    gone, stays = single(Kind.PUT), single(Kind.PUT)
    gone.abandon()
    assert settle([gone, stays], written(2)) is None
    assert gone.result is None
    assert stays.result == 11


def test_expire_queued_is_unavailable_sent_write_is_unknown() -> None:
    queued, sent, read = single(Kind.PUT), single(Kind.PUT), single()
    sent.sent = read.sent = True
    for operation in (queued, sent, read):
        operation.expire()
    assert isinstance(queued.error, errors.UnavailableError)
    assert isinstance(sent.error, errors.UnknownFateError)
    assert isinstance(read.error, errors.UnavailableError)


def test_expire_names_the_reason_last_seen() -> None:
    operation = single(Kind.PUT)
    settle([operation], NotSentError(reason="no connection to host1:1"))
    operation.expire()
    assert "no connection to host1:1" in str(operation.error)
    assert not operation.error.maybe_applied  # type: ignore[union-attr]


def test_expire_after_the_end_changes_nothing() -> None:
    operation = single()
    operation.succeed(b"a")
    operation.expire()
    assert operation.error is None


def denied(*rows: int) -> errors.PermissionDeniedError:
    return errors.PermissionDeniedError(
        principal="user a", action="write", what="key b'key'", rows=rows
    )


def test_settle_a_refusal_by_rows_refuses_these_and_sends_the_others_again_at_once() -> None:
    batch = [single(Kind.PUT) for _ in range(4)]
    again = settle(batch, denied(1, 3))
    assert again is not None
    assert again.singles == [batch[0], batch[2]]
    assert again.again == AT_ONCE
    assert not any(operation.sent or operation.maybe_applied for operation in again.singles)
    for operation in (batch[1], batch[3]):
        assert isinstance(operation.error, errors.PermissionDeniedError)
        assert (operation.error.what, operation.error.rows) == ("key b'key'", ())


def test_settle_those_that_shared_a_refused_request_expires_without_anothers_refusal() -> None:
    batch = [single(Kind.PUT), single(Kind.PUT)]
    settle(batch, denied(0))
    batch[1].expire()
    assert isinstance(batch[1].error, errors.UnavailableError)
    assert "may not" not in str(batch[1].error)


def test_settle_a_refusal_without_rows_refuses_all() -> None:
    batch = [single(Kind.PUT), single(Kind.PUT)]
    assert settle(batch, denied()) is None
    assert {type(operation.error) for operation in batch} == {errors.PermissionDeniedError}


def test_operation_that_stands_in_two_queues_is_sent_once_at_a_time() -> None:
    first, second = lane(), lane()
    put = single(Kind.PUT)
    for queue in (first, second):
        queue.add(put)
    assert first.next_batch() == [put]
    assert second.next_batch() == [], "it is under way"
    assert settle([put], LEASE) is not None
    second.add(put)
    assert second.next_batch() == [put], "its next attempt"


def test_resume_of_an_earlier_attempt_does_nothing() -> None:
    put = single(Kind.PUT)
    earlier = settle([put], LEASE)
    assert earlier is not None
    assert put.resume(earlier)
    assert not put.resume(earlier), "it goes on already"
    later = settle([put], LEASE)
    assert later is not None
    assert not put.resume(earlier), "it waits in another attempt"
    assert put.resume(later)


def test_operation_ends_once() -> None:
    ended: list[PendingOperation] = []
    put = single(Kind.PUT, on_done=ended.append)
    put.succeed(7)
    put.fail(UNKNOWN)
    put.succeed(8)
    assert (put.result, put.error, ended) == (7, None, [put])
