"""ingest: loads files into the cluster through Spark, all rows or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from koinon.cli.console import output
from koinon.cli.console.command import DONE, INTERRUPTED, Session, command, duration_ms, fail
from koinon.cli.console.reply import Reply
from koinon.cli.console.signals import Interrupt
from koinon.cli.console.units import bytes_per_second
from koinon.cli.data import ingest_view
from koinon.ingest import files, survey
from koinon.ingest.failures import explained, of_commit
from koinon.ingest.job import Job, Outcome
from koinon.ingest.opened_rows import OpenedRows, open_rows
from koinon.ingest.session import LOCAL_MASTER, require_spark, spark_session
from koinon.ingest.settings import Settings
from koinon.operate.loads_client import LoadMode, LoadsClient, LoadState
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError

if TYPE_CHECKING:
    from koinon_proto.contract.keyspaces import Keyspace
    from koinon_proto.contract.table import Table

root = typer.Typer()
MODES = ("append", "overwrite")
ENCODINGS = ("json", "msgpack")
KEY_ENCODINGS = ("text", "binary")
WHERE = "Where Spark runs"
REWRITTEN = (
    "Spark parses the JSON of these files, and writes it anew: fields that a line lacks are null, "
    "and numbers are strings where another line has a string"
)
ASK_S = 3.0
"""The timeout of one request for the load's progress."""


Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH…", help="Files or directories: Parquet, ORC, CSV, TSV, JSON lines."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be loaded and how evenly; load nothing.")
]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The options for storing the files' rows."""

    key: Annotated[str, typer.Option(help="The column that is the key, or several: a,b.")]
    key_encoding: Annotated[
        str,
        typer.Option(
            help="Integers in keys: text (7 becomes '7') or binary (8 bytes that sort like them)."
        ),
    ] = "text"
    value: Annotated[str | None, typer.Option(help="The column that is the value.")] = None
    encoding: Annotated[
        str | None,
        typer.Option(
            help="The whole row is the value, as json (the default without --value) or msgpack."
        ),
    ] = None
    file_format: Annotated[
        str | None,
        typer.Option("--format", help="parquet, csv, tsv, jsonl or orc; by default from the name."),
    ] = None
    mode: Annotated[
        str, typer.Option(help="append, or overwrite: what is not in the files is deleted.")
    ] = "append"
    prefix: Annotated[str | None, typer.Option(help="Overwrite only keys that begin so.")] = None
    ttl: Annotated[str | None, typer.Option(help="Let the rows expire after 30m, 2h, 1d.")] = None
    ttl_column: Annotated[
        str | None,
        typer.Option(
            help="A column with each row's time to live in milliseconds, or the timestamp at "
            "which it expires; where it is empty, --ttl holds."
        ),
    ] = None
    delete_column: Annotated[
        str | None,
        typer.Option(help="A column of true and false: rows with true delete their keys."),
    ] = None
    order_by: Annotated[
        str | None,
        typer.Option(
            help="Of rows with one key the greatest of this column stays. Without it a key that "
            "repeats fails the load."
        ),
    ] = None
    bad_records: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Write rows that cannot be stored here, and load the others."
        ),
    ] = None
    max_rate: Annotated[
        str | None, typer.Option(help="The limit of bytes sent a second: 50MB, 1GiB.")
    ] = None

    def settings(self, session: Session) -> Settings:
        """Return the settings of the load; an invalid value is a usage error."""
        return Settings(
            coordinators=session.coordinators,
            keyspace=session.keyspace,
            key=self.key,
            key_encoding=_one_of("--key-encoding", self.key_encoding, KEY_ENCODINGS),
            value=self.value,
            encoding=_encoding(self.value, self.encoding),
            mode=_one_of("--mode", self.mode, MODES),
            prefix=_prefix(self.mode, self.prefix),
            ttl=f"{duration_ms(self.ttl)}ms" if self.ttl else None,
            ttl_column=self.ttl_column,
            delete_column=self.delete_column,
            order_by=self.order_by,
            bad_records=_place(self.bad_records),
            bytes_per_second=bytes_per_second(self.max_rate) if self.max_rate else 0,
        )


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """The options for Spark itself: its master, settings and output."""

    master: Annotated[str, typer.Option(help="Spark's master.", rich_help_panel=WHERE)] = (
        LOCAL_MASTER
    )
    conf: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A setting of Spark; may be repeated.", rich_help_panel=WHERE
        ),
    ] = None
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show Spark's own output.", rich_help_panel=WHERE)
    ] = False


@command(
    root,
    panel="Data",
    keyed=True,
    examples=[
        "ingest orders.parquet --key o_orderkey",
        "ingest events/ --key user,day --encoding msgpack --order-by at",
        "ingest users.csv --key id --value email --mode overwrite",
        "ingest orders.parquet --key o_orderkey --dry-run",
    ],
)
def ingest(
    session: Session,
    paths: Paths,
    *,
    rows: RowOptions,
    dry_run: DryRun = False,
    where: SparkOptions,
) -> Reply:
    """Load files with Spark: all rows become readable, or none does.

    A Spark of its own is started, on the Java that is found or that the spark extra brought
    along, unless --master names another. The load stages all rows on the nodes, checks them, and
    makes them readable key by key once it is committed. Until then Ctrl-C leaves nothing behind.
    """
    settings = rows.settings(session)
    conf = dict(map(_setting, where.conf or ()))
    kind = files.format_of(paths, rows.file_format)
    with _explaining():
        settings.write_options()
    require_spark()
    with session.connect() as client:
        table = client.table()
    if rows.ttl:
        _check_ttl(table.keyspaces.named(session.keyspace), duration_ms(rows.ttl))
    if not dry_run:
        _check_load(session, settings, table)
    with (
        spark_session(master=where.master, conf=conf, verbose=where.verbose) as spark,
        _explaining(),
    ):
        keep_malformed = dry_run or settings.bad_records is not None
        opened = open_rows(spark, paths, kind, settings, conf=conf, keep_malformed=keep_malformed)
        if opened.inferred:
            output.note(REWRITTEN)
        opened.settings.plan(opened.frame.schema)
        if dry_run:
            return _dry_run(session, opened, table)
        rows_total = files.rows_of(spark, paths, kind)
        bad = files.keep(opened.malformed, settings.bad_records)
        with LoadsClient(session.coordinators, timeout_s=ASK_S) as loads:
            job = Job(
                frame=opened.frame,
                settings=opened.settings,
                loads=loads,
                rows_total=rows_total,
                what=f"koinon ingest {' '.join(paths)}",
                parts=opened.parts,
            )
            return _run(session, job, bad)


def _check_ttl(keyspace: Keyspace, ttl_ms: int) -> None:
    """Raise the nodes' error for a time to live over the limit, in the command's units, before
    Spark starts.
    """
    if keyspace.max_ttl_ms and ttl_ms > keyspace.max_ttl_ms:
        raise InvalidArgumentError(
            field="ttl_ms",
            reason=f"longer than records of keyspace {keyspace.name!r} may live",
            limit=keyspace.max_ttl_ms,
            actual=ttl_ms,
        )


def _check_load(session: Session, settings: Settings, table: Table) -> None:
    """Raise the error by which the load would be refused, before Spark takes time to start."""
    options = settings.write_options()
    keyspace_id = table.keyspaces.named(session.keyspace).keyspace_id
    mode = LoadMode.OVERWRITE if settings.mode == "overwrite" else LoadMode.APPEND
    with LoadsClient(session.coordinators) as loads:
        try:
            loads.check(mode=mode, prefix=options.prefix, keyspace_id=keyspace_id)
        except KoinonError as error:
            raise of_commit(error) from error


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """A context that replaces Spark's exceptions by the Koinon errors that caused them."""
    try:
        yield
    except Exception as error:
        told = explained(error)
        if told is error:
            raise
        raise told from error


def _run(session: Session, job: Job, malformed: int) -> Reply:
    with Interrupt() as interrupt, ingest_view.shown(quiet=session.json) as draw:
        outcome = job.run(draw, lambda: interrupt.asked)
    bad = _bad_rows(job, outcome, malformed)
    state = "was never opened" if outcome.state is None else f"is {outcome.state.name.lower()}"
    return Reply(
        ingest_view.ingest_answer(outcome, bad),
        ingest_view.summary(outcome, bad, kept_in=job.settings.bad_records or ""),
        code=_exit_code(session, outcome),
        done=f"load {outcome.load_id} {state}, but the summary",
    )


def _bad_rows(job: Job, outcome: Outcome, malformed: int) -> int | None:
    """Return the number of rows that were not loaded, or None if they were not counted."""
    if outcome.state is not LoadState.DONE or job.settings.bad_records is None:
        return 0 if outcome.state is LoadState.DONE else None
    if job.rows_total is not None:
        return malformed + job.rows_total - outcome.rows
    set_aside = files.set_aside(job.settings.bad_records, outcome.job_id)
    return None if set_aside is None else malformed + set_aside


def _exit_code(session: Session, outcome: Outcome) -> int:
    if outcome.interrupted:
        return INTERRUPTED
    if outcome.error is not None:
        return fail(outcome.error, debug=session.debug, coordinators=session.coordinators)
    return DONE


def _dry_run(session: Session, rows: OpenedRows, table: Table) -> Reply:
    if not session.json:
        output.note("going through the rows; nothing is written…")
    schema = rows.frame.schema
    found = survey.take(rows.frame, rows.settings, table)
    found = replace(found, bad_rows=found.bad_rows + files.keep(rows.malformed, None))
    shown = ingest_view.survey_blocks(schema, rows.settings.plan(schema), found, table)
    return Reply(ingest_view.survey_answer(schema, found, table), shown)


# --- options -------------------------------------------------------------------------------------


def _one_of(option: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise typer.BadParameter(f"{option} {given}: {' or '.join(known)}")
    return given


def _encoding(value: str | None, encoding: str | None) -> str | None:
    if value is not None and encoding is not None:
        raise typer.BadParameter("--encoding is for whole rows: give it, or --value, not both")
    if encoding is not None:
        return _one_of("--encoding", encoding, ENCODINGS)
    return "json" if value is None else None


def _prefix(mode: str, prefix: str | None) -> str | None:
    if prefix and mode != "overwrite":
        raise typer.BadParameter("--prefix says what --mode overwrite replaces: give both")
    return prefix or None


def _place(directory: str | None) -> str | None:
    """Return a local directory as an absolute path: Spark's tasks may have another working
    directory.
    """
    if directory is None or not files.is_local(directory):
        return directory
    return str(files.local_path(directory).absolute())


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise typer.BadParameter(f"--conf {text}: write NAME=VALUE")
    return name.strip(), value
