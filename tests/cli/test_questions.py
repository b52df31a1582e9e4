"""Questions on a terminal that get no answer."""

from __future__ import annotations

import contextlib
import os
import pty
import sys

import pytest

from tests.cli.conftest import kinds
from tests.cli.fake_operator import LOST, FakeOperator
from tests.cli.terminal import on_terminal, read_until

CTRL_C, CTRL_D = b"\x03", b"\x04"
NO_ANSWER = pytest.mark.parametrize(("typed", "code"), [(CTRL_D, 2), (CTRL_C, 130)])


def answered(typed: bytes, question: bytes, *arguments: str) -> tuple[int, bytes]:
    """Type this where Python, run with the arguments, asks the question; return how it ends."""
    here, there = pty.openpty()
    with on_terminal([sys.executable, *arguments], (here, there)) as asking:
        read_until(here, question)
        said = b""
        while b"nothing was" not in said:  # it may come before the question is being waited for
            os.write(here, typed)
            with contextlib.suppress(AssertionError):
                said = read_until(here, b"nothing was", timeout_s=3.0)
        return asking.wait(60), said


@NO_ANSWER
@pytest.mark.parametrize(
    ("command", "question"), [("rebalance", b"this out?"), ("force-primary lost", b"type the")]
)
def test_question_without_an_answer_changes_nothing(
    operator: FakeOperator, command: str, question: bytes, typed: bytes, code: int
) -> None:
    operator.change_row(3, **LOST)
    where = ["--coordinators", operator.address]
    ended, said = answered(typed, question, "-m", "koinon.cli", "admin", *command.split(), *where)
    assert ended == code, said
    assert not {"ExecutePlanRequest", "ForcePrimariesRequest"}.intersection(kinds(operator))


@NO_ANSWER
def test_recovery_without_an_answer_says_the_same(typed: bytes, code: int) -> None:
    asks = "import typer; from koinon_coordinator.recover import _confirm; {}"
    run = "typer.run(lambda: _confirm('c'))"
    ended, said = answered(typed, b"cluster id to go on", "-c", asks.format(run))
    assert ended == code, said
