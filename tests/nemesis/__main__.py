"""Runs schedules of faults against real processes; ``python -m tests.nemesis --help``."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tests.checkers.linearizability import check
from tests.nemesis import means
from tests.nemesis.cluster import NemesisCluster
from tests.nemesis.defects import DEFECTS, SHOWN_BY
from tests.nemesis.journal import operations, read_history
from tests.nemesis.run import HISTORY, Result, run_schedule
from tests.nemesis.schedules import CALM_S, KINDS, Schedule, available, make_schedule

SEED_MAX = 1_000_000_000
EXAMPLES_MAX = 5
SECONDS, SECONDS_OF_KILLS = 25.0, 90.0
DENSE_CALM_S = (0.3, 1.0)
EXIT_VIOLATION, EXIT_CANNOT, EXIT_INTERRUPTED = 1, 2, 130

EPILOG = """examples:
  python -m tests.nemesis --seeds 17                          schedule 17, with all kinds of faults
  python -m tests.nemesis --seeds 0-20 --faults split,kill    twenty schedules of two kinds
  python -m tests.nemesis --count 5                           five that nobody has run yet
  python -m tests.nemesis --kills 1000                        kill -9 of so many processes
  python -m tests.nemesis --seeds 0-10 --faults split --defect serves-without-a-lease
                                                              is the planted defect found?
  python -m tests.nemesis --seeds 17 --show                   what schedule 17 does; runs nothing
  python -m tests.nemesis --judge history.jsonl               judge a history that was kept

A schedule is its seed, its kinds of faults and its seconds. One cluster goes through schedule after
schedule, with keys of their own, while all is well after each; after one that failed, its history
and all logs stay in the directory that is printed. With --defect the first schedule that shows it
is the last. Exit code: 0 nothing found, 1 a violation, or a cluster that did not become well again,
2 this machine allows none of it, 130 interrupted."""


def main() -> int:
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was mounted is unmounted
    if options.list:
        return _list()
    if options.judge is not None:
        return _judge(options.judge)
    if options.kills:
        options.faults, options.dense = options.faults or ["kill"], True
        options.seconds = options.seconds or SECONDS_OF_KILLS
    options.seconds = options.seconds or SECONDS
    names = options.faults or [name for name, kind in KINDS.items() if kind.assumed]
    kinds, left_out = available(names)
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    if why := means.missing(means.NAMESPACES):
        print(f"no schedule can run here: {why}")
        return EXIT_CANNOT
    if not kinds:
        print("no kind of faults is left")
        return EXIT_CANNOT
    seeds: Iterable[int] | None = options.seeds
    if seeds is None:
        first = random.randrange(SEED_MAX)
        seeds = itertools.count(first) if options.kills else range(first, first + options.count)
    calm_s = DENSE_CALM_S if options.dense else CALM_S
    schedules = (make_schedule(seed, kinds, options.seconds, calm_s) for seed in seeds)
    if options.show:
        for schedule in schedules:
            print(f"schedule {schedule.seed}, {schedule.seconds:.0f} s\n{schedule}")
        return 0
    return _Campaign(options, kinds).run(schedules)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nemesis",
        description="Schedules of faults against real processes, each in a network namespace of "
        "its own; needs root and iproute2.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seeds", type=_seeds, help="one seed, or FIRST-BEYOND", metavar="SEEDS")
    which.add_argument("--count", type=int, help="so many from a random seed on", metavar="N")
    which.add_argument(
        "--kills",
        type=int,
        help="dense schedules of kill -9, until so many nodes and coordinators were killed",
        metavar="N",
    )
    which.add_argument("--judge", type=Path, help="judge this history only", metavar="FILE")
    which.add_argument("--list", action="store_true", help="kinds of faults and defects, and exit")
    parser.add_argument("--faults", type=_kinds, help="kinds, comma-separated (all)", metavar="…")
    seconds = f"of faults each ({SECONDS:g}; with --kills {SECONDS_OF_KILLS:g})"
    parser.add_argument("--seconds", type=float, help=seconds)
    parser.add_argument(
        "--defect",
        choices=sorted(DEFECTS),
        default="",
        metavar="NAME",
        help="plant this into every member first (--list names them)",
    )
    parser.add_argument("--dense", action="store_true", help="faults soon after one another")
    parser.add_argument("--show", action="store_true", help="print the schedules only")
    parser.add_argument("--keep", type=Path, help="a directory for histories and logs of all")
    parser.add_argument("--json", type=Path, help="append a line for each schedule to this file")
    return parser


def _seeds(text: str) -> range:
    first, dash, beyond = text.partition("-")
    try:
        return range(int(first), int(beyond) if dash else int(first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give 17, or 0-20") from None


def _kinds(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: --list names the kinds")
    return names


def _list() -> int:
    _, left_out = available(list(KINDS))
    print("kinds of faults:")
    for name, kind in KINDS.items():
        remark = f"not here: {left_out[name]}" if name in left_out else ""
        if not kind.assumed:
            remark = (remark + " by name only: more than the cluster promises to stand").strip()
        print(f"  {name:14} {remark}".rstrip())
    print("defects:")
    for name in sorted(DEFECTS):
        shown = f"try --faults {','.join(SHOWN_BY[name])}" if name in SHOWN_BY else ""
        print(f"  {name:50} {shown}".rstrip())
    return 0


def _judge(path: Path) -> int:
    history = operations(read_history(path))
    violations = check(history)
    for violation in violations:
        print(violation)
    print(f"{len(history):,} operations, {len(violations)} violations")
    return EXIT_VIOLATION if violations else 0


class _Campaign:
    """Schedules one after the other, and their sums."""

    def __init__(self, options: argparse.Namespace, kinds: list[str]) -> None:
        self._options = options
        self._kinds = kinds
        self._totals: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._failed: list[int] = []
        self._cluster: NemesisCluster | None = None

    def run(self, schedules: Iterable[Schedule]) -> int:
        ran = 0
        interrupted = False
        try:
            for schedule in schedules:
                self._run(schedule)
                ran += 1
                if self._failed and self._options.defect:
                    break
                if self._options.kills and self._totals["kills"] >= self._options.kills:
                    break
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._end_cluster(keep=bool(self._options.keep))
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self._faults.items()))
        print(f"faults: {faults or 'none'}")
        print(
            f"{ran} schedules, {self._totals['kills']:,} kills of nodes and coordinators, "
            f"{self._totals['operations']:,} operations, {self._totals['batches']:,} atomic "
            f"batches acknowledged, {self._totals['violations']} violations, "
            f"{self._totals['failures']} not well again"
        )
        if self._options.defect:
            found = f"found in schedule {ran} of {ran}" if self._failed else "not found"
            print(f"{self._options.defect}: {found}")
        return EXIT_INTERRUPTED if interrupted else EXIT_VIOLATION if self._failed else 0

    def _run(self, schedule: Schedule) -> None:
        began_at = time.monotonic()
        cluster = self._running_cluster()
        directory = cluster.directory / f"s{schedule.seed}"
        result = run_schedule(schedule, cluster, directory)
        for name in ("operations", "kills", "batches"):
            self._totals[name] += getattr(result, name)
        self._totals["violations"] += len(result.violations)
        self._totals["failures"] += bool(result.failure)
        self._faults += result.faults
        self._print(schedule, result, time.monotonic() - began_at)
        if self._options.json is not None:
            self._append(schedule, result)
        if not result.ok:
            self._failed.append(schedule.seed)
            print(f"  again: {self._command(schedule)}\n  kept: {directory / HISTORY}")
            self._end_cluster(keep=True)  # the next one begins anew

    def _running_cluster(self) -> NemesisCluster:
        """One cluster goes through schedule after schedule while all is well after each."""
        if self._cluster is None:
            parent = self._options.keep
            if parent is not None:
                parent.mkdir(exist_ok=True)
            directory = Path(tempfile.mkdtemp(prefix="nemesis-", dir=parent))
            self._cluster = NemesisCluster(directory, defect=self._options.defect)
            self._cluster.__enter__()
        return self._cluster

    def _end_cluster(self, *, keep: bool) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return
        cluster.__exit__(None, None, None)
        if not keep:
            shutil.rmtree(cluster.directory)
            return
        for path in cluster.directory.iterdir():  # disks are large, and say little
            if path.suffix == ".img":
                path.unlink()
            elif path.suffix in (".disk", ".control", ".kept"):
                shutil.rmtree(path)

    def _print(self, schedule: Schedule, result: Result, seconds: float) -> None:
        fates = ", ".join(f"{count:,} {fate}" for fate, count in result.fates.most_common())
        verdict = "ok" if result.ok else "FAILED"
        faults = ",".join(schedule.kinds)
        kills = f"{result.kills} kills, " if result.kills else ""
        print(f"schedule {schedule.seed}: {verdict}, {kills}{fates}; {faults}; {seconds:.0f} s")
        for note in result.notes:
            print(f"  note: {note}")
        if result.failure:
            print(f"  {result.failure}")
        for violation in result.violations[:EXAMPLES_MAX]:
            print(f"  {violation}")
        if len(result.violations) > EXAMPLES_MAX:
            print(f"  and {len(result.violations) - EXAMPLES_MAX} more")
        if not result.ok:
            print(schedule)
        sys.stdout.flush()

    def _append(self, schedule: Schedule, result: Result) -> None:
        line = vars(result) | asdict(schedule) | {"defect": self._options.defect}
        with self._options.json.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _command(self, schedule: Schedule) -> str:
        """Return what runs the schedule again."""
        options = self._options
        command = f"python -m tests.nemesis --seeds {schedule.seed} --faults "
        command += ",".join(self._kinds)
        if options.seconds != SECONDS:
            command += f" --seconds {options.seconds:g}"
        command += " --dense" if options.dense else ""
        return command + (f" --defect {options.defect}" if options.defect else "")


if __name__ == "__main__":
    sys.exit(main())
