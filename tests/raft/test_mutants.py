"""Do the tests test? Each defect of a list, planted in the core, must be caught."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_planted_defect_is_caught(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.raft.mutants", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
