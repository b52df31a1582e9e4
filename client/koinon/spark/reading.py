"""Reads records in bulk, as record batches: whole partitions page by page, or single keys.

A partition that moves, or whose page is lost, is resumed at its owner after the last key read
(``core/scanning.py``), so every record that exists throughout is yielded exactly once. This is no
snapshot: a write during the read may or may not be seen. Deleted and expired records are neither
read nor counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from koinon.core.routing import Routing
from koinon.core.scanning import PartitionProgress
from koinon.driver.rpc.kv_messages import refused
from koinon.spark.cluster import Cluster, Retries, client_of, cluster_of
from koinon.spark.encoding import arrays
from koinon.spark.encoding.typed import RowForm, decode_rows
from koinon.spark.key_steps import KeySteps
from koinon.spark.options import ReadOptions
from koinon.types import Entry
from koinon_proto.contract import arrow, columns
from koinon_proto.contract.errors import InternalError, KoinonError
from koinon_proto.partitioner import Partitioner, partitioner_of
from koinon_proto.v1 import loads_pb2

KEYS_PER_CALL: Final = 1_000
RECORD: Final = {
    "key": pa.binary(),
    "value": pa.binary(),
    "partition_id": pa.int32(),
    "version": pa.int64(),
    "expires_at": pa.timestamp("us", "UTC"),
    "rows": pa.int64(),
}
"""The columns of a record, or (``rows``) of a partition, with their types."""
_NEVER: Final = pa.scalar(None, RECORD["expires_at"])


@dataclass(frozen=True, kw_only=True)
class ReadColumns:
    """The columns of a read. ``schema``: the Arrow schema of its batches; ``record``: for columns
    of the record itself, their names in RECORD; all other columns are fields of the values, decoded
    by ``rows``.
    """

    schema: Any
    record: Mapping[str, str]
    rows: RowForm | None = None

    @property
    def asked(self) -> set[str]:
        """Return the fields of a record that the read needs, by their names in RECORD."""
        return {*self.record.values(), *(("key", "value") if self.rows else ())}


@dataclass(frozen=True, slots=True)
class Page:
    """The records of one reply; ``runs``: the number of successive records of each partition."""

    rows: columns.Columns
    runs: tuple[tuple[int, int], ...]
    versions: Sequence[int]
    expires_at_ms: Sequence[int]


def read_partitions(
    options: ReadOptions, wanted: ReadColumns, partition_ids: Sequence[int]
) -> Iterator[Any]:
    """Yield the records of partitions as record batches.

    Raises:
        InvalidArgumentError: a value is malformed, and the mode is FAILFAST.
        UnavailableError: a partition was not served in time.
        KoinonError: a node refused with a final error.
    """
    with (
        cluster_of(options) as cluster,
        ThreadPoolExecutor(1, thread_name_prefix="koinon-read") as ahead,
    ):
        pages = _pages(cluster, options, wanted.asked, partition_ids)
        fetching = ahead.submit(next, pages, None)
        while (page := fetching.result()) is not None:
            fetching = ahead.submit(next, pages, None)
            yield from batch_of(wanted, _columns_of(page, wanted.asked))


def count_partitions(
    options: ReadOptions, wanted: ReadColumns, partition_ids: Sequence[int]
) -> Iterator[Any]:
    """Yield one record batch with the number of records of each partition. Raises as
    ``read_partitions`` does.
    """
    rows_of = dict.fromkeys(partition_ids, 0)
    with cluster_of(options) as cluster:
        for page in _pages(cluster, options, ("key",), partition_ids):
            for partition_id, rows in page.runs:
                rows_of[partition_id] += rows
    counted = np.array(list(rows_of.items()), np.int64).reshape(-1, 2)
    made = {
        "partition_id": arrays.i32_array(counted[:, 0].astype(np.int32)),
        "rows": arrow.indices(counted[:, 1].copy()),
    }
    yield from batch_of(wanted, made)


def _pages(
    cluster: Cluster, options: ReadOptions, names: Collection[str], partition_ids: Sequence[int]
) -> Iterator[Page]:
    progress, retries = PartitionProgress(partition_ids), Retries(cluster)
    while not progress.done:
        routing = cluster.routing()
        owner, asked, after_key = progress.next_call(routing)
        errors: Sequence[KoinonError]
        reply = _ask(cluster, options, names, routing, owner, asked, after_key)
        if isinstance(reply, KoinonError):
            progress.refuse(asked)
            retries.after([reply], revision=routing.revision)
            continue
        page, refusals = _page(reply), refused(reply)
        cursor = reply.next
        next_at = (cursor.partition_id, cursor.after_key) if reply.HasField("next") else None
        useful = progress.apply_page(asked, next_at, refusals, _last_keys(page))
        if page.rows.header.rows:
            useful = True
            yield page
        errors = list(refusals.values())
        if useful:
            retries.progress()
            cluster.learn(errors)
        elif errors:
            retries.after(errors, revision=routing.revision)
        else:
            raise InternalError(reason=f"a page of {owner} does not advance the read")


def _ask(
    cluster: Cluster,
    options: ReadOptions,
    names: Collection[str],
    routing: Routing,
    owner: str,
    partition_ids: list[int],
    after_key: bytes,
) -> loads_pb2.ReadColumnsResponse | KoinonError:
    if not owner:
        return routing.offline(partition_ids[0])
    request = loads_pb2.ReadColumnsRequest(
        cluster_id=routing.table.cluster.cluster_id,
        table_version=routing.table.table_version,
        partition_ids=partition_ids,
        keyspace_id=options.opened.keyspace_id,
        prefix=options.prefix,
        bytes_max=options.page_bytes,
        keys_only="value" not in names,
        want_versions="version" in names or "expires_at" in names,
    )
    if after_key:
        request.cursor.partition_id = partition_ids[0]
        request.cursor.after_key = after_key
    reply: loads_pb2.ReadColumnsResponse | KoinonError = cluster.bulk(owner, "ReadColumns", request)
    return reply


_NO_ROWS = columns.pack(np.empty(0, np.uint32), b"", np.empty(0, np.uint32), b"")


def _page(reply: loads_pb2.ReadColumnsResponse) -> Page:
    rows = columns.unpack(reply.columns or _NO_ROWS)
    runs = tuple(zip(reply.partition_ids, reply.row_counts, strict=True))
    if sum(reply.row_counts) != rows.header.rows:
        raise InternalError(reason="a page's runs do not add up to its rows")
    return Page(rows, runs, reply.versions, reply.expires_at_ms)


def _last_keys(page: Page) -> Iterator[tuple[int, bytes]]:
    end = 0
    for partition_id, rows in page.runs:
        end += rows
        if rows:
            yield partition_id, _key(page.rows, end - 1)


def _key(rows: columns.Columns, at: int) -> bytes:
    return bytes(rows.keys[int(rows.key_offsets[at]) : int(rows.key_offsets[at + 1])])


def _columns_of(page: Page, names: Collection[str]) -> dict[str, Any]:
    """Return a page's records as columns; keys and values are views of the page."""
    rows = page.rows
    made: dict[str, Any] = {"key": arrays.from_offsets(rows.key_offsets, rows.keys)}
    if "value" in names:
        made["value"] = arrays.from_offsets(rows.value_offsets, rows.values)
    if "partition_id" in names:
        partition_ids, counts = zip(*page.runs, strict=True)
        made["partition_id"] = arrays.i32_array(
            np.repeat(np.array(partition_ids, np.int32), counts)
        )
    if "version" in names:
        made["version"] = _versions(_u64_array(page.versions))
    if "expires_at" in names:
        made["expires_at"] = _instants(_u64_array(page.expires_at_ms))
    return made


def _u64_array(numbers: Sequence[int]) -> arrays.U64Array:
    return np.fromiter(numbers, np.uint64, len(numbers))


def _versions(versions: arrays.U64Array) -> Any:
    return arrow.indices(versions.view(np.int64))


def _instants(unix_ms: arrays.U64Array) -> Any:
    """Convert Unix milliseconds to timestamps, null for 0."""
    micros = arrow.indices(unix_ms.astype(np.int64) * 1000).view(RECORD["expires_at"])
    return pc.if_else(arrow.truths(unix_ms != 0), micros, _NEVER)


def batch_of(wanted: ReadColumns, made: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the record batch of the wanted columns, unless it has no row; ``made``: the records'
    columns, by names in RECORD.
    """
    columns = {name: made[of] for name, of in wanted.record.items()}
    rows = len(next(iter(made.values())))
    if wanted.rows is not None:
        fields, kept = decode_rows(made["key"], made["value"], wanted.rows)
        if kept is not None:
            rows = len(kept)
            columns = {name: column.take(kept) for name, column in columns.items()}
        columns |= fields
    if rows:
        ordered = [columns[name] for name in wanted.schema.names]
        yield pa.RecordBatch.from_arrays(ordered, schema=wanted.schema)


# --- single keys --------------------------------------------------------------------------------


def read_keys(options: ReadOptions, wanted: ReadColumns, keys: Sequence[bytes]) -> Iterator[Any]:
    """Yield the existing records of these keys, as ``read_partitions`` does.

    Raises:
        UnavailableError: a partition was not served in time.
    """
    with client_of(options) as client:
        partitions = partitioner_of(client.table().keyspaces.named(options.opened.name))
        steps, at = KeySteps(KEYS_PER_CALL), 0
        while at < len(keys):
            some = keys[at : at + steps.keys]
            found = [e for e in client.get_entries(some) if e is not None]
            at += len(some)
            steps.took(len(some), sum(len(entry.value) for entry in found))
            if found:
                yield from batch_of(wanted, _entry_columns(wanted.asked, found, partitions))


def _entry_columns(
    names: Collection[str], entries: Sequence[Entry], partitions: Partitioner
) -> dict[str, Any]:
    keys, values, versions, expiries = zip(*entries, strict=True)
    made = {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
    if "partition_id" in names:
        made["partition_id"] = arrays.i32_array(partitions.partitions_of(keys).astype(np.int32))
    made["version"] = _versions(_u64_array(versions))
    made["expires_at"] = _instants(_u64_array([ms or 0 for ms in expiries]))
    return made
