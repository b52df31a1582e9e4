"""Permissions of users on keys, through the services of a node and a coordinator with TLS."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import hiredis
import pytest

from koinon_proto.contract.access import (
    Access,
    AccessState,
    Action,
    Effect,
    Grant,
    Role,
    User,
)
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.contract.errors import PermissionDeniedError, TableBehindError
from koinon_proto.partitioner import partitioner
from koinon_proto.security.names import ANY_SERVER, Kind
from koinon_proto.server.rpc import error_of
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc, loads_pb2, loads_pb2_grpc
from tests.kit.waiting import wait_until
from tests.node.kit.resp_client import packed, typed
from tests.node.kit.staged_chunks import chunk_of
from tests.node.kit.support import refusal
from tests.security.servers import PARTITIONS, Servers, serving

KEYS = (Action.READ, Action.WRITE, Action.SCAN, Action.LOAD)


def allow(*actions: Action, prefix: bytes) -> Grant:
    return Grant(effect=Effect.ALLOW, actions=actions, prefix=prefix)


ROLES = {
    "app": (
        allow(*KEYS, prefix=b"a/"),
        Grant(effect=Effect.DENY, actions=(Action.WRITE, Action.LOAD), prefix=b"a/fixed/"),
        Grant(effect=Effect.DENY, actions=(Action.SCAN,), prefix=b"a/hidden/"),
    ),
    "reader": (allow(Action.READ, prefix=b"a/"),),
    "writer": (allow(Action.WRITE, prefix=b"a/"),),
    "scanner": (allow(Action.SCAN, prefix=b""),),
    "viewer": (allow(Action.VIEW, prefix=b""),),
    "loader": (allow(Action.LOAD, prefix=b""),),
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("permissions")) as running:
        roles = tuple(Role(name=name, grants=grants) for name, grants in sorted(ROLES.items()))
        users = tuple(User(name=name, roles=(name,)) for name in sorted(ROLES))
        running.set_access(Access(AccessState(version=1, roles=roles, users=users)))
        yield running


class UserOf:
    """A user's calls."""

    def __init__(self, servers: Servers, name: str) -> None:
        dialing = servers.identities.dialing(Kind.USER, name)
        self.node = dialing.channel(servers.node, ANY_SERVER, ())
        self.coordinator = dialing.channel(servers.coordinator, ANY_SERVER, ())
        self.kv = kv_pb2_grpc.KeyValueStub(self.node)
        self.bulk = loads_pb2_grpc.BulkStub(self.node)
        self.loads = loads_pb2_grpc.LoadsStub(self.coordinator)
        context = dialing.context()
        assert context is not None
        host, _, port = servers.redis.rpartition(":")
        self.socket = context.wrap_socket(
            socket.create_connection((host, int(port)), 15), server_hostname=ANY_SERVER
        )
        self._reader = hiredis.Reader()

    def redis(self, *arguments: Any) -> Any:
        self.socket.sendall(packed(*arguments))
        while (reply := self._reader.gets()) is False:
            data = self.socket.recv(65_536)
            assert data
            self._reader.feed(data)
        return reply

    def close(self) -> None:
        self.socket.close()
        self.node.close()
        self.coordinator.close()


@pytest.fixture(scope="module")
def users(servers: Servers) -> Iterator[dict[str, UserOf]]:
    made = {name: UserOf(servers, name) for name in (*ROLES, "root")}
    yield made
    for user in made.values():
        user.close()


@pytest.fixture(autouse=True)
def records(users: dict[str, UserOf]) -> None:
    """a/1, a/fixed/1 and b/1 are there; nothing else."""
    root = users["root"].kv
    found = root.Scan(kv_pb2.ScanRequest(partition_ids=range(PARTITIONS), keys_only=True)).keys
    for key in found:
        root.Delete(kv_pb2.DeleteRequest(key=key))
    for key in (b"a/1", b"a/fixed/1", b"b/1"):
        root.Put(kv_pb2.PutRequest(key=key, value=b"1"))


def partitions(keys: list[bytes]) -> list[int]:
    ids: list[int] = partitioner("murmur2", PARTITIONS).partitions_of(keys).tolist()
    return ids


def denied(call: Any) -> str:
    error = refusal(call)
    assert isinstance(error, PermissionDeniedError), error
    return str(error)


def there(users: dict[str, UserOf], key: bytes) -> bytes | None:
    reply = users["root"].kv.Get(kv_pb2.GetRequest(key=key))
    value: bytes = reply.value
    return value if reply.found else None


def until_heard(stage: Callable[[], Any]) -> None:
    """Stage once the node has heard that the load is open."""

    def heard() -> bool:
        try:
            assert not stage().refusals
        except grpc.RpcError as failure:
            if isinstance(error_of(failure), LoadClosedError | TableBehindError):
                return False
            raise
        return True

    wait_until(heard, "the node to have heard of the load")


# --- gRPC ---------------------------------------------------------------------------------------


def test_single_operations_are_refused_by_key(users: dict[str, UserOf]) -> None:
    app, reader, writer = (users[name].kv for name in ("app", "reader", "writer"))
    assert app.Get(kv_pb2.GetRequest(key=b"a/1")).value == b"1"
    assert reader.Get(kv_pb2.GetRequest(key=b"a/fixed/1")).found
    said = denied(lambda: app.Get(kv_pb2.GetRequest(key=b"b/1")))
    assert said.startswith("user app may not read key b'b/1'")
    denied(lambda: writer.Get(kv_pb2.GetRequest(key=b"a/1")))
    for request in (
        kv_pb2.PutRequest(key=b"b/1", value=b"2"),
        kv_pb2.PutRequest(key=b"a/fixed/1", value=b"2"),
    ):
        denied(lambda request=request: app.Put(request))
    denied(lambda: app.Delete(kv_pb2.DeleteRequest(key=b"b/1")))
    denied(lambda: reader.Put(kv_pb2.PutRequest(key=b"a/1", value=b"2")))
    assert (there(users, b"b/1"), there(users, b"a/fixed/1")) == (b"1", b"1")
    app.Put(kv_pb2.PutRequest(key=b"a/2", value=b"2"))
    assert there(users, b"a/2") == b"2"


def test_batch_with_a_key_that_is_not_allowed_is_refused_whole(users: dict[str, UserOf]) -> None:
    app, keys = users["app"].kv, [b"a/1", b"a/2", b"b/1"]
    ids = partitions(keys)
    said = denied(lambda: app.BatchGet(kv_pb2.BatchGetRequest(keys=keys, partition_ids=ids)))
    assert "may not read key b'b/1'" in said
    rows = kv_pb2.BatchGetRequest(keys=keys, partition_ids=ids).SerializeToString()
    assert "may not read key b'b/1'" in str(typed(users["app"].redis("KOINON.GETMANY", rows))[0])
    values = [b"2"] * 3
    write = kv_pb2.BatchWriteRequest(keys=keys, values=values, partition_ids=ids)
    assert "may not write key b'b/1'" in denied(lambda: app.BatchWrite(write))
    write.deletes.extend([0, 1, 2])
    denied(lambda: app.BatchWrite(write))
    touch = kv_pb2.Update(touch=kv_pb2.Touch())
    update = kv_pb2.BatchUpdateRequest(keys=keys, partition_ids=ids, updates=[touch] * 3)
    denied(lambda: app.BatchUpdate(update))
    assert there(users, b"a/1") == there(users, b"b/1") == b"1"
    assert there(users, b"a/2") is None


def test_updates_need_leave_to_read_and_to_write(users: dict[str, UserOf]) -> None:
    increment = kv_pb2.Update(increment=kv_pb2.Increment(by=1))
    request = kv_pb2.BatchUpdateRequest(
        keys=[b"a/1"], partition_ids=partitions([b"a/1"]), updates=[increment]
    )
    assert "may not read" in denied(lambda: users["writer"].kv.BatchUpdate(request))
    assert "may not write" in denied(lambda: users["reader"].kv.BatchUpdate(request))
    assert users["app"].kv.BatchUpdate(request).results[0].number == 2


def test_scan_needs_all_that_is_below_its_prefix(users: dict[str, UserOf]) -> None:
    def scan(name: str, prefix: bytes) -> list[bytes]:
        request = kv_pb2.ScanRequest(partition_ids=range(PARTITIONS), prefix=prefix)
        return sorted(users[name].kv.Scan(request).keys)

    def columns(name: str, prefix: bytes) -> Any:
        request = loads_pb2.ReadColumnsRequest(partition_ids=range(PARTITIONS), prefix=prefix)
        return users[name].bulk.ReadColumns(request)

    def page(name: str, prefix: bytes) -> Any:
        request = kv_pb2.ScanRequest(partition_ids=range(PARTITIONS), prefix=prefix)
        reply = users[name].redis("KOINON.SCAN", request.SerializeToString())
        if isinstance(reply, hiredis.ReplyError):
            raise typed(reply)[0]
        return sorted(kv_pb2.ScanResponse.FromString(reply).keys)

    assert scan("scanner", b"") == page("scanner", b"") == [b"a/1", b"a/fixed/1", b"b/1"]
    assert scan("app", b"a/fixed/") == page("app", b"a/fixed/") == [b"a/fixed/1"]
    assert sum(columns("app", b"a/fixed/").row_counts) == 1
    for prefix in (b"", b"a", b"a/", b"a/hidden/x", b"b/"):
        assert "may not scan" in denied(lambda prefix=prefix: scan("app", prefix))
        denied(lambda prefix=prefix: columns("app", prefix))
        with pytest.raises(PermissionDeniedError, match="user app may not scan"):
            page("app", prefix)
    denied(lambda: scan("reader", b"a/"))
    with pytest.raises(PermissionDeniedError, match="user reader may not scan"):
        page("reader", b"a/")


def test_bulk_load_is_refused_by_key_and_by_prefix(users: dict[str, UserOf]) -> None:
    app = users["app"]

    def opened(mode: Any, prefix: bytes = b"") -> int:
        request = loads_pb2.OpenLoadRequest(
            job_id=f"j{mode}{prefix!r}", mode=mode, prefix=prefix, timeout_ms=60_000
        )
        return int(app.loads.OpenLoad(request).load_id)

    def stage(load_id: int, attempt: int, *keys: bytes) -> None:
        by_partition: dict[int, list[bytes]] = {}
        for key, partition_id in zip(keys, partitions(list(keys)), strict=True):
            by_partition.setdefault(partition_id, []).append(key)
        request = loads_pb2.StageRequest(
            load_id=load_id,
            attempt=attempt,
            partition_ids=list(by_partition),
            numbers=range(len(by_partition)),
            chunks=[chunk_of([(k, b"v") for k in sorted(ks)]) for ks in by_partition.values()],
        )
        until_heard(lambda: app.bulk.Stage(request))

    load = opened(loads_pb2.LOAD_MODE_APPEND)
    many = [b"a/%d" % n for n in range(200)]
    stage(load, 1, *many)
    for wrong in (b"b/1", b"a/fixed/2", b"a"):
        denied(lambda wrong=wrong: stage(load, 2, *many, wrong))
    overwrite = loads_pb2.LOAD_MODE_OVERWRITE
    assert opened(overwrite, b"a/hidden/")
    for prefix in (b"", b"a/", b"a/fixed/", b"b/"):
        denied(lambda prefix=prefix: opened(overwrite, prefix))


def test_names_of_keys_that_are_there_twice_are_told_to_who_may_load_them(
    users: dict[str, UserOf],
) -> None:
    """A caller that prepares a load is told of equal keys that it may load, whoever staged them."""
    opened = users["app"].loads.OpenLoad(
        loads_pb2.OpenLoadRequest(
            job_id="twice", mode=loads_pb2.LOAD_MODE_APPEND, timeout_ms=60_000
        )
    )
    keys = [b"a/2", b"b/1"]
    ids = partitions(keys)
    assert ids[0] != ids[1]
    request = loads_pb2.StageRequest(
        load_id=opened.load_id,
        attempt=1,
        partition_ids=ids,
        numbers=[0, 1],
        chunks=[chunk_of([(key, b"1"), (key, b"2")]) for key in keys],
    )
    until_heard(lambda: users["root"].bulk.Stage(request))
    prepare = loads_pb2.PrepareRequest(
        load_id=opened.load_id, attempts=[1], partition_ids=ids, rows=[2, 2]
    )
    assert sorted(users["root"].bulk.Prepare(prepare).duplicate_keys) == keys
    reply = users["app"].bulk.Prepare(prepare)
    assert (reply.duplicate_rows, list(reply.duplicate_keys)) == (2, [b"a/2"])


# --- the Redis protocol ---------------------------------------------------------------------------


def noperm(reply: Any) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOPERM")


def test_commands_are_refused_by_key(users: dict[str, UserOf]) -> None:
    app, reader, writer = users["app"], users["reader"], users["writer"]
    assert app.redis("GET", "a/1") == b"1"
    assert noperm(app.redis("GET", "b/1"))
    assert noperm(app.redis("MGET", "a/1", "b/1"))
    assert noperm(app.redis("SET", "a/fixed/1", "2"))
    assert noperm(app.redis("MSET", "a/1", "2", "b/1", "2"))
    assert noperm(app.redis("DEL", "a/1", "b/1"))
    assert noperm(writer.redis("INCR", "a/1"))
    assert noperm(writer.redis("SET", "a/1", "2", "GET"))
    assert noperm(writer.redis("GETDEL", "a/1"))
    assert noperm(reader.redis("SET", "a/1", "2"))
    assert noperm(reader.redis("GETEX", "a/1"))
    assert noperm(writer.redis("GETSET", "a/1", "2"))
    assert noperm(writer.redis("GETRANGE", "a/1", 0, 1))
    assert noperm(app.redis("MSETNX", "a/1", "2", "b/1", "2"))
    assert (there(users, b"a/1"), there(users, b"b/1")) == (b"1", b"1")
    assert writer.redis("SET", "a/1", "2") == b"OK"
    assert app.redis("SET", "a/1", "3", "GET") == b"2"
    assert app.redis("INCR", "a/1") == 4
    assert app.redis("get", "a/1") == b"4"


def test_transaction_is_refused_by_key_and_leave_that_was_taken_since_counts(
    users: dict[str, UserOf], servers: Servers
) -> None:
    app, writer = users["app"], users["writer"]
    assert noperm(app.redis("WATCH", "b/1"))
    assert noperm(writer.redis("WATCH", "a/1")), "EXEC would tell whether it has changed"
    app.redis("MULTI")
    assert app.redis("SET", "a/1", "2") == b"QUEUED"
    assert noperm(app.redis("SET", "b/1", "2"))
    assert str(app.redis("EXEC")).startswith("EXECABORT")
    assert there(users, b"a/1") == b"1"
    app.redis("MULTI")
    assert app.redis("SET", "a/1", "2") == b"QUEUED"
    assert app.redis("GET", "a/1") == b"QUEUED"
    before = servers.access
    try:
        servers.set_access(Access(without_writing(before.state)))
        wrote, read = app.redis("EXEC")
    finally:
        servers.set_access(before)
    assert noperm(wrote)
    assert read == b"1"


def without_writing(state: AccessState) -> AccessState:
    """Return the state with reading as all that its roles allow."""
    grant = Grant(effect=Effect.ALLOW, actions=(Action.READ,))
    roles = tuple(replace(role, grants=(grant,)) for role in state.roles)
    return replace(state, version=state.version + 1, roles=roles)


def test_flush_needs_leave_to_load_every_key(users: dict[str, UserOf]) -> None:
    for name in ("app", "writer", "scanner", "viewer"):  # ``app`` may load below a prefix
        assert noperm(users[name].redis("FLUSHDB")), name
    assert there(users, b"b/1") == b"1"
    for command in ("FLUSHDB", "FLUSHALL"):
        assert users["loader"].redis(command) == b"OK"
        assert there(users, b"b/1") is None


def test_commands_on_many_keys_need_leave_to_scan(users: dict[str, UserOf]) -> None:
    app, scanner, viewer = users["app"], users["scanner"], users["viewer"]
    assert noperm(app.redis("SCAN", "0"))
    assert noperm(app.redis("SCAN", "0", "MATCH", "a/*"))
    assert app.redis("SCAN", "0", "COUNT", "1000", "MATCH", "a/fixed/*")[1] == [b"a/fixed/1"]
    assert len(scanner.redis("SCAN", "0", "COUNT", "1000")[1]) == 3
    assert noperm(app.redis("DBSIZE"))
    assert scanner.redis("DBSIZE") == viewer.redis("DBSIZE") == 3
    assert noperm(viewer.redis("SCAN", "0"))
    assert noperm(app.redis("CLUSTER", "COUNTKEYSINSLOT", "0"))
    assert viewer.redis("PING") == b"PONG"
    unknown = app.redis("NOSUCH", "a")
    assert "unknown command" in str(unknown)
