"""TLS on a socket that a thread uses with timeouts of the kernel's own (``pool``).

Python's TLS sockets know only timeouts of Python's, which cost a system call more for each. So
here TLS works in memory, and what it makes and takes goes through the plain socket.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

_HANDSHAKE_BYTES = 16 * 1024
_RECORD_BYTES = 1024  # more than TLS adds to what is received at once


class TlsSocket:
    """Sends and receives as a plain socket does, its timeouts included."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str) -> None:
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self._unsent = b""

    @property
    def holds(self) -> bool:
        """True while bytes have been received that the caller has not taken."""
        return bool(self._incoming.pending or self._tls.pending())

    def handshake(self) -> None:
        """Find out who the other side is.

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
        """Send all of the data: what the kernel does not take now goes before the next receive.

        Raises:
            OSError: nothing was sent, and nothing can be after it.
        """
        self._tls.write(data)
        taken = self._outgoing.read()
        self._unsent = taken[self._socket.send(taken) :]
        return len(data)

    def sendmsg(self, buffers: Sequence[bytes]) -> int:
        """Send all of the buffers, as ``send`` does."""
        return self.send(b"".join(buffers))

    def recv(self, size: int) -> bytes:
        """Receive as a socket does. ``size`` is what there is room for, which costs some 10 us if
        it is a quarter of a megabyte.
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
