"""partitions, partition, where: which nodes have what, and in which state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.session import NOT_FOUND, Session, command
from koinon.cli.console.units import partition_ids
from koinon.cli.data.key_value import Encoding
from koinon.operate.admin import ClusterStatus
from koinon.operate.health import is_short
from koinon.operate.nodes import node_name
from koinon.operate.replicas import SIZES_S_MAX, Checksum, PartitionSize, Replicas
from koinon_proto.contract.table import (
    NodeNumber,
    NodeStatus,
    PartitionRow,
    PartitionStatus,
    Table,
)
from koinon_proto.partitioner import partitioner_of
from koinon_proto.process.printable import printable_bytes

PARTITION_COLORS = {
    PartitionStatus.ONLINE: "green",
    PartitionStatus.ASSIGNED: "yellow",
    PartitionStatus.OFFLINE: "red",
}
PARTITION_WORDS = {PartitionStatus.ASSIGNED: "starting"}
NO_PARTITIONS = "no partitions yet: the cluster waits for its first nodes"


def _name(number: int, table: Table) -> str | None:
    return node_name(table, number) if number in table.nodes else None


def _names(numbers: tuple[NodeNumber, ...], table: Table) -> str:
    return " ".join(_name(number, table) or "?" for number in numbers)


def _word(status: PartitionStatus) -> str:
    return PARTITION_WORDS.get(status, status.name.lower())


def _state(row: PartitionRow) -> str:
    return f"[{PARTITION_COLORS[row.status]}]{_word(row.status)}[/]"


def _why(row: PartitionRow) -> str:
    """Return why a partition is offline; '' if it is not."""
    return row.offline_reason.name.lower().replace("_", " ") if row.offline_reason else ""


def partition_json(row: PartitionRow, table: Table) -> dict[str, Any]:
    """The stable form of a row of the table."""
    return {
        "partition_id": row.partition_id,
        "status": row.status.name.lower(),
        "offline_reason": row.offline_reason.name.lower() if row.offline_reason else None,
        "primary": _name(row.primary, table),
        "primary_epoch": row.primary_epoch,
        "partition_epoch": row.partition_epoch,
        "replicas": [_name(number, table) for number in row.replicas],
        "in_sync": [_name(number, table) for number in row.in_sync],
        "adding": [_name(number, table) for number in row.adding],
        "removing": [_name(number, table) for number in row.removing],
        "wanted_primary": _name(row.wanted_primary, table),
    }


# --- all, or some --------------------------------------------------------------------------------


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
) -> int | None:
    """The partitions: who leads each, where its replicas are; --json: one object per line."""
    chosen = {p for text in which or () for p in partition_ids(text)}
    with session.admin() as admin:
        table = admin.status().table
    rows = list(table.used_rows) if table else []
    numbers = {} if table is None else {n.node_id: n.number for n in table.nodes.values()}
    if node is not None and node not in numbers:
        return session.refuse(
            f"no node {node!r} is registered", "'koinon admin nodes' lists them.", code=NOT_FOUND
        )
    if table is None or not rows:
        output.note(NO_PARTITIONS)
        return None
    if chosen and max(chosen) >= len(table.rows):
        return _unknown(session, max(chosen), len(table.rows))
    if chosen:
        rows = [row for row in rows if row.partition_id in chosen]
    if node is not None:
        rows = [row for row in rows if numbers[node] in row.replicas]  # type: ignore[index]
    if offline:
        rows = [row for row in rows if row.status is not PartitionStatus.ONLINE]
    if short:
        rows = [row for row in rows if is_short(row)]
    if session.json:
        for row in rows:
            output.print_json(partition_json(row, table))
        return None
    _print_partitions(rows, table)
    return None


def _unknown(session: Session, partition_id: int, count: int) -> int:
    return session.refuse(
        f"there is no partition {partition_id:,}",
        f"This cluster has {count:,}, from 0 on.",
        code=NOT_FOUND,
    )


def _print_partitions(rows: list[PartitionRow], table: Table) -> None:
    columns = (">PARTITION", "STATE", "PRIMARY", ">EPOCH", "REPLICAS", "IN SYNC", "MOVE", "")
    shown = output.table(*columns)
    for row in rows:
        shown.add_row(
            str(row.partition_id),
            _state(row),
            _name(row.primary, table) or "-",
            str(row.primary_epoch),
            _names(row.replicas, table),
            _names(row.in_sync, table),
            _changes(row, table),
            _why(row),
        )
    printer = output.console()
    if not rows:
        printer.print("[dim]none[/]")
        return
    output.show(shown, expendable=("EPOCH", "", "MOVE", "IN SYNC"))
    counts = Counter(row.status for row in rows)
    words = [f"{number:,} {_word(status)}" for status, number in counts.items()]
    printer.print(f"[dim]{output.count(len(rows), 'partition')}: {', '.join(words)}[/]")


def _changes(row: PartitionRow, table: Table) -> str:
    """Return the nodes that are being added (+) to a partition's replicas, and removed (-)."""
    added = [f"+{_name(number, table)}" for number in row.adding]
    removed = [f"-{_name(number, table)}" for number in row.removing]
    return " ".join(added + removed)


# --- one -----------------------------------------------------------------------------------------


def partition(
    session: Session,
    partition_id: Annotated[int, typer.Argument(metavar="PARTITION", min=0)],
) -> int | None:
    """One partition: its size, and each of its copies with its node and how far it is."""
    with session.admin() as admin:
        status = admin.status()
    table = status.table
    if table is None or not table.rows:
        output.note(NO_PARTITIONS)
        return None
    if partition_id >= len(table.rows):
        return _unknown(session, partition_id, len(table.rows))
    row = table.rows[partition_id]
    size, copies = _asked(status, table, row)
    if session.json:
        known = {} if size is None else {"records": size.records, "bytes": size.bytes}
        copy_json = [_copy_json(row, n, table, copies.get(n)) for n in row.replicas]
        guessed = None if size is None else size.guessed
        empty = {"records": None, "bytes": None}
        answer = {**partition_json(row, table), **empty, **known, "guessed": guessed}
        output.print_json({**answer, "copies": copy_json})
        return None
    _print_partition(row, table, size, copies)
    return None


def _asked(
    status: ClusterStatus, table: Table, row: PartitionRow
) -> tuple[PartitionSize | None, Mapping[int, Checksum]]:
    """Ask nodes for the partition's size (None: no node leads it), and how far their copies are."""
    p = int(row.partition_id)
    live: dict[int, tuple[int, ...]] = {n: (p,) for n in row.replicas if _serves(n, table)}
    with Replicas() as nodes:
        size = nodes.sizes(status, (p,))[p] if row.primary in live else None
        found, _ = nodes.checksums(table, live, positions_only=True, timeout_s=SIZES_S_MAX)
    return size, {number: copy for (number, _), copy in found.items()}


def _serves(number: NodeNumber, table: Table) -> bool:
    node = table.nodes.get(number)
    return node is not None and node.status in (NodeStatus.ACTIVE, NodeStatus.DRAINING)


def _role(row: PartitionRow, number: NodeNumber) -> str:
    return "primary" if number == row.primary else "backup"


def _copy_state(row: PartitionRow, number: NodeNumber, table: Table) -> str:
    if not _serves(number, table):
        return "down"
    if number in row.in_sync:
        return "in sync"
    return "being added" if number in row.adding else "catching up"


def _copy_json(
    row: PartitionRow, number: NodeNumber, table: Table, copy: Checksum | None
) -> dict[str, Any]:
    node = table.nodes.get(number)
    return {
        "node": _name(number, table),
        "address": node.address if node else None,
        "role": _role(row, number),
        "state": _copy_state(row, number, table).replace(" ", "_"),
        "complete_through": copy.complete_through if copy and copy.usable else None,
    }


def _print_partition(
    row: PartitionRow, table: Table, size: PartitionSize | None, copies: Mapping[int, Checksum]
) -> None:
    printer = output.console()
    leads = f"{node_name(table, row.primary)} leads it" if row.primary else "nobody leads it"
    text = f"Partition {row.partition_id} is {_state(row)}"
    text += f" ({_why(row)})" * bool(row.offline_reason)
    text += f"; {output.escape(leads)}, in epoch {row.primary_epoch:,}."
    if size is not None:
        mark = "~" if size.guessed else ""
        records = f"{size.records:,} record{'' if size.records == 1 else 's'}"
        text += f" {mark}{records}, {mark}{output.bytes_text(size.bytes)} a copy."
    printer.print(text)
    shown = output.table("NODE", "ADDRESS", "ROLE", "COPY", ">COMPLETE THROUGH", "")
    for number in row.replicas:
        node, copy = table.nodes.get(number), copies.get(number)
        through = f"{copy.complete_through:,}" if copy is not None and copy.usable else "-"
        leaving = "being removed" if number in row.removing else ""
        wanted = "is to lead" if number == row.wanted_primary else ""
        shown.add_row(
            output.escape(node_name(table, number)),
            output.escape(node.address) if node else "-",
            _role(row, number),
            _copy_state(row, number, table),
            through,
            leaving or wanted,
        )
    output.show(shown, expendable=("", "COMPLETE THROUGH"))


# --- keys ----------------------------------------------------------------------------------------


def where(
    session: Session,
    keys: Annotated[list[str], typer.Argument(metavar="KEY…", help="Keys, as text.")],
    *,
    encoding: Encoding,
) -> int | None:
    """Show in which partition keys are, and which nodes have them: ROUTED BY is what of the key is
    hashed. Reads no record: a key has its place whether there is one or not. --json: one object per
    line.
    """
    wanted = [encoding.decode(key, "KEY") for key in keys]
    with session.admin() as admin:
        table = admin.status().table
    if table is None or not table.rows:
        output.note(NO_PARTITIONS)
        return None
    known = partitioner_of(table.keyspaces.named(session.keyspace))
    found = [(key, known.routing_bytes(key)) for key in wanted]
    rows = [table.rows[known.partition_of_routing(routing_bytes)] for _, routing_bytes in found]
    if session.json:
        for (key, routing_bytes), row in zip(found, rows, strict=True):
            told = {
                "key": output.json_bytes(key),
                "routing_bytes": output.json_bytes(routing_bytes),
                "hash": str(known.hash_of(routing_bytes)),  # of md5 it has more than 64 bits
            }
            output.print_json({**told, **partition_json(row, table)})
        return None
    shown = output.table(
        "KEY",
        "ROUTED BY",
        ">HASH",
        ">PARTITION",
        "STATE",
        "PRIMARY",
        "ADDRESS",
        "IN SYNC",
        "REPLICAS",
    )
    for (key, routing_bytes), row in zip(found, rows, strict=True):
        node = table.nodes.get(row.primary)
        shown.add_row(
            output.escape(printable_bytes(key)),
            output.escape(printable_bytes(routing_bytes)),
            str(known.hash_of(routing_bytes)),
            str(row.partition_id),
            _state(row),
            output.escape(_name(row.primary, table) or "-"),
            output.escape(node.address) if node else "-",
            _names(row.in_sync, table),
            _names(row.replicas, table),
        )
    output.show(shown, expendable=("HASH", "REPLICAS", "ADDRESS"))
    return None


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "where",
        panel="Data",
        keyed=True,
        examples=["koinon where user:1 user:2", "koinon where 7 --json"],
    )(where)
