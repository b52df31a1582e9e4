"""The runner of all benchmarks.

    python -m bench list
    python -m bench run NAME… [--set seconds=1 nodes=1,3] [--json FILE]
    python -m bench compare REVISION NAME… [--rounds 3] [--set …]

``run`` measures on this machine and prints medians beside the aims. ``compare`` runs the same
scenarios alternately with this tree and with a checkout of another revision, which must have them
too, and prints both medians and their ratio.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.figures import Figure, Results, shown

TREE = Path(__file__).resolve().parents[1]
PACKAGES = ("client", "node", "coordinator", "proto")


class Scenario(NamedTuple):
    """``where``: module and function. The function's keyword arguments are the settings."""

    where: str
    minutes: float

    def load(self) -> tuple[Any, Any]:
        """Import and return the function and its module's aims."""
        name, _, function = self.where.partition(":")
        module = importlib.import_module(f"bench.{name}")
        return getattr(module, function), getattr(module, "AIMS", ())


SCENARIOS = {
    "cluster": Scenario("cluster:operations", 2),
    "walk": Scenario("walk:measure", 1),
    "peers": Scenario("peers.compare:measure", 30),
    "log": Scenario("log:measure", 4),
    "costs": Scenario("costs:measure", 2),
    "hashing": Scenario("hashing:measure", 2),
    "routers": Scenario("hashing:routers", 4),
    "raft": Scenario("coordinators:raft", 1),
    "planner": Scenario("coordinators:planner", 1),
    "rest": Scenario("cluster:rest", 2),
    "connections": Scenario("neighbours:connections", 1),
    "neighbours": Scenario("neighbours:keyspaces", 2),
    "ingest": Scenario("loads:measure", 5),
    "moves": Scenario("moves:measure", 6),
    "skew": Scenario("skew:measure", 2),
    "partitions": Scenario("partitions:failover", 6),
    "start": Scenario("partitions:start", 2),
    "failover": Scenario("failures:kills", 3),
    "isolated": Scenario("failures:isolated", 5),
    "stops": Scenario("failures:stops", 6),
    "starved": Scenario("failures:starved", 2),
}
SHORT = ("hashing", "planner", "raft", "cluster", "ingest")
"""The scenarios of ``make bench``."""


def main() -> int:
    """Carry out one command; return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are ended, as by Ctrl-C
    options = _parse()
    if options.command == "list":
        return _list()
    settings = dict(pair.partition("=")[::2] for pair in options.set)
    if options.command == "compare":
        return _compare(options.revision, options.names, settings, options.rounds)
    if len(options.names) == 1:
        return _run(options.names[0], settings, options.json)
    return _run_all(options.names, settings, options.json)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name all scenarios, with their settings")
    run = commands.add_parser("run", help="measure")
    compare = commands.add_parser("compare", help="measure beside another revision")
    compare.add_argument("revision")
    compare.add_argument("--rounds", type=int, default=3)
    run.add_argument("--json", type=Path, help="write every sample here")
    for command in (run, compare):
        many: Any = {"nargs": "*", "default": SHORT} if command is run else {"nargs": "+"}
        command.add_argument("names", metavar="NAME", help=f"of {', '.join(SCENARIOS)}", **many)
        command.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    for name in getattr(options, "names", ()):
        if name not in SCENARIOS:
            parser.error(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    return options


def _list() -> int:
    for name, scenario in SCENARIOS.items():
        function, _ = scenario.load()
        title = (function.__doc__ or "").strip().splitlines()[0]
        print(f"{name:<12}{title} (some {scenario.minutes:g} min)")
        for parameter in inspect.signature(function).parameters.values():
            default = parameter.default
            text = ",".join(map(str, default)) if isinstance(default, tuple) else default
            print(f"{'':<14}{parameter.name}={text}")
    return 0


def _settings(function: Any, given: dict[str, str]) -> dict[str, Any]:
    """Convert the given settings to the types of the function's defaults."""
    known = inspect.signature(function).parameters
    found: dict[str, Any] = {}
    for name, text in given.items():
        if name not in known:
            raise SystemExit(f"no setting {name!r}; there are {', '.join(known) or 'none'}")
        default = known[name].default
        try:
            found[name] = _value(text, default)
        except ValueError:
            kind = type(default).__name__
            raise SystemExit(f"setting {name}: {text!r} is not of type {kind}") from None
    return found


def _value(text: str, default: Any) -> Any:
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower()) or text.lower() == "1"
    if isinstance(default, tuple):
        parts = [part for part in text.split(",") if part]
        return tuple(_value(part, default[0]) for part in parts) if default else tuple(parts)
    return type(default)(text)


def _run(name: str, given: dict[str, str], file: Path | None) -> int:
    """Measure one scenario; print the results, also after an interrupt."""
    function, aims = SCENARIOS[name].load()
    settings = _settings(function, given)
    results, code = Results(), 0
    try:
        for figure in function(**settings):
            results.add(figure)
            print(f"  {figure.row}, {figure.column}: {shown(figure.value)} {figure.unit}".rstrip(),
                  file=sys.stderr, flush=True)  # fmt: skip
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    print(f"{name}, load average {os.getloadavg()[0]:.1f}\n{results.table()}")
    if reached := results.held_to(aims):
        print(f"\naims\n{reached}")
    if file is not None:
        file.write_text(json.dumps({name: results.as_json()}))
    return code


def _run_all(names: Sequence[str], given: dict[str, str], file: Path | None) -> int:
    """Measure each scenario in a process of its own, so that none meets another's threads and
    memory.
    """
    failed, whole = 0, {}
    for name in names:
        found, code = _in_tree(TREE, name, given, quiet=False)
        failed += code != 0
        whole[name] = found.as_json()
    if file is not None:
        file.write_text(json.dumps(whole))
    return int(failed > 0)


def _in_tree(tree: Path, name: str, given: dict[str, str], *, quiet: bool) -> tuple[Results, int]:
    """Run a scenario with the code of a checkout."""
    path = os.pathsep.join(str(tree / package) for package in PACKAGES)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), path))}
    with tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch:
        file = Path(scratch) / "figures.json"
        command = [sys.executable, "-m", "bench", "run", name, "--json", str(file)]
        command += ["--set", *(f"{n}={v}" for n, v in given.items())] if given else []
        output = subprocess.DEVNULL if quiet else None
        code = subprocess.run(
            command, cwd=tree, env=environment, stdout=output, stderr=output, check=False
        ).returncode
        found = json.loads(file.read_text())[name] if file.exists() else []
    return Results.from_json(found), code


@contextmanager
def _checkout(revision: str) -> Iterator[Path]:
    """Check the revision out into a temporary work tree."""
    with tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch:
        tree = Path(scratch) / "tree"
        git = ["git", "-C", str(TREE), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), revision], check=True)
        try:
            if not (tree / "bench" / "figures.py").exists():
                raise SystemExit(f"{revision} has no benchmarks of this kind: compare a later one")
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _compare(revision: str, names: Sequence[str], given: dict[str, str], rounds: int) -> int:
    with _checkout(revision) as other:
        for name in names:
            before, now = Results(), Results()
            for _ in range(rounds):
                for tree, results in ((other, before), (TREE, now)):
                    found, code = _in_tree(tree, name, given, quiet=True)
                    if code:
                        raise SystemExit(f"{name} failed with {code}; see `bench run {name}`")
                    for figure in found.figures():
                        results.add(figure)
            print(f"{name}\n{_beside(revision, before, now).table()}", flush=True)
    return 0


def _beside(revision: str, before: Results, now: Results) -> Results:
    """Return both builds' medians and their ratio, with a row for each figure that both have."""
    table = Results()
    cells = {(f.row, f.column, f.unit) for f in now.figures()}
    for row, column, unit in sorted(cells):
        ours, theirs = now.median(row, column), before.median(row, column)
        if ours is not None and theirs:
            name = f"{row} {column}"
            table.add(Figure(name, revision, theirs, unit))
            table.add(Figure(name, "this tree", ours, unit))
            table.add(Figure(name, "ratio", ours / theirs, unit))
    return table


if __name__ == "__main__":
    sys.exit(main())
