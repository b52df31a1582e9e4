"""The systemd units are valid, and their commands are what the servers take."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import koinon_coordinator.__main__ as coordinator
import koinon_node.__main__ as node
from tests.observe.shipped import ROOT

SYSTEMD = ROOT / "docs" / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
PROGRAM = "/opt/koinon/bin/koinon"


def settings(name: str) -> dict[str, str]:
    """Return the variables that an environment file sets."""
    lines = (SYSTEMD / name).read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def of_drop_in(name: str, instance: str) -> dict[str, str]:
    """Return the variables that a drop-in sets."""
    found = re.findall(r'^Environment="(\w+)=(.+)"$', (SYSTEMD / name).read_text(), re.M)
    return {variable: value.replace("%n", instance) for variable, value in found}


def command(unit: str, environment: str, server: str, drop_in: str = "") -> list[str]:
    """The unit's command line as systemd makes it: ``$NAME`` splits into words, ``${NAME}`` not."""
    text = (SYSTEMD / unit).read_text().replace("\\\n", "")
    (line,) = re.findall(r"^ExecStart=(.+)$", text, re.M)
    values = settings(environment)
    if drop_in:
        values |= of_drop_in(drop_in, unit.replace("@", f"@{server}"))
    words: list[str] = []
    for word in shlex.split(line.replace("%i", server)):
        if re.fullmatch(r"\$\w+", word):
            words += values.get(word[1:], "").split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], word))
    return words


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="there is no systemd-analyze: install systemd (it need not run)",
)
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_is_valid(unit: Path, tmp_path: Path) -> None:
    instance = tmp_path / unit.name.replace("@", "@x1")
    instance.write_text(unit.read_text().replace(PROGRAM, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(instance)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert instance.name not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("unit", "environment", "server", "kind"),
    [
        ("koinon-coordinator@.service", "coordinator.env", "c1", "coordinator"),
        ("koinon-node@.service", "node.env", "n1", "node"),
    ],
)
def test_command_of_unit_is_taken_by_the_server(
    unit: str, environment: str, server: str, kind: str
) -> None:
    program, subcommand, *arguments = command(unit, environment, server)
    assert (program, subcommand) == (PROGRAM, kind)
    parser = {"coordinator": coordinator.parser, "node": node.parser}[kind]()
    flags = parser.parse_args(arguments)
    assert flags.data == Path(settings(environment)["KOINON_DATA"])
    assert flags.metrics_listen == settings(environment)["KOINON_METRICS"]


@pytest.mark.parametrize("kind", ["coordinator", "node"])
def test_drop_in_gives_the_server_its_identity_as_a_credential(kind: str) -> None:
    unit, drop_in = f"koinon-{kind}@.service", f"{kind}-tls.conf"
    parser = {"coordinator": coordinator.parser, "node": node.parser}[kind]()
    flags = parser.parse_args(command(unit, f"{kind}.env", "x1", drop_in)[2:])
    (credential,) = re.findall(
        r"^LoadCredential=([\w.]+):(\S+)$", (SYSTEMD / drop_in).read_text(), re.M
    )
    assert credential[1] == f"/etc/koinon/{kind}-%i.pem"
    assert flags.tls_bundle == f"/run/credentials/koinon-{kind}@x1.service/{credential[0]}"
    assert not parser.parse_args(command(unit, f"{kind}.env", "x1")[2:]).tls_bundle
