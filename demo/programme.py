"""Runs the acts of the demo in their order, on a cluster that it starts."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import demo
from demo import acts, bulk, feeds, groups, guests, places, replicas
from demo.cities import NoDataError, load_cities
from demo.play import Play
from demo.stage import MismatchError, Stage
from koinon.java import find_java
from koinon.local import LocalCluster, Setup
from koinon.operate.wording import count, duration_text
from koinon_proto.contract.errors import KoinonError
from koinon_proto.process.printable import protect_streams

PARTITIONS = 256
"""Fewer than the default: moving a node's share should take seconds."""
PROGRAMME = (
    acts.load_and_kill_leader,
    acts.read_everything,
    acts.single_records,
    guests.redis_client_comes_in,
    acts.coordinator_returns,
    feeds.program_follows,
    replicas.node_dies,
    replicas.node_returns,
    feeds.program_is_killed,
    replicas.node_joins,
    replicas.node_leaves,
    feeds.program_missed_nothing,
    groups.consumers_share,
    replicas.everything_is_there,
    bulk.orders_come_and_go_back,
    places.drivers_meet_riders,
    replicas.show_state,
)


def parse_arguments() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=demo.__doc__)
    parser.add_argument(
        "--rows",
        type=_rows,
        default=os.environ.get("KOINON_DEMO_ROWS") or None,  # a text, so of the same type
        help="load at most so many rows (default all; also KOINON_DEMO_ROWS)",
    )
    return parser.parse_args()


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows: 1 at least")
    return int(text)


def play(stage: Stage, rows_max: int | None) -> None:
    """Run all acts on a cluster of their own."""
    stage.console.print("[bold]Koinon: a key-value store cluster, on this machine, in a minute.[/]")
    stage.act("Three coordinators and three nodes, each a process of its own")
    began = time.monotonic()
    flags = ["--partitions", str(PARTITIONS), "--partitioner", "crc16"]
    with LocalCluster(setup=Setup(coordinator_flags=flags)) as cluster:
        stage.check(True, f"up and serving after {duration_text(time.monotonic() - began)}")
        for name in cluster.names:
            kind = "coordinator" if name in cluster.coordinator_names else "node"
            stage.say(f"{name}  {kind:<11}  {cluster.address(name)}  pid {cluster.pid(name)}")
        with cluster.client() as client:
            copies = client.table().cluster.replication_factor
        stage.say(
            f"Each partition has {copies} copies; a write is on disk in each before its answer."
        )
        began = time.monotonic()
        rows = load_cities(rows_max)
        size = sum(len(key) + len(value) for key, value in rows.items())
        stage.say(
            f"The data: {count(len(rows), 'city').replace('citys', 'cities')} of GeoNames, "
            f"{size / 1e6:.1f} MB (parsed in {duration_text(time.monotonic() - began)})."
        )
        with cluster.client() as client:
            shared = Play(stage=stage, cluster=cluster, client=client, rows=rows, rows_max=rows_max)
            with shared.finally_:
                for act in PROGRAMME:
                    act(shared)
    stage.console.print(
        f"\n[bold green]Done:[/] {len(rows):,} rows, {stage.checks} checks, all of them hold; "
        f"{duration_text(stage.seconds)}. The processes are gone, and so is their data.",
        soft_wrap=True,
    )
    koinon = _command()
    stage.console.print(
        f"Now your own:  {koinon} up --detach && {koinon} put greeting hello\n", soft_wrap=True
    )


def _command() -> str:
    """Return the shell command for ``koinon``."""
    beside = Path(sys.executable).with_name("koinon")
    if shutil.which("koinon") or not beside.exists():
        return "koinon"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def main() -> int:
    """Run the demo; return 0 if every check held."""
    rows_max = parse_arguments().rows
    protect_streams()
    stage = Stage()
    try:
        find_java()
        play(stage, rows_max)
    except (MismatchError, NoDataError, KoinonError) as error:
        stage.console.print(f"[bold red]The demo failed:[/] {error}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        stage.console.print("\nInterrupted; the processes are being ended.")
        return 130
    return 0
