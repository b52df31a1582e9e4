"""admin status, nodes and coordinators: show the health and the members of the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from koinon.cli.console.command import NOT_FOUND, Session, command, default_command
from koinon.cli.console.help import Group
from koinon.cli.console.reply import Block, Column, Reply, Styled, Table, facts, remark
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.answers import (
    BriefAnswer,
    CoordinatorAnswer,
    NodeAnswer,
    StatusAnswer,
    coordinators_of,
    nodes_of,
    status_answer,
)
from koinon.operate.loads_client import LoadView
from koinon.operate.wording import bytes_text, count
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeStatus

app = typer.Typer()
coordinators_app = typer.Typer(cls=Group)

NODE_STATES = {
    NodeStatus.ACTIVE: Styled("active", "green"),
    NodeStatus.FENCED: Styled("down", "red"),
    NodeStatus.DRAINING: Styled("draining", "yellow"),
    NodeStatus.LEFT: Styled("left", "dim"),
}
NODES = (
    Column("NODE", "id"),
    Column("ADDRESS", "address", narrow=6),
    Column("RACK", "rack", narrow=2, if_any=True),
    Column("STATE", lambda node: NODE_STATES[node.status]),
    Column(">PRIMARIES", "primaries"),
    Column(">REPLICAS", "replicas"),
    Column(">RECORDS", lambda node: node.stats and node.stats.records),
    Column(">USED", lambda node: node.stats and bytes_text(node.stats.used_bytes), narrow=5),
    Column(">READS/S", lambda node: node.stats and f"{node.stats.reads_per_second:,.0f}", narrow=3),
    Column(
        ">WRITES/S", lambda node: node.stats and f"{node.stats.writes_per_second:,.0f}", narrow=4
    ),
    Column(">HEARD", lambda node: node.stats and f"{node.stats.heard_ms_ago:,} ms ago", narrow=1),
)


def _role(member: CoordinatorAnswer) -> str | Styled:
    if member.leader:
        return Styled("leader", "bold")
    return "follower" if member.voter else "learner"


def _state(member: CoordinatorAnswer) -> Styled:
    if member.active is None:
        return Styled("unknown", "dim")
    up = member.active or member.leader
    return Styled("up", "green") if up else Styled("silent", "red")


COORDINATORS = (
    Column("COORDINATOR", "id"),
    Column("ADDRESS", "address"),
    Column("ROLE", _role),
    Column("STATE", _state),
    Column(">LOG AT", lambda member: member.match_index or None, narrow=1),
)


def coordinators_table(members: Sequence[CoordinatorAnswer]) -> Table:
    return Table(COORDINATORS, sorted(members, key=lambda member: member.id))


def nodes_table(nodes: Sequence[NodeAnswer]) -> Table:
    return Table(NODES, nodes)


def summary_line(summary: str) -> list[str | Styled]:
    """Return the summary line with its first words in colour."""
    for words, style in (("All is well.", "bold green"), ("Attention:", "bold red")):
        if summary.startswith(words):
            return [Styled(words, style), summary.removeprefix(words)]
    return [summary]


def status_blocks(status: ClusterStatus, answer: StatusAnswer) -> list[Block]:
    """Return the health and the members of the cluster as lines and tables."""
    blocks: list[Block] = [
        summary_line(answer.summary),
        *(f"           {problem}" for problem in answer.problems[1:]),
        *[remark("Note:", "dim", note) for note in answer.notes],
        "",
        facts(_facts(status, answer)),
        "",
        coordinators_table(answer.coordinators),
    ]
    return [*blocks, "", nodes_table(answer.nodes)] if answer.nodes else blocks


def _facts(status: ClusterStatus, answer: StatusAnswer) -> dict[str, str | None]:
    table = status.table
    used = len(table.used_rows) if table else 0
    return {
        "cluster": answer.cluster_id,
        "table": f"version {answer.table_version:,}" if table else None,
        "partitions": f"{answer.partitions.online:,} of {used:,} online, by {answer.partitioner}, "
        f"{count(answer.replication_factor, 'copy')} each"
        if table
        else None,
        "keyspaces": ", ".join(answer.keyspaces) if len(answer.keyspaces) > 1 else None,
        "data": _data_text(status) if status.sessions else None,
        "raft": f"term {status.term}, committed up to {status.commit_index:,}",
    }


def _data_text(status: ClusterStatus) -> str:
    """Return the line on records and bytes of all live nodes; each copy of a record counts."""
    copies = sum(s.records for s in status.sessions if s.live)
    used = bytes_text(sum(s.used_bytes for s in status.sessions if s.live))
    rows = status.table.used_rows if status.table is not None else ()
    replicas = sum(len(row.replicas) for row in rows)
    too = "deleted ones count until they are purged"
    if replicas <= len(rows):
        return f"{count(copies, 'record')}, {used} ({too})"
    records = count(round(copies * len(rows) / replicas), "record")
    return f"{copies:,} copies of about {records}, {used} ({too})"


# --- the commands --------------------------------------------------------------------------------


def _status(session: Session) -> ClusterStatus:
    with session.admin() as admin:
        return admin.status()


@command(
    app,
    examples=["admin status", "admin status --brief || alert", "admin status --json | jq .ok"],
)
def status(
    session: Session,
    *,
    brief: Annotated[
        bool, typer.Option("--brief", "-q", help="The first line alone; ends with 1 unless well.")
    ] = False,
) -> Reply:
    """Show the health of the cluster. The first line says whether all is well, and if not, what to
    do.
    """
    with session.admin() as admin:
        found = admin.status()
        loads = () if brief else _loads(admin, found)
    answer = status_answer(found, loads)
    if brief:
        told = BriefAnswer(ok=answer.ok, summary=answer.summary)
        return Reply(told, [summary_line(answer.summary)], code=0 if answer.ok else NOT_FOUND)
    blocks = status_blocks(found, answer)
    return Reply(answer, blocks, code=0 if found.leader_id else NOT_FOUND)


def _loads(admin: Admin, status: ClusterStatus) -> Iterable[LoadView]:
    """Return the bulk loads, or () if the request fails: the status is shown without them."""
    if status.table is None or not status.table.loads or not status.is_leader:
        return ()
    try:
        return admin.loads()
    except KoinonError:
        return ()


@command(app)
def nodes(session: Session) -> Reply:
    """List the storage nodes: their state, data and traffic."""
    found = nodes_of(_status(session))
    if not found:
        return Reply(found, notes=["no node has registered yet"])
    return Reply(found, [nodes_table(found)])


@default_command(coordinators_app)
def coordinators(session: Session) -> Reply:
    """List the coordinators: their leader, and how far each is behind. Subcommands change the
    group.
    """
    found = coordinators_of(_status(session))
    return Reply(found, [coordinators_table(found)])


MemberId = Annotated[str, typer.Argument(metavar="ID")]


@command(
    coordinators_app,
    examples=[
        "coordinator --id c4 --listen 127.0.0.1:7403 --data ./c4 --join &",
        "admin coordinators add c4 127.0.0.1:7403",
    ],
)
def add(
    session: Session,
    member_id: MemberId,
    address: Annotated[str, typer.Argument(metavar="HOST:PORT")],
) -> Reply:
    """Add a coordinator that runs with --join. It votes as soon as it has caught up."""
    with session.admin() as admin:
        admin.add_coordinator(member_id, address)
    return Reply({"added": member_id}, f"{member_id} at {address} is a coordinator now.")


@command(coordinators_app)
def remove(session: Session, member_id: MemberId) -> Reply:
    """Remove a coordinator from the group. Its process may be stopped afterwards."""
    with session.admin() as admin:
        admin.remove_coordinator(member_id)
    return Reply({"removed": member_id}, f"{member_id} is no coordinator any more.")


@command(coordinators_app)
def transfer(
    session: Session,
    member_id: Annotated[
        str, typer.Argument(metavar="[ID]", help="By default the best caught-up one.")
    ] = "",
) -> Reply:
    """Hand the leadership to another coordinator."""
    with session.admin() as admin:
        leader = admin.transfer_leadership(member_id)
    return Reply({"leader_id": leader}, f"{leader} leads.")
