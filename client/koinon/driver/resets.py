"""Connections that end by a reset, so that nothing which was sent on them arrives later."""

from __future__ import annotations

import socket
import struct

_AT_ONCE = struct.pack("ii", 1, 0)  # linger, and for no time


def reset_at_close(sock: socket.socket) -> None:
    """Have the kernel drop what it still holds when the socket is closed, also where the process is
    killed, and reset the connection. After an orderly close it would go on sending for many
    minutes: a write whose caller has long been told that its fate is unknown may be applied once
    the network heals.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
