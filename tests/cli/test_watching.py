"""``koinon top`` and ``koinon admin hot``, as a terminal, a pipe and a program see them."""

from __future__ import annotations

import functools
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fcntl import ioctl
from typing import Any

import numpy as np
import pytest

from koinon.cli.console.terminal import Console
from koinon.cli.operate.top import picture
from koinon.client import Client
from koinon.local import LocalCluster
from koinon.operate.judge.dashboard import Observation, Overview, View
from koinon.operate.judge.hotspots import MEASURES, READS, NodeCounters
from koinon.operate.judge.remedies import key_text
from koinon.operate.traffic import Counters, running
from koinon_proto.contract.table import NodeId, NodeNumber, NodeStatus, Table
from tests.cli.terminal import on_terminal, read_until
from tests.client.operate.test_health import session, status_of, table_of, with_node
from tests.kit.forked import Forked
from tests.kit.waiting import wait_until

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def arguments_of(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "koinon.cli", *arguments]


def environment_of(cluster: LocalCluster) -> dict[str, Any]:
    return {**os.environ, "KOINON_COORDINATORS": cluster.coordinators, "TERM": "xterm"}


@pytest.fixture
def koinon(cluster: LocalCluster, forked: Forked) -> Run:
    """Runs ``koinon ARGS`` against the shared cluster."""
    return functools.partial(forked.koinon, **environment_of(cluster))


@contextmanager
def hot_reader(client: Client, key: bytes) -> Iterator[None]:
    """Read one key all the time, and others now and then."""
    ended = threading.Event()
    others = [b"watched/%d" % n for n in range(50)]

    def read() -> None:
        while not ended.is_set():
            client.get_many(others)
            for _ in range(20):
                client.get(key)

    client.put_many(dict.fromkeys([key, *others], b"v" * 100))
    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()


# --- hot ----------------------------------------------------------------------------------------


def test_hot_finds_the_key_that_makes_the_heat(koinon: Run, client: Client) -> None:
    home = client._engine.routing().partitioner.partition_of(b"watched/h\xf6t")
    primary = client.table().primary_of(home)
    assert primary is not None
    with hot_reader(client, b"watched/h\xf6t"):
        answer = json.loads(koinon("admin", "hot", "--seconds", "1.5", "--json").stdout)
        shown = koinon("admin", "hot", "--seconds", "1", "--by", "reads", "--partitions", "2")
    (first, *_) = answer["partitions"]
    assert (first["partition_id"], first["primary"]) == (home, primary.node_id)
    assert first["keys"][0]["key"] == {"base64": "d2F0Y2hlZC9o9nQ="}
    assert first["keys"][0]["share_of_partition"] > 0.5
    assert first["share"] > 0.1
    assert answer["skew"]["max_over_mean"] > 10
    assert answer["silent"] == {}
    assert answer["sampled"]["reads"]["taken"] > 0
    assert shown.returncode == 0, shown.stderr
    assert "counting on 3 nodes" in shown.stderr
    assert r"watched/h\xf6t" in shown.stdout
    assert "times the mean" in shown.stdout


def test_hot_without_traffic_says_so(koinon: Run) -> None:
    ended = koinon("admin", "hot", "--seconds", "0.2", "--by", "writes")
    assert ended.returncode == 0, ended.stderr
    assert "nothing is hot" in ended.stdout or "only" in ended.stdout


def test_long_keys_are_cut_where_people_look() -> None:
    assert key_text(b"k" * 100) == "k" * 47 + "…"
    assert key_text(b"a\nb") == r"a\nb"


# --- top ----------------------------------------------------------------------------------------


def busy_moment(koinon: Run) -> Any:
    """Return a moment in which there were reads; a busy machine has others too."""
    answer = json.loads(koinon("top", "--once", "--json").stdout)
    return answer if answer["total"]["reads_per_second"] > 0 else None


def test_top_once_shows_one_moment_with_rates(koinon: Run, client: Client) -> None:
    with hot_reader(client, b"watched/once"):
        answer = wait_until(functools.partial(busy_moment, koinon), "reads are seen")
        shown = koinon("top", "--once")
    assert [node["id"] for node in answer["nodes"]] == ["n1", "n2", "n3"]
    assert answer["total"]["reads_per_second"] > 0
    assert answer["hottest"][0]["reads_per_second"] > 0
    assert answer["leader_id"] in ("c1", "c2", "c3")
    assert answer["partitions"]["online"] == 1024
    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    assert "reads/s" in shown.stdout
    assert "PARTITION" in shown.stdout


def test_top_in_a_pipe_prints_moments_until_interrupted_and_that_is_a_success(
    cluster: LocalCluster,
) -> None:
    viewer = subprocess.Popen(
        arguments_of("top", "--json", "--interval", "0.2"),
        env=environment_of(cluster),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert viewer.stdout is not None
        assert viewer.stderr is not None
        moments = [json.loads(viewer.stdout.readline()) for _ in range(2)]
        viewer.send_signal(signal.SIGINT)
        assert viewer.wait(120) == 0, viewer.stderr.read()
    finally:
        viewer.kill()
        viewer.communicate()
    assert moments[1]["at_ms"] > moments[0]["at_ms"]


@pytest.mark.parametrize("end", [b"q", b"\x03"])
def test_top_on_a_terminal_draws_a_screen_and_leaves_it_clean(
    cluster: LocalCluster, end: bytes
) -> None:
    here, there = pty.openpty()
    ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(there)
    environment = {
        k: v for k, v in environment_of(cluster).items() if k not in ("COLUMNS", "LINES")
    }
    arguments = arguments_of("top", "--interval", "0.3")
    with on_terminal(arguments, (here, there), environment) as viewer:
        written = read_until(here, b"reads/s")
        os.write(here, end)
        written += read_until(here, b"\x1b[?1049l")
        assert viewer.wait(120) == 0, written
        assert termios.tcgetattr(there)[3] == before[3]
    assert b"\x1b[?1049h" in written
    assert b"Traceback" not in written


def test_top_without_a_cluster_ends_with_3(koinon: Run) -> None:
    ended = koinon("top", "--coordinators", "127.0.0.1:9", "--timeout", "300ms")
    assert ended.returncode == 3
    assert "Is the cluster up?" in ended.stderr


# --- how it fits ---------------------------------------------------------------------------------


def many_nodes(count: int) -> Table:
    table = table_of()
    info = table.nodes[NodeNumber(1)]
    nodes = {
        NodeNumber(n): replace(info, number=NodeNumber(n), node_id=NodeId(f"n{n}"))
        for n in range(1, count + 1)
    }
    return replace(table, nodes=nodes)


@pytest.mark.parametrize("status", [NodeStatus.FENCED, NodeStatus.LEFT])
def test_node_that_does_not_run_is_not_counted_on(status: NodeStatus) -> None:
    asked = running(with_node(many_nodes(3), 2, status=status))
    assert [node.node_id for node in asked] == ["n1", "n3"]


def view_of(table: Table) -> View:
    counts = np.zeros((MEASURES, len(table.rows)))
    later = counts.copy()
    later[READS] = 1_234_567
    overview = Overview()
    numbers = [int(number) for number in table.nodes]
    status = status_of(table, sessions=tuple(session(number, 0.5) for number in numbers))
    for elapsed_s, columns in ((1.0, counts), (2.0, later)):
        nodes = {n: NodeCounters(elapsed_s=elapsed_s, counts=columns) for n in numbers}
        seen: dict[str, Any] = {"counters": Counters(nodes=nodes), "status": status}
        view = overview.update(Observation(at=elapsed_s, unix_s=elapsed_s, **seen))
    return view


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (60, 15), (200, 24)])
@pytest.mark.parametrize("nodes", [3, 40])
def test_top_fits_the_terminal(width: int, height: int, nodes: int) -> None:
    table = with_node(many_nodes(nodes), nodes, status=NodeStatus.FENCED)
    printer = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    with printer.capture() as capture:
        printer.print(picture(view_of(table), printer, height))
    lines = capture.get().splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("Attention: node")
    assert any(f"n{nodes} " in line and "down" in line for line in lines)
    shown = sum(line.startswith("n") and "active" in line for line in lines)
    if shown < nodes - 1:
        assert any(line.startswith("… and ") for line in lines)
    if height >= 24:
        assert any(line.lstrip().startswith("PARTITION") for line in lines)
        assert "HEARD" in capture.get() or width < 100
