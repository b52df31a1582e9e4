"""A client process of one system: carries out rows on request, until standard input closes.

A line of input is ``{"row": NAME, "seconds": SECONDS}``, or ``{"fill": true}``; a line of output is
the outcome, or ``{"error": TEXT}``. Each system has one process, and one works at a time, so that
no client's threads, memory or garbage disturb another's.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from typing import Any

from bench.measuring import cpu_s, percentile
from bench.peers.clients import KINDS, Face
from bench.peers.rows import ROWS, fill
from bench.peers.servers import Running
from bench.peers.systems import System


class Worker:
    """A system's client process, from the side of the scenario."""

    def __init__(self, system: System, running: Running) -> None:
        arguments = {"positional": running.arguments, "named": system.options | running.options}
        self.system, self.running = system, running
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.worker", system.kind, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def tell(self, **told: Any) -> dict[str, Any]:
        """Send a request; return the outcome, with the servers' CPU seconds."""
        assert self._process.stdin is not None
        pids = self.running.pids()
        before = cpu_s(pids)
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return {**self._answer(), "server_cpu_s": cpu_s(pids) - before}

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client process of {self.system.name} has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def carry_out(face: Face, told: dict[str, Any]) -> dict[str, Any]:
    """Carry out a line of input; return the outcome."""
    if told.get("fill"):
        fill(face)
        return {}
    gc.collect()
    before = os.times()
    outcome = ROWS[told["row"]](face, told["seconds"])
    after = os.times()
    return {
        "rows": outcome.rows,
        "rows_per_s": outcome.rows / outcome.seconds,
        "client_cpu_s": after.user + after.system - before.user - before.system,
        "p50_ms": percentile(outcome.latencies, 0.5) * 1e3,
        "p99_ms": percentile(outcome.latencies, 0.99) * 1e3,
    }


def main() -> None:
    """Carry out lines of standard input, and print the outcomes."""
    kind, arguments = sys.argv[1], json.loads(sys.argv[2])
    face = KINDS[kind](*arguments["positional"], **arguments["named"])
    print("{}", flush=True)
    for line in sys.stdin:
        try:
            said = carry_out(face, json.loads(line))
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
    os._exit(0)  # clients' threads may wait for servers that have ended


if __name__ == "__main__":
    main()
