"""force-primary: lets another copy lead partitions whose in-sync copies do not come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from koinon.cli.console import output
from koinon.cli.console.command import NOT_FOUND, USAGE, RefusedError, Session, command
from koinon.cli.console.reply import Block, Column, Reply, Table, remark, show
from koinon.cli.console.units import partition_ids
from koinon.cli.operate.move_control import PANEL
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import table_of
from koinon.operate.replicas import Checksum, Replicas
from koinon.operate.wording import bytes_text, count, node_name, ranges
from koinon_proto.contract.cluster_errors import MembershipChangeError, UnknownNodeError
from koinon_proto.contract.errors import UnknownFateError
from koinon_proto.contract.table import (
    NodeNumber,
    OfflineReason,
    PartitionRow,
    PartitionStatus,
)
from koinon_proto.contract.table import Table as PartitionTable

app = typer.Typer()
CLUSTER_TIMEOUT_MS = 10_000
LOST, OFFLINE = "lost", "offline"
WHO_HAS = (
    "'koinon admin partitions' shows the nodes with copies: start these nodes, or name one of them."
)


@dataclass(kw_only=True)
class Choice:
    """For each partition the copy that is to lead, and the objections to this choice."""

    leaders: dict[int, NodeNumber] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    """Partitions that cannot be forced, with the reason."""
    empty: list[int] = field(default_factory=list)
    """Partitions whose chosen copy is unusable, although another copy is usable or may be."""
    usable: Counter[NodeNumber] = field(default_factory=Counter)
    """The number of usable copies of the partitions in ``empty``, by node."""
    behind: Counter[NodeNumber] = field(default_factory=Counter)
    """The number of copies that are more complete than the chosen one, by node."""
    silent: Counter[NodeNumber] = field(default_factory=Counter)
    """The number of copies whose node does not answer, by node."""


@dataclass(frozen=True, kw_only=True)
class Forced:
    """A partition with a new primary."""

    partition_id: int
    primary: str
    primary_epoch: int


@dataclass(frozen=True, kw_only=True)
class NotForced:
    """A partition that was skipped, and why."""

    partition_id: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ForceAnswer:
    """The partitions that were forced, and the skipped ones."""

    forced: list[Forced]
    not_forced: list[NotForced]


@command(app, panel=PANEL, examples=["admin force-primary 17 n2", "admin force-primary lost"])
def force_primary(
    session: Session,
    partitions: Annotated[
        str,
        typer.Argument(
            metavar="PARTITIONS",
            help="Such as 3 or 0-15,40. 'lost': all whose in-sync copies are gone with their "
            "stores; 'offline': those, and those whose nodes are down.",
        ),
    ],
    node: Annotated[
        str | None,
        typer.Argument(
            metavar="NODE",
            help="Whose copies are to lead; without it, the most complete one of each.",
        ),
    ] = None,
    *,
    accepted: Annotated[
        bool,
        typer.Option("--yes-i-may-lose-writes", help="Do not ask: writes may be lost for good."),
    ] = False,
    even_if_empty: Annotated[
        bool,
        typer.Option(
            "--even-if-empty", help="Though NODE's copy is not usable, and another is or may be."
        ),
    ] = False,
) -> Reply:
    """Let replicas lead offline partitions although they may lack acknowledged writes.

    The last resort, for when no in-sync copy comes back. Writes that the chosen copy lacks are lost
    for good, and the other copies are made like it: first start every node that has one. Shows the
    state of the copies before it asks.
    """
    with session.admin(CLUSTER_TIMEOUT_MS) as admin:
        table = table_of(admin.status())
        rows = _rows(table, partitions)
        named = _number(table, node)
        if not rows:
            nothing = f"No partition is {partitions}: nothing has to be forced."
            return Reply(ForceAnswer(forced=[], not_forced=[]), nothing)
        with Replicas() as replicas:
            found, reasons = replicas.checksums(table, _asked(rows), positions_only=len(rows) > 1)
        choice = choose(rows, named, lambda n, p: found.get((n, p)))
        if partitions not in (LOST, OFFLINE) and choice.skipped:
            reason = "; ".join(dict.fromkeys(choice.skipped.values()))
            raise _refused(f"{ranges(sorted(choice.skipped))}: {reason}", WHO_HAS)
        if not session.json:
            with output.telling("nothing was changed: the choice of copies"):
                if len(rows) == 1:
                    show(*_copies_blocks(rows[0], table, found, reasons))
                show(*_choice_blocks(choice, table, len(rows)))
        if choice.empty and not even_if_empty:
            raise _refused_empty(choice, table)
        if not choice.leaders:
            raise _refused("there is no copy that could lead", WHO_HAS)
        if not accepted:
            _ask_for_loss(session, choice)
        return _carry_out(admin, table, choice)


# --- what to do ----------------------------------------------------------------------------------


def _rows(table: PartitionTable, partitions: str) -> list[PartitionRow]:
    """Return the rows of the partitions; print which of the named ones are served and so left
    out.
    """
    if partitions in (LOST, OFFLINE):
        offline = [row for row in table.used_rows if row.status is PartitionStatus.OFFLINE]
        lost = OfflineReason.STORE_LOST
        return [r for r in offline if partitions == OFFLINE or r.offline_reason is lost]
    chosen = partition_ids(partitions)
    if chosen[-1] >= len(table.rows):
        raise typer.BadParameter(f"the partitions are 0 to {len(table.rows) - 1}")
    rows = [table.rows[p] for p in chosen]
    served = [row.partition_id for row in rows if row.status is not PartitionStatus.OFFLINE]
    if served:
        verb = "is" if len(served) == 1 else "are"
        raise MembershipChangeError(
            reason=f"{ranges(served)} {verb} served: nothing has to be forced"
        )
    return rows


def _number(table: PartitionTable, node: str | None) -> NodeNumber | None:
    if node is None:
        return None
    known = table.by_id.get(node)  # type: ignore[call-overload]
    if known is None:
        raise UnknownNodeError(node_id=node)
    return NodeNumber(known.number)


def _asked(rows: Iterable[PartitionRow]) -> dict[int, list[int]]:
    """Return the partitions to ask each node about, by node number."""
    asked: dict[int, list[int]] = {}
    for row in rows:
        for number in row.replicas:
            asked.setdefault(number, []).append(row.partition_id)
    return asked


def choose(
    rows: Iterable[PartitionRow],
    named: NodeNumber | None,
    copy_of: Callable[[NodeNumber, int], Checksum | None],
) -> Choice:
    """Choose the copy that leads each partition: that of the named node, or else the most complete
    usable copy, of equal copies the first in the order of preference.

    Args:
        copy_of: returns a node's report on its copy of a partition; None if the node does not
            answer.
    """
    choice = Choice()
    for row in rows:
        partition_id = int(row.partition_id)
        copies = {number: copy_of(number, partition_id) for number in row.replicas}
        usable = {n: copy for n, copy in copies.items() if copy is not None and copy.usable}
        silent = [n for n, copy in copies.items() if copy is None]
        best = max(usable, key=lambda n: usable[n].complete_through, default=None)
        leader = best if named is None else named
        choice.silent.update(silent)
        if leader is None:
            choice.skipped[partition_id] = "no copy of it that answers is usable"
            continue
        if leader not in copies:
            choice.skipped[partition_id] = "the node has no copy of it"
            continue
        choice.leaders[partition_id] = leader
        if leader in usable:
            through = usable[leader].complete_through
            choice.behind.update(n for n in usable if usable[n].complete_through > through)
        elif usable or set(silent) - {leader}:
            choice.usable.update(list(usable))
            choice.empty.append(partition_id)
    return choice


# --- showing it ----------------------------------------------------------------------------------


def _copies_blocks(
    row: PartitionRow,
    table: PartitionTable,
    found: dict[tuple[int, int], Checksum],
    reasons: dict[int, str],
) -> list[Block]:
    """Return lines on the state of each copy of one partition."""

    def copy_of(number: NodeNumber) -> Checksum | None:
        return found.get((number, int(row.partition_id)))

    def state(number: NodeNumber) -> str:
        copy = copy_of(number)
        if copy is None:
            return f"unknown: {reasons.get(number, 'the node does not say')}"
        return "usable" if copy.usable else "not usable"

    def through(number: NodeNumber) -> str | None:
        copy = copy_of(number)
        if copy is None:
            return None
        epoch, sequence = copy.complete_through >> 40, copy.complete_through & ((1 << 40) - 1)
        return f"epoch {epoch}, {sequence:,}"

    columns = [
        Column("NODE", lambda number: node_name(table, number)),
        Column("IN SYNC", lambda number: "yes" if number in row.in_sync else "no"),
        Column("COPY", state),
        Column(">COMPLETE THROUGH", through),
        Column(">RECORDS", lambda number: (copy := copy_of(number)) and copy.records),
        Column(">BYTES", lambda number: (copy := copy_of(number)) and bytes_text(copy.bytes)),
    ]
    reason = f" ({row.offline_reason.name.lower()})" if row.offline_reason else ""
    return [
        f"Partition {row.partition_id} is offline{reason}. Its replicas:",
        Table(columns, row.replicas),
    ]


def _choice_blocks(choice: Choice, table: PartitionTable, offline: int) -> list[Block]:
    """Return lines on the choice and on the reasons against it."""
    blocks: list[Block] = []
    if offline > 1:
        blocks.append(f"{count(offline, 'partition')} are offline.")
    for number, leads in sorted(Counter(choice.leaders.values()).items()):
        blocks.append(f"  {node_name(table, number)} is to lead {count(leads, 'partition')}.")
    for reason in dict.fromkeys(choice.skipped.values()):
        left_out = [p for p, why in choice.skipped.items() if why == reason]
        blocks.append(f"Left out: {ranges(left_out)}: {reason}.")
    for number, more in sorted(choice.behind.items()):
        copies = f"{node_name(table, number)}'s copies of {count(more, 'partition')}."
        advice = "Without NODE the most complete copy leads each."
        blocks.append(remark("More complete:", "yellow", f"{copies} {advice}"))
    for number, unknown in sorted(choice.silent.items()):
        held = f"what {node_name(table, number)} holds of {count(unknown, 'partition')}."
        advice = "Start it first: its copies may be the best."
        blocks.append(remark("Not known:", "yellow", f"{held} {advice}"))
    return blocks


# --- refusing and asking -------------------------------------------------------------------------


def _refused(reason: str, advice: str, better: Sequence[str] | None = None) -> RefusedError:
    return RefusedError(f"not carried out: {reason}", advice, better=better)


def _refused_empty(choice: Choice, table: PartitionTable) -> RefusedError:
    one = len(choice.empty) == 1
    them = f"partition {choice.empty[0]}" if one else f"partitions {ranges(choice.empty)}"
    copies = "copy of it is not usable" if one else "copies of them are not usable"
    number = choice.leaders[choice.empty[0]]
    reason = f"{them}: {node_name(table, number)}'s {copies}, and the others would be made like it"
    better = [
        *(f"{node_name(table, n)} has a usable one" for n in sorted(choice.usable)),
        *(
            f"{node_name(table, n)} does not report its copies: start it first"
            for n in sorted(choice.silent)
            if n != number
        ),
    ]
    return _refused(
        reason, f"{'; '.join(better)}.\n  --even-if-empty does it all the same.", better
    )


def _ask_for_loss(session: Session, choice: Choice) -> None:
    """Have the operator type the size of the loss; raise unless the text is right."""
    if session.json or not output.somebody_is_there():
        raise _refused(
            "there is no terminal to ask on",
            "--yes-i-may-lose-writes carries it out without asking.",
        )
    output.note("Acknowledged writes that the chosen copies lack would be lost for good.")
    number = len(choice.leaders)
    expected, what = str(number), f"how many partitions that are ({number})"
    if number == 1:
        expected = str(next(iter(choice.leaders)))
        what = f"the partition's number ({expected})"
    typed = typer.prompt(f"To confirm, type {what}", err=True)
    if str(typed).strip() != expected:
        output.note("nothing was changed")
        raise typer.Exit(NOT_FOUND)


# --- carrying it out -----------------------------------------------------------------------------


def _carry_out(admin: Admin, table: PartitionTable, choice: Choice) -> Reply:
    """Elect the chosen copies. A partition that has changed meanwhile is refused and listed."""
    wanted = {p: node_name(table, number) for p, number in choice.leaders.items()}
    try:
        epochs, refused = admin.force_primaries(wanted)
    except UnknownFateError:
        output.note("run it again: partitions that are led by then are passed over")
        raise
    answer = ForceAnswer(
        forced=[
            Forced(partition_id=p, primary=wanted[p], primary_epoch=epoch)
            for p, epoch in epochs.items()
        ],
        not_forced=[
            NotForced(partition_id=p, reason=reason)
            for p, reason in sorted((choice.skipped | refused).items())
        ],
    )
    for reason in dict.fromkeys(refused.values()):
        partitions = [p for p, why in refused.items() if why == reason]
        output.problem(f"not forced: {ranges(partitions)}: {reason}")
    if not answer.forced:
        return Reply(answer, code=USAGE)
    return Reply(answer, _summary(answer.forced))


def _summary(forced: Sequence[Forced]) -> str:
    if len(forced) == 1:
        (one,) = forced
        led = f"{one.primary} leads partition {one.partition_id} from epoch {one.primary_epoch} on"
        return f"{led}. Its other replicas follow it."
    leads = Counter(one.primary for one in forced)
    words = ", ".join(f"{name} leads {number:,}" for name, number in sorted(leads.items()))
    return f"{count(len(forced), 'partition')} forced: {words}. Their other replicas follow."
