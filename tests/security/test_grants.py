"""Grants of users on a node: checked key by key, by gRPC and by RESP."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import hiredis
import pytest

import koinon
from koinon.core.cursor_rows import CursorAction, CursorRows, CursorWork
from koinon.core.feeds import PartitionPosition
from koinon_node.resp.commands.spec import Spec
from koinon_node.resp.commands.table import ALL
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
from koinon_proto.contract.errors import KoinonError, PermissionDeniedError, UnauthenticatedError
from koinon_proto.security.bundle import BundleFile
from koinon_proto.security.names import ANY_SERVER, Kind
from koinon_proto.v1 import errors_pb2
from tests.security.servers import Servers, serving

ALL_KEYS = (Action.READ, Action.WRITE, Action.SCAN, Action.LOAD)


def allow(*actions: Action, prefix: bytes = b"") -> Grant:
    return Grant(effect=Effect.ALLOW, actions=actions, prefix=prefix)


def deny(*actions: Action, prefix: bytes = b"") -> Grant:
    return Grant(effect=Effect.DENY, actions=actions, prefix=prefix)


ROLES = {
    "app": (allow(*ALL_KEYS, prefix=b"app:"), deny(*ALL_KEYS, prefix=b"app:secret:")),
    "reader": (allow(Action.READ),),
    "all": (allow(*ALL_KEYS),),
    "writer": (allow(Action.WRITE),),
}
TOKEN, TOKEN_TEXT = make_token("app", created_s=1)


def access(version: int, *, without: str = "") -> Access:
    roles = tuple(Role(name=name, grants=grants) for name, grants in ROLES.items())
    users = tuple(User(name=name, roles=(name,)) for name in ROLES if name != without)
    tokens = (TOKEN,) if without != "app" else ()
    return Access(AccessState(version=version, roles=roles, users=users, tokens=tokens))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("grants")) as found:
        found.set_access(access(1))
        yield found


def client(servers: Servers, kind: Kind, name: str = "", **options: Any) -> koinon.Client:
    return koinon.connect(
        servers.coordinator, tls_bundle=str(servers.identities.file(kind, name)), **options
    )


@pytest.fixture(params=["auto", "grpc"])
def app(servers: Servers, request: pytest.FixtureRequest) -> Iterator[koinon.Client]:
    with client(servers, Kind.USER, "app", transport=request.param) as found:
        yield found


def test_a_user_does_what_its_grants_say_and_nothing_beside(app: koinon.Client) -> None:
    app.put(b"app:1", b"one")
    assert app.get(b"app:1") == b"one"
    app.delete(b"app:n")
    assert app.increment(b"app:n") == 1
    assert [entry[0] for entry in app.scan(prefix=b"app:1")] == [b"app:1"]
    for refused in (
        lambda: app.put(b"other", b"x"),
        lambda: app.get(b"other"),
        lambda: app.delete(b"app:secret:1"),
        lambda: app.increment(b"app:secret:1"),
        lambda: app.exists(b"app:secret:1"),
        lambda: list(app.scan()),
        lambda: list(app.scan(prefix=b"app:")),  # some of it is denied
    ):
        with pytest.raises(PermissionDeniedError, match="user app may not"):
            refused()
    with pytest.raises(PermissionDeniedError, match="user app may not"):
        app.get_many([b"app:1", b"other"])
    result = app.put_many([(b"app:1", b"x"), (b"app:secret:1", b"x")])
    assert {type(failure.error) for failure in result.refused} == {PermissionDeniedError}
    assert app.get(b"app:1") == b"one"


def test_a_refusal_names_the_key_and_is_no_unknown_fate(app: koinon.Client) -> None:
    with pytest.raises(PermissionDeniedError) as raised:
        app.put(b"other", b"x")
    assert raised.value.action == "write"
    assert raised.value.what == "key b'other'"
    assert not raised.value.retriable
    assert not raised.value.maybe_applied


def test_a_reader_reads_and_does_not_write(servers: Servers) -> None:
    with client(servers, Kind.USER, "all") as everything:
        everything.put(b"r", b"1")
    with client(servers, Kind.USER, "reader") as reader:
        assert reader.get(b"r") == b"1"
        with pytest.raises(PermissionDeniedError, match="may not write"):
            reader.put(b"r", b"2")
        with pytest.raises(PermissionDeniedError, match="may not write"):
            reader.increment(b"r")
        with pytest.raises(PermissionDeniedError, match="may not scan"):
            list(reader.scan())


def test_a_feed_needs_its_right_on_all_of_the_prefix_and_ends_with_it(servers: Servers) -> None:
    feeder = User(name="feeder", roles=("feeder",))
    granted = Role(name="feeder", grants=(allow(Action.FEED, prefix=b"app:"),))
    before = access(1).state
    known = replace(
        before, version=2, roles=(*before.roles, granted), users=(*before.users, feeder)
    )
    servers.set_access(Access(known))
    try:
        with (
            client(servers, Kind.USER, "all") as everything,
            pytest.raises(PermissionDeniedError, match="may not"),
        ):
            next(everything.changes())  # to read and to scan is not enough
        with client(servers, Kind.USER, "feeder") as found:
            with pytest.raises(PermissionDeniedError, match="may not feed every key"):
                next(found.changes(prefix=b""))
            feed = found.changes(prefix=b"app:", since="now")
            while not next(feed).caught_up:
                pass
            servers.set_access(Access(replace(known, version=3, roles=before.roles)))
            with pytest.raises(PermissionDeniedError):
                for _ in feed:
                    pass
    finally:
        servers.set_access(access(4))


def test_cursors_need_the_right_to_feed_the_whole_keyspace(servers: Servers) -> None:
    users = [User(name=name, roles=(name,)) for name in ("part", "whole")]
    roles = [
        Role(name="part", grants=(allow(Action.FEED, prefix=b"app:"),)),
        Role(name="whole", grants=(allow(Action.FEED),)),
    ]
    before = access(1).state
    known = replace(before, version=5, roles=(*before.roles, *roles), users=(*before.users, *users))

    def failures(user: str, action: CursorAction) -> set[type[KoinonError]]:
        with client(servers, Kind.USER, user) as found:
            rows = {0: (1, PartitionPosition())}
            work = CursorWork(action=action, keyspace_id=0, group_id=1, member_id="m", rows=rows)
            operation = CursorRows(work, found._engine.policy)
            found._run(found._engine.rows.run(operation, 5_000))
            return set(map(type, operation.failures.values()))

    servers.set_access(Access(known))
    try:
        for action in CursorAction:
            assert failures("part", action) == {PermissionDeniedError}
            assert failures("whole", action) == set()
    finally:
        servers.set_access(access(6))


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_a_token_says_who_the_user_is(servers: Servers, tmp_path: Path, transport: Any) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN_TEXT + "\n")
    options: dict[str, Any] = {"token_file": str(file), "transport": transport}
    with client(servers, Kind.CLIENT, **options) as holder:
        holder.put(b"app:token", b"1")
        assert holder.get(b"app:token") == b"1"
        with pytest.raises(PermissionDeniedError, match="user app may not read"):
            holder.get(b"other")
    file.write_text(TOKEN_TEXT[:-1] + ("a" if TOKEN_TEXT[-1] != "a" else "b"))
    with pytest.raises(UnauthenticatedError, match="the token is not known"):
        client(servers, Kind.CLIENT, **options)
    with pytest.raises(UnauthenticatedError, match="names no user"):
        client(servers, Kind.CLIENT)


def test_what_is_revoked_ends_at_once_on_open_connections(servers: Servers) -> None:
    with client(servers, Kind.USER, "app") as app:
        app.put(b"app:2", b"x")
        servers.set_access(access(2, without="app"))
        try:
            with pytest.raises(UnauthenticatedError, match="there is no user 'app'"):
                app.get(b"app:2")
        finally:
            servers.set_access(access(3))
        assert app.get(b"app:2") == b"x"


@pytest.mark.parametrize("allowed", [0, 1, 300])
async def test_operations_that_share_a_request_are_refused_one_by_one(
    servers: Servers, allowed: int
) -> None:
    """An operation does not fail because another one's key may not be touched."""
    keys = [b"app:%d" % n for n in range(allowed)] + [b"app:secret:%d" % n for n in range(1_200)]

    bundle = str(servers.identities.file(Kind.USER, "app"))
    async with koinon.aio.connect(
        servers.coordinator, tls_bundle=bundle, transport="grpc", timeout_ms=60_000
    ) as app:
        works: tuple[Callable[[bytes], Any], ...] = (
            lambda key: app.put(key, b"7"),
            app.get,
            app.increment,
        )
        for work in works:
            results = await asyncio.gather(*map(work, keys), return_exceptions=True)
            assert [r for r in results[:allowed] if isinstance(r, Exception)] == []
            for key, error in zip(keys[allowed:], results[allowed:], strict=True):
                assert isinstance(error, PermissionDeniedError)
                assert error.what == f"key {key!r}"


def test_refused_rows_are_named_by_their_place_in_the_operation(servers: Servers) -> None:
    keys = [b"app:%d" % n for n in range(50)]
    keys[10] = keys[40] = b"app:secret:1"
    with client(servers, Kind.USER, "app") as app:
        with pytest.raises(PermissionDeniedError) as raised:
            app.get_many(keys)
        assert raised.value.rows == (10, 40)


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_who_only_writes_learns_whether_a_condition_held_and_no_version(
    servers: Servers, transport: str
) -> None:
    with (
        client(servers, Kind.USER, "writer", transport=transport) as writer,
        client(servers, Kind.USER, "all", transport=transport) as both,
    ):
        version = both.put(b"w:1", b"5")
        writes: tuple[Callable[[koinon.Client], object], ...] = (
            lambda one: one.put(b"w:1", b"6", if_version=version + 1),
            lambda one: one.delete(b"w:1", if_version=version + 1),
            lambda one: one.put(b"w:1", b"6", if_version=0),
        )
        for write in writes:
            with pytest.raises(koinon.ConditionFailedError, match=f"has version {version}") as told:
                write(both)
            assert (told.value.current_version, told.value.version_hidden) == (version, False)
            with pytest.raises(koinon.ConditionFailedError, match="has another") as told:
                write(writer)
            assert (told.value.current_version, told.value.version_hidden) == (0, True)
        assert writer.touch(b"w:1", 3_600_000) is True
        assert writer.touch(b"w:none", 3_600_000) is False
        for refused in (
            lambda: writer.increment(b"w:1"),
            lambda: writer.get_or_put(b"w:1", b"x"),
            lambda: writer.get(b"w:1"),
        ):
            with pytest.raises(PermissionDeniedError, match="may not read"):
                refused()
        assert both.get(b"w:1") == b"5"


ONLY_WRITES = (
    *("SET w:2 v", "SET w:2 v NX", "SET w:2 v XX", "SETNX w:2 v", "MSETNX w:2 v", "MSET w:2 v"),
    *("EXPIRE w:2 9", "PERSIST w:2", "DEL w:2", "UNLINK w:2"),
)
READS_TOO = (
    *("SET w:2 v GET", "SET w:2 v NX GET", "GETSET w:2 v", "GETDEL w:2", "GETEX w:2"),
    *("INCR w:2", "DECRBY w:2 1", "INCRBYFLOAT w:2 1", "APPEND w:2 v", "SETRANGE w:2 0 v"),
    *("EXISTS w:2", "STRLEN w:2", "TYPE w:2", "TTL w:2", "TOUCH w:2", "GET w:2", "WATCH w:2"),
)


@pytest.mark.parametrize("command", [*ONLY_WRITES, *READS_TOO])
def test_commands_of_redis_that_answer_with_what_is_stored_need_leave_to_read(
    servers: Servers, command: str
) -> None:
    connection = Resp(servers, Kind.USER, "writer")
    reply = connection(*command.split())
    is_refused = isinstance(reply, hiredis.ReplyError) and "may not read" in str(reply)
    assert is_refused is (command in READS_TOO), reply
    connection.close()


class Resp:
    """A connection of a client of Redis."""

    def __init__(self, servers: Servers, shows: Kind | Path | None, name: str = "") -> None:
        """``shows``: an identity file, or the kind of one that the servers' authority makes."""
        identities = servers.identities
        trusted = BundleFile(identities.file(Kind.CLIENT)).current().trusted.decode()
        context = ssl.create_default_context(cadata=trusted)
        if shows is not None:
            bundle = identities.file(shows, name) if isinstance(shows, Kind) else shows
            context.load_cert_chain(bundle)
        host, _, port = servers.redis.rpartition(":")
        plain = socket.create_connection((host, int(port)), timeout=10.0)
        self._socket = context.wrap_socket(plain, server_hostname=ANY_SERVER)
        self._reader = hiredis.Reader()

    def __call__(self, *command: str | bytes) -> Any:
        parts = [part.encode() if isinstance(part, str) else part for part in command]
        framed = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        self._socket.sendall(b"*%d\r\n%b" % (len(parts), framed))
        while (reply := self._reader.gets()) is False:
            received = self._socket.recv(65_536)
            if not received:
                raise ConnectionResetError("the node has closed the connection")
            self._reader.feed(received)
        return reply

    def wait_closed(self) -> None:
        """Return once the node has closed the connection, having said nothing more."""
        with suppress(ConnectionError):
            assert self._socket.recv(1) == b""

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def nobody(servers: Servers) -> Iterator[Resp]:
    connection = Resp(servers, None)
    yield connection
    connection.close()


def test_each_command_about_keys_needs_a_right_or_checks_by_itself() -> None:
    assert {s.name for s in ALL if s.is_about_keys and not s.needs} == {"DBSIZE"}


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_each_command_is_refused_to_who_is_not_known_or_may_do_nothing(
    servers: Servers, spec: Spec
) -> None:
    arguments = [b"other"] * (abs(spec.arity) - 1)
    for kind, user, word in ((None, "", "NOAUTH"), (Kind.NODE, "n1", "NOPERM")):
        connection = Resp(servers, kind, user)
        reply = connection(spec.name, *arguments)
        connection.close()
        refused = isinstance(reply, hiredis.ReplyError) and (
            str(reply).startswith(word) or _own(reply) in ("Unauthenticated", "PermissionDenied")
        )
        if word == "NOAUTH":
            assert refused or "no_auth" in spec.flags, reply
        else:
            assert refused or not spec.needs, reply


def test_only_nodes_may_follow_over_the_redis_port(servers: Servers) -> None:
    for kind, name, word in (
        (None, "", "Unauthenticated"),
        (Kind.USER, "root", "PermissionDenied"),
        (Kind.USER, "app", "PermissionDenied"),
        (Kind.COORDINATOR, "c1", "PermissionDenied"),
        (Kind.NODE, "n1", "OK"),
    ):
        connection = Resp(servers, kind, name)
        reply = connection("KOINON.FOLLOW", "1")
        connection.close()
        if isinstance(reply, hiredis.ReplyError):
            assert word == _own(reply), (kind, reply)
        else:
            assert word == reply.decode(), kind


def _own(reply: hiredis.ReplyError) -> str:
    """Return the kind of an error as Koinon's own clients are told it."""
    if not str(reply).startswith("KOINON "):
        return ""
    whole = base64.b64decode(str(reply).split()[1])
    kind = errors_pb2.Error.FromString(whole).WhichOneof("kind") or ""
    return "".join(part.capitalize() for part in kind.split("_"))


def test_a_client_of_redis_comes_in_by_its_token(nobody: Resp) -> None:
    assert str(nobody("GET", "app:1")).startswith("NOAUTH")
    assert str(nobody("AUTH", "koinon_wrong_token")).startswith("WRONGPASS")
    assert str(nobody("AUTH", "reader", TOKEN_TEXT)).startswith("WRONGPASS")
    assert nobody("AUTH", "app", TOKEN_TEXT) == b"OK"
    assert nobody("PING") == b"PONG"
    # The partitioner of this cluster lets no client of Redis find keys; what is refused before that
    # is what counts here.
    assert str(nobody("GET", "other")).startswith("NOPERM user app may not read key b'other'")
    assert str(nobody("SCAN", "0")).startswith("NOPERM")
    assert str(nobody("SCAN", "0", "MATCH", "app:s*")).startswith("NOPERM")
    assert str(nobody("SET", "app:secret:x", "1")).startswith("NOPERM")


def test_hello_takes_a_token_too(nobody: Resp) -> None:
    assert str(nobody("HELLO", "3")).startswith("NOAUTH")
    assert str(nobody("HELLO", "3", "AUTH", "default", "nonsense")).startswith("WRONGPASS")
    assert isinstance(nobody("HELLO", "3", "AUTH", "default", TOKEN_TEXT), dict)
    assert nobody("PING") == b"PONG"
