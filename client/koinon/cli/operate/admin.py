"""admin: the group of operators' commands; and ``size``, which advises on the number of
partitions.
"""

from __future__ import annotations

from typing import Annotated

import typer

from koinon.cli.console.command import Session, command
from koinon.cli.console.help import Group
from koinon.cli.console.reply import Block, Reply, Styled
from koinon.cli.operate import (
    consumer_groups,
    force,
    hot,
    keyspace_settings,
    loads,
    move_control,
    partitions,
    permissions,
    plans,
    status,
    verify,
)
from koinon.operate.judge.sizing import PARTITION_MB_S, PER_NODE_MIN, Sizing
from koinon.operate.judge.sizing import size as advise
from koinon.operate.wording import bytes_text, count

app = typer.Typer(
    cls=Group,
    help="Look at the cluster; change its coordinators, its nodes, and where replicas are.",
    no_args_is_help=True,
)
for _module in (status, partitions, hot, plans, move_control, verify, force):
    app.registered_commands += _module.app.registered_commands


@command(
    app,
    examples=["admin size --peak-mb-s 400 --rows 2000000000 --nodes 12"],
    connects=False,
)
def size(
    session: Session,
    *,
    peak_mb_s: Annotated[
        float, typer.Option(min=0.001, help="MB read and written a second, of all, at the peak.")
    ],
    rows: Annotated[int, typer.Option(min=1, help="Records, of all, without copies.")],
    nodes: Annotated[int, typer.Option(min=1, help="The most nodes that you may ever have.")],
    copies: Annotated[int, typer.Option(min=1, max=7, help="Copies of each partition.")] = 3,
) -> Reply:
    """Advise how many partitions a new cluster should have, and what that costs. Needs no cluster.

    The number is chosen once. A partition is taken to bear 50 MB a second, and a node to need 16
    partitions at least; the result is the next power of two, doubled for growth.
    """
    advised = advise(peak_mb_s, rows, nodes, copies)
    return Reply(advised, _size_blocks(advised, peak_mb_s, nodes))


def _size_blocks(advised: Sizing, peak_mb_s: float, nodes: int) -> list[Block]:
    blocks: list[Block] = [
        [
            Styled(f"{advised.partitions:,} partitions", "bold"),
            f"  (koinon coordinator: --partitions {advised.partitions})",
        ],
        "",
        f"{advised.for_peak:>7,}  for the peak: {peak_mb_s:,g} MB/s at {PARTITION_MB_S} MB/s a "
        "partition, to the next power of two, doubled",
        f"{advised.for_nodes:>7,}  for {count(nodes, 'node')}: {PER_NODE_MIN} for each at "
        "least, so that load and moves spread",
        "",
        f"Then a partition has some {count(advised.rows, 'row')} and "
        f"{advised.peak_mb_s:.2g} MB/s at the peak, if keys spread evenly.",
        f"A node leads {advised.primaries:,} and holds {advised.copies:,} copies. The table has "
        f"{bytes_text(advised.table_bytes)}: each client and node fetches it when it "
        "starts, and after a failover the rows that changed.",
    ]
    if not advised.slots:
        blocks.append("Clients of Redis Cluster know 16,384 slots: crc16 cannot have that many.")
    return blocks


app.add_typer(status.coordinators_app, name="coordinators")
app.add_typer(loads.app, name="loads")
app.add_typer(keyspace_settings.app, name="keyspaces")
app.add_typer(consumer_groups.app, name="groups")
for _group, _name in (
    (permissions.users_app, "users"),
    (permissions.roles_app, "roles"),
    (permissions.tokens_app, "tokens"),
    (permissions.certificates_app, "certificates"),
):
    app.add_typer(_group, name=_name, rich_help_panel="Who may do what")

root = typer.Typer()
root.add_typer(app, name="admin", rich_help_panel="The cluster")
