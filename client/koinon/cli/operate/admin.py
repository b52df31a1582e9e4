"""admin: status, nodes, partitions, coordinators; and the list of all that an operator can do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from koinon.cli.console import output
from koinon.cli.console.help import Group
from koinon.cli.console.session import NOT_FOUND, Body, Session, command, default_command
from koinon.cli.operate import (
    access,
    bulk_loads,
    force,
    hot,
    keyspaces,
    moves,
    partitions,
    rebalance_and_drain,
    size,
    verify,
)
from koinon.operate.admin import Admin, ClusterStatus, count_by_primary
from koinon.operate.bulk_loads import LoadView
from koinon.operate.health import is_short, notes, problems, replicas_by_node, summary
from koinon.operate.nodes import by_name
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeInfo, NodeStatus, PartitionStatus, Table

app = typer.Typer(
    cls=Group,
    help="Look at the cluster; change its coordinators, its nodes, and where replicas are.",
    no_args_is_help=True,
)
coordinators_app = typer.Typer(cls=Group)
REPLICAS_PANEL = "Nodes and replicas"

NODE_COLORS = {
    NodeStatus.ACTIVE: "green",
    NodeStatus.FENCED: "red",
    NodeStatus.DRAINING: "yellow",
    NodeStatus.LEFT: "dim",
}
NODE_WORDS = {NodeStatus.FENCED: "down", NodeStatus.ACTIVE: "active"}
NODE_COLUMNS_EXPENDABLE = ("HEARD", "RACK", "READS/S", "WRITES/S", "USED", "ADDRESS")
"""Columns that a narrow terminal leaves out, in this order."""


def print_status(status: ClusterStatus, loads: Iterable[LoadView] = ()) -> None:
    """The whole of it, for people: how it is, what it consists of."""
    printer = output.console()
    printer.print(summary_text(status))
    for problem in problems(status)[1:]:
        printer.print(f"           {output.escape(problem)}")
    for note in notes(status, loads):
        printer.print(f"[dim]Note:[/] {output.escape(note)}")
    printer.print()
    _print_facts(status)
    printer.print()
    output.show(coordinators_table(status), expendable=("LOG AT",))
    if status.table is not None and status.table.nodes:
        printer.print()
        output.show(nodes_table(status, status.table), expendable=NODE_COLUMNS_EXPENDABLE)


def summary_text(status: ClusterStatus) -> Text:
    """The line that says whether all is well, with its first words in colour."""
    text = Text(summary(status))
    for words, style in (("All is well.", "bold green"), ("Attention:", "bold red")):
        if text.plain.startswith(words):
            text.stylize(style, 0, len(words))
    return text


def _print_facts(status: ClusterStatus) -> None:
    facts = output.table("", "")
    facts.show_header = False
    if (table := status.table) is not None:
        config = table.cluster
        facts.add_row("[dim]cluster[/]", output.escape(config.cluster_id))
        facts.add_row("[dim]table[/]", f"version {table.table_version:,}")
        online = Counter(row.status for row in table.used_rows)[PartitionStatus.ONLINE]
        facts.add_row(
            "[dim]partitions[/]",
            f"{online:,} of {len(table.used_rows):,} online, by {config.partitioner}, "
            f"{output.count(config.replication_factor, 'copy')} each",
        )
        if len(table.keyspaces) > 1:
            names = ", ".join(keyspace.name for keyspace in table.keyspaces)
            facts.add_row("[dim]keyspaces[/]", output.escape(names))
    if status.sessions:
        facts.add_row("[dim]data[/]", _data_text(status))
    facts.add_row("[dim]raft[/]", f"term {status.term}, committed up to {status.commit_index:,}")
    output.show(facts)


def _data_text(status: ClusterStatus) -> str:
    """Return what all nodes hold together: they count copies, of which each record has several."""
    copies = sum(s.records for s in status.sessions if s.live)
    used = output.bytes_text(sum(s.used_bytes for s in status.sessions if s.live))
    rows = status.table.used_rows if status.table is not None else ()
    replicas = sum(len(row.replicas) for row in rows)
    if replicas <= len(rows):
        return f"{output.count(copies, 'record')}, {used}"
    records = output.count(round(copies * len(rows) / replicas), "record")
    return f"{copies:,} copies of about {records}, {used}"


def coordinators_table(status: ClusterStatus) -> Any:
    """The coordinators, as the answering one sees them."""
    shown = output.table("COORDINATOR", "ADDRESS", "ROLE", "STATE", ">LOG AT")
    for member in sorted(status.coordinators, key=lambda c: c.member_id):
        leads = member.leader or member.member_id == status.leader_id
        role = "[bold]leader[/]" if leads else "follower" if member.voter else "learner"
        state = "[dim]unknown[/]"
        if status.is_leader:
            state = "[green]up[/]" if member.active or leads else "[red]silent[/]"
        index = f"{member.match_index:,}" if member.match_index else ""
        shown.add_row(member.member_id, output.escape(member.address), role, state, index)
    return shown


def nodes_table(status: ClusterStatus, table: Table) -> Any:
    """The nodes, with what they hold and do."""
    racks = any(node.rack for node in table.nodes.values())
    columns = ["NODE", "ADDRESS", *["RACK"] * racks, "STATE", ">PRIMARIES", ">REPLICAS"]
    shown = output.table(*columns, ">RECORDS", ">USED", ">READS/S", ">WRITES/S", ">HEARD")
    primaries, replicas = count_by_primary(table), replicas_by_node(table)
    for node in by_name(table.nodes.values()):
        word = NODE_WORDS.get(node.status, node.status.name.lower())
        state = f"[{NODE_COLORS[node.status]}]{word}[/]"
        cells = [
            node.node_id,
            output.escape(node.address),
            *[output.escape(node.rack)] * racks,
            state,
        ]
        cells += [f"{primaries[node.number]:,}", f"{replicas[node.number]:,}"]
        session = status.session_of(node.number)
        if session is not None and session.live:
            cells += [
                f"{session.records:,}",
                output.bytes_text(session.used_bytes),
                f"{session.reads_per_second:,.0f}",
                f"{session.writes_per_second:,.0f}",
                f"{session.heard_ms_ago:,} ms ago",
            ]
        shown.add_row(*cells)
    return shown


# --- for programs --------------------------------------------------------------------------------


def status_json(status: ClusterStatus, loads: Iterable[LoadView] = ()) -> dict[str, Any]:
    """The stable form of ``admin status --json``."""
    table = status.table
    return {
        "ok": not problems(status),
        "summary": summary(status),
        "problems": problems(status),
        "notes": notes(status, loads),
        "cluster_id": table.cluster.cluster_id if table else None,
        "table_version": table.table_version if table else 0,
        "partitioner": table.cluster.partitioner if table else None,
        "partition_count": table.cluster.partition_count if table else 0,
        "replication_factor": table.cluster.replication_factor if table else 0,
        "min_in_sync": table.cluster.min_in_sync if table else 0,
        "partitions": partitions_json(table),
        "answered_by": status.member_id,
        "leader_id": status.leader_id or None,
        "leader_address": status.leader_address or None,
        "term": status.term,
        "commit_index": status.commit_index,
        "applied_index": status.applied_index,
        "elections": asdict(status.elections),
        "coordinators": coordinators_json(status),
        "nodes": nodes_json(status),
    }


def partitions_json(table: Table | None) -> dict[str, int]:
    """Return the numbers of partitions by state."""
    rows = table.used_rows if table else ()
    counts = Counter(row.status for row in rows)
    return {
        "online": counts[PartitionStatus.ONLINE],
        "assigned": counts[PartitionStatus.ASSIGNED],
        "offline": counts[PartitionStatus.OFFLINE],
        "under_replicated": sum(map(is_short, rows)),
        "moving": sum(bool(row.adding or row.removing) for row in rows),
    }


def coordinators_json(status: ClusterStatus) -> list[dict[str, Any]]:
    return [
        {
            "id": member.member_id,
            "address": member.address,
            "voter": member.voter,
            "leader": member.leader or member.member_id == status.leader_id,
            "active": member.active if status.is_leader else None,
            "match_index": member.match_index,
        }
        for member in status.coordinators
    ]


def nodes_json(status: ClusterStatus) -> list[dict[str, Any]]:
    table = status.table
    if table is None:
        return []
    primaries, replicas = count_by_primary(table), replicas_by_node(table)
    return [
        {
            "id": node.node_id,
            "number": node.number,
            "address": node.address,
            "rack": node.rack,
            "status": node.status.name.lower(),
            "node_epoch": node.node_epoch,
            "primaries": primaries[node.number],
            "replicas": replicas[node.number],
            "weight": node.weight,
            "stats": _stats_json(status, node),
        }
        for node in by_name(table.nodes.values())
    ]


def _stats_json(status: ClusterStatus, node: NodeInfo) -> dict[str, Any] | None:
    session = status.session_of(node.number)
    if session is None or not session.live:
        return None
    return {
        "heard_ms_ago": session.heard_ms_ago,
        "records": session.records,
        "used_bytes": session.used_bytes,
        "map_bytes": session.map_bytes,
        "disk_free_bytes": session.disk_free_bytes,
        "disk_bytes": session.disk_bytes,
        "commit_out_ms": session.commit_out_ms,
        "commit_ms": session.commit_ms,
        "reads_per_second": round(session.reads_per_second, 1),
        "writes_per_second": round(session.writes_per_second, 1),
    }


# --- commands ------------------------------------------------------------------------------------


def _status(session: Session) -> ClusterStatus:
    with session.admin() as admin:
        return admin.status()


def show_status(
    session: Session,
    *,
    brief: Annotated[
        bool, typer.Option("--brief", "-q", help="The first line alone; ends with 1 unless well.")
    ] = False,
) -> int | None:
    """Show how the cluster is. The first line says whether all is well, and if not, what to do."""
    with session.admin() as admin:
        status = admin.status()
        loads = () if brief else _loads(admin, status)
    if session.json:
        whole = status_json(status, loads)
        output.print_json({k: whole[k] for k in ("ok", "summary")} if brief else whole)
    elif brief:
        output.console().print(summary_text(status), soft_wrap=True)
    else:
        print_status(status, loads)
    ill = bool(problems(status)) if brief else not status.leader_id
    return NOT_FOUND if ill else None


def _loads(admin: Admin, status: ClusterStatus) -> tuple[LoadView, ...]:
    """Return the bulk loads, () where they cannot be had: nothing of the status depends on them."""
    if status.table is None or not status.table.loads or not status.is_leader:
        return ()
    try:
        return admin.loads()
    except KoinonError:
        return ()


def nodes(session: Session) -> None:
    """The storage nodes: their state, what they hold, what they do."""
    status = _status(session)
    if session.json:
        output.print_json(nodes_json(status))
    elif status.table is None or not status.table.nodes:
        output.note("no node has registered yet")
    else:
        output.show(nodes_table(status, status.table), expendable=NODE_COLUMNS_EXPENDABLE)


def list_coordinators(session: Session) -> None:
    """The coordinators: who leads, who is behind. Subcommands change them."""
    status = _status(session)
    if session.json:
        output.print_json(coordinators_json(status))
    else:
        output.show(coordinators_table(status), expendable=("LOG AT",))


MemberId = Annotated[str, typer.Argument(metavar="ID")]


def add(
    session: Session,
    member_id: MemberId,
    address: Annotated[str, typer.Argument(metavar="HOST:PORT")],
) -> None:
    """Add a coordinator that runs with --join. It votes as soon as it has caught up."""
    with session.admin() as admin:
        admin.add_coordinator(member_id, address)
    session.say(f"{member_id} at {address} is a coordinator now.", {"added": member_id})


def remove(session: Session, member_id: MemberId) -> None:
    """Take a coordinator out of the group. Its process may be stopped afterwards."""
    with session.admin() as admin:
        admin.remove_coordinator(member_id)
    session.say(f"{member_id} is no coordinator any more.", {"removed": member_id})


def transfer(
    session: Session,
    member_id: Annotated[
        str, typer.Argument(metavar="[ID]", help="By default the best caught-up one.")
    ] = "",
) -> None:
    """Hand the leadership to another coordinator."""
    with session.admin() as admin:
        leader = admin.transfer_leadership(member_id)
    session.say(f"{leader} leads.", {"leader_id": leader})


LOOKS: dict[str, tuple[Body, list[str]]] = {
    "status": (show_status, ["", "--brief || alert", "--json | jq .ok"]),
    "nodes": (nodes, []),
    "partitions": (partitions.partitions, ["--offline", "--node n2", "0-15 --json"]),
    "partition": (partitions.partition, ["17"]),
    "hot": (hot.hot, ["", "--by writes --seconds 10 --keys 5"]),
}
CHANGES: dict[str, tuple[Body, list[str]]] = {
    "rebalance": (rebalance_and_drain.rebalance, ["--dry-run", "--wait"]),
    "drain": (rebalance_and_drain.drain, ["n2 --wait", "n2 --undo"]),
    "remove": (moves.remove, ["n2"]),
    "replace": (rebalance_and_drain.replace, ["n2 n5 --wait"]),
    "set-replication-factor": (rebalance_and_drain.set_replication_factor, ["3 --dry-run"]),
    "moves": (moves.moves, ["--watch"]),
    "pause": (moves.pause, []),
    "resume": (moves.resume, []),
    "cancel": (moves.cancel, ["", "3 16-31"]),
    "throttle": (moves.throttle, ["50MB", "off"]),
    "moves-per-node": (moves.moves_per_node, ["8"]),
    "primaries": (moves.primaries, []),
    "verify": (verify.verify_copies, ["", "--partition 0-15"]),
    "force-primary": (force.force_primary, ["17 n2", "lost"]),
}
"""Commands by name, with the arguments of their examples."""
for _panel, _commands in ((None, LOOKS), (REPLICAS_PANEL, CHANGES)):
    for _name_of, (_function, _arguments) in _commands.items():
        _examples = [f"koinon admin {_name_of} {text}".rstrip() for text in _arguments]
        command(app, _name_of, examples=_examples, panel=_panel)(_function)
command(
    app,
    "size",
    examples=["koinon admin size --peak-mb-s 400 --rows 2000000000 --nodes 12"],
    connects=False,
)(size.size)
default_command(coordinators_app, list_coordinators)
command(
    coordinators_app,
    "add",
    examples=[
        "koinon coordinator --id c4 --listen 127.0.0.1:7403 --data ./c4 --join &",
        "koinon admin coordinators add c4 127.0.0.1:7403",
    ],
)(add)
command(coordinators_app, "remove")(remove)
command(coordinators_app, "transfer")(transfer)
app.add_typer(coordinators_app, name="coordinators")
app.add_typer(bulk_loads.app, name="loads")
app.add_typer(keyspaces.app, name="keyspaces")
access.add_to(app, "Who may do what")


def add_to(parent: typer.Typer) -> None:
    """Add the commands."""
    parent.add_typer(app, name="admin", rich_help_panel="The cluster")
