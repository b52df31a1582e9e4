"""A program that follows the change feed: ``koinon watch --state``, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PREFIX = "demo/"


class Follower:
    """``koinon watch`` of all keys below the prefix; its output goes to one file."""

    def __init__(self, coordinators: str, scratch: Path) -> None:
        self._arguments = ["--coordinators", coordinators, "--json"]
        self._state = scratch / "positions"
        self._printed = scratch / "changes.jsonl"
        self._process: subprocess.Popen[bytes] | None = None
        self.lines = 0  # when the file was last read

    def start(self) -> int:
        """Start the program, or continue after its last process; return the process id."""
        watch = ["watch", "--prefix", PREFIX, "--since", "start", "--state", str(self._state)]
        with self._printed.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "koinon.cli", *watch, *self._arguments], stdout=output
            )
        return self._process.pid

    def kill(self) -> None:
        """Kill -9 the process, if one runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def values(self) -> dict[bytes, bytes | None]:
        """Return the newest value of each key in the output so far; None: the key was deleted."""
        newest: dict[str, tuple[int, str | None]] = {}
        lines = self._printed.read_bytes().split(b"\n")[:-1]  # the last line may be incomplete
        for change in map(json.loads, filter(None, lines)):
            told = change["version"], change.get("value")
            newest[change["key"]] = max(newest.get(change["key"], told), told)
        self.lines = len(lines)
        return {k.encode(): v if v is None else v.encode() for k, (_, v) in newest.items()}
