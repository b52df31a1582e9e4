"""Shared by all our gRPC servers and callers: options, and typed errors over statuses.

A handler raises a ``KoinonError``; ``typed_errors`` turns it into a gRPC status that carries the
error whole, and ``error_of`` gives the caller the same error back. On the way it is counted and
timed (``requests``), and its request's id is known to whatever is logged meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message

from koinon_proto.contract import bounds, convert, errors
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.errors_gen import KINDS
from koinon_proto.contract.table import MAX_MESSAGE_BYTES
from koinon_proto.server import requests
from koinon_proto.server.requests import Method, Request

log = logging.getLogger(__name__)

Code = grpc.StatusCode
CONNECTIONS_MAX = 8_192
COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),  # also how long an attempt to connect may take, at first
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),  # retries are ours to decide: they need to know a write's fate
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # two processes on one port must be an error, not a lottery
    ("grpc.server_handshake_timeout_ms", 5_000),  # closes half-open and garbage connections
    ("grpc.max_concurrent_streams", 256),  # a connection; what it opens beyond waits on its side
    # With probes the window of each stream grows to some MB, which a caller may send before its
    # call is admitted; without, it is 64 KiB until then.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

_STOPPED = "Server already stopped"
"""The text that gRPC gives a handler that outlives its server by a moment."""
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def typed_errors(handler: Handler) -> Handler:
    """Wrap a unary ``grpc.aio`` handler method ``(self, request, context)``: an expected error
    becomes a typed status; an unexpected one is logged whole and answered as internal.
    """
    return _typed(handler, stream=False)


def typed_stream(handler: Handler) -> Handler:
    """Wrap a streaming handler as ``typed_errors`` does, but count it only while it lasts."""
    return _typed(handler, stream=True, has_metadata=True)


def typed_wait(handler: Handler) -> Handler:
    """Wrap a unary handler that waits for news as ``typed_errors`` does, but count it only while it
    lasts.
    """
    return _typed(handler, stream=True)


def _typed(handler: Handler, *, stream: bool, has_metadata: bool = False) -> Handler:
    name = handler.__name__
    methods: dict[type, Method] = {}

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: Any) -> Any:
        method = methods.get(type(self))
        if method is None:
            method = methods[type(self)] = requests.method_of(type(self), name, stream=stream)
        handled = Request(method, request, context)
        try:
            if isinstance(request, Message):  # a stream's messages are checked as they are read
                bounds.check(request)
            if has_metadata:
                # gRPC notes that they are sent when the first message is written. If that is given
                # up, as the stream ends, they would be sent again with the status: which fails, and
                # the caller would wait for the status for ever.
                await context.send_initial_metadata(())
            reply = await handler(self, request, context)
        except KoinonError as error:
            handled.failed(outcome_of(error), error)
            # Until the caller has taken the answer, the error's frames would hold what was read.
            await abort(context, error.with_traceback(None))
        except asyncio.CancelledError as error:
            handled.failed(requests.CANCELLED, error)
            raise
        except (grpc.aio.AbortError, grpc.RpcError) as error:
            handled.failed(requests.INTERNAL, error)
            raise
        except Exception as error:
            if isinstance(error, grpc.aio.BaseError) and _STOPPED in str(error):
                handled.failed(requests.CANCELLED, error)
                raise asyncio.CancelledError from error
            log.exception("handler failed method=%s", method.path)
            handled.failed(requests.INTERNAL, error)
            await abort(context, error)
        else:
            handled.answered(reply)
            return reply

    return cast(Handler, wrapped)


def outcome_of(error: KoinonError) -> str:
    """Return the label, in metrics and logs, of a request that ended with ``error``:
    ``not_primary``.
    """
    return KINDS.get(type(error), (requests.INTERNAL, ""))[0]


def bounded(calls_max: int) -> Callable[[Handler], Handler]:
    """Bound how many calls a servicer (by this and its other handlers so marked) works on at once;
    one more is refused with ResourceExhaustedError.

    Counted from the arrival of the request, so that calls which never send theirs take no other's
    place: gRPC's own server-wide bound counts those, and lets one idle client shut out heartbeats.
    """

    def wrap(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def wrapped(self: Any, request: Any, context: Any) -> Any:
            under_way = getattr(self, "_calls_under_way", 0)
            if under_way >= calls_max:
                raise errors.ResourceExhaustedError(resource="calls under way", limit=calls_max)
            self._calls_under_way = under_way + 1
            try:
                return await handler(self, request, context)
            finally:
                self._calls_under_way -= 1

        return cast(Handler, wrapped)

    return wrap


def code_of(error: Exception) -> grpc.StatusCode:
    """Return the status of a call that ends with the error."""
    _, status = KINDS.get(cast("type[KoinonError]", type(error)), ("", "INTERNAL"))
    return Code.__members__[status]


async def abort(context: Any, error: Exception) -> None:
    """End the call with the status and the details that carry ``error``. Always raises."""
    code = code_of(error)
    details = convert.error_to_status_details(error, code.value[0])
    await context.abort(code, str(error), ((convert.STATUS_DETAILS_KEY, details),))


def error_of(failure: Any) -> KoinonError | None:
    """Return the typed error that the other side answered with; None if it did not answer so
    (the call never arrived, was cut off, or timed out: whether it took effect is not known). Of a
    server's context: the one that its handler has answered with.
    """
    # Blocking calls and grpc.aio give metadata of two types, which no one stub fits.
    metadata = failure.trailing_metadata() or ()
    for key, value in metadata:
        if key == convert.STATUS_DETAILS_KEY:
            return convert.error_from_status_details(value)
    return None


def fate_of(failure: grpc.RpcError, *, at: str = "", unimplemented: str = "") -> KoinonError:
    """Return what a call that failed comes to: the typed error that the other side answered with,
    else ``UnknownFateError``: gRPC says the same of what never arrived and what was cut off.

    Args:
        at: the address that was asked; the error names it.
        unimplemented: what the other side lacks if it does not know the method; that is then an
            UnsupportedVersionError.
    """
    if (typed := error_of(failure)) is not None:
        return typed
    where = f"{at}: " if at else ""
    if unimplemented and failure.code() is Code.UNIMPLEMENTED:
        return errors.UnsupportedVersionError(what=where + unimplemented, version=0, supported=1)
    return errors.UnknownFateError(reason=where + status_text(failure))


def status_text(failure: grpc.RpcError) -> str:
    """Return gRPC's own text for a failure: ``unavailable: Socket closed``."""
    return f"{failure.code().name.lower()}: {failure.details()}"


def in_words(failure: grpc.RpcError) -> str:
    """Return the text about a failed call for an operator."""
    if (typed := error_of(failure)) is not None:
        return str(typed)
    return _WORDS.get(failure.code()) or status_text(failure)


_WORDS = {Code.DEADLINE_EXCEEDED: "no answer in time", Code.UNAVAILABLE: "not reachable"}


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open descriptors to what it is allowed; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class TakesServices(Protocol):
    """A server that services are added to: one of ``grpc.aio``, or a guarded one."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, Any], /
    ) -> None: ...

    def add_generic_rpc_handlers(self, handlers: Any, /) -> None: ...


async def add_health_and_reflection(server: TakesServices, services: tuple[str, ...]) -> Any:
    """Add ``grpc.health.v1.Health`` (all serving) and server reflection; return the health
    servicer, whose ``set`` and ``enter_graceful_shutdown`` change its answers.
    """
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", *services):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        reflection.aio.ReflectionServicer(names), server
    )
    return servicer
