"""The agent's connection to the leading coordinator's peer port, for heartbeats in frames.

There is one connection, to the coordinator asked last, with at most one heartbeat under way. To
open it, the agent asks the coordinator by gRPC for its peer port. A coordinator that does not lead
refuses this call. A connection that breaks, is refused or times out is closed, and the next
heartbeat opens another.

koinon_proto.server.framed_stream describes the frames. Each heartbeat has a number, which its
answer repeats: so a late or duplicate answer is never taken for the answer to another heartbeat.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from google.protobuf.message import DecodeError

from koinon_proto.contract import convert
from koinon_proto.contract.bounds import check_reply
from koinon_proto.contract.errors import (
    InternalError,
    NotSentError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import MAX_MESSAGE_BYTES
from koinon_proto.server.framed_greeting import (
    END_OF_LINE,
    FIRST_HEARTBEAT_BYTES_MAX,
    HEARTBEATS_COMMAND,
    WELCOME,
)
from koinon_proto.server.framed_stream import HEAD, IS_END
from koinon_proto.v1 import errors_pb2
from koinon_proto.v1.membership_pb2 import HeartbeatRequest, HeartbeatResponse

log = logging.getLogger(__name__)

_NUMBER_BYTES_MAX = 16  # of a heartbeat's call_number, which is added last
_ANSWER_BYTES_MAX = 16 * 1024
_READ_BYTES = 64 * 1024
_OF_THE_STREAM = (OSError, ValueError, UnavailableError, InternalError)
"""Failures of the connection, which leave the heartbeat's fate open."""

PeerPort = Callable[[str, float], int]
"""Asks the coordinator at an address for its peer port, with a timeout in seconds. Raises
KoinonError or gRPC's errors."""


class Opening(Protocol):
    """Opens connections; ``Channels`` implements it."""

    @property
    def version(self) -> int:
        """Rises when this node's identity changes: then connections must be opened anew."""

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        """Open a connection. Raises OSError or ValueError."""


class FramedHeartbeats:
    """Sends heartbeats for the agent's thread. Any thread may call ``close``."""

    def __init__(self, opening: Opening, peer_port: PeerPort, now: Callable[[], float]) -> None:
        self._opening = opening
        self._peer_port = peer_port
        self._now = now  # the clock of leases
        self._connection: _Connection | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # guards the two above
        self._why_closed = ""  # the last logged reason why a peer port was not reached

    def ask(
        self, coordinator: str, request: HeartbeatRequest, timeout_s: float
    ) -> tuple[HeartbeatResponse, float]:
        """Send a heartbeat; return the coordinator's answer, and the time of sending (by ``now``).

        Raises:
            NotSentError: there is no connection to the coordinator's peer port.
            UnknownFateError: the connection broke, or no answer came in time.
            KoinonError: the coordinator's refusal, or an error of ``peer_port``.
        """
        deadline = time.monotonic() + timeout_s
        connection = self._connection
        if (
            connection is None
            or connection.coordinator != coordinator
            or connection.version != self._opening.version
        ):
            self._replace(None)
            connection = self._opened(coordinator, deadline)
        try:
            if connection.is_new and request.ByteSize() > _FIRST_BYTES_MAX:
                connection.ask(_without_reports(request), deadline)
            sent_at = self._now()
            return connection.ask(request, deadline), sent_at
        except BaseException as error:
            self._replace(None)
            if isinstance(error, _OF_THE_STREAM):
                why = str(error) or "no answer in time"
                raise UnknownFateError(reason=f"{coordinator}: {why}") from None
            raise

    def close(self) -> None:
        """End the call under way and all later ones."""
        with self._lock:
            self._is_closed = True
        self._replace(None)

    def _replace(self, connection: _Connection | None) -> None:
        """Close the present connection, and use this one instead."""
        with self._lock:
            before, self._connection = self._connection, connection
        if before is not None:
            before.close()
        if self._is_closed and connection is not None:
            connection.close()

    def _opened(self, coordinator: str, deadline: float) -> _Connection:
        version = self._opening.version
        port = self._peer_port(coordinator, max(0.0, deadline - time.monotonic()))
        address = f"{coordinator.rpartition(':')[0]}:{port}"
        try:
            sock = self._opening.connect(address, max(0.001, deadline - time.monotonic()))
            connection = _Connection(sock, coordinator, version)
            self._replace(connection)  # from here on ``close`` ends its waits
            connection.greet(deadline)
        except (OSError, ValueError) as error:
            self._replace(None)
            why = f"peer port {address}: {error or 'no answer in time'}"
            if why != self._why_closed:
                self._why_closed = why
                log.warning("no heartbeats to the coordinator reason=%s", ascii(why))
            raise NotSentError(reason=why) from None
        self._why_closed = ""
        return connection


_FIRST_BYTES_MAX = FIRST_HEARTBEAT_BYTES_MAX - _NUMBER_BYTES_MAX


def _without_reports(request: HeartbeatRequest) -> HeartbeatRequest:
    """Return a small heartbeat of the same node: an unknown connection accepts only small frames.
    The caller ignores its answer, whose contents the next answer repeats.
    """
    return HeartbeatRequest(
        cluster_id=request.cluster_id,
        node_id=request.node_id,
        node_epoch=request.node_epoch,
        registration_id=request.registration_id,
        table_version=request.table_version,
        access_version=request.access_version,
    )


class _Connection:
    """An open connection. Its methods raise TimeoutError at the deadline (by ``time.monotonic``),
    another OSError if the connection breaks, and ValueError for invalid data. After any of them the
    connection must not be used.
    """

    def __init__(self, sock: socket.socket, coordinator: str, version: int) -> None:
        self._sock = sock
        self.coordinator = coordinator
        self.version = version  # of this node's identity at the opening
        self._received = bytearray()
        self._number = 0  # of the last heartbeat

    @property
    def is_new(self) -> bool:
        return self._number == 0

    def greet(self, deadline: float) -> None:
        """Request the stream of heartbeats."""
        self._sock.sendall(HEARTBEATS_COMMAND)
        while END_OF_LINE not in self._received:
            if len(self._received) > _ANSWER_BYTES_MAX:
                raise ValueError("the greeting's answer is not a line")
            self._receive(deadline)
        answer, _, rest = bytes(self._received).partition(END_OF_LINE)
        if answer != WELCOME:
            raise ValueError(answer.decode("utf-8", "replace"))
        self._received = bytearray(rest)

    def ask(self, request: HeartbeatRequest, deadline: float) -> HeartbeatResponse:
        """Send a heartbeat; return its answer. Raises KoinonError too, if the coordinator ends the
        stream with it.
        """
        self._number += 1
        request.call_number = self._number
        data = request.SerializeToString()
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
        self._sock.sendall(HEAD.pack(len(data)) + data)
        try:
            reply = HeartbeatResponse.FromString(self._next(deadline))
        except DecodeError as error:
            raise ValueError(f"an answer cannot be read: {error}") from None
        check_reply(reply)
        if reply.call_number != self._number:
            raise ValueError(f"an answer to heartbeat {reply.call_number}, not {self._number}")
        return reply

    def close(self) -> None:
        """Close the connection; a call that waits on it ends."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._sock.close()

    def _next(self, deadline: float) -> bytes:
        """Return the next frame that is no keep-alive."""
        received = self._received
        while True:
            wanted = HEAD.size
            if len(received) >= wanted:
                (head,) = HEAD.unpack_from(received)
                size = head & ~IS_END
                if size > MAX_MESSAGE_BYTES:
                    raise ValueError(f"a frame has more than {MAX_MESSAGE_BYTES} bytes")
                wanted += size
            if len(received) < wanted or (wanted == HEAD.size and not received):
                self._receive(deadline)
                continue
            frame = bytes(received[HEAD.size : wanted])
            del received[:wanted]
            if head & IS_END:
                raise convert.error_from_proto(errors_pb2.Error.FromString(frame))
            if frame:
                return frame

    def _receive(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        piece = self._sock.recv(_READ_BYTES)
        if not piece:
            raise ConnectionResetError("the connection was closed")
        self._received += piece
