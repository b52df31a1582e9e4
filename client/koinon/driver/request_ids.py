"""The ids by which servers, and their logs, know an operation.

Every operation has one, its own or the application's; every call made for it carries the id and
the call's number (``koinon_proto.contract.request_ids``), and an error that ends it names the id.
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
    """An id, and how many calls were made under it."""

    __slots__ = ("_calls", "text")

    def __init__(self, text: str = "") -> None:
        self.text = text or fresh()
        self._calls = 0

    def next_call(self) -> str:
        """Return the id with the number of the next call under it."""
        self._calls += 1  # two threads may give out a number twice: it is for people
        return f"{self.text}/{self._calls}"

    def metadata(self) -> Metadata:
        """Return what the next call under the id carries."""
        return ((KEY, self.next_call()),)

    def name(self, error: BaseException) -> None:
        """Note on an error which operation it has ended, unless that is said already."""
        if isinstance(error, KoinonError) and not error.request_id:
            error.request_id = self.text


_current: ContextVar[RequestId | None] = ContextVar("koinon_request_id", default=None)


@contextmanager
def request_id(text: str = "") -> Iterator[str]:
    """Name the operations inside, of any client in this thread or task: servers log what they say
    of them under this id. Gives the id as it is used: at most 64 characters of printable ASCII,
    others are replaced by question marks; '' makes one.

    >>> with koinon.request_id("order-4711"):
    ...     client.put(b"order:4711", b"paid")

    Single operations that run at the same time share a request, which has one id: that of its first
    operation, if that has one. The error that ends an operation has the id that was sent
    (``error.request_id``), which may so be another one than was given here.
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
    """Return the id that this task or thread works under, if any."""
    return _current.get()


def adopt(request: RequestId) -> None:
    """Work under the id until the end of this task."""
    _current.set(request)


@contextmanager
def operation(request: RequestId | None = None) -> Iterator[RequestId]:
    """Carry out an operation: under ``request``, the id that is given, or a new one. Errors that
    leave it name the id.
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
    """Return what a call that is made now carries."""
    return (_current.get() or RequestId()).metadata()


class _Adding(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds to calls of every kind: gRPC passes by an interceptor that lacks a call's kind, and the
    call then carries no token.
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
    """Return the channel, for blocking calls, all of which carry ids, and ``more``."""
    return grpc.intercept_channel(channel, _Adding(more))
