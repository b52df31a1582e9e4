"""Reads in bulk yield every record once, whatever the cluster does meanwhile."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from koinon.spark.datasource import KoinonReader, Partitions
from koinon.spark.options import read_options
from koinon.spark.reading import read_keys, read_partitions
from koinon_proto.contract.errors import (
    KoinonError,
    LeaseExpiredError,
    NotPrimaryError,
    UnavailableError,
)
from koinon_proto.partitioner import partitioner
from tests.spark.fake_loads import LoadsCluster, refuse_once
from tests.spark.helpers import pairs, record_columns

ALL = range(16)
COLUMNS = record_columns("key", "value")


@pytest.fixture
def filled(fake: LoadsCluster) -> LoadsCluster:
    for key, value in pairs(0, 500):
        fake.write(key, value, 0)
    return fake


def options(fake: LoadsCluster, **given: str) -> Any:
    return read_options({"coordinators": fake.seeds, "timeout": "5s", **given})


def test_read_of_a_prefix_with_the_routing_bytes_asks_one_partition(fake: LoadsCluster) -> None:
    known = partitioner("crc16", fake.partitioner.partition_count)
    fake.partitioner = known
    config = replace(
        fake.table.cluster,
        partitioner=known.name,
        partitioner_fingerprint=known.fingerprint,
    )
    fake.table = fake.served_table = replace(fake.table, cluster=config)
    for n in range(90):
        fake.write(b"{u%d}.%02d" % (n % 3, n), b"v", 0)
    reader = KoinonReader(options(fake, prefix="{u1}."), record_columns("key"))
    (only,) = reader.partitions()
    assert isinstance(only, Partitions)
    assert only.partition_ids == (known.partition_of(b"{u1}."),)
    found = [key for (key,) in rows(reader.read(only))]
    assert found == [b"{u1}.%02d" % n for n in range(1, 90, 3)]
    asked = [
        partition_id
        for part in KoinonReader(options(fake, prefix="{u"), record_columns("key")).partitions()
        if isinstance(part, Partitions)
        for partition_id in part.partition_ids
    ]
    assert sorted(asked) == list(range(known.partition_count))


def rows(batches: Iterator[Any]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for batch in batches:
        assert batch.num_rows
        found += zip(*[column.to_pylist() for column in batch.columns], strict=True)
    return found


def read(fake: LoadsCluster, **given: str) -> list[tuple[Any, ...]]:
    return rows(read_partitions(options(fake, **given), COLUMNS, ALL))


def test_read_yields_every_record_once(filled: LoadsCluster) -> None:
    assert sorted(read(filled)) == sorted(pairs(0, 500))


def test_read_of_some_partitions_yields_theirs(filled: LoadsCluster) -> None:
    part = filled.partitioner.partition_of
    found = rows(read_partitions(options(filled), COLUMNS, [3, 7]))
    assert sorted(found) == [row for row in pairs(0, 500) if part(row[0]) in (3, 7)]


def test_read_of_an_empty_cluster_yields_nothing(fake: LoadsCluster) -> None:
    assert list(read_partitions(options(fake), COLUMNS, ALL)) == []


def test_read_of_a_prefix_yields_its_keys(filled: LoadsCluster) -> None:
    filled.write(b"other", b"x", 0)
    assert sorted(read(filled, prefix="key-00001")) == pairs(10, 20)


def test_read_of_keys_only_carries_no_values(filled: LoadsCluster) -> None:
    asked = []
    before = filled.nodes[0].before

    async def look(method: str, request: Any) -> None:
        if method == "ReadColumns":
            asked.append(request.keys_only)
        if before:
            await before(method, request)

    for node in filled.nodes:
        node.before = look
    found = rows(read_partitions(options(filled), record_columns("key"), ALL))
    assert sorted(found) == sorted((key,) for key, _ in pairs(0, 500))
    assert asked
    assert all(asked)


def test_read_metadata_is_of_the_record(fake: LoadsCluster) -> None:
    version = fake.write(b"a", b"1", 0)
    fake.write(b"b", b"2", 1_700_000_000_123)
    names = record_columns("expires_at", "version", "partition_id", "key")
    (a, b) = sorted(rows(read_partitions(options(fake), names, ALL)), key=lambda row: bytes(row[3]))
    assert a == (None, version, fake.partitioner.partition_of(b"a"), b"a")
    instant = dt.datetime.fromtimestamp(1_700_000_000, dt.UTC) + dt.timedelta(milliseconds=123)
    assert b[:2] == (instant, version + 1)


def test_read_batches_have_the_types_that_spark_wants(filled: LoadsCluster) -> None:
    names = record_columns("key", "value", "partition_id", "version", "expires_at")
    batch = next(read_partitions(options(filled), names, ALL))
    assert batch.schema.types == [
        pa.binary(),
        pa.binary(),
        pa.int32(),
        pa.int64(),
        pa.timestamp("us", "UTC"),
    ]


@pytest.mark.parametrize(
    "error",
    [
        LeaseExpiredError(node_id="n1"),
        NotPrimaryError(
            partition_id=0, primary="", primary_address="", primary_epoch=0, table_version=0
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_read_refused_partitions_are_read_later(filled: LoadsCluster, error: KoinonError) -> None:
    for node in filled.nodes:
        node.refuse = refuse_once(error)
    assert sorted(read(filled)) == sorted(pairs(0, 500))


@pytest.mark.parametrize("tell", [True, False])
def test_read_partitions_that_move_between_pages_go_on_after_the_last_key(
    filled: LoadsCluster, tell: bool
) -> None:
    filled.nodes[0].page_rows_max = filled.nodes[1].page_rows_max = 20
    batches = read_partitions(options(filled), COLUMNS, ALL)
    found = rows(iter([next(batches)]))
    for owner in (1, 2, 1):
        filled.move(ALL, owner, tell=tell)
        found += rows(iter([next(batches)]))
    found += rows(batches)
    assert len(found) == 500
    assert sorted(found) == sorted(pairs(0, 500))


def test_read_node_that_dies_is_read_from_its_successor(filled: LoadsCluster) -> None:
    filled.nodes[0].page_rows_max = filled.nodes[1].page_rows_max = 20
    batches = read_partitions(options(filled), COLUMNS, ALL)
    found = rows(iter([next(batches)]))
    filled.kill(filled.nodes[0])
    filled.move(ALL, 2)
    found += rows(batches)
    assert sorted(found) == sorted(pairs(0, 500))


def test_read_partition_that_nobody_serves_ends_in_time(filled: LoadsCluster) -> None:
    filled.move([5], 0)
    with pytest.raises(UnavailableError, match=r"not served within 0\.2 s"):
        read(filled, timeout="200ms")


@pytest.mark.parametrize(
    "attempt",
    [
        lambda given: KoinonReader(given, COLUMNS).partitions(),
        lambda given: list(read_partitions(given, COLUMNS, ALL)),
    ],
    ids=["planning", "reading"],
)
def test_read_coordinators_out_of_reach_are_said_to_be(attempt: Callable[[Any], Any]) -> None:
    given = read_options({"coordinators": "127.0.0.1:1", "timeout": "200ms"})
    with pytest.raises(UnavailableError) as caught:
        attempt(given)
    text = str(caught.value)
    assert text.startswith("option coordinators: 127.0.0.1:1: not served within 0.2 s (option time")
    assert "127.0.0.1:1: connection refused" in text
    assert caught.value.__cause__ is None, "gRPC's own words are not shown"
    assert "write" not in text


def test_read_keys_yields_those_that_there_are(filled: LoadsCluster) -> None:
    names = record_columns("key", "value", "partition_id", "version")
    wanted = [b"key-000003", b"missing", b"key-000499"]
    found = rows(read_keys(options(filled), names, wanted))
    part = filled.partitioner.partition_of
    assert [row[:3] for row in found] == [
        (b"key-000003", b"v3", part(b"key-000003")),
        (b"key-000499", b"v499", part(b"key-000499")),
    ]
    assert all(row[3] > 0 for row in found)
    assert list(read_keys(options(filled), names, [b"missing"])) == []
    assert filled.count("ReadColumns") == 0


def test_read_keys_without_values_yields_keys(filled: LoadsCluster) -> None:
    assert rows(read_keys(options(filled), record_columns("key"), [b"key-000003"])) == [
        (b"key-000003",)
    ]
