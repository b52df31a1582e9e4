"""Servers of other systems, on this machine, for the length of a ``with`` block.

They run in a temporary directory and end with the program, whatever ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from koinon.local.processes import Guardian, ManagedProcess, wait_stopped

STOP_S = 10.0


class PeerServers(ABC):
    """``system`` names the directory."""

    def __init__(self, system: str) -> None:
        self._system = system
        self._processes: list[ManagedProcess] = []
        self._guardian: Guardian | None = None

    @abstractmethod
    def _start(self, directory: Path) -> None:
        """Start the servers with ``_spawn``; return once they answer."""

    def _spawn(self, name: str, argv: list[str], log: Path) -> None:
        """Start one server, which ends with this program."""
        process = ManagedProcess(name, argv, log)
        self._processes.append(process)
        identity = process.start(os.environ)
        if identity is not None and self._guardian is not None:
            self._guardian.watch(identity)

    def __enter__(self) -> Self:
        directory = Path(tempfile.mkdtemp(prefix=f"koinon-bench-{self._system}-"))
        self._guardian = Guardian()
        self._guardian.remove(directory)
        try:
            self._start(directory)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the servers and delete what they wrote."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGTERM)
        for process in wait_stopped(self._processes, STOP_S):
            process.signal(signal.SIGKILL)
        wait_stopped(self._processes, STOP_S)
        if self._guardian is not None:
            self._guardian.close()

    @property
    def pids(self) -> list[int]:
        """The servers' processes."""
        return [process.identity.pid for process in self._processes if process.identity]

    def _log_tails(self) -> str:
        """Return the last lines that each server logged."""
        return "\n".join(process.log_tail(5) for process in self._processes)
