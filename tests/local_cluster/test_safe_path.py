"""Our programs import nothing from the folder from which they are called."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.hostile import make_hostile, ran_in

ROOT = Path(__file__).parents[2]
KOINON = Path(sys.executable).with_name("koinon")
SMALL = ("--nodes", "1", "--coordinators", "1")
OUR_OWN_PYTHON = {
    "proto/koinon_proto/process/child_python.py": "the one place",
    "proto/emit.py": "formats generated code, at a developer's",
    "client/koinon/local/processes.py": "the guardian, which is isolated by -I",
    "client/koinon/ingest/session.py": "names the Python of Spark's workers, with PYTHONSAFEPATH",
}
"""Modules that name the interpreter, and why they may."""


def test_every_python_is_started_in_one_place() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in ("proto", "coordinator", "node", "client")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"sys\.executable|import multiprocessing|ProcessPool", path.read_text("utf-8"))
    }
    assert found == set(OUR_OWN_PYTHON)


def koinon(directory: Path, *arguments: str) -> None:
    ended = subprocess.run(
        [KOINON, *arguments], cwd=directory, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("program", ["node", "coordinator", "recover-coordinators"])
def test_server_programs_import_nothing_from_the_working_directory(
    program: str, tmp_path: Path
) -> None:
    make_hostile(tmp_path)
    koinon(tmp_path, program, "--help")
    assert ran_in(tmp_path) == ""


def test_up_and_the_processes_that_its_servers_start_import_nothing_from_the_working_directory(
    tmp_path: Path,
) -> None:
    make_hostile(tmp_path)
    data = tmp_path / "data"
    try:
        koinon(tmp_path, "up", "--detach", *SMALL, "--data", str(data))
    finally:
        koinon(tmp_path, "down", "--data", str(data))
    assert ran_in(tmp_path) == ""
