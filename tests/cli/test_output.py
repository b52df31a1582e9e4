"""Output of commands whose text looks like markup, and whose reader goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from koinon.cli.data import ingest_view
from koinon.ingest.survey import HeavyKey, Survey

PIPED = """
import typer
from koinon.cli.console import output, session
try:
    session.guarded({body}, debug=False, as_json=False)
except typer.Exit as ended:
    raise SystemExit(ended.exit_code)
"""


def survey_of(*keys: bytes) -> Survey:
    counts = np.array([len(keys), 0], np.int64)
    heaviest = [HeavyKey(key=key, rows=1, bytes=100) for key in keys]
    return Survey(
        rows=counts,
        bytes=100 * counts,
        bad_rows=0,
        duplicate_rows=0,
        repeated=(),
        heaviest=heaviest,
    )


def test_survey_shows_keys_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [b"a[/b]", b"path[/x]", b"user:key:1", b"[red]x"]
    ingest_view._print_keys(survey_of(*keys), ordered=False)
    shown = capsys.readouterr().out
    for key in keys:
        assert key.decode() in shown


@pytest.mark.parametrize(
    "body",
    [
        "lambda: output.console().print('x' * 100_000)",
        "lambda: output.print_json('x' * 100_000)",
        "lambda: output.show(output.table('x' * 100_000))",
    ],
)
def test_reader_that_goes_away_ends_a_command_alike_whatever_prints(body: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended: Any = subprocess.run(
        [sys.executable, "-c", PIPED.format(body=body)],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=180,
    )
    os.close(writing)
    assert ended.returncode == 141, ended.stderr
    assert ended.stderr == ""


def test_reader_of_errors_that_goes_away_ends_a_command_too() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    body = "lambda: output.problem('nothing was changed')"
    ended = subprocess.run(
        [sys.executable, "-c", PIPED.format(body=body)], stderr=writing, check=False, timeout=180
    )
    os.close(writing)
    assert ended.returncode == 141
