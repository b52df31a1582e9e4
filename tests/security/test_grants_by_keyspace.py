"""Grants that name a keyspace, given and taken by the command line: what clients may do then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import hiredis
import pytest
from typer.testing import CliRunner

import koinon
from koinon.operate.admin import Admin
from koinon_node.resp.commands.spec import Spec
from koinon_node.resp.commands.table import ALL
from koinon_proto.contract.errors import PermissionDeniedError
from koinon_proto.security.audit import Audit
from koinon_proto.security.names import ANY_SERVER, Kind
from koinon_proto.v1 import loads_pb2, loads_pb2_grpc
from tests.kit.command_line import koinon_app
from tests.kit.waiting import wait_until
from tests.security.servers import Servers, serving
from tests.security.test_grants import Resp, _own

KEY_ACTIONS = "read,write,scan,load"


@pytest.fixture(scope="module")
def audit_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The audit files of the node, in which every call is noted, and of the coordinator."""
    directory = tmp_path_factory.mktemp("audit")
    return directory / "n1.jsonl", directory / "c1.jsonl"


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, audit_files: tuple[Path, Path]
) -> Iterator[Servers]:
    of_node, of_coordinator = audit_files
    logs = Audit(str(of_node), every=1), Audit(str(of_coordinator))
    with serving(tmp_path_factory.mktemp("keyspaces"), *logs) as found:
        for name in ("a", "b"):
            found.create_keyspace(name, 4)
        yield found


@pytest.fixture(autouse=True)
def as_root(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOINON_TLS_BUNDLE", str(servers.identities.file(Kind.USER, "root")))
    monkeypatch.setenv("KOINON_COORDINATORS", servers.coordinator)


def admin(line: str) -> str:
    ended = CliRunner().invoke(koinon_app(), ["admin", *line.split()])
    assert ended.exit_code == 0, ended.output
    return ended.output


@pytest.fixture
def app(servers: Servers) -> Iterator[str]:
    """The user ``app``, which has the role ``app`` without a grant."""
    admin("roles create app")
    admin("users create app --role app")
    yield "app"
    admin("users drop app --yes")
    admin("roles drop app --yes")


def connect(servers: Servers, user: str, **options: Any) -> koinon.Client:
    bundle = str(servers.identities.file(Kind.USER, user))
    return koinon.connect(servers.coordinator, tls_bundle=bundle, timeout_ms=20_000, **options)


def operations(of: Any) -> dict[str, Callable[[], Any]]:
    """Each kind of operation on keys that begin with ``app:``."""
    return {
        "get": lambda: of.get(b"app:1"),
        "put": lambda: of.put(b"app:1", b"x"),
        "delete": lambda: of.delete(b"app:1"),
        "exists": lambda: of.exists(b"app:1"),
        "increment": lambda: of.increment(b"app:n"),
        "touch": lambda: of.touch(b"app:1", ttl_ms=60_000),
        "get or put": lambda: of.get_or_put(b"app:2", b"x"),
        "get many": lambda: of.get_many([b"app:1", b"app:2"]),
        "put many": lambda: of.put_many([(b"app:1", b"x")]).raise_for_errors(),
        "delete many": lambda: of.delete_many([b"app:3"]).raise_for_errors(),
        "scan": lambda: list(of.scan(prefix=b"app:")),
        "atomic batch": lambda: of.batch(b"app:1").put(b"app:1", b"y").commit(),
    }


def refused(of: Any) -> set[str]:
    """Return which kinds of operation are refused."""
    found = set()
    for name, carried_out in operations(of).items():
        try:
            carried_out()
        except PermissionDeniedError:
            found.add(name)
    return found


EVERYTHING = set(operations(None))


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_user_of_one_keyspace_is_refused_in_all_others(
    servers: Servers, app: str, transport: Any
) -> None:
    admin(f"roles grant app --allow {KEY_ACTIONS} --prefix app: --keyspace a")
    with connect(servers, app, transport=transport) as client:
        a, b = client.keyspace("a"), client.keyspace("b")
        assert refused(a) == set()
        assert refused(b) == EVERYTHING
        assert refused(client) == EVERYTHING
        with pytest.raises(PermissionDeniedError, match="of keyspace 'b'"):
            b.get(b"app:1")
        with pytest.raises(PermissionDeniedError):
            a.get(b"other")
        with pytest.raises(PermissionDeniedError):
            list(a.scan())


def test_user_of_default_is_refused_in_other_keyspaces(servers: Servers, app: str) -> None:
    admin(f"roles grant app --allow {KEY_ACTIONS} --prefix app: --keyspace default")
    with connect(servers, app) as client:
        client.put(b"app:1", b"x")
        assert client.get_many([b"app:1"]) == [b"x"]
        assert refused(client.keyspace("a")) == EVERYTHING


def test_denial_in_one_keyspace_holds_there_alone(servers: Servers, app: str) -> None:
    admin(f"roles grant app --allow {KEY_ACTIONS} --prefix app:")
    admin(f"roles grant app --deny {KEY_ACTIONS} --prefix app: --keyspace a")
    with connect(servers, app) as client:
        assert refused(client.keyspace("a")) == EVERYTHING
        assert refused(client.keyspace("b")) == set()
        client.put(b"app:1", b"x")


async def test_rows_of_a_batch_are_refused_by_the_grants_of_their_keyspace(
    servers: Servers, app: str
) -> None:
    admin("roles grant app --allow read,write --prefix app:")
    admin("roles grant app --deny read,write --prefix app:secret --keyspace a")
    keys = [b"app:1", b"app:secret:1", b"app:2", b"app:secret:2"]
    with connect(servers, app) as client:
        a, b = client.keyspace("a"), client.keyspace("b")
        result = b.put_many([(key, b"1") for key in keys])
        result.raise_for_errors()
        assert b.get_many(keys) == [b"1"] * 4
        with pytest.raises(PermissionDeniedError) as raised:
            a.get_many(keys)
        assert raised.value.rows == (1, 3)

    bundle = str(servers.identities.file(Kind.USER, app))
    async with koinon.aio.connect(
        servers.coordinator, tls_bundle=bundle, transport="grpc"
    ) as opened:
        there = await opened.keyspace("a")
        ended: list[Any] = await asyncio.gather(
            *(there.put(key, b"2") for key in keys), return_exceptions=True
        )
        ended = ended
    assert [isinstance(one, PermissionDeniedError) for one in ended] == [False, True] * 2


def test_grant_that_is_revoked_is_refused_at_once_in_its_keyspace_alone(
    servers: Servers, app: str
) -> None:
    for name in ("a", "b"):
        admin(f"roles grant app --allow read,write --prefix app: --keyspace {name}")
    with connect(servers, app) as client:
        a, b = client.keyspace("a"), client.keyspace("b")
        a.put(b"app:1", b"x")
        admin("roles revoke app --allow read,write --prefix app: --keyspace a")
        with pytest.raises(PermissionDeniedError):
            a.get(b"app:1")
        b.put(b"app:1", b"x")
        assert b.get(b"app:1") == b"x"


def test_grant_does_not_pass_to_another_keyspace_of_the_same_name(
    servers: Servers, app: str
) -> None:
    servers.create_keyspace("short", 4)
    admin("roles grant app --allow read,write --keyspace short")
    with connect(servers, app) as client:
        client.keyspace("short").put(b"k", b"x")
    root = servers.identities.dialing(Kind.USER, "root")
    with Admin(servers.coordinator, dialing=root, timeout_ms=20_000) as operator:
        operator.keyspaces.drop("short")
    servers.create_keyspace("short", 4)
    with connect(servers, app) as client, pytest.raises(PermissionDeniedError):
        client.keyspace("short").get(b"k")
    assert "(dropped)" in admin("roles")
    (role,) = json.loads(admin("roles --json"))["roles"]
    by_id = f"id:{role['grants'][0]['keyspace_id']}"
    admin(f"roles revoke app --allow read,write --keyspace {by_id}")
    assert json.loads(admin("roles --json"))["roles"] == [{"role": "app", "grants": []}]


def test_grant_in_a_keyspace_that_is_not_there_is_refused_by_its_error(
    servers: Servers, app: str
) -> None:
    ended = CliRunner().invoke(
        koinon_app(), ["admin", "roles", "grant", "app", "--allow", "read", "--keyspace", "nowhere"]
    )
    assert ended.exit_code != 0
    assert "keyspace 'nowhere' has been dropped, or was never created" in ended.output
    ended = CliRunner().invoke(
        koinon_app(), ["admin", "roles", "grant", "app", "--allow", "read", "--keyspace", "id:999"]
    )
    assert ended.exit_code != 0
    assert "the keyspace that was meant has been dropped, or was never created" in ended.output
    assert json.loads(admin("roles --json"))["roles"] == [{"role": "app", "grants": []}]


@pytest.mark.parametrize("spec", [spec for spec in ALL if spec.needs], ids=lambda spec: spec.name)
def test_each_redis_command_is_refused_to_a_user_of_another_keyspace(
    servers: Servers, in_a: Resp, spec: Spec
) -> None:
    reply = in_a(spec.name, *[b"app:1"] * (abs(spec.arity) - 1))
    assert isinstance(reply, hiredis.ReplyError)
    assert str(reply).startswith("NOPERM") or _own(reply) == "PermissionDenied", reply


def test_redis_commands_that_check_for_themselves_are_refused_too(in_a: Resp) -> None:
    for command in (("SCAN", "0"), ("SCAN", "0", "MATCH", "app:*"), ("DBSIZE",)):
        assert str(in_a(*command)).startswith("NOPERM"), command


@pytest.fixture(scope="module")
def in_a(servers: Servers) -> Iterator[Resp]:
    """A connection of a user who may do everything in ``a``, and nothing in ``default``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KOINON_TLS_BUNDLE", str(servers.identities.file(Kind.USER, "root")))
        patch.setenv("KOINON_COORDINATORS", servers.coordinator)
        admin(f"roles create in-a --allow {KEY_ACTIONS} --keyspace a")
        admin("users create in-a --role in-a")
    connection = Resp(servers, Kind.USER, "in-a")
    yield connection
    connection.close()


# --- the audit log -----------------------------------------------------------------------------


def noted(file: Path, method: str) -> set[tuple[str, str, str]]:
    """Return (keyspace, outcome, who) of the lines about a method; '' where none is named."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        (line.get("keyspace", ""), line["outcome"], line["who"])
        for line in lines
        if line["method"].endswith(method)
    }


def is_noted(file: Path, method: str, line: tuple[str, str, str]) -> bool:
    return line in noted(file, method)


def id_of(servers: Servers, name: str) -> int:
    node = servers.process_of_node
    assert node is not None
    return int(node.state.table().keyspaces.named(name).keyspace_id)


@pytest.mark.parametrize(("transport", "method"), [("grpc", "/BatchGet"), ("auto", ".GET")])
def test_audit_log_names_the_keyspace_of_reads_and_of_refusals(
    servers: Servers, app: str, audit_files: tuple[Path, Path], transport: Any, method: str
) -> None:
    admin("roles grant app --allow read --prefix app: --keyspace a")
    admin("roles grant app --allow read --prefix default:")
    allowed, denied, who = "ok", "permission_denied", f"user {app}"
    wanted = {("a", allowed, who), ("b", denied, who), ("default", denied, who)}
    with connect(servers, app, transport=transport) as client:
        a, b = client.keyspace("a"), client.keyspace("b")

        def all_noted() -> bool:
            a.get(b"app:1")
            for of in (b, client):
                with pytest.raises(PermissionDeniedError):
                    of.get(b"app:1")
            return wanted <= noted(audit_files[0], method)

        wait_until(all_noted, "the calls to be noted")


def test_audit_log_names_the_keyspace_that_administration_and_loads_are_about(
    servers: Servers, app: str, audit_files: tuple[Path, Path]
) -> None:
    admin("roles grant app --allow load --prefix app: --keyspace a")
    admin("keyspaces create audited --partitions 4")
    admin("keyspaces alter audited --default-ttl 1d")
    admin("keyspaces drop audited --yes")
    with servers.identities.dialing(Kind.USER, app).channel(
        servers.coordinator, ANY_SERVER, ()
    ) as channel:
        request = loads_pb2.OpenLoadRequest(
            job_id="audited", mode=loads_pb2.LOAD_MODE_APPEND, keyspace_id=id_of(servers, "b")
        )
        with pytest.raises(grpc.RpcError, match="of keyspace 'b'"):
            loads_pb2_grpc.LoadsStub(channel).OpenLoad(request, timeout=20)
    of_coordinator = audit_files[1]
    for method in ("CreateKeyspace", "AlterKeyspace", "DropKeyspace"):
        done = ("audited", "ok", "user root")
        wait_until(partial(is_noted, of_coordinator, f"/{method}", done), method)
    line = ("b", "permission_denied", f"user {app}")
    wait_until(partial(is_noted, of_coordinator, "/OpenLoad", line), "the refusal")
    assert {keyspace for keyspace, _, _ in noted(of_coordinator, "/ChangeAccess")} == {""}
