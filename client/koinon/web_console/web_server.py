"""The process of the console: binds the port, runs the HTTP server and the poller on threads."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import uvicorn

from koinon.core.closing import Closing
from koinon.operate.admin import Admin
from koinon.operate.judge.heat import HotAnswer, hot_answer
from koinon.operate.judge.hotspots import RankBy
from koinon.operate.traffic import TrafficClient
from koinon.web_console.application import Console, Questions
from koinon.web_console.broadcast import READERS_MAX, Broadcast
from koinon.web_console.gate import LOOPBACK, Gate, new_code
from koinon.web_console.journal import Journal
from koinon.web_console.live_state import LiveState
from koinon.web_console.poller import Poller, Sink
from koinon_proto.contract.addresses import check_address
from koinon_proto.contract.errors import (
    ConfigurationError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from koinon_proto.contract.table import Table
from koinon_proto.security.bundle import BundleFile
from koinon_proto.security.names import Kind
from koinon_proto.security.transport import BUNDLE_VARIABLE, Dialing

START_S_MAX = 10.0
STOP_S_MAX = 5.0
CONNECTIONS_MAX = READERS_MAX + 100
HOT_PARTITIONS, HOT_KEYS = 10, 5
USER_TIMEOUT_MS = 3_000


@dataclass(frozen=True, kw_only=True)
class ConsoleSettings:
    """The console's address and the access to it.

    Attributes:
        listen: ``host:port``; port 0: a free port.
        certificate: a PEM file with a key and a certificate for HTTPS; '': the console speaks HTTP.
        host_names: names by which browsers call it, beside loopback names and the host of
            ``listen``.
        code: the code that browsers must show; '': a random one where a code is required.
        interval_s: the time between two polls of the cluster while a browser is connected.
    """

    listen: str
    certificate: str = ""
    host_names: tuple[str, ...] = ()
    code: str = ""
    interval_s: float = 1.0

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0]

    @property
    def is_local(self) -> bool:
        """True if only programs of this machine can reach it."""
        return self.host in LOOPBACK


class ConsoleServer(Closing):
    """A console, which runs from ``start`` to ``close``. Opening ``url`` in a browser logs in."""

    def __init__(self, coordinators: str, settings: ConsoleSettings, *, timeout_ms: int) -> None:
        """Bind the port.

        Raises:
            ConfigurationError: an address or a file cannot be used.
            OSError: the port cannot be bound.
        """
        self._admin = Admin(coordinators, timeout_ms=timeout_ms)
        self._socket = _bound(settings)
        identity = _identity()
        code = settings.code or ("" if settings.is_local and identity is None else new_code())
        self._state = LiveState(Journal(secrets.token_hex(4)))
        self._loop_call: Callable[..., Any] = lambda *_: None  # set while the event loop runs
        self._settings, self._code = settings, code
        self._questions = Questions(hot=_hot, is_user=_user_check(coordinators, identity))
        self._server = self._made_server(_bound_names(settings))
        self._thread = threading.Thread(target=self._run, name="console-http", daemon=True)

    @property
    def address(self) -> str:
        """The host and the port that the console listens on."""
        return f"{self._settings.host}:{self._socket.getsockname()[1]}"

    @property
    def url(self) -> str:
        """The address for a browser, with the code if one is required. (A browser does not send the
        part behind #.)
        """
        scheme = "https" if self._settings.certificate else "http"
        names = self._settings.host_names
        address = self.address
        if not self._settings.is_local:
            host = names[0] if names else "127.0.0.1"
            address = f"{host}:{self._socket.getsockname()[1]}"
        return f"{scheme}://{address}/" + (f"#{self._code}" if self._code else "")

    def start(self) -> None:
        """Begin to serve; return once browsers are answered.

        Raises:
            ConfigurationError: the server ended at once.
        """
        self._thread.start()
        deadline = time.monotonic() + START_S_MAX
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise ConfigurationError(reason="the console's HTTP server ended at its start")
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._loop_call(self._broadcast.close)
        if self._thread.ident:
            self._thread.join(STOP_S_MAX)
        self._socket.close()
        self._admin.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def _made_server(self, names: tuple[str, ...]) -> uvicorn.Server:
        self._broadcast = Broadcast(self._state.journal)
        gate = Gate(names=names, code=self._code)
        sink = Sink(
            on_view=self._on_event_loop(self._state.apply_view),
            on_sizes=self._on_event_loop(self._state.apply_sizes),
            on_update=self._on_event_loop(
                lambda update: self._state.apply_update(update, time.time())
            ),
        )
        self._poller = Poller(self._admin, sink, self._settings.interval_s)
        console = Console(
            self._state, self._broadcast, gate, self._questions, self._poller.set_watched
        )
        certificate = self._settings.certificate or None
        return uvicorn.Server(
            uvicorn.Config(
                console.application(self._alive),
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=CONNECTIONS_MAX,
                timeout_graceful_shutdown=2,
                ssl_certfile=certificate,
                ssl_keyfile=certificate,
            )
        )

    def _on_event_loop(self, take: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``take`` so that it runs on the event loop, which owns the state, and wakes the
        readers if it added to the journal.
        """

        def taken(*found: Any) -> None:
            last = self._state.journal.last
            take(*found)
            if self._state.journal.last != last:
                self._broadcast.announce()

        return lambda *found: self._loop_call(taken, *found)

    @contextlib.asynccontextmanager
    async def _alive(self) -> AsyncIterator[None]:
        import asyncio

        loop = asyncio.get_running_loop()

        def call(function: Callable[..., None], *arguments: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its readers with it
                loop.call_soon_threadsafe(function, *arguments)

        self._loop_call = call
        self._poller.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._poller.stop)


def _bound(settings: ConsoleSettings) -> socket.socket:
    host, port = settings.host, settings.listen.rpartition(":")[2]
    check_address("--listen", f"{host}:{port if port != '0' else '1'}")
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        return socket.create_server((bare, int(port)), family=family)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(reason=f"--listen {settings.listen}: {reason}") from None


def _bound_names(settings: ConsoleSettings) -> tuple[str, ...]:
    return (settings.host, *settings.host_names)


def _identity() -> BundleFile | None:
    """Return the identity file of this process; None: it connects without TLS."""
    path = os.environ.get(BUNDLE_VARIABLE, "")
    return BundleFile(path, frozenset(Kind)) if path else None


def _user_check(coordinators: str, identity: BundleFile | None) -> Callable[[str], bool]:
    """Return a function that asks the cluster whether a text is the token of a user who may view
    it. Without a client certificate that names no user it returns False always: with a user's own
    certificate the cluster would accept every text.
    """
    if identity is None or identity.current().principal.kind is not Kind.CLIENT:
        return lambda _: False

    def is_user(token: str) -> bool:
        if not token.replace("_", "").isalnum():
            return False
        dialing = Dialing(identity, token)
        with Admin(coordinators, timeout_ms=USER_TIMEOUT_MS, dialing=dialing) as admin:
            try:
                admin.status()
            except (UnauthenticatedError, PermissionDeniedError):
                return False
        return True

    return is_user


def _hot(table: Table, seconds: float) -> HotAnswer:
    with TrafficClient() as traffic:
        survey = traffic.survey(
            table,
            seconds,
            by=RankBy.ALL,
            partitions_max=HOT_PARTITIONS,
            keys_max=HOT_KEYS,
        )
    return hot_answer(survey, table, RankBy.ALL, shown=HOT_PARTITIONS, keys=HOT_KEYS)
