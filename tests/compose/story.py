"""The acts that the cluster in containers goes through, with their checks: the first check that
fails ends the test.

All the while three client threads read and overwrite a few hundred keys (every answer is recorded,
and the history judged at the end) and write keys of their own once (each acknowledged one has to be
there at the end).
"""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from demo.stage import Stage

from . import images
from .cluster import COORDINATORS, NODES, Cluster, Status
from .engine import EngineError, inspect, run

QUIET_WRITES = 60
"""So many keys more have to be acknowledged while something is broken, and after it."""
PROGRESS_S = 60.0
LOSS_PERCENT = 3
SAMPLE_ROWS = 100_000
SPARK_S = 600.0
TARGETS_S = 60.0
READ_AGAIN_S = 2.0
"""So long after a step identity files are in use everywhere."""


class Story:
    """The acts, in their order; ``tell`` plays them all."""

    def __init__(self, stage: Stage, cluster: Cluster, *, spark: bool) -> None:
        self._stage = stage
        self._cluster = cluster
        self._project = cluster.project
        self._spark = spark

    def tell(self) -> None:
        self.prepare()
        self.start()
        self.cut_a_node_off()
        self.kill_a_node()
        self.isolate_the_leader()
        self.disturb_a_network()
        self.add_a_node()
        self.stop_and_start_each()
        self.roll_all()
        if self._project.secured:
            self.replace_certificates()
        self.observe()
        if self._spark:
            self.ingest()
        self.judge()

    # --- helpers ----------------------------------------------------------------------------------

    def _progress(self) -> None:
        writers = self._cluster.writers
        answer = writers.ask("progress", PROGRESS_S + 10, writes=QUIET_WRITES, timeout_s=PROGRESS_S)
        if "error" in answer:
            raise EngineError(f"the writers get nowhere: {answer['error']}")

    @contextmanager
    def _counted(self, what: str, *, spotless: bool = False) -> Iterator[None]:
        """Say what became of the operations that end inside; with ``spotless``, none may have
        failed or be of unknown fate.
        """
        stage = self._stage
        self._cluster.writers.ask("since")
        began = time.monotonic()
        yield
        count = self._cluster.writers.ask("since")
        seconds = time.monotonic() - began
        text = (
            f"{count['operations']:,} operations in {seconds:.0f} s of {what}, the slowest "
            f"{count['slowest_s']:.2f} s: {count['failed']} failed, {count['unknown']} of unknown "
            "fate"
        )
        if not spotless:
            stage.say(text)
            return
        for error in count["errors"]:
            stage.say(f"  {error}")
        stage.check(not count["failed"] and not count["unknown"], text)

    def _all_well(self) -> Status:
        status = self._cluster.wait_ok()
        self._progress()
        return status

    # --- acts -------------------------------------------------------------------------------------

    def prepare(self) -> None:
        stage = self._stage
        stage.act("The image")
        images.have_base(stage.say)
        images.have_wheels(stage.say, spark=self._spark)
        began = time.monotonic()
        images.build_koinon()
        images.build_faults()
        seconds = time.monotonic() - began
        stage.say(
            f"built {images.NAME} ({images.size_mb(images.NAME):,.0f} MB) and the fault tools' "
            f"image in {seconds:.0f} s"
        )

    def start(self) -> None:
        stage, cluster = self._stage, self._cluster
        stage.act("Three coordinators and three nodes on three racks, in containers")
        began = time.monotonic()
        if self._project.secured:
            stage.say(f"certificates: {len(cluster.certificates('make').splitlines())} are made")
        self._project.compose("up", "--detach", *COORDINATORS, *NODES)
        status = cluster.wait_ok()
        seconds = time.monotonic() - began
        nodes = status["nodes"]
        stage.check(
            status["online"] == status["partitions"] and sorted(nodes) == list(NODES),
            f"{status['online']:,} partitions are served after {seconds:.0f} s; "
            f"{status['leader']} leads",
        )
        racks = sorted(node["rack"] for node in nodes.values())
        stage.check(racks == ["a", "b", "c"], "the nodes are on racks a, b and c")
        for service in cluster.services:
            container = self._project.container(service)
            confined = "{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}} {{.Config.User}}"
            memory, cpus, user = inspect(container, confined).split()
            held = int(memory) and int(cpus) and user == "koinon"
            if not held or inspect(container, "{{.HostConfig.RestartPolicy.Name}}") == "no":
                stage.check(False, f"{service} is confined and restarted")
        stage.check(
            True, "each is confined (no root, bounded memory and CPU), and restarted if it crashes"
        )
        answer = cluster.writers.ask("begin")
        self._progress()
        stage.say(f"{answer['threads']} threads read and write from now on, in a container too")

    def cut_a_node_off(self) -> None:
        stage, cluster = self._stage, self._cluster
        stage.act("A node loses its network, and gets it back")
        with self._counted("isolation"):
            stage.event("node-2 is disconnected from the network")
            cluster.cut_off("node-2")
            began = time.monotonic()
            cluster.wait_for(_without("node-2"), "the others lead what node-2 led")
            stage.check(
                True, f"the others lead its partitions after {time.monotonic() - began:.1f} s"
            )
            self._progress()
            cluster.reconnect("node-2")
            began = time.monotonic()
            self._all_well()
        stage.check(
            True, f"reconnected, its copies are in sync after {time.monotonic() - began:.1f} s"
        )

    def kill_a_node(self) -> None:
        stage, cluster = self._stage, self._cluster
        stage.act("Another node is killed")
        with self._counted("the kill"):
            stage.event("docker kill node-3")
            run("docker", "kill", self._project.container("node-3"))
            began = time.monotonic()
            cluster.wait_for(_without("node-3"), "the others lead what node-3 led")
            stage.check(
                True, f"the others lead its partitions after {time.monotonic() - began:.1f} s"
            )
            self._progress()
            self._project.compose("start", "node-3")
            began = time.monotonic()
            self._all_well()
        stage.check(
            True, f"started again, its copies are in sync after {time.monotonic() - began:.1f} s"
        )

    def isolate_the_leader(self) -> None:
        stage, cluster = self._stage, self._cluster
        stage.act("The coordinators' leader loses its network")
        leader = cluster.wait_ok()["leader"]
        with self._counted("isolation"):
            stage.event(f"{leader} is disconnected from the network")
            cluster.cut_off(leader)
            began = time.monotonic()
            status = cluster.wait_for(
                lambda s: s["leader"] != leader and s["online"] == s["partitions"],
                "another coordinator leads",
            )
            stage.check(True, f"{status['leader']} leads after {time.monotonic() - began:.1f} s")
            self._progress()
            cluster.reconnect(leader)
            self._all_well()
        stage.check(True, f"reconnected, {leader} follows")

    def disturb_a_network(self) -> None:
        stage = self._stage
        stage.act("A network that loses packets, and two nodes that do not reach one another")
        with self._counted(f"{LOSS_PERCENT} % loss at node-1"):
            self._fault("node-1", "loss", str(LOSS_PERCENT))
            stage.event(f"node-1 loses {LOSS_PERCENT} % of what it is sent (compose.faults.yaml)")
            self._progress()
            dropped = self._fault("node-1", "clear")
        stage.check(" 0 packets" not in dropped, f"it was so, and writes went on: {dropped}")
        with self._counted("the cut between two nodes"):
            self._fault("node-1", "cut", "node-2")
            stage.event("node-1 and node-2 no longer reach one another; all else does")
            self._progress()
            dropped = self._fault("node-1", "clear")
            self._all_well()
        stage.check(" 0 packets" not in dropped, f"all is well again: {dropped}")
        try:
            self._fault("node-1", "delay", "20ms")
        except EngineError:
            stage.say("added latency is not tested: this kernel has no netem")
        else:
            with self._counted("20 ms of latency at node-1"):
                self._progress()
            self._fault("node-1", "clear")
            self._all_well()

    def _fault(self, service: str, *what: str) -> str:
        files = self._project.files
        self._project.files = [*files, "compose.faults.yaml"]
        try:
            said = self._project.compose("run", "--rm", "--no-deps", f"fault-{service}", *what)
            return said.splitlines()[-1] if said else ""
        finally:
            self._project.files = files

    def add_a_node(self) -> None:
        stage, cluster = self._stage, self._cluster
        stage.act("A fourth node")
        with self._counted("growing"):
            self._project.files.append("compose.node4.yaml")
            if self._project.secured:
                self._project.files.append("compose.node4.tls.yaml")
            self._project.compose("up", "--detach", "--no-deps", "--no-recreate", "node-4")
            cluster.services.append("node-4")
            cluster.wait_for(
                lambda s: s["nodes"].get("node-4", {}).get("status") == "active", "node-4 is there"
            )
            began = time.monotonic()
            cluster.administer("admin", "rebalance", "--yes", "--wait", timeout_s=180)
            status = self._all_well()
        held = {name: node["replicas"] for name, node in sorted(status["nodes"].items())}
        stage.check(
            held["node-4"] > 0 and not status["moving"],
            f"rebalanced in {time.monotonic() - began:.0f} s, replicas: "
            + ", ".join(f"{name} {number:,}" for name, number in held.items()),
        )

    def stop_and_start_each(self) -> None:
        stage, cluster = self._stage, self._cluster
        stage.act("Each server stopped (SIGTERM) and started again")
        for service in cluster.services:
            with self._counted(f"{service} stopped and started", spotless=True):
                self._project.compose("stop", service)
                self._project.compose("start", service)
                cluster.wait_serving(service)
                self._all_well()
            crashes = inspect(self._project.container(service), "{{.RestartCount}}")
            if crashes != "0":
                stage.check(False, f"{service} did not crash")

    def roll_all(self) -> None:
        stage, cluster = self._stage, self._cluster
        stage.act("A rolling restart: every container made anew, one after the other")
        before = {self._project.container(service) for service in cluster.services}
        with self._counted("the rolling restart", spotless=True):
            for line in cluster.restart_rolling().splitlines():
                stage.say(line)
            self._all_well()
        after = {self._project.container(service) for service in cluster.services}
        stage.check(not before & after, f"{len(after)} containers are new ones")

    def replace_certificates(self) -> None:
        stage, cluster = self._stage, self._cluster
        stage.act("All certificates renewed, and the authority replaced, without a restart")
        service = cluster.services[-1]
        before = cluster.certificate_of(service)
        for command in ("renew", "add", "issue", "drop"):
            with self._counted(f"certificates {command}", spotless=True):
                cluster.certificates(command)
                time.sleep(READ_AGAIN_S)
                self._progress()
        for name in cluster.services:
            cluster.wait_serving(name)
        after = cluster.certificate_of(service)
        stage.check(
            before["trusted"] != after["trusted"] and len(after["trusted"]) == 1,
            "all trust the new authority, and no other",
        )
        with self._counted("a node that meets all others anew", spotless=True):
            self._project.compose("stop", "node-1")
            self._project.compose("start", "node-1")
            cluster.wait_serving("node-1")
            self._all_well()

    def observe(self) -> None:
        stage = self._stage
        stage.act("Prometheus and Grafana (profile observe)")
        if not images.have_prometheus(stage.say):
            return
        self._project.compose("up", "--detach", "--no-deps", "prometheus")
        address = self._project.compose("port", "prometheus", "9090")
        servers = set(self._cluster.services)
        deadline = time.monotonic() + TARGETS_S
        up: set[str] = set()
        while up != servers and time.monotonic() < deadline:
            time.sleep(1.0)
            up = {series["metric"]["instance"].split(":")[0] for series in _query(address, "up==1")}
        stage.check(up == servers, f"Prometheus reads metrics of all {len(servers)} servers")
        led = _query(address, "sum(koinon_raft_is_leader)")
        stage.check(
            [series["value"][1] for series in led] == ["1"], "by them one coordinator leads"
        )
        if not images.have_grafana():
            stage.say(
                "Grafana is not tested: no registry is reached, and Debian has no package of it"
            )
            return
        self._project.compose("up", "--detach", "--no-deps", "grafana")

    def ingest(self) -> None:
        stage, cluster = self._stage, self._cluster
        stage.act("A bulk load by Spark (profile spark)")
        images.build_spark()
        stage.say(f"built the image with Spark ({images.size_mb(images.NAME + '-spark'):,.0f} MB)")
        if self._project.secured:
            self._project.compose("run", "--rm", "--no-deps", "-T", "spark-user")
            stage.say("made the user by whose token Spark loads")
        with self._counted("the bulk load"):
            began = time.monotonic()
            self._project.compose("run", "--rm", "--no-deps", "spark", timeout_s=SPARK_S)
            seconds = time.monotonic() - began
        value = cluster.administer("get", f"{SAMPLE_ROWS:09d}")
        stage.check(
            json.loads(value)["reading"] == f"{SAMPLE_ROWS:09d}",
            f"{SAMPLE_ROWS:,} rows loaded in {seconds:.0f} s, Spark's start included",
        )

    def judge(self) -> None:
        stage, cluster = self._stage, self._cluster
        stage.act("What is there")
        verdict = cluster.writers.ask("judge", 240.0)
        if "error" in verdict:
            raise EngineError(f"what was written cannot be read back: {verdict['error']}")
        stage.check(
            not verdict["lost_count"],
            f"{verdict['acknowledged']:,} keys were acknowledged, all are there"
            if not verdict["lost_count"]
            else f"{verdict['lost_count']} acknowledged keys are lost: {verdict['lost']}",
        )
        for violation in verdict["violations"]:
            stage.say(violation)
        stage.check(
            not verdict["violation_count"],
            f"{verdict['history']:,} reads and writes of {verdict['keys']} shared keys fit one copy"
            " of the data",
        )
        answer = cluster.administer("admin", "verify", "--json", timeout_s=120)
        copies = json.loads(answer)
        stage.check(
            copies["identical"] > 0 and not copies["different"] and not copies["not_comparable"],
            f"all copies of {copies['identical']:,} partitions are identical "
            f"({copies['records']:,} records)",
        )


def _without(service: str) -> Callable[[Status], bool]:
    """Return a check that the node leads nothing, and everything is served."""

    def holds(status: Status) -> bool:
        node = status["nodes"].get(service, {})
        return not node.get("primaries") and status["online"] == status["partitions"]

    return holds


def _query(address: str, expression: str) -> list[dict[str, Any]]:
    """Ask Prometheus; nothing while it does not answer."""
    url = f"http://{address}/api/v1/query?query={urllib.parse.quote(expression)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found
    except OSError:
        return []
