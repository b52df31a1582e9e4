"""The services over real gRPC: what is answered, and every limit tried."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from koinon_proto.contract import convert
from koinon_proto.contract.errors import (
    ClusterNotReadyError,
    ConditionFailedError,
    InvalidArgumentError,
    NotANumberError,
    NotPrimaryError,
    NumberOverflowError,
    PartitionOfflineError,
    ReplyTooLargeError,
    ResourceExhaustedError,
    StorageFullError,
    TableBehindError,
    WrongClusterError,
    WrongPartitionError,
)
from koinon_proto.contract.table import MAX_BATCH_BYTES, MAX_BATCH_ROWS, MAX_TTL_MS
from koinon_proto.v1 import kv_pb2, replication_pb2, replication_pb2_grpc, table_pb2
from tests.kit.waiting import wait_until
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import PARTITIONS, NodeProcess, partitions_of, refusal, running_node

NOT_OURS = 5  # led by another node
OFFLINE = 6


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ScriptedCoordinator]:
    script = Script(primaries={NOT_OURS: 2, OFFLINE: 0}, max_value_bytes=1024 * 1024)
    with ScriptedCoordinator(script) as running:
        yield running


@pytest.fixture(scope="module")
def node(
    coordinator: ScriptedCoordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeProcess]:
    data = tmp_path_factory.mktemp("service") / "n1"
    with running_node(data, coordinator) as running:
        yield running


def keys_in(partition_id: int, count: int = 1, tag: str = "") -> list[bytes]:
    """Return keys that hash to the partition."""
    found: list[bytes] = []
    number = 0
    while len(found) < count:
        candidates = [b"%s%d" % (tag.encode(), n) for n in range(number, number + 1000)]
        owners = partitions_of(candidates)
        found += [k for k, p in zip(candidates, owners, strict=True) if p == partition_id]
        number += 1000
    return found[:count]


def ours(count: int, tag: str) -> list[bytes]:
    """Return keys of partitions that the node leads."""
    candidates = [b"%s%d" % (tag.encode(), n) for n in range(2 * count + 50)]
    owners = partitions_of(candidates)
    good = [k for k, p in zip(candidates, owners, strict=True) if p not in (NOT_OURS, OFFLINE)]
    return good[:count]


def write_request(keys: list[bytes], values: list[bytes], **fields: Any) -> Any:
    return kv_pb2.BatchWriteRequest(
        keys=keys, values=values, partition_ids=partitions_of(keys), **fields
    )


def read_request(keys: list[bytes], **fields: Any) -> Any:
    return kv_pb2.BatchGetRequest(keys=keys, partition_ids=partitions_of(keys), **fields)


def scan_all(node: NodeProcess, **fields: Any) -> tuple[list[bytes], list[int]]:
    """Return (keys, refused partitions) over all pages."""
    keys: list[bytes] = []
    refused: list[int] = []
    request = kv_pb2.ScanRequest(partition_ids=range(PARTITIONS), **fields)
    while True:
        page = node.kv.Scan(request)
        keys += page.keys
        refused += [r.partition_id for r in page.refusals]
        if not page.HasField("next"):
            return keys, refused
        request.cursor.CopyFrom(page.next)


# --- single operations -------------------------------------------------------------------------


def test_put_get_delete_roundtrip_with_versions(node: NodeProcess) -> None:
    (key,) = ours(1, "roundtrip")
    assert not node.kv.Get(kv_pb2.GetRequest(key=key)).found
    version = node.kv.Put(kv_pb2.PutRequest(key=key, value=b"v")).version
    got = node.kv.Get(kv_pb2.GetRequest(key=key))
    assert (got.found, got.value, got.version, got.expires_at_ms) == (True, b"v", version, 0)
    assert node.kv.Put(kv_pb2.PutRequest(key=key, value=b"")).version > version
    assert node.kv.Get(kv_pb2.GetRequest(key=key)).found  # an empty value is a value
    assert node.kv.Delete(kv_pb2.DeleteRequest(key=key)).found
    assert not node.kv.Delete(kv_pb2.DeleteRequest(key=key)).found
    assert not node.kv.Get(kv_pb2.GetRequest(key=key)).found


def test_conditions_report_both_versions_and_change_nothing(node: NodeProcess) -> None:
    (key,) = ours(1, "condition")
    version = node.kv.Put(kv_pb2.PutRequest(key=key, value=b"1", if_version=0)).version
    error = refusal(lambda: node.kv.Put(kv_pb2.PutRequest(key=key, value=b"2", if_version=0)))
    assert isinstance(error, ConditionFailedError)
    assert (error.expected_version, error.current_version) == (0, version)
    assert node.kv.Get(kv_pb2.GetRequest(key=key)).value == b"1"
    second = node.kv.Put(kv_pb2.PutRequest(key=key, value=b"2", if_version=version)).version
    error = refusal(lambda: node.kv.Delete(kv_pb2.DeleteRequest(key=key, if_version=version)))
    assert isinstance(error, ConditionFailedError)
    assert node.kv.Delete(kv_pb2.DeleteRequest(key=key, if_version=second)).found


def test_expired_record_is_served_by_no_read_and_is_reclaimed(node: NodeProcess) -> None:
    keys = ours(50, "ttl")
    node.kv.BatchWrite(write_request(keys, keys, ttl_ms=[600_000]))
    got = node.kv.Get(kv_pb2.GetRequest(key=keys[0]))
    assert got.found
    assert got.expires_at_ms > time.time() * 1000
    node.kv.BatchWrite(write_request(keys, keys, ttl_ms=[50]))
    wait_until(lambda: not node.kv.Get(kv_pb2.GetRequest(key=keys[0])).found, "expiry")
    reply = node.kv.BatchGet(read_request(keys, want_versions=True))
    assert list(reply.missing) == list(range(50))
    assert scan_all(node, prefix=b"ttl")[0] == []
    assert node.kv.Put(kv_pb2.PutRequest(key=keys[1], value=b"new", if_version=0)).version
    assert node.kv.Get(kv_pb2.GetRequest(key=keys[1])).value == b"new"


def test_expired_records_nobody_reads_are_reclaimed_in_the_background(
    node: NodeProcess, coordinator: ScriptedCoordinator
) -> None:
    keys = ours(600, "reclaim")
    wait_until(lambda: coordinator.heartbeats[-1].HasField("stats"), "stats")
    node.kv.BatchWrite(write_request(keys, keys, ttl_ms=[100]))
    kept = ours(1, "kept")
    node.kv.BatchWrite(write_request(kept, kept, ttl_ms=[100]))
    node.kv.BatchWrite(write_request(kept, kept))  # rewritten: its old entry is only dropped
    wait_until(lambda: not node.kv.Get(kv_pb2.GetRequest(key=keys[0])).found, "expiry")
    wait_until(lambda: coordinator.heartbeats[-1].stats.records < 600, "reclaimed")
    assert node.kv.Get(kv_pb2.GetRequest(key=kept[0])).value == kept[0]


# --- batches -----------------------------------------------------------------------------------


def test_batch_write_and_read_keep_row_order_over_many_steps(node: NodeProcess) -> None:
    keys = ours(20_000, "batch")
    written = node.kv.BatchWrite(write_request(keys, keys, want_versions=True))
    assert not written.refusals
    assert not written.row_errors
    assert all(written.versions)
    asked = [*keys[::-1], b"batch-missing", keys[0]]
    missing_partition = partitions_of([b"batch-missing"])[0]
    assert missing_partition not in (NOT_OURS, OFFLINE)
    reply = node.kv.BatchGet(read_request(asked))
    assert list(reply.values) == [*keys[::-1], b"", keys[0]]
    assert list(reply.missing) == [20_000]
    versions = node.kv.BatchGet(read_request(keys, want_versions=True)).versions
    assert list(versions) == list(written.versions)


def test_batch_mixes_deletes_conditions_and_puts_by_row(node: NodeProcess) -> None:
    keys = ours(5, "mixed")
    node.kv.BatchWrite(write_request(keys[:2], keys[:2]))
    reply = node.kv.BatchWrite(
        write_request(
            [*keys, keys[4]],
            [b"", b"", b"new", b"new", b"new", b"newer"],
            deletes=[0, 3],
            conditions=[
                kv_pb2.Condition(row=1, if_version=0),
                kv_pb2.Condition(row=4, if_version=0),
                kv_pb2.Condition(row=5, if_version=0),
            ],
            want_versions=True,
        )
    )
    assert list(reply.absent) == [3]
    assert {e.row for e in reply.row_errors} == {1, 5}
    assert [bool(v) for v in reply.versions] == [True, False, True, False, True, False]
    values = node.kv.BatchGet(read_request(keys))
    assert list(values.values) == [b"", keys[1], b"new", b"", b"new"]
    assert list(values.missing) == [0, 3]


def test_batch_lists_rows_that_are_present_instead_of_an_error_each(node: NodeProcess) -> None:
    keys = ours(4, "listed")
    (held, _) = node.kv.BatchWrite(write_request(keys[:2], keys[:2], want_versions=True)).versions
    reply = node.kv.BatchWrite(
        write_request(
            keys,
            [b"new"] * 4,
            conditions=[
                kv_pb2.Condition(row=0, if_version=held + 1),
                kv_pb2.Condition(row=1, if_version=0),
                kv_pb2.Condition(row=2, if_version=0),
            ],
            list_present=True,
            want_versions=True,
        )
    )
    assert list(reply.present) == [1]
    assert {e.row for e in reply.row_errors} == {0}, "another version than the one asked for"
    assert [bool(v) for v in reply.versions] == [False, False, True, True]
    values = node.kv.BatchGet(read_request(keys)).values
    assert list(values) == [keys[0], keys[1], b"new", b"new"]


def test_batch_partly_not_led_is_refused_by_partition_and_the_rest_goes_on(
    node: NodeProcess,
) -> None:
    keys = [*ours(2, "partly"), *keys_in(NOT_OURS, 2), *keys_in(OFFLINE, 1)]
    for refusals in (
        node.kv.BatchWrite(write_request(keys, keys)).refusals,
        node.kv.BatchGet(read_request(keys, want_versions=True)).refusals,
    ):
        errors = {r.partition_id: convert.error_from_proto(r.error) for r in refusals}
        assert set(errors) == {NOT_OURS, OFFLINE}
        moved = errors[NOT_OURS]
        assert isinstance(moved, NotPrimaryError)
        assert (moved.primary, moved.primary_address) == ("other2", "127.0.0.1:2")
        assert isinstance(errors[OFFLINE], PartitionOfflineError)
    values = node.kv.BatchGet(read_request(keys)).values
    assert list(values) == [keys[0], keys[1], b"", b"", b""]


def test_unary_of_a_partition_led_elsewhere_says_where_to_go(node: NodeProcess) -> None:
    (key,) = keys_in(NOT_OURS)
    error = refusal(lambda: node.kv.Put(kv_pb2.PutRequest(key=key, value=b"v")))
    assert isinstance(error, NotPrimaryError)
    assert error.primary_address == "127.0.0.1:2"
    newer = refusal(lambda: node.kv.Get(kv_pb2.GetRequest(key=key, table_version=10**6)))
    assert isinstance(newer, TableBehindError)
    assert newer.required_version == 10**6


def test_key_sent_under_a_wrong_partition_is_refused_on_reads_and_writes(
    node: NodeProcess,
) -> None:
    (key,) = ours(1, "hash")
    right = partitions_of([key])[0]
    wrong = (right + 1) % PARTITIONS
    for call in (
        lambda: node.kv.BatchGet(kv_pb2.BatchGetRequest(keys=[key], partition_ids=[wrong])),
        lambda: node.kv.BatchWrite(
            kv_pb2.BatchWriteRequest(keys=[key], values=[b"v"], partition_ids=[wrong])
        ),
    ):
        error = refusal(call)
        assert isinstance(error, WrongPartitionError)
        assert (error.partition_id, error.expected_partition_id) == (wrong, right)


# --- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_of", "field"),
    [
        (lambda: kv_pb2.GetRequest(key=b""), "key"),
        (lambda: kv_pb2.GetRequest(key=b"x" * 501), "key"),
        (lambda: kv_pb2.PutRequest(key=b"k", value=bytes(1024 * 1024 + 1)), "value"),
        (lambda: kv_pb2.PutRequest(key=b"k", ttl_ms=2**60), "ttl_ms"),
        (lambda: kv_pb2.DeleteRequest(key=b""), "key"),
        (lambda: write_request([b"a", b"x" * 501], [b"", b""]), "keys[1]"),
        (lambda: write_request([b"a"], [bytes(1024 * 1024 + 1)]), "values[0]"),
        (lambda: write_request([b"a", b"b"], [b""]), "values"),
        (lambda: kv_pb2.BatchWriteRequest(keys=[b"a"], values=[b""]), "partition_ids"),
        (lambda: write_request([b"a"], [b""], deletes=[1]), "deletes"),
        (lambda: write_request([b"a"], [b""], ttl_ms=[1, 2]), "ttl_ms"),
        (
            lambda: write_request([b"a"], [b""], conditions=[kv_pb2.Condition(row=1)]),
            "conditions",
        ),
        (
            lambda: write_request([b"a"], [b""], conditions=[kv_pb2.Condition(row=0)] * 2),
            "conditions",
        ),
        (
            lambda: kv_pb2.BatchGetRequest(keys=[b"a"], partition_ids=[PARTITIONS]),
            "partition_ids[0]",
        ),
        (
            lambda: kv_pb2.BatchGetRequest(
                keys=[b"a"] * (MAX_BATCH_ROWS + 1), partition_ids=[0] * (MAX_BATCH_ROWS + 1)
            ),
            "keys",
        ),
        (
            lambda: write_request([b"%d" % n for n in range(17)], [bytes(1024 * 1024)] * 17),
            "batch",
        ),
        (lambda: kv_pb2.ScanRequest(partition_ids=[3, 3]), "partition_ids"),
        (lambda: kv_pb2.ScanRequest(partition_ids=[PARTITIONS]), "partition_ids"),
        (lambda: kv_pb2.ScanRequest(partition_ids=[0], prefix=bytes(501)), "prefix"),
    ],
)
def test_request_beyond_a_limit_is_refused_whole_naming_field_limit_and_value(
    node: NodeProcess, request_of: Any, field: str
) -> None:
    request = request_of()
    method = type(request).__name__.removesuffix("Request")
    error = refusal(lambda: getattr(node.kv, method)(request))
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    assert error.actual <= MAX_BATCH_BYTES or error.actual > error.limit


def test_batch_refused_for_one_row_writes_none_of_the_others(node: NodeProcess) -> None:
    (good,) = ours(1, "whole")
    request = write_request([good, b"x" * 501], [b"v", b"v"])
    assert isinstance(refusal(lambda: node.kv.BatchWrite(request)), InvalidArgumentError)
    assert not node.kv.Get(kv_pb2.GetRequest(key=good)).found


def test_request_meant_for_another_cluster_is_refused_with_both_ids(node: NodeProcess) -> None:
    (key,) = ours(1, "elsewhere")
    request = kv_pb2.PutRequest(key=key, value=b"v", cluster_id="another")
    error = refusal(lambda: node.kv.Put(request))
    assert isinstance(error, WrongClusterError)
    assert error.actual_cluster_id == "another"
    assert not node.kv.Get(kv_pb2.GetRequest(key=key)).found


def test_batch_get_whose_values_exceed_an_answer_says_so(node: NodeProcess) -> None:
    keys = ours(20, "large")
    for key in keys:
        node.kv.Put(kv_pb2.PutRequest(key=key, value=bytes(1024 * 1024)))
    error = refusal(lambda: node.kv.BatchGet(read_request(keys)))
    assert isinstance(error, ReplyTooLargeError)
    assert error.limit == MAX_BATCH_BYTES
    scanned, _ = scan_all(node, prefix=b"large")
    assert sorted(scanned) == sorted(keys)
    node.kv.BatchWrite(write_request(keys, [b""] * 20, deletes=range(20)))


# --- scans and the table -----------------------------------------------------------------------


def test_scan_visits_led_partitions_in_order_and_lists_the_others_once(
    node: NodeProcess,
) -> None:
    keys = ours(500, "scan")
    node.kv.BatchWrite(write_request(keys, keys))
    for fields in ({"limit": 7}, {}, {"keys_only": True}):
        scanned, refused = scan_all(node, prefix=b"scan", **fields)
        order = sorted(zip(partitions_of(keys), keys, strict=True))
        assert scanned == [key for _, key in order]
        assert refused == [NOT_OURS, OFFLINE]


def test_scan_page_carries_values_and_versions_if_wanted(node: NodeProcess) -> None:
    (key,) = ours(1, "page")
    version = node.kv.Put(kv_pb2.PutRequest(key=key, value=b"v", ttl_ms=60_000)).version
    page = node.kv.Scan(
        kv_pb2.ScanRequest(partition_ids=partitions_of([key]), prefix=key, want_versions=True)
    )
    assert (list(page.keys), list(page.values), list(page.versions)) == ([key], [b"v"], [version])
    assert page.expires_at_ms[0] > time.time() * 1000
    only = node.kv.Scan(
        kv_pb2.ScanRequest(partition_ids=partitions_of([key]), prefix=key, keys_only=True)
    )
    assert (list(only.keys), list(only.values), list(only.versions)) == ([key], [], [])


def test_node_serves_the_table_whole_and_as_a_difference(
    node: NodeProcess, coordinator: ScriptedCoordinator
) -> None:
    whole = node.table.GetTable(table_pb2.GetTableRequest())
    assert len(whole.rows) == PARTITIONS
    version = whole.table_version
    coordinator.change_row(NOT_OURS, primary_epoch=77)
    wait_until(
        lambda: node.table.GetTable(table_pb2.GetTableRequest()).table_version > version, "newer"
    )
    change = node.table.GetTable(
        table_pb2.GetTableRequest(cluster_id="cluster-a", known_version=version)
    )
    assert [row.partition_id for row in change.rows] == [NOT_OURS]
    error = refusal(lambda: node.table.GetTable(table_pb2.GetTableRequest(cluster_id="cluster-b")))
    assert isinstance(error, WrongClusterError)


# --- other nodes -------------------------------------------------------------------------------


def test_node_before_bootstrap_says_the_cluster_is_not_ready(tmp_path: Path) -> None:
    with ScriptedCoordinator(Script(bootstrapped=False)) as coordinator:
        node = NodeProcess(tmp_path / "n1", coordinator.address)
        wait_until(lambda: coordinator.heartbeats, "a heartbeat")
        for call in (
            lambda: node.kv.Get(kv_pb2.GetRequest(key=b"k"), wait_for_ready=True),
            lambda: node.table.GetTable(table_pb2.GetTableRequest()),
        ):
            assert isinstance(refusal(call), ClusterNotReadyError)
        coordinator.script.bootstrapped = True
        wait_until(coordinator.hosted_all, "hosted")
        node.close()


def test_node_whose_store_is_full_refuses_puts_and_serves_the_rest(tmp_path: Path) -> None:
    with (
        ScriptedCoordinator() as coordinator,
        running_node(tmp_path / "n1", coordinator, "--map-size-bytes", "2000000") as node,
    ):
        value = bytes(100_000)
        keys = [b"full%d" % n for n in range(40)]
        stored = 0
        for key in keys:
            call = node.kv.Put.future(kv_pb2.PutRequest(key=key, value=value))
            if call.exception() is not None:
                break
            stored += 1
        assert 4 < stored < 20
        error = refusal(lambda: node.kv.Put(kv_pb2.PutRequest(key=b"full0", value=value)))
        assert isinstance(error, StorageFullError)
        assert node.kv.Get(kv_pb2.GetRequest(key=keys[0])).value == value
        for key in keys[: stored - 1]:
            assert node.kv.Delete(kv_pb2.DeleteRequest(key=key)).found
        assert node.kv.Put(kv_pb2.PutRequest(key=b"again", value=value)).version


@pytest.mark.parametrize("level", [kv_pb2.DURABILITY_ALL_IN_SYNC, kv_pb2.DURABILITY_PRIMARY])
def test_writes_of_either_durability_are_done(node: NodeProcess, level: Any) -> None:
    keys = ours(20, f"durable-{level}-")
    assert node.kv.Put(kv_pb2.PutRequest(key=keys[0], value=b"v", durability=level)).version
    assert node.kv.Delete(kv_pb2.DeleteRequest(key=keys[0], durability=level)).found
    node.kv.BatchWrite(write_request(keys, keys, durability=level))
    assert list(node.kv.BatchGet(read_request(keys)).values) == keys


def test_unknown_durability_is_refused_before_anything_is_written(node: NodeProcess) -> None:
    keys, unknown = ours(2, "undurable-"), cast(Any, 7)
    for call in (
        lambda: node.kv.Put(kv_pb2.PutRequest(key=keys[0], value=b"v", durability=unknown)),
        lambda: node.kv.Delete(kv_pb2.DeleteRequest(key=keys[0], durability=unknown)),
        lambda: node.kv.BatchWrite(write_request(keys, keys, durability=unknown)),
    ):
        error = refusal(call)
        assert isinstance(error, InvalidArgumentError)
        assert (error.field, error.actual) == ("durability", 7)
    assert list(node.kv.BatchGet(read_request(keys)).missing) == [0, 1]


def test_checksums_and_sizes_tell_what_is_held(node: NodeProcess) -> None:
    stub: Any = replication_pb2_grpc.ReplicationStub(node.channel)
    keys = keys_in(2, 30, "summed-")
    node.kv.BatchWrite(write_request(keys, [b"12345"] * 30))
    asked = replication_pb2.ChecksumsRequest(partition_ids=[2, NOT_OURS])
    mine, other = stub.Checksums(asked).copies
    assert (mine.partition_id, mine.usable, other.usable) == (2, True, False)
    assert mine.records >= 30
    assert mine.complete_through == max(
        node.kv.BatchGet(read_request(keys, want_versions=True)).versions
    )
    assert stub.Checksums(asked).copies[0] == mine
    asked.positions_only = True
    position, nothing = stub.Checksums(asked).copies
    assert (position.usable, position.complete_through) == (True, mine.complete_through)
    assert (position.records, position.digest, nothing.usable) == (0, 0, False)

    def counted() -> tuple[int, int, bool] | None:
        sizes = stub.PartitionSizes(replication_pb2.PartitionSizesRequest())
        columns = zip(sizes.records, sizes.bytes, sizes.stale, strict=True)
        return dict(zip(sizes.partition_ids, columns, strict=True)).get(2)

    wait_until(lambda: counted() == (mine.records, mine.bytes, False), "the sizes")
    node.kv.BatchWrite(write_request(keys[:1], [b"more"]))
    size = counted()
    assert size is not None
    assert size[2] or size[1] == mine.bytes - 1  # written since, unless the next pass was at once
    error = refusal(lambda: stub.Checksums(replication_pb2.ChecksumsRequest(partition_ids=[16])))
    assert isinstance(error, InvalidArgumentError)
    for call in (
        lambda: stub.Checksums(replication_pb2.ChecksumsRequest(cluster_id="cluster-b")),
        lambda: stub.PartitionSizes(replication_pb2.PartitionSizesRequest(cluster_id="cluster-b")),
    ):
        assert isinstance(refusal(call), WrongClusterError)


# --- updates -----------------------------------------------------------------------------------


def update_request(keys: list[bytes], updates: list[Any], **fields: Any) -> Any:
    return kv_pb2.BatchUpdateRequest(
        keys=keys, partition_ids=partitions_of(keys), updates=updates, **fields
    )


def increment(by: int, ttl_ms: int = 0) -> Any:
    return kv_pb2.Update(increment=kv_pb2.Increment(by=by, ttl_ms=ttl_ms))


def test_updates_of_a_batch_take_effect_in_row_order(node: NodeProcess) -> None:
    counter, text = ours(2, "updates")
    keep = kv_pb2.Update(get_or_put=kv_pb2.GetOrPut(value=b"first", ttl_ms=60_000))
    forever = kv_pb2.Update(touch=kv_pb2.Touch())
    keys = [counter, text, counter, text, text]
    reply = node.kv.BatchUpdate(
        update_request(keys, [increment(5), keep, increment(-7), keep, forever])
    )
    assert [r.number for r in reply.results] == [5, 0, -2, 0, 0]
    assert [r.found for r in reply.results] == [False, False, False, True, True]
    assert [r.value for r in reply.results] == [b"", b"", b"", b"first", b""]
    assert [bool(r.version) for r in reply.results] == [True, True, True, False, True]
    assert node.kv.Get(kv_pb2.GetRequest(key=counter)).value == b"-2"
    got = node.kv.Get(kv_pb2.GetRequest(key=text))
    assert (got.value, got.expires_at_ms, got.version) == (b"first", 0, reply.results[4].version)


def test_update_that_the_record_does_not_allow_is_refused_by_row(node: NodeProcess) -> None:
    text, most, fine = ours(3, "refused")
    node.kv.BatchWrite(write_request([text, most], [b"text", b"9223372036854775807"]))
    reply = node.kv.BatchUpdate(update_request([text, most, fine], [increment(1)] * 3))
    errors = {e.row: convert.error_from_proto(e.error) for e in reply.row_errors}
    assert isinstance(errors.pop(0), NotANumberError)
    assert isinstance(errors.pop(1), NumberOverflowError)
    assert not errors
    assert [r.number for r in reply.results] == [0, 0, 1]
    assert node.kv.Get(kv_pb2.GetRequest(key=text)).value == b"text"


def test_update_of_a_partition_led_elsewhere_is_refused_and_others_go_on(
    node: NodeProcess,
) -> None:
    (mine,), (other,) = ours(1, "led"), keys_in(NOT_OURS, 1, "led")
    reply = node.kv.BatchUpdate(update_request([other, mine], [increment(1)] * 2))
    assert [r.partition_id for r in reply.refusals] == [NOT_OURS]
    assert [r.number for r in reply.results] == [0, 1]


@pytest.mark.parametrize(
    "update",
    [
        kv_pb2.Update(),
        kv_pb2.Update(touch=kv_pb2.Touch(ttl_ms=MAX_TTL_MS + 1)),
        kv_pb2.Update(get_or_put=kv_pb2.GetOrPut(value=b"x" * (1024 * 1024 + 1))),
    ],
    ids=["unknown kind", "ttl", "value"],
)
def test_update_beyond_a_limit_is_refused_before_anything_is_written(
    node: NodeProcess, update: Any
) -> None:
    first, second = ours(2, "limit")
    error = refusal(
        lambda: node.kv.BatchUpdate(update_request([first, second], [increment(1), update]))
    )
    assert isinstance(error, InvalidArgumentError)
    assert not node.kv.Get(kv_pb2.GetRequest(key=first)).found


def test_updates_of_more_bytes_than_a_batch_may_have_are_refused_beyond_that(
    node: NodeProcess,
) -> None:
    keys = ours(20, "large")
    for key in keys:
        node.kv.Put(kv_pb2.PutRequest(key=key, value=bytes(1024 * 1024)))
    touch = kv_pb2.Update(touch=kv_pb2.Touch(ttl_ms=60_000))
    reply = node.kv.BatchUpdate(update_request(keys, [touch] * 20))
    touched = [row for row, result in enumerate(reply.results) if result.found]
    assert touched == list(range(len(touched)))
    assert 14 <= len(touched) <= 16
    errors = {e.row: convert.error_from_proto(e.error) for e in reply.row_errors}
    assert sorted(errors) == list(range(len(touched), 20))
    assert all(isinstance(error, ResourceExhaustedError) for error in errors.values())


def test_batch_get_of_keys_only_says_what_is_there_without_values(node: NodeProcess) -> None:
    keys = ours(2, "keys only")
    node.kv.Put(kv_pb2.PutRequest(key=keys[0], value=b"value"))
    reply = node.kv.BatchGet(read_request(keys, keys_only=True))
    assert (list(reply.values), list(reply.missing)) == ([b"", b""], [1])
