"""The containers' health check, as a process, against a real health service."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from koinon.certs.authority import Authority, Identity
from koinon_proto.security.names import Kind
from koinon_proto.security.transport import Listening, listening

from .engine import COMPOSE_DIR, EngineError, run

PROGRAM = str(COMPOSE_DIR / "image" / "healthcheck.py")
Status = health_pb2.HealthCheckResponse


@contextmanager
def server(status: int | None, port_of: Listening | None = None) -> Iterator[str]:
    """A gRPC server whose health service says so; with None it has none."""
    served = grpc.server(futures.ThreadPoolExecutor(2))
    if status is not None:
        servicer = health.HealthServicer()
        servicer.set("", status)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, served)
    port = (port_of or Listening()).add_port(served, "127.0.0.1:0")
    served.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        served.stop(None).wait()


def test_server_that_serves_is_healthy() -> None:
    with server(Status.SERVING) as address:
        assert run(PROGRAM, address, timeout_s=30) == f"{address}: serving"


@pytest.mark.parametrize("status", [Status.NOT_SERVING, Status.UNKNOWN, None])
def test_server_that_does_not_serve_is_not(status: int | None) -> None:
    with server(status) as address, pytest.raises(EngineError, match="exit code 1"):
        run(PROGRAM, address, timeout_s=30)


def test_server_with_tls_is_asked_by_its_own_identity(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    own, stranger = tmp_path / "own.pem", tmp_path / "stranger.pem"
    for number, path in enumerate((own, stranger)):
        authority = Authority.create(tmp_path / f"ca{number}", now=now)
        authority.issue(Identity(kind=Kind.NODE, name="node-1"), path, now=now)
    with server(Status.SERVING, listening("require", str(own), Kind.NODE)) as address:
        by = {**os.environ, "KOINON_HEALTH_IDENTITY": str(own)}
        assert run(PROGRAM, address, timeout_s=30, environment=by) == f"{address}: serving"
        for identity in ("", str(stranger)):
            wrong = {**os.environ, "KOINON_HEALTH_IDENTITY": identity}
            with pytest.raises(EngineError, match="exit code 1"):
                run(PROGRAM, address, timeout_s=30, environment=wrong)


def test_nobody_there_is_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(EngineError, match="exit code 1"):
        run(PROGRAM, f"127.0.0.1:{port}", timeout_s=30)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_one_that_does_not_speak_grpc_is_not_healthy(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.sendall(said)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EngineError, match="exit code 1"):
            run(PROGRAM, f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=30)
        thread.join()
