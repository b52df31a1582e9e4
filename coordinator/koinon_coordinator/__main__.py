"""``python -m koinon_coordinator``: the flags of one coordinator, read here and nowhere else."""

# ruff: noqa: E402 (a signal may come while the others are imported, which takes a second)

from __future__ import annotations

from koinon_proto.process import stopping

stopping.end_at_once()

from pathlib import Path
from typing import Annotated

import typer
import uvloop

from koinon_coordinator.config import (
    BootstrapConfig,
    CoordinatorConfig,
    TimingConfig,
    parse_members,
)
from koinon_coordinator.server import serve
from koinon_proto.contract.errors import (
    ConfigurationError,
    DataDirectoryError,
    InvalidArgumentError,
    KoinonError,
    UnsupportedVersionError,
)
from koinon_proto.process.logs import configure_logging
from koinon_proto.process.printable import protect_streams, tell
from koinon_proto.process.private_files import only_for_owner
from koinon_proto.server.requests import SLOW_MS, log_slow_after

EXIT_RUNTIME = 1
EXIT_CONFIGURATION = 2
_CONFIGURATION = (
    ConfigurationError,
    DataDirectoryError,
    InvalidArgumentError,
    UnsupportedVersionError,
)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_BOOT = "Chosen when the cluster is created, fixed afterwards"
_LEASES = "Leases and sessions; the same on every coordinator"
_REPLICATION = "Replication; the same on every coordinator"
_RAFT = "Raft"


@app.command()
def main(
    member_id: Annotated[str, typer.Option("--id", help="this coordinator's name")],
    listen: Annotated[str, typer.Option(help="host:port to serve on")],
    data: Annotated[Path, typer.Option(help="directory of the log; only for this coordinator")],
    advertise: Annotated[str, typer.Option(help="host:port for others, if not --listen")] = "",
    members: Annotated[
        str, typer.Option(help="id=host:port,… of a fresh group, this coordinator among them")
    ] = "",
    join: Annotated[bool, typer.Option("--join", help="be added to a group that runs")] = False,
    bootstrap_nodes: Annotated[
        int, typer.Option(help="nodes to wait for", rich_help_panel=_BOOT)
    ] = 1,
    replication_factor: Annotated[
        int | None,
        typer.Option(
            help="copies of each partition; 3, or as many as --bootstrap-nodes if those are fewer",
            rich_help_panel=_BOOT,
        ),
    ] = None,
    partitions: Annotated[int, typer.Option(help="how many", rich_help_panel=_BOOT)] = 1024,
    partitioner: Annotated[
        str, typer.Option(help="murmur2 or md5", rich_help_panel=_BOOT)
    ] = "murmur2",
    max_value_bytes: Annotated[
        int, typer.Option(help="the largest value", rich_help_panel=_BOOT)
    ] = 1024 * 1024,
    heartbeat_interval_ms: Annotated[
        int, typer.Option(help="between a node's heartbeats", rich_help_panel=_LEASES)
    ] = 200,
    session_timeout_ms: Annotated[
        int, typer.Option(help="silence after which a node is fenced", rich_help_panel=_LEASES)
    ] = 1500,
    lease_ms: Annotated[
        int, typer.Option(help="how long a node serves unheard", rich_help_panel=_LEASES)
    ] = 1000,
    check_quorum_ms: Annotated[
        int, typer.Option(help="how long a leader leads unheard", rich_help_panel=_LEASES)
    ] = 400,
    replica_timeout_ms: Annotated[
        int,
        typer.Option(
            help="silence after which a backup is put out of the in-sync set",
            rich_help_panel=_REPLICATION,
        ),
    ] = 1000,
    rereplicate_after_ms: Annotated[
        int,
        typer.Option(
            help="absence after which a node loses its replicas to others; 0: never",
            rich_help_panel=_REPLICATION,
        ),
    ] = 600_000,
    election_timeout_ms: Annotated[
        int, typer.Option(help="from once to twice this, at random", rich_help_panel=_RAFT)
    ] = 300,
    raft_heartbeat_ms: Annotated[
        int, typer.Option(help="between a leader's heartbeats", rich_help_panel=_RAFT)
    ] = 75,
    metrics_listen: Annotated[
        str, typer.Option(help="host:port to serve metrics on (HTTP, /metrics); default: nowhere")
    ] = "",
    log_format: Annotated[str, typer.Option(help="text or json")] = "text",
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR")] = "INFO",
    slow_request_ms: Annotated[
        int, typer.Option(help="requests that take so long are logged; 0: none")
    ] = SLOW_MS,
) -> None:
    """Run one coordinator. SIGTERM or SIGINT stops it cleanly."""
    try:
        configure_logging(log_format, log_level, component="coordinator", component_id=member_id)
        log_slow_after(slow_request_ms)
        config = CoordinatorConfig(
            member_id=member_id,
            listen=listen,
            advertise=advertise or listen,
            data=data,
            members=parse_members(members),
            join=join,
            metrics_listen=metrics_listen,
            bootstrap=BootstrapConfig(
                bootstrap_nodes=bootstrap_nodes,
                replication_factor=replication_factor,
                partition_count=partitions,
                partitioner=partitioner,
                max_value_bytes=max_value_bytes,
            ),
            timing=TimingConfig(
                heartbeat_interval_ms=heartbeat_interval_ms,
                session_timeout_ms=session_timeout_ms,
                lease_ms=lease_ms,
                check_quorum_ms=check_quorum_ms,
                replica_timeout_ms=replica_timeout_ms,
                rereplicate_after_ms=rereplicate_after_ms,
                election_timeout_ms=election_timeout_ms,
                raft_heartbeat_ms=raft_heartbeat_ms,
            ),
        )
        uvloop.run(serve(config))
    except _CONFIGURATION as error:
        _end(error, EXIT_CONFIGURATION)
    except (KoinonError, OSError) as error:
        _end(error, EXIT_RUNTIME)


def _end(error: Exception, code: int) -> None:
    tell(f"koinon coordinator: {error}", stderr=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    protect_streams()
    only_for_owner()
    app(prog_name="koinon coordinator")
