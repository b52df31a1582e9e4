"""Tests of ``koinon console``: who has to show a code, and how it begins and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from koinon.certs.authority import Authority, Identity
from koinon.local import LocalCluster
from koinon.web_console.web_server import ConsoleServer, ConsoleSettings
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.security.names import Kind
from tests.kit.forked import Forked
from tests.web_console.conftest import events

NOWHERE = "127.0.0.1:9"


@contextmanager
def console(*arguments: str, **environment: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Run the command; yields the process and what it has said of itself."""
    command = [sys.executable, "-m", "koinon.cli", "console", "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(
        [*command, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said, process.stderr.read() if process.stderr else ""
            yield process, json.loads(said)
        finally:
            process.kill()


def settings(**fields: Any) -> ConsoleSettings:
    return ConsoleSettings(**{"listen": "127.0.0.1:0", **fields})


def test_console_shows_a_real_cluster_and_ends_by_a_signal(cluster: LocalCluster) -> None:
    with console("--coordinators", cluster.coordinators) as (process, said):
        assert said["asks_for_code"] is False
        with httpx.Client(base_url=said["url"], timeout=60) as client, events(client) as stream:
            seen: dict[str, Any] = {}
            for _, name, data in stream:
                seen.setdefault(name, data)
                if {"table", "moment", "rates", "sizes"} <= seen.keys():
                    break
        assert len(seen["table"]["rows"]) == len(cluster.status().table.rows)  # type: ignore[union-attr]
        status = seen["moment"]["status"]
        assert status["partition_count"] == cluster.status().table.cluster.partition_count  # type: ignore[union-attr]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_console_without_a_cluster_says_so_on_its_page() -> None:
    with console("--coordinators", NOWHERE, "--timeout", "300ms") as (_, said):
        with httpx.Client(base_url=said["url"], timeout=60) as client, events(client) as stream:
            _, name, moment = next(stream)
        assert name == "moment"
        assert "no coordinator answers" in moment["failure"]


@pytest.mark.parametrize(
    ("listen", "asks"), [("127.0.0.1:0", False), ("localhost:0", False), ("0.0.0.0:0", True)]
)
def test_code_is_asked_for_where_others_reach_the_console(listen: str, asks: bool) -> None:
    with ConsoleServer(NOWHERE, settings(listen=listen), timeout_ms=300) as server:
        assert ("#" in server.url) is asks
        server.start()
        answer = httpx.get(f"http://127.0.0.1:{server.address.rpartition(':')[2]}/api/table/1")
        assert answer.status_code == (401 if asks else 404)


def test_code_is_asked_for_where_the_cluster_has_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now, file = datetime.now(UTC), tmp_path / "root.pem"
    Authority.create(tmp_path, now=now).issue(Identity(kind=Kind.USER, name="root"), file, now=now)
    monkeypatch.setenv("KOINON_TLS_BUNDLE", str(file))
    with ConsoleServer(NOWHERE, settings(), timeout_ms=300) as server:
        assert "#" in server.url


def test_code_that_a_file_has_is_used(tmp_path: Path) -> None:
    file = tmp_path / "code"
    file.write_text("a-code-of-an-operator\n")
    with console("--coordinators", NOWHERE, "--code-file", str(file)) as (_, said):
        assert said["url"].endswith("#a-code-of-an-operator")


@pytest.mark.parametrize(
    "code", ["short", "", "with a blank in it all", "x" * 600, "kod " + "é" * 20]
)
def test_code_that_is_none_is_refused(forked: Forked, tmp_path: Path, code: str) -> None:
    file = tmp_path / "code"
    file.write_text(code)
    ended = forked.koinon("console", "--coordinators", NOWHERE, "--code-file", str(file))
    assert ended.returncode == 2
    assert "--code-file" in ended.stderr


def test_port_that_is_taken_is_named() -> None:
    with ConsoleServer(NOWHERE, settings(), timeout_ms=300) as server:
        with pytest.raises(ConfigurationError, match="in use"):
            ConsoleServer(NOWHERE, settings(listen=server.address), timeout_ms=300)
        with pytest.raises(ConfigurationError, match="host:port"):
            ConsoleServer(NOWHERE, settings(listen="7480"), timeout_ms=300)


def test_command_without_its_extra_says_what_to_install() -> None:
    code = (
        "import importlib.util as u, sys; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'starlette' else find(name, *a);"
        f"sys.argv = ['koinon', 'console', '--coordinators', '{NOWHERE}'];"
        "from koinon_command import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=180
    )
    assert ended.returncode == 2
    assert "pip install 'koinon[console]'" in ended.stderr


def test_command_line_imports_no_package_of_the_console() -> None:
    code = (
        "import sys; from koinon.cli.app import make_app; make_app();"
        "print([m for m in ('starlette', 'uvicorn', 'sse_starlette') if m in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180
    )
    assert ended.stdout.strip() == "[]"
