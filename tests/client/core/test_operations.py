"""Operations over many rows: every kind of partial refusal; only refused rows go again."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koinon.aio import AsyncClient
from koinon.client import Client
from koinon.core.operations import (
    Call,
    ReadReply,
    ReadRows,
    WriteOptions,
    WriteReply,
    WriteRows,
    attempt_timeout_s,
)
from koinon.core.retry import RetryPolicy
from koinon.core.routing import Router, Routing
from koinon.core.row_chunks import chunk_of
from koinon_proto.contract import errors
from koinon_proto.contract.errors import KoinonError, NotSentError
from tests.client.kit.tables import not_primary, update

UNKNOWN = errors.UnknownFateError(reason="cut")
BUSY = errors.ResourceExhaustedError(resource="queue", limit=1)
FULL = errors.StorageFullError(node_id="n1", reason="map")
LEASE = errors.LeaseExpiredError(node_id="n1")
KEYS = [b"key-%d" % i for i in range(60)]
POLICY = RetryPolicy(random=Random(1))


class Setup:
    """A router with a table, and operations over ``KEYS``."""

    def __init__(self) -> None:
        self.router = Router()
        self.router.on_update(update())
        self.ids = self.routing.partitioner.partitions_of(KEYS)

    @property
    def routing(self) -> Routing:
        assert self.router.routing is not None
        return self.router.routing

    def read(self, *, want_entries: bool = False) -> ReadRows:
        return ReadRows(KEYS, self.ids, POLICY, want_entries=want_entries)

    def write(self, *, retry_unknown: bool = False, if_absent: bool = False) -> WriteRows:
        chunk = chunk_of(0, KEYS, [b"v" + key for key in KEYS])
        options = WriteOptions(retry_unknown=retry_unknown, if_absent=if_absent)
        return WriteRows(chunk, self.ids, POLICY, options=options)


@pytest.fixture
def setup() -> Setup:
    return Setup()


def read_reply(call: Call, refused: dict[int, KoinonError] | None = None) -> ReadReply:
    refused = refused or {}
    gone = set(refused)
    values = [
        b"" if int(p) in gone else b"v" + key
        for key, p in zip(call.keys, call.partition_ids, strict=True)
    ]
    return ReadReply(
        values=values,
        missing=[],
        versions=[7] * len(values),
        expires_at_ms=[0] * len(values),
        refused=refused,
    )


def write_reply(
    refused: dict[int, KoinonError] | None = None,
    row_errors: dict[int, KoinonError] | None = None,
    present: Sequence[int] = (),
) -> WriteReply:
    return WriteReply(
        versions=(),
        absent=(),
        present=present,
        refused=refused or {},
        row_errors=row_errors or {},
    )


def test_route_sends_each_row_once_to_its_owner_with_its_value(setup: Setup) -> None:
    calls = setup.write().route(setup.routing)
    assert sorted(call.address for call in calls) == ["host1:1", "host2:1", "host3:1"]
    sent = [key for call in calls for key in call.keys]
    assert sorted(sent) == sorted(KEYS)
    for call in calls:
        assert call.values is not None
        assert list(call.values) == [b"v" + key for key in call.keys]
        assert [KEYS[row] for row in call.rows] == list(call.keys)
        assert {setup.routing.owner_of[p] for p in call.partition_ids} == {call.address}


def test_read_all_answered_returns_values_in_order(setup: Setup) -> None:
    read = setup.read()
    for call in reversed(read.route(setup.routing)):
        assert read.settle(call, read_reply(call), setup.router) is None
    assert read.results == [b"v" + key for key in KEYS]
    assert read.error is None


def test_read_partly_refused_routes_only_the_refused_rows_again(setup: Setup) -> None:
    read = setup.read()
    first, *others = read.route(setup.routing)
    for call in others:
        read.settle(call, read_reply(call), setup.router)
    moved = int(first.partition_ids[0])
    refusal = not_primary(moved, owner=3)
    leftover = read.settle(first, read_reply(first, {moved: refusal}), setup.router)
    assert leftover is not None
    assert {int(setup.ids[row]) for row in leftover.rows} == {moved}
    assert setup.router.revision > leftover.revision, "the refusal named the owner: go at once"
    (again,) = read.route(setup.routing, leftover.rows, leftover.attempt)
    assert again.address == "host3:1"
    assert again.attempt == 1
    assert read.settle(again, read_reply(again), setup.router) is None
    assert read.results == [b"v" + key for key in KEYS]


@pytest.mark.parametrize("error", [LEASE, BUSY, UNKNOWN, NotSentError(reason="no connection")])
def test_read_whole_call_failed_is_routed_again(setup: Setup, error: KoinonError) -> None:
    read = setup.read()
    call = read.route(setup.routing)[0]
    leftover = read.settle(call, error, setup.router)
    assert leftover is not None
    assert leftover.rows.tolist() == call.rows.tolist()


def test_read_final_error_of_one_partition_is_the_reads(setup: Setup) -> None:
    read = setup.read()
    call = read.route(setup.routing)[0]
    bad = int(call.partition_ids[0])
    internal = errors.InternalError(reason="bug")
    assert read.settle(call, read_reply(call, {bad: internal}), setup.router) is None
    assert read.error is internal


def test_read_reply_too_large_halves_the_rows(setup: Setup) -> None:
    read = setup.read()
    call = read.route(setup.routing)[0]
    too_large = errors.ReplyTooLargeError(limit=9, actual=10)
    leftover = read.settle(call, too_large, setup.router)
    assert leftover is not None
    assert leftover.again.delay_s == 0
    halves = read.route(setup.routing, leftover.rows, leftover.attempt)
    assert len(halves) >= 2
    assert sum(len(half.rows) for half in halves) == len(call.rows)
    assert max(len(half.rows) for half in halves) <= len(call.rows) // 2


def test_read_entries_carry_versions(setup: Setup) -> None:
    read = setup.read(want_entries=True)
    for call in read.route(setup.routing):
        read.settle(call, read_reply(call), setup.router)
    assert read.results[0] == (KEYS[0], b"v" + KEYS[0], 7, None)


def test_write_partly_refused_and_partly_failed_keeps_each_fate(setup: Setup) -> None:
    write = setup.write()
    call = write.route(setup.routing)[0]
    ids = sorted({int(p) for p in call.partition_ids})
    refused: dict[int, KoinonError] = {ids[0]: LEASE, ids[1]: UNKNOWN, ids[2]: FULL}
    leftover = write.settle(call, write_reply(refused), setup.router)
    assert leftover is not None
    assert {int(setup.ids[row]) for row in leftover.rows} == {ids[0]}
    assert leftover.again.refresh
    for row, error in write.failures.items():
        assert error is (UNKNOWN if setup.ids[row] == ids[1] else FULL)
    assert {int(setup.ids[row]) for row in write.failures} == {ids[1], ids[2]}


def test_write_that_a_quota_lets_in_bit_by_bit_does_not_back_off(setup: Setup) -> None:
    write = setup.write()
    call = write.route(setup.routing)[0]
    over = errors.QuotaExceededError(keyspace="k", unit="rows", limit=9, retry_after_ms=3)
    first = int(call.partition_ids[0])
    leftover = write.settle(call, write_reply({first: over}), setup.router)
    assert leftover is not None
    assert leftover.attempt == 0
    (again,) = write.route(setup.routing, leftover.rows, leftover.attempt)
    leftover = write.settle(again, over, setup.router)
    assert leftover is not None
    assert leftover.attempt == 1, "nothing was let in: others wait, too"
    write.fail(leftover.rows, leftover.error, timed_out_ms=9)
    assert set(write.failures.values()) == {over}


def test_write_row_errors_retriable_go_again_and_final_ones_stay(setup: Setup) -> None:
    write = setup.write()
    call = write.route(setup.routing)[0]
    leftover = write.settle(call, write_reply(row_errors={0: BUSY, 3: FULL}), setup.router)
    assert leftover is not None
    assert leftover.rows.tolist() == [call.rows[0]]
    assert write.failures == {int(call.rows[3]): FULL}


def test_write_unknown_without_opt_in_is_not_sent_again(setup: Setup) -> None:
    write = setup.write()
    call = write.route(setup.routing)[0]
    assert write.settle(call, UNKNOWN, setup.router) is None
    assert set(write.failures) == set(call.rows.tolist())
    assert all(error.maybe_applied for error in write.failures.values())


def test_write_unknown_with_opt_in_stays_maybe_applied_to_the_end(setup: Setup) -> None:
    write = setup.write(retry_unknown=True)
    call = write.route(setup.routing)[0]
    leftover = write.settle(call, UNKNOWN, setup.router)
    assert leftover is not None
    write.fail(leftover.rows, LEASE, timed_out_ms=10)
    assert all(error.maybe_applied for error in write.failures.values())


def test_write_if_absent_repeated_after_an_unknown_fate_finds_its_own_record(setup: Setup) -> None:
    operation = setup.write(retry_unknown=True, if_absent=True)
    call = operation.route(setup.routing)[0]
    leftover = operation.settle(call, errors.UnknownFateError(reason="lost"), setup.router)
    assert leftover is not None
    again = operation.route(setup.routing, leftover.rows)[0]
    no_row = 99
    operation.settle(again, write_reply(present=[0, no_row]), setup.router)
    assert operation.present == [int(again.rows[0])], "known to be there: not unknown"
    assert not operation.failures


def test_write_timed_out_unsent_was_not_applied(setup: Setup) -> None:
    write = setup.write()
    call = write.route(setup.routing)[0]
    write.fail(call.rows, NotSentError(reason="no connection"), timed_out_ms=10)
    assert {type(error) for error in write.failures.values()} == {errors.UnavailableError}


def test_write_refusal_of_a_partition_not_asked_for_is_ignored(setup: Setup) -> None:
    write = setup.write()
    call = write.route(setup.routing)[0]
    foreign = next(p for p in range(16) if p not in call.partition_ids)
    assert write.settle(call, write_reply({foreign: LEASE}), setup.router) is None
    assert not write.failures


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_read_random_refusals_until_served_returns_every_value(data: st.DataObject) -> None:
    setup = Setup()
    read = setup.read()
    waiting = read.route(setup.routing)
    version = 1
    for _ in range(60):
        if not waiting:
            break
        call = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        ids = sorted({int(p) for p in call.partition_ids})
        chosen = data.draw(st.sets(st.sampled_from(ids))) if version < 40 else set()
        refused: dict[int, KoinonError] = {}
        for p in chosen:
            version += 1
            owner = data.draw(st.integers(0, 3))
            refused[p] = data.draw(
                st.sampled_from(
                    [not_primary(p, owner, epoch=version, version=version), LEASE, BUSY]
                )
            )
        leftover = read.settle(call, read_reply(call, refused), setup.router)
        assert (leftover is None) == (not refused)
        if leftover is not None:
            waiting += read.route(setup.routing, leftover.rows, leftover.attempt)
    while waiting:
        call = waiting.pop()
        assert read.settle(call, read_reply(call), setup.router) is None
    assert read.results == [b"v" + key for key in KEYS]


def test_attempt_timeout_of_a_read_leaves_time_for_another() -> None:
    assert attempt_timeout_s(8.0, write=False) == 4.0
    assert attempt_timeout_s(0.4, write=False) == 0.4
    assert attempt_timeout_s(8.0, write=True) == 8.0


@pytest.mark.parametrize("face", [Client, AsyncClient])
def test_rule_18_documentation_says_what_durability_primary_does_not_promise(face: Any) -> None:
    said = " ".join(str(Client.put.__doc__).split())
    assert "OUTSIDE the promise that no acknowledged write is lost" in said
    for name in ("put", "delete", "put_many", "delete_many"):
        assert "durability" in inspect.signature(getattr(face, name)).parameters
