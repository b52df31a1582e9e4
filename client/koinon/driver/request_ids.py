"""The ids by which servers and their logs identify an operation.

Every operation has an id, its own or the application's; every call made for it carries the id and
the call's number (``koinon_proto.contract.request_ids``), and an error that ends the operation
names the id.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.request_ids import KEY, Metadata, cleaned, fresh


class RequestId:
    """An id, and the number of calls made under it."""

    __slots__ = ("_calls", "text")

    def __init__(self, text: str = "") -> None:
        self.text = text or fresh()
        self._calls = 0

    def next_call(self) -> str:
        """Return the id with the number of the next call."""
        self._calls += 1  # two threads may use a number twice, which is harmless: people read it
        return f"{self.text}/{self._calls}"

    def metadata(self) -> Metadata:
        """Return the gRPC metadata of the next call under the id."""
        return ((KEY, self.next_call()),)

    def name(self, error: BaseException) -> None:
        """Set the error's request id, unless it already has one."""
        if isinstance(error, KoinonError) and not error.request_id:
            error.request_id = self.text


_current: ContextVar[RequestId | None] = ContextVar("koinon_request_id", default=None)


@contextmanager
def request_id(text: str = "") -> Iterator[str]:
    """Use this id for the operations inside, of any client in this thread or task: servers log them
    under it. Yields the id in the form that is sent: at most 64 characters of printable ASCII, with
    question marks for others; '' makes a new id.

    >>> with koinon.request_id("order-4711"):
    ...     client.put(b"order:4711", b"paid")

    Single operations that run at the same time share a request, which has one id: that of its first
    operation, if it has one. The error that ends an operation carries the id that was sent
    (``error.request_id``), which may thus be a different one.
    """
    if not isinstance(text, str):
        raise TypeError(f"a request id must be a str, not {type(text).__name__}")
    request = RequestId(cleaned(text))
    token = _current.set(request)
    try:
        yield request.text
    finally:
        _current.reset(token)


def given() -> RequestId | None:
    """Return the id of this task or thread, if it has one."""
    return _current.get()


def adopt(request: RequestId) -> None:
    """Use the id until the end of this task."""
    _current.set(request)


@contextmanager
def operation(request: RequestId | None = None) -> Iterator[RequestId]:
    """Run an operation under ``request``, the present id, or a new one. Errors that leave the
    context carry the id.
    """
    request = request or _current.get() or RequestId()
    token = _current.set(request)
    try:
        yield request
    except KoinonError as error:
        request.name(error)
        raise
    finally:
        _current.reset(token)


def metadata() -> Metadata:
    """Return the gRPC metadata of a call that is made now."""
    return (_current.get() or RequestId()).metadata()


class _Adding(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds metadata to calls of every kind: gRPC skips an interceptor that does not implement a
    call's kind, and the call would carry no token.
    """

    def __init__(self, more: Metadata) -> None:
        self._more = more

    def _added(self, details: Any) -> Any:
        return details._replace(metadata=(*metadata(), *self._more))

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._added(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._added(details), request)

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(self._added(details), requests)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(self._added(details), requests)


def naming(channel: grpc.Channel, more: Metadata = ()) -> grpc.Channel:
    """Wrap a channel for blocking calls: each call carries the request id and ``more``."""
    return grpc.intercept_channel(channel, _Adding(more))
