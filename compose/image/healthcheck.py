#!/usr/bin/python3 -IS
"""Asks a server's gRPC health service whether it serves: ``koinon-health HOST:PORT``.

Exit code 0: it serves; 1: it does not, or did not answer within three seconds. Every container runs
this every few seconds. So it sends the few HTTP/2 frames of one call itself, in a fraction of the
time that importing a gRPC library would take. KOINON_HEALTH_IDENTITY names the identity file by
which to ask a server with TLS; without it the connection is plain.
"""

import os
import socket
import struct
import sys

TIMEOUT_S = 3.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
STREAM = 1
SERVING = b"\x00\x00\x00\x00\x02\x08\x01"
"""The one message that is hoped for: uncompressed, two bytes, HealthCheckResponse of status 1."""


def main(address: str) -> int:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S) as plain:
            plain.settimeout(TIMEOUT_S)
            with secured(plain) as connection:
                connection.sendall(request(address))
                reply = answer(connection)
    except OSError as error:
        print(f"{address}: {error}")
        return 1
    if reply == SERVING:
        print(f"{address}: serving")
        return 0
    print(f"{address}: not serving")
    return 1


def secured(plain: socket.socket) -> socket.socket:
    """Return the connection by TLS, if there is an identity file."""
    identity = os.environ.get("KOINON_HEALTH_IDENTITY", "")
    if not identity:
        return plain
    import ssl  # takes as long as all the rest

    context = ssl.create_default_context(cafile=identity)
    context.load_cert_chain(identity)
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(plain, server_hostname="server.koinon")


def request(authority: str) -> bytes:
    """Return the call of Check with an empty HealthCheckRequest: the server as a whole."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Check",
        ":authority": authority,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    # HPACK: 0 begins a field of literal name and value, each after its length.
    block = b"".join(b"\0" + text(name) + text(value) for name, value in fields.items())
    return (
        PREFACE
        + frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, STREAM, block)
        + frame(DATA, END_STREAM, STREAM, b"\x00\x00\x00\x00\x00")
    )


def text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream_id)
    return head + payload


def answer(connection: socket.socket) -> bytes:
    """Return the bytes of the call's reply; empty, if the call ended without one."""
    reply = b""
    with connection.makefile("rb") as stream:
        while len(head := stream.read(9)) == 9:
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            payload = stream.read(length)
            (stream_id,) = struct.unpack(">I", head[5:])
            if kind == SETTINGS and not flags & ACK:
                connection.sendall(frame(SETTINGS, ACK, 0, b""))
            elif kind == PING and not flags & ACK:
                connection.sendall(frame(PING, ACK, 0, payload))
            elif kind == GOAWAY or (kind == RST_STREAM and stream_id == STREAM):
                return reply
            elif stream_id == STREAM:
                reply += payload if kind == DATA else b""
                if len(reply) >= len(SERVING) or flags & END_STREAM:
                    return reply
    return reply


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
