"""Starts servers from a process that has imported them already: a server's imports take half a
second of CPU, and tests start hundreds.

    python -m tests.kit.warm CONNECTION     (a file descriptor)

imports the server programs, then forks for each request. The forked process has the request's
arguments, environment and log, is in a session of its own, and runs the program's ``main``: a
process as ``python -m PROGRAM`` makes one, but for its imports and its command line in ``/proc``.
How servers start by themselves is tried by the tests of ``koinon up``, and by those of processes in
tests/node and tests/coordinator.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from koinon.local import processes
from koinon_proto.process import stopping
from koinon_proto.process.child_python import module_command

ROOT = Path(__file__).parents[2]
PROGRAMS = ("koinon_coordinator", "koinon_node")
MESSAGE_BYTES_MAX = 128 * 1024
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "GRPC_")
"""Variables that begin so are looked at before a program runs: forking is too late for others."""

CODE_TIMEOUT_S = 30.0
"""How long the exit code of a process that has ended may be on its way."""


class WarmServers:
    """The process that forks; it is started when a server is first asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # tests start members from several threads
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._environment: dict[str, str] = {}  # what it has of _READ_AT_START
        self._exit_codes: dict[int, int] = {}  # of those that have ended, until they are asked for

    def launch(
        self, argv: Sequence[str], log: BinaryIO, environment: Mapping[str, str]
    ) -> processes.Child:
        """Start a program: fork a server, and start all else as ``processes.launch`` does."""
        with self._lock:
            if not self._can_fork(argv, environment):
                return _start(argv, log, environment)
            connection = self._connection or self._begin(environment)
            request = {
                "argv": argv[argv.index("-m") + 1 :],
                "environment": dict(environment),
                "log": log.name,
            }
            connection.send(json.dumps({**request, "directory": str(Path.cwd())}).encode())
            while "pid" not in (answer := json.loads(connection.recv(MESSAGE_BYTES_MAX))):
                self._exit_codes[answer["ended"]] = answer["code"]
            return WarmChild(self, answer["pid"])

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a process that has ended, once; None while the process runs.

        The process that forks reaps it, so its code may come later than its end is seen.
        """
        with self._lock:
            ended = processes.identify(pid) is None
            while self._connection and pid not in self._exit_codes:
                wait_s = CODE_TIMEOUT_S if ended else 0
                if not select.select([self._connection], [], [], wait_s)[0]:
                    break
                message = json.loads(self._connection.recv(MESSAGE_BYTES_MAX))
                self._exit_codes[message["ended"]] = message["code"]
            return self._exit_codes.pop(pid, None)

    def close(self) -> None:
        """End the process that forks, once all that it has forked have been ended."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.wait()
            self._process = self._connection = None

    def _can_fork(self, argv: Sequence[str], environment: Mapping[str, str]) -> bool:
        fits = self._connection is None or _read_at_start(environment) == self._environment
        return fits and any(list(argv[: len(c)]) == c for c in map(module_command, PROGRAMS))

    def _begin(self, environment: Mapping[str, str]) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES_MAX)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.warm", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd=ROOT,
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # no thread that forking would lose
        )
        theirs.close()
        self._environment = _read_at_start(environment)
        self._connection = ours
        return ours


class WarmChild:
    """One server that was forked."""

    def __init__(self, servers: WarmServers, pid: int) -> None:
        self._servers = servers
        self.pid = pid
        self.returncode: int | None = None

    def let_run(self) -> None:
        """Do nothing: a forked server runs at once."""

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._servers.exit_code(self.pid)
        return self.returncode


_start = processes.launch


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {n: value for n, value in environment.items() if n.startswith(_READ_AT_START)}


def main() -> None:
    """Fork for each request until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; who started us ends us
    connection = socket.socket(fileno=int(sys.argv[1]))
    programs = {name: importlib.import_module(f"{name}.__main__") for name in PROGRAMS}
    gc.freeze()  # what is imported stays, and is shared with what is forked
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([connection.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _tell_who_ended(connection, running)
        if connection.fileno() in ready:
            request = _received(connection)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                stopping.end_at_once()
                for descriptor in (connection.detach(), ended, wake):
                    os.close(descriptor)
                program = _become(json.loads(request))
                programs[program].main()
                return
            running.add(pid)
            connection.send(json.dumps({"pid": pid}).encode())


def _received(connection: socket.socket) -> bytes:
    """Return the next request; b"": there will be none."""
    try:
        return connection.recv(MESSAGE_BYTES_MAX)
    except ConnectionResetError:  # it was closed, and did not look who has ended
        return b""


def _tell_who_ended(connection: socket.socket, running: set[int]) -> None:
    for pid in tuple(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            running.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):  # the process that asked has ended
                connection.send(json.dumps({"ended": pid, "code": code}).encode())


def _become(request: dict[str, Any]) -> str:
    """Take on what was asked for; return the program's name."""
    os.setsid()
    for path, flags, targets in (
        (os.devnull, os.O_RDONLY, (0,)),
        (request["log"], os.O_WRONLY | os.O_APPEND, (1, 2)),
    ):
        file = os.open(path, flags)
        for target in targets:
            os.dup2(file, target)
        os.close(file)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    program, *arguments = request["argv"]
    sys.argv = [program, *arguments]
    return str(program)


if __name__ == "__main__":
    main()
