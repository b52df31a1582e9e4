"""The bulk service over real gRPC: every limit tried, and a whole load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from koinon_node.grpc.bulk_service import CHUNK_BYTES_MAX
from koinon_proto.contract import columns, convert
from koinon_proto.contract.cluster_errors import LoadClosedError, LoadIncompleteError
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    NotPrimaryError,
    TableBehindError,
    UnsupportedVersionError,
    WrongClusterError,
    WrongPartitionError,
)
from koinon_proto.contract.table import ActiveLoad
from koinon_proto.v1 import kv_pb2, loads_pb2
from tests.kit.waiting import wait_until
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.staged_chunks import chunk_of, rows_of
from tests.node.kit.support import PARTITIONS, NodeProcess, partitions_of, refusal, running_node

NOT_OURS = 5  # led by another node
OPEN, COMMITTED = 7, 9
MIB = 1024 * 1024


def keys_of_partition_0(count: int) -> list[bytes]:
    """Return so many keys that hash to partition 0, ascending."""
    keys = [b"%05d" % n for n in range(count * PARTITIONS * 3)]
    return [key for key, p in zip(keys, partitions_of(keys), strict=True) if p == 0][:count]


KEYS = keys_of_partition_0(9)
A, B = KEYS[:2]
GOOD = chunk_of([(A, b"1"), (B, b"2")])


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ScriptedCoordinator]:
    with ScriptedCoordinator(Script(primaries={NOT_OURS: 2}, max_value_bytes=MIB)) as running:
        yield running


@pytest.fixture(scope="module")
def node(
    coordinator: ScriptedCoordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeProcess]:
    with running_node(tmp_path_factory.mktemp("bulk") / "n1", coordinator) as running:
        name_loads(coordinator, ActiveLoad(load_id=OPEN, merging=False))
        version = table_version(coordinator)
        wait_until(lambda: knows(running, version), "the node knows of the load")
        yield running


def name_loads(coordinator: ScriptedCoordinator, *loads: ActiveLoad) -> None:
    coordinator.change_table(lambda table: replace(table, loads=loads))


def table_version(coordinator: ScriptedCoordinator) -> int:
    assert coordinator.table is not None
    return coordinator.table.table_version


def knows(node: NodeProcess, version: int) -> bool:
    """Return whether the node has that table."""
    error = refused(node, stage(GOOD, load_id=1, table_version=version))
    return not isinstance(error, TableBehindError)


def stage(
    *chunks: bytes,
    partition_ids: list[int] | None = None,
    numbers: list[int] | None = None,
    attempt: int = 1,
    load_id: int = OPEN,
    **fields: Any,
) -> loads_pb2.StageRequest:
    return loads_pb2.StageRequest(
        load_id=load_id,
        attempt=attempt,
        partition_ids=[0] * len(chunks) if partition_ids is None else partition_ids,
        numbers=list(range(len(chunks))) if numbers is None else numbers,
        chunks=chunks,
        **fields,
    )


def prepare(**fields: Any) -> loads_pb2.PrepareRequest:
    facts = {"load_id": OPEN, "attempts": [1], "partition_ids": [0], "rows": [0], **fields}
    return loads_pb2.PrepareRequest(**facts)


def read(**fields: Any) -> loads_pb2.ReadColumnsRequest:
    return loads_pb2.ReadColumnsRequest(**{"partition_ids": [0], **fields})


def refused(node: NodeProcess, request: Any) -> KoinonError:
    method = getattr(node.bulk, type(request).__name__.removesuffix("Request"))
    return refusal(lambda: method(request))


def with_bytes(chunk: bytes, at: int, value: int) -> bytes:
    changed = bytearray(chunk)
    changed[at] = value
    return bytes(changed)


def lying_chunk() -> bytes:
    """Return a chunk whose lengths do not add up to its bytes."""
    return columns.pack(np.array([1, 2], np.uint32), b"ab", np.array([0, 0], np.uint32), b"")


# --- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_of", "field"),
    [
        (lambda: stage(GOOD, attempt=0), "attempt"),
        (lambda: stage(GOOD, GOOD, numbers=[3, 3]), "numbers"),
        (lambda: stage(GOOD, numbers=[]), "numbers"),
        (lambda: stage(GOOD, partition_ids=[0, 1]), "numbers"),
        (lambda: stage(GOOD, partition_ids=[0, 1], numbers=[0, 1]), "chunks"),
        (lambda: stage(GOOD, partition_ids=[PARTITIONS]), "partition_ids"),
        (lambda: stage(b""), "columns"),
        (lambda: stage(GOOD[:39]), "columns"),
        (lambda: stage(GOOD[:-1]), "columns"),
        (lambda: stage(GOOD + b"x"), "columns"),
        (lambda: stage(with_bytes(GOOD, len(GOOD) - 1, 0)), "columns"),
        (lambda: stage(lying_chunk()), "columns"),
        (lambda: stage(GOOD, chunk_of([(B, b""), (A, b"")])), "chunks[1]"),
        (lambda: stage(GOOD, chunk_of([(b"", b"v")])), "chunks[1]"),
        (lambda: stage(chunk_of([(b"a" * 501, b"v")])), "chunks[0]"),
        (lambda: stage(chunk_of([(A, bytes(MIB + 1))])), "chunks[0]"),
        (lambda: stage(chunk_of([(key, bytes(MIB)) for key in KEYS])), "chunks[0]"),
        (
            lambda: stage(*[chunk_of([(key, bytes(MIB)) for key in KEYS[:6]])] * 3),
            "chunks",
        ),
        (lambda: stage(chunk_of([(A, b"v")], expires_at_ms=2**63)), "chunks[0]"),
        (lambda: stage(chunk_of([(A, b"v")], expiries=[2**63])), "chunks[0]"),
        (lambda: stage(chunk_of([(A, b"v")], expiries=[columns.DELETED])), "columns"),
        (lambda: prepare(partition_ids=[PARTITIONS]), "partition_ids"),
        (lambda: prepare(rows=[]), "rows"),
        (lambda: read(partition_ids=[1, 1]), "partition_ids"),
        (lambda: read(partition_ids=[2, 1]), "partition_ids"),
        (lambda: read(partition_ids=[PARTITIONS]), "partition_ids"),
        (lambda: read(prefix=bytes(501)), "prefix"),
        (lambda: read(cursor=kv_pb2.ScanCursor(after_key=bytes(501))), "prefix"),
    ],
)
def test_request_beyond_a_limit_is_refused_whole_naming_the_field(
    node: NodeProcess, request_of: Any, field: str
) -> None:
    error = refused(node, request_of())
    assert isinstance(error, InvalidArgumentError), error
    assert error.field == field


def test_key_of_another_partition_is_refused_by_name(node: NodeProcess) -> None:
    error = refused(node, stage(GOOD, GOOD, partition_ids=[0, 1]))
    assert isinstance(error, WrongPartitionError)
    assert (error.partition_id, error.expected_partition_id) == (1, 0)


@pytest.mark.parametrize(
    ("at", "value", "what"), [(0, 2, "packed columns"), (1, 4, "packed columns' flags")]
)
def test_chunk_of_another_version_is_refused_by_name(
    node: NodeProcess, at: int, value: int, what: str
) -> None:
    error = refused(node, stage(with_bytes(GOOD, at, value)))
    assert isinstance(error, UnsupportedVersionError)
    assert (error.what, error.version) == (what, value)


@pytest.mark.parametrize("request_of", [stage, prepare, read])
def test_request_for_another_cluster_is_refused(node: NodeProcess, request_of: Any) -> None:
    assert isinstance(refused(node, request_of(cluster_id="another")), WrongClusterError)


def test_load_that_is_not_open_and_table_that_is_not_here_are_told_apart(
    node: NodeProcess,
) -> None:
    for request in (stage(GOOD, load_id=1), prepare(load_id=1)):
        assert isinstance(refused(node, request), LoadClosedError)
    for request in (
        stage(GOOD, load_id=1, table_version=10**6),
        prepare(load_id=1, table_version=10**6),
    ):
        assert isinstance(refused(node, request), TableBehindError)


def test_chunk_of_the_largest_size_is_staged(node: NodeProcess) -> None:
    rows = [(key, bytes(MIB)) for key in KEYS[:7]]
    rest = CHUNK_BYTES_MAX - len(chunk_of([*rows, (KEYS[7], b"")]))
    chunk = chunk_of([*rows, (KEYS[7], bytes(rest))])
    assert len(chunk) == CHUNK_BYTES_MAX
    assert not node.bulk.Stage(stage(chunk, attempt=99)).refusals
    reply = node.bulk.Prepare(prepare(attempts=[99], rows=[8]))
    assert (len(reply.refusals), reply.duplicate_rows) == (0, 0)


# --- a whole load ------------------------------------------------------------------------------


def keys_of(count: int) -> dict[int, list[bytes]]:
    """Return keys by the partition that they hash to, those led elsewhere left out."""
    keys = [b"load%d" % n for n in range(count)]
    found: dict[int, list[bytes]] = {}
    for key, p in sorted(zip(keys, partitions_of(keys), strict=True)):
        if p != NOT_OURS:
            found.setdefault(p, []).append(key)
    return found


def read_all(node: NodeProcess, **fields: Any) -> list[tuple[int, bytes, bytes]]:
    """Return (partition, key, value) over all pages."""
    found: list[tuple[int, bytes, bytes]] = []
    request = loads_pb2.ReadColumnsRequest(partition_ids=range(PARTITIONS), **fields)
    while True:
        page = node.bulk.ReadColumns(request)
        runs = zip(page.partition_ids, page.row_counts, strict=True)
        ids = [p for p, count in runs for _ in range(count)]
        rows = rows_of(page.columns)
        found += [(p, *row) for p, row in zip(ids, rows, strict=True)]
        if not page.HasField("next"):
            assert [r.partition_id for r in page.refusals] in ([], [NOT_OURS])
            return found
        request.cursor.CopyFrom(page.next)


def test_load_is_staged_prepared_merged_and_read_in_columns(
    node: NodeProcess, coordinator: ScriptedCoordinator
) -> None:
    keys = keys_of(3_000)
    name_loads(
        coordinator,
        ActiveLoad(load_id=OPEN, merging=False),
        ActiveLoad(load_id=COMMITTED, merging=False),
    )
    version = table_version(coordinator)
    chunks = {p: chunk_of([(key, b"v" + key) for key in own]) for p, own in keys.items()}
    others = [b"else%d" % n for n in range(PARTITIONS * 9)]
    elsewhere_key = others[partitions_of(others).index(NOT_OURS)]
    request = stage(
        *chunks.values(),
        chunk_of([(elsewhere_key, b"v")]),
        partition_ids=[*chunks, NOT_OURS],
        attempt=2**64 - 1,
        load_id=COMMITTED,
        table_version=version,
    )

    wait_until(lambda: knows(node, version), "the node knows of the load")
    reply = node.bulk.Stage(request)
    (elsewhere,) = reply.refusals
    assert elsewhere.partition_id == NOT_OURS
    assert isinstance(convert.error_from_proto(elsewhere.error), NotPrimaryError)
    assert read_all(node, prefix=b"load") == []

    rows = [len(own) for own in keys.values()]
    asked = prepare(load_id=COMMITTED, attempts=[2**64 - 1], partition_ids=list(keys), rows=rows)
    assert node.bulk.Prepare(asked) == loads_pb2.PrepareResponse()
    asked.rows[0] += 1
    (missing,) = node.bulk.Prepare(asked).refusals
    assert isinstance(convert.error_from_proto(missing.error), LoadIncompleteError)

    coordinator.manifests[COMMITTED] = loads_pb2.LoadManifest(
        load_id=COMMITTED,
        mode=loads_pb2.LOAD_MODE_APPEND,
        attempts=[2**64 - 1],
        partition_ids=sorted(keys),
    )
    name_loads(coordinator, ActiveLoad(load_id=COMMITTED, merging=True))
    wait_until(lambda: coordinator.merged.get(COMMITTED) == set(keys), "all is reported")
    expected = [(p, key, b"v" + key) for p in sorted(keys) for key in keys[p]]
    assert read_all(node, prefix=b"load") == expected
    assert read_all(node, prefix=b"load", bytes_max=500) == expected
    assert isinstance(refused(node, stage(GOOD, load_id=COMMITTED)), LoadClosedError)

    key = keys[0][0]
    got = node.kv.Get(kv_pb2.GetRequest(key=key))
    assert got.value == b"v" + key
    page = node.bulk.ReadColumns(read(prefix=key, want_versions=True))
    assert (list(page.versions), list(page.expires_at_ms)) == ([got.version], [0])
    only = node.bulk.ReadColumns(read(prefix=key, keys_only=True))
    assert rows_of(only.columns) == [(key, b"")]
