"""Runs a program in processes that have imported it already: ``koinon`` takes a second to import.

    python -m tests.kit.forked PROGRAM REQUESTS ANSWERS     (two file descriptors)

imports the program, then forks for each request, and waits for the end. The forked process has the
request's arguments, environment and files for its standard streams, runs the program as
``python -m PROGRAM`` does, and ends as Python does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STREAMS = (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY))


class Forked:
    """The process that forks, in our environment and this. Commands run one at a time."""

    def __init__(self, program: str = "koinon.cli", **environment: str) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.forked", program, str(requests), str(answers)],
            stdin=subprocess.DEVNULL,
            pass_fds=(requests, answers),
            cwd=ROOT,
            env=os.environ | environment,
        )
        os.close(requests)
        os.close(answers)

    def run(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        input_bytes: bytes = b"",
        timeout_s: float = 180.0,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the program to its end."""
        with tempfile.TemporaryDirectory() as scratch:
            paths = {name: Path(scratch, name) for name, _ in STREAMS}
            for path in paths.values():
                path.write_bytes(b"")
            paths["stdin"].write_bytes(input_bytes)
            request = {
                "arguments": list(arguments),
                "environment": dict(environment),
                "directory": str(Path.cwd()),
                **{name: str(path) for name, path in paths.items()},
            }
            os.write(self._requests, json.dumps(request).encode() + b"\n")
            ready, _, _ = select.select([self._answers], [], [], timeout_s)
            if not ready:
                self.close()
                raise subprocess.TimeoutExpired(list(arguments), timeout_s)
            code = int(os.read(self._answers, 100))
            said = [paths[name].read_bytes() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(list(arguments), code, *said)

    def koinon(
        self, *arguments: str, timeout_s: float = 180.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``koinon ARGUMENTS`` to its end in our environment and this; what it says is text."""
        ended = self.run(arguments, environment=os.environ | environment, timeout_s=timeout_s)
        said = ended.stdout.decode(), ended.stderr.decode()
        return subprocess.CompletedProcess(ended.args, ended.returncode, *said)

    def close(self) -> None:
        """End it, and the command that runs."""
        self._process.kill()
        self._process.wait()


def _koinon() -> Callable[[], object]:
    from typer.testing import CliRunner

    from koinon.cli.app import make_app
    from koinon_command import main as koinon

    CliRunner().invoke(make_app(), ["get", "--hex", "1"])  # imports what reading arguments imports
    for module in ("koinon.client", "koinon.operate.admin"):  # and these what commands do
        importlib.import_module(module)
    return koinon


def _simulation() -> Callable[[], object]:
    from tests.simulation.__main__ import main as simulate

    return lambda: sys.exit(simulate())


def _raft_mutants() -> Callable[[], object]:
    from tests.raft.mutants import forget, main

    forget()
    return lambda: sys.exit(main())


PROGRAMS = {
    "koinon.cli": _koinon,
    "tests.simulation": _simulation,
    "tests.raft.mutants": _raft_mutants,
}
"""What imports each, and returns what runs it."""


def main() -> None:
    """Fork for each request until no process can send one."""
    program = PROGRAMS[sys.argv[1]]()
    gc.collect()
    gc.freeze()  # what is imported stays, and is shared with what is forked
    requests, answers = map(int, sys.argv[2:])
    with os.fdopen(requests) as lines:
        while line := lines.readline():
            pid = os.fork()
            if pid == 0:
                os.close(answers)
                _become(json.loads(line))
                program()
                return
            _, status = os.waitpid(pid, 0)
            os.write(answers, b"%d" % os.waitstatus_to_exitcode(status))


def _become(request: dict[str, Any]) -> None:
    for number, (name, flags) in enumerate(STREAMS):
        file = os.open(request[name], flags)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["koinon", *request["arguments"]]


if __name__ == "__main__":
    main()
