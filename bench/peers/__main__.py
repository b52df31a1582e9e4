"""The same work by Koinon, Redis and etcd, interleaved: a table, the bars, JSON, a plot.

    python -m bench.peers [--rows get put …] [--systems k1 redis …] [--rounds 5] [--seconds 2]
                          [--plot FILE] [--json FILE] [--awake] [--no-floors] [--no-c]

It starts all servers itself, on this machine, and ends them. A round runs every row by every
system, one after the other, so that what else the machine does meets all alike; a figure is the
median of the rounds. With all rows and systems it takes some 30 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.peers import floors, from_c, report, rows, systems
from bench.peers.systems import SYSTEMS, Worker

SPIN = "import os\nos.nice(19)\nwhile True: pass"


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=lines[0])
    add = parser.add_argument
    known = list(rows.ROWS)
    add("--rows", nargs="+", choices=known, metavar="ROW", help=f"some of {', '.join(known)}")
    add("--systems", nargs="+", choices=list(SYSTEMS), default=systems.DEFAULT)
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=2.0, help="of a row in a round")
    add("--json", type=Path, help="write every round's figures here")
    add("--plot", type=Path, help="draw throughput over concurrency here (PNG)")
    add("--awake", action="store_true", help="keep cores awake by neighbours of low priority")
    add("--no-floors", dest="floors", action="store_false")
    add("--no-c", dest="from_c", action="store_false", help="leave redis-benchmark out")
    options = parser.parse_args(given)
    if options.rows is None:
        plotted = rows.PLOTTED if options.plot else ()
        options.rows = [name for name in rows.ROWS if name in (*rows.DEFAULT, *plotted)]
    return options


def usable(names: Sequence[str]) -> list[str]:
    """Return the systems that this machine can run; say what is missing for the others."""
    found = []
    for name in names:
        if lacks := SYSTEMS[name].missing():
            tell(f"no {name}: {lacks}")
        else:
            found.append(name)
    return found


def tell(line: str) -> None:
    """Say how far it is, out of the way of the table."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def awake(wanted: bool) -> Iterator[None]:
    """Keep every core from sleeping, if wanted."""
    count = (os.cpu_count() or 1) if wanted else 0
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


Results = dict[str, dict[str, list[Any]]]
"""Every round's figures by row and system."""


def measure(options: argparse.Namespace, names: Sequence[str], results: Results) -> None:
    """Run all rounds; ``results`` has what is known so far, also if this is interrupted."""
    with ExitStack() as stack:
        running: dict[str, systems.Servers] = {}
        workers: list[Worker] = []
        for name in names:
            system = SYSTEMS[name]
            fresh = system.servers not in running
            if fresh:
                tell(f"starting {system.servers}")
                running[system.servers] = systems.start(system.servers, stack)
            worker = Worker(system, running[system.servers])
            stack.callback(worker.close)
            workers.append(worker)
            if fresh and (error := worker.tell(fill=True).get("error")):
                raise RuntimeError(f"{name} cannot be filled: {error}")
        stack.enter_context(awake(options.awake))
        for number in range(options.rounds):
            for row in options.rows:
                # Another one begins in each round, so that none always follows the same one.
                turn = number % len(workers)
                for worker in workers[turn:] + workers[:turn]:
                    said = worker.tell(row=row, seconds=options.seconds)
                    if "error" in said:
                        tell(f"{row} by {worker.system.name}: {said['error']}")
                        continue
                    results.setdefault(row, {}).setdefault(worker.system.name, []).append(said)
            tell(f"round {number + 1} of {options.rounds}")


def main() -> int:
    """Measure and print."""
    options = parse_arguments()
    # As Ctrl-C does: a client that is told to end leaves no servers behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = usable(options.systems)
    if not names:
        return 1
    try:
        return run(options, names)
    except KeyboardInterrupt:
        tell("interrupted")
        return 130


def run(options: argparse.Namespace, names: Sequence[str]) -> int:
    """Measure what was asked for, print it, and write the files."""
    whole: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "awake": options.awake},
        "rounds": options.rounds,
        "seconds": options.seconds,
        "systems": {name: SYSTEMS[name].durability for name in names},
    }
    whole["rows"] = results = Results()
    try:
        measure(options, names, results)
    finally:
        report.show(results, names, awake=options.awake)
    if options.floors:
        whole["floors"] = floors.measure(options.seconds)
        print("\nfloors")
        for name, rate in whole["floors"].items():
            print(f"  {name:<32} {rate:>12,.0f}/s")
    if options.from_c:
        print()
        if lacks := from_c.missing():
            print(f"no redis-benchmark: {lacks}")
        else:
            whole["from_c"] = from_c.measure(min(3, options.rounds), 100_000)
            from_c.show(whole["from_c"])
    if options.json:
        options.json.write_text(json.dumps(whole, indent=1))
    if options.plot:
        report.plot(results, names, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
