"""TLS on a thread's socket that uses the kernel's timeouts (``pool``).

Python's TLS sockets support only Python's timeouts, which cost another system call for each. So TLS
runs in memory here, and its encrypted bytes go through the plain socket.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

_HANDSHAKE_BYTES = 16 * 1024
_RECORD_BYTES = 1024  # more than TLS adds to the data of one receive


class TlsSocket:
    """Sends and receives like a plain socket, its timeouts included."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str) -> None:
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self._unsent = b""

    @property
    def holds(self) -> bool:
        """True while received bytes are left that the caller has not read."""
        return bool(self._incoming.pending or self._tls.pending())

    def handshake(self) -> None:
        """Authenticate the peer.

        Raises:
            OSError: it did not answer in time, or is not trusted (ssl.SSLError).
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send_unsent()
                self._receive_more(_HANDSHAKE_BYTES)
            else:
                return self._send_unsent()

    def send(self, data: bytes | memoryview) -> int:
        """Send all of the data; a rest that the kernel does not accept now is sent before the next
        receive.

        Raises:
            OSError: nothing was sent, and nothing can be sent any more.
        """
        self._tls.write(data)
        taken = self._outgoing.read()
        self._unsent = taken[self._socket.send(taken) :]
        return len(data)

    def sendmsg(self, buffers: Sequence[bytes]) -> int:
        """Send all of the buffers, as ``send`` does."""
        return self.send(b"".join(buffers))

    def recv(self, size: int) -> bytes:
        """Receive at most ``size`` bytes, as a socket does. Room for a quarter of a megabyte costs
        some 10 us.
        """
        self._send_unsent()
        try:
            if not self.holds:
                self._receive_more(size)
            while True:
                try:
                    return self._tls.read(size)
                except ssl.SSLWantReadError:
                    self._receive_more(size)
        except (ConnectionResetError, ssl.SSLZeroReturnError):
            return b""

    def _send_unsent(self) -> None:
        self._unsent += self._outgoing.read()
        while self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def _receive_more(self, size: int) -> None:
        received = self._socket.recv(size + _RECORD_BYTES)
        if not received:
            raise ConnectionResetError("the connection was lost")
        self._incoming.write(received)
