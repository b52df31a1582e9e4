"""README's commands and snippets, run as they stand there, one after the other, on one machine.

The only change is to addresses: where a port that README names is taken on this machine, the
cluster has another one. What is not run is in ``NOT_RUN``, with the reason.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from demo.tpch import ORDERS, make_table
from tests.cli.terminal import on_terminal, read_until

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMAND_S_MAX = 600

NOT_RUN = {
    "make demo": "tests/demo runs it, with fewer rows",
    "make test": "it is what runs this",
    "koinon watch --prefix session:": "as the next one; tests/integration/test_feeds.py runs it",
    "koinon console --open": "it runs until somebody ends it; tests/web_console runs it",
    "cd compose && docker compose up --detach": "make compose-test runs the cluster in containers",
    "docker compose exec coordinator-1 koinon admin status": "as the one before",
    'grpcurl -plaintext -d \'{"key": "Z3JlZXRpbmc="}\' 127.0.0.1:7500 koinon.v1.KeyValue/Get': (
        "grpcurl is no Python package; tests/integration/test_reflection.py makes such calls"
    ),
}
"""Commands that are not run, and why."""

ANSWERS = {
    "koinon admin rebalance": (b"Carry this out?", b"y\n"),
    "koinon admin drain n2 --wait": (b"Carry this out?", b"y\n"),
    "koinon top": (b"reads/s", b"q"),
}
"""Commands for a person: run on a terminal, with what is waited for there, and what is typed."""

SETTLING = ("koinon admin status", "koinon admin status --brief")
"""Commands that tell how the cluster is: asked again until they say what README shows. On a machine
that does much else, a copy may lag behind for a moment.
"""
SETTLED_S_MAX = 120

GIVEN = {
    "with koinon.LocalCluster": "import koinon\n",
    "with koinon.connect": "import koinon\n",
}
"""What a snippet that begins so takes for granted: an import."""


@dataclass(frozen=True)
class Step:
    """One command, with the lines that it is to print, or one snippet of Python."""

    line: int
    text: str
    expected: tuple[str, ...] = ()
    is_python: bool = False

    @property
    def command(self) -> str:
        """The command without its comment."""
        return re.split(r"\s+# ", self.text)[0].strip()


def steps() -> list[Step]:
    """Return all that README's fenced blocks say, in order."""
    found: list[Step] = []
    language, block, began = "", list[str](), 0
    for number, line in enumerate(README.splitlines(), start=1):
        if not line.startswith("```"):
            block.append(line)
        elif language:
            assert language in ("console", "python"), f"line {began}: {language}"
            if language == "python":
                found.append(Step(began + 1, "\n".join(block), is_python=True))
            else:
                found += commands(began + 1, block)
            language = ""
        else:
            language, block, began = line[3:] or "none", [], number
    return found


def commands(first: int, block: list[str]) -> Iterator[Step]:
    starts = [at for at, line in enumerate(block) if line.startswith("$ ")]
    assert starts[0] == 0, f"line {first}: output without a command"
    for at, after in zip(starts, [*starts[1:], len(block)], strict=True):
        text = block[at][2:]
        if not text.startswith("#"):
            yield Step(first + at, text, tuple(block[at + 1 : after]))


def ports_of(data: Path) -> dict[str, str]:
    """Return by README's addresses those of the cluster that runs in the directory."""
    members = json.loads((data / "cluster.json").read_text())["members"]
    coordinators = {f"127.0.0.1:{7399 + n}": members[f"c{n}"]["address"] for n in (1, 2, 3)}
    redis = members["n1"]["redis"].rpartition(":")[2]
    return {**coordinators, "-p 6500": f"-p {redis}", "port=6500": f"port={redis}"}


class Reader:
    """Somebody who types what README says, in a directory of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.data = home / "share/koinon/local"
        self.guests = home / "guests"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("KOINON_")}
        self._environment = {
            **kept,
            "HOME": str(home),
            "XDG_DATA_HOME": str(home / "share"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
            "COLUMNS": "160",
        }

    def follow(self, step: Step) -> None:
        """Do what the step says; it ends well, and prints what README shows."""
        text = step.text
        for data in (self.data, self.guests):
            if is_up(data):
                for named, real in ports_of(data).items():
                    text = text.replace(named, real)
        if step.is_python:
            given = next((g for first, g in GIVEN.items() if text.startswith(first)), "")
            self.run(step, [sys.executable, "-c", f"{given}{text}\n"])
        elif step.command in ANSWERS:
            self._type(step, ["bash", "-c", text])
        elif step.command in SETTLING:
            self._ask_until_settled(step, ["bash", "-c", text])
        else:
            self.run(step, ["bash", "-c", text])

    def _ask_until_settled(self, step: Step, program: list[str]) -> None:
        give_up_at = time.monotonic() + SETTLED_S_MAX
        while True:
            try:
                self.run(step, program)
            except AssertionError:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(1.0)
            else:
                return

    def run(self, step: Step, program: list[str]) -> None:
        ended = subprocess.run(
            program,
            cwd=self.home,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
        said = f"README.md:{step.line}: {step.text}\n{ended.stdout}{ended.stderr}"
        assert ended.returncode == 0, said
        printed = ended.stdout.splitlines()
        for at, line in enumerate(step.expected):
            if line == "…":
                return
            # Any coordinator may lead.
            wanted = re.sub(r"\bc\d leads", r"c\\d leads", re.escape(line).replace(r"\ ", " "))
            assert at < len(printed), said
            assert re.fullmatch(wanted, printed[at]), said

    def _type(self, step: Step, program: list[str]) -> None:
        shown, typed = ANSWERS[step.command]
        here, there = pty.openpty()
        environment = {k: v for k, v in self._environment.items() if k != "COLUMNS"}
        with on_terminal(program, (here, there), environment) as typist:
            read_until(here, shown, COMMAND_S_MAX)
            os.write(here, typed)
            written = drained(here, typist)
            assert typist.wait(COMMAND_S_MAX) == 0, f"README.md:{step.line}: {written!r}"


def drained(here: int, program: subprocess.Popen[bytes]) -> bytes:
    """Read what the program prints until it ends: a terminal that is not read stops it."""
    written = b""
    while program.poll() is None:
        written += read_some(here)
    return written


def read_some(here: int) -> bytes:
    return os.read(here, 65_536) if select.select([here], [], [], 0.2)[0] else b""


def is_up(data: Path) -> bool:
    file = data / "cluster.json"
    return file.exists() and bool(json.loads(file.read_text())["processes"])


def test_every_block_of_readme_is_run_or_listed_with_its_reason() -> None:
    found = steps()
    texts = {step.command for step in found}
    assert len(found) > 30
    assert set(NOT_RUN) <= texts, "no longer in README"
    assert set(ANSWERS) <= texts, "no longer in README"
    for first in GIVEN:
        assert any(step.text.startswith(first) for step in found), "no longer in README"
    for step in found:
        assert step.is_python or step.command.split()[0] in (
            *("koinon", "printf", "redis-cli", "KOINON_DATA=./guests"),
            *(name.split()[0] for name in NOT_RUN),
        ), f"README.md:{step.line}: {step.text}"


@pytest.mark.long
def test_readme_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what runs on a terminal begins here
    make_table(tmp_path, ORDERS, 2_000)
    reader = Reader(tmp_path)
    try:
        for step in steps():
            if step.command in NOT_RUN:
                continue
            if step.command.startswith("redis-cli") and shutil.which("redis-cli") is None:
                # What comes next reads it.
                put = ["bash", "-c", "KOINON_DATA=./guests koinon put greeting hello"]
                reader.run(replace(step, expected=()), put)
                continue
            reader.follow(step)
    finally:
        for data in (reader.data, reader.guests):
            if is_up(data):
                down = Step(0, f"koinon down --data {data}")
                reader.run(down, ["bash", "-c", down.text])
