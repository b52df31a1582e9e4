"""Measures how long writes wait after a failure in containers: compose/compose.yaml as it is, with
its limits and the default session.

    python -m bench.failures.containers_bench [--runs 3] [--only cut,kill,stop]

Three coordinators and three nodes with three replicas; ``python -m tests.compose image`` makes the
image first. From the moment of the failure on, one write after the other goes to each of 128
partitions from a container beside them. The figure of a partition is the longest time that a write
to it took. Each run also prints what came when, counted from before Docker was told: when Docker
was through with it, when the coordinators fenced the node, and when the others led the last of its
partitions.

    cut     a node's container is taken off the network
    kill    docker kill
    stop    docker stop: SIGTERM, which the node answers by handing over
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bench.failures.runs import FailureRun, options_of, tell
from tests.compose import images
from tests.compose.cluster import COORDINATORS, NODES, Cluster, Writers
from tests.compose.engine import Project, engine_answers, run

KINDS = ("cut", "kill", "stop")
PARTITIONS = 128
WATCHED_S = 6.0
PROBES = Path(__file__).with_name("container_probes.py")


@dataclass(kw_only=True)
class Run(FailureRun):
    """The figures of one failure, in seconds."""

    victim: str
    docker_s: float  # until Docker was through with it
    fenced_s: float | None  # until the coordinators fenced the node; None if they did not
    led_s: float | None  # until the last of its partitions was led by another node
    median_s: float  # over partitions, of the longest write


def one_run(cluster: Cluster, probes: Writers, kind: str, victim: str) -> Run:
    """Cause the failure; return what came when."""
    probes.ask("begin", 30.0, partitions=PARTITIONS)
    began_at = time.time()
    container = cluster.project.container(victim)
    if kind == "cut":
        cluster.cut_off(victim)
    elif kind == "kill":
        run("docker", "kill", container)
    else:
        run("docker", "stop", "--time", "60", container)
    docker_s = time.time() - began_at
    found = probes.ask("end", WATCHED_S + 30.0, seconds=WATCHED_S)
    longest_s = list(found["longest_s"].values())
    others = [name for name in NODES if name != victim]
    return Run(
        kind=kind,
        victim=victim,
        docker_s=docker_s,
        fenced_s=last_event(cluster, COORDINATORS, "node fenced", began_at),
        led_s=last_event(cluster, others, "leads partitions", began_at),
        median_s=statistics.median(longest_s),
        worst_s=max(longest_s),
        failed=found["failed"],
    )


def last_event(
    cluster: Cluster, services: tuple[str, ...] | list[str], event: str, since: float
) -> float | None:
    """Return how many seconds after ``since`` (Unix time) one of these logged this last."""
    times = []
    for service in services:
        command = ["docker", "logs", "--since", f"{since:.3f}", cluster.project.container(service)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=True
        )
        for line in done.stdout.splitlines():
            if b'"event": "%b"' % event.encode() in line:
                told = json.loads(line)["time"]
                times.append(datetime.fromisoformat(told).timestamp() - since)
    return max(times, default=None)


def restore(cluster: Cluster, run_: Run) -> None:
    """Bring the node back, and give its partitions back to it."""
    if run_.kind == "cut":
        cluster.reconnect(run_.victim)
    else:
        cluster.project.compose("start", run_.victim)
    cluster.wait_ok()
    cluster.execute("coordinator-1", "koinon", "admin", "primaries")
    cluster.wait_for(
        lambda s: s["ok"] and all(n["primaries"] for n in s["nodes"].values()), "it leads again"
    )


def main() -> int:
    """Print the figures."""
    options = options_of(__doc__, KINDS)
    if not engine_answers() or not images.exists(images.NAME):
        print("no Docker Engine answers, or 'python -m tests.compose image' has not been run")
        return 0
    name = f"koinon-bench-{os.getpid()}"
    project = Project(name, {"KOINON_IMAGE": images.NAME, "KOINON_PROMETHEUS_PORT": "0"})
    cluster = Cluster(project)
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    try:
        project.compose("up", "--detach", *COORDINATORS, *NODES)
        cluster.wait_ok()
        probes = Writers(project, PROBES)
        try:
            for kind in options.only.split(","):
                for index in range(options.runs):
                    found = one_run(cluster, probes, kind, NODES[index % len(NODES)])
                    runs[kind].append(found)
                    print(f"  {found}", file=sys.stderr, flush=True)
                    restore(cluster, found)
        finally:
            probes.close()
    finally:
        cluster.tear_down()
    tell(runs, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
