"""up and down: start and stop a whole cluster on this machine."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer

from koinon.cli.console import output
from koinon.cli.console.command import INTERRUPTED, NOT_FOUND, Session, command
from koinon.cli.console.reply import Column, Reply, Styled, Table
from koinon.cli.console.signals import StopSignals
from koinon.cli.console.which_cluster import DATA_VARIABLE, data_directory, default_data_dir
from koinon.cli.operate.status import status_blocks
from koinon.local.cluster_files import LocalClusterError, running_cluster
from koinon.local.local_cluster import LocalCluster
from koinon.local.members import Ports, Setup
from koinon.local.processes import ProcessState, state_of, stop_owner
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.answers import StatusAnswer, status_answer
from koinon.operate.wording import count, duration_text, listed
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.contract.table import NodeStatus

root = typer.Typer()
PANEL = "Local cluster"
FIRST_COORDINATOR_PORT = 7400
FIRST_NODE_PORT = 7500
READY_TIMEOUT_S = 60.0
OWNER_STOP_TIMEOUT_S = 20.0
WATCH_S = 0.5
FEW_NODES = 3


def _directory(text: str) -> Path:
    if not text:
        raise typer.BadParameter("is empty: give it a value, or leave the option out")
    return Path(text)


DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar=DATA_VARIABLE,
        parser=_directory,
        metavar="PATH",
        help="Where it keeps its data (default ~/.local/share/koinon/local).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The options for the members and settings of a local cluster."""

    nodes: Annotated[int | None, typer.Option(min=1, help="Storage nodes (default 3).")] = None
    coordinators: Annotated[
        int | None,
        typer.Option("--coordinators", min=1, help="Coordinators, an odd number (default 3)."),
    ] = None
    replication_factor: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Copies of each partition of a new cluster (default 3, or as many as nodes).",
        ),
    ] = None
    metrics: Annotated[
        bool | None,
        typer.Option(
            "--metrics/--no-metrics",
            help="Serve each process's metrics over HTTP, for Prometheus (default: as last time).",
        ),
    ] = None
    tls: Annotated[
        bool | None,
        typer.Option(
            "--tls/--no-tls",
            help="Make certificates, and accept only callers with one (default: as last time). "
            "'koinon' on this machine then is the user root.",
        ),
    ] = None
    partitioner: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How a new cluster hashes keys: murmur2 (default), md5, or crc16, which clients "
            "of Redis Cluster need.",
        ),
    ] = None
    router: Annotated[
        str | None,
        typer.Option(
            metavar="ROUTER",
            help="What of a key is hashed: whole, until:XX[,N] (all before the N-th byte XX: "
            "until:2f is 'before the first slash'), tag, first:N or h3:RES. Keys that have it in "
            "common lie together (default: the whole key).",
        ),
    ] = None
    redis_keyspaces: Annotated[
        list[str] | None,
        typer.Option(
            "--redis-keyspace",
            metavar="NAME",
            help="Give each node a port for clients of Redis in this keyspace, too; may be "
            "repeated (default: as last time).",
        ),
    ] = None
    resp_proxy: Annotated[
        bool,
        typer.Option(
            "--resp-proxy",
            help="Have each node of a new cluster serve every key to clients of Redis that know a "
            "single server (koinon node --resp-proxy); the cluster keeps it.",
        ),
    ] = False

    def cluster(self, directory: Path) -> LocalCluster:
        """Return the cluster of the directory, new or as it was; it is not started."""
        setup = Setup(
            replication_factor=self.replication_factor,
            partitioner=self.partitioner,
            router=self.router,
            node_flags=["--resp-proxy"] if self.resp_proxy else (),
        )
        ports = Ports(
            first_coordinator=FIRST_COORDINATOR_PORT,
            first_node=FIRST_NODE_PORT,
            metrics=self.metrics,
            redis_keyspaces=self.redis_keyspaces or (),
        )
        return LocalCluster(
            directory,
            nodes=self.nodes,
            coordinators=self.coordinators,
            tls=self.tls,
            setup=setup,
            ports=ports,
        )


@command(
    root,
    panel=PANEL,
    connects=False,
    examples=[
        "up                      (until Ctrl-C)",
        "up --detach --nodes 5",
        "up --data ./mine        (a cluster of its own)",
        "up --tls                (with certificates)",
    ],
)
def up(
    session: Session,
    *,
    shape: Shape,
    data: DataDir = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Let it run on; 'koinon down' stops it.")
    ] = False,
) -> int | None:
    """Start a cluster on this machine, with a process for each coordinator and node.

    Without --detach it runs until Ctrl-C. The data stays: 'up' on the same directory brings the
    same cluster back, at the same addresses, and starts those of its members that are not running.
    """
    directory = data_directory(data)
    cluster = shape.cluster(directory)
    serving = False
    with StopSignals() as stopping:
        try:
            status = _start(cluster, detach=detach, quiet=session.json)
            serving = True
            if waiting := cluster.waiting_for_restart:
                output.note(
                    f"{listed(waiting)} ran already: metrics and ports for Redis are as "
                    "asked from the next start on ('koinon down', then 'koinon up')"
                )
            with stopping.deferred():
                _tell_started(session, cluster, status, detach=detach)
                if not detach:
                    _watch(cluster, stopping)
        except KeyboardInterrupt:
            if not session.json:
                output.note("stopping…")
        finally:
            if detach and not serving:
                cluster.undo_start()
            cluster.close()
    if not (detach and serving) and not session.json:
        output.note(f"stopped; the data stays in {directory}")
    return None if serving else INTERRUPTED


def _start(cluster: LocalCluster, *, detach: bool, quiet: bool) -> ClusterStatus:
    coordinators, nodes = cluster.coordinator_names, cluster.node_names
    what = f"{count(len(coordinators), 'coordinator')} and {count(len(nodes), 'node')}"
    if quiet:
        cluster.start(detached=detach)
        return cluster.wait_ready(READY_TIMEOUT_S)
    printer = output.console(stderr=True)
    known = cluster.names
    with printer.status(f"starting {what}…"):
        began = time.monotonic()
        ran = set(known) - set(cluster.start(detached=detach))
        status = cluster.wait_ready(READY_TIMEOUT_S)
    started = [name for name in cluster.names if name not in ran]
    if left := [name for name in known if name not in cluster.names]:
        verb = "has" if len(left) == 1 else "have"
        output.note(f"{listed(left)} {verb} left the cluster for good: not started again")
    whole = what if set(cluster.names) == set(known) else listed(cluster.names)
    if not started:
        output.note(f"{whole} run already")
    else:
        some = f"{listed(started)} (the rest ran already)" if ran else whole
        output.note(f"started {some} in {duration_text(time.monotonic() - began)}")
    return status


def _tell_started(
    session: Session, cluster: LocalCluster, status: ClusterStatus, *, detach: bool
) -> None:
    ended = "the cluster runs" if detach else "the cluster was started and is stopped again"
    found = status_answer(status)
    blocks = [
        *status_blocks(status, found),
        "",
        Table(HINTS, _hints(cluster, detach=detach), False),
    ]
    reply = Reply(_up_answer(cluster, found), blocks, done=f"{ended}: its status")
    reply.write(as_json=session.json)
    if not session.json:
        _warn_of_few_nodes(status)


HINTS = (Column("", lambda row: Styled(row[0], "dim")), Column("", itemgetter(1)))


def _hints(cluster: LocalCluster, *, detach: bool) -> list[tuple[str, str]]:
    """Return pairs of a purpose and a command: how to use the cluster, and how to stop it."""
    ours = shlex.quote(str(cluster.data_dir))
    elsewhere = cluster.data_dir != default_data_dir().resolve()
    known = not elsewhere or os.environ.get(DATA_VARIABLE) == str(cluster.data_dir)
    prefix, suffix = ("", "") if known else (f"KOINON_DATA={ours} ", f" --data {ours}")
    identity = cluster.tls_bundle
    bundle = f', tls_bundle="{identity}"' if identity else ""
    hints = [
        ("data and logs", str(cluster.data_dir)),
        ("shell", f"{prefix}koinon put greeting hello"),
        ("", f"{prefix}koinon get greeting"),
        ("python", f'koinon.connect("{cluster.coordinators}"{bundle})'),
    ]
    if identity:
        hints.append(("certificates", f"koinon certs check {Path(identity).parent}"))
    return [*hints, *_guests(cluster), ("stop", f"koinon down{suffix}" if detach else "Ctrl-C")]


def _guests(cluster: LocalCluster) -> Iterator[tuple[str, str]]:
    """Yield pairs of a program and a command or address: how other programs reach the cluster."""
    file = shlex.quote(cluster.tls_bundle)
    redis, web = ("rediss", "https") if cluster.tls_bundle else ("redis", "http")
    options = f" --tls --cacert {file} --cert {file} --key {file}" if cluster.tls_bundle else ""
    for keyspace in (DEFAULT, *cluster.redis_keyspaces):
        names = cluster.node_names
        guests = [a for name in names if (a := cluster.redis_address(name, keyspace))]
        if guests:
            label = "redis" if keyspace == DEFAULT else f"redis, {keyspace}"
            yield label, f"redis-cli -c{options} -u {redis}://{guests[0]}"
        yield from (("", address) for address in guests)
    metrics = [a for name in cluster.names if (a := cluster.metrics_address(name))]
    for number, address in enumerate(metrics):
        yield "" if number else "metrics", f"{web}://{address}/metrics"


def _warn_of_few_nodes(status: ClusterStatus) -> None:
    table = status.table
    assert table is not None, "the cluster is ready"
    nodes = sum(node.status is not NodeStatus.LEFT for node in table.nodes.values())
    copies = table.cluster.replication_factor
    if nodes >= FEW_NODES:
        return
    each = count(copies, "copy")
    lost = "a node that is down takes its partitions along until it returns"
    if copies > 1:
        lost = "while one is down, a second failure may lose the writes made meanwhile"
    output.console(stderr=True).print(
        f"[yellow]Few nodes:[/] {count(nodes, 'node')}, {each} of each partition: {lost}. "
        "Three nodes keep three copies, and survive any one failure.",
        soft_wrap=True,
    )


@dataclass(frozen=True, kw_only=True)
class MemberAnswer:
    """One process of the cluster; an address is '' if the process has no such port."""

    address: str
    pid: int | None
    metrics: str
    redis: str
    redis_keyspaces: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class UpAnswer:
    """A running local cluster."""

    data: str
    coordinators: str
    tls_bundle: str | None
    members: dict[str, MemberAnswer]
    status: StatusAnswer


def _up_answer(cluster: LocalCluster, status: StatusAnswer) -> UpAnswer:
    return UpAnswer(
        data=str(cluster.data_dir),
        coordinators=cluster.coordinators,
        tls_bundle=cluster.tls_bundle or None,
        members={
            name: MemberAnswer(
                address=cluster.address(name),
                pid=cluster.pid(name),
                metrics=cluster.metrics_address(name),
                redis=cluster.redis_address(name),
                redis_keyspaces={
                    keyspace: cluster.redis_address(name, keyspace)
                    for keyspace in cluster.redis_keyspaces
                },
            )
            for name in cluster.names
        },
        status=status,
    )


def _watch(cluster: LocalCluster, stopping: StopSignals) -> None:
    """Wait until a signal asks to stop; report each member that dies."""
    down: set[str] = set()
    while not stopping.wait(WATCH_S):
        states = cluster.states
        now_down = {name for name, state in states.items() if state is ProcessState.STOPPED}
        for name in sorted(now_down - down):
            output.problem(
                f"{name} is gone: see {cluster.log_path(name)}\n"
                "  Ctrl-C and 'koinon up' again start it anew."
            )
        down = now_down
        if len(down) == len(states):
            raise LocalClusterError(reason="every process of the cluster is gone")


@command(root, panel=PANEL, connects=False)
def down(session: Session, *, data: DataDir = None) -> Reply:
    """Stop the local cluster. Its data stays."""
    directory = data_directory(data)
    running = running_cluster(directory)
    if running is None:
        if not session.json:
            output.problem(f"no cluster runs on {directory}")
        return Reply({"data": str(directory), "stopped": []}, code=NOT_FOUND)
    names = [
        name
        for name, identity in running.processes.items()
        if state_of(identity) is not ProcessState.STOPPED
    ]
    if running.detached:
        cluster = LocalCluster.attach(directory)
        try:
            cluster.stop()
        finally:
            cluster.close()
    elif running.owner is None or not stop_owner(running.owner, OWNER_STOP_TIMEOUT_S):
        raise LocalClusterError(reason=f"the cluster on {directory} belongs to a running program")
    return Reply(
        {"data": str(directory), "stopped": names},
        f"Stopped {listed(names)}. The data stays in {directory}; 'koinon up' brings the cluster "
        "back.",
        done=f"the cluster on {directory} was stopped, but this result",
    )
