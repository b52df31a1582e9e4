"""A coordinator's peer port for tests of nodes: takes heartbeats in frames, one thread a node."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from koinon_proto.contract import convert
from koinon_proto.contract.errors import KoinonError
from koinon_proto.server.framed_greeting import HEARTBEATS_COMMAND
from koinon_proto.server.framed_stream import HEAD, IS_END
from koinon_proto.v1.membership_pb2 import HeartbeatRequest, HeartbeatResponse

Answer = Callable[[HeartbeatRequest], HeartbeatResponse | bytes | None]
"""Answers a heartbeat: by a response, whose number is filled in, or by raw bytes. A KoinonError
that it raises is the refusal that ends the stream; None closes the connection."""


def framed(data: bytes) -> bytes:
    return HEAD.pack(len(data)) + data


def refused(error: KoinonError) -> bytes:
    data = convert.error_to_proto(error).SerializeToString()
    return HEAD.pack(IS_END | len(data)) + data


class HeartbeatPort:
    """Listens from its making to ``close``."""

    def __init__(self, answer: Answer) -> None:
        self.greeting = b"+OK\r\n"
        self.connections = 0
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.number: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close all connections."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._open.append(sock)
                self.connections += 1
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError), sock.makefile("rb") as file:
            if file.readline() != HEARTBEATS_COMMAND:
                return
            sock.sendall(self.greeting)
            while len(head := file.read(HEAD.size)) == HEAD.size:
                request = HeartbeatRequest.FromString(file.read(HEAD.unpack(head)[0]))
                try:
                    answer = self._answer(request)
                except KoinonError as error:
                    sock.sendall(refused(error))
                    return
                if answer is None:
                    return
                if isinstance(answer, HeartbeatResponse):
                    answer.call_number = request.call_number
                    answer = framed(answer.SerializeToString())
                sock.sendall(answer)
