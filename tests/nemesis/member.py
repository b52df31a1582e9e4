"""Runs a coordinator or a node as it is, in a process that the nemesis can do more to.

    python -m tests.nemesis.member CONTROL MODULE ARGUMENTS…

CONTROL is a directory. A file in it named

- ``clocks`` holds JSON, ``{"wall_s": offset, "lease_rate": rate}``: from then on Unix time is off
  by so much, and the clock of leases (CLOCK_BOOTTIME) runs so fast. It is read ten times a second.
- ``applied`` gets a line of JSON for each put that a node is about to write: its key, its version,
  and its value as far as values are told apart.
- ``stop-in-read`` lets the process stop itself (SIGSTOP) between the first look at the lease of the
  next read and its answer; the file is taken away.

``--defect NAME`` before MODULE plants a defect (defects.py). Nothing of this is in the product.
The process is the member's own: signals and exit codes are its own too.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import koinon_proto  # noqa: F401  settings of gRPC, which counts from its first import on

APPLIED, CLOCKS, STOP_IN_READ = "applied", "clocks", "stop-in-read"
_POLL_S = 0.1
_WITH_DEADLINES = ("grpc._channel", "grpc._common", "grpc._utilities", "grpc.aio._utils")


class Clocks:
    """Stands between this process's Python code and two clocks of the kernel."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._time_ns = time.time_ns
        self._clock_gettime = time.clock_gettime
        self._wall_ns = 0
        self._rate = 1.0
        self._anchor = (0.0, 0.0)  # the kernel's boottime, and what was shown at that moment

    def install(self) -> None:
        now = self._clock_gettime(time.CLOCK_BOOTTIME)
        self._anchor = (now, now)
        leave_deadlines_alone()
        time.time_ns = self._wall_time_ns
        time.time = lambda: self._wall_time_ns() / 1e9
        time.clock_gettime = self._gettime
        threading.Thread(target=self._follow, daemon=True).start()

    def _wall_time_ns(self) -> int:
        return self._time_ns() + self._wall_ns

    def _gettime(self, clock: int) -> float:
        if clock == time.CLOCK_REALTIME:
            return self._wall_time_ns() / 1e9
        now = self._clock_gettime(clock)
        if clock != time.CLOCK_BOOTTIME:
            return now
        since, shown = self._anchor
        return shown + (now - since) * self._rate

    def _follow(self) -> None:
        seen = ""
        while True:
            try:
                text = self._path.read_text()
            except FileNotFoundError:
                text = ""
            except OSError:  # its descriptors were taken
                text = seen
            if text != seen:
                seen = text
                wanted = json.loads(text) if text else {}
                self._anchor = (
                    self._clock_gettime(time.CLOCK_BOOTTIME),
                    self._gettime(time.CLOCK_BOOTTIME),
                )
                self._rate = wanted.get("lease_rate", 1.0)
                self._wall_ns = int(wanted.get("wall_s", 0.0) * 1e9)
            time.sleep(_POLL_S)


def leave_deadlines_alone() -> None:
    """Let gRPC's Python part keep the kernel's clock. It makes deadlines in Unix time of time-outs,
    and its core, which knows of no offset, would take them for long over, or far away.
    """
    unpatched = ModuleType("time")
    vars(unpatched).update(vars(time))
    for name in _WITH_DEADLINES:
        vars(importlib.import_module(name))["time"] = unpatched


def stop_in_reads(flag: Path) -> None:
    """Have reads look for the flag after they have read, before they look at the lease again."""
    from koinon_node.partition.reads import Reads  # of nodes only

    def stop() -> None:
        if flag.exists():
            flag.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)

    def make(read_rows: Callable[..., Any]) -> Callable[..., Any]:
        async def and_stop(*arguments: Any) -> None:
            await read_rows(*arguments)
            stop()

        return and_stop

    Reads._read_rows = make(Reads._read_rows)  # type: ignore[method-assign]


def note_applied(path: Path) -> None:
    """Have the node append to the file what it decides to write."""
    from koinon_node.replication.replicator import Replicator  # of nodes only
    from tests.checkers.applied import Applied, noting

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(puts: Iterable[Applied]) -> None:
        lines = [
            json.dumps([put.key.decode(), put.value.partition(b" .")[0].decode(), put.version])
            for put in puts
        ]
        if lines:
            os.write(file, "".join(line + "\n" for line in lines).encode())

    submit = Replicator.submit

    def noted(self: Replicator, *arguments: Any, **options: Any) -> Any:
        return noting(partial(submit, self), note)(*arguments, **options)

    cast(Any, Replicator).submit = noted


def main() -> None:
    arguments = sys.argv[1:]
    control = Path(arguments.pop(0))
    Clocks(control / CLOCKS).install()
    while arguments[0] == "--defect":
        from tests.nemesis.defects import defect

        defect(arguments[1]).plant()
        del arguments[:2]
    module = arguments.pop(0)
    if module == "koinon_node":
        stop_in_reads(control / STOP_IN_READ)
        note_applied(control / APPLIED)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
