"""Output of commands whose text looks like markup, and whose reader goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from koinon.cli.console.reply import show
from koinon.cli.data import ingest_view
from koinon.ingest.survey import HeavyKey, Survey

PROGRAM = """
import os
import typer
from koinon.cli import app
from koinon.cli.console import command, output
from koinon.cli.console.reply import Reply
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.process.printable import protect_streams

def open_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing

def body(given: command.Session) -> int | None:
    {body}

protect_streams(drop_messages=True)
made = typer.Typer()
command.command(made, "x", connects=False)(body)
app.run(made)
"""
PRINTS = (
    "output.console().print('x' * 100_000)",
    "output.print_json('x' * 100_000)",
    "output.show(output.table('x' * 100_000))",
    "output.write_line('x')",
    "output.printable.write_bytes(b'x')",
)
REDIRECTED = {
    "full": (">/dev/full", "No space left on device"),
    "closed": (">&-", "the output is closed"),
}
PUT = "the put was acknowledged (version 7), but its result"


def run(body: str, redirected: str = "", *options: str, **environment: str) -> Any:
    """Run a command with this body; ``redirected`` is what a shell writes behind it."""
    program = [sys.executable, "-c", PROGRAM.format(body=body), *options]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", *program],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | environment,
        check=False,
        timeout=180,
    )


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
    show(*ingest_view.key_blocks(survey_of(*keys), ordered=False))
    shown = capsys.readouterr().out
    for key in keys:
        assert key.decode() in shown


@pytest.mark.parametrize("body", PRINTS)
@pytest.mark.parametrize("fault", REDIRECTED)
def test_output_that_fails_ends_a_command_with_a_code_of_its_own(body: str, fault: str) -> None:
    redirected, reason = REDIRECTED[fault]
    ended = run(body, redirected)
    assert ended.stderr == f"koinon: the output could not be printed: {reason}\n"
    assert ended.returncode == 4


def test_output_that_fails_says_what_was_done_before() -> None:
    ended = run(f"with output.telling({PUT!r}): output.write_line('7')", ">/dev/full")
    assert ended.stderr == f"koinon: {PUT} could not be printed: No space left on device\n"
    assert ended.returncode == 4
    assert "n1 is out. This could" in run("return Reply({}, 'n1 is out.')", ">/dev/full").stderr


@pytest.mark.parametrize("redirected", [">/dev/full", ">&-"])
def test_failing_command_keeps_its_code_where_its_output_fails_too(redirected: str) -> None:
    ended = run("raise UnavailableError(reason='nobody')", redirected, "--json")
    assert ended.stderr.startswith("koinon: nobody\n")
    assert ended.returncode == 3
    kept_back = run("output.write_line('x'); return 1", redirected, PYTHONUNBUFFERED="")
    assert kept_back.returncode == 1


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-"])
def test_messages_that_cannot_be_written_change_neither_result_nor_code(redirected: str) -> None:
    ended = run("output.note('n'); output.problem('p'); output.print_json(1); return 1", redirected)
    assert (ended.returncode, ended.stdout) == (1, "1\n")


def test_characters_that_an_encoding_lacks_are_escaped() -> None:
    body = "output.write_line('é→'); output.console().print('é→'); output.print_json('é→')"
    ended = run(body, PYTHONIOENCODING="ascii")
    assert ended.stdout.splitlines() == [*["\\xe9\\u2192"] * 2, '"\\u00e9\\u2192"']
    assert run(body, PYTHONIOENCODING="utf-8").stdout.splitlines()[:2] == ["é→"] * 2


@pytest.mark.parametrize("option", ["--help", "--nope"])
def test_help_and_wrong_usage_end_without_a_traceback_where_output_fails(option: str) -> None:
    ended = run("pass", ">/dev/full 2>&1", option)
    assert ended.returncode == {"--help": 4, "--nope": 2}[option]


def test_closed_standard_input_is_read_as_an_error() -> None:
    body = "from koinon.cli.data import batch; list(batch._lines('-'))"
    ended = run(body, "<&-")
    assert ended.stderr == "koinon: standard input: Bad file descriptor\n"
    assert ended.returncode == 2


@pytest.mark.parametrize("body", PRINTS[:3])
def test_reader_that_goes_away_ends_a_command_quietly_whatever_prints(body: str) -> None:
    ended = run(f"os.dup2(open_pipe(), 1); {body}")
    assert (ended.returncode, ended.stderr) == (141, "")


def test_reader_of_errors_that_goes_away_ends_a_command_too() -> None:
    ended = run("os.dup2(open_pipe(), 2); output.problem('nothing was changed')")
    assert ended.returncode == 141
