"""partitions, partition, where: show where partitions and keys are, and their state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from koinon.cli.console.command import NOT_FOUND, RefusedError, Session, command
from koinon.cli.console.reply import Block, Column, Reply, Styled, Table
from koinon.cli.console.units import partition_ids
from koinon.cli.data.key_value import Encoding
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.answers import (
    OnePartitionAnswer,
    PartitionAnswer,
    key_answers,
    one_partition,
    partition_answer,
    serves,
)
from koinon.operate.judge.health import is_short
from koinon.operate.replicas import SIZES_S_MAX, Checksum, PartitionSize, Replicas
from koinon.operate.wording import bytes_text, count
from koinon_proto.contract.table import PartitionRow, PartitionStatus
from koinon_proto.contract.table import Table as PartitionTable
from koinon_proto.process.printable import printable_bytes

app, root = typer.Typer(), typer.Typer()

STATES = {
    PartitionStatus.ONLINE: Styled("online", "green"),
    PartitionStatus.ASSIGNED: Styled("starting", "yellow"),
    PartitionStatus.OFFLINE: Styled("offline", "red"),
}
NO_PARTITIONS = "no partitions yet: the cluster waits for its first nodes"


def _names(names: Sequence[str | None]) -> str:
    return " ".join(name or "?" for name in names)


def _changes(row: PartitionAnswer) -> str:
    """Return the nodes that are being added (+) to a partition's replicas and removed (-) from
    them.
    """
    return " ".join([f"+{name}" for name in row.adding] + [f"-{name}" for name in row.removing])


def _why(row: PartitionAnswer) -> str:
    """Return why a partition is offline; '' if it is online."""
    return row.offline_reason.name.lower().replace("_", " ") if row.offline_reason else ""


PARTITIONS = (
    Column(">PARTITION", lambda row: str(row.partition_id)),
    Column("STATE", lambda row: STATES[row.status]),
    Column("PRIMARY", lambda row: row.primary or "-"),
    Column(">EPOCH", lambda row: str(row.primary_epoch), narrow=1),
    Column("REPLICAS", lambda row: _names(row.replicas)),
    Column("IN SYNC", lambda row: _names(row.in_sync), narrow=4),
    Column("MOVE", _changes, narrow=3),
    Column("", _why, narrow=2),
)
COPIES = (
    Column("NODE", lambda copy: copy.node or "?"),
    Column("ADDRESS", lambda copy: copy.address or "-"),
    Column("ROLE", "role"),
    Column("COPY", lambda copy: copy.state.replace("_", " ")),
    Column(
        ">COMPLETE THROUGH",
        lambda copy: "-" if copy.complete_through is None else copy.complete_through,
        narrow=2,
    ),
    Column("", "change", narrow=1),
)
KEYS = (
    Column("KEY", lambda found: printable_bytes(found.key)),
    Column("ROUTED BY", lambda found: printable_bytes(found.routing_bytes)),
    Column(">HASH", "hash", narrow=1),
    Column(">PARTITION", lambda found: str(found.partition_id)),
    Column("STATE", lambda found: STATES[found.status]),
    Column("PRIMARY", lambda found: found.primary or "-"),
    Column("ADDRESS", lambda found: found.address or "-", narrow=3),
    Column("IN SYNC", lambda found: _names(found.in_sync)),
    Column("REPLICAS", lambda found: _names(found.replicas), narrow=2),
)


# --- partitions ----------------------------------------------------------------------------------


@command(
    app,
    examples=[
        "admin partitions --offline",
        "admin partitions --node n2",
        "admin partitions 0-15 --json",
    ],
)
def partitions(
    session: Session,
    which: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PARTITION]…", help="Such as 3 or 0-15; none: all."),
    ] = None,
    *,
    node: Annotated[
        str | None, typer.Option(help="Only those with a replica on this node.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Only those not served now.")] = False,
    short: Annotated[
        bool, typer.Option("--under-replicated", help="Only those that lack a copy in sync.")
    ] = False,
) -> Reply:
    """List partitions with their primaries and replicas; --json: one object per line."""
    chosen = {p for text in which or () for p in partition_ids(text)}
    with session.admin() as admin:
        table = admin.status().table
    numbers = {} if table is None else {str(n.node_id): n.number for n in table.nodes.values()}
    if node is not None and node not in numbers:
        raise RefusedError(
            f"no node {node!r} is registered", "'koinon admin nodes' lists them.", code=NOT_FOUND
        )
    if table is None or not table.used_rows:
        return Reply([], notes=[NO_PARTITIONS], each=True)
    _check_known(max(chosen, default=0), table)
    found = [
        partition_answer(row, table)
        for row in table.used_rows
        if (not chosen or row.partition_id in chosen)
        and (node is None or numbers[node] in row.replicas)
        and not (offline and row.status is PartitionStatus.ONLINE)
        and not (short and not is_short(row))
    ]
    return Reply(found, _partition_blocks(found), each=True)


def _check_known(partition_id: int, table: PartitionTable) -> None:
    if partition_id >= len(table.rows):
        raise RefusedError(
            f"there is no partition {partition_id:,}",
            f"This cluster has {len(table.rows):,}, from 0 on.",
            code=NOT_FOUND,
        )


def _partition_blocks(rows: Sequence[PartitionAnswer]) -> list[Block]:
    if not rows:
        return [Styled("none", "dim")]
    counts = Counter(STATES[row.status].text for row in rows)
    words = ", ".join(f"{number:,} {word}" for word, number in counts.items())
    return [Table(PARTITIONS, rows), Styled(f"{count(len(rows), 'partition')}: {words}", "dim")]


# --- partition -----------------------------------------------------------------------------------


@command(app, examples=["admin partition 17"])
def partition(
    session: Session,
    partition_id: Annotated[int, typer.Argument(metavar="PARTITION", min=0)],
) -> Reply:
    """Show one partition: its size, and for each copy its node and how complete it is."""
    with session.admin() as admin:
        status = admin.status()
    table = status.table
    if table is None or not table.rows:
        return Reply(None, notes=[NO_PARTITIONS])
    _check_known(partition_id, table)
    row = table.rows[partition_id]
    size, copies = _asked(status, table, row)
    found = one_partition(row, table, size, copies)
    return Reply(found, [_one_line(found), Table(COPIES, found.copies)])


def _asked(
    status: ClusterStatus, table: PartitionTable, row: PartitionRow
) -> tuple[PartitionSize | None, Mapping[int, Checksum]]:
    """Ask nodes for the partition's size (None: it has no primary) and for the state of its
    copies.
    """
    p = int(row.partition_id)
    live: dict[int, tuple[int, ...]] = {n: (p,) for n in row.replicas if serves(n, table)}
    with Replicas() as nodes:
        size = nodes.sizes(status, (p,))[p] if row.primary in live else None
        found, _ = nodes.checksums(table, live, positions_only=True, timeout_s=SIZES_S_MAX)
    return size, {number: copy for (number, _), copy in found.items()}


def _one_line(found: OnePartitionAnswer) -> Block:
    why = f" ({_why(found)})" if found.offline_reason else ""
    leads = f"{found.primary} leads it" if found.primary else "it has no primary"
    size = ""
    if found.records is not None:
        mark = "~" if found.guessed else ""
        records, stored = count(found.records, "record"), bytes_text(found.bytes or 0)
        size = f" {mark}{records}, {mark}{stored} a copy."
    about = f"{why}; {leads}, in epoch {found.primary_epoch:,}.{size}"
    return [f"Partition {found.partition_id} is ", STATES[found.status], about]


# --- keys ----------------------------------------------------------------------------------------


@command(root, panel="Data", keyed=True, examples=["where user:1 user:2", "where 7 --json"])
def where(
    session: Session,
    keys: Annotated[list[str], typer.Argument(metavar="KEY…", help="Keys, as text.")],
    *,
    encoding: Encoding,
) -> Reply:
    """Show the partition and the nodes of each key; ROUTED BY is the part of the key that is
    hashed. Reads no record: a key has its place whether its record exists or not. --json: one
    object per line.
    """
    wanted = [encoding.decode(key, "KEY") for key in keys]
    with session.admin() as admin:
        table = admin.status().table
    if table is None or not table.rows:
        return Reply([], notes=[NO_PARTITIONS], each=True)
    found = key_answers(table, session.keyspace, wanted)
    return Reply(found, [Table(KEYS, found)], each=True)
