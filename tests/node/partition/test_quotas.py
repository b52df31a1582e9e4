"""The limits of a keyspace hold for every kind of read and write, and what they refuse is undone.

With a limit of a byte a second, whatever is let in first keeps all else out for longer than a test
takes: no test waits for time to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import hiredis
import pytest

from koinon_proto.contract import columns, convert
from koinon_proto.contract.errors import KoinonError, QuotaExceededError
from koinon_proto.contract.keyspaces import KeyspaceList, default_keyspace
from koinon_proto.contract.table import Table
from koinon_proto.server import rpc
from koinon_proto.v1 import kv_pb2, loads_pb2, table_pb2
from tests.kit.addresses import free_address
from tests.kit.waiting import wait_until
from tests.node.kit.resp_client import RespClient, typed
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import PARTITIONS, NodeProcess, partitions_of, refusal, running_node
from tests.scraping import scrape

KEY, ABSENT = b"key", b"absent"
LARGE = b"v" * 50_000
WAIT_MS = 3_600_000  # no node says more


class Door:
    """Both ports of a node."""

    def __init__(
        self, node: NodeProcess, redis: RespClient, coordinator: ScriptedCoordinator
    ) -> None:
        self.kv, self.bulk, self.call = node.kv, node.bulk, redis.call
        self._table = node.table
        self._coordinator = coordinator

    def limit(self, *, rows: int = 0, size: int = 0) -> None:
        """Give the keyspace these limits, and wait until the node goes by them."""

        def change(table: Table) -> Table:
            keyspace = replace(
                default_keyspace(table.cluster), max_rows_per_s=rows, max_bytes_per_s=size
            )
            known = KeyspaceList(changed_at=table.table_version + 1, keyspaces=(keyspace,))
            return replace(table, keyspace_list=known)

        def goes_by_them() -> bool:
            shown = self._table.GetTable(table_pb2.GetTableRequest()).keyspaces.keyspaces
            return [(k.max_rows_per_s, k.max_bytes_per_s) for k in shown] == [(rows, size)]

        self._coordinator.change_table(change)
        wait_until(goes_by_them, "the node knows of the limits")

    def put(self, key: bytes, value: bytes = b"1") -> Any:
        return self.kv.Put(kv_pb2.PutRequest(key=key, value=value))

    def entry(self, key: bytes) -> tuple[bytes, int, int]:
        found = self.kv.Get(kv_pb2.GetRequest(key=key))
        return found.value, found.version, found.expires_at_ms


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ScriptedCoordinator]:
    with ScriptedCoordinator(Script()) as running:
        yield running


@pytest.fixture(scope="module")
def metrics() -> str:
    return free_address()


@pytest.fixture(scope="module")
def door(
    coordinator: ScriptedCoordinator, metrics: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Door]:
    data, address = tmp_path_factory.mktemp("quotas") / "n1", free_address()
    flags = ("--redis-listen", address, "--metrics-listen", metrics)
    with running_node(data, coordinator, *flags) as node, RespClient(address) as redis:
        yield Door(node, redis, coordinator)


def overdraw(door: Door) -> None:
    """Give the keyspace a limit, and be let in with so much that nothing else is for hours. A node
    shows a table to its callers a moment before it counts by it.
    """
    door.limit()
    door.limit(size=1)

    def is_over() -> bool:
        try:
            door.put(b"large", LARGE)
        except grpc.RpcError as error:
            return isinstance(rpc.error_of(error), QuotaExceededError)
        return False

    wait_until(is_over, "the limit to be used up")


def own(*command: Any) -> Callable[[Door], Any]:
    """Return a command of Koinon's own clients."""

    def call(door: Door) -> Any:
        reply = door.call(*command)
        if isinstance(reply, hiredis.ReplyError):
            raise typed(reply)[0]
        return reply

    return call


def get_rows(door: Door, keys: list[bytes]) -> Any:
    return door.kv.BatchGet(kv_pb2.BatchGetRequest(keys=keys, partition_ids=partitions_of(keys)))


def rows_of(door: Door, keys: list[bytes]) -> kv_pb2.BatchGetResponse:
    """As ``get_rows``, by a command."""
    request = kv_pb2.BatchGetRequest(keys=keys, partition_ids=partitions_of(keys))
    reply = own("KOINON.GETMANY", request.SerializeToString())(door)
    return kv_pb2.BatchGetResponse.FromString(reply)


def write_rows(door: Door, keys: list[bytes], deletes: tuple[int, ...] = ()) -> Any:
    return door.kv.BatchWrite(
        kv_pb2.BatchWriteRequest(
            keys=keys, values=[b"2"] * len(keys), partition_ids=partitions_of(keys), deletes=deletes
        )
    )


def update_row(door: Door, update: kv_pb2.Update) -> Any:
    return door.kv.BatchUpdate(
        kv_pb2.BatchUpdateRequest(keys=[KEY], partition_ids=partitions_of([KEY]), updates=[update])
    )


def commit(door: Door) -> Any:
    (partition_id,) = partitions_of([KEY])
    put = kv_pb2.Operation(key=KEY, put=kv_pb2.PutValue(value=b"2"))
    return door.kv.CommitBatch(
        kv_pb2.CommitBatchRequest(partition_id=partition_id, operations=[put])
    )


def page_of(door: Door, **options: Any) -> kv_pb2.ScanResponse:
    """Return a page of a scan of all partitions that was asked for by a command."""
    request = kv_pb2.ScanRequest(partition_ids=range(PARTITIONS), **options)
    return kv_pb2.ScanResponse.FromString(own("KOINON.SCAN", request.SerializeToString())(door))


SINGLE: dict[str, Callable[[Door], Any]] = {
    "Get": lambda door: door.kv.Get(kv_pb2.GetRequest(key=KEY)),
    "Put": lambda door: door.put(KEY, b"2"),
    "Put if absent": lambda door: door.kv.Put(
        kv_pb2.PutRequest(key=ABSENT, value=b"2", if_version=0)
    ),
    "Delete": lambda door: door.kv.Delete(kv_pb2.DeleteRequest(key=KEY)),
    "CommitBatch": commit,
    "Scan": lambda door: door.kv.Scan(kv_pb2.ScanRequest(partition_ids=range(PARTITIONS))),
    "ReadColumns": lambda door: door.bulk.ReadColumns(
        loads_pb2.ReadColumnsRequest(partition_ids=range(PARTITIONS))
    ),
    "KOINON.GET": own("KOINON.GET", KEY, 0),
    "KOINON.ENTRY": own("KOINON.ENTRY", KEY, 0),
    "KOINON.EXISTS": own("KOINON.EXISTS", KEY, 0),
    "KOINON.PUT": own("KOINON.PUT", KEY, b"2", 0, 0, "", 0),
    "KOINON.DELETE": own("KOINON.DELETE", KEY, 0, "", 0),
    "KOINON.INCREMENT": own("KOINON.INCREMENT", KEY, 1, 0, 0, 0),
    "KOINON.TOUCH": own("KOINON.TOUCH", KEY, 5_000, 0, 0),
    "KOINON.SCAN": page_of,
}
"""Requests that are refused by an error."""

BATCHES: dict[str, Callable[[Door], Any]] = {
    "BatchGet": lambda door: get_rows(door, [KEY, ABSENT]),
    "KOINON.GETMANY": lambda door: rows_of(door, [KEY, ABSENT]),
    "BatchWrite": lambda door: write_rows(door, [KEY, ABSENT]),
    "deletes": lambda door: write_rows(door, [KEY, ABSENT], deletes=(0, 1)),
    "increment": lambda door: update_row(door, kv_pb2.Update(increment=kv_pb2.Increment(by=1))),
}
"""Requests whose answer refuses partitions."""

REDIS: tuple[tuple[Any, ...], ...] = (
    ("GET", KEY),
    ("MGET", KEY),
    ("SET", KEY, b"2"),
    ("SET", KEY, b"2", "NX"),
    ("MSET", KEY, b"2"),
    ("MSETNX", KEY, b"2"),
    ("SETRANGE", KEY, 0, b"2"),
    ("DEL", KEY),
    ("INCR", KEY),
    ("GETEX", KEY, "PX", 5_000),
    ("EXPIRE", KEY, 5),
    ("SCAN", 0),
)


def is_refusal(error: KoinonError) -> bool:
    return isinstance(error, QuotaExceededError) and (
        error.keyspace,
        error.unit,
        error.limit,
        error.retry_after_ms,
    ) == ("default", "bytes", 1, WAIT_MS)


def test_everything_is_refused_while_the_keyspace_is_over_its_limit_and_nothing_is_applied(
    door: Door,
) -> None:
    door.limit()
    door.put(KEY)
    before = door.entry(KEY)
    overdraw(door)
    for name, call in SINGLE.items():
        try:
            error = refusal(lambda call=call: call(door))  # type: ignore[misc]
        except KoinonError as raised:  # by a command
            error = raised
        assert is_refusal(error), (name, error)
    for name, call in BATCHES.items():
        answer = call(door)
        errors = [convert.error_from_proto(refused.error) for refused in answer.refusals]
        assert errors, name
        assert all(map(is_refusal, errors)), (name, errors)
    for command in REDIS:
        reply = door.call(*command)
        assert isinstance(reply, hiredis.ReplyError), (command, reply)
        assert str(reply).startswith("BUSY keyspace 'default' is at its limit of 1 bytes a second")
    assert door.call("MULTI") == b"OK"
    door.call("SET", KEY, b"2")
    assert str(door.call("EXEC")).startswith("BUSY")
    assert isinstance(door.call("DBSIZE"), int)  # a number, and no row
    door.limit()
    assert door.entry(KEY) == before
    assert not door.kv.Get(kv_pb2.GetRequest(key=ABSENT)).found


def test_rows_are_limited_as_bytes_are_and_what_is_refused_is_counted(
    door: Door, metrics: str
) -> None:
    door.limit()
    door.limit(rows=1)
    keys = [b"row/%d" % n for n in range(3_000)]  # the partition that is let in has very many
    refused = {r.partition_id for r in write_rows(door, keys).refusals}
    assert len(refused) == PARTITIONS - 1
    error = refusal(lambda: door.kv.Get(kv_pb2.GetRequest(key=keys[0])))
    assert isinstance(error, QuotaExceededError)
    assert (error.unit, error.limit) == ("rows", 1)
    assert 10_000 < error.retry_after_ms < WAIT_MS
    rows = sum(p in refused for p in partitions_of(keys))
    door.limit()
    found = get_rows(door, keys)
    assert len(found.missing) == rows, "a partition is let in whole, or not at all"
    assert scrape(metrics).sum("koinon_quota_refused_rows_total", keyspace="default") > rows


def test_pages_are_as_large_as_the_limit_lets_them_be(door: Door) -> None:
    door.limit()
    write_rows(door, [b"page/%d" % n for n in range(500)])
    everywhere = range(PARTITIONS)
    door.limit(rows=200)  # 20 at once
    page = door.kv.Scan(kv_pb2.ScanRequest(partition_ids=everywhere))
    assert 1 <= len(page.keys) <= 20
    assert page.HasField("next")
    door.limit()
    door.limit(rows=200)
    page = page_of(door)
    assert 1 <= len(page.keys) <= 20
    assert page.HasField("next")
    door.limit()
    door.limit(rows=200)
    page = door.bulk.ReadColumns(loads_pb2.ReadColumnsRequest(partition_ids=everywhere))
    assert 1 <= columns.unpack(page.columns).header.rows <= 20
    assert page.HasField("next")
    door.limit()


SHOWING: dict[str, Callable[[Door], Any]] = {
    "Get": SINGLE["Get"],
    "KOINON.GET": SINGLE["KOINON.GET"],
    "BatchGet": lambda door: get_rows(door, [KEY]),
    "KOINON.GETMANY": lambda door: rows_of(door, [KEY]),
    "Scan": lambda door: door.kv.Scan(
        kv_pb2.ScanRequest(partition_ids=range(PARTITIONS), prefix=KEY)
    ),
    "KOINON.SCAN": lambda door: page_of(door, prefix=KEY),
    "ReadColumns": lambda door: door.bulk.ReadColumns(
        loads_pb2.ReadColumnsRequest(partition_ids=range(PARTITIONS), prefix=KEY)
    ),
    "GETEX": lambda door: door.call("GETEX", KEY),
    "BITOP": lambda door: door.call("BITOP", "NOT", KEY, KEY),
    "RENAME": lambda door: door.call("RENAME", KEY, KEY),
    "EXEC": lambda door: (door.call("MULTI"), door.call("GET", KEY), door.call("EXEC")),
}


@pytest.mark.parametrize("name", SHOWING)
def test_bytes_that_are_shown_or_copied_are_paid_for_afterwards(door: Door, name: str) -> None:
    door.limit()
    door.put(KEY, LARGE)
    door.limit(size=1_000)
    SHOWING[name](door)  # its key alone is far below what is let in at once
    error = refusal(lambda: door.kv.Get(kv_pb2.GetRequest(key=KEY)))
    assert isinstance(error, QuotaExceededError)
    assert error.retry_after_ms > 10_000
    door.limit()
