"""The port in front of a server's two, plain and of TLS, alone."""

from __future__ import annotations

import logging
import socket
import struct
import threading

import pytest

from koinon_proto.security.plain_or_tls import PlainOrTls
from tests.kit.waiting import wait_until

RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing sends no farewell


def test_connection_that_is_cut_amid_an_answer_leaves_no_word_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = threading.Event()

    def flood(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(30)
            try:
                while True:
                    connection.sendall(bytes(1 << 20))
            except OSError:
                ended.set()

    caplog.set_level(logging.ERROR)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        threading.Thread(target=flood, args=(listener,), daemon=True).start()
        door = PlainOrTls("127.0.0.1:0", plain_port=port, tls_port=port)
        try:
            with socket.create_connection(("127.0.0.1", door.port)) as caller:
                caller.sendall(b"P")
                assert caller.recv(1)
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            wait_until(ended.is_set, "the server's connection has ended, too")
        finally:
            door.close()
    assert not caplog.records
