"""admin size: how many partitions a new cluster should have."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from koinon.cli.console import output
from koinon.cli.console.session import Session
from koinon.operate import sizing
from koinon.operate.sizing import PARTITION_MB_S, PER_NODE_MIN, Sizing


def size(
    session: Session,
    *,
    peak_mb_s: Annotated[
        float, typer.Option(min=0.001, help="MB read and written a second, of all, at the peak.")
    ],
    rows: Annotated[int, typer.Option(min=1, help="Records, of all, without copies.")],
    nodes: Annotated[int, typer.Option(min=1, help="The most nodes that you may ever have.")],
    copies: Annotated[int, typer.Option(min=1, max=7, help="Copies of each partition.")] = 3,
) -> None:
    """Advise how many partitions a new cluster should have, and what that costs. Ask no cluster.

    The number is chosen once. A partition is taken to bear 50 MB a second, a node to need 16 of
    them at least; the next power of two, doubled for growth.
    """
    advised = sizing.size(peak_mb_s, rows, nodes, copies)
    if session.json:
        output.print_json(asdict(advised))
    else:
        _print(advised, peak_mb_s, nodes)


def _print(advised: Sizing, peak_mb_s: float, nodes: int) -> None:
    printer = output.console()
    lines = [
        f"[bold]{advised.partitions:,} partitions[/]  (koinon coordinator: "
        f"--partitions {advised.partitions})",
        "",
        f"{advised.for_peak:>7,}  for the peak: {peak_mb_s:,g} MB/s at {PARTITION_MB_S} MB/s a "
        "partition, to the next power of two, doubled",
        f"{advised.for_nodes:>7,}  for {output.count(nodes, 'node')}: {PER_NODE_MIN} for each at "
        "least, so that load and moves spread",
        "",
        f"Then a partition has some {output.count(advised.rows, 'row')} and "
        f"{advised.peak_mb_s:.2g} MB/s at the peak, if keys spread evenly.",
        f"A node leads {advised.primaries:,} and holds {advised.copies:,} copies. The table has "
        f"{output.bytes_text(advised.table_bytes)}: each client and node fetches it when it "
        "starts, and after a failover the rows that changed.",
    ]
    if not advised.slots:
        lines.append("Clients of Redis Cluster know 16,384 slots: crc16 cannot have so many.")
    for line in lines:
        printer.print(line)
