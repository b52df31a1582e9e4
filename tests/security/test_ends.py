"""What a caller has open ends with what the caller has shown, at every door, however that ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import hiredis
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

import koinon
from koinon.certs.authority import Identity
from koinon.driver.rpc.node_link import Link
from koinon.driver.rpc.reachability import why_unreachable
from koinon.operate.admin import Admin
from koinon_coordinator.raft import RAFT_COMMAND
from koinon_proto.contract.access import (
    Access,
    AccessState,
    Action,
    Effect,
    Grant,
    Role,
    User,
    make_token,
    serial_text,
)
from koinon_proto.contract.errors import CertificateNotValidError
from koinon_proto.security.authentication import Authenticator
from koinon_proto.security.bundle import BundleFile
from koinon_proto.security.names import ANY_SERVER, Kind
from koinon_proto.security.transport import Dialing, Listening, Mode
from koinon_proto.security.trust import _path_end_s
from koinon_proto.server.framed_greeting import HEARTBEATS_COMMAND
from koinon_proto.v1 import kv_pb2, table_pb2
from tests.kit.waiting import wait_until
from tests.security.servers import Identities, Servers, serving
from tests.security.test_grants import Resp
from tests.security.test_peer_port import end_of, line_of
from tests.security.test_standing import chain_of

CALL_S, HOUR_S, DAY_S = 60.0, 3_600, 86_400
WATCH = "/koinon.v1.TableService/WatchTable"
ATTEND = "/koinon.v1.KeyValue/Attend"
GET_TABLE = "/koinon.v1.TableService/GetTable"
FOLLOW_COMMAND = b"*2\r\n$13\r\nKOINON.FOLLOW\r\n$1\r\n1\r\n"
READS = Role(name="reads", grants=(Grant(effect=Effect.ALLOW, actions=(Action.READ,)),))


class Clock:
    """The servers' clock, which tests put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[Servers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Authenticator.__init__.__kwdefaults__ or {}, "now", clock)
        with serving(tmp_path_factory.mktemp("ends")) as found:
            yield found


class Doors:
    """Whatever a user can have open at a server: streams of both servers by gRPC, a connection of
    the Redis port in use, and one that has nothing to say.
    """

    def __init__(self, servers: Servers, bundle: Path, token: str, stack: ExitStack) -> None:
        dialing = Dialing(BundleFile(bundle), token)
        options = {"timeout": CALL_S, "metadata": dialing.metadata}
        at_node, at_coordinator = (
            stack.enter_context(dialing.channel(address, ANY_SERVER, ()))
            for address in (servers.node, servers.coordinator)
        )
        watch: Any = at_coordinator.unary_stream(WATCH)
        attend: Any = at_node.unary_stream(
            ATTEND, request_serializer=kv_pb2.AttendRequest.SerializeToString
        )
        get: Any = at_node.unary_unary(GET_TABLE)
        self.call: Callable[[], bytes] = lambda: get(b"", **options)
        self.streams = [watch(b"", **options), attend(kv_pb2.AttendRequest(), **options)]
        next(self.streams[0])  # the table as it is
        self.in_use, self.idle = (Resp(servers, bundle) for _ in range(2))
        for resp in (self.in_use, self.idle):
            stack.callback(resp.close)
            if token:
                assert resp("AUTH", token) == b"OK"
        self.streams[1].initial_metadata()  # it attends

    def works(self) -> None:
        assert table_pb2.TableUpdate.FromString(self.call()).table_version
        assert self.in_use("GET", "k") is None
        assert all(stream.is_active() for stream in self.streams)

    def all_end(self) -> None:
        with pytest.raises(grpc.RpcError) as refused:
            self.call()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with suppress(ConnectionError):  # closed before the command came
            reply = self.in_use("GET", "k")
            assert isinstance(reply, hiredis.ReplyError)
            assert str(reply).startswith("NOAUTH")
        self.in_use.wait_closed()
        self.idle.wait_closed()
        for stream in self.streams:
            with pytest.raises(grpc.RpcError):
                for _ in stream:
                    pass
            assert stream.code() is grpc.StatusCode.UNAUTHENTICATED, stream.details()


CERTIFICATE, TOKEN = "a user's certificate", "a token"


def changed(access: Access, **changes: Any) -> Access:
    state = replace(access.state, version=access.version + 1, **changes)
    return Access(state)


@pytest.mark.parametrize(
    ("shown", "way"),
    [
        (CERTIFICATE, "its end"),
        (CERTIFICATE, "revoked"),
        (CERTIFICATE, "replaced by newer ones"),
        (CERTIFICATE, "user deleted"),
        (CERTIFICATE, "user blocked"),
        (TOKEN, "its end"),
        (TOKEN, "the end of the client's certificate"),
        (TOKEN, "revoked"),
        (TOKEN, "certificate revoked"),
        (TOKEN, "user deleted"),
        (TOKEN, "user blocked"),
    ],
)
def test_everything_ends_when_what_was_shown_ends(
    servers: Servers, clock: Clock, tmp_path: Path, shown: str, way: str
) -> None:
    clock.ahead_s = 0.0
    now = datetime.now(UTC)
    user = User(name="app", roles=("reads",))
    token, text = make_token("app", created_s=1, expires_s=int(now.timestamp()) + HOUR_S)
    identity = (
        Identity(kind=Kind.USER, name="app") if shown is CERTIFICATE else Identity(kind=Kind.CLIENT)
    )
    bundle = tmp_path / "identity.pem"
    servers.identities.authority.issue(identity, bundle, now=now, days=1)
    serial = BundleFile(bundle).current().principal.serial
    state = AccessState(version=1, roles=(READS,), users=(user,), tokens=(token,))
    servers.set_access(access := Access(state))
    with ExitStack() as stack:
        doors = Doors(servers, bundle, text if shown is TOKEN else "", stack)
        doors.works()
        match way:
            case "its end":
                clock.ahead_s = 2 * (DAY_S if shown is CERTIFICATE else HOUR_S)
            case "the end of the client's certificate":
                endless = replace(token, expires_s=0)
                servers.set_access(changed(access, tokens=(endless,)))
                doors.works()
                clock.ahead_s = 2 * DAY_S
            case "revoked" if shown is TOKEN:
                servers.set_access(changed(access, tokens=()))
            case "revoked" | "certificate revoked":
                servers.set_access(changed(access, revoked_serials=(serial_text(serial),)))
            case "replaced by newer ones":
                newer = replace(user, certificates_from_s=int(now.timestamp()) + HOUR_S)
                servers.set_access(changed(access, users=(newer,)))
            case "user deleted":
                servers.set_access(changed(access, users=(), tokens=()))
            case "user blocked":
                servers.set_access(changed(access, users=(replace(user, blocked=True),)))
        doors.all_end()


def test_only_what_needed_a_grant_ends_with_it(servers: Servers, clock: Clock) -> None:
    clock.ahead_s = 0.0
    access = Access(
        AccessState(version=1, roles=(READS,), users=(User(name="app", roles=("reads",)),))
    )
    servers.set_access(access)
    with ExitStack() as stack:
        doors = Doors(servers, servers.identities.file(Kind.USER, "app"), "", stack)
        doors.works()
        servers.set_access(changed(access, roles=(replace(READS, grants=()),)))
        reply = doors.in_use("GET", "k")
        assert isinstance(reply, hiredis.ReplyError)
        assert str(reply).startswith("NOPERM")
        assert doors.idle("PING") == b"PONG"
        assert table_pb2.TableUpdate.FromString(doors.call()).table_version
        assert all(stream.is_active() for stream in doors.streams)


@pytest.mark.parametrize(
    ("kind", "name", "command"),
    [
        (Kind.COORDINATOR, "c1", RAFT_COMMAND),
        (Kind.NODE, "n1", HEARTBEATS_COMMAND),
        (Kind.NODE, "n1", FOLLOW_COMMAND),
    ],
)
def test_streams_of_frames_end_with_the_certificate(
    servers: Servers, clock: Clock, tmp_path: Path, kind: Kind, name: str, command: bytes
) -> None:
    clock.ahead_s = 0.0
    bundle = tmp_path / "short.pem"
    identity = Identity(kind=kind, name=name)
    servers.identities.authority.issue(identity, bundle, now=datetime.now(UTC), days=1)
    coordinator = servers.process_of_coordinator
    assert coordinator is not None
    address = servers.redis if command is FOLLOW_COMMAND else f"127.0.0.1:{coordinator.peer_port}"
    with Dialing(BundleFile(bundle)).connect_blocking(address, ANY_SERVER, CALL_S) as sock:
        sock.sendall(command)
        assert line_of(sock) == b"+OK\r\n"
        clock.ahead_s = 2 * DAY_S
        error = end_of(sock)
        assert isinstance(error, CertificateNotValidError)
        assert f"the certificate of {kind} {name} has expired: it was valid until" in str(error)


def test_a_certificate_ends_with_the_first_of_its_path() -> None:
    made = chain_of(days=(9, 5, 7))
    root, leaf, between = (one.public_bytes(Encoding.PEM) for one in made)
    authority_end_s, _, between_end_s = (one.not_valid_after_utc.timestamp() for one in made)
    assert _path_end_s(leaf, between, root) == between_end_s
    assert _path_end_s(root, b"", root) == authority_end_s


@pytest.mark.parametrize(
    ("issued_days_ago", "words"), [(2, "has expired: it was valid until"), (-1, "not valid before")]
)
def test_a_client_is_told_that_its_own_certificate_does_not_hold(
    servers: Servers, tmp_path: Path, issued_days_ago: int, words: str
) -> None:
    bundle = issued(servers, tmp_path, Kind.USER, "root", issued_days_ago)
    for connect in (
        lambda: koinon.connect(servers.coordinator, tls_bundle=str(bundle)),
        lambda: Admin(servers.coordinator, dialing=Dialing(BundleFile(bundle))).status(),
        lambda: asyncio.run(send_nothing(servers.node, Dialing(BundleFile(bundle)))),
    ):
        with pytest.raises(koinon.CertificateNotValidError, match=words) as refused:
            connect()
        own = BundleFile(bundle).current().principal
        assert refused.value.holder == "user root"
        assert refused.value.valid_from_s == own.issued_at_s
        assert refused.value.valid_until_s == own.valid_until_s
        assert abs(refused.value.clock_s - time.time()) < CALL_S
        assert not own.is_valid(refused.value.clock_s)


async def send_nothing(node: str, dialing: Dialing) -> None:
    """Raise the error of an operation whose node takes no connection of this client any more."""
    link = Link(node, dialing)
    try:
        assert not await link.connect()
        raise link.not_sent()
    finally:
        await link.close()


@pytest.mark.parametrize("kind", [Kind.NODE, Kind.COORDINATOR])
async def test_a_client_is_told_that_a_servers_certificate_does_not_hold(
    servers: Servers, tmp_path: Path, kind: Kind
) -> None:
    bundle = issued(servers, tmp_path, kind, "s1", 2)
    shown = Listening(Mode.REQUIRE, BundleFile(bundle)).context(certificates_required=False)

    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=shown)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    dialing = servers.identities.dialing(Kind.USER, "root")
    error = await why_unreachable([address], dialing)
    assert isinstance(error, koinon.CertificateNotValidError)
    assert f"{address}: the certificate of {kind} s1 has expired" in str(error)
    server.close()


def issued(servers: Servers, directory: Path, kind: Kind, name: str, days_ago: int) -> Path:
    """Return an identity file with a certificate that was issued so long ago, for one day."""
    path = directory / "issued.pem"
    now = datetime.now(UTC) - timedelta(days=days_ago)
    servers.identities.authority.issue(Identity(kind=kind, name=name), path, now=now, days=1)
    return path


def test_a_node_whose_certificate_ends_serves_no_more_until_it_is_renewed(
    clock: Clock, tmp_path: Path
) -> None:
    clock.ahead_s = 0.0
    identities = Identities(tmp_path / "identities")
    bundle = identities.file(Kind.NODE, "n1", days=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Authenticator.__init__.__kwdefaults__ or {}, "now", clock)
        servers = Servers(tmp_path, identities)
        try:
            servers.start()
            node = servers.process_of_node
            assert node is not None
            clock.ahead_s = 2 * DAY_S
            wait_until(lambda: not node.state.serving(), "the node's lease to end")
            identities.authority.renew(bundle, now=datetime.now(UTC))
            wait_until(node.state.serving, "the node to serve again")
        finally:
            servers.stop()
