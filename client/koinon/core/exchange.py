"""Exchanges of one command and one reply: single operations, and what is asked for by a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

from koinon_proto.contract.errors import KoinonError, UnknownFateError


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange:
    """One command and its outcome: a reply, an error, or the end of its time."""

    deadline: float  # by the driver's clock
    timeout_ms: int  # what the deadline was made of, for messages
    value: bytes = b""  # the bytes that it brings to the node, but for its key
    request: Any = None  # the id that it was sent under, whose ``name`` is told of its error
    sent: bool = False  # its batch is under way, or its command
    sent_at: float = 0.0  # by the driver's clock; of a command
    revision: int = 0  # of the routing under which its command was sent
    done: bool = False  # ended, or abandoned
    result: Any = None
    error: KoinonError | None = None  # what it ended with

    @property
    def write(self) -> bool:
        """True if it may change a record."""
        return False

    def begin_attempt(self) -> bool:
        """Claim the exchange for the request that is about to leave; return False if it must not
        go along, because it has ended, or because a request for it is under way.
        """
        if self.done or self.sent:
            return False
        self.sent = True
        return True

    def succeed(self, result: Any) -> None:
        """The reply has come."""
        self.result = result
        self.done = True

    def expire(self) -> None:
        """The deadline has passed."""
        self.done = True


class Command(Enum):
    """The commands that bring a message of ``v1/kv.proto``, and answer with one."""

    GET_MANY = b"KOINON.GETMANY"
    SCAN = b"KOINON.SCAN"


@final
@dataclass(slots=True, eq=False, kw_only=True)
class PendingMessage(Exchange):
    """One attempt at reads of many rows, or at a page of a scan. ``value`` is the message that asks
    for it, serialized, as is the ``result``. If it ends with neither a result nor an error, it was
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
        """End it, with this error if there is one; once it has ended nothing changes it."""
        if self.done:
            return
        self.done, self.error = True, error
        if self.on_end is not None:
            self.on_end()
