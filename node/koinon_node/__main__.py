"""``python -m koinon_node``: one storage node."""

# ruff: noqa: E402 (a signal may come during the imports, which take a second)

from __future__ import annotations

from koinon_proto.process import stopping

stopping.end_at_once()

import argparse
from pathlib import Path

import uvloop

from koinon_node.config import NodeConfig, redis_endpoints
from koinon_node.node import Node
from koinon_node.store_config import DEFAULT_MAP_SIZE_BYTES, KEPT_BYTES, StoreConfig
from koinon_proto.contract.cluster_errors import DataDirectoryError, DuplicateNodeError
from koinon_proto.contract.errors import (
    ConfigurationError,
    InvalidArgumentError,
    KoinonError,
    PartitionerMismatchError,
    UnsupportedVersionError,
    WrongClusterError,
)
from koinon_proto.contract.table import DEFAULT_WEIGHT
from koinon_proto.process import logs, pid_file
from koinon_proto.process.memory import collect_rarely, keep_freed
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
    DuplicateNodeError,
    InvalidArgumentError,
    PartitionerMismatchError,
    UnsupportedVersionError,
    WrongClusterError,
)


def serve(flags: argparse.Namespace) -> None:
    """Run a storage node until SIGTERM, SIGINT or SIGQUIT."""
    try:
        logs.configure_logging(
            flags.log_format, flags.log_level, component="node", component_id=flags.id
        )
        requests.log_slow_after(flags.slow_request_ms)
        coordinators = (part.strip() for part in flags.coordinators.split(","))
        advertise = flags.advertise or flags.listen
        config = NodeConfig(
            node_id=flags.id,
            listen=flags.listen,
            advertise=advertise,
            coordinators=tuple(filter(None, coordinators)),
            rack=flags.rack,
            pool=flags.pool,
            weight=flags.weight,
            metrics_listen=flags.metrics_listen,
            redis=redis_endpoints(
                flags.redis_listen,
                flags.redis_advertise,
                advertise.rpartition(":")[0],
                flags.listen.rpartition(":")[0],
            ),
            resp_proxy=flags.resp_proxy,
            listening=listening(flags.tls, flags.tls_bundle, Kind.NODE),
            audit=Audit(flags.audit_log, flags.audit_data_every),
            pid_file=flags.pid_file,
            store=StoreConfig(
                directory=flags.data,
                map_size_bytes=flags.map_size_bytes,
                durability=flags.durability,  # checked at construction
                sync_interval_ms=flags.sync_interval_ms,
                write_ahead_log=flags.write_ahead_log == "on",
            ),
        )
        keep_freed(KEPT_BYTES)
        collect_rarely()
        uvloop.run(_run(config))
    except _CONFIGURATION as error:
        tell(f"koinon node {flags.id}: {error}", stderr=True)
        raise SystemExit(EXIT_CONFIGURATION) from None
    except KoinonError as error:
        tell(f"koinon node {flags.id}: {error}", stderr=True)
        raise SystemExit(EXIT_RUNTIME) from None


async def _run(config: NodeConfig) -> None:
    node = Node(config)
    stopping.on_signal(node.stop, (config.listening.read_again, config.audit.reopen))
    await node.run()


def parser() -> argparse.ArgumentParser:
    """Build the parser of the flags. (Typer would take a fifth of a node's start time.)"""
    made = argparse.ArgumentParser(
        prog="koinon node",
        usage="%(prog)s --id NAME --listen HOST:PORT --data PATH --coordinators HOST:PORT,... "
        "[options]",
        description="Run a Koinon storage node until SIGTERM, SIGINT or SIGQUIT.",
        allow_abbrev=False,
    )
    flag = made.add_argument
    flag("--id", required=True, metavar="NAME", help="unique name of this node")
    flag("--listen", required=True, metavar="HOST:PORT", help="where to serve")
    flag("--data", required=True, metavar="PATH", type=Path, help="data directory")
    flag("--coordinators", required=True, metavar="HOST:PORT,...", help="all of them")
    flag("--advertise", default="", metavar="HOST:PORT", help="for clients, if not --listen")
    flag("--rack", default="", help="failure zone of this node")
    flag("--pool", default="", help="hold the keyspaces of this pool only")
    flag(
        "--weight",
        type=int,
        default=DEFAULT_WEIGHT,
        help="share of partitions, relative to other nodes' (%(default)s)",
    )
    _add_store_flags(made)
    add_flags(made)
    audit.add_flags(made)
    pid_file.add_flag(made)
    _add_listening_flags(made)
    logs.add_flags(made)
    requests.add_flag(made)
    return made


def _add_store_flags(made: argparse.ArgumentParser) -> None:
    flag = made.add_argument
    flag(
        "--map-size-bytes",
        type=int,
        default=DEFAULT_MAP_SIZE_BYTES,
        metavar="BYTES",
        help="how much puts may fill: the file is sparse (%(default)s)",
    )
    flag(
        "--durability",
        default="commit",
        help="commit: fsync before each acknowledgement; or interval (%(default)s)",
    )
    flag(
        "--sync-interval-ms",
        type=int,
        default=100,
        metavar="MS",
        help="with durability interval (%(default)s)",
    )
    flag(
        "--write-ahead-log",
        choices=("on", "off"),
        default="on",
        help="make writes durable in a log in front of the store (%(default)s)",
    )


def _add_listening_flags(made: argparse.ArgumentParser) -> None:
    flag = made.add_argument
    flag(
        "--metrics-listen",
        default="",
        metavar="HOST:PORT",
        help="where to serve metrics, HTTP, /metrics (nowhere)",
    )
    flag(
        "--redis-listen",
        action="append",
        default=[],
        metavar="[KEYSPACE=]HOST:PORT",
        help="the data port (one that the system chooses, at the host of --listen): Redis protocol "
        "with Koinon's clients, with Redis's in the keyspace default, and with nodes that follow; "
        "with KEYSPACE=, a port for Redis's in that one. May be repeated",
    )
    flag(
        "--redis-advertise",
        action="append",
        default=[],
        metavar="[KEYSPACE=]HOST:PORT",
        help="for clients, if not the host of --advertise and that port. May be repeated",
    )
    flag(
        "--resp-proxy",
        action="store_true",
        help="serve any key to clients of Redis, by passing commands on to the node that leads it",
    )


def main() -> None:
    """Entry point."""
    protect_streams()
    only_for_owner()
    serve(parser().parse_args())


if __name__ == "__main__":
    main()
