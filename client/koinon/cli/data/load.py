"""load: files into the cluster, with progress, bounded memory and an honest end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from koinon.cli.console import output
from koinon.cli.console.progress import rows_and_rate, work_progress
from koinon.cli.console.session import (
    DONE,
    INTERRUPTED,
    UNAVAILABLE,
    USAGE,
    Session,
    command,
    fail,
    message_of,
)
from koinon.cli.console.signals import Interrupt
from koinon.cli.data.delimited import lines_of
from koinon.cli.data.slabs import BadRow, Slab
from koinon.cli.data.sources import DELIMITERS, format_of, open_source
from koinon.cli.data.writing import DEFAULT_TIMEOUT_MS, EXAMPLES_MAX, Fates, SlabWriter
from koinon_proto.contract.errors import KoinonError

REPEATS_TRACKED_MAX = 1_000_000


@dataclass(kw_only=True)
class Tally(Fates):
    """The rows of the files so far."""

    read: int = 0
    bad: int = 0
    repeats: int = 0
    repeats_complete: bool = True
    _seen: set[int] = field(default_factory=set)
    _bad: dict[int, tuple[Path, BadRow]] = field(default_factory=dict)  # by place in ``examples``

    def note_bad(self, path: Path, rows: list[BadRow]) -> None:
        self.read += len(rows)
        self.bad += len(rows)
        for bad in rows[: EXAMPLES_MAX - len(self.examples)]:
            self._bad[len(self.examples)] = path, bad
            self.examples.append(_bad_text(path, bad, bad.line))

    def name_lines(self, path: Path, kind: str) -> None:
        """Name the examples of bad rows of a CSV file by its lines: they are looked for only now,
        where the file can be read again.
        """
        ours = {at: bad for at, (of, bad) in self._bad.items() if of == path and not bad.line}
        if kind not in DELIMITERS or not ours or not path.is_file():
            return
        lines = lines_of(path, [bad.row for bad in ours.values()], DELIMITERS[kind])
        for at, bad in ours.items():
            self.examples[at] = _bad_text(path, bad, lines.get(bad.row, 0))

    def note_keys(self, keys: list[bytes]) -> None:
        """Count keys that came before; by hash, and only while that costs little memory."""
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
    """Writes the slabs of files. Ends are in bytes of all files."""

    def __init__(
        self, client: Any, tally: Tally, timeout_ms: int, advance: Callable[[int], None]
    ) -> None:
        super().__init__(client, tally, timeout_ms, advance)
        self._tally = tally

    def write(self, path: Path, slab: Slab, read_to: int) -> None:
        """Count the slab's rows, and send the good ones."""
        self._tally.note_bad(path, slab.bad)
        self._tally.note_keys(slab.keys)
        self.send(list(zip(slab.keys, slab.values, strict=True)), read_to)


def load(
    session: Session,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help="CSV, TSV, JSON lines or Parquet; .gz as well."),
    ],
    *,
    key: Annotated[str, typer.Option("--key", help="The column that is the key.")],
    value: Annotated[
        str | None,
        typer.Option(
            "--value", help="The column that is the value. Without it: the whole row as JSON."
        ),
    ] = None,
    file_format: Annotated[
        str | None,
        typer.Option("--format", help="csv, tsv, jsonl or parquet; by default from the name."),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Bad rows are counted, but are no failure.")
    ] = False,
) -> int:
    """Write every row of the files. Of rows with the same key the last wins.

    Rows whose key is null, empty or too long, or whose value is too long, cannot be stored; the
    others are, and the command then ends with exit code 2 unless --skip-bad is given. It also does
    where no row at all was written. A load may be repeated.
    """
    if file_format not in (None, "csv", "tsv", "jsonl", "parquet"):
        raise typer.BadParameter(f"--format {file_format}: csv, tsv, jsonl or parquet")
    formats = [format_of(path, file_format) for path in files]
    sizes = [path.stat().st_size for path in files]
    total, tally = sum(sizes), Tally()
    began = time.monotonic()
    with (
        session.connect() as client,
        Interrupt() as interrupt,
        work_progress(
            session.json, "loading", total, rows_and_rate(lambda: tally.applied)
        ) as advance,
        Loader(client, tally, session.timeout_or(DEFAULT_TIMEOUT_MS), advance) as loader,
    ):
        limit = client.table().keyspaces.named(session.keyspace).max_value_bytes
        sources = (
            open_source(path, kind, key, value, limit)
            for path, kind in zip(files, formats, strict=True)
        )
        failure = _write_all(loader, interrupt, zip(files, sizes, sources, strict=True))
        loader.drain()
    seconds = time.monotonic() - began
    for path, kind in zip(files, formats, strict=True):
        tally.name_lines(path, kind)
    if failure is None or tally.read:
        _summary(tally, seconds, failure, interrupted=interrupt.asked, as_json=session.json)
        if failure is not None and session.json:
            return fail(failure, debug=session.debug)
    if failure is not None:
        raise failure
    return _exit_code(tally, interrupted=interrupt.asked, skip_bad=skip_bad)


def _write_all(
    loader: Loader, interrupt: Interrupt, sources: Iterable[tuple[Path, int, Iterator[Slab]]]
) -> KoinonError | OSError | None:
    """Write the slabs of the files (each with its size) until one cannot be read on, rows fail, or
    Ctrl-C; return why a file cannot be read.
    """
    before = 0
    for path, size, slabs in sources:
        while (slab := _next_slab(slabs)) is not None:
            if isinstance(slab, Exception):
                return slab
            loader.write(path, slab, before + slab.position)
            if interrupt.asked or loader.failing:
                return None
        before += size
    return None


def _exit_code(tally: Tally, *, interrupted: bool, skip_bad: bool) -> int:
    if tally.refused or tally.unknown:
        return UNAVAILABLE
    if interrupted:
        return INTERRUPTED
    if not tally.applied:
        output.problem(f"no row was written: {_why_none(tally)}")
        return USAGE
    return USAGE if tally.bad and not skip_bad else DONE


def _why_none(tally: Tally) -> str:
    if not tally.read:
        return "the files have none"
    return "the only one is bad" if tally.bad == 1 else f"all {tally.bad:,} are bad"


def _next_slab(slabs: Iterator[Slab]) -> Slab | KoinonError | OSError | None:
    """The next slab, why there is none, or None at the end; nothing else is read meanwhile."""
    try:
        return next(slabs, None)
    except (KoinonError, OSError) as error:
        return error


def _summary(
    tally: Tally,
    seconds: float,
    failure: KoinonError | OSError | None,
    *,
    interrupted: bool,
    as_json: bool,
) -> None:
    if as_json:
        output.print_json(
            {
                "rows_read": tally.read,
                "rows_applied": tally.applied,
                "rows_bad": tally.bad,
                "rows_refused": tally.refused,
                "rows_unknown": tally.unknown,
                "keys_repeated": tally.repeats if tally.repeats_complete else None,
                "examples": tally.examples,
                "interrupted": interrupted,
                "seconds": round(seconds, 3),
                **({"error": message_of(failure)} if failure is not None else {}),
            }
        )
        return
    printer = output.console()
    if interrupted:
        printer.print("[yellow]Interrupted.[/]")
    rate = tally.applied / seconds if seconds else 0
    printer.print(
        f"[bold]{tally.applied:,}[/] {_rows(tally.applied)} written and durable "
        f"in {output.duration_text(seconds)} ({rate:,.0f} rows/s)."
    )
    if tally.repeats:
        extent = "" if tally.repeats_complete else f" of the first {REPEATS_TRACKED_MAX:,} keys"
        rows = output.count(tally.repeats, "row")
        printer.print(f"{rows}{extent} repeated a key: the last one counts.")
    for number, what in (
        (tally.bad, f"bad {_rows(tally.bad)}, not written"),
        (tally.refused, f"{_rows(tally.refused)} refused, not written"),
        (tally.unknown, f"{_rows(tally.unknown)} of unknown fate: repeat the load"),
    ):
        if number:
            printer.print(f"[red]{number:,} {what}[/]")
    for example in tally.examples:
        printer.print(f"  {example}", markup=False)


def _rows(number: int) -> str:
    return "row" if number == 1 else "rows"


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "load",
        panel="Data",
        keyed=True,
        examples=[
            "koinon load users.csv --key id",
            "koinon load a.parquet b.parquet --key id --value body",
            "koinon load events.jsonl.gz --key uuid --skip-bad",
        ],
    )(load)
