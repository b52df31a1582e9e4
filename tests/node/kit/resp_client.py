"""A plain client of the Redis protocol: sends bytes and commands, and takes replies."""

from __future__ import annotations

import base64
import socket
from types import TracebackType
from typing import Any

import hiredis

from koinon_proto.contract import convert
from koinon_proto.contract.errors import KoinonError
from koinon_proto.v1 import errors_pb2

TIMEOUT_S = 60.0


def packed(*arguments: Any) -> bytes:
    """Return a command's bytes."""
    data: bytes = hiredis.pack_command(arguments)
    return data


class RespClient:
    """One connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._reader = hiredis.Reader()

    def send(self, *arguments: Any) -> None:
        self.socket.sendall(packed(*arguments))

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self) -> Any:
        """Return the next reply.

        Raises:
            ConnectionError: the other side has closed.
        """
        while (reply := self._reader.gets()) is False:
            data = self.socket.recv(65_536)
            if not data:
                raise ConnectionError("closed")
            self._reader.feed(data)
        return reply

    def call(self, *arguments: Any) -> Any:
        self.send(*arguments)
        return self.reply()

    def is_closed(self) -> bool:
        """Return whether the other side closes without a word more."""
        try:
            self.reply()
        except ConnectionError:
            return True
        return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RespClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


def typed(reply: Any) -> tuple[KoinonError, str]:
    """Return the error that a reply to one of Koinon's own commands carries, and its id."""
    assert isinstance(reply, hiredis.ReplyError), reply
    kind, whole, request_id = str(reply).split(" ")
    assert kind == "KOINON"
    message = errors_pb2.Error.FromString(base64.b64decode(whole))
    return convert.error_from_proto(message), request_id
