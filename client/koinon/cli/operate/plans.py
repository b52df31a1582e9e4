"""rebalance, drain, replace, set-replication-factor: show a plan, ask, and execute the plan that
was shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from koinon.cli.console import output
from koinon.cli.console.command import DONE, RefusedError, Session, Yes, command
from koinon.cli.console.reply import Block, Column, Reply, Table, remark, show
from koinon.cli.console.units import UINT32_MAX
from koinon.cli.operate.move_control import PANEL, NodeId, follow, steps
from koinon.operate.admin import Admin
from koinon.operate.judge.plan_costs import BalanceAnswer, Costed, PlanAnswer, plan_answer
from koinon.operate.plans import Plan, PlanBy, PlanKind, PlannedMove, PlanRequest
from koinon.operate.replicas import Replicas
from koinon.operate.wording import bytes_text, count, duration_text, name_order, ranges
from koinon_proto.contract.cluster_errors import PlanStaleError
from koinon_proto.contract.errors import KoinonError, UnknownFateError
from koinon_proto.contract.keyspaces import half_of
from koinon_proto.contract.table import NodeStatus

app = typer.Typer()
PLAN_TIMEOUT_MS = 30_000
STALE_MAX = 5
"""The number of times in a row that a new plan is shown because the cluster has changed."""


@dataclass(frozen=True, kw_only=True)
class How:
    """The options common to all plans."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False
    wait: Annotated[bool, typer.Option("--wait", help="Follow the moves until they are done.")] = (
        False
    )
    yes: Yes = False
    every: Annotated[bool, typer.Option("--all", help="Show each partition's move.")] = False


@dataclass(frozen=True, kw_only=True)
class Aim:
    """The purpose of a plan.

    Attributes:
        also: a sentence on its effect besides the moves; '': none.
        change: a call that has this effect; None: executing the plan has it.
        at_end: advice for the time after the plan is done.
    """

    request: PlanRequest
    also: str = ""
    change: Callable[[Admin], None] | None = None
    at_end: str = ""


class Measure(StrEnum):
    """The values of ``--by``."""

    COUNT = "count"
    LOAD = "load"
    BYTES = "bytes"


@command(
    app,
    panel=PANEL,
    examples=[
        "admin rebalance --dry-run",
        "admin rebalance --wait",
        "admin rebalance --by load --leaders-only",
    ],
)
def rebalance(
    session: Session,
    *,
    by: Annotated[
        Measure, typer.Option("--by", help="Make the nodes even by this measure.")
    ] = Measure.COUNT,
    target: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            max=10.0,
            help="By load or bytes: the busiest node may have so many times the mean "
            "(1.3, if this is left out).",
        ),
    ] = None,
    leaders_only: Annotated[
        bool, typer.Option("--leaders-only", help="By load: copy nothing, only change who leads.")
    ] = False,
    how: How,
) -> Reply:
    """Spread replicas and primaries over the nodes by their weights, with as few moves as possible.

    By load, the busiest node is relieved: it leads less, and where that does not help, gives
    replicas away. Shows the plan and asks. Reads and writes go on while replicas move.
    """
    if by is Measure.COUNT and target is not None:
        raise typer.BadParameter("--target needs --by load or --by bytes")
    if by is not Measure.LOAD and leaders_only:
        raise typer.BadParameter("--leaders-only needs --by load")
    request = PlanRequest(
        kind=PlanKind.REBALANCE,
        by=PlanBy[by.name],
        target_percent=round(100 * target) if target else 0,
        leaders_only=leaders_only,
    )
    return _planned(session, how, Aim(request=request))


@command(app, panel=PANEL, examples=["admin drain n2 --wait", "admin drain n2 --undo"])
def drain(
    session: Session,
    node: NodeId,
    *,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let it take replicas again; moves nothing back.")
    ] = False,
    how: How,
) -> Reply:
    """Move all replicas off a node, and assign it no new ones. 'remove' takes it out afterwards."""
    if undo and how.dry_run:
        raise typer.BadParameter("--undo moves nothing: there is no plan for --dry-run to show")
    if undo:
        with session.admin() as admin:
            admin.set_node_status(node, NodeStatus.ACTIVE)
        return Reply(
            {"node": node, "draining": False},
            f"{node} takes replicas again; 'koinon admin rebalance' gives it its share.",
        )
    aim = Aim(
        request=PlanRequest(kind=PlanKind.DRAIN, node_id=node),
        also=f"{node} is to be marked as draining, so that it gets no replicas any more.",
        change=lambda admin: admin.set_node_status(node, NodeStatus.DRAINING),
        at_end=f"{node} is draining: it gets no replicas any more. Once it holds nothing: "
        f"'koinon admin remove {node}'.",
    )
    return _planned(session, how, aim)


@command(app, panel=PANEL, examples=["admin replace n2 n5 --wait"])
def replace(
    session: Session,
    old: Annotated[str, typer.Argument(metavar="OLD")],
    new: Annotated[str, typer.Argument(metavar="NEW")],
    *,
    how: How,
) -> Reply:
    """Move every replica of the node OLD to the node NEW."""
    aim = Aim(
        request=PlanRequest(kind=PlanKind.REPLACE, node_id=old, with_node_id=new),
        at_end=f"Once {old} holds nothing: 'koinon admin remove {old}'.",
    )
    return _planned(session, how, aim)


@command(app, panel=PANEL, examples=["admin set-replication-factor 3 --dry-run"])
def set_replication_factor(
    session: Session,
    copies: Annotated[int, typer.Argument(metavar="COPIES", min=1, max=UINT32_MAX)],
    *,
    keyspace: Annotated[
        str, typer.Option("--keyspace", help="Of this keyspace; by default of 'default'.")
    ] = "",
    how: How,
) -> Reply:
    """Set the number of copies of each partition of a keyspace.

    Writes then need half of them in sync, rounded up; 'koinon admin keyspaces alter NAME
    --min-in-sync' changes that.
    """
    kind = PlanKind.REPLICATION_FACTOR
    aim = Aim(
        request=PlanRequest(kind=kind, replication_factor=copies, keyspace=keyspace),
        also=f"Each partition is to have {count(copies, 'copy')}; writes will need "
        f"{half_of(copies)} of them in sync.",
    )
    return _planned(session, how, aim)


# --- execution -----------------------------------------------------------------------------------


def _planned(session: Session, how: How, aim: Aim) -> Reply:
    """Make a plan, show it, ask, and execute it; begin again if the cluster has changed since."""
    with session.admin(PLAN_TIMEOUT_MS) as admin, Replicas() as replicas:
        for _ in range(STALE_MAX):
            costed = _cost(admin, replicas, aim.request)
            if not session.json:
                with output.telling("nothing was changed: the plan"):
                    show(*_plan_blocks(costed, aim, every=how.every))
            if how.dry_run or (not costed.plan.moves and not aim.also):
                answer = plan_answer(costed, executed=False)
                return Reply(answer, done="nothing was changed: the plan")
            session.ask("Carry this out?", yes=how.yes, shows=", --dry-run only shows it")
            if _execute(admin, costed.plan, aim):
                return _afterwards(session, admin, costed, wait=how.wait, at_end=aim.at_end)
    raise RefusedError(
        "the cluster changes faster than it can be planned for; nothing was moved",
        "Try again when no other change is under way: 'koinon admin moves' shows what moves.",
    )


def _cost(admin: Admin, replicas: Replicas, request: PlanRequest) -> Costed:
    plan = admin.plan(request)
    status = admin.status()
    assert status.table is not None, "there is a plan"
    moved = [move.partition_id for move in plan.moves]
    sizes = replicas.sizes(status, moved) if moved else {}
    return Costed(plan=plan, table=status.table, sizes=sizes)


def _execute(admin: Admin, plan: Plan, aim: Aim) -> bool:
    """Execute the plan; return False if the cluster has changed since the plan was made."""
    try:
        if plan.moves or aim.request.kind is PlanKind.REPLICATION_FACTOR:
            admin.execute(aim.request, plan.plan_id)
    except PlanStaleError:
        output.note("The cluster has changed since this plan was made. The plan now:")
        return False
    except UnknownFateError as fate:
        if not _is_queued(admin, plan, fate):
            raise
    if aim.change is not None:
        aim.change(admin)
    return True


def _is_queued(admin: Admin, plan: Plan, fate: UnknownFateError) -> bool:
    """Return whether a plan whose reply was lost has been accepted; raise ``fate`` if that is
    unknown.
    """
    try:
        return any(move.plan_id == plan.plan_id for move in admin.moves().moves)
    except KoinonError:  # the error of this query would say that nothing was changed
        raise fate from None


def _afterwards(
    session: Session, admin: Admin, costed: Costed, *, wait: bool, at_end: str
) -> Reply:
    moves, code, notes = costed.plan.moves, DONE, []
    if moves and wait:
        code = follow(session, admin, plan=costed.plan, sizes=costed.sizes)
    elif moves:
        notes.append(
            f"accepted: {count(len(moves), 'move')}. 'koinon admin moves --watch' follows "
            "them; 'pause' and 'cancel' stop them."
        )
    if at_end and not code:
        notes.append(at_end)
    done = "the plan was accepted, but this result"
    return Reply(plan_answer(costed, executed=True), code=code, done=done, notes=notes)


# --- display -------------------------------------------------------------------------------------


_SAID = {"room_unknown": "Not known", "load_unknown": "Not known", "slow_node": "Note"}
"""The words before a refusal, by its code; of other codes: Left undone."""
_REMEDY = (
    "'koinon admin hot' names the hottest keys of such a partition, and the ways to spread them; "
    "docs/balance.md compares these."
)


def _plan_blocks(costed: Costed, aim: Aim, *, every: bool) -> list[Block]:
    answer, by = plan_answer(costed, executed=False), aim.request.by
    ordered = sorted(answer.nodes, key=lambda node: name_order(node.id))
    nodes = Table((*BALANCE, *_load_columns(by)), ordered)
    blocks: list[Block] = ["Nothing to move."]
    if answer.moves:
        moves = _each(costed) if every else _grouped(costed)
        blocks = [moves, "", nodes, "", _summary(costed, answer)]
    elif by is not PlanBy.COUNT:
        blocks = [nodes, "", *blocks]
    if by is not PlanBy.COUNT:
        blocks.append(_skew(answer))
    for refusal in answer.refusals:
        where = f" (partitions {ranges(refusal.partition_ids)})" if refusal.partition_ids else ""
        said = _SAID.get(refusal.code, "Left undone")
        blocks.append(remark(f"{said}:", "yellow", f"{refusal.reason}{where}"))
    if any(refusal.code == "hot_partition" for refusal in answer.refusals):
        blocks.append(_REMEDY)
    return [*blocks, aim.also] if aim.also else blocks


def _load_columns(by: PlanBy) -> tuple[Column, ...]:
    """Return the columns that plans by load or bytes add to the nodes' counts."""
    if by is PlanBy.COUNT:
        return ()

    def text(attribute: str) -> Callable[[BalanceAnswer], str]:
        def shown(node: BalanceAnswer) -> str:
            value = getattr(node.load, attribute, None)
            if value is None:
                return "-"
            if attribute.startswith("times"):
                return f"{value:.2f}"
            return bytes_text(round(value)) if by is PlanBy.BYTES else f"{value:.3f}"

        return shown

    return (
        Column(">BYTES" if by is PlanBy.BYTES else ">CORES", text("before")),
        Column("", lambda _: "→"),
        Column(">THEN", text("after")),
        Column(">TIMES MEAN", text("times_mean")),
        Column("", lambda _: "→"),
        Column(">THEN", text("times_mean_after")),
    )


def _skew(answer: PlanAnswer) -> str:
    loads = [node.load for node in answer.nodes if node.load is not None]
    before = [load.times_mean for load in loads if load.times_mean is not None]
    after = [load.times_mean_after for load in loads if load.times_mean_after is not None]
    if not before or not after:
        return "No load was measured yet."
    text = f"The busiest node has {max(before):.2f} times the mean"
    return f"{text}, and {max(after):.2f} afterwards." if answer.moves else f"{text}."


def _what(move: PlannedMove, to: int | None) -> str:
    if not move.added and not move.dropped:
        return "lead"
    return "drop" if to is None else "copy"


def _grouped(costed: Costed) -> Table:
    """Return the moves, grouped by their source and target nodes."""
    groups: dict[tuple[str, str, str, str], list[PlannedMove]] = defaultdict(list)
    for move in costed.plan.moves:
        for old, new in steps(move):
            what = _what(move, new)
            groups[what, costed.name(old), costed.name(new), move.reason].append(move)
    order = sorted(groups, key=lambda g: (g[0], name_order(g[1]), name_order(g[2]), g[3]))
    rows = [(*group, groups[group]) for group in order]
    return Table(
        [
            Column("FROM", lambda row: row[1]),
            Column("TO", lambda row: row[2]),
            Column("WHAT", lambda row: row[0]),
            Column(">PARTITIONS", lambda row: len(row[4])),
            *_size_columns(costed, lambda row: row[4] if row[0] == "copy" else []),
            Column("WHY", lambda row: row[3]),
        ],
        rows,
    )


def _each(costed: Costed) -> Table:
    return Table(
        [
            Column(">PARTITION", lambda move: str(move.partition_id)),
            Column("NOW", lambda move: " ".join(map(costed.name, move.origin))),
            Column("THEN", lambda move: " ".join(map(costed.name, move.target))),
            *_size_columns(costed, lambda move: [move] if move.added else []),
            Column("WHY", "reason"),
        ],
        costed.plan.moves,
    )


def _size_columns(
    costed: Costed, copied: Callable[..., Sequence[PlannedMove]]
) -> tuple[Column, Column]:
    """Return the columns for the size of a row's copies; ``copied`` returns those of its moves that
    copy data.
    """

    def text(row: object, attribute: str, form: Callable[[int], str]) -> str:
        sizes = [costed.sizes[move.partition_id] for move in copied(row)]
        mark = "~" if any(size.guessed for size in sizes) else ""
        return f"{mark}{form(sum(getattr(size, attribute) for size in sizes))}" if sizes else ""

    return (
        Column(">RECORDS", lambda row: text(row, "records", "{:,}".format)),
        Column(">BYTES", lambda row: text(row, "bytes", bytes_text)),
    )


def _received(node: BalanceAnswer) -> str:
    mark = "~" if node.guessed else ""
    return f"{mark}{bytes_text(node.receives_bytes)}" if node.receives_bytes else ""


BALANCE = (
    Column("NODE", "id"),
    Column(">REPLICAS", "replicas"),
    Column("", lambda _: "→"),
    Column(">THEN", "replicas_after"),
    Column(">PRIMARIES", "primaries"),
    Column("", lambda _: "→"),
    Column(">THEN", "primaries_after"),
    Column(">RECEIVES", _received),
)


def _summary(costed: Costed, answer: PlanAnswer) -> str:
    copies = sum(len(move.added) for move in costed.plan.moves)
    mark = "about " if costed.guessed_of() else ""
    text = f"{count(len(answer.moves), 'move')}, {count(copies, 'new replica')}, "
    text += f"{mark}{bytes_text(answer.bytes)} to copy"
    seconds, said = costed.seconds()
    text += f"; estimated {duration_text(seconds)} ({said})"
    if costed.table.moves.paused:
        text += ". Moves are paused: nothing begins before 'koinon admin resume'"
    return text + "."
