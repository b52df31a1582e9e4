"""force-primary: the way out when no in-sync copy of one or many partitions comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.session import NOT_FOUND, USAGE, Session
from koinon.cli.console.units import partition_ids
from koinon.cli.operate.verify import ready_table
from koinon.operate.health import ranges
from koinon.operate.nodes import node_name
from koinon.operate.replicas import Checksum, Replicas
from koinon_proto.contract.cluster_errors import MembershipChangeError, UnknownNodeError
from koinon_proto.contract.errors import UnknownFateError
from koinon_proto.contract.table import (
    NodeNumber,
    OfflineReason,
    PartitionRow,
    PartitionStatus,
    Table,
)

if TYPE_CHECKING:
    from koinon.operate.admin import Admin

CLUSTER_TIMEOUT_MS = 10_000
LOST, OFFLINE = "lost", "offline"
WHO_HAS = "'koinon admin partitions' shows who has copies: start those nodes, or name one of them."


@dataclass(kw_only=True)
class Choice:
    """The copy of each partition that is to lead, and the objections to it."""

    leaders: dict[int, NodeNumber] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    """Partitions that cannot be forced, and why."""
    empty: list[int] = field(default_factory=list)
    """Partitions whose copy to lead is not usable, though another one is or may be."""
    usable: Counter[NodeNumber] = field(default_factory=Counter)
    """The number of usable copies of those that are ``empty``, by node."""
    behind: Counter[NodeNumber] = field(default_factory=Counter)
    """The number of copies that are complete through more than the one to lead, by node."""
    silent: Counter[NodeNumber] = field(default_factory=Counter)
    """The number of copies whose node does not answer, by node."""


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
) -> int | None:
    """Let replicas lead offline partitions though they may lack acknowledged writes.

    The last resort, for when no in-sync copy comes back. What the chosen copy lacks is lost for
    good, and the others are made like it: start every node that has one first. Shows what is known
    of the copies before it asks.
    """
    with session.admin(CLUSTER_TIMEOUT_MS) as admin:
        table = ready_table(admin)
        rows = _rows(table, partitions)
        named = _number(table, node)
        if not rows:
            nothing = f"No partition is {partitions}: nothing has to be forced."
            session.say(nothing, {"forced": [], "not_forced": []})
            return None
        with Replicas() as replicas:
            found, reasons = replicas.checksums(table, _asked(rows), positions_only=len(rows) > 1)
        choice = choose(rows, named, lambda n, p: found.get((n, p)))
        if partitions not in (LOST, OFFLINE) and choice.skipped:
            reason = "; ".join(dict.fromkeys(choice.skipped.values()))
            return _refuse(session, f"{ranges(sorted(choice.skipped))}: {reason}", WHO_HAS)
        if not session.json:
            if len(rows) == 1:
                _print_copies(rows[0], table, found, reasons)
            _print_choice(choice, table, len(rows))
        if choice.empty and not even_if_empty:
            return _refuse_empty(session, choice, table)
        if not choice.leaders:
            return _refuse(session, "no copy is there that could lead", WHO_HAS)
        if not accepted and (refused := _ask_for_loss(session, choice)) is not None:
            return refused
        return _carry_out(session, admin, table, choice)


# --- what to do ----------------------------------------------------------------------------------


def _rows(table: Table, partitions: str) -> list[PartitionRow]:
    """Return the rows of the partitions named. Of those that are served by name, say so."""
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


def _number(table: Table, node: str | None) -> NodeNumber | None:
    if node is None:
        return None
    known = table.by_id.get(node)  # type: ignore[call-overload]
    if known is None:
        raise UnknownNodeError(node_id=node)
    return NodeNumber(known.number)


def _asked(rows: Iterable[PartitionRow]) -> dict[int, list[int]]:
    """Return which partitions to ask each node for."""
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
    """Choose the copy that leads each partition: the named node's, or else the usable one that is
    complete through most, of equal ones the more preferred.

    Args:
        copy_of: what a node says of its copy of a partition; None if it does not answer.
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


def _print_copies(
    row: PartitionRow,
    table: Table,
    found: dict[tuple[int, int], Checksum],
    reasons: dict[int, str],
) -> None:
    """One partition: what each copy holds."""
    reason = f" ({row.offline_reason.name.lower()})" if row.offline_reason else ""
    output.console().print(
        f"Partition {row.partition_id} is offline{reason}. Its replicas:", markup=False
    )
    shown = output.table("NODE", "IN SYNC", "COPY", ">COMPLETE THROUGH", ">RECORDS", ">BYTES")
    for number in row.replicas:
        copy = found.get((number, int(row.partition_id)))
        usual = "yes" if number in row.in_sync else "no"
        cells = ["", "", ""]
        what = f"unknown: {reasons.get(number, 'the node does not say')}"
        if copy is not None:
            what = "usable" if copy.usable else "not usable"
            through = copy.complete_through
            through_text = f"epoch {through >> 40}, {through & ((1 << 40) - 1):,}"
            cells = [through_text, f"{copy.records:,}", output.bytes_text(copy.bytes)]
        shown.add_row(node_name(table, number), usual, output.escape(what), *cells)
    output.show(shown)


def _print_choice(choice: Choice, table: Table, offline: int) -> None:
    """Print the choice, and what an operator should know before agreeing."""
    printer = output.console()
    if offline > 1:
        printer.print(f"{output.count(offline, 'partition')} are offline.", markup=False)
    for number, leads in sorted(Counter(choice.leaders.values()).items()):
        printer.print(
            f"  {node_name(table, number)} is to lead {output.count(leads, 'partition')}."
        )
    for reason in dict.fromkeys(choice.skipped.values()):
        left_out = [p for p, why in choice.skipped.items() if why == reason]
        printer.print(f"Left out: {ranges(left_out)}: {reason}.", markup=False)
    for number, more in sorted(choice.behind.items()):
        printer.print(
            f"[yellow]More complete:[/] {output.escape(node_name(table, number))}'s copies of "
            f"{output.count(more, 'partition')}. Without NODE the most complete copy leads each."
        )
    for number, unknown in sorted(choice.silent.items()):
        printer.print(
            f"[yellow]Not known:[/] what {output.escape(node_name(table, number))} holds of "
            f"{output.count(unknown, 'partition')}. Start it first: its copies may be the best."
        )


# --- refusing and asking -------------------------------------------------------------------------


def _refuse(session: Session, reason: str, advice: str, **more: Any) -> int:
    return session.refuse(f"not carried out: {reason}", advice, **more)


def _refuse_empty(session: Session, choice: Choice, table: Table) -> int:
    one = len(choice.empty) == 1
    them = f"partition {choice.empty[0]}" if one else f"partitions {ranges(choice.empty)}"
    copies = "copy of it is not usable" if one else "copies of them are not usable"
    number = choice.leaders[choice.empty[0]]
    reason = f"{them}: {node_name(table, number)}'s {copies}, and the others would be made like it"
    better = [
        *(f"{node_name(table, n)} has a usable one" for n in sorted(choice.usable)),
        *(
            f"{node_name(table, n)} does not say what it has: start it first"
            for n in sorted(choice.silent)
            if n != number
        ),
    ]
    advice = f"{'; '.join(better)}.\n  --even-if-empty does it all the same."
    return _refuse(session, reason, advice, better=better)


def _ask_for_loss(session: Session, choice: Choice) -> int | None:
    if session.json or not output.somebody_is_there():
        return _refuse(
            session,
            "nobody is there to ask",
            "--yes-i-may-lose-writes carries it out without asking.",
        )
    output.note("Acknowledged writes that the chosen copies lack are lost for good.")
    count = len(choice.leaders)
    expected, what = str(count), f"how many partitions that are ({count})"
    if count == 1:
        expected = str(next(iter(choice.leaders)))
        what = f"the partition's number ({expected})"
    typed = typer.prompt(f"To go on, type {what}", err=True)
    if str(typed).strip() == expected:
        return None
    output.note("nothing was changed")
    return NOT_FOUND


# --- carrying it out -----------------------------------------------------------------------------


def _carry_out(session: Session, admin: Admin, table: Table, choice: Choice) -> int | None:
    """Elect them. One that has changed meanwhile is refused, and named."""
    wanted = {p: node_name(table, number) for p, number in choice.leaders.items()}
    try:
        epochs, refused = admin.force_primaries(wanted)
    except UnknownFateError:
        output.note("run it again: partitions that are led by then are passed over")
        raise
    forced = [(p, wanted[p], epoch) for p, epoch in epochs.items()]
    answer = {
        "forced": [
            {"partition_id": partition_id, "primary": name, "primary_epoch": epoch}
            for partition_id, name, epoch in forced
        ],
        "not_forced": [
            {"partition_id": partition_id, "reason": reason}
            for partition_id, reason in sorted((choice.skipped | refused).items())
        ],
    }
    for reason in dict.fromkeys(refused.values()):
        partitions = [p for p, why in refused.items() if why == reason]
        output.problem(f"not forced: {ranges(partitions)}: {reason}")
    if forced or session.json:
        session.say(_summary(forced), answer)
    return None if forced else USAGE


def _summary(forced: Sequence[tuple[int, str, int]]) -> str:
    if len(forced) == 1:
        partition_id, name, epoch = forced[0]
        led = f"{name} leads partition {partition_id} from epoch {epoch} on"
        return f"{led}. Its other replicas follow it."
    leads = Counter(name for _, name, _ in forced)
    words = ", ".join(f"{name} leads {number:,}" for name, number in sorted(leads.items()))
    return f"{output.count(len(forced), 'partition')} forced: {words}. Their other replicas follow."
