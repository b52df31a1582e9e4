"""Attempts at reads of many rows and at pages of scans, on connections of the loop's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError

from koinon.core.batching import PendingOperation
from koinon.core.exchange import Command, PendingMessage
from koinon.core.routing import Routing
from koinon.driver.resp.connection import Operations
from koinon_proto.contract.errors import KoinonError, UnknownFateError, UnsupportedVersionError
from koinon_proto.v1 import kv_pb2

R = TypeVar("R", kv_pb2.BatchGetResponse, kv_pb2.ScanResponse)


def reply_of(message: PendingMessage, kind: type[R], address: str) -> R | KoinonError | None:
    """Return what a message that was sent to this address came to; None: it was not sent."""
    if message.result is None:
        return message.error
    try:
        return kind.FromString(message.result)
    except DecodeError:
        what = kind.DESCRIPTOR.name
        return UnknownFateError(reason=f"{address} cannot be understood: no {what}")


class MessageRequests:
    """The attempts that one node is asked for. Each ends with what it came to: it is the scan, or
    the operation, that asks again. ``operations`` have the clock and the table.
    """

    def __init__(self, operations: Operations[PendingOperation]) -> None:
        self.now: Callable[[], float] = operations.now
        self.routing: Callable[[], Routing] = operations.routing
        self.watch_answers = operations.watch_answers
        self.unknown: set[Command] = set()
        """Those that the node says its build does not know."""
        self._live: set[PendingMessage] = set()

    def begin(self, message: PendingMessage) -> None:
        self._live.add(message)

    def end(self, message: PendingMessage) -> None:
        """Give an attempt up: a reply is dropped when it comes."""
        message.done = True
        self._live.discard(message)

    def send_again(self, singles: Sequence[PendingMessage]) -> None:
        for message in singles:
            message.end(None)

    def settle_failed(self, failed: list[tuple[PendingMessage, KoinonError]]) -> None:
        for message, error in failed:
            if isinstance(error, UnsupportedVersionError):
                self.unknown.add(message.command)
                message.end(None)
            else:
                message.end(error)

    def close(self, reason: str) -> None:
        """End every attempt."""
        for message in list(self._live):
            message.end(UnknownFateError(reason=reason))
