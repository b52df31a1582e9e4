"""Defects planted in the core must be caught by its scenarios or by its simulation."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kit.forked import Forked

from .mutants import MUTANTS


@pytest.fixture(scope="module")
def mutants() -> Iterator[Forked]:
    """Runs each in a process of its own, which has imported all but the core."""
    running = Forked("tests.raft.mutants")
    yield running
    running.close()


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_planted_defect_is_caught(name: str, mutants: Forked) -> None:
    result = mutants.run([name], environment=os.environ, timeout_s=240)
    assert result.returncode == 0, result.stdout + result.stderr
