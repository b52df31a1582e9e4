"""``python -m koinon_node``: one storage node."""

# ruff: noqa: E402 (a signal may come while the others are imported, which takes a second)

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
from koinon_proto.process.logs import configure_logging
from koinon_proto.process.memory import collect_rarely, keep_freed
from koinon_proto.process.printable import protect_streams, tell
from koinon_proto.process.private_files import only_for_owner
from koinon_proto.security import audit
from koinon_proto.security.audit import Audit
from koinon_proto.security.names import Kind
from koinon_proto.security.transport import add_flags, listening
from koinon_proto.server.requests import SLOW_MS, log_slow_after

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
    """Run a storage node until SIGTERM or SIGINT."""
    try:
        configure_logging(
            flags.log_format, flags.log_level, component="node", component_id=flags.id
        )
        log_slow_after(flags.slow_request_ms)
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
                flags.redis_listen, flags.redis_advertise, advertise.rpartition(":")[0]
            ),
            listening=listening(flags.tls, flags.tls_bundle, Kind.NODE),
            audit=Audit(flags.audit_log, flags.audit_data_every),
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
    stopping.on_signal(node.stop)
    await node.run()


def parser() -> argparse.ArgumentParser:
    """Return what reads the flags. (Typer would take a fifth of the time that a node needs to
    start.)
    """
    made = argparse.ArgumentParser(
        prog="koinon node",
        usage="%(prog)s --id NAME --listen HOST:PORT --data PATH --coordinators HOST:PORT,... "
        "[options]",
        description="Run a Koinon storage node until SIGTERM or SIGINT.",
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
    add_flags(made)
    audit.add_flags(made)
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
        help="where to speak the Redis protocol (nowhere): with Koinon's clients, and with Redis's "
        "in the keyspace default; with KEYSPACE=, with Redis's in that one. May be repeated",
    )
    flag(
        "--redis-advertise",
        action="append",
        default=[],
        metavar="[KEYSPACE=]HOST:PORT",
        help="for clients, if not the host of --advertise and that port. May be repeated",
    )
    flag("--log-format", default="text", help="text or json (%(default)s)")
    flag("--log-level", default="INFO", help="DEBUG, INFO, WARNING or ERROR (%(default)s)")
    flag(
        "--slow-request-ms",
        type=int,
        default=SLOW_MS,
        metavar="MS",
        help="requests that take so long are logged; 0: none (%(default)s)",
    )
    return made


def main() -> None:
    """Entry point."""
    protect_streams()
    only_for_owner()
    serve(parser().parse_args())


if __name__ == "__main__":
    main()
