"""``python -m koinon_node``: one storage node."""

# ruff: noqa: E402 (a signal may come while the others are imported, which takes a second)

from __future__ import annotations

from koinon_proto.process import stopping

stopping.end_at_once()

from pathlib import Path
from typing import Annotated

import typer
import uvloop

from koinon_node.config import (
    DEFAULT_MAP_SIZE_BYTES,
    KEPT_BYTES,
    NodeConfig,
    StoreConfig,
)
from koinon_node.node import Node
from koinon_proto.contract.errors import (
    ConfigurationError,
    DataDirectoryError,
    DuplicateNodeError,
    InvalidArgumentError,
    KoinonError,
    UnsupportedVersionError,
    WrongClusterError,
)
from koinon_proto.contract.table import DEFAULT_WEIGHT
from koinon_proto.process.logs import configure_logging
from koinon_proto.process.memory import keep_freed
from koinon_proto.process.printable import protect_streams, tell
from koinon_proto.process.private_files import only_for_owner
from koinon_proto.server.requests import SLOW_MS, log_slow_after

EXIT_RUNTIME = 1
EXIT_CONFIGURATION = 2
_CONFIGURATION = (
    ConfigurationError,
    DataDirectoryError,
    DuplicateNodeError,
    InvalidArgumentError,
    UnsupportedVersionError,
    WrongClusterError,
)


def serve(
    node_id: Annotated[str, typer.Option("--id", help="unique name of this node")],
    listen: Annotated[str, typer.Option(help="HOST:PORT to serve on")],
    data: Annotated[Path, typer.Option(help="data directory")],
    coordinators: Annotated[str, typer.Option(help="HOST:PORT,... of the coordinators")],
    advertise: Annotated[str, typer.Option(help="HOST:PORT for clients; default: --listen")] = "",
    rack: Annotated[str, typer.Option(help="failure zone of this node")] = "",
    weight: Annotated[
        int, typer.Option(help="share of partitions, relative to other nodes'")
    ] = DEFAULT_WEIGHT,
    map_size_bytes: Annotated[
        int, typer.Option(help="how much puts may fill (the file is sparse)")
    ] = DEFAULT_MAP_SIZE_BYTES,
    durability: Annotated[
        str, typer.Option(help="commit: fsync before each acknowledgement; or interval")
    ] = "commit",
    sync_interval_ms: Annotated[int, typer.Option(help="with durability interval")] = 100,
    metrics_listen: Annotated[
        str, typer.Option(help="HOST:PORT to serve metrics on (HTTP, /metrics); default: nowhere")
    ] = "",
    log_format: Annotated[str, typer.Option(help="text or json")] = "text",
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR")] = "INFO",
    slow_request_ms: Annotated[
        int, typer.Option(help="requests that take so long are logged; 0: none")
    ] = SLOW_MS,
) -> None:
    """Run a Koinon storage node until SIGTERM or SIGINT."""
    try:
        configure_logging(log_format, log_level, component="node", component_id=node_id)
        log_slow_after(slow_request_ms)
        config = NodeConfig(
            node_id=node_id,
            listen=listen,
            advertise=advertise or listen,
            coordinators=tuple(part.strip() for part in coordinators.split(",") if part.strip()),
            rack=rack,
            weight=weight,
            metrics_listen=metrics_listen,
            store=StoreConfig(
                directory=data,
                map_size_bytes=map_size_bytes,
                durability=durability,  # type: ignore[arg-type]  # checked at construction
                sync_interval_ms=sync_interval_ms,
            ),
        )
        keep_freed(KEPT_BYTES)
        uvloop.run(_run(config))
    except _CONFIGURATION as error:
        tell(f"koinon node {node_id}: {error}", stderr=True)
        raise SystemExit(EXIT_CONFIGURATION) from None
    except KoinonError as error:
        tell(f"koinon node {node_id}: {error}", stderr=True)
        raise SystemExit(EXIT_RUNTIME) from None


async def _run(config: NodeConfig) -> None:
    node = Node(config)
    stopping.on_signal(node.stop)
    await node.run()


def main() -> None:
    """Entry point."""
    protect_streams()
    only_for_owner()
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(serve)
    app(prog_name="koinon node")


if __name__ == "__main__":
    main()
