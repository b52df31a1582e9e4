"""The console over HTTP: the page, its stream of events, and its requests.

========================  ==========================================================================
``GET /``, ``/page/…``    the page; it has no data, and is served to everybody with a known Host
``POST /api/login``       exchanges a code for a session (gate)
``GET /api/events``       the journal as server-sent events; continues after ``Last-Event-ID``
``GET /api/table/V``      the table of exactly this version, as long as it is kept
``POST /api/where``       the partitions and nodes of keys, as in ``koinon where --json``
``POST /api/hot``         the hottest partitions and keys, as in ``koinon admin hot --json``
========================  ==========================================================================

No request changes the cluster. Every answer carries a content security policy that lets the page
load and run only files of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koinon.operate.json_form import json_of
from koinon.operate.judge.answers import KeyAnswer, key_answers
from koinon.operate.judge.heat import HotAnswer
from koinon.web_console.broadcast import Broadcast
from koinon.web_console.gate import CODE_CHARS_MAX, SESSION_S_MAX, Gate
from koinon.web_console.live_state import LiveState
from koinon.web_console.page_requests import (
    BODY_BYTES_MAX,
    hot_seconds,
    object_in,
    where_request,
)
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownKeyspaceError,
)
from koinon_proto.contract.table import Table
from koinon_proto.process.printable import printable_bytes

PAGE = Path(__file__).parent / "page"
COOKIE = "koinon_console"
PING_S = 10
SEND_S_MAX = 30.0
"""A browser that receives nothing for this many seconds is disconnected; it reconnects by itself.
"""
TOKENS_CHECKED_EVERY_S = 30.0
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The application's blocking requests to the cluster; each runs on a thread.

    Attributes:
        hot: samples for this many seconds; returns the hottest partitions and keys of the table.
        is_user: returns whether a text is the token of a cluster user who may view the cluster.
            Raises KoinonError if the cluster does not answer.
    """

    hot: Callable[[Table, float], HotAnswer]
    is_user: Callable[[str], bool]


class Console:
    """The routes and their shared state. ``set_watched`` is called with True when a browser begins
    to read events, and with False when the last one ends.
    """

    def __init__(
        self,
        state: LiveState,
        broadcast: Broadcast,
        gate: Gate,
        questions: Questions,
        set_watched: Callable[[bool], None],
    ) -> None:
        self._state = state
        self._broadcast = broadcast
        self._gate = gate
        self._questions = questions
        self._set_watched = set_watched
        # the survey under way; all requests share it
        self._survey: asyncio.Task[HotAnswer] | None = None

    def application(self, lifespan: Callable[[], Any]) -> Starlette:
        """Return the application; ``lifespan`` is a context that is open while it runs."""

        @contextlib.asynccontextmanager
        async def alive(_: Starlette) -> AsyncIterator[None]:
            checking = asyncio.create_task(self._check_tokens())
            async with lifespan():
                yield
            checking.cancel()

        routes = [
            Route("/", self._index),
            Route("/api/login", self._login, methods=["POST"]),
            Route("/api/events", self._let_in(self._events)),
            Route("/api/table/{version:int}", self._let_in(self._table)),
            Route("/api/where", self._let_in(self._where), methods=["POST"]),
            Route("/api/hot", self._let_in(self._hot), methods=["POST"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        middleware = [Middleware(Guard, gate=self._gate), Middleware(GZipMiddleware)]
        handlers: Mapping[Any, Any] = {KoinonError: _refusal}
        return Starlette(
            routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=alive
        )

    # --- sessions -------------------------------------------------------------------------------

    def _let_in(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            if not self._gate.lets_in(_session_of(request), time.time()):
                raise UnauthenticatedError(reason="this console requires its code")
            return await answer(request)

        return checked

    async def _login(self, request: Request) -> Response:
        code = object_in(await _body(request)).get("code")
        if not isinstance(code, str) or len(code) > CODE_CHARS_MAX or not code.isascii():
            raise InvalidArgumentError(
                field="code", reason="must be the code as the console printed it"
            )
        token = ""
        if not self._gate.is_code(code):
            if not await asyncio.to_thread(self._questions.is_user, code):
                raise UnauthenticatedError(reason="this is not the code of this console")
            token = code
        answer = JSONResponse({"ok": True})
        answer.set_cookie(
            _cookie_of(request),
            self._gate.open_session(time.time(), token),
            max_age=SESSION_S_MAX,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    async def _check_tokens(self) -> None:
        """End the sessions of users who may no longer view the cluster. Runs until cancelled."""
        while True:
            await asyncio.sleep(TOKENS_CHECKED_EVERY_S)
            for token in self._gate.tokens:
                with contextlib.suppress(KoinonError):  # without an answer the session stays
                    if not await asyncio.to_thread(self._questions.is_user, token):
                        self._gate.end_sessions_of(token)

    # --- answers --------------------------------------------------------------------------------

    async def _index(self, _: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html")

    async def _events(self, request: Request) -> Response:
        if self._broadcast.full:
            return _failure("too many browsers are connected to this console", 503)
        events = self._events_of(request.headers.get("last-event-id", ""), _session_of(request))
        return EventSourceResponse(events, ping=PING_S, send_timeout=SEND_S_MAX)

    async def _events_of(self, after: str, session: str) -> AsyncIterator[ServerSentEvent]:
        journal = self._state.journal
        self._set_watched(True)
        try:
            async with contextlib.aclosing(self._broadcast.read(after)) as entries:
                async for entry in entries:
                    if not self._gate.lets_in(session, time.time()):
                        return
                    yield ServerSentEvent(entry.data, event=entry.topic, id=journal.id_of(entry))
        finally:
            self._set_watched(self._broadcast.readers > 0)

    async def _table(self, request: Request) -> Response:
        table = self._state.table_at(request.path_params["version"])
        if table is None:
            return _failure("this version of the table is no longer kept", 404)
        return Response(table, media_type="application/json")

    async def _where(self, request: Request) -> Response:
        asked, table = where_request(await _body(request)), self._known_table()
        found = key_answers(table, asked.keyspace, asked.keys)
        return JSONResponse([_shown_key(answer) for answer in found])

    async def _hot(self, request: Request) -> Response:
        seconds, table = hot_seconds(await _body(request)), self._known_table()
        if self._survey is None or self._survey.done():
            survey = asyncio.to_thread(self._questions.hot, table, seconds)
            self._survey = asyncio.create_task(survey)
        answer = await asyncio.shield(self._survey)
        shown = json_of(answer)
        for one, told in zip(answer.partitions, shown["partitions"], strict=True):
            for key, told_key in zip(one.keys, told["keys"], strict=True):
                told_key["shown"] = printable_bytes(key.key)
        return JSONResponse(shown)

    def _known_table(self) -> Table:
        table = self._state.history.table
        if table is None:
            raise InvalidArgumentError(
                field="keyspace", reason="the console has not received the table yet"
            )
        return table


def _shown_key(answer: KeyAnswer) -> dict[str, Any]:
    """Return the answer as JSON with the key in printable form, and the place of the hashed bytes
    in the key.
    """
    start = answer.key.find(answer.routing_bytes)
    return {
        **json_of(answer),
        "shown": printable_bytes(answer.key),
        "hex": answer.key.hex(),
        "routing_shown": printable_bytes(answer.routing_bytes),
        "routing_hex": answer.routing_bytes.hex(),
        "routing_start": start if start >= 0 else None,
    }


async def _body(request: Request) -> bytes:
    """Read a request's JSON body, of little more than ``BODY_BYTES_MAX`` bytes at most.

    Raises:
        InvalidArgumentError: the content type is not JSON.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise InvalidArgumentError(field="content-type", reason="must be application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            break
    return bytes(body)


def _cookie_of(request: HTTPConnection) -> str:
    """Return the cookie's name. It includes the port, since browsers share a host's cookies between
    all its ports.
    """
    return f"{COOKIE}_{request.url.port or request.url.scheme}"


def _session_of(request: HTTPConnection) -> str:
    return request.cookies.get(_cookie_of(request), "")


def _failure(reason: str, status: int) -> Response:
    return JSONResponse({"error": reason}, status_code=status)


async def _refusal(_: Request, error: Exception) -> Response:
    statuses: dict[type[Exception], int] = {
        UnauthenticatedError: 401,
        PermissionDeniedError: 403,
        UnknownKeyspaceError: 404,
        InvalidArgumentError: 400,
    }
    found = (status for kind, status in statuses.items() if isinstance(error, kind))
    return _failure(str(error), next(found, 503))


class Guard:
    """Middleware: refuses requests that other sites make, and adds the protecting headers to every
    answer.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        shown = Headers(scope=scope)
        hosts, origins = shown.getlist("host"), shown.getlist("origin")
        fault = "the request must have one Host and at most one Origin"
        if len(hosts) == 1 and len(origins) <= 1:
            origin = origins[0] if origins else None
            fault = self._gate.fault(scope["method"], scope["scheme"], hosts[0], origin)
        if not fault and shown.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            fault = "the request comes from another site"
        app = _failure(fault, 403) if fault else self._app
        await app(scope, receive, protected)
