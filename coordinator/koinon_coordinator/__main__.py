"""``python -m koinon_coordinator``: reads the flags of one coordinator and runs it."""

# ruff: noqa: E402 (a signal may come during the imports, which take a second)

from __future__ import annotations

from koinon_proto.process import stopping

stopping.end_at_once()

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uvloop

from koinon_coordinator.config import (
    BootstrapConfig,
    CoordinatorConfig,
    TimingConfig,
    parse_members,
)
from koinon_coordinator.raft.storage import data_path
from koinon_coordinator.server import serve
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.errors import (
    ConfigurationError,
    InvalidArgumentError,
    KoinonError,
    UnsupportedVersionError,
)
from koinon_proto.partitioner import check_new, partitioner
from koinon_proto.process import logs, pid_file
from koinon_proto.process.memory import collect_rarely
from koinon_proto.process.printable import protect_streams, tell
from koinon_proto.process.private_files import only_for_owner
from koinon_proto.security import audit
from koinon_proto.security.audit import Audit
from koinon_proto.security.names import Kind
from koinon_proto.security.transport import add_flags, listening
from koinon_proto.server import requests

EXIT_RUNTIME = 1
EXIT_CONFIGURATION = 2
_CONFIGURATION = (
    ConfigurationError,
    DataDirectoryError,
    InvalidArgumentError,
    UnsupportedVersionError,
)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the flags. (Typer would take a fifth of a coordinator's start time.)"""
    made = argparse.ArgumentParser(
        prog="koinon coordinator",
        usage="%(prog)s --id NAME --listen HOST:PORT --data PATH [options]",
        description="Run one coordinator. SIGTERM, SIGINT or SIGQUIT stops it cleanly.",
        allow_abbrev=False,
    )
    flag = made.add_argument
    flag("--id", required=True, metavar="NAME", help="this coordinator's name")
    flag("--listen", required=True, metavar="HOST:PORT", help="where to serve")
    flag(
        "--data",
        required=True,
        metavar="PATH",
        type=Path,
        help="directory of the log; only for this coordinator",
    )
    flag("--advertise", default="", metavar="HOST:PORT", help="for others, if not --listen")
    flag(
        "--members",
        default="",
        metavar="ID=HOST:PORT,...",
        help="of a fresh group, this coordinator among them",
    )
    flag("--join", action="store_true", help="be added to a group that runs")
    flag(
        "--peer-listen",
        default="",
        metavar="HOST:PORT",
        help="where Raft's messages and nodes' heartbeats come in (the host of --listen, a free "
        "port)",
    )
    flag(
        "--metrics-listen",
        default="",
        metavar="HOST:PORT",
        help="where to serve metrics, HTTP, /metrics (nowhere)",
    )
    add_flags(made)
    audit.add_flags(made)
    pid_file.add_flag(made)
    logs.add_flags(made)
    requests.add_flag(made)
    _add_boot_flags(made)
    _add_numbers(
        made.add_argument_group("Leases and sessions; the same on every coordinator"), _LEASES
    )
    _add_numbers(
        made.add_argument_group("Replication; the same on every coordinator"), _REPLICATION
    )
    _add_numbers(made.add_argument_group("Raft"), _RAFT)
    return made


def _add_boot_flags(made: argparse.ArgumentParser) -> None:
    boot = made.add_argument_group("Chosen when the cluster is created, fixed afterwards")
    boot.add_argument(
        "--partitioner",
        default="murmur2",
        help="murmur2, md5 or crc16, which lets Redis Cluster clients in (%(default)s)",
    )
    boot.add_argument(
        "--router",
        default="",
        metavar="ROUTER",
        help="which bytes of a key are hashed: whole, until:XX[,N] (all before the N-th byte XX), "
        "tag, first:N or h3:RES (whole; with crc16 tag)",
    )
    boot.add_argument(
        "--replication-factor",
        type=int,
        metavar="N",
        help="copies of each partition (3, or as many as --bootstrap-nodes if those are fewer)",
    )
    _add_numbers(boot, _BOOT)


_BOOT = (
    ("--bootstrap-nodes", 1, "nodes to wait for"),
    ("--partitions", 1024, "how many"),
    ("--max-value-bytes", 1024 * 1024, "the largest value"),
)
_LEASES = (
    ("--heartbeat-interval-ms", 200, "between a node's heartbeats"),
    ("--session-timeout-ms", 1500, "silence after which a node is fenced"),
    ("--lease-ms", 1000, "how long a node serves unheard"),
    ("--check-quorum-ms", 400, "how long a leader leads unheard"),
)
_REPLICATION = (
    ("--replica-timeout-ms", 1000, "silence after which a backup is put out of the in-sync set"),
    (
        "--rereplicate-after-ms",
        600_000,
        "absence after which a node loses its replicas to others; 0: never",
    ),
)
_RAFT = (
    ("--election-timeout-ms", 300, "from once to twice this, at random"),
    ("--raft-heartbeat-ms", 75, "between a leader's heartbeats"),
)


def _add_numbers(to: Any, flags: Iterable[tuple[str, int, str]]) -> None:
    for name, default, what in flags:
        to.add_argument(
            name,
            type=int,
            default=default,
            metavar=name.rpartition("-")[2].upper(),
            help=f"{what} (%(default)s)",
        )


def main() -> None:
    """Run one coordinator."""
    protect_streams()
    only_for_owner()
    flags = parser().parse_args()
    try:
        logs.configure_logging(
            flags.log_format, flags.log_level, component="coordinator", component_id=flags.id
        )
        requests.log_slow_after(flags.slow_request_ms)
        collect_rarely()
        config = _config(flags)
        if not config.join and not data_path(config.data).exists():
            check_new(partitioner(config.bootstrap.partitioner, 1))
        uvloop.run(serve(config))
    except _CONFIGURATION as error:
        _end(error, EXIT_CONFIGURATION)
    except (KoinonError, OSError) as error:
        _end(error, EXIT_RUNTIME)


def _config(flags: argparse.Namespace) -> CoordinatorConfig:
    return CoordinatorConfig(
        member_id=flags.id,
        listen=flags.listen,
        advertise=flags.advertise or flags.listen,
        data=flags.data,
        members=parse_members(flags.members),
        join=flags.join,
        metrics_listen=flags.metrics_listen,
        peer_listen=flags.peer_listen,
        listening=listening(flags.tls, flags.tls_bundle, Kind.COORDINATOR),
        audit=Audit(flags.audit_log, flags.audit_data_every),
        pid_file=flags.pid_file,
        bootstrap=BootstrapConfig(
            bootstrap_nodes=flags.bootstrap_nodes,
            replication_factor=flags.replication_factor,
            partition_count=flags.partitions,
            partitioner=flags.partitioner,
            router=flags.router,
            max_value_bytes=flags.max_value_bytes,
        ),
        timing=TimingConfig(**{name: getattr(flags, name) for name in TimingConfig.__slots__}),
    )


def _end(error: Exception, code: int) -> None:
    tell(f"koinon coordinator: {error}", stderr=True)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
