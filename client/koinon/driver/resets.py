"""Sockets that reset their connection when closed, so that no data arrives at the peer later."""

from __future__ import annotations

import socket
import struct

_AT_ONCE = struct.pack("ii", 1, 0)  # linger is on, with a time of zero


def reset_at_close(sock: socket.socket) -> None:
    """Make the kernel drop unsent data and reset the connection when the socket is closed, even if
    the process is killed. After an orderly close the kernel would keep sending for many minutes: a
    write whose fate was long reported as unknown could be applied once the network heals.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
