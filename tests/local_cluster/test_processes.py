"""Identities of processes: no signal ever reaches a stranger."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from koinon.local.processes import (
    Guardian,
    ManagedProcess,
    ProcessState,
    identify,
    send_signal,
    state_of,
    wait_stopped,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def wait_until_gone(pid: int, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if identify(pid) is None:
            return True
        time.sleep(0.01)
    return False


def wait_for_state(process: ManagedProcess, state: ProcessState, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while process.state is not state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ManagedProcess]:
    made = ManagedProcess("sleeper", SLEEP, tmp_path / "sleeper.log")
    made.start(os.environ)
    yield made
    made.signal(signal.SIGKILL)
    wait_stopped([made], 60)


def test_process_pause_resume_kill_shows_its_state(process: ManagedProcess) -> None:
    assert process.state is ProcessState.RUNNING
    process.signal(signal.SIGSTOP)
    wait_for_state(process, ProcessState.PAUSED)
    process.signal(signal.SIGCONT)
    process.signal(signal.SIGKILL)
    assert wait_stopped([process], 60) == []
    assert process.exit_code == -signal.SIGKILL
    assert process.signal(signal.SIGTERM) is False


def test_identity_of_another_time_is_never_signalled(process: ManagedProcess) -> None:
    assert process.identity is not None
    stale = replace(process.identity, started="another boot:1")
    assert state_of(stale) is ProcessState.STOPPED
    assert send_signal(stale, signal.SIGKILL) is False
    assert process.alive


def test_log_tail_shows_only_this_start(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("an old line\n")
    made = ManagedProcess("x", [sys.executable, "-c", "print('a new line')"], path)
    made.start(os.environ)
    assert wait_stopped([made], 60) == []
    assert made.log_tail() == "a new line"


def test_guardian_ends_what_it_watches_and_removes_what_it_was_told(
    process: ManagedProcess, tmp_path: Path
) -> None:
    assert process.identity is not None
    directory = tmp_path / "data"
    (directory / "sub").mkdir(parents=True)
    guardian = Guardian()
    guardian.watch(process.identity)
    guardian.remove(directory)
    guardian.close()
    assert wait_stopped([process], 60) == []
    assert not directory.exists()


def test_guardian_spares_what_it_was_told_to_forget(process: ManagedProcess) -> None:
    assert process.identity is not None
    guardian = Guardian()
    guardian.watch(process.identity)
    guardian.forget(process.identity)
    guardian.close()
    assert process.alive


def test_owner_killed_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from koinon.local.processes import Guardian, ManagedProcess
made = ManagedProcess("x", {SLEEP!r}, Path({str(tmp_path)!r}) / "x.log")
guardian = Guardian()
guardian.watch(made.start(os.environ))
print(made.identity.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert answer.returncode == -signal.SIGKILL, answer.stderr
    assert wait_until_gone(int(answer.stdout))
