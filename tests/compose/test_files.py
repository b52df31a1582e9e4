"""The files in compose/ agree with each other, the servers' flags, and Prometheus."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from .cluster import COORDINATORS, NODES
from .engine import COMPOSE_DIR, ROOT
from .images import BASE, GRAFANA, PROMETHEUS

SERVERS = {*COORDINATORS, *NODES}
FLAG = re.compile(r"(?<=\s)--[a-z-]+")


def text(name: str) -> str:
    return (COMPOSE_DIR / name).read_text()


def commands(name: str) -> list[str]:
    """Return the servers' commands in a Compose file, each on one line."""
    found = re.findall(r"command: >-\n((?: {6,}.*\n)+)", text(name))
    return [" ".join(command.split()) for command in found]


@pytest.mark.parametrize("kind", ["coordinator", "node"])
def test_every_flag_in_the_compose_files_exists(kind: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", f"koinon_{kind}", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    every = [*commands("compose.yaml"), *commands("compose.node4.yaml")]
    used = {flag for command in every if command.startswith(kind) for flag in FLAG.findall(command)}
    assert used
    assert used <= set(re.findall(r"--[a-z-]+", shown))


def test_each_server_is_itself() -> None:
    """A command that was copied from another service would be another server's."""
    every = [*commands("compose.yaml"), *commands("compose.node4.yaml")]
    assert len(every) == len(SERVERS) + 1
    for command in every:
        kind, name = command.split()[0], command.split("--id ")[1].split()[0]
        assert name.startswith(kind)
        assert f"--advertise {name}:" in command
    names = [command.split("--id ")[1].split()[0] for command in every]
    assert set(names) == {*SERVERS, "node-4"}


def test_every_server_can_be_disturbed() -> None:
    disturbed = re.findall(r"network_mode: service:(\S+)", text("compose.faults.yaml"))
    assert set(disturbed) == SERVERS


def test_prometheus_scrapes_every_server() -> None:
    configuration = text("observe/prometheus.yml")
    assert set(re.findall(r"([a-z]+-\d):9400", configuration)) == SERVERS
    assert "names: [node-4]" in configuration


def test_prometheus_asks_the_same_servers_with_tls() -> None:
    plain, secured = (yaml.safe_load(text(f"observe/prometheus{n}.yml")) for n in ("", ".tls"))
    for job in secured["scrape_configs"]:
        assert job.pop("scheme") == "https"
        assert set(job.pop("tls_config").values()) == {"/tls/identity.pem", "server.koinon"}
    assert secured == plain


def test_each_server_sees_its_own_identity_only() -> None:
    """No server sees the authority's key; only the service that issues does."""
    services: dict[str, dict[str, Any]] = {}
    for name in ("compose.tls.yaml", "compose.node4.tls.yaml"):
        services |= yaml.safe_load(text(name))["services"]
    for server in (*SERVERS, "node-4"):
        assert services[server]["volumes"] == [f"tls-{server}:/tls:ro"]
        (_, _, script, _) = services[server]["entrypoint"]
        assert "--tls-bundle /tls/identity.pem" in script
        assert services[server]["environment"]["KOINON_HEALTH_IDENTITY"] == "/tls/identity.pem"
    seen = services.pop("certificates")["volumes"]
    assert {*SERVERS, "node-4"} < {place.split(":/tls/")[1] for place in seen}
    assert "tls-authority" not in str(services)


def test_spark_comes_in_by_a_users_token() -> None:
    services = yaml.safe_load(text("compose.tls.yaml"))["services"]
    spark, maker = services["spark"], services["spark-user"]
    assert spark["volumes"] == ["tls-spark:/tls:ro"]
    assert spark["environment"]["KOINON_TOKEN_FILE"] == "/tls/token"
    assert "tls-spark:/spark" in maker["volumes"]
    assert "--file /spark/token" in maker["entrypoint"][-1]
    assert "tls-spark:/tls/spark" in services["certificates"]["volumes"]


def test_stand_ins_bear_the_names_that_the_files_use() -> None:
    assert f"ARG BASE={BASE}\n" in text("Dockerfile")
    assert f"image: {PROMETHEUS}\n" in text("compose.yaml")
    assert f"image: {GRAFANA}\n" in text("compose.yaml")


def test_requirements_are_those_of_the_extras_and_what_they_name() -> None:
    program = COMPOSE_DIR / "image" / "requirements.py"
    printed = subprocess.run(
        [sys.executable, str(program), str(ROOT / "pyproject.toml"), "server"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.splitlines()
    names = {re.split(r"[<>=\[;! ]", line)[0] for line in printed}
    assert {"grpcio", "lmdb", "typer"} <= names  # the base, the extra, and [cli] that it names
    assert not names & {"koinon", "pyspark", "pytest"}
