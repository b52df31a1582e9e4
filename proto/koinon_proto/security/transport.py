"""Every port that a Koinon process opens, and every channel: plain, or by TLS.

No other module opens one (a test sees to that). Who listens has a ``Listening``, who connects a
``Dialing``. Both read their identity file again when it changes: what is opened after that goes by
the new one. What stands goes on, unless the authority of its certificate is trusted no more
(``authentication``). Channels go straight to their address, past any proxy that the environment
names.

How TLS is turned on while a cluster serves (the modes are MongoDB's ``tlsMode``):

    off       takes plain connections, makes plain ones
    allow     takes both, makes plain ones
    prefer    takes both, makes TLS ones
    require   takes TLS only, makes TLS ones

Each step is a rolling restart, and neighbours in this order understand one another.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc

from koinon_proto.contract.errors import CertificateNotValidError, ConfigurationError
from koinon_proto.security.bundle import Bundle, BundleFile
from koinon_proto.security.names import Kind
from koinon_proto.security.plain_or_tls import PlainOrTls, is_tls
from koinon_proto.security.trust import not_valid

Options = Sequence[tuple[str, Any]]

BUNDLE_VARIABLE = "KOINON_TLS_BUNDLE"
TOKEN_FILE_VARIABLE, TOKEN_VARIABLE = "KOINON_TOKEN_FILE", "KOINON_TOKEN"
_TOKEN_CHARS_MAX = 256
_DIRECT: tuple[str, Any] = ("grpc.enable_http_proxy", 0)
"""Without it gRPC's core sends a channel to the proxy that ``http_proxy``, ``https_proxy`` or
``grpc_proxy`` names, and other connections of the same cluster go direct."""


class Mode(StrEnum):
    """The ways in which a server uses TLS; the module's docstring explains them."""

    OFF = "off"
    ALLOW = "allow"
    PREFER = "prefer"
    REQUIRE = "require"


class Dialing:
    """The settings by which this process connects to others: plain without a bundle. Thread-
    safe.
    """

    def __init__(self, bundle: BundleFile | None = None, token: str = "") -> None:
        self._bundle = bundle
        self._lock = threading.Lock()
        self._credentials: tuple[int, grpc.ChannelCredentials] | None = None
        self._contexts: dict[tuple[str, ...], tuple[int, ssl.SSLContext]] = {}
        self.token = token
        self.metadata: tuple[tuple[str, str], ...] = (
            (("authorization", f"Bearer {token}"),) if token else ()
        )
        """Metadata that each call carries."""

    @property
    def uses_tls(self) -> bool:
        return self._bundle is not None

    @property
    def version(self) -> int:
        """Rises when the identity changes: connections opened before should be reopened."""
        if self._bundle is None:
            return 0
        self._bundle.current()
        return self._bundle.version

    def certificate_fault(self) -> CertificateNotValidError | None:
        """Return why no server takes this process's own certificate now, by this machine's clock;
        None: it is good, or there is none.
        """
        if self._bundle is None or (own := self._bundle.current().principal).is_valid(time.time()):
            return None
        return not_valid(own, time.time(), "this machine's clock")

    def channel(self, address: str, name: str, options: Options) -> grpc.Channel:
        """Open a channel for blocking calls to the server of that name (security.names)."""
        credentials, options = self._channel_credentials(), (*options, _DIRECT)
        if credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, credentials, options=_checking(options, name))

    def aio_channel(self, address: str, name: str, options: Options) -> grpc.aio.Channel:
        """Open a channel on the running event loop."""
        credentials, options = self._channel_credentials(), (*options, _DIRECT)
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=_checking(options, name))

    def context(self, *protocols: str) -> ssl.SSLContext | None:
        """Return what a socket is wrapped with, for these protocols (ALPN); None: it is plain.
        Names are checked by ``server_hostname``.
        """
        if self._bundle is None:
            return None
        with self._lock:
            bundle = self._bundle.current()
            known = self._contexts.get(protocols)
            if known is None or known[0] != self._bundle.version:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                _load(context, bundle)
                if protocols:
                    context.set_alpn_protocols(protocols)
                known = self._contexts[protocols] = self._bundle.version, context
            return known[1]

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], address: str, name: str, *protocols: str
    ) -> None:
        """Open a connection of the running event loop, for these protocols (ALPN).

        Raises:
            OSError: there is none; ssl.SSLError where the other side is not trusted.
            ValueError: this is no address.
        """
        host, _, port = address.rpartition(":")
        context = self.context(*protocols)
        await asyncio.get_running_loop().create_connection(
            factory,
            host.strip("[]"),
            int(port),
            ssl=context,
            server_hostname=name if context else None,
        )

    def connect_blocking(self, address: str, name: str, timeout_s: float) -> socket.socket:
        """Open a connection for blocking calls, each of which may take so long.

        Raises:
            OSError: there is none; ssl.SSLError where the other side is not trusted.
            ValueError: this is no address.
        """
        host, _, port = address.rpartition(":")
        context = self.context()
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return context.wrap_socket(sock, server_hostname=name) if context else sock
        except BaseException:
            sock.close()
            raise

    def _channel_credentials(self) -> grpc.ChannelCredentials | None:
        if self._bundle is None:
            return None
        with self._lock:
            bundle = self._bundle.current()
            if self._credentials is None or self._credentials[0] != self._bundle.version:
                made = grpc.ssl_channel_credentials(bundle.trusted, bundle.key, bundle.chain)
                self._credentials = self._bundle.version, made
            return self._credentials[1]


PLAIN = Dialing()


def dialing(bundle: str = "", token_file: str = "") -> Dialing:
    """Return how clients and operators connect: by these files, or those that the environment
    names (``KOINON_TLS_BUNDLE``, ``KOINON_TOKEN_FILE``, or a token itself in ``KOINON_TOKEN``).

    Raises:
        ConfigurationError: a file cannot be used, or there is a token and no bundle, so that the
            token would go over the network for all to read.
    """
    bundle = bundle or os.environ.get(BUNDLE_VARIABLE, "")
    token_file = token_file or os.environ.get(TOKEN_FILE_VARIABLE, "")
    token = _token_in(token_file) if token_file else os.environ.get(TOKEN_VARIABLE, "").strip()
    if not bundle:
        if token:
            raise ConfigurationError(
                reason="there is a token and no identity file: a token is sent by TLS only "
                f"(give the file by tls_bundle or {BUNDLE_VARIABLE})"
            )
        return PLAIN
    return Dialing(BundleFile(bundle, frozenset(Kind)), token)


def _token_in(path: str) -> str:
    try:
        with Path(path).open(encoding="ascii", errors="replace") as file:
            token = file.read(_TOKEN_CHARS_MAX + 2).strip()
    except OSError as error:
        raise ConfigurationError(reason=f"token file {path}: {error.strerror or error}") from None
    if len(token) > _TOKEN_CHARS_MAX or not token.replace("_", "").isalnum():
        raise ConfigurationError(reason=f"token file {path}: holds no token")
    return token


class Listening:
    """The settings by which others connect to this process: plain without a bundle."""

    def __init__(self, mode: Mode = Mode.OFF, bundle: BundleFile | None = None) -> None:
        self.mode = mode
        self.bundle = bundle
        self._lock = threading.Lock()
        self._context: tuple[int, bool, ssl.SSLContext] | None = None
        self._doors: list[PlainOrTls] = []
        self.grpc_ports: set[int] = set()
        """The ports at which gRPC itself listens, behind a port for both kinds too."""

    @property
    def takes_plain(self) -> bool:
        return self.mode is not Mode.REQUIRE

    @property
    def takes_tls(self) -> bool:
        return self.mode is not Mode.OFF

    def dialing(self) -> Dialing:
        """Return the settings by which this process, a server, connects to others."""
        if self.mode in (Mode.PREFER, Mode.REQUIRE):
            return Dialing(self.bundle)
        return PLAIN

    def add_port(self, server: Any, address: str) -> int:
        """Have a gRPC server listen at the address; return the port.

        Raises:
            RuntimeError: it cannot be bound.
        """
        if self.takes_plain and self.takes_tls:
            plain_port = server.add_insecure_port("127.0.0.1:0")
            tls_port = server.add_secure_port("127.0.0.1:0", self._server_credentials())
            self.grpc_ports |= {plain_port, tls_port}
            door = PlainOrTls(address, plain_port=plain_port, tls_port=tls_port)
            self._doors.append(door)
            return door.port
        if self.takes_plain:
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, self._server_credentials())
        self.grpc_ports.add(port)
        return port

    def read_again(self) -> None:
        """Take over an identity file that was replaced, at once."""
        if self.bundle is not None:
            self.bundle.look_at_once()

    def close(self) -> None:
        """Accept no more connections at ports that take both kinds."""
        for door in self._doors:
            door.close()

    def context(self, *, certificates_required: bool) -> ssl.SSLContext:
        """Return what a socket of a server is wrapped with; it may have changed by the next
        connection. A caller's certificate is asked for, and checked if there is one.
        """
        assert self.bundle is not None
        with self._lock:
            bundle = self.bundle.current()
            wanted = self.bundle.version, certificates_required
            if self._context is None or self._context[:2] != wanted:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                _load(context, bundle)
                context.verify_mode = (
                    ssl.CERT_REQUIRED if certificates_required else ssl.CERT_OPTIONAL
                )
                # A ticket comes after the handshake, when clients take anything that can be read
                # for a sign that the server leaves. Connections are kept: few are resumed.
                context.num_tickets = 0
                self._context = *wanted, context
            return self._context[2]

    def wrap(self, sock: socket.socket, timeout_s: float) -> socket.socket:
        """Return a connection that was taken on a port of sockets, after its handshake.

        Raises:
            OSError: there was none in time (ssl.SSLError), or it is plain where TLS is required.
        """
        if not self.takes_tls:
            return sock
        sock.settimeout(timeout_s)
        if self.takes_plain and not is_tls(sock.recv(1, socket.MSG_PEEK)):
            return sock
        return self.context(certificates_required=True).wrap_socket(sock, server_side=True)

    def _server_credentials(self) -> grpc.ServerCredentials:
        """Ask for a client's certificate: gRPC in Python knows no "if there is one"."""
        bundle_file = self.bundle
        assert bundle_file is not None
        known = bundle_file.version

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal known
            bundle = bundle_file.current()
            if bundle_file.version == known:
                return None
            known = bundle_file.version
            return _configuration(bundle)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(bundle_file.current()),
            changed,  # type: ignore[arg-type]  # None, for no change, is left out of its type
            require_client_authentication=True,
        )


def listening(mode: str, bundle: str, kind: Kind) -> Listening:
    """Return how a server of that kind listens, by its flags. With a bundle and no mode, TLS is
    required.

    Raises:
        ConfigurationError: they contradict one another, or the file cannot be used.
    """
    if mode and mode not in set(Mode):
        raise ConfigurationError(
            reason=f"tls {mode!r}: must be {', '.join(list(Mode)[:-1])} or {Mode.REQUIRE}"
        )
    chosen = Mode(mode) if mode else Mode.REQUIRE if bundle else Mode.OFF
    if chosen is Mode.OFF:
        return Listening()
    if not bundle:
        raise ConfigurationError(reason=f"tls {chosen}: needs an identity file (--tls-bundle)")
    return Listening(chosen, BundleFile(bundle, frozenset([kind])))


def add_flags(parser: Any) -> None:
    """Give a server's parser the flags that ``listening`` reads."""
    parser.add_argument(
        "--tls-bundle",
        default="",
        metavar="FILE",
        help="this server's identity: key, certificate and the CA's, PEM (koinon certs)",
    )
    parser.add_argument(
        "--tls",
        default="",
        metavar="MODE",
        help="off, allow (plain and TLS), prefer (both; connects by TLS) or require (TLS only: "
        "what --tls-bundle means without this)",
    )


def _checking(options: Options, name: str) -> Options:
    return (*options, ("grpc.ssl_target_name_override", name))


def _configuration(bundle: Bundle) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(bundle.key, bundle.chain)], root_certificates=bundle.trusted
    )


def _load(context: ssl.SSLContext, bundle: Bundle) -> None:
    """Have the context show and trust what the bundle says."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=bundle.trusted.decode("ascii"))
    # The library reads keys from files only; this one is private and gone at once.
    with tempfile.NamedTemporaryFile() as file:
        file.write(bundle.pem)
        file.flush()
        context.load_cert_chain(file.name)
