"""An id is followed from a client through the logs of real nodes and coordinators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import koinon
from koinon.local import LocalCluster, Setup
from koinon.operate.loads_client import LoadsClient
from koinon_proto.contract.cluster_errors import LoadClosedError
from koinon_proto.partitioner import partitioner
from tests.integration.copies import is_settled
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until

FLAGS = ["--log-format", "json", "--log-level", "DEBUG", "--slow-request-ms", "600"]
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with running_cluster(
        nodes=2,
        coordinators=1,
        setup=Setup(coordinator_flags=["--partitions", "16", *FLAGS], node_flags=FLAGS),
    ) as running:
        running.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all replicas are in sync")
        yield running


def lines_of(path: Path, request_id: str) -> list[dict[str, Any]]:
    """Return what a process has logged under an id."""
    documents = (json.loads(line) for line in path.read_text().splitlines() if line[:1] == "{")
    return [document for document in documents if document.get("request_id") == request_id]


def test_slow_write_is_found_in_the_logs_of_its_node_and_of_the_coordinator(
    cluster: LocalCluster,
) -> None:
    with cluster.client(timeout_ms=30_000) as client:
        client.put(b"order", b"open")
        table = client.table()
        cluster_config = table.cluster
        known = partitioner(cluster_config.partitioner, cluster_config.partition_count)
        primary = table.rows[known.partition_of(b"order")].primary
        name = table.nodes[primary].node_id
        (backup,) = {"n1", "n2"} - {name}
        cluster.pause(backup)
        try:
            with koinon.request_id("order-4711"):
                client.put(b"order", b"paid")  # waits until the backup is put out
        finally:
            cluster.resume(backup)

    def slow() -> list[dict[str, Any]]:
        lines = lines_of(cluster.log_path(name), "order-4711")
        return [line for line in lines if line["event"] == "slow request"]

    line = wait_until(slow, "the node tells of the slow write")[0]
    assert line["method"] == "Redis/KOINON.PUT"
    assert line["level"] == "WARNING"
    assert line["took_ms"] >= 600
    assert (line["component"], line["component_id"], line["call"]) == ("node", name, 1)
    # Meanwhile the client has asked who serves the partition now.
    asked = wait_until(
        lambda: lines_of(cluster.log_path("c1"), "order-4711"), "the coordinator was asked"
    )
    assert {line["method"] for line in asked} == {"TableService/GetTable"}
    assert (asked[0]["component"], asked[0]["component_id"]) == ("coordinator", "c1")
    assert asked[0]["call"] > 1


def test_error_names_the_id_under_which_the_servers_tell_why(cluster: LocalCluster) -> None:
    with LoadsClient(cluster.coordinators) as loads, pytest.raises(LoadClosedError) as caught:
        loads.abort(4711)
    lines = wait_until(
        lambda: [
            line
            for line in lines_of(cluster.log_path("c1"), caught.value.request_id)
            if line.get("method") == "Loads/AbortLoad"
        ],
        "the coordinator tells of the refusal",
    )
    assert lines[0]["outcome"] == "load_closed"
    assert lines[0]["error"] == str(caught.value)


def test_nodes_name_what_they_ask_of_the_coordinator(cluster: LocalCluster) -> None:
    lines = (json.loads(x) for x in cluster.log_path("c1").read_text().splitlines() if x[0] == "{")
    ended = [line for line in lines if line["event"] == "request ended"]
    registered = [line for line in ended if line["method"] == "Membership/Register"]
    assert len({line["request_id"] for line in registered}) >= 2
