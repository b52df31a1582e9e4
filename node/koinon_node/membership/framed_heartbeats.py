"""The agent's connection to the peer port of the coordinator that leads, for heartbeats in frames.

There is one connection, to the coordinator asked last, with one heartbeat under way on it. To open
it, the agent asks the coordinator by gRPC for the number of its peer port; one that does not lead
refuses that, and is not connected to. A connection that breaks, is refused or not answered in time
is closed, and the next heartbeat opens another.

Frames are those of koinon_proto.server.framed_stream. Each heartbeat has a number, which its answer
repeats: an answer that came late, or twice, is never taken for that of another heartbeat.
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

_NUMBER_BYTES_MAX = 16  # of its call_number, which is added last
_ANSWER_BYTES_MAX = 16 * 1024
_READ_BYTES = 64 * 1024
_OF_THE_STREAM = (OSError, ValueError, UnavailableError, InternalError)
"""Failures that say nothing of the heartbeat."""

PeerPort = Callable[[str, float], int]
"""Asks the coordinator at an address for its peer port, for so many seconds. Raises KoinonError, or
what gRPC raises."""


class Opening(Protocol):
    """The way of opening connections, as ``Channels`` has it."""

    @property
    def version(self) -> int:
        """Rises when this node's identity changes: what stands is opened anew."""

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        """Open a connection. Raises OSError or ValueError."""


class FramedHeartbeats:
    """For the agent's thread; ``close`` may be called from any."""

    def __init__(self, opening: Opening, peer_port: PeerPort, now: Callable[[], float]) -> None:
        self._opening = opening
        self._peer_port = peer_port
        self._now = now  # the clock of leases
        self._connection: _Connection | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # of the two above
        self._why_closed = ""  # why a peer port could not be reached, as was logged

    def ask(
        self, coordinator: str, request: HeartbeatRequest, timeout_s: float
    ) -> tuple[HeartbeatResponse, float]:
        """Return the coordinator's answer, and when (by ``now``) the heartbeat was sent.

        Raises:
            NotSentError: there is no connection to the coordinator's peer port.
            UnknownFateError: the connection broke, or no answer came in time.
            KoinonError: the coordinator's refusal, and what ``peer_port`` raises.
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
        """End what is under way, for good."""
        with self._lock:
            self._is_closed = True
        self._replace(None)

    def _replace(self, connection: _Connection | None) -> None:
        """Close the connection that stands, and have this one in its place."""
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
            self._replace(connection)  # from here on ``close`` ends what it waits for
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
    """Return a small heartbeat of the same node, to whose sender more is let in afterwards. Its
    answer is of no use: what was in it comes again.
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
    """A connection that is made, with the answers that come on it. Its methods raise TimeoutError
    at the deadline (by ``time.monotonic``), another OSError where it breaks, ValueError where what
    comes makes no sense; it is of no use after any of them.
    """

    def __init__(self, sock: socket.socket, coordinator: str, version: int) -> None:
        self._sock = sock
        self.coordinator = coordinator
        self.version = version  # of this node's identity
        self._received = bytearray()
        self._number = 0  # of the last heartbeat

    @property
    def is_new(self) -> bool:
        return self._number == 0

    def greet(self, deadline: float) -> None:
        """Ask for the stream."""
        self._sock.sendall(HEARTBEATS_COMMAND)
        while END_OF_LINE not in self._received:
            if len(self._received) > _ANSWER_BYTES_MAX:
                raise ValueError("the answer is no line")
            self._receive(deadline)
        answer, _, rest = bytes(self._received).partition(END_OF_LINE)
        if answer != WELCOME:
            raise ValueError(answer.decode("utf-8", "replace"))
        self._received = bytearray(rest)

    def ask(self, request: HeartbeatRequest, deadline: float) -> HeartbeatResponse:
        """Return the answer. Raises KoinonError too, as the coordinator ended the stream."""
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
        """End it; a call that waits for its answer ends too."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._sock.close()

    def _next(self, deadline: float) -> bytes:
        """Return the next frame that is no sign of life."""
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
