"""Processes that may outlive the object that started them: identity, signals, logs.

A pid alone does not identify a process: it is reused after a reboot or a wrap-around. Here a
process is identified by its pid *and* its start time, and both are checked before any signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO, Protocol

from koinon.local import guardian
from koinon_proto.process import private_files

POLL_S = 0.01
STOP_POLL_S = 0.05  # of another program, which stops a whole cluster


class ProcessState(Enum):
    """The state of a process, as its owner sees it."""

    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """The identity of one process. ``started`` is opaque; it also identifies the boot."""

    pid: int
    started: str


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return "boot"


def _observe(pid: int) -> tuple[str, str] | None:
    """Return (state letter, start time) of a live process; a zombie counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return None if Path("/proc/self/stat").exists() else _observe_by_ps(pid)
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else (fields[0], f"{_boot_id()}:{fields[19]}")


def _observe_by_ps(pid: int) -> tuple[str, str] | None:
    """Like ``_observe``, where there is no /proc."""
    command = ["ps", "-o", "state=,lstart=", "-p", str(pid)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    state, _, started = answer.stdout.strip().partition(" ")
    return (state[0], started.strip()) if started and state[0] != "Z" else None


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of the live process with this pid, or None."""
    observed = _observe(pid)
    return ProcessIdentity(pid=pid, started=observed[1]) if observed else None


def state_of(identity: ProcessIdentity | None) -> ProcessState:
    """Return the present state of exactly this process."""
    observed = _observe(identity.pid) if identity else None
    if identity is None or observed is None or observed[1] != identity.started:
        return ProcessState.STOPPED
    return ProcessState.PAUSED if observed[0] in "Tt" else ProcessState.RUNNING


def send_signal(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal exactly this process; return False if it is gone."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):  # no pidfd on this system
        if identify(identity.pid) != identity:
            return False
        os.kill(identity.pid, number)
        return True
    try:
        if identify(identity.pid) != identity:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


class Child(Protocol):
    """A process that was started here and must be reaped."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return its exit code if it has ended, else None."""

    def let_run(self) -> None:
        """Start its program."""


class HeldProcess(subprocess.Popen[bytes]):
    """A process that waits for ``let_run`` before it starts its program, under the same pid; it
    ends if this program ends first.
    """

    def let_run(self) -> None:
        assert self.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed meanwhile
            self.stdin.write(b"\n")
        self.stdin.close()


def launch(argv: Sequence[str], log: BinaryIO, environment: Mapping[str, str]) -> Child:
    """Start a held process in a session of its own (a terminal's Ctrl-C does not reach it)."""
    return HeldProcess(
        ["/bin/sh", "-c", 'read -r go && exec "$@" </dev/null', "sh", *argv],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=dict(environment),
        start_new_session=True,
    )


def pid_path(log_path: Path) -> Path:
    """Return the file in which the process with that log reports that it serves."""
    return log_path.with_suffix(".pid")


class ManagedProcess:
    """One process with a name, a command line and a log file; started here or found running."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log_path: Path,
        identity: ProcessIdentity | None = None,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.log_path = log_path
        self.identity = identity
        self.exit_code: int | None = None
        self._child: Child | None = None  # if started here and not reaped
        self._log_start = 0  # size of the log before this start, in bytes
        self._pid_path = pid_path(log_path)

    @property
    def state(self) -> ProcessState:
        self._reap()
        state = state_of(self.identity)
        if state is ProcessState.STOPPED:  # it may have ended in between: its exit code is known
            self._reap()
        return state

    @property
    def alive(self) -> bool:
        return self.state is not ProcessState.STOPPED

    @property
    def serves(self) -> bool:
        """True once exactly this process has reported that it listens at all of its addresses."""
        if self.identity is None or not self.alive:
            return False
        try:
            return int(self._pid_path.read_text("ascii")) == self.identity.pid
        except (OSError, ValueError):
            return False

    def start(
        self,
        environment: Mapping[str, str],
        remember: Callable[[ProcessIdentity], None] = lambda _: None,
    ) -> ProcessIdentity | None:
        """Start the process. Its program begins only after ``remember`` has returned: if this
        program is killed before, no unrecorded process keeps running.
        """
        self.exit_code = None
        private_files.make_directory(self.log_path.parent)
        self._pid_path.unlink(missing_ok=True)  # left by a process that was killed
        with open(self.log_path, "ab", opener=private_files.opener) as log:
            self._log_start = log.tell()
            self._child = launch(self.argv, log, environment)
        self.identity = identify(self._child.pid)
        if self.identity is not None:
            remember(self.identity)
        self._child.let_run()
        return self.identity

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; return False if the process is not running."""
        self._reap()
        return self.identity is not None and send_signal(self.identity, number)

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of the log since this start of the process."""
        try:
            with self.log_path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - 64 * 1024))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def release(self) -> None:
        """Let the process continue when this object is deleted: it is no longer reaped here."""
        if self._child is not None:
            self._child.returncode = self._child.returncode or 0  # no ResourceWarning at collection
            self._child = None

    def _reap(self) -> None:
        if self._child is not None and (code := self._child.poll()) is not None:
            self.exit_code = code
            self._child = None


def wait_stopped(processes: Iterable[ManagedProcess], timeout_s: float) -> list[ManagedProcess]:
    """Wait until all processes have ended; return those that still run after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    waiting = list(processes)
    while True:
        waiting = [process for process in waiting if process.alive]
        if not waiting or time.monotonic() > deadline:
            return waiting
        time.sleep(POLL_S)


def stop_owner(owner: ProcessIdentity, timeout_s: float) -> bool:
    """Ask the program that runs a foreground cluster to stop it; return whether it has ended."""
    send_signal(owner, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if state_of(owner) is ProcessState.STOPPED:
            return True
        time.sleep(STOP_POLL_S)
    return False


class Guardian:
    """The helper process (guardian.py) that ends its watched processes when this program is
    gone.
    """

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, identity: ProcessIdentity) -> None:
        self._tell(f"watch {identity.pid} {guardian.start_time(identity.pid)}")

    def forget(self, identity: ProcessIdentity) -> None:
        self._tell(f"forget {identity.pid}")

    def remove(self, directory: Path) -> None:
        self._tell(f"remove {directory}")

    def close(self) -> None:
        """Close the guardian's pipe; it ends its watched processes, and deletes its directories."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(line.encode() + b"\n")
        self._popen.stdin.flush()
