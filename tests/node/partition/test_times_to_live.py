"""The default and the longest time to live of a keyspace hold for every kind of write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hiredis
import pytest

from koinon_proto.contract import convert
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError
from koinon_proto.contract.keyspaces import KeyspaceList, default_keyspace
from koinon_proto.contract.table import Table
from koinon_proto.v1 import kv_pb2
from tests.kit.addresses import free_address
from tests.kit.waiting import wait_until
from tests.node.kit.resp_client import RespClient, typed
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import NodeProcess, partitions_of, refusal, running_node

HOUR_MS, DAY_MS = 3_600_000, 24 * 3_600_000
TOO_LONG_MS = DAY_MS + 1
Write = Callable[["Door", bytes, int], Any]
"""Writes the key with a time to live; 0: names none."""


class Door:
    """Both ports of a node."""

    def __init__(self, node: NodeProcess, redis: RespClient) -> None:
        self.kv = node.kv
        self.call = redis.call

    def expires_at_ms(self, key: bytes) -> int:
        found = self.kv.Get(kv_pb2.GetRequest(key=key))
        assert found.found
        return int(found.expires_at_ms)


def set_times(coordinator: ScriptedCoordinator, default_ms: int, max_ms: int) -> None:
    def change(table: Table) -> Table:
        keyspace = replace(
            default_keyspace(table.cluster), default_ttl_ms=default_ms, max_ttl_ms=max_ms
        )
        known = KeyspaceList(changed_at=table.table_version + 1, keyspaces=(keyspace,))
        return replace(table, keyspace_list=known)

    coordinator.change_table(change)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ScriptedCoordinator]:
    with ScriptedCoordinator(Script()) as running:
        yield running


@pytest.fixture(scope="module")
def door(
    coordinator: ScriptedCoordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Door]:
    data, address = tmp_path_factory.mktemp("ttl") / "n1", free_address()
    with (
        running_node(data, coordinator, "--redis-listen", address) as node,
        RespClient(address) as redis,
    ):
        yield Door(node, redis)


@pytest.fixture
def limited(coordinator: ScriptedCoordinator, door: Door) -> Door:
    """The keyspace has a default of an hour, and a maximum of a day."""
    set_times(coordinator, HOUR_MS, DAY_MS)

    def goes_by_both() -> bool:
        door.call("SET", b"probe", b"v")
        left_ms = door.expires_at_ms(b"probe") - time.time() * 1_000
        return put_is_refused(door) and HOUR_MS / 2 < left_ms < 2 * HOUR_MS

    wait_until(goes_by_both, "the node knows of both")
    return door


def put_is_refused(door: Door) -> bool:
    reply = door.call("SET", b"probe", b"v", "PX", TOO_LONG_MS)
    return isinstance(reply, hiredis.ReplyError)


# --- every way to write ------------------------------------------------------------------------


def put(door: Door, key: bytes, ttl_ms: int) -> Any:
    return door.kv.Put(kv_pb2.PutRequest(key=key, value=b"1", ttl_ms=ttl_ms))


def batch_write(door: Door, key: bytes, ttl_ms: int) -> Any:
    return write_rows(door, [key], [ttl_ms] if ttl_ms else [])


def write_rows(door: Door, keys: list[bytes], ttls: list[int]) -> Any:
    return door.kv.BatchWrite(
        kv_pb2.BatchWriteRequest(
            keys=keys, values=[b"1"] * len(keys), partition_ids=partitions_of(keys), ttl_ms=ttls
        )
    )


def update_rows(door: Door, keys: list[bytes], *updates: kv_pb2.Update) -> Any:
    return door.kv.BatchUpdate(
        kv_pb2.BatchUpdateRequest(keys=keys, partition_ids=partitions_of(keys), updates=updates)
    )


def increment(ttl_ms: int) -> kv_pb2.Update:
    return kv_pb2.Update(increment=kv_pb2.Increment(by=1, ttl_ms=ttl_ms))


def get_or_put(ttl_ms: int) -> kv_pb2.Update:
    return kv_pb2.Update(get_or_put=kv_pb2.GetOrPut(value=b"1", ttl_ms=ttl_ms))


def touch(ttl_ms: int) -> kv_pb2.Update:
    return kv_pb2.Update(touch=kv_pb2.Touch(ttl_ms=ttl_ms))


def commit(door: Door, key: bytes, operation: kv_pb2.Operation) -> Any:
    operation.key = key
    (partition_id,) = partitions_of([key])
    return door.kv.CommitBatch(
        kv_pb2.CommitBatchRequest(partition_id=partition_id, operations=[operation])
    )


def own(*command: Any) -> Write:
    """Return a write by a command of Koinon's own clients, in which TTL stands for the time."""

    def write(door: Door, key: bytes, ttl_ms: int) -> Any:
        reply = door.call(*(key if c == "KEY" else ttl_ms if c == "TTL" else c for c in command))
        if isinstance(reply, hiredis.ReplyError):
            raise typed(reply)[0]
        return reply

    return write


def in_transaction(door: Door, key: bytes, *command: Any) -> Any:
    assert door.call("MULTI") == b"OK"
    door.call(*command)
    return door.call("EXEC")[0]


NAMING: dict[str, Write] = {
    "put": put,
    "batch write": batch_write,
    "increment": lambda door, key, ttl: update_rows(door, [key], increment(ttl)),
    "get_or_put": lambda door, key, ttl: update_rows(door, [key], get_or_put(ttl)),
    "atomic put": lambda door, key, ttl: commit(
        door, key, kv_pb2.Operation(put=kv_pb2.PutValue(value=b"1", ttl_ms=ttl))
    ),
    "atomic increment": lambda door, key, ttl: commit(
        door, key, kv_pb2.Operation(increment=kv_pb2.Increment(by=1, ttl_ms=ttl))
    ),
    "KOINON.PUT": own("KOINON.PUT", "KEY", b"1", 0, "TTL", "", 0),
    "KOINON.INCREMENT": own("KOINON.INCREMENT", "KEY", 1, "TTL", 0, 0),
    "KOINON.GETORPUT": own("KOINON.GETORPUT", "KEY", b"1", "TTL", 0, 0),
}
"""Writes that have a place for a time to live."""

REDIS_MAKES = {
    "SET": ("SET", "KEY", b"1"),
    "SET NX": ("SET", "KEY", b"1", "NX"),
    "SET KEEPTTL": ("SET", "KEY", b"1", "KEEPTTL"),
    "SETNX": ("SETNX", "KEY", b"1"),
    "MSET": ("MSET", "KEY", b"1"),
    "APPEND": ("APPEND", "KEY", b"1"),
    "GETSET": ("GETSET", "KEY", b"1"),
    "SETRANGE": ("SETRANGE", "KEY", 0, b"1"),
    "INCR": ("INCR", "KEY"),
    "INCRBYFLOAT": ("INCRBYFLOAT", "KEY", "1"),
}
"""Commands of Redis that make a record and name no time."""

REDIS_NAMES = {
    "SET PX": ("SET", "KEY", b"1", "PX", TOO_LONG_MS),
    "SET NX PX": ("SET", "KEY", b"1", "NX", "PX", TOO_LONG_MS),
    "SETEX": ("SETEX", "KEY", DAY_MS // 1_000 + 1, b"1"),
    "PSETEX": ("PSETEX", "KEY", TOO_LONG_MS, b"1"),
    "EXPIRE": ("EXPIRE", "KEY", DAY_MS // 1_000 + 1),
    "PEXPIREAT": ("PEXPIREAT", "KEY", int(time.time() * 1_000) + 2 * DAY_MS),
    "GETEX PX": ("GETEX", "KEY", "PX", TOO_LONG_MS),
    "GETEX PERSIST": ("GETEX", "KEY", "PERSIST"),
    "PERSIST": ("PERSIST", "KEY"),
}
"""Commands of Redis that name more than a day, or for ever."""


def with_key(command: tuple[Any, ...], key: bytes) -> tuple[Any, ...]:
    return tuple(key if part == "KEY" else part for part in command)


def lives(door: Door, key: bytes, ttl_ms: int, since_ms: float) -> None:
    """Assert that the record lives so long, from when it was written."""
    left = door.expires_at_ms(key) - ttl_ms
    assert since_ms - 1_000 <= left <= time.time() * 1_000 + 1_000


# --- the default -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMING)
def test_write_that_names_no_time_gets_the_default_and_one_that_does_gets_that(
    limited: Door, name: str
) -> None:
    since_ms = time.time() * 1_000
    for ttl_ms, expected in ((0, HOUR_MS), (1_000_000, 1_000_000), (DAY_MS, DAY_MS)):
        key = f"{name}/{ttl_ms}".encode()
        NAMING[name](limited, key, ttl_ms)
        lives(limited, key, expected, since_ms)


@pytest.mark.parametrize("name", REDIS_MAKES)
def test_record_that_a_command_of_redis_makes_gets_the_default(limited: Door, name: str) -> None:
    since_ms = time.time() * 1_000
    plain, in_batch = f"{name}/plain".encode(), f"{name}/batch".encode()
    reply = limited.call(*with_key(REDIS_MAKES[name], plain))
    assert in_transaction(limited, in_batch, *with_key(REDIS_MAKES[name], in_batch)) == reply
    for key in (plain, in_batch):
        lives(limited, key, HOUR_MS, since_ms)


def test_rows_of_a_batch_that_name_no_time_get_the_default(limited: Door) -> None:
    since_ms = time.time() * 1_000
    keys = [b"rows/%d" % n for n in range(3)]
    write_rows(limited, keys, [0, 5_000_000, 0])
    for key, ttl_ms in zip(keys, (HOUR_MS, 5_000_000, HOUR_MS), strict=True):
        lives(limited, key, ttl_ms, since_ms)


def test_update_keeps_the_expiry_that_a_record_has(limited: Door) -> None:
    put(limited, b"kept", 77_000_000)
    before = limited.expires_at_ms(b"kept")
    update_rows(limited, [b"kept"], increment(0))
    limited.call("APPEND", b"kept", b"0")
    limited.call("SETRANGE", b"kept", 0, b"7")
    limited.call("INCRBYFLOAT", b"kept", "1")
    limited.call("SET", b"kept", b"1", "KEEPTTL")
    assert limited.call("GETEX", b"kept") == b"1"
    assert limited.expires_at_ms(b"kept") == before


def test_where_there_is_only_a_maximum_it_is_the_default(
    coordinator: ScriptedCoordinator, limited: Door
) -> None:
    set_times(coordinator, 0, DAY_MS)

    def lives_a_day() -> bool:
        put(limited, b"only", 0)
        return limited.expires_at_ms(b"only") > (time.time() * 1_000) + HOUR_MS * 2

    wait_until(lives_a_day, "the default has gone")
    lives(limited, b"only", DAY_MS, time.time() * 1_000 - 10_000)


def test_default_alone_forbids_nothing_and_neither_means_for_ever(
    coordinator: ScriptedCoordinator, limited: Door
) -> None:
    set_times(coordinator, HOUR_MS, 0)
    wait_until(lambda: not put_is_refused(limited), "the maximum has gone")
    put(limited, b"free", 0)
    lives(limited, b"free", HOUR_MS, time.time() * 1_000 - 10_000)
    assert limited.call("PERSIST", b"free") == 1
    assert limited.expires_at_ms(b"free") == 0
    set_times(coordinator, 0, 0)

    def lives_for_ever() -> bool:
        put(limited, b"free", 0)
        return limited.expires_at_ms(b"free") == 0

    wait_until(lives_for_ever, "the default has gone")


# --- the maximum -------------------------------------------------------------------------------


def refused(write: Callable[[], Any]) -> KoinonError:
    try:
        return refusal(write)
    except KoinonError as error:  # of a command
        return error


@pytest.mark.parametrize("name", NAMING)
def test_write_that_names_more_than_the_maximum_is_refused_and_writes_nothing(
    limited: Door, name: str
) -> None:
    key = f"{name}/refused".encode()
    error = refused(lambda: NAMING[name](limited, key, TOO_LONG_MS))
    assert isinstance(error, InvalidArgumentError)
    assert (error.limit, error.actual) == (DAY_MS, TOO_LONG_MS)
    assert "longer than records of keyspace 'default' may live" in str(error)
    assert not limited.kv.Get(kv_pb2.GetRequest(key=key)).found


@pytest.mark.parametrize("name", REDIS_NAMES)
def test_command_of_redis_that_names_more_is_refused_and_changes_nothing(
    limited: Door, name: str
) -> None:
    for in_batch in (False, True):
        key = f"{name}/{in_batch}".encode()
        put(limited, key, 5_000_000)
        before = limited.expires_at_ms(key)
        command = with_key(REDIS_NAMES[name], key)
        reply = in_transaction(limited, key, *command) if in_batch else limited.call(*command)
        assert isinstance(reply, hiredis.ReplyError)
        assert f"limit {DAY_MS}" in str(reply)
        assert limited.expires_at_ms(key) == before


@pytest.mark.parametrize("ttl_ms", [0, TOO_LONG_MS])
def test_touch_for_ever_or_for_too_long_is_refused(limited: Door, ttl_ms: int) -> None:
    put(limited, b"touched", 0)
    before = limited.expires_at_ms(b"touched")
    touches: tuple[Write, ...] = (
        lambda door, key, ttl: update_rows(door, [key], touch(ttl)),
        own("KOINON.TOUCH", "KEY", "TTL", 0, 0),
    )
    for write in touches:
        error = refused(lambda write=write: write(limited, b"touched", ttl_ms))  # type: ignore[misc]
        assert isinstance(error, InvalidArgumentError)
        assert error.limit == DAY_MS
    assert limited.expires_at_ms(b"touched") == before


def test_rows_beside_one_that_is_refused_are_written(limited: Door) -> None:
    """A client sends what its threads write in one message: they know nothing of one another."""
    keys = [b"beside/%d" % n for n in range(4)]
    reply = write_rows(limited, keys, [0, TOO_LONG_MS, 1_000_000, TOO_LONG_MS])
    updated = update_rows(
        limited,
        [b"n/0", b"n/1", keys[0], b"n/2"],
        increment(0),
        increment(TOO_LONG_MS),
        touch(0),
        get_or_put(0),
    )
    for answer, bad in ((reply, [1, 3]), (updated, [1, 2])):
        assert [e.row for e in answer.row_errors] == bad
        errors = [convert.error_from_proto(e.error) for e in answer.row_errors]
        assert all(isinstance(error, InvalidArgumentError) for error in errors)
    found = limited.kv.BatchGet(
        kv_pb2.BatchGetRequest(keys=keys, partition_ids=partitions_of(keys))
    )
    assert list(found.missing) == [1, 3]
    assert [r.number for r in updated.results] == [1, 0, 0, 0]


def test_delete_has_no_time_to_live(limited: Door) -> None:
    put(limited, b"deleted", 0)
    keys = [b"deleted"]
    reply = limited.kv.BatchWrite(
        kv_pb2.BatchWriteRequest(
            keys=keys,
            values=[b""],
            partition_ids=partitions_of(keys),
            deletes=[0],
            ttl_ms=[TOO_LONG_MS],
        )
    )
    assert not reply.row_errors
    assert not limited.kv.Get(kv_pb2.GetRequest(key=b"deleted")).found
