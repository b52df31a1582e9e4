"""Every process of a cluster is scraped: names as docs/metrics.md has them, how values move."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from koinon.client import Client
from koinon.local import LocalCluster, Ports, Setup
from koinon.operate.admin import Admin
from koinon.operate.plans import PlanKind, PlanRequest
from tests.integration.copies import is_settled
from tests.integration.loading import Load, rows_of
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until
from tests.scraping import Scrape, scrape

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
PARTITIONS = 64
REBALANCE = PlanRequest(kind=PlanKind.REBALANCE)
KEYS = [b"key-%d" % n for n in range(500)]
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with running_cluster(
        setup=Setup(coordinator_flags=["--partitions", str(PARTITIONS)]), ports=Ports(metrics=True)
    ) as running:
        running.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all replicas are in sync")
        yield running


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with cluster.client() as connected:
        connected.put_many(dict.fromkeys(KEYS, b"value"))
        yield connected


def scrapes(cluster: LocalCluster, names: list[str]) -> list[Scrape]:
    """Scrape the processes that run."""
    return [scrape(cluster.metrics_address(name)) for name in names if cluster.pid(name)]


def total(cluster: LocalCluster, names: list[str], metric: str, **labels: str) -> float:
    return sum(one.sum(metric, **labels) for one in scrapes(cluster, names))


def documented() -> dict[str, tuple[str, set[str], set[str]]]:
    """Return (type, labels, kinds of process) by name, as the document's tables have them."""
    found: dict[str, tuple[str, set[str], set[str]]] = {}
    kinds: set[str] = set()
    sections = {"Both": {"node", "coordinator"}, "Nodes": {"node"}, "Coordinators": {"coordinator"}}
    for line in DOCUMENT.read_text("utf-8").splitlines():
        if line.startswith("## "):
            kinds = sections.get(line.split()[1], set())
        row = re.fullmatch(r"\| `(koinon_\w+)` \| (\w+) \| ([\w, ]*) ?\| .+ \|", line)
        if row is not None:
            labels = {label.strip() for label in row[3].split(",")} - {""}
            assert row[1] not in found, f"documented twice: {row[1]}"
            found[row[1]] = row[2], labels, kinds
    return found


def exported(cluster: LocalCluster) -> dict[str, tuple[str, set[str], set[str]]]:
    """Return the same of what processes export."""
    found: dict[str, tuple[str, set[str], set[str]]] = {}
    for kind, names in (
        ("node", cluster.node_names),
        ("coordinator", cluster.coordinator_names),
    ):
        for one in scrapes(cluster, names):
            for name, type_ in one.types.items():
                if name.startswith("koinon_"):
                    _, labels, kinds = found.setdefault(name, (type_, set(), set()))
                    labels |= one.labels(name)
                    kinds.add(kind)
    return found


def test_document_lists_exactly_what_is_exported(cluster: LocalCluster, client: Client) -> None:
    assert client.get(KEYS[0]) == b"value"
    with Admin(cluster.coordinators) as admin, client.group("metrics") as consumers:
        next(iter(consumers))  # there is a group
        admin.keyspaces.alter("default", max_rows_per_s=10**9)  # what is told of limits
        told, found = documented(), exported(cluster)
        admin.keyspaces.alter("default", max_rows_per_s=0)
    del told["koinon_certificate_expiry_timestamp_seconds"]  # only with certificates
    assert sorted(told.keys() - found.keys()) == [], "documented, not exported"
    assert sorted(found.keys() - told.keys()) == [], "exported, not documented"
    for name, of in told.items():
        assert found[name] == of, name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
def test_promtool_finds_no_fault_with_any_process(cluster: LocalCluster, client: Client) -> None:
    for name in cluster.names:
        text = scrape(cluster.metrics_address(name)).text
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, ""), name


def test_nodes_follow_one_another(cluster: LocalCluster) -> None:
    wait_until(
        lambda: total(cluster, cluster.node_names, "koinon_follower_streams") == 6,
        "each of three nodes follows the two others",
    )


def test_puts_and_gets_are_counted_once_over_all_nodes(
    cluster: LocalCluster, client: Client
) -> None:
    metrics: tuple[tuple[str, dict[str, str], int], ...] = (
        ("koinon_rows_total", {"operation": "put", "outcome": "ok"}, 100),
        ("koinon_rows_total", {"operation": "get", "outcome": "ok"}, 100),
        ("koinon_partition_writes_total", {}, 100),
        ("koinon_partition_reads_total", {}, 100),
        ("koinon_row_bytes_total", {"operation": "put"}, 500),
        ("koinon_requests_total", {"method": "BatchWrite", "outcome": "ok"}, 1),
        ("koinon_requests_total", {"method": "KOINON.GETMANY", "outcome": "ok"}, 1),
    )
    nodes = cluster.node_names
    before = [total(cluster, nodes, name, **labels) for name, labels, _ in metrics]
    keys = [b"counted-%d" % n for n in range(100)]
    client.put_many(dict.fromkeys(keys, b"value"))
    client.get_many(keys)
    for (name, labels, grown), then in zip(metrics, before, strict=True):
        wait_until(
            partial(has_grown, cluster, name, labels, then + grown), f"{name} {labels} is counted"
        )
        if name.startswith("koinon_partition"):
            assert total(cluster, nodes, name, **labels) - then == grown, (name, labels)


def has_grown(cluster: LocalCluster, name: str, labels: dict[str, str], least: float) -> bool:
    return total(cluster, cluster.node_names, name, **labels) >= least


def test_every_copy_is_told_by_role_and_every_replica_by_the_coordinators(
    cluster: LocalCluster, client: Client
) -> None:
    expected: tuple[tuple[list[str], str, dict[str, str], int], ...] = (
        (cluster.node_names, "koinon_partitions", {"role": "primary"}, PARTITIONS),
        (cluster.node_names, "koinon_partitions", {"role": "backup"}, 2 * PARTITIONS),
        (cluster.node_names, "koinon_in_sync_replicas", {"size": "3"}, PARTITIONS),
        *(
            ([name], metric, labels, value)
            for name in cluster.coordinator_names
            for metric, labels, value in (
                ("koinon_cluster_partitions", {"status": "online"}, PARTITIONS),
                ("koinon_cluster_node_partitions", {"role": "replica"}, 3 * PARTITIONS),
                ("koinon_cluster_nodes", {"status": "active"}, 3),
                ("koinon_cluster_under_replicated_partitions", {}, 0),
            )
        ),
        (cluster.coordinator_names, "koinon_raft_is_leader", {}, 1),
        (cluster.coordinator_names, "koinon_sessions", {"state": "live"}, 3),
    )
    for names, metric, labels, value in expected:  # members hear of the last step one by one
        wait_until(partial(shows, cluster, names, metric, labels, value), f"{metric} {labels}")


def shows(
    cluster: LocalCluster, names: list[str], metric: str, labels: dict[str, str], value: float
) -> bool:
    return total(cluster, names, metric, **labels) == value


def test_load_shows_on_nodes_and_coordinators(cluster: LocalCluster, client: Client) -> None:
    rows = rows_of("load", 2_000)
    load = Load(cluster, rows)
    reports = load.stage()
    nodes = cluster.node_names
    assert total(cluster, nodes, "koinon_staged_rows_total") == 2_000
    assert total(cluster, nodes, "koinon_staged_bytes_total") > 100_000
    wait_until(
        lambda: total(cluster, cluster.coordinator_names, "koinon_loads", state="open") == 3,
        "each coordinator tells of the load",
    )
    load.commit(reports)
    wait_until(
        lambda: total(cluster, nodes, "koinon_merged_rows_total") == 2_000, "all rows are merged"
    )


def test_killed_node_and_killed_leader_show(cluster: LocalCluster, client: Client) -> None:
    coordinators = cluster.coordinator_names
    before = total(cluster, coordinators, "koinon_fences_total")
    cluster.kill("n3")
    wait_until(
        lambda: all(
            one.sum("koinon_cluster_under_replicated_partitions") == PARTITIONS
            and one.sum("koinon_cluster_nodes", status="fenced") == 1
            for one in scrapes(cluster, coordinators)
        ),
        "every partition lacks a copy",
    )
    wait_until(
        lambda: total(cluster, coordinators, "koinon_fences_total") == before + 1, "it is counted"
    )
    wait_until(
        lambda: total(cluster, coordinators, "koinon_sessions", state="silent") == 1, "it is silent"
    )
    client.put_many(dict.fromkeys(KEYS, b"while it is away"))
    pulled_before, served_before = copied(cluster)
    cluster.restart("n3")
    cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all replicas are in sync")
    wait_until(
        lambda: total(cluster, coordinators, "koinon_cluster_under_replicated_partitions") == 0,
        "no partition lacks a copy",
    )
    pulled, served = copied(cluster)
    assert pulled > pulled_before
    assert served - served_before >= pulled - pulled_before

    leader = wait_until(cluster.leader, "one leads")
    others = [name for name in coordinators if name != leader]
    changes = {
        name: scrape(cluster.metrics_address(name)).sum("koinon_raft_leader_changes_total")
        for name in others
    }
    cluster.kill(leader)
    wait_until(lambda: total(cluster, others, "koinon_raft_is_leader") == 1, "another one leads")
    wait_until(
        lambda: all(
            scrape(cluster.metrics_address(name)).sum("koinon_raft_leader_changes_total")
            > changes[name]
            for name in others
        ),
        "both have heard of it",
    )
    assert total(cluster, others, "koinon_raft_elections_started_total") >= 1
    cluster.restart(leader)


def copied(cluster: LocalCluster) -> tuple[float, float]:
    """Return the bytes of copies that were pulled, and those that were served, on all nodes."""
    pulled, served = (
        total(cluster, cluster.node_names, "koinon_copied_bytes_total", direction=direction)
        for direction in ("pulled", "served")
    )
    return pulled, served


def test_moves_show_while_they_wait_and_are_gone_when_done(
    cluster: LocalCluster, client: Client
) -> None:
    name = cluster.add_node()
    cluster.wait_for(
        lambda s: s.table is not None and name in s.table.by_id,
        timeout_s=TIMEOUT_S,
        what="it joins",
    )
    leader = wait_until(cluster.leader, "one leads")
    address = cluster.metrics_address(leader)
    with Admin(cluster.coordinators) as admin:
        admin.set_moves(paused=True)
        plan = admin.plan(REBALANCE)
        admin.execute(REBALANCE, plan.plan_id)
        assert plan.moves
        wait_until(
            lambda: scrape(address).sum("koinon_moves", state="queued") == len(plan.moves),
            "they are queued",
        )
        assert "koinon_moves_eta_seconds" not in scrape(address).samples
        admin.set_moves(paused=False)
        wait_until(lambda: scrape(address).sum("koinon_moves") == 0, "all moves are done")
    cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all replicas are in sync")
    found = scrape(cluster.metrics_address(name))
    assert found.sum("koinon_copied_bytes_total", direction="pulled") > 0
    wait_until(
        lambda: scrape(address).samples.get("koinon_moves_eta_seconds") == {frozenset(): 0},
        "nothing is left",
    )
    hosted = scrape(address).sum("koinon_cluster_node_partitions", node=name, role="replica")
    assert hosted > 0
    wait_until(
        lambda: scrape(cluster.metrics_address(name)).sum("koinon_partitions") == hosted,
        "the new node tells of them",
    )
