"""up and down: a whole cluster on this machine."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.session import INTERRUPTED, NOT_FOUND, Session, command, default_data_dir
from koinon.cli.console.signals import StopSignals
from koinon.cli.operate.admin import print_status, status_json
from koinon.local.cluster import LocalCluster
from koinon.local.files import LocalClusterError, running_cluster
from koinon.local.processes import ProcessState, state_of, stop_owner
from koinon.operate.admin import ClusterStatus
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.contract.table import NodeStatus

if TYPE_CHECKING:
    from rich.table import Table as RichTable

PANEL = "Local cluster"
FIRST_COORDINATOR_PORT = 7400
FIRST_NODE_PORT = 7500
READY_TIMEOUT_S = 60.0
OWNER_STOP_TIMEOUT_S = 20.0
WATCH_S = 0.5
FEW_NODES = 3

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="KOINON_DATA",
        help="Where it keeps its data (default ~/.local/share/koinon/local).",
    ),
]


def up(
    session: Session,
    *,
    nodes: Annotated[int | None, typer.Option(min=1, help="Storage nodes (default 3).")] = None,
    coordinators: Annotated[
        int | None,
        typer.Option("--coordinators", min=1, help="Coordinators, an odd number (default 3)."),
    ] = None,
    replication_factor: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Copies of each partition of a new cluster (default 3, or as many as nodes).",
        ),
    ] = None,
    metrics: Annotated[
        bool | None,
        typer.Option(
            "--metrics/--no-metrics",
            help="Serve each process's metrics over HTTP, for Prometheus (default: as last time).",
        ),
    ] = None,
    tls: Annotated[
        bool | None,
        typer.Option(
            "--tls/--no-tls",
            help="Make certificates, and take only who shows one (default: as last time). "
            "'koinon' on this machine then is the user root.",
        ),
    ] = None,
    partitioner: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How a new cluster hashes keys: murmur2 (default), md5, or crc16, which clients "
            "of Redis Cluster need.",
        ),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="ROUTER",
            help="What of a key is hashed: whole, until:XX[,N] (all before the N-th byte XX: "
            "until:2f is 'before the first slash'), tag, first:N or h3:RES. Keys that have it in "
            "common lie together (default: the whole key).",
        ),
    ] = None,
    redis_keyspaces: Annotated[
        list[str] | None,
        typer.Option(
            "--redis-keyspace",
            metavar="NAME",
            help="Give each node a port for clients of Redis in this keyspace, too; may be "
            "repeated (default: as last time).",
        ),
    ] = None,
    data: DataDir = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Let it run on; 'koinon down' stops it.")
    ] = False,
) -> int | None:
    """Start a cluster on this machine, each coordinator and node a process of its own.

    Without --detach it runs until Ctrl-C. The data stays: 'up' on the same directory brings the
    same cluster back, at the same addresses, and starts whichever of its members do not run.
    """
    directory = data or default_data_dir()
    cluster = LocalCluster(
        directory,
        nodes=nodes,
        coordinators=coordinators,
        replication_factor=replication_factor,
        partitioner=partitioner,
        router=router,
        detached=detach,
        coordinator_port=FIRST_COORDINATOR_PORT,
        node_port=FIRST_NODE_PORT,
        metrics=metrics,
        tls=tls,
        redis_keyspaces=redis_keyspaces or (),
    )
    serving = False
    with StopSignals() as stopping:
        try:
            status = _start(cluster, quiet=session.json)
            serving = True
            with stopping.deferred():
                if session.json:
                    output.print_json(_up_json(cluster, status))
                else:
                    _welcome(cluster, status, detach=detach)
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


def _start(cluster: LocalCluster, *, quiet: bool) -> ClusterStatus:
    coordinators, nodes = cluster.coordinator_names, cluster.node_names
    what = (
        f"{output.count(len(coordinators), 'coordinator')} and {output.count(len(nodes), 'node')}"
    )
    if quiet:
        cluster.start()
        return cluster.wait_ready(READY_TIMEOUT_S)
    printer = output.console(stderr=True)
    known = cluster.names
    with printer.status(f"starting {what}…"):
        began = time.monotonic()
        ran = set(known) - set(cluster.start())
        status = cluster.wait_ready(READY_TIMEOUT_S)
    started = [name for name in cluster.names if name not in ran]
    if left := [name for name in known if name not in cluster.names]:
        verb = "has" if len(left) == 1 else "have"
        output.note(f"{output.listed(left)} {verb} left the cluster for good: not started again")
    whole = what if set(cluster.names) == set(known) else output.listed(cluster.names)
    if not started:
        output.note(f"{whole} run already")
    else:
        some = f"{output.listed(started)} (the rest ran already)" if ran else whole
        output.note(f"started {some} in {output.duration_text(time.monotonic() - began)}")
    return status


def _welcome(cluster: LocalCluster, status: ClusterStatus, *, detach: bool) -> None:
    print_status(status)
    _warn_of_few_nodes(status)
    printer = output.console()
    printer.print()
    hints = output.table("", "")
    hints.show_header = False
    hints.add_row("[dim]data and logs[/]", output.escape(str(cluster.data_dir)))
    ours = output.escape(shlex.quote(str(cluster.data_dir)))
    elsewhere = cluster.data_dir != default_data_dir().resolve()
    known = not elsewhere or os.environ.get("KOINON_DATA") == str(cluster.data_dir)
    prefix, suffix = ("", "") if known else (f"KOINON_DATA={ours} ", f" --data {ours}")
    hints.add_row("[dim]shell[/]", f"{prefix}koinon put greeting hello")
    hints.add_row("", f"{prefix}koinon get greeting")
    identity = output.escape(cluster.tls_bundle)
    bundle = f', tls_bundle="{identity}"' if identity else ""
    hints.add_row("[dim]python[/]", f'koinon.connect("{cluster.coordinators}"{bundle})')
    if identity:
        directory = output.escape(str(Path(cluster.tls_bundle).parent))
        hints.add_row("[dim]certificates[/]", f"koinon certs check {directory}")
    _add_guests(hints, cluster)
    hints.add_row("[dim]stop[/]", f"koinon down{suffix}" if detach else "Ctrl-C")
    output.show(hints)


def _add_guests(hints: RichTable, cluster: LocalCluster) -> None:
    """Add how programs other than ours reach the cluster."""
    file = output.escape(shlex.quote(cluster.tls_bundle))
    redis, web = ("rediss", "https") if cluster.tls_bundle else ("redis", "http")
    options = f" --tls --cacert {file} --cert {file} --key {file}" if cluster.tls_bundle else ""
    for keyspace in (DEFAULT, *cluster.redis_keyspaces):
        names = cluster.node_names
        guests = [a for name in names if (a := cluster.redis_address(name, keyspace))]
        label = "redis" if keyspace == DEFAULT else f"redis, {keyspace}"
        if guests:
            hints.add_row(f"[dim]{label}[/]", f"redis-cli -c{options} -u {redis}://{guests[0]}")
        for address in guests:
            hints.add_row("", address)
    metrics = [a for name in cluster.names if (a := cluster.metrics_address(name))]
    for number, address in enumerate(metrics):
        hints.add_row("" if number else "[dim]metrics[/]", f"{web}://{address}/metrics")


def _warn_of_few_nodes(status: ClusterStatus) -> None:
    table = status.table
    assert table is not None, "the cluster is ready"
    nodes = sum(node.status is not NodeStatus.LEFT for node in table.nodes.values())
    copies = table.cluster.replication_factor
    if nodes >= FEW_NODES:
        return
    each = output.count(copies, "copy").replace("copys", "copies")
    lost = "a node that is down takes its partitions along until it returns"
    if copies > 1:
        lost = "while one is down, a second failure may lose what was written meanwhile"
    output.console(stderr=True).print(
        f"[yellow]Few nodes:[/] {output.count(nodes, 'node')}, {each} of each partition: {lost}. "
        "Three nodes keep three copies, and survive any one failure.",
        soft_wrap=True,
    )


def _up_json(cluster: LocalCluster, status: ClusterStatus) -> dict[str, Any]:
    return {
        "data": str(cluster.data_dir),
        "coordinators": cluster.coordinators,
        "tls_bundle": cluster.tls_bundle or None,
        "members": {
            name: {
                "address": cluster.address(name),
                "pid": cluster.pid(name),
                "metrics": cluster.metrics_address(name),
                "redis": cluster.redis_address(name),
                "redis_keyspaces": {
                    keyspace: cluster.redis_address(name, keyspace)
                    for keyspace in cluster.redis_keyspaces
                },
            }
            for name in cluster.names
        },
        "status": status_json(status),
    }


def _watch(cluster: LocalCluster, stopping: StopSignals) -> None:
    """Stay until told to stop; say when a member dies."""
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


def down(session: Session, *, data: DataDir = None) -> int | None:
    """Stop the local cluster. Its data stays."""
    directory = data or default_data_dir()
    running = running_cluster(directory)
    if running is None:
        if session.json:
            output.print_json({"data": str(directory), "stopped": []})
        else:
            output.problem(f"no cluster runs on {directory}")
        return NOT_FOUND
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
    if session.json:
        output.print_json({"data": str(directory), "stopped": names})
    else:
        output.note(f"stopped {output.listed(names)}; the data stays in {directory}")
    return None


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    command(
        app,
        "up",
        panel=PANEL,
        connects=False,
        examples=[
            "koinon up                      (until Ctrl-C)",
            "koinon up --detach --nodes 5",
            "koinon up --data ./mine        (a cluster of its own)",
            "koinon up --tls                (with certificates)",
        ],
    )(up)
    command(app, "down", panel=PANEL, connects=False)(down)
