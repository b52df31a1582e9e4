"""A client process of one system: carries out rows as it is told, until standard input closes.

    python -m bench.peers.worker KIND ARGUMENTS_AS_JSON

A line of input is ``{"row": NAME, "seconds": SECONDS}``, or ``{"fill": true}``; a line of output is
the outcome, or ``{"error": TEXT}``. All systems have one each, and one runs at a time, so that no
client's threads, memory or garbage are in the way of another's.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

from bench.peers.clients import KINDS, Face
from bench.peers.rows import ROWS, fill


def answer(face: Face, told: dict[str, Any]) -> dict[str, Any]:
    """Do what a line says; return what to say of it."""
    if told.get("fill"):
        fill(face)
        return {}
    gc.collect()
    before = _cpu_s()
    outcome = ROWS[told["row"]](face, told["seconds"])
    cpu_s = _cpu_s() - before
    latencies = sorted(outcome.latencies)
    return {
        "rows_per_s": outcome.rows / outcome.seconds,
        "rows": outcome.rows,
        "seconds": outcome.seconds,
        "client_cpu_s": cpu_s,
        "p50_ms": _percentile_ms(latencies, 0.50),
        "p99_ms": _percentile_ms(latencies, 0.99),
    }


def _cpu_s() -> float:
    used = os.times()
    return used.user + used.system


def _percentile_ms(ordered: list[float], share: float) -> float | None:
    return ordered[int((len(ordered) - 1) * share)] * 1e3 if ordered else None


def main() -> None:
    """Serve lines."""
    kind, arguments = sys.argv[1], json.loads(sys.argv[2])
    face = KINDS[kind](*arguments["positional"], **arguments["named"])
    print(json.dumps({"ready": time.time()}), flush=True)
    for line in sys.stdin:
        try:
            said = answer(face, json.loads(line))
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
    os._exit(0)  # clients' threads may wait for servers that have ended


if __name__ == "__main__":
    main()
