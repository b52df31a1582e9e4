"""Attempts of hostile callers that are let in as far as every stranger is, and no further."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import hiredis
import pytest

from koinon_node.resp.connection import STRANGERS_BYTES_MAX
from koinon_proto.contract.access import (
    Access,
    AccessState,
    Action,
    Effect,
    Grant,
    Role,
    User,
    make_token,
)
from koinon_proto.contract.errors import PermissionDeniedError
from koinon_proto.security.audit import Audit
from koinon_proto.security.names import ANY_SERVER, Kind
from koinon_proto.server.rpc import error_of
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc, replication_pb2, replication_pb2_grpc
from tests.kit.waiting import wait_until
from tests.node.kit.resp_client import packed
from tests.security.servers import Servers, serving
from tests.security.test_grants import Resp
from tests.security.test_permissions import partitions

CALL_S = 60.0
TOKEN, TOKEN_TEXT = make_token("app", created_s=1)
ROLE = Role(
    name="app",
    grants=(Grant(effect=Effect.ALLOW, actions=(Action.READ, Action.WRITE), prefix=b"app:"),),
)


@pytest.fixture(scope="module")
def audit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "n1.jsonl"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, audit_file: Path) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("hostile"), Audit(str(audit_file), every=1)) as found:
        users = (User(name="app", roles=("app",)),)
        state = AccessState(version=1, roles=(ROLE,), users=users, tokens=(TOKEN,))
        found.set_access(Access(state))
        yield found


@pytest.fixture
def stranger(servers: Servers) -> Iterator[Resp]:
    connection = Resp(servers, None)
    yield connection
    connection.close()


def test_who_has_not_said_who_it_is_cannot_send_much(stranger: Resp) -> None:
    try:
        reply = stranger("SET", "app:1", b"x" * (4 * STRANGERS_BYTES_MAX))
    except OSError:  # closed while it still came
        return
    assert "Protocol error" in str(reply)


def test_a_large_value_may_follow_its_token_at_once(stranger: Resp) -> None:
    value = b"x" * 1_000_000
    stranger._socket.sendall(packed("AUTH", TOKEN_TEXT) + packed("KOINON.PUT", "app:1", value,
                             "0", "0", "", "0") + packed("KOINON.GET", "app:1", "0"))  # fmt: skip
    assert stranger("PING") == b"OK"  # the replies come in their order
    version, found = (_next(stranger) for _ in range(2))
    assert int(version) > 0
    assert found == value


def _next(connection: Resp) -> Any:
    while (reply := connection._reader.gets()) is False:
        connection._reader.feed(connection._socket.recv(65_536))
    return reply


def test_a_connection_that_is_reset_is_nobodys_again(servers: Servers, stranger: Resp) -> None:
    assert stranger("AUTH", TOKEN_TEXT) == b"OK"
    assert stranger("RESET") == b"RESET"
    assert str(stranger("GET", "app:1")).startswith("NOAUTH")
    root = Resp(servers, Kind.USER, "root")
    assert root("AUTH", TOKEN_TEXT) == b"OK"
    assert str(root("SCAN", "0")).startswith("NOPERM")
    assert root("RESET") == b"RESET"
    assert not str(root("SCAN", "0")).startswith("NOPERM")
    root.close()


def test_a_node_reads_copies_of_its_own_partitions_only(servers: Servers) -> None:
    """A certificate that names a node lets it take part, and not read what others hold."""

    def answers(node: str, method: str, request: Any) -> Any:
        dialing = servers.identities.dialing(Kind.NODE, node)
        with dialing.channel(servers.node, ANY_SERVER, ()) as channel:
            call = getattr(replication_pb2_grpc.ReplicationStub(channel), method)
            try:
                return call(request, timeout=CALL_S)
            except grpc.RpcError as error:
                return error_of(error)

    for method, request in (
        ("ReadPage", replication_pb2.ReadPageRequest(partition_id=1, snapshot=True)),
        ("ReadKeys", replication_pb2.ReadKeysRequest(partition_id=1, keys=[b"app:1"])),
    ):
        assert isinstance(answers("n9", method, request), PermissionDeniedError)
        assert not isinstance(answers("n1", method, request), PermissionDeniedError)


def test_refusals_are_in_the_audit_log_with_how_many_rows_and_without_keys(
    servers: Servers, audit_file: Path
) -> None:
    def noted() -> list[dict[str, Any]]:
        return [json.loads(line) for line in audit_file.read_text().splitlines()]

    keys = [b"app:7", b"private-1", b"app:8", b"private-2"]
    request = kv_pb2.BatchGetRequest(keys=keys, partition_ids=partitions(keys))
    dialing = servers.identities.dialing(Kind.CLIENT, token=TOKEN_TEXT)
    with dialing.channel(servers.node, ANY_SERVER, ()) as channel:
        stub = kv_pb2_grpc.KeyValueStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.BatchGet(request, timeout=CALL_S, metadata=dialing.metadata)
        error = error_of(raised.value)
        assert isinstance(error, PermissionDeniedError)
        assert error.rows == (1, 3)
        request = kv_pb2.BatchGetRequest(keys=keys[:1], partition_ids=partitions(keys[:1]))
        stub.BatchGet(request, timeout=CALL_S, metadata=dialing.metadata)
    guest = Resp(servers, None)
    assert isinstance(guest("AUTH", "koinon_wrong"), hiredis.ReplyError)
    guest("AUTH", TOKEN_TEXT)
    guest("MGET", "app:1", "private-3")
    guest.close()
    wait_until(lambda: any(line["method"] == "redis:MGET" for line in noted()), "the last line")
    lines = noted()
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    by_grpc = [line for line in lines if line["method"].endswith("/BatchGet")]
    refused, served = by_grpc
    assert (refused["who"], refused["outcome"]) == ("user app", "permission_denied")
    assert (refused["action"], refused["rows_refused"]) == ("read", 2)
    assert (served["outcome"], "action" in served) == ("ok", False)
    wrong = next(line for line in lines if line["method"] == "redis:AUTH")
    assert (wrong["who"], wrong["outcome"]) == ("a client without a token", "unauthenticated")
    assert next(line for line in lines if line["method"] == "redis:MGET")["action"] == "read"
    assert "private" not in audit_file.read_text()
    assert TOKEN_TEXT not in audit_file.read_text()


def test_leave_that_was_taken_before_exec_is_in_the_audit_log(
    servers: Servers, stranger: Resp, audit_file: Path
) -> None:
    stranger("AUTH", TOKEN_TEXT)
    assert stranger("MULTI") == b"OK"
    assert stranger("SETEX", "app:1", "60", "2") == b"QUEUED"
    before = servers.access
    try:
        servers.set_access(Access(replace(before.state, version=2, roles=())))
        assert "NOPERM" in str(stranger("EXEC"))
    finally:
        servers.set_access(before)
    line = '"method": "redis:SETEX", "outcome": "permission_denied"'
    wait_until(lambda: line in audit_file.read_text(), "the refusal to be noted")
