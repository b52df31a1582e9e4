"""Exchanges of one command and one reply: single operations, and requests sent as one message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

from koinon_proto.contract.errors import KoinonError, UnknownFateError


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange:
    """One command and its outcome: a reply, an error, or a timeout."""

    deadline: float  # by the driver's clock
    timeout_ms: int  # the timeout behind the deadline, for messages
    value: bytes = b""  # the bytes sent to the node, without the key
    request: Any = None  # the id of the request; its ``name`` is called with the error
    sent: bool = False  # its batch or its command is in flight
    sent_at: float = 0.0  # when its command was sent, by the driver's clock
    revision: int = 0  # of the routing under which its command was sent
    done: bool = False  # ended, or abandoned
    result: Any = None
    error: KoinonError | None = None  # the error that ended it

    @property
    def write(self) -> bool:
        """True if it may change a record."""
        return False

    def begin_attempt(self) -> bool:
        """Claim the exchange for the request that is about to be sent; return False if it must not
        be part of it: it has ended, or is already in flight.
        """
        if self.done or self.sent:
            return False
        self.sent = True
        return True

    def succeed(self, result: Any) -> None:
        """End the exchange with the result of its reply."""
        self.result = result
        self.done = True

    def expire(self) -> None:
        """End the exchange: its deadline has passed."""
        self.done = True


class Command(Enum):
    """The commands that carry a message of ``v1/kv.proto`` and get one in reply."""

    GET_MANY = b"KOINON.GETMANY"
    SCAN = b"KOINON.SCAN"


@final
@dataclass(slots=True, eq=False, kw_only=True)
class PendingMessage(Exchange):
    """One attempt at reading many rows, or at a page of a scan. ``value`` is the serialized
    request, ``result`` the serialized reply. If it ends with neither a result nor an error, it was
    not sent.
    """

    command: Command
    on_end: Callable[[], None] | None = None

    def succeed(self, result: bytes) -> None:
        if not self.done:
            self.result = result
            self.end(None)

    def expire(self) -> None:
        self.end(UnknownFateError(reason=f"no answer within {self.timeout_ms} ms"))

    def end(self, error: KoinonError | None) -> None:
        """End the attempt, with this error if there is one. An ended attempt does not change."""
        if self.done:
            return
        self.done, self.error = True, error
        if self.on_end is not None:
            self.on_end()
