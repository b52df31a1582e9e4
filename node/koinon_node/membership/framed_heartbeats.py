"""The agent's connection of frames to the coordinator that leads: heartbeats cost a sixth there.

A coordinator names its peer port in each answer to a heartbeat. The connection is opened on a
thread of its own, while heartbeats go on over gRPC; they go in frames once it stands. One that is
lost, or not answered in time, is given up, and the next heartbeat goes over gRPC; when another
connection is tried is later each time. There is one connection, to the coordinator asked last, with
one heartbeat under way on it.

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
    KoinonError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import MAX_MESSAGE_BYTES
from koinon_proto.server.framed_greeting import (
    END_OF_LINE,
    HEARTBEAT_BYTES_MAX,
    HEARTBEATS_COMMAND,
    WELCOME,
)
from koinon_proto.server.framed_stream import HEAD, IS_END
from koinon_proto.v1 import errors_pb2, membership_pb2

log = logging.getLogger(__name__)

_NUMBER_BYTES_MAX = 16  # of its call_number, which is added last
_CONNECT_S_MAX = 2.0  # of each step: to connect, to shake hands, to be welcomed
_ANSWER_BYTES_MAX = 16 * 1024
_READ_BYTES = 64 * 1024
_AGAIN_S_MIN, _AGAIN_S_MAX = 1.0, 60.0


class NoFramesError(Exception):
    """There is no answer in frames; gRPC may have one."""


class Frames(Protocol):
    """The way of opening connections, as ``Channels`` has it."""

    @property
    def version(self) -> int:
        """Rises when this node's identity changes: what stands is opened anew."""

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        """Open a connection. Raises OSError or ValueError."""


class FramedHeartbeats:
    """For the agent's thread; ``close`` may be called from any."""

    def __init__(self, opening: Frames, now: Callable[[], float] = time.monotonic) -> None:
        self._opening = opening
        self._now = now
        self._ports: dict[str, int] = {}  # by coordinator's address, as its last answer said
        self._connection: _Connection | None = None  # that is asked next
        self._lock = threading.Lock()  # of the three below
        # What the thread has opened, or why it could not, until the agent's thread takes it.
        self._opened: _Connection | str = ""
        self._is_opening = False
        self._is_closed = False
        self._due_at = 0.0  # no connection is tried before
        self._again_s = _AGAIN_S_MIN
        self._why_not = ""  # as was logged last

    def ask(
        self, coordinator: str, request: membership_pb2.HeartbeatRequest, timeout_s: float
    ) -> membership_pb2.HeartbeatResponse:
        """Return the coordinator's answer.

        Raises:
            NoFramesError: there is no connection, it broke, or the heartbeat is too large for a
                frame: ask by gRPC.
            UnknownFateError: it has not answered in time.
            KoinonError: the coordinator's refusal.
        """
        connection = self._standing(coordinator)
        if connection is None or request.ByteSize() > HEARTBEAT_BYTES_MAX - _NUMBER_BYTES_MAX:
            raise NoFramesError
        try:
            return connection.ask(request, timeout_s)
        except TimeoutError:
            self._give_up("no answer in time")
            raise UnknownFateError(reason=f"{coordinator}: no answer in time") from None
        except (OSError, ValueError, NoFramesError) as error:
            self._give_up(str(error) or type(error).__name__)
            raise NoFramesError from error
        except (UnavailableError, InternalError) as error:  # of the stream, not of the heartbeat
            self._give_up(str(error))
            raise NoFramesError from error
        except KoinonError:  # it ends the stream
            self._drop()
            raise

    def learn(self, coordinator: str, port: int) -> None:
        """Take note of an answer: where the coordinator takes frames (0: nowhere)."""
        if self._ports.get(coordinator) != port:
            self._ports[coordinator] = port
            self._due_at, self._again_s = 0.0, _AGAIN_S_MIN
        if port and self._standing(coordinator) is None and self._now() >= self._due_at:
            with self._lock:
                if self._is_opening or self._is_closed:
                    return
                self._is_opening = True
            threading.Thread(
                target=self._open, args=(coordinator, port), name="frames", daemon=True
            ).start()

    def close(self) -> None:
        """End what is under way, for good."""
        with self._lock:
            self._is_closed = True
            opened, self._opened = self._opened, ""
        for connection in (opened, self._connection):
            if isinstance(connection, _Connection):
                connection.close()

    def _standing(self, coordinator: str) -> _Connection | None:
        """Return the connection to the coordinator, if there is one that may be used."""
        with self._lock:
            opened, self._opened = self._opened, ""
        if isinstance(opened, str):
            if opened:
                self._later(opened)
        else:
            self._drop()
            self._connection = opened
            log.info("heartbeats go in frames coordinator=%s", opened.coordinator)
        connection = self._connection
        if connection is None:
            return None
        if connection.coordinator != coordinator or connection.version != self._opening.version:
            self._drop()
            return None
        return connection

    def _give_up(self, why: str) -> None:
        connection = self._connection
        if connection is not None and self._now() - connection.began_at > _AGAIN_S_MAX:
            self._again_s = _AGAIN_S_MIN
        self._drop()
        self._later(why)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _later(self, why: str) -> None:
        self._due_at = self._now() + self._again_s
        self._again_s = min(2 * self._again_s, _AGAIN_S_MAX)
        if why != self._why_not:
            self._why_not = why
            log.info("heartbeats go over gRPC reason=%s", ascii(why))

    def _open(self, coordinator: str, port: int) -> None:
        """Open a connection, on a thread of its own."""
        version = self._opening.version
        address = f"{coordinator.rpartition(':')[0]}:{port}"
        connection = None
        opened: _Connection | str
        try:
            sock = self._opening.connect(address, _CONNECT_S_MAX)
            connection = opened = _Connection(sock, coordinator, version, self._now())
            connection.greet()
        except (OSError, ValueError, KoinonError, NoFramesError) as error:
            opened = str(error) or type(error).__name__
        with self._lock:
            self._is_opening = False
            if not self._is_closed:
                self._opened = opened
        if connection is not None and (opened is not connection or self._is_closed):
            connection.close()


class _Connection:
    """A connection that is made, with the answers that come on it."""

    def __init__(self, sock: socket.socket, coordinator: str, version: int, now: float) -> None:
        self._sock = sock
        self.coordinator = coordinator
        self.version = version  # of this node's identity
        self.began_at = now
        self._received = bytearray()
        self._number = 0  # of the last heartbeat

    def greet(self) -> None:
        """Ask for the stream. Raises NoFramesError where the answer is another than welcome."""
        self._sock.sendall(HEARTBEATS_COMMAND)
        deadline = time.monotonic() + _CONNECT_S_MAX
        while END_OF_LINE not in self._received:
            if len(self._received) > _ANSWER_BYTES_MAX:
                raise NoFramesError("the answer is no line")
            self._receive(deadline)
        answer, _, rest = bytes(self._received).partition(END_OF_LINE)
        if answer != WELCOME:
            raise NoFramesError(answer.decode("utf-8", "replace"))
        self._received = bytearray(rest)

    def ask(
        self, request: membership_pb2.HeartbeatRequest, timeout_s: float
    ) -> membership_pb2.HeartbeatResponse:
        """Return the answer. Raises TimeoutError, OSError, NoFramesError, or KoinonError as the
        coordinator ended the stream; the connection is of no use after any of them.
        """
        self._number += 1
        request.call_number = self._number
        data = request.SerializeToString()
        request.call_number = 0
        deadline = time.monotonic() + timeout_s
        self._sock.settimeout(timeout_s)
        self._sock.sendall(HEAD.pack(len(data)) + data)
        try:
            reply = membership_pb2.HeartbeatResponse.FromString(self._next(deadline))
        except DecodeError as error:
            raise NoFramesError(f"an answer cannot be read: {error}") from None
        check_reply(reply)
        if reply.call_number != self._number:
            raise NoFramesError(f"an answer to heartbeat {reply.call_number}, not {self._number}")
        return reply

    def close(self) -> None:
        """End it; a call that waits for its answer ends too."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._sock.close()

    def _next(self, deadline: float) -> bytes:
        """Return the next frame that is no sign of life. Raises as ``ask``."""
        received = self._received
        while True:
            wanted = HEAD.size
            if len(received) >= wanted:
                (head,) = HEAD.unpack_from(received)
                size = head & ~IS_END
                if size > MAX_MESSAGE_BYTES:
                    raise NoFramesError(f"a frame has more than {MAX_MESSAGE_BYTES} bytes")
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
