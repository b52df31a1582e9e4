"""The metrics of a server process, and the HTTP endpoint that Prometheus scrapes.

What a process knows in plain numbers comes from *sources*: functions that are called at each scrape
on the event loop that owns the numbers, so that nothing is locked and nothing is counted twice.
They copy, briefly; the text is made on the endpoint's thread, in pieces between which the loop may
run. Where the loop does not answer in time, what it said last is told again: its lag, measured on
the loop, shows such a stall afterwards. What is kept in prometheus_client's own objects, and what
every Python process tells, is in ``registry``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gzip
import http.server
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.process.measures import Family, Histogram, distribution, labelled
from koinon_proto.security.bundle import BundleFile
from koinon_proto.security.transport import Listening
from koinon_proto.server import request_metrics

log = logging.getLogger(__name__)

Source = Callable[[], Iterable[Family]]

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LOOP_WAIT_S = 1.0
_LAG_INTERVAL_S = 0.05
_LAG_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_CONNECTIONS_MAX = 8
_BEGINNING_MAX = 64
_CONNECTION_TIMEOUT_S = 5.0
_PAUSE_S = 0.0002
_MANY = 64
_POLL_S = 0.1
_COMPRESSION = 1


class Metrics:
    """The metrics of one process."""

    def __init__(self, component: Literal["node", "coordinator"]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._build = (_version(), component)
        self._loop_lag = Histogram(_LAG_BOUNDS)
        self._sources: list[Source] = [self._of_process, request_metrics.families]
        self._aside: list[Source] = []
        self._last: list[Family] = []

    def add(self, source: Source, *, on_loop: bool = True) -> None:
        """Ask ``source`` at each scrape: on the event loop, where it must return within about a
        millisecond, or on the endpoint's thread.
        """
        (self._sources if on_loop else self._aside).append(source)

    async def watch_loop(self) -> None:
        """Measure the event loop's lag until cancelled."""
        while True:
            due = time.monotonic() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._loop_lag.observe(max(time.monotonic() - due, 0.0))

    async def collect(self) -> list[Family]:
        """Ask every source; others may run between two of them."""
        families: list[Family] = []
        for source in self._sources:
            families.extend(source())
            await asyncio.sleep(0)
        return families

    def text(self, loop: asyncio.AbstractEventLoop) -> bytes:
        """The exposition. Call it on another thread than the loop's."""
        asked = asyncio.run_coroutine_threadsafe(self.collect(), loop)
        try:
            self._last = asked.result(_LOOP_WAIT_S)
        except concurrent.futures.TimeoutError:
            asked.cancel()
            log.warning("metrics are old: the event loop is busy for_s=%s", _LOOP_WAIT_S)
        parts = [generate_latest(self.registry)]
        aside = (family for source in self._aside for family in source())
        for family in (*self._last, *aside):
            for piece in family.pieces():
                parts.append(piece.encode())
                if len(family.series) > _MANY:
                    time.sleep(_PAUSE_S)  # the loop may have the interpreter
        return b"".join(parts)

    def _of_process(self) -> Sequence[Family]:
        return (
            labelled(
                "koinon_build_info",
                "gauge",
                "Always 1; the version that this process runs.",
                ("version", "component"),
                {self._build: 1},
            ),
            distribution(
                "koinon_event_loop_lag_seconds",
                "How much later than asked the event loop woke a task.",
                self._loop_lag,
            ),
        )


def _of_identity(file: BundleFile) -> Sequence[Family]:
    bundle = file.current()
    return (
        labelled(
            "koinon_certificate_expiry_timestamp_seconds",
            "gauge",
            "The Unix time at which a certificate of this process ends.",
            ("certificate",),
            {("own",): bundle.not_after_s, ("authority",): bundle.trusted_until_s},
        ),
    )


class MetricsEndpoint:
    """Serves a process's metrics over HTTP on a thread of its own: GET /metrics."""

    def __init__(self, address: str, listening: Listening | None = None) -> None:
        """Bind ``address``, ``host:port``; nothing is answered before ``start``. With '' there is
        no endpoint, and the other methods do nothing.

        Raises:
            ConfigurationError: it cannot be bound.
        """
        self._task: asyncio.Task[None] | None = None
        self._server: _Server | None = None
        if not address:
            return
        host, _, port = address.rpartition(":")
        try:
            family, _, _, _, place = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._listening = listening or Listening()
            self._server = _Server(family, place, self._listening)
        except OSError as error:
            raise ConfigurationError(
                reason=f"metrics-listen {address}: cannot be bound ({error.strerror or error})"
            ) from error

    def start(self, metrics: Metrics) -> None:
        """Answer from now on, with the running event loop's numbers."""
        if self._server is None:
            return
        if (bundle := self._listening.bundle) is not None:
            metrics.add(lambda: _of_identity(bundle), on_loop=False)
        loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(metrics.watch_loop())
        self._server.text = lambda: metrics.text(loop)
        threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True
        ).start()

    def close(self) -> None:
        """Answer no more, and free the address. May block for ``_POLL_S``; may be repeated."""
        server, self._server = self._server, None
        if server is None:
            return
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
            server.shutdown()
        server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread for each connection, and few of them: a scraper needs one."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    text: Callable[[], bytes]

    def __init__(self, family: int, place: Any, listening: Listening) -> None:
        self._listening = listening
        self.address_family = family
        self._places = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._lock = threading.Lock()
        # Connections before their handshake's end, the oldest first. The handshake takes the
        # socket's descriptor away, so beside each is one more.
        self._beginning: dict[socket.socket, socket.socket] = {}
        self.scraping = threading.Lock()
        super().__init__(place, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Let it begin. Where too many do, the oldest has to go: strangers that begin, and say
        nothing more, do not keep a scraper out.
        """
        with self._lock:
            if len(self._beginning) >= _BEGINNING_MAX:
                oldest = self._beginning.pop(next(iter(self._beginning)))
                with oldest, contextlib.suppress(OSError):  # it is gone already
                    oldest.shutdown(socket.SHUT_RDWR)
            try:
                self._beginning[request] = request.dup()
            except OSError:  # no descriptors left
                return False
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            wrapped = self._begun(request)
        except OSError:  # no handshake
            self.handle_error(request, client_address)
            self.shutdown_request(request)
            return
        with wrapped:
            if self._places.acquire(blocking=False):
                try:
                    super().process_request_thread(wrapped, client_address)
                finally:
                    self._places.release()

    def _begun(self, request: socket.socket) -> socket.socket:
        """Return the connection after its handshake.

        Raises:
            OSError: there was none.
        """
        try:
            return self._listening.wrap(request, _CONNECTION_TIMEOUT_S)
        finally:
            with self._lock:
                known = self._beginning.pop(request, None)
            if known is not None:
                known.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape was cut off client=%s", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request."""

    timeout = _CONNECTION_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._answer(404, f"metrics are at {PATH}\n".encode(), {})
            return
        headers = {}
        with self.server.scraping:
            body = self.server.text()
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, _COMPRESSION)
            headers["Content-Encoding"] = "gzip"
        self._answer(200, body, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


def _version() -> str:
    try:
        return version("koinon")
    except PackageNotFoundError:
        return "0+unknown"
