"""copy: copies rows from one keyspace into another, in the same cluster or between clusters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from koinon.cli.console.command import (
    DONE,
    INTERRUPTED,
    NOT_FOUND,
    UNAVAILABLE,
    USAGE,
    RefusedError,
    Session,
    command,
    fail,
    message_of,
    not_empty,
)
from koinon.cli.console.progress_bar import rows_and_rate, work_progress
from koinon.cli.console.reply import Block, Reply, Styled, remark
from koinon.cli.console.signals import Interrupt
from koinon.cli.data.key_value import PrefixEncoding
from koinon.cli.data.writing import DEFAULT_TIMEOUT_MS, Fates, SlabWriter
from koinon.core.quantities import duration_of
from koinon.core.scanning import partitions_with
from koinon.operate.json_form import IF_KNOWN, json_of
from koinon.operate.wording import bytes_text, count, duration_text
from koinon.options import parse
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.partitioner import partitioner_of

if TYPE_CHECKING:
    from koinon import Client
    from koinon.cli.data.comparing import Comparison
    from koinon.client import KeyspaceClient
    from koinon.types import Entry, Row


root = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class Place:
    """A keyspace that rows are copied from or to. ``text``: as the user named it."""

    text: str
    client: Client | KeyspaceClient
    cluster_id: str
    keyspace: Keyspace

    def is_same_as(self, other: Place) -> bool:
        ours, theirs = self.keyspace.keyspace_id, other.keyspace.keyspace_id
        return (self.cluster_id, ours) == (other.cluster_id, theirs)


class Places:
    """Opens keyspaces by name or URL. Keyspaces by name share one connection. A context that closes
    all connections.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open = ExitStack()
        self._own: Client | None = None  # to the session's own cluster

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def open(self, text: str) -> Place:
        """Open the keyspace of this name, or the one that the URL names."""
        if "://" in text:
            import koinon

            name = parse(text, {})[1].keyspace
            client = self._open.enter_context(koinon.connect(text))
            opened: Client | KeyspaceClient = client
        else:
            if self._own is None:
                self._own = self._open.enter_context(self._session.connect())
            name, client = text, self._own
            opened = client.keyspace(name)
        table = client.table()
        return Place(
            text=text,
            client=opened,
            cluster_id=table.cluster.cluster_id,
            keyspace=table.keyspaces.named(name),
        )


@dataclass(kw_only=True)
class Tally(Fates):
    """Counts of the rows: those read, and the results of those sent."""

    read: int = 0
    bytes: int = 0
    expired: int = 0
    """Rows that expired before they were sent."""
    bad: int = 0
    """Rows that the target refuses: the value is too long, or the time to live."""

    def rows_of(self, slab: Sequence[Entry], target: Keyspace, now_ms: int) -> list[Row]:
        """Count the records, and return the rows to send."""
        rows: list[Row] = []
        for entry in slab:
            self.read += 1
            self.bytes += len(entry.key) + len(entry.value)
            ttl_ms = None if entry.expires_at_ms is None else entry.expires_at_ms - now_ms
            if ttl_ms is not None and ttl_ms <= 0:
                self.expired += 1
            elif fault := _fault(entry, ttl_ms, target):
                self.bad += 1
                self.note_example(entry.key, fault)
            else:
                rows.append((entry.key, entry.value, ttl_ms))
        return rows


def _fault(entry: Entry, ttl_ms: int | None, target: Keyspace) -> str:
    """Return why the target refuses the record; '' if it accepts it."""
    if len(entry.value) > target.max_value_bytes:
        return f"the value has {len(entry.value)} bytes, the limit is {target.max_value_bytes}"
    if ttl_ms is not None and target.max_ttl_ms and ttl_ms > target.max_ttl_ms:
        left = duration_text(ttl_ms / 1000)
        return f"it has {left} to live, the limit is {duration_of(target.max_ttl_ms)}"
    return ""


class Coverage:
    """Progress of a scan of a prefix, measured in partitions."""

    def __init__(self, place: Place, prefix: bytes) -> None:
        self._partitioner = partitioner_of(place.keyspace)
        self._begun: set[int] = set()
        partitions = len(partitions_with(prefix, self._partitioner))
        # None: with a single partition there is no progress to show
        self.total = partitions if partitions > 1 else None

    def after(self, slab: Sequence[Entry]) -> int:
        """Return the number of partitions that are done after these records."""
        ids = self._partitioner.partitions_of([entry.key for entry in slab])
        self._begun.update(ids.tolist())
        return len(self._begun) - 1


From = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="PLACE",
        callback=not_empty,
        help="A keyspace of the cluster, or koinon://HOST:PORT/KEYSPACE of another one.",
    ),
]
To = Annotated[
    str,
    typer.Option("--to", metavar="PLACE", callback=not_empty, help="Where the rows go, likewise."),
]


@dataclass(frozen=True, kw_only=True)
class How:
    """The options of the copy."""

    if_absent: Annotated[
        bool,
        typer.Option("--if-absent", help="Leave rows alone that are in the target already."),
    ] = False
    verify: Annotated[
        bool, typer.Option("--verify", help="Then compare both sides, row by row.")
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Read and count the rows; write nothing."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class CopyAnswer:
    """The rows of a copy by their results."""

    rows_read: int
    bytes_read: int
    rows_applied: int
    rows_present: int
    rows_expired: int
    rows_bad: int
    rows_refused: int
    rows_unknown: int
    examples: list[str]
    dry_run: bool
    interrupted: bool
    seconds: float
    verify: dict[str, Any] | None
    error: str | None = field(metadata=IF_KNOWN)


@command(
    root,
    panel="Data",
    examples=[
        "copy --from default --to vip --prefix merchant7/ --if-absent",
        "copy --from default --to vip --prefix merchant7/ --dry-run --verify",
        "copy --from default --to koinon://other:7400/default",
    ],
)
def copy(
    session: Session,
    *,
    source: From,
    target: To,
    prefix: Annotated[str, typer.Option(help="Only keys that begin with this.")] = "",
    how: How,
    encoding: PrefixEncoding,
) -> Reply:
    """Copy rows into another keyspace. Each keeps the time that it has left to live.

    NOT exact while the rows are written: a row that is changed meanwhile may be in the target as it
    was before, and one that is deleted may stay there. The safe order, for writes that name the
    whole value: (1) have programs write to both places, and delete in both; (2) copy with
    --if-absent, which replaces nothing that they have written; (3) compare with --dry-run --verify,
    which also finds what was deleted meanwhile; (4) switch what reads; (5) stop writing to the old
    place, and delete the rows there. Increments and other updates of what is there have to rest
    from the copy's begin until programs use the target alone.

    Exit code 1 if --verify finds a difference, 2 if the target does not take some of the rows. A
    copy may be repeated.
    """
    prefix_bytes = encoding.decode(prefix, "--prefix")
    timeout_ms = session.timeout_or(DEFAULT_TIMEOUT_MS)
    tally, compared = Tally(), None
    began = time.monotonic()
    with Places(session) as places:
        origin, goal = places.open(source), places.open(target)
        if origin.is_same_as(goal):
            raise RefusedError(
                f"--from {source} and --to {target} are the same keyspace",
                "'koinon admin keyspaces' lists those that there are",
            )
        with Interrupt() as interrupt:
            work = Work(origin, goal, prefix_bytes, timeout_ms, session.json, interrupt)
            failure = work.copy(tally, how)
            seconds = time.monotonic() - began
            ended = interrupt.asked or tally.refused or tally.unknown or failure is not None
            if how.verify and not ended:
                try:
                    compared = work.compare()
                except KoinonError as error:
                    failure = error
    answer = _answer(
        tally, compared, seconds, failure, interrupted=interrupt.asked, dry_run=how.dry_run
    )
    code = _exit_code(tally, compared, interrupted=interrupt.asked)
    if failure is not None:
        code = fail(failure, debug=session.debug)
    blocks = _blocks(answer, tally, compared, if_absent=how.if_absent)
    return Reply(answer, blocks, code=code, done=f"{tally.durable}, but the summary")


class Work:
    """A copy between two places."""

    def __init__(
        self,
        source: Place,
        target: Place,
        prefix: bytes,
        timeout_ms: int,
        quiet: bool,
        interrupt: Interrupt,
    ) -> None:
        self._source = source
        self._target = target
        self._prefix = prefix
        self._timeout_ms = timeout_ms  # of each page and each batch
        self._quiet = quiet
        self._interrupt = interrupt

    def copy(self, tally: Tally, how: How) -> KoinonError | None:
        """Copy until the end, Ctrl-C, or refused rows; return the error that ended reading
        early.
        """
        coverage = Coverage(self._source, self._prefix)
        what = "reading" if how.dry_run else "copying"
        text = rows_and_rate(lambda: tally.read if how.dry_run else tally.applied + tally.present)
        with (
            work_progress(self._quiet, what, coverage.total, text) as advance,
            SlabWriter(
                self._target.client, tally, self._timeout_ms, advance, if_absent=how.if_absent
            ) as writer,
        ):

            def pass_over(_rows: list[Row], end: int) -> None:
                advance(end)

            send = pass_over if how.dry_run else writer.send
            failure = self._send_all(tally, coverage, send, lambda: writer.failing)
            writer.drain()
        return failure

    def _send_all(
        self,
        tally: Tally,
        coverage: Coverage,
        send: Callable[[list[Row], int], None],
        failing: Callable[[], bool],
    ) -> KoinonError | None:
        from koinon.cli.data.comparing import slabs_of

        entries = self._source.client.scan(prefix=self._prefix, timeout_ms=self._timeout_ms)
        slabs = slabs_of(entries)
        while (slab := _next_slab(slabs)) is not None:
            if isinstance(slab, KoinonError):
                return slab
            rows = tally.rows_of(slab, self._target.keyspace, int(time.time() * 1000))
            send(rows, coverage.after(slab))
            if self._interrupt.asked or failing():
                return None
        return None

    def compare(self) -> Comparison | None:
        """Compare both sides; return None if interrupted."""
        from koinon.cli.data.comparing import compare

        ours, theirs = (Coverage(place, self._prefix) for place in (self._source, self._target))
        total = ours.total and theirs.total and ours.total + theirs.total
        rows = 0
        with work_progress(self._quiet, "comparing", total, rows_and_rate(lambda: rows)) as advance:

            def compared(slab: list[Entry]) -> None:
                nonlocal rows
                rows += len(slab)
                advance(ours.after(slab))

            def counted(slab: list[Entry]) -> None:
                advance((ours.total or 0) + theirs.after(slab))

            return compare(
                self._source.client,
                self._target.client,
                self._prefix,
                timeout_ms=self._timeout_ms,
                compared=compared,
                counted=counted,
                stopped=lambda: self._interrupt.asked,
            )


def _next_slab(slabs: Iterator[list[Entry]]) -> list[Entry] | KoinonError | None:
    """Return the next slab, the error that prevents it, or None at the end."""
    try:
        return next(slabs, None)
    except KoinonError as error:
        return error


def _exit_code(tally: Tally, compared: Comparison | None, *, interrupted: bool) -> int:
    if tally.refused or tally.unknown:
        return UNAVAILABLE
    if interrupted:
        return INTERRUPTED
    if tally.bad:
        return USAGE
    return DONE if compared is None or compared.identical else NOT_FOUND


# --- the answer ----------------------------------------------------------------------------------


def _answer(
    tally: Tally,
    compared: Comparison | None,
    seconds: float,
    failure: KoinonError | None,
    *,
    interrupted: bool,
    dry_run: bool,
) -> CopyAnswer:
    verify = None
    if compared is not None:
        verify = {"identical": compared.identical, **json_of(compared)}
    return CopyAnswer(
        rows_read=tally.read,
        bytes_read=tally.bytes,
        rows_applied=tally.applied,
        rows_present=tally.present,
        rows_expired=tally.expired,
        rows_bad=tally.bad,
        rows_refused=tally.refused,
        rows_unknown=tally.unknown,
        examples=tally.examples,
        dry_run=dry_run,
        interrupted=interrupted,
        seconds=round(seconds, 3),
        verify=verify,
        error=message_of(failure) if failure is not None else None,
    )


def _blocks(
    answer: CopyAnswer, tally: Tally, compared: Comparison | None, *, if_absent: bool
) -> list[Block]:
    blocks: list[Block] = [Styled("Interrupted.", "yellow")] if answer.interrupted else []
    if answer.dry_run:
        rows = count(tally.read - tally.bad - tally.expired, "row")
        but_for = ", except rows that the target has" if if_absent else ""
        would = f" would be copied{but_for} ({bytes_text(tally.bytes)} were read); nothing was "
        blocks.append([Styled(rows, "bold"), f"{would}written."])
    else:
        rate = tally.applied / answer.seconds if answer.seconds else 0
        took = f" copied and durable in {duration_text(answer.seconds)} ({rate:,.0f} rows/s)."
        blocks.append([Styled(count(tally.applied, "row"), "bold"), took])
    for number, what in (
        (tally.present, "in the target already, left as they are"),
        (tally.expired, "expired by the time that they were to be copied"),
    ):
        if number:
            blocks.append(f"{count(number, 'row')} {what}.")
    if tally.bad:
        bad = f"{count(tally.bad, 'row')} that the target does not take, not written"
        blocks.append(Styled(bad, "red"))
    blocks += tally.unwritten("repeat the copy")
    return blocks if compared is None else [*blocks, *_comparison_blocks(compared)]


def _comparison_blocks(compared: Comparison) -> list[Block]:
    rows = count(compared.rows_same, "row")
    expiring = compared.rows_expiring_from or compared.rows_expiring_to
    blocks: list[Block] = []
    if compared.identical and expiring and not compared.rows_same:
        blocks.append(Styled("Nothing was compared.", "yellow"))
    elif compared.identical:
        blocks.append(remark("Identical:", "green", f"{rows} on both sides."))
    else:
        unlike = (
            f"{rows} the same, {compared.rows_missing:,} not in the target, "
            f"{compared.rows_different:,} with another value there, "
            f"{compared.rows_extra:,} only there."
        )
        blocks.append(remark("Different:", "red", unlike))
    if expiring:
        blocks.append(
            "Left out, since they expire within a minute: "
            f"{count(compared.rows_expiring_from, 'row')} of the source, "
            f"{compared.rows_expiring_to:,} of the target."
        )
    if compared.rows_other_expiry:
        rows = count(compared.rows_other_expiry, "row")
        blocks.append(f"{rows} with the same value, but another time to live.")
    return [*blocks, *[f"  {example}" for example in compared.examples]]
