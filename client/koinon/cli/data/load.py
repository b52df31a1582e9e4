"""load: loads files into the cluster, with progress and in bounded memory; reports the fate of
every row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from koinon.cli.console import output
from koinon.cli.console.command import (
    DONE,
    INTERRUPTED,
    UNAVAILABLE,
    USAGE,
    Session,
    command,
    fail,
    message_of,
)
from koinon.cli.console.progress_bar import rows_and_rate, work_progress
from koinon.cli.console.reply import Block, Reply, Styled
from koinon.cli.console.signals import Interrupt
from koinon.cli.data.writing import DEFAULT_TIMEOUT_MS, EXAMPLES_MAX, Fates, SlabWriter
from koinon.operate.json_form import IF_KNOWN
from koinon.operate.wording import count, duration_text
from koinon.sources.delimited import lines_of
from koinon.sources.opening import DELIMITERS, format_of, open_source
from koinon.sources.slabs import BadRow, Slab
from koinon_proto.contract.errors import KoinonError

root = typer.Typer()
REPEATS_TRACKED_MAX = 1_000_000
STANDARD_INPUT = Path("/dev/stdin")


@dataclass(kw_only=True)
class Tally(Fates):
    """Counts of the files' rows so far."""

    read: int = 0
    bad: int = 0
    repeats: int = 0
    repeats_complete: bool = True
    _seen: set[int] = field(default_factory=set)
    _bad: dict[int, tuple[Path, BadRow]] = field(default_factory=dict)  # by place in ``examples``

    @property
    def good(self) -> int:
        """The rows that can be stored."""
        return self.read - self.bad

    def note_bad(self, path: Path, rows: list[BadRow]) -> None:
        self.read += len(rows)
        self.bad += len(rows)
        for bad in rows[: EXAMPLES_MAX - len(self.examples)]:
            self._bad[len(self.examples)] = path, bad
            self.examples.append(_bad_text(path, bad, bad.line))

    def name_lines(self, path: Path, kind: str) -> None:
        """Give the line numbers of a CSV file's bad rows in ``examples``. They are looked up only
        now, if the file can be read again.
        """
        ours = {at: bad for at, (of, bad) in self._bad.items() if of == path and not bad.line}
        if kind not in DELIMITERS or not ours or not path.is_file():
            return
        lines = lines_of(path, [bad.row for bad in ours.values()], DELIMITERS[kind])
        for at, bad in ours.items():
            self.examples[at] = _bad_text(path, bad, lines.get(bad.row, 0))

    def note_keys(self, keys: list[bytes]) -> None:
        """Count keys that came before, by their hashes and only up to a memory limit."""
        self.read += len(keys)
        if not self.repeats_complete:
            return
        before = len(self._seen)
        self._seen.update(map(hash, keys))
        self.repeats += len(keys) - (len(self._seen) - before)
        if len(self._seen) > REPEATS_TRACKED_MAX:
            self._seen.clear()
            self.repeats_complete = False


def _bad_text(path: Path, bad: BadRow, line: int) -> str:
    return f"{path.name} {f'line {line}' if line else f'row {bad.row}'}: {bad.reason}"


class Loader(SlabWriter):
    """Writes slabs of files. Progress is in bytes of all files."""

    def __init__(
        self,
        client: Any,
        tally: Tally,
        timeout_ms: int,
        advance: Callable[[int], None],
        *,
        dry_run: bool = False,
    ) -> None:
        super().__init__(client, tally, timeout_ms, advance)
        self._tally = tally
        self._dry_run = dry_run

    def write(self, path: Path, slab: Slab, read_to: int) -> None:
        """Count the slab's rows, and unless it is a dry run, send the good ones."""
        self._tally.note_bad(path, slab.bad)
        self._tally.note_keys(slab.keys)
        if self._dry_run:
            self._advance(read_to)
        else:
            self.send(list(zip(slab.keys, slab.values, strict=True)), read_to)


@dataclass(frozen=True, kw_only=True)
class LoadAnswer:
    """The rows of a load by their results; ``keys_repeated`` is None if not all keys were
    counted.
    """

    rows_read: int
    rows_applied: int
    rows_bad: int
    rows_refused: int
    rows_unknown: int
    keys_repeated: int | None
    examples: list[str]
    dry_run: bool
    interrupted: bool
    seconds: float
    error: str | None = field(metadata=IF_KNOWN)


class Source(NamedTuple):
    """A file to load, and its format."""

    path: Path
    kind: str
    size: int


@dataclass(frozen=True, kw_only=True)
class RowForm:
    """The options for the files' format, and for the key and the value of a row."""

    key: Annotated[str, typer.Option("--key", help="The column that is the key.")]
    value: Annotated[
        str | None,
        typer.Option(
            "--value", help="The column that is the value. Without it: the whole row as JSON."
        ),
    ] = None
    file_format: Annotated[
        str | None,
        typer.Option("--format", help="csv, tsv, jsonl or parquet; by default from the name."),
    ] = None

    def source(self, path: Path) -> Source:
        """Return the file as a source of rows; '-' is standard input."""
        if self.file_format not in (None, "csv", "tsv", "jsonl", "parquet"):
            raise typer.BadParameter(f"--format {self.file_format}: csv, tsv, jsonl or parquet")
        kind = format_of(path, self.file_format)
        path = STANDARD_INPUT if str(path) == "-" else path
        return Source(path, kind, path.stat().st_size)

    def slabs(self, source: Source, max_value_bytes: int) -> Iterator[Slab]:
        """Yield the rows of the file; a longer value makes a bad row."""
        return open_source(source.path, source.kind, self.key, self.value, max_value_bytes)


@command(
    root,
    panel="Data",
    keyed=True,
    examples=[
        "load users.csv --key id",
        "load a.parquet b.parquet --key id --value body",
        "load events.jsonl.gz --key uuid --skip-bad",
        "load users.csv --key id --dry-run",
    ],
)
def load(
    session: Session,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="CSV, TSV, JSON lines, Parquet; compressed .gz, .bz2, .zst; '-': standard input.",
        ),
    ],
    *,
    form: RowForm,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Bad rows are counted, but are no failure.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read and check all rows, and write none.")
    ] = False,
) -> Reply:
    """Write every row of the files. Of rows with the same key the last wins.

    Rows whose key is null, empty or too long, or whose value is too long, cannot be stored. The
    other rows are written, and the exit code is then 2 unless --skip-bad is given. The exit code is
    also 2 if no row was written. A load may be repeated.
    """
    sources = [form.source(path) for path in files]
    total, tally = sum(source.size for source in sources), Tally()
    timeout_ms = session.timeout_or(DEFAULT_TIMEOUT_MS)
    began = time.monotonic()
    with (
        session.connect() as client,
        Interrupt() as interrupt,
        work_progress(
            session.json,
            "reading" if dry_run else "loading",
            total,
            rows_and_rate(lambda: tally.good if dry_run else tally.applied),
        ) as advance,
        Loader(client, tally, timeout_ms, advance, dry_run=dry_run) as loader,
    ):
        limit = client.table().keyspaces.named(session.keyspace).max_value_bytes
        opened = ((source, form.slabs(source, limit)) for source in sources)
        failure = _write_all(loader, interrupt, opened)
        loader.drain()
    seconds = time.monotonic() - began
    for source in sources:
        tally.name_lines(source.path, source.kind)
    if failure is not None and not tally.read:
        raise failure
    if failure is not None:
        code = fail(failure, debug=session.debug)
    else:
        code = _exit_code(tally, interrupt.asked, skip_bad=skip_bad, dry_run=dry_run)
    answer = _answer(tally, seconds, failure, dry_run=dry_run, interrupted=interrupt.asked)
    blocks = _summary(answer, tally, seconds)
    return Reply(answer, blocks, code=code, done=f"{tally.durable}, but the summary")


def _answer(
    tally: Tally,
    seconds: float,
    failure: KoinonError | OSError | None,
    *,
    dry_run: bool,
    interrupted: bool,
) -> LoadAnswer:
    return LoadAnswer(
        rows_read=tally.read,
        rows_applied=tally.applied,
        rows_bad=tally.bad,
        rows_refused=tally.refused,
        rows_unknown=tally.unknown,
        keys_repeated=tally.repeats if tally.repeats_complete else None,
        examples=tally.examples,
        dry_run=dry_run,
        interrupted=interrupted,
        seconds=round(seconds, 3),
        error=message_of(failure) if failure is not None else None,
    )


def _write_all(
    loader: Loader, interrupt: Interrupt, opened: Iterable[tuple[Source, Iterator[Slab]]]
) -> KoinonError | OSError | None:
    """Write the slabs of the files until a file cannot be read, rows fail, or Ctrl-C; return the
    error of reading, if any.
    """
    before = 0
    for source, slabs in opened:
        while (slab := _next_slab(slabs)) is not None:
            if isinstance(slab, Exception):
                return slab
            loader.write(source.path, slab, before + slab.position)
            if interrupt.asked or loader.failing:
                return None
        before += source.size
    return None


def _exit_code(tally: Tally, interrupted: bool, *, skip_bad: bool, dry_run: bool) -> int:
    if tally.refused or tally.unknown:
        return UNAVAILABLE
    if interrupted:
        return INTERRUPTED
    if not (tally.good if dry_run else tally.applied):
        verb = "would be" if dry_run else "was"
        output.problem(f"no row {verb} written: {_why_none(tally)}")
        return USAGE
    return USAGE if tally.bad and not skip_bad else DONE


def _why_none(tally: Tally) -> str:
    if not tally.read:
        return "the files have none"
    return "the only one is bad" if tally.bad == 1 else f"all {tally.bad:,} are bad"


def _next_slab(slabs: Iterator[Slab]) -> Slab | KoinonError | OSError | None:
    """Return the next slab, the error that prevents it, or None at the end."""
    try:
        return next(slabs, None)
    except (KoinonError, OSError) as error:
        return error


def _summary(answer: LoadAnswer, tally: Tally, seconds: float) -> list[Block]:
    blocks: list[Block] = [Styled("Interrupted.", "yellow")] if answer.interrupted else []
    if answer.dry_run:
        good = count(tally.good, "row")
        blocks.append([Styled(good, "bold"), " would be written; nothing was written."])
    else:
        rate = tally.applied / seconds if seconds else 0
        took = f" written and durable in {duration_text(seconds)} ({rate:,.0f} rows/s)."
        blocks.append([Styled(count(tally.applied, "row"), "bold"), took])
    if tally.repeats:
        extent = "" if tally.repeats_complete else f" of the first {REPEATS_TRACKED_MAX:,} keys"
        blocks.append(f"{count(tally.repeats, 'row')}{extent} repeated a key: the last one counts.")
    if tally.bad:
        blocks.append(Styled(f"{count(tally.bad, 'bad row')}, not written", "red"))
    return [*blocks, *tally.unwritten("repeat the load")]
