"""Measures what clients notice when a process is stopped by SIGTERM and started under load.

    python -m bench.failures.graceful_bench [--rounds 3] [--replicas 3] [--only n1,c2,...]

Three coordinators and three nodes. In each round every process is stopped and started in turn,
including the coordinators' leader. Before the next one, the bench waits until all is well. There
are three phases: from SIGTERM to the end of the process; from its start until all is well; the
rest. For each kind of process and each phase it prints how many operations were under way, how many
failed, how many are of unknown fate, and the 99th percentile and the worst of their latencies. It
prints each error when it comes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from tests.checkers.steady import Done, SteadyLoad
from tests.integration.rolling import Restart, restart, wait_well

QUIET_S = 1.0
PRIMARIES_S_MAX = 30.0


@dataclass(kw_only=True)
class Figures:
    """The figures of one phase, over all rounds. Latencies in seconds."""

    operations: int
    failed: int
    unknown: int
    p99_s: float
    worst_s: float
    worst_kind: str


def figures_of(found: Sequence[Done]) -> Figures:
    ordered = sorted(found, key=lambda one: one.seconds)
    return Figures(
        operations=len(found),
        failed=sum(one.error is not None for one in found),
        unknown=sum(one.error is not None and one.error.maybe_applied for one in found),
        p99_s=ordered[int(0.99 * len(ordered))].seconds if ordered else 0.0,
        worst_s=ordered[-1].seconds if ordered else 0.0,
        worst_kind=ordered[-1].kind if ordered else "",
    )


def restore_primaries(cluster: LocalCluster, admin: Admin) -> None:
    """Give every partition back to its preferred primary, and wait for it."""
    wanted = admin.restore_primaries()
    deadline = time.monotonic() + PRIMARIES_S_MAX
    while wanted and time.monotonic() < deadline:
        time.sleep(0.1)
        wanted = admin.restore_primaries()
    wait_well(cluster)


def measure(
    rounds: int, replicas: int, partitions: int, only: Sequence[str], data: str | None
) -> tuple[dict[str, list[Done]], list[float], list[str]]:
    """Return the operations by phase, how long stops took, and the problems seen."""
    phases: defaultdict[str, list[Done]] = defaultdict(list)
    stops: list[float] = []
    with (
        LocalCluster(
            data,
            nodes=3,
            coordinators=3,
            replication_factor=replicas,
            coordinator_flags=["--partitions", str(partitions)],
        ) as cluster,
        Admin(cluster.coordinators) as admin,
        SteadyLoad(cluster) as load,
    ):
        wait_well(cluster)
        names = list(only) or [*cluster.node_names, *cluster.coordinator_names, "leader"]
        for _ in range(rounds):
            for name in names:
                began_at = time.monotonic()
                time.sleep(QUIET_S)
                phases["quiet"] += load.between(began_at, time.monotonic())
                restarted = cluster.leader() or "c1" if name == "leader" else name
                kind = "node" if name.startswith("n") else "coordinator"
                kind = "leader" if restarted == cluster.leader() else kind
                seen = len(load.failed)
                what = restart(cluster, restarted)
                time.sleep(QUIET_S)
                stops.append(what.ended_at - what.stop_at)
                note(load, phases, kind, what, seen)
            began_at = time.monotonic()
            restore_primaries(cluster, admin)
            phases["primaries restored"] += load.between(began_at, time.monotonic())
    errors = [str(one) for one in load.failed]
    return dict(phases), stops, load.wrong + errors


def note(
    load: SteadyLoad, phases: defaultdict[str, list[Done]], kind: str, what: Restart, seen: int
) -> None:
    stop = load.between(what.stop_at, what.start_at)
    start = load.between(what.start_at, what.well_at + QUIET_S)
    phases[f"{kind} stops"] += stop
    phases[f"{kind} starts"] += start
    worst = [max(found, key=lambda one: one.seconds, default=None) for found in (stop, start)]
    told = " and ".join(
        f"{one.kind} {one.seconds:.3f} s (from {one.began_at - since:+.2f} s)" if one else "none"
        for one, since in zip(worst, (what.stop_at, what.start_at), strict=True)
    )
    failed = load.failed[seen:]
    print(
        f"  {what.name} ({kind}): ended after {what.ended_at - what.stop_at:.2f} s, all well "
        f"{what.well_at - what.start_at:.2f} s after its start; worst: {told}; "
        f"failed {len(failed)}",
        file=sys.stderr,
        flush=True,
    )
    for one in failed:
        since = one.ended_at - what.stop_at
        print(f"    {since:+.3f} s {one}", file=sys.stderr, flush=True)


def main() -> int:
    """Print the figures; 1 if any operation failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--partitions", type=int, default=1024)
    parser.add_argument("--only", default="", help="names of processes, 'leader' among them")
    parser.add_argument("--data", help="a directory for the cluster, kept with its logs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    found, stops, wrong = measure(
        options.rounds, options.replicas, options.partitions, only, options.data
    )
    phases = {name: figures_of(operations) for name, operations in found.items()}
    by_kind: dict[str, float] = {}
    for one in found.get("node stops", ()):
        by_kind[one.kind] = max(one.seconds, by_kind.get(one.kind, 0.0))
    if options.json:
        figures = {name: asdict(row) for name, row in phases.items()}
        print(json.dumps({"phases": figures, "stops_s": stops, "wrong": wrong}))
        return bool(wrong)
    print(f"{'phase':24}{'operations':>11}{'failed':>8}{'unknown':>9}{'p99 ms':>9}{'worst ms':>10}")
    for name, row in phases.items():
        print(
            f"{name:24}{row.operations:>11,}{row.failed:>8}{row.unknown:>9}"
            f"{row.p99_s * 1000:>9.0f}{row.worst_s * 1000:>10.0f}  {row.worst_kind}"
        )
    print("worst ms by kind while a node stops: ", end="")
    print(", ".join(f"{kind} {worst * 1000:.0f}" for kind, worst in sorted(by_kind.items())))
    print(f"a stop took {sum(stops) / len(stops):.2f} s (worst {max(stops):.2f})")
    for error in wrong[:10]:
        print(error)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
