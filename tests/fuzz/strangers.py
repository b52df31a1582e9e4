"""Bytes of callers that have shown nothing, sent to each port of a cluster that requires TLS.

What must hold: no byte of an answer comes back but those of TLS itself and, at the Redis port and a
coordinator's peer port, refusals after a handshake; no call and no command is let in; no process
stops, is fenced, logs a traceback or grows by much; clients with certificates go on.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection

from koinon.certs.authority import Authority, Identity
from koinon.local import LocalCluster, Ports, Setup
from koinon_proto.security.names import ANY_SERVER, Kind
from tests.fuzz.campaign import Beside, Watch
from tests.scraping import Scrape, scrape

_TIMEOUT_S = 0.4
_HELD_MAX = 48
"""Connections of strangers that stay open, half way through something."""
_ANSWER_BYTES_MAX = 65_536
_ALERT, _HANDSHAKE, _CHANGE_CIPHER = 0x15, 0x16, 0x14
METRIC = "koinon_unidentified_total"
PEER_COMMANDS = (b"KOINON.RAFT 1\r\n", b"KOINON.HEARTBEATS 1\r\n", b"KOINON.RAFT 2\r\n", b"x\r\n")
_PEER_PORT = re.compile(r"coordinator started .* peer_port=(\d+)")
METHODS = ("KeyValue/BatchGet", "Raft/GetPeerPort", "Membership/Register", "Admin/ChangeAccess")


@dataclass(frozen=True)
class Port:
    """One port of a member. ``kind``: grpc, redis, peer or metrics."""

    member: str
    kind: str
    address: str


class Strangers:
    """Sends what strangers may send, to a cluster of its own."""

    def __init__(self, cluster: LocalCluster, directory: Path) -> None:
        self._cluster = cluster
        self._watch = Watch(cluster)
        self._ports = [*_ports(cluster)]
        self._held: list[socket.socket] = []
        self._trusted = ssl.create_default_context(cafile=cluster.tls_bundle)
        self._trusted.load_cert_chain(cluster.tls_bundle)
        foreign = Authority.create(directory / "foreign", now=datetime.now(UTC))
        own = Authority.open(Path(cluster.tls_bundle).parent)
        root = Identity(kind=Kind.USER, name="root")
        then = datetime.now(UTC) - timedelta(days=30)
        foreign.issue(root, directory / "foreign.pem", now=datetime.now(UTC))
        own.issue(root, directory / "expired.pem", now=then, days=7)
        self._contexts = [
            _context(None),
            _context(directory / "foreign.pem"),
            _context(directory / "expired.pem"),
            _context(None, oldest=True),
        ]
        self.attacks: dict[str, Callable[[random.Random, Port], None]] = {
            "random bytes": self._random_bytes,
            "mutated hello": self._mutated_hello,
            "plain HTTP/2": self._plain_http2,
            "plain RESP": self._plain_resp,
            "plain HTTP": self._plain_http,
            "TLS with nothing to show": self._by_tls,
            "records after a hello": self._records,
            "half a handshake": self._half,
            "slow bytes": self._slow,
        }
        self.beside = Beside(cluster)
        self.sent = 0
        self.check()

    def attack(self, seed: int) -> None:
        """Send one thing to one port; the same for the same number."""
        rng = random.Random(seed)
        port = rng.choice(self._ports)
        name = rng.choice(list(self.attacks))
        try:
            self.attacks[name](rng, port)
        except AssertionError as error:
            raise AssertionError(f"attack {seed}: {name} at {port}: {error}") from None
        self.sent += 1

    def check(self) -> None:
        """Raise AssertionError unless all that the module promises has held so far."""
        self._watch.check()
        assert not self.beside.failures, self.beside.failures[:5]
        for name in self._cluster.names:
            let_in = self._scrape(name).sum(METRIC)
            assert not let_in, f"{name} let in {let_in} calls of strangers"

    def check_memory(self) -> None:
        """Raise AssertionError if a process has grown by much."""
        self._watch.check_memory()

    def close(self) -> None:
        self.beside.close()
        for sock in self._held:
            sock.close()

    def _scrape(self, name: str) -> Scrape:
        address = self._cluster.metrics_address(name)
        self._trusted.check_hostname = False  # it is checked by a name of the cluster's own
        return scrape(address, context=self._trusted)

    # --- attacks ------------------------------------------------------------------------------

    def _random_bytes(self, rng: random.Random, port: Port) -> None:
        size = rng.choice([0, 1, 3, 100, 5_000, 65_536])
        beginning = rng.choice([b"", b"\x16\x03\x01", b"\x16", b"\x80", b"PRI * "])
        self._send(port, beginning + rng.randbytes(size))

    def _mutated_hello(self, rng: random.Random, port: Port) -> None:
        self._send(port, _mutated(rng, _hello(self._contexts[0])))

    def _plain_http2(self, rng: random.Random, port: Port) -> None:
        whole = _http2(rng)
        self._send(port, whole if rng.random() < 0.5 else _mutated(rng, whole))

    def _plain_resp(self, rng: random.Random, port: Port) -> None:
        whole = _resp(rng)
        self._send(port, whole if rng.random() < 0.7 else _mutated(rng, whole))

    def _plain_http(self, rng: random.Random, port: Port) -> None:
        path = rng.choice(["/metrics", "/", "/" + "a" * 9_000])
        self._send(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    def _by_tls(self, rng: random.Random, port: Port) -> None:
        """Shake hands as far as it goes, and say what the port is for."""
        what = _SAYS[port.kind](rng)
        with _connected(port) as plain:
            try:
                with rng.choice(self._contexts).wrap_socket(
                    plain, server_hostname=ANY_SERVER
                ) as secured:
                    secured.sendall(what)
                    answer = _received(secured)
            except OSError:  # ssl.SSLError among them
                return
        if port.kind == "peer":
            assert not answer or answer.startswith(b"-ERR "), answer[:500]
        elif port.kind == "redis":
            lines = [line for line in answer.split(b"\r\n") if line]
            assert all(line.startswith((b"-", b"+PONG")) for line in lines), answer[:500]
        else:
            assert not answer, answer[:500]

    def _records(self, rng: random.Random, port: Port) -> None:
        """A good hello, and then records of any kind."""
        kinds = [rng.choice([0x14, 0x15, 0x16, 0x17, 0x18, rng.randrange(256)]) for _ in range(5)]
        records = b""
        for kind in kinds:
            body = rng.randbytes(rng.choice([0, 1, 40, 16_384]))
            records += bytes([kind, 3, 3]) + len(body).to_bytes(2, "big") + body
        self._send(port, _hello(self._contexts[0]) + records)

    def _half(self, rng: random.Random, port: Port) -> None:
        """Begin, and say nothing more."""
        hello = _hello(self._contexts[0])
        self._hold(port, hello[: rng.randrange(len(hello) + 1)])

    def _slow(self, rng: random.Random, port: Port) -> None:
        """Go on with what is held, byte by byte; begin one more."""
        self._hold(port, b"\x16")
        for sock in rng.sample(self._held, min(8, len(self._held))):
            try:
                sock.send(rng.randbytes(1))
            except OSError:
                self._held.remove(sock)
                sock.close()

    def _hold(self, port: Port, beginning: bytes) -> None:
        while len(self._held) >= _HELD_MAX:
            self._held.pop(0).close()
        with contextlib.suppress(OSError):
            sock = socket.create_connection(_place(port), timeout=_TIMEOUT_S)
            self._held.append(sock)
            sock.sendall(beginning)

    def _send(self, port: Port, what: bytes) -> None:
        """Send it without TLS; what comes back must be TLS's own, or nothing."""
        with _connected(port) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(what)
                sock.shutdown(socket.SHUT_WR)
            answer = _received(sock)
        allowed = (_ALERT, _HANDSHAKE, _CHANGE_CIPHER)
        assert not answer or answer[0] in allowed, answer[:500]
        if not what.startswith(b"\x16"):
            assert not answer or answer[0] == _ALERT, answer[:500]


# --- what is sent -------------------------------------------------------------------------------


def _hello(context: ssl.SSLContext) -> bytes:
    """Return what a client begins with."""
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=ANY_SERVER).do_handshake()
    return out.read()


def _mutated(rng: random.Random, whole: bytes) -> bytes:
    """Return it with some bytes changed, gone, doubled or put in."""
    out = bytearray(whole)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if at < len(out):
                out[at] = rng.randrange(256)
            case 1:
                del out[at : at + rng.randrange(1, 40)]
            case 2:
                out[at:at] = out[at : at + rng.randrange(1, 40)]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 40))
            case _ if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case _:
                pass
        if not out:
            out += b"\x16"
    return bytes(out)


def _http2(rng: random.Random) -> bytes:
    """Return the beginning of a connection with a call or two, as gRPC makes them."""
    connection = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    connection.initiate_connection()
    for stream in range(1, 2 * rng.randrange(1, 4), 2):
        path = f"/koinon.v1.{rng.choice(METHODS)}"
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
        headers += [("content-type", "application/grpc"), ("te", "trailers")]
        connection.send_headers(stream, headers)
        connection.send_data(stream, b"\x00\x00\x00\x00\x00", end_stream=rng.random() < 0.8)
    if rng.random() < 0.3:
        connection.ping(rng.randbytes(8))
    return connection.data_to_send()


def _resp(rng: random.Random) -> bytes:
    commands: list[list[bytes]] = [
        [b"GET", b"k"],
        [b"SET", b"k", rng.randbytes(rng.choice([1, 20_000]))],
        [b"KOINON.GET", b"0", b"k"],
        [b"KOINON.SCAN", rng.randbytes(rng.randrange(9)), b"id/1"],
        [b"KOINON.FOLLOW", b"1"],
        [b"SCAN", b"0"],
        [b"CLUSTER", b"SLOTS"],
        [b"AUTH", b"koinon_aaaaaaaaaa_" + b"A" * 43],
        [b"PING"],
        [b"INFO"],
        [b"CLIENT", b"LIST"],
    ]
    chosen = rng.choices(commands, k=rng.randrange(1, 5))
    return b"".join(
        b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)
        for parts in chosen
    )


_SAYS: dict[str, Callable[[random.Random], bytes]] = {
    "grpc": _http2,
    "redis": _resp,
    "peer": lambda rng: rng.choice(PEER_COMMANDS) + rng.randbytes(rng.choice([0, 0, 8, 500])),
    "metrics": lambda _: b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
}


def _context(bundle: Path | None, *, oldest: bool = False) -> ssl.SSLContext:
    """Return how a stranger connects, who trusts everybody and shows this, if anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if bundle is not None:
        context.load_cert_chain(bundle)
    if oldest:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


# --- connections --------------------------------------------------------------------------------


def _ports(cluster: LocalCluster) -> Iterator[Port]:
    for name in cluster.names:
        yield Port(name, "grpc", cluster.address(name))
        yield Port(name, "metrics", cluster.metrics_address(name))
        if name in cluster.node_names:
            yield Port(name, "redis", cluster.redis_address(name))
        else:
            (*_, number) = _PEER_PORT.findall(cluster.log_path(name).read_text())
            yield Port(name, "peer", f"127.0.0.1:{number}")


def _place(port: Port) -> tuple[str, int]:
    host, _, number = port.address.rpartition(":")
    return host, int(number)


@contextlib.contextmanager
def _connected(port: Port) -> Iterator[socket.socket]:
    with socket.create_connection(_place(port), timeout=10.0) as sock:
        sock.settimeout(_TIMEOUT_S)
        yield sock


def _received(sock: socket.socket) -> bytes:
    """Return what comes until the other side closes, or has nothing to say for a while."""
    answer = b""
    end = time.monotonic() + _TIMEOUT_S
    with contextlib.suppress(OSError):
        while len(answer) < _ANSWER_BYTES_MAX and time.monotonic() < end:
            piece = sock.recv(65_536)
            if not piece:
                break
            answer += piece
    return answer


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Strangers]:
    """Strangers at the ports of one coordinator and two nodes."""
    flags = ["--partitions", "16"]
    with LocalCluster(
        coordinators=1,
        nodes=2,
        tls=True,
        setup=Setup(coordinator_flags=flags),
        ports=Ports(metrics=True),
    ) as cluster:
        strangers = Strangers(cluster, directory)
        try:
            yield strangers
        finally:
            strangers.close()
