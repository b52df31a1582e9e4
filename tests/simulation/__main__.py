"""Runs seeds of the cluster simulation; ``python -m tests.simulation --help``."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from tests.simulation import disks
from tests.simulation.cluster import SeedFailedError, run_seed
from tests.simulation.mutants import MUTANTS, likely_first
from tests.simulation.planting import Mutant

SEED_MAX = 1_000_000_000
RUNS_PER_WORKER_MAX = 200  # then another process takes its place, with fresh memory
PROGRESS_S = 1.0
PROGRESS_S_IN_FILES = 20.0

EPILOG = """examples:
  python -m tests.simulation 17                 seed 17, with every event
  python -m tests.simulation 0-240              what the test suite runs
  python -m tests.simulation --count 5000 --workers 2
                                                seeds that nobody has run yet (make soak)
  python -m tests.simulation 0-60 --mutant serves-without-a-lease --failures-max 1
                                                is the planted defect caught?

Exit code: 0 every seed passed, 1 one failed, 130 interrupted."""


class Done(NamedTuple):
    """One seed's result; ``failure`` is empty if it passed."""

    seed: int
    stats: Counter[str]
    failure: str


def main() -> int:
    options = _parser().parse_args()
    if options.list_mutants:
        print("\n".join(mutant.name for mutant in MUTANTS))
        return 0
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of what happens
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers are ended then, too
    if options.mutant is not None:
        options.mutant.plant()
        disks.LOGGED = options.mutant.logged
    if isinstance(options.seeds, int):
        return _run_one(options.seeds)
    seeds = options.seeds
    if seeds is None:
        first = random.randrange(SEED_MAX)
        seeds = range(first, first + options.count)
    return _Runs(seeds, options).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description="Simulated clusters under faults: one seed is one cluster, some 20 seconds of "
        "virtual time, and always the same run. Everything is checked after each event.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "seeds", nargs="?", type=_seeds, help="one seed, or FIRST-BEYOND", metavar="SEEDS"
    )
    which.add_argument("--count", type=int, help="so many seeds from a random one on", metavar="N")
    which.add_argument("--list-mutants", action="store_true", help="names for --mutant, and exit")
    parser.add_argument("--workers", type=int, default=1, help="processes (1)", metavar="N")
    parser.add_argument(
        "--failures-max", type=int, default=10, help="stop after so many (10)", metavar="N"
    )
    parser.add_argument("--mutant", type=_mutant, help="plant a defect first", metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")
    return parser


def _seeds(text: str) -> int | range:
    first, dash, beyond = text.partition("-")
    try:
        return range(int(first), int(beyond)) if dash else int(first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give 17, or 0-240") from None


def _mutant(name: str) -> Mutant:
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    raise argparse.ArgumentTypeError(f"{name} is none of those that --list-mutants shows")


def _run_one(seed: int) -> int:
    try:
        stats = run_seed(seed, trace=print)
    except SeedFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    _print_counts(stats)
    return 0


def _leave_signals_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_quietly(seed: int) -> Done:
    """Run one seed in a worker."""
    try:
        return Done(seed, run_seed(seed), "")
    except SeedFailedError as error:
        return Done(seed, error.stats, str(error))


class _Runs:
    """Many seeds, one after the other or side by side."""

    def __init__(self, seeds: range, options: argparse.Namespace) -> None:
        self._seeds = seeds
        self._options = options
        self._totals: Counter[str] = Counter()
        self._failed: list[int] = []
        self._done = 0
        self._began_at = time.monotonic()
        self._shown_at = self._began_at

    def run(self) -> int:
        options = self._options
        if not options.json:
            print(f"seeds {self._seeds.start}-{self._seeds.stop}", file=sys.stderr, flush=True)
        interrupted = False
        with ExitStack() as stack:
            try:
                for done in self._results(stack):
                    self._take(done)
                    if len(self._failed) >= options.failures_max:
                        break
            except KeyboardInterrupt:
                interrupted = True
        self._clear_line()
        self._print_totals()
        return 130 if interrupted else 1 if self._failed else 0

    def _results(self, stack: ExitStack) -> Iterator[Done]:
        mutant = self._options.mutant
        seeds = self._seeds if mutant is None else likely_first(mutant.name, self._seeds)
        if self._options.workers <= 1:
            return map(run_quietly, seeds)
        context = multiprocessing.get_context("fork")  # a planted defect is planted there too
        pool = context.Pool(
            self._options.workers,
            initializer=_leave_signals_to_the_parent,
            maxtasksperchild=RUNS_PER_WORKER_MAX,
        )
        stack.enter_context(pool)  # which ends its processes, whatever they do, when it is left
        return pool.imap_unordered(run_quietly, seeds)

    def _take(self, done: Done) -> None:
        self._done += 1
        self._totals.update(done.stats)
        if done.failure:
            self._failed.append(done.seed)
            self._clear_line()
            again = f"again, with all events: {self._command(done.seed)}"
            print(f"{done.failure}\n{again}", file=sys.stderr, flush=True)
        now = time.monotonic()
        every_s = PROGRESS_S if sys.stderr.isatty() else PROGRESS_S_IN_FILES
        if now - self._shown_at >= every_s:
            self._shown_at = now
            self._show_progress(now - self._began_at)

    def _show_progress(self, seconds: float) -> None:
        left_s = seconds / self._done * (len(self._seeds) - self._done)
        line = f"{self._done:,} of {len(self._seeds):,} seeds, {self._summary()}"
        line += f", {_duration(seconds)} gone, {_duration(left_s)} to go"
        end = "\r" if sys.stderr.isatty() else "\n"
        print(line.ljust(110) if end == "\r" else line, end=end, file=sys.stderr, flush=True)

    def _clear_line(self) -> None:
        if sys.stderr.isatty():
            print(" " * 110, end="\r", file=sys.stderr, flush=True)

    def _summary(self) -> str:
        failures = len(self._failed)
        return (
            f"{failures} failure{'' if failures == 1 else 's'}, {self._totals['events']:,} events, "
            f"{_duration(self._totals['virtual seconds'])} simulated"
        )

    def _print_totals(self) -> None:
        if self._options.json:
            print(json.dumps(dict(self._totals) | {"seeds": self._done}))
            return
        _print_counts(self._totals)
        seconds = time.monotonic() - self._began_at
        print(f"{self._done:,} seeds: {self._summary()}, in {_duration(seconds)}")
        for seed in self._failed:
            print(f"failed: {self._command(seed)}")

    def _command(self, seed: int) -> str:
        """Return what runs the seed again."""
        mutant = self._options.mutant
        planted = f" --mutant {mutant.name}" if mutant is not None else ""
        return f"python -m tests.simulation {seed}{planted}"


def _print_counts(stats: Counter[str]) -> None:
    for name, number in sorted(stats.items()):
        print(f"  {name}: {number:,}")


def _duration(seconds: float) -> str:
    """Return a duration as 1:02:03 or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


if __name__ == "__main__":
    sys.exit(main())
