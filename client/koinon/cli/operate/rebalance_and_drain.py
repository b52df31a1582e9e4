"""rebalance, drain, replace, set-replication-factor: show a plan, ask, carry out just that plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.session import USAGE, Session
from koinon.cli.console.units import UINT32_MAX
from koinon.cli.operate.following import follow
from koinon.operate.health import ranges
from koinon.operate.moves import Plan, PlanKind, PlannedMove, PlanRequest
from koinon.operate.nodes import name_order, node_name
from koinon.operate.replicas import PartitionSize, Replicas
from koinon_proto.contract.cluster_errors import PlanStaleError
from koinon_proto.contract.errors import KoinonError, UnknownFateError
from koinon_proto.contract.keyspaces import half_of
from koinon_proto.contract.table import NodeStatus, Table

if TYPE_CHECKING:
    from koinon.operate.admin import Admin, ClusterStatus

PLAN_TIMEOUT_MS = 30_000
ASSUMED_BYTES_PER_SECOND = 30_000_000
STALE_MAX = 5
"""So often in a row is a new plan shown because the cluster has changed."""

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")]
Wait = Annotated[bool, typer.Option("--wait", help="Follow the moves until they are done.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Every = Annotated[bool, typer.Option("--all", help="Show each partition's move.")]
NodeId = Annotated[str, typer.Argument(metavar="NODE")]


@dataclass(frozen=True, kw_only=True)
class How:
    """The options that all plans have."""

    dry_run: DryRun = False
    wait: Wait = False
    yes: Yes = False
    every: Every = False


@dataclass(frozen=True, kw_only=True)
class Costed:
    """A plan with what is known of the partitions that it moves."""

    plan: Plan
    table: Table
    sizes: Mapping[int, PartitionSize]

    @property
    def bytes_by_receiver(self) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        for move in self.plan.moves:
            for number in move.added:
                found[number] += self.sizes[move.partition_id].bytes
        return dict(found)

    def guessed_of(self, receiver: int) -> bool:
        """Return whether any size that this node receives is guessed."""
        moves = (move for move in self.plan.moves if receiver in move.added)
        return any(self.sizes[move.partition_id].guessed for move in moves)

    @property
    def bytes_total(self) -> int:
        return sum(self.bytes_by_receiver.values())

    @property
    def records_total(self) -> int:
        return sum(len(m.added) * self.sizes[m.partition_id].records for m in self.plan.moves)

    @property
    def guessed(self) -> bool:
        return any(self.sizes[m.partition_id].guessed for m in self.plan.moves)

    def seconds(self) -> tuple[float, str]:
        """Return how long it takes the node that receives most, and what that rests on."""
        throttle = self.table.moves.bytes_per_second
        rate = throttle or ASSUMED_BYTES_PER_SECOND
        basis = "the throttle" if throttle else "assumed"
        said = f"{output.bytes_text(rate)}/s a node, {basis}"
        return max(self.bytes_by_receiver.values(), default=0) / rate, said

    def name(self, number: int | None) -> str:
        return "-" if number is None else node_name(self.table, number)


# --- the commands --------------------------------------------------------------------------------


def rebalance(
    session: Session,
    *,
    how: How,
) -> int | None:
    """Spread replicas and primaries over the nodes by their weights, with as few moves as it takes.

    Shows the plan and asks. Reads and writes go on while replicas move.
    """
    return _run(
        session,
        PlanRequest(kind=PlanKind.REBALANCE),
        how,
    )


def drain(
    session: Session,
    node: NodeId,
    *,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let it take replicas again; moves nothing back.")
    ] = False,
    how: How,
) -> int | None:
    """Move everything off a node, and give it nothing new. 'remove' takes it out afterwards."""
    if undo and how.dry_run:
        raise typer.BadParameter("--undo moves nothing: there is no plan for --dry-run to show")
    if undo:
        with session.admin() as admin:
            admin.set_node_status(node, NodeStatus.ACTIVE)
        session.say(
            f"{node} takes replicas again; 'koinon admin rebalance' gives it its share.",
            {"node": node, "draining": False},
        )
        return None

    def mark(admin: Admin) -> None:
        admin.set_node_status(node, NodeStatus.DRAINING)

    return _run(
        session,
        PlanRequest(kind=PlanKind.DRAIN, node_id=node),
        how,
        also=(f"{node} is marked as draining: it gets no replicas any more.", mark),
        at_end=f"Once it holds nothing: 'koinon admin remove {node}'.",
    )


def replace(
    session: Session,
    old: Annotated[str, typer.Argument(metavar="OLD")],
    new: Annotated[str, typer.Argument(metavar="NEW")],
    *,
    how: How,
) -> int | None:
    """Give every replica of the node OLD to the node NEW."""
    return _run(
        session,
        PlanRequest(kind=PlanKind.REPLACE, node_id=old, with_node_id=new),
        how,
        at_end=f"Once {old} holds nothing: 'koinon admin remove {old}'.",
    )


def set_replication_factor(
    session: Session,
    copies: Annotated[int, typer.Argument(metavar="COPIES", min=1, max=UINT32_MAX)],
    *,
    keyspace: Annotated[
        str, typer.Option("--keyspace", help="Of this keyspace; by default of 'default'.")
    ] = "",
    how: How,
) -> int | None:
    """Keep so many copies of each partition of a keyspace.

    Writes then need half of them in sync, rounded up; 'koinon admin keyspaces alter NAME
    --min-in-sync' changes that.
    """
    return _run(
        session,
        PlanRequest(kind=PlanKind.REPLICATION_FACTOR, replication_factor=copies, keyspace=keyspace),
        how,
        also=(
            f"Each partition is to have {output.count(copies, 'copy')}; writes will need "
            f"{half_of(copies)} of them in sync.",
            None,
        ),
    )


Also = tuple[str, "Callable[[Admin], None] | None"]
"""A plan's effect besides its moves: in words, and a call, unless carrying out the plan does it."""


def _run(
    session: Session,
    request: PlanRequest,
    how: How,
    *,
    also: Also | None = None,
    at_end: str = "",
) -> int | None:
    """Plan, show, ask and execute, until the plan that was agreed to is the one carried out."""
    with session.admin(PLAN_TIMEOUT_MS) as admin, Replicas() as replicas:
        for _ in range(STALE_MAX):
            costed = _cost(admin, replicas, request)
            plan = costed.plan
            _show(session, costed, every=how.every)
            if how.dry_run or (not plan.moves and also is None):
                _answer(session, costed, executed=False)
                return None
            if also is not None and not session.json:
                output.console().print(also[0], markup=False)
            if not how.yes:
                refused = ask(session, "Carry this out?", shows=", --dry-run only shows it")
                if refused is not None:
                    return refused
            if not _execute(session, admin, request, costed, also):
                continue
            break
        else:
            return session.refuse(
                "the cluster changes faster than it can be planned for; nothing was moved",
                "Try again once it has come to rest: 'koinon admin moves' shows what moves.",
            )
        return _afterwards(session, admin, costed, wait=how.wait, at_end=at_end)


def _cost(admin: Admin, replicas: Replicas, request: PlanRequest) -> Costed:
    plan = admin.plan(request)
    status: ClusterStatus = admin.status()
    assert status.table is not None, "there is a plan"
    moved = [move.partition_id for move in plan.moves]
    sizes = replicas.sizes(status, moved) if moved else {}
    return Costed(plan=plan, table=status.table, sizes=sizes)


def _execute(
    session: Session, admin: Admin, request: PlanRequest, costed: Costed, also: Also | None
) -> bool:
    """Carry the plan out as it was shown; return False if the cluster has changed since."""
    plan = costed.plan
    try:
        if plan.moves or request.kind is PlanKind.REPLICATION_FACTOR:
            admin.execute(request, plan.plan_id)
    except PlanStaleError:
        output.note("The cluster has changed since this plan was made. The plan now:")
        return False
    except UnknownFateError as fate:
        if not _is_queued(admin, plan, fate):
            raise
    if also is not None and also[1] is not None:
        also[1](admin)
    return True


def _is_queued(admin: Admin, plan: Plan, fate: UnknownFateError) -> bool:
    """Return whether a plan whose answer got lost was taken; raise its ``fate`` if unknown."""
    try:
        return any(move.plan_id == plan.plan_id for move in admin.moves().moves)
    except KoinonError:  # which says that this question has changed nothing
        raise fate from None


def _afterwards(
    session: Session, admin: Admin, costed: Costed, *, wait: bool, at_end: str
) -> int | None:
    moves = costed.plan.moves
    if moves and not wait and not session.json:
        output.note(
            f"accepted: {output.count(len(moves), 'move')}. 'koinon admin moves --watch' follows "
            "them; 'pause' and 'cancel' are there too."
        )
    code = None
    if moves and wait:
        code = follow(session, admin, plan=costed.plan, sizes=costed.sizes)
    _answer(session, costed, executed=True)
    if at_end and not code and not session.json:
        output.note(at_end)
    return code


def ask(session: Session, question: str, *, shows: str = "") -> int | None:
    """Ask for leave; return None if it was given, else the exit code. ``shows``: what the command
    has that only shows the change.
    """
    if session.json or not output.somebody_is_there():
        return session.refuse(
            "not carried out: nobody is there to ask",
            f"--yes carries it out without asking{shows}.",
            error="not carried out: --yes is missing",
        )
    if typer.confirm(question, err=True):
        return None
    output.note("nothing was changed")
    return USAGE


def _answer(session: Session, costed: Costed, *, executed: bool) -> None:
    if session.json:
        output.print_json({**plan_json(costed), "executed": executed})


# --- how a plan looks ----------------------------------------------------------------------------


def _show(session: Session, costed: Costed, *, every: bool) -> None:
    if session.json:
        return
    printer = output.console()
    plan = costed.plan
    if plan.moves:
        output.show(_each(costed) if every else _grouped(costed))
        printer.print()
        output.show(_balance(costed))
        printer.print()
        printer.print(_summary(costed), markup=False)
    else:
        printer.print("Nothing to move.", markup=False)
    for refusal in plan.refusals:
        where = f" (partitions {ranges(refusal.partition_ids)})" if refusal.partition_ids else ""
        printer.print(f"[yellow]Left undone:[/] {output.escape(refusal.reason + where)}")


def steps(move: PlannedMove) -> list[tuple[int | None, int | None]]:
    """Return a move as steps from one node to another: (from, None) drops a copy, (None, to) adds
    one; a move that changes only the order is one between those that lead.
    """
    added, dropped = list(move.added), list(move.dropped)
    if not added and not dropped:
        return [(move.origin[0], move.target[0])]
    pairs = max(len(added), len(dropped))
    olds: list[int | None] = [*dropped, *[None] * (pairs - len(dropped))]
    news: list[int | None] = [*added, *[None] * (pairs - len(added))]
    return list(zip(olds, news, strict=True))


def _what(move: PlannedMove, to: int | None) -> str:
    if not move.added and not move.dropped:
        return "lead"
    return "drop" if to is None else "copy"


def _grouped(costed: Costed) -> Any:
    groups: dict[tuple[int | None, int | None, str, str], list[PlannedMove]] = defaultdict(list)
    for move in costed.plan.moves:
        for old, new in steps(move):
            groups[old, new, _what(move, new), move.reason].append(move)
    shown = output.table("FROM", "TO", "WHAT", ">PARTITIONS", ">RECORDS", ">BYTES", "WHY")
    rows = [
        (what, costed.name(old), costed.name(new), reason, moves)
        for (old, new, what, reason), moves in groups.items()
    ]
    rows.sort(key=lambda row: (row[0], name_order(row[1]), name_order(row[2]), row[3]))
    for what, old_name, new_name, reason, moves in rows:
        cells = [old_name, new_name, what, f"{len(moves):,}"]
        shown.add_row(*cells, *_size(costed, moves, what), output.escape(reason))
    return shown


def _each(costed: Costed) -> Any:
    shown = output.table(">PARTITION", "NOW", "THEN", ">RECORDS", ">BYTES", "WHY")
    for move in costed.plan.moves:
        what = "copy" if move.added else "lead"
        shown.add_row(
            str(move.partition_id),
            " ".join(map(costed.name, move.origin)),
            " ".join(map(costed.name, move.target)),
            *_size(costed, [move], what),
            output.escape(move.reason),
        )
    return shown


def _size(costed: Costed, moves: Sequence[PlannedMove], what: str) -> tuple[str, str]:
    if what != "copy":
        return "", ""
    sizes = [costed.sizes[move.partition_id] for move in moves]
    mark = "~" if any(size.guessed for size in sizes) else ""
    records, size = sum(s.records for s in sizes), sum(s.bytes for s in sizes)
    return f"{mark}{records:,}", f"{mark}{output.bytes_text(size)}"


def _balance(costed: Costed) -> Any:
    after = {balance.node_number: balance for balance in costed.plan.after}
    shown = output.table("NODE", ">REPLICAS", "", ">THEN", ">PRIMARIES", "", ">THEN", ">RECEIVES")
    by_name = sorted(costed.plan.before, key=lambda b: name_order(costed.name(b.node_number)))
    for before in by_name:
        then = after.get(before.node_number, before)
        receives = costed.bytes_by_receiver.get(before.node_number, 0)
        mark = "~" if costed.guessed_of(before.node_number) else ""
        shown.add_row(
            costed.name(before.node_number),
            f"{before.replicas:,}",
            "→",
            f"{then.replicas:,}",
            f"{before.primaries:,}",
            "→",
            f"{then.primaries:,}",
            f"{mark}{output.bytes_text(receives)}" if receives else "",
        )
    return shown


def _summary(costed: Costed) -> str:
    moves = costed.plan.moves
    copies = sum(len(move.added) for move in moves)
    mark = "about " if costed.guessed else ""
    text = f"{output.count(len(moves), 'move')}, {output.count(copies, 'new replica')}, "
    text += f"{mark}{output.bytes_text(costed.bytes_total)} to copy"
    seconds, said = costed.seconds()
    if copies:
        text += f"; at least {output.duration_text(seconds)} ({said})"
    if costed.table.moves.paused:
        text += ". Moves are paused: nothing begins before 'koinon admin resume'"
    return text + "."


def plan_json(costed: Costed) -> dict[str, Any]:
    """The stable form of a plan."""
    plan, name = costed.plan, costed.name
    after = {balance.node_number: balance for balance in plan.after}
    seconds, _ = costed.seconds()
    return {
        "plan_id": plan.plan_id,
        "table_version": plan.table_version,
        "moves": [
            {
                "partition_id": move.partition_id,
                "from": [name(number) for number in move.origin],
                "to": [name(number) for number in move.target],
                "reason": move.reason,
                "records": costed.sizes[move.partition_id].records,
                "bytes": costed.sizes[move.partition_id].bytes,
                "guessed": costed.sizes[move.partition_id].guessed,
            }
            for move in plan.moves
        ],
        "nodes": [
            {
                "id": name(before.node_number),
                "replicas": before.replicas,
                "replicas_after": after.get(before.node_number, before).replicas,
                "primaries": before.primaries,
                "primaries_after": after.get(before.node_number, before).primaries,
                "receives_bytes": costed.bytes_by_receiver.get(before.node_number, 0),
            }
            for before in plan.before
        ],
        "refusals": [
            {
                "code": refusal.code,
                "reason": refusal.reason,
                "node": name(refusal.node_number) if refusal.node_number else None,
                "partition_ids": list(refusal.partition_ids),
            }
            for refusal in plan.refusals
        ],
        "bytes": costed.bytes_total,
        "records": costed.records_total,
        "seconds": round(seconds, 1),
    }
