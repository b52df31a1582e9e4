"""admin groups: lists consumer groups with their members, sets their positions, deletes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from koinon.cli.console.command import Session, Yes, command, default_command
from koinon.cli.console.help import Group
from koinon.cli.console.reply import Block, Column, Reply, Styled, Table, facts
from koinon.core.feeds import FeedPositions, PartitionPosition
from koinon.operate.cluster_status import table_of
from koinon.operate.consumer_groups import (
    PAUSE_MS,
    CursorNodes,
    CursorView,
    GroupView,
)
from koinon.operate.wording import count, duration_text, ranges
from koinon_proto.contract import table as tables
from koinon_proto.contract.errors import InvalidArgumentError

app = typer.Typer(cls=Group, help="Consumers that share the changes of keyspaces.")
Name = Annotated[str, typer.Argument(metavar="NAME")]
TIMEOUT_MS = 20_000
END = (1 << 64) - 1
"""The sequence that stands for all changes that are complete."""


@dataclass(frozen=True, kw_only=True)
class GroupsAnswer:
    """All groups."""

    groups: Sequence[GroupView]


@dataclass(frozen=True, kw_only=True)
class GroupAnswer:
    """A group with its members and cursors. ``behind``: changes after all cursors whose distance
    is known.
    """

    group: GroupView
    cursors: Sequence[CursorView]
    behind: int


@dataclass(frozen=True, kw_only=True)
class ResetAnswer:
    """A group whose cursors were set."""

    group: str
    generation: int
    partitions: int


def _state(group: GroupView) -> Styled:
    if group.waits_ms:
        return Styled(f"waits {duration_text(group.waits_ms / 1000)}", "yellow")
    if not group.member_count:
        return Styled("empty", "dim")
    if group.unowned_count:
        return Styled("sharing", "yellow")
    return Styled("stable", "green")


GROUPS = (
    Column("GROUP", "name"),
    Column("STATE", _state),
    Column("STRATEGY", "strategy", narrow=2),
    Column(">MEMBERS", "member_count"),
    Column(">PARTITIONS", "partition_count"),
    Column(">UNOWNED", "unowned_count"),
    Column(">GENERATION", "generation", narrow=1),
    Column(">CHANGED", lambda group: f"{duration_text(group.changed_ms_ago / 1000)} ago", narrow=3),
)
MEMBERS = (
    Column("MEMBER", lambda m: m.member_id + (" (static)" if m.is_static else "")),
    Column("CLIENT", "client_name", narrow=1),
    Column("FROM", "peer", narrow=2),
    Column("USER", "user", if_any=True),
    Column("KEYSPACES", lambda m: ", ".join(m.keyspaces)),
    Column(">HEARD", lambda m: f"{duration_text(m.heard_ms_ago / 1000)} ago"),
    Column(">SESSION", lambda m: duration_text(m.session_ms / 1000), narrow=3),
    Column("PARTITIONS", lambda m: ranges(m.granted) if m.granted else Styled("idle", "dim")),
    Column("RELEASING", lambda m: ranges(m.releasing), if_any=True),
)


@default_command(app)
def groups(session: Session) -> Reply:
    """List the consumer groups."""
    with session.admin() as admin:
        found = admin.groups.all()
    blocks: list[Block] = [Table(GROUPS, found)] if found else ["There is no consumer group."]
    return Reply(GroupsAnswer(groups=found), blocks)


@command(app, examples=["admin groups describe billing"])
def describe(session: Session, name: Name) -> Reply:
    """Show a group with its members, their partitions, and how far behind they are."""
    with session.admin(TIMEOUT_MS) as admin, CursorNodes() as nodes:
        table = table_of(admin.status())
        group = admin.groups.get(name, table.keyspaces)
        timeout_s = session.timeout_or(TIMEOUT_MS) / 1000
        cursors = nodes.read(lambda: table_of(admin.status()), group.group_id, timeout_s=timeout_s)
    behind = sum(cursor.behind or 0 for cursor in cursors)
    answer = GroupAnswer(group=group, cursors=cursors, behind=behind)
    return Reply(answer, _blocks(group, cursors, behind))


@command(
    app,
    examples=[
        "admin groups reset billing --to beginning",
        "admin groups reset billing --to end --force",
    ],
)
def reset(
    session: Session,
    name: Name,
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="WHERE", help="beginning, end, or positions as 'koinon watch' prints them."
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Also while the group has members.")
    ] = False,
    yes: Yes = False,
) -> Reply:
    """Set a group's positions in all keyspaces that it has read.

    Members lose their partitions for a moment, and go on from the new positions. A group that has
    members is reset only with --force.
    """
    with session.admin(TIMEOUT_MS) as admin, CursorNodes() as nodes:
        group = admin.groups.get(name, table_of(admin.status()).keyspaces)
        timeout_s = session.timeout_or(TIMEOUT_MS) / 1000

        def table() -> tables.Table:
            return table_of(admin.status())

        cursors = nodes.read(table, group.group_id, timeout_s=timeout_s)
        positions = _positions(to, table(), cursors)
        session.ask(f"Set {count(len(positions), 'position')} of group {name}?", yes=yes)
        raised = admin.groups.raise_generation(name, forced=force, pause_ms=PAUSE_MS)
        nodes.reset(table, raised, positions, timeout_s=timeout_s)
        admin.groups.raise_generation(name, forced=force, pause_ms=0)
    answer = ResetAnswer(group=name, generation=raised[1], partitions=len(positions))
    return Reply(answer, f"Group {name} goes on from {to} in {count(len(positions), 'partition')}.")


@command(app, examples=["admin groups delete billing"])
def delete(session: Session, name: Name, *, yes: Yes = False) -> Reply:
    """Delete a group without members, and its positions.

    Consumers that join a group of this name later begin anew.
    """
    with session.admin(TIMEOUT_MS) as admin, CursorNodes() as nodes:
        group = admin.groups.get(name, table_of(admin.status()).keyspaces)
        session.ask(f"Delete group {name} and its positions?", yes=yes)
        timeout_s = session.timeout_or(TIMEOUT_MS) / 1000

        def table() -> tables.Table:
            return table_of(admin.status())

        cursors = nodes.read(table, group.group_id, timeout_s=timeout_s)
        held = [cursor.partition_id for cursor in cursors]
        admin.groups.delete(name)  # first: a group that goes on must not lose positions
        nodes.delete(table, group.group_id, held, timeout_s=timeout_s)
    return Reply({"deleted": name}, f"Group {name} is deleted.")


def _positions(
    to: str, table: tables.Table, cursors: Sequence[CursorView]
) -> dict[int, PartitionPosition]:
    """Return the position of each partition that a reset sets.

    Raises:
        InvalidArgumentError: ``to`` is none, or of another cluster, or there are no partitions.
    """
    if to not in ("beginning", "end"):
        given = FeedPositions.parse(to)
        table.cluster.check_id(given.cluster_id)
        return dict(given.partitions)
    place = PartitionPosition(END if to == "end" else 0)
    read = {cursor.keyspace for cursor in cursors}
    ids = [p for k in table.keyspaces if k.name in read for p in k.partition_ids]
    if not ids:
        raise InvalidArgumentError(
            field="group", reason="it has no positions yet: its consumers say where they begin"
        )
    return dict.fromkeys(ids, place)


def _blocks(group: GroupView, cursors: Sequence[CursorView], behind: int) -> list[Block]:
    unknown = sum(cursor.behind is None for cursor in cursors)
    distance = count(behind, "change")
    if unknown:
        distance += f", and an unknown number in {count(unknown, 'partition')}"
    blocks: list[Block] = [
        facts(
            {
                "group": f"{group.name}, id {group.group_id}",
                "strategy": group.strategy,
                "generation": f"{group.generation:,}",
                "partitions": f"{group.partition_count:,}, {group.unowned_count:,} without an "
                "owner",
                "behind": distance if cursors else "no position is committed",
            }
        ),
        "",
    ]
    if not group.members:
        return [*blocks, Styled("The group has no members.", "dim")]
    return [*blocks, Table(MEMBERS, group.members)]
