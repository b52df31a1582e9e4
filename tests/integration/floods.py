"""Clients that try to fill a server's memory: ``python -m tests.integration.floods NAME HOST:PORT
CONNECTIONS SECONDS KEY``. A process of its own, so that what it does costs those beside it nothing.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tests.node.kit.resp_client import packed

MB = 1_000_000
_PIECE = b"v" * MB
_ANY_SERVER = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_ANY_SERVER.check_hostname, _ANY_SERVER.verify_mode = False, ssl.CERT_NONE


class Flood:
    """What the attacks of one process share."""

    def __init__(self, address: str, seconds: float, key: str) -> None:
        host, _, port = address.rpartition(":")
        self.place = host, int(port)
        self.until = time.monotonic() + seconds
        self.key = key

    @property
    def is_on(self) -> bool:
        return time.monotonic() < self.until

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """A connection that stays open until the end; it may be closed by the other side."""
        with contextlib.suppress(OSError), socket.create_connection(self.place, 5.0) as sock:
            sock.settimeout(0.5)
            with contextlib.suppress(OSError):
                yield sock
            sock.settimeout(max(0.01, self.until - time.monotonic()))
            with contextlib.suppress(OSError):
                while self.is_on and sock.recv(65_536, socket.MSG_PEEK):
                    time.sleep(0.05)

    def repeated(self, sock: socket.socket, piece: bytes) -> None:
        while self.is_on:
            with contextlib.suppress(TimeoutError):
                sock.sendall(piece)


def sets_without_reading(flood: Flood) -> None:
    with flood.connection() as sock:
        flood.repeated(sock, packed("SET", flood.key, _PIECE[:100_000]))


def refused_bulk(flood: Flood) -> None:
    while flood.is_on:
        with flood.connection() as sock:
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$536870912\r\n")
            flood.repeated(sock, _PIECE)


def refused_command(flood: Flood) -> None:
    with flood.connection() as sock:
        sock.settimeout(flood.until - time.monotonic())
        sock.sendall(packed("SET", flood.key, _PIECE * 16, "BAD"))


def begun_command(flood: Flood) -> None:
    with flood.connection() as sock:
        sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$16000000\r\n" + _PIECE * 15)


def transaction(flood: Flood) -> None:
    with flood.connection() as sock:
        sock.sendall(packed("MULTI") + packed("SET", flood.key, _PIECE) * 14)


def replies(flood: Flood) -> None:
    with flood.connection() as sock:
        sock.sendall(packed("SET", flood.key, _PIECE) + packed("GET", flood.key) * 1_000)


def many_arguments(flood: Flood) -> None:
    with flood.connection() as sock:
        sock.sendall(b"*1000000\r\n" + b"$2\r\nab\r\n" * 900_000)


def stranger_by_tls(flood: Flood) -> None:
    with flood.connection() as plain:
        # The server is slow to answer hundreds of handshakes at once.
        plain.settimeout(max(0.5, flood.until - time.monotonic()))
        sock = _ANY_SERVER.wrap_socket(plain)
        sock.sendall(b"*2\r\n$4\r\nAUTH\r\n$60000\r\n" + _PIECE[:50_000])
        while flood.is_on and sock.recv(1):
            pass


# --- HTTP/2 ---------------------------------------------------------------------------------------

_HEADERS, _SETTINGS, _CONTINUATION = 1, 4, 9
_END_HEADERS = 4
_FRAME_BYTES = 16_384


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def _length(number: int) -> bytes:
    if number < 127:
        return bytes([number])
    out, number = [127], number - 127
    while number >= 128:
        out.append(number % 128 | 128)
        number //= 128
    return bytes([*out, number])


def _header(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


_CALL = b"".join(
    _header(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/koinon.v1.KeyValue/BatchGet"),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS, 0, 0, b"")


def _header_blocks(flood: Flood, block: bytes) -> None:
    """Send the block again and again, whole, each as a call of its own."""
    while flood.is_on:
        with flood.connection() as sock:
            sock.sendall(_PREFACE)
            stream = 1
            while flood.is_on:
                pieces = [
                    block[at : at + _FRAME_BYTES] for at in range(0, len(block), _FRAME_BYTES)
                ]
                for number, piece in enumerate(pieces):
                    kind = _CONTINUATION if number else _HEADERS
                    end = _END_HEADERS if number == len(pieces) - 1 else 0
                    sock.sendall(frame(kind, end, stream, piece))
                stream += 2
                while select.select([sock], [], [], 0)[0]:
                    if not sock.recv(65_536):
                        raise ConnectionError


def header_blocks(flood: Flood) -> None:
    _header_blocks(flood, _CALL + _header(b"x-a", b"a" * MB))


def blocks_of_small_headers(flood: Flood) -> None:
    _header_blocks(flood, _CALL + _header(b"a", b"") * (MB // 4))


def endless_continuation(flood: Flood) -> None:
    while flood.is_on:
        with flood.connection() as sock:
            sock.sendall(_PREFACE + frame(_HEADERS, 0, 1, _CALL))
            flood.repeated(sock, frame(_CONTINUATION, 0, 1, _header(b"abc", b"a" * 9_000)))


ATTACKS: dict[str, Callable[[Flood], None]] = {
    attack.__name__: attack
    for attack in (
        *(sets_without_reading, refused_bulk, refused_command, begun_command, transaction),
        *(replies, many_arguments, stranger_by_tls),
        *(header_blocks, blocks_of_small_headers, endless_continuation),
    )
}


def main() -> None:
    name, address, connections, seconds, key = sys.argv[1:]
    flood = Flood(address, float(seconds), key)
    threads = [
        threading.Thread(target=ATTACKS[name], args=(flood,), daemon=True)
        for _ in range(int(connections))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, flood.until + 2.0 - time.monotonic()))


if __name__ == "__main__":
    main()
