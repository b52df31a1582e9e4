"""Names that strangers chose: every command shows them escaped on an operator's terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
from rich.table import Table
from rich.text import Text

from koinon.cli.console import output
from koinon.cli.console.terminal import Console
from koinon_proto.contract.table import NodeNumber
from koinon_proto.v1 import admin_pb2, loads_pb2
from tests.cli.fake_operator import FakeOperator
from tests.cli.terminal import on_terminal

OPEN, ABORTED = loads_pb2.LOAD_STATE_OPEN, loads_pb2.LOAD_STATE_ABORTED
APPEND = loads_pb2.LOAD_MODE_APPEND
HOSTILE = "x\x1b]52;c;ZXZpbA==\x07\x1b[99;99H\x9b2J\u202e\u2028[link=http://evil]y[/link][red]z"
COMMANDS = (
    ("admin", "status"),
    ("admin", "nodes"),
    ("admin", "partitions"),
    ("admin", "partition", "0"),
    ("where", HOSTILE),
    ("admin", "rebalance", "--dry-run"),
    ("admin", "rebalance", "--yes"),
    ("admin", "moves"),
    ("admin", "loads", "--all"),
    ("admin", "loads", "abort", "41", "--yes", "--reason", HOSTILE),
    ("admin", "drain", HOSTILE, "--yes"),
    ("admin", "nodes", "--debug", "--json", "--timeout", HOSTILE),
    ("--debug", "admin", "remove", HOSTILE, "--yes"),
    ("admin", HOSTILE),
    ("load", HOSTILE, "--key", "id"),
    ("get", "--hex", HOSTILE),
    ("top", "--once", "--interval", "0.2"),
)
RUN_ALL = """
import json, sys
from koinon_command import main
for arguments in json.load(open(sys.argv[1])):
    sys.argv = ["koinon", *arguments]
    try:
        main()
    except SystemExit:
        pass
print("the end")
"""
STYLES = re.compile(rb"\x1b\[[0-9;]*m")


@pytest.fixture
def operator() -> Iterator[FakeOperator]:
    made = FakeOperator(nodes=2)
    for number in made.copies:
        made.change_node(NodeNumber(number), rack=HOSTILE)
    made.planned = [(0, (1, 2), (2, 1))]
    made.reason = HOSTILE
    made.refusals = [admin_pb2.PlanRefusal(code="full", reason=HOSTILE)]
    made.loads.loads = [
        loads_pb2.LoadInfo(
            load_id=41, job_id=HOSTILE, state=OPEN, mode=APPEND, description=HOSTILE
        ),
        loads_pb2.LoadInfo(load_id=40, job_id=HOSTILE, state=ABORTED, mode=APPEND, reason=HOSTILE),
    ]
    yield made
    made.close()


def test_no_command_lets_a_stranger_reach_the_terminal(
    operator: FakeOperator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shown = on_a_terminal(RUN_ALL, operator, COMMANDS, tmp_path_factory)
    assert b"the end" in shown
    assert shown.count(b"\\x1b]52;c;ZXZpbA==\\x07") >= len(COMMANDS), shown.decode()
    assert b"\x1b[1m" in shown  # it is styled: escaped by what a terminal gets, not by a pipe
    for line in STYLES.sub(b"", shown).decode().replace("\r\n", "\n").split("\n"):
        assert line.isprintable(), line


def on_a_terminal(
    program: str,
    operator: FakeOperator,
    commands: Sequence[Sequence[str]],
    paths: pytest.TempPathFactory,
) -> bytes:
    """Run Python's program on a terminal, with the file of the commands; return what is shown."""
    path = paths.mktemp("commands") / "commands.json"
    path.write_text(output.json_text(commands), encoding="utf-8")
    here, there = pty.openpty()
    environment = {
        **os.environ,
        "KOINON_COORDINATORS": operator.address,
        "TERM": "xterm-256color",
        "COLUMNS": "4000",
    }
    arguments = [sys.executable, "-c", program, str(path)]
    with on_terminal(arguments, (here, there), environment) as running:
        shown = b""
        while running.poll() is None or select.select([here], [], [], 0.0)[0]:
            if select.select([here], [], [], 0.05)[0]:
                shown += os.read(here, 65_536)
        return shown


def test_columns_stay_aligned_where_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    shown = output.table("NODE", "RACK", "STATE")
    shown.add_row("n1", output.escape("\x1b[2J\u202e"), "active")
    shown.add_row("n2", "r\x07aw", "active")
    output.show(shown)
    lines = capsys.readouterr().out.splitlines()
    assert {lines[0].index("STATE"), *(line.index("active") for line in lines[1:])} == {
        len("NODE  \\x1b[2J\\u202e  ")
    }


def test_json_is_the_same_value_and_printable() -> None:
    import json

    text = output.json_text({"rack": HOSTILE, "name": "žluť"})
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == {"rack": HOSTILE, "name": "žluť"}


WRITE_RAW = (
    "from koinon.cli.data import key_value; key_value._write_raw(b'a\\x1b]52;\\x00\\xff\\n')"
)


def test_raw_value_is_exact_in_a_pipe() -> None:
    piped = subprocess.run([sys.executable, "-c", WRITE_RAW], capture_output=True, check=True)
    assert piped.stdout == b"a\x1b]52;\x00\xff\n"


def test_raw_value_is_escaped_on_a_terminal(
    operator: FakeOperator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shown = on_a_terminal(WRITE_RAW, operator, (), tmp_path_factory)
    assert b"\x1b]" not in shown
    assert b"a\\x1b]52;\\x00\\xff\r\n" in shown
    assert b"a pipe or a file gets the exact bytes" in shown


@pytest.mark.parametrize(
    "shown",
    [HOSTILE, Text(HOSTILE), Text.from_markup(HOSTILE), Text("x", style="link http://evil")],
)
def test_console_escapes_what_nobody_has_escaped_and_makes_no_links(shown: str | Text) -> None:
    out = io.StringIO()
    printer = Console(file=out, force_terminal=True, width=200)
    printer.print(shown, style="bold")
    grid = Table.grid()
    grid.add_row(shown)
    printer.print(grid)
    plain = STYLES.sub(b"", out.getvalue().encode()).decode()
    assert out.getvalue() != plain
    assert all(line.isprintable() for line in plain.split("\n")), plain
