"""The installed package is found and typed wherever a user starts; what is built is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
    "targets"
]["wheel"]["packages"]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run the command in a folder outside the checkout; return what it printed."""
    inherited = dict(os.environ)
    inherited.pop("PYTHONPATH", None)  # Spark's tests, in the same process, name the checkout there
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_import_above_a_clone_named_koinon_finds_the_package(tmp_path: Path) -> None:
    (tmp_path / "koinon").symlink_to(ROOT)
    printed = run(sys.executable, "-c", "import koinon; print(koinon.connect)", cwd=tmp_path)
    assert printed.startswith("<function connect")


def test_user_program_above_a_clone_type_checks_against_the_package(tmp_path: Path) -> None:
    (tmp_path / "koinon").symlink_to(ROOT)
    program = tmp_path / "program.py"
    program.write_text(
        "import koinon\n"
        "with koinon.connect('127.0.0.1:7400') as client:\n"
        "    reveal_type(client)\n"
        "    reveal_type(client.get(b'key'))\n"
    )
    cache = tmp_path / "cache"
    said = run(
        *(sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, program), cwd=tmp_path
    )
    shown = re.findall(r'Revealed type is "(.*)"', said)
    assert shown == ["koinon.client.Client", "bytes | None"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and with the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("dist")
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    run(*command, cwd=folder)
    return folder


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_built_wheel_has_every_file_of_the_packages_and_no_other(built: Path) -> None:
    with zipfile.ZipFile(only(built, "*.whl")) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {
        path.relative_to(ROOT / package.split("/")[0]).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == files
    assert {
        f"{Path(package).name}/py.typed" for package in PACKAGES if "pyspark" not in package
    } < (names)


def test_built_wheel_says_its_licence_readme_and_requirements(built: Path) -> None:
    said = metadata(only(built, "*.whl"))
    assert said["License-Expression"] == "Apache-2.0"
    assert said["License-File"] == "LICENSE"
    assert said["Description-Content-Type"] == "text/markdown"
    assert "# Koinon" in str(said.get_payload())
    assert {"cli", "server", "spark"} <= set(said.get_all("Provides-Extra", []))
    assert any(r.startswith("grpcio>=") for r in said.get_all("Requires-Dist", []))


def test_source_distribution_brings_tests_and_documents(built: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "Makefile", "README.md", "CONTRIBUTING.md", "docs/runbook.md"}
    assert wanted | {"tests/conftest.py", "proto/generate.py", "bench/__main__.py"} <= names
    assert not any(name.startswith((".venv", ".git/")) for name in names)


@pytest.mark.long
def test_built_wheel_runs_a_cluster_outside_the_checkout(built: Path, tmp_path: Path) -> None:
    """The wheel is alone in its environment, but for what it requires, which this one has."""
    environment = tmp_path / "env"
    venv.create(environment)
    python, koinon = environment / "bin/python", environment / "bin/koinon"
    install = ("install", "--quiet", "--no-deps", "--no-index", only(built, "*.whl"))
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path)
    # Of a folder that a .pth file names, no .pth file is read: not that of the editable install.
    requirements = only(environment, "lib/python*/site-packages") / "requirements.pth"
    requirements.write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import koinon; print(koinon.__file__)", cwd=tmp_path)
    assert Path(where).is_relative_to(environment)

    data = {"KOINON_DATA": str(tmp_path / "data")}
    assert "Usage: koinon" in run(koinon, "--help", cwd=tmp_path)
    size = ("--nodes", "1", "--coordinators", "1")
    run(koinon, "up", "--detach", *size, cwd=tmp_path, **data)
    try:
        run(koinon, "put", "greeting", "hello", cwd=tmp_path, **data)
        assert run(koinon, "get", "greeting", cwd=tmp_path, **data) == "hello\n"
    finally:
        run(koinon, "down", cwd=tmp_path, **data)
