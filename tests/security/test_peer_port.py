"""The peer port of a coordinator that requires TLS: it lets in whom the table of rules lets in."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from koinon_coordinator.raft import RAFT_COMMAND
from koinon_coordinator.services import peer_port
from koinon_coordinator.services.peer_port import PeerPort
from koinon_proto.contract import convert
from koinon_proto.contract.access import Access, AccessState, serial_text
from koinon_proto.contract.errors import KoinonError, PermissionDeniedError, UnauthenticatedError
from koinon_proto.security.audit import Audit
from koinon_proto.security.bundle import BundleFile, principal_in
from koinon_proto.security.names import ANY_SERVER, Kind
from koinon_proto.server.framed_greeting import HEARTBEATS_COMMAND
from koinon_proto.server.framed_stream import HEAD, IS_END
from koinon_proto.v1 import errors_pb2
from koinon_proto.v1.membership_pb2 import HeartbeatRequest
from koinon_proto.v1.raft_pb2 import RaftBatch, RaftHello
from tests.kit.waiting import wait_until
from tests.security.servers import Servers, serving

PATIENCE_S = 60.0
ports: list[PeerPort] = []
"""The coordinator's."""


@pytest.fixture(scope="module")
def audit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "c1.jsonl"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, audit_file: Path) -> Iterator[Servers]:
    audit = Audit(str(audit_file))
    made = PeerPort.__init__

    def noting(self: PeerPort, *args: Any) -> None:
        ports.append(self)
        made(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_port, "GREETING_S_MAX", PATIENCE_S)
        patch.setattr(PeerPort, "__init__", noting)
        with serving(tmp_path_factory.mktemp("peers"), coordinators_audit=audit) as found:
            yield found


def address_of(servers: Servers) -> str:
    coordinator = servers.process_of_coordinator
    assert coordinator is not None
    return f"127.0.0.1:{coordinator.peer_port}"


def connected(servers: Servers, kind: Kind, name: str = "") -> socket.socket:
    dialing = servers.identities.dialing(kind, name)
    return dialing.connect_blocking(address_of(servers), ANY_SERVER, PATIENCE_S)


def line_of(sock: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n") and (piece := sock.recv(1)):
        line += piece
    return line


def end_of(sock: socket.socket) -> KoinonError:
    """Return the error that the stream ends with; signs of life come before it."""
    with sock.makefile("rb") as file:
        while True:
            (head,) = HEAD.unpack(file.read(HEAD.size))
            data = file.read(head & ~IS_END)
            if head & IS_END:
                return convert.error_from_proto(errors_pb2.Error.FromString(data))


def send(sock: socket.socket, message: Message) -> None:
    data = message.SerializeToString()
    sock.sendall(HEAD.pack(len(data)) + data)


@pytest.mark.parametrize(
    ("command", "welcome"),
    [(RAFT_COMMAND, Kind.COORDINATOR), (HEARTBEATS_COMMAND, Kind.NODE)],
)
def test_each_stream_is_for_one_kind_of_server_alone(
    servers: Servers, command: bytes, welcome: Kind, audit_file: Path
) -> None:
    callers = (
        *((Kind.COORDINATOR, "c1"), (Kind.NODE, "n1"), (Kind.USER, "root"), (Kind.CLIENT, "")),
    )
    for kind, name in callers:
        with connected(servers, kind, name) as sock:
            sock.sendall(command)
            line = line_of(sock)
            assert (line == b"+OK\r\n") is (kind is welcome), (kind, line)
            if kind is not welcome:
                assert line.startswith(b"-ERR ")
                assert sock.recv(1) == b""
    path = "/koinon.v1.Raft/Exchange" if welcome is Kind.COORDINATOR else "Membership/Heartbeat"

    def refusals() -> set[tuple[str, str]]:
        lines = map(json.loads, audit_file.read_text().splitlines())
        return {(one["who"], one["outcome"]) for one in lines if one["method"].endswith(path)}

    wait_until(lambda: ("user root", "permission_denied") in refusals(), "the audit log")


@pytest.mark.parametrize("command", [RAFT_COMMAND, HEARTBEATS_COMMAND])
def test_nobody_comes_in_without_a_certificate(servers: Servers, command: bytes) -> None:
    host, _, port = address_of(servers).rpartition(":")
    context = ssl.create_default_context(cafile=str(servers.identities.file(Kind.USER, "root")))
    with (
        socket.create_connection((host, int(port)), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=ANY_SERVER) as sock,
    ):
        sock.sendall(command)
        assert line_of(sock).startswith(b"-ERR ")
    with socket.create_connection((host, int(port)), PATIENCE_S) as plain:
        plain.sendall(command)
        try:
            answer = plain.recv(100)
        except ConnectionResetError:
            answer = b""
        assert answer[:1] in (b"", b"\x15")  # an alert of TLS, or nothing


def hello(member_id: str) -> RaftBatch:
    fields: dict[str, Any] = {"protocol_version": 1, "store_id": "s", "receiver_id": "c1"}
    return RaftBatch(hello=RaftHello(member_id=member_id, **fields))


@pytest.mark.parametrize(
    ("kind", "command", "claim"),
    [
        (Kind.COORDINATOR, RAFT_COMMAND, hello("c1")),
        (Kind.NODE, HEARTBEATS_COMMAND, HeartbeatRequest(node_id="n1")),
    ],
)
def test_server_speaks_for_itself_alone(
    servers: Servers, kind: Kind, command: bytes, claim: Message
) -> None:
    with connected(servers, kind, "other") as sock:
        sock.sendall(command)
        assert line_of(sock) == b"+OK\r\n"
        send(sock, claim)
        error = end_of(sock)
        assert isinstance(error, PermissionDeniedError)
        assert error.principal == f"{kind} other"


def test_stream_of_a_certificate_that_is_revoked_ends(servers: Servers) -> None:
    bundle = BundleFile(servers.identities.file(Kind.NODE, "revoked"))
    principal = principal_in(bundle.current().chain)
    assert principal is not None
    with connected(servers, Kind.NODE, "revoked") as sock:
        sock.sendall(HEARTBEATS_COMMAND)
        assert line_of(sock) == b"+OK\r\n"
        serials = (serial_text(principal.serial),)
        servers.set_access(Access(AccessState(version=1, revoked_serials=serials)))
        assert isinstance(end_of(sock), UnauthenticatedError)
    with connected(servers, Kind.NODE, "revoked") as sock:
        sock.sendall(HEARTBEATS_COMMAND)
        assert b"was revoked" in line_of(sock)


def test_node_of_the_cluster_sends_its_heartbeats_here(servers: Servers) -> None:
    taken = ports[0].streams
    wait_until(lambda: taken()["Membership/Heartbeat"] == 1, "a connection of frames")
