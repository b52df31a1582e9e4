"""load: files into the cluster, with progress, bounded memory and an honest end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from koinon.cli.console import output
from koinon.cli.console.progress import now_and_then, progress
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
from koinon.cli.data.delimited import lines_of
from koinon.cli.data.slabs import BadRow, Slab
from koinon.cli.data.sources import DELIMITERS, format_of, open_source
from koinon_proto.contract.errors import KoinonError
from koinon_proto.process.printable import printable_bytes

SLABS_IN_FLIGHT = 2
EXAMPLES_MAX = 5
REPEATS_TRACKED_MAX = 1_000_000
DEFAULT_TIMEOUT_MS = 30_000


@dataclass(kw_only=True)
class Tally:
    """The rows so far, counted by their fates."""

    read: int = 0
    applied: int = 0
    bad: int = 0
    refused: int = 0
    unknown: int = 0
    repeats: int = 0
    repeats_complete: bool = True
    examples: list[str] = field(default_factory=list)
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

    def note_result(self, result: Any) -> None:
        """Add a WriteResult."""
        self.applied += result.applied
        self.refused += len(result.refused)
        self.unknown += len(result.unknown)
        for failure in [*result.refused, *result.unknown][: EXAMPLES_MAX - len(self.examples)]:
            key = printable_bytes(failure.key[:60])
            self.examples.append(f"key {key}: {failure.error}")


def _bad_text(path: Path, bad: BadRow, line: int) -> str:
    return f"{path.name} {f'line {line}' if line else f'row {bad.row}'}: {bad.reason}"


class Loader:
    """Keeps a few slabs under way at once; a slab that repeats a key of one under way waits, so
    that of several rows with the same key the last one wins.
    """

    def __init__(
        self, client: Any, tally: Tally, timeout_ms: int, advance: Callable[[int], None]
    ) -> None:
        """``advance`` is told how many bytes of all files are written, as slabs are."""
        self._client = client
        self._tally = tally
        self._timeout_ms = timeout_ms
        self._advance = advance
        self._pool = ThreadPoolExecutor(SLABS_IN_FLIGHT, thread_name_prefix="load")
        self._under_way: dict[Future[Any], _Sent] = {}
        self._read_to = 0  # the end of the last slab, in bytes of all files

    def write(self, path: Path, slab: Slab, read_to: int) -> None:
        """Count the slab's rows, and send the good ones as soon as there is room. It ends at
        ``read_to``, in bytes of all files.
        """
        began, self._read_to = self._read_to, read_to
        self._tally.note_bad(path, slab.bad)
        self._tally.note_keys(slab.keys)
        if not slab.keys:
            return
        keys = set(slab.keys)
        while len(self._under_way) >= SLABS_IN_FLIGHT or not all(
            keys.isdisjoint(other.keys) for other in self._under_way.values()
        ):
            self._collect()
        rows = list(zip(slab.keys, slab.values, strict=True))
        future = self._pool.submit(
            self._client.put_many, rows, retry_unknown=True, timeout_ms=self._timeout_ms
        )
        self._under_way[future] = _Sent(keys, began)
        self._advance(min(sent.began for sent in self._under_way.values()))

    def drain(self) -> None:
        """Wait for all that is under way."""
        while self._under_way:
            self._collect()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Left early, it does not wait: what is under way ends when the client is closed."""
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    @property
    def failing(self) -> bool:
        """True once rows were refused or lost: going on would only add to them."""
        return bool(self._tally.refused or self._tally.unknown)

    def _collect(self) -> None:
        done, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
        for future in done:
            self._under_way.pop(future)
            self._tally.note_result(future.result())
        began = (sent.began for sent in self._under_way.values())
        self._advance(min(began, default=self._read_to))


class _Sent(NamedTuple):
    """A slab under way: its keys, and where it begins, in bytes of all files."""

    keys: set[bytes]
    began: int


class Interrupt:
    """Remembers Ctrl-C, so that the load stops between slabs; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


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
        progress(
            session.json, lambda: _bar(total, tally), _plain_progress(total, tally)
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


@contextlib.contextmanager
def _bar(total: int, tally: Tally) -> Iterator[Callable[[int], None]]:
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("loading"),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]}"),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
    )
    began = time.monotonic()
    with Progress(*columns, console=output.console(stderr=True), transient=True) as progress:
        task = progress.add_task("load", total=total or None, rows="")

        def advance(position: int) -> None:
            rate = tally.applied / max(0.001, time.monotonic() - began)
            rows = f"{tally.applied:,} rows  {rate:,.0f} rows/s"
            progress.update(task, completed=position, rows=rows)

        yield advance


def _plain_progress(total: int, tally: Tally) -> Callable[[int], None]:
    began = time.monotonic()

    def line(position: int) -> str:
        rate = tally.applied / (time.monotonic() - began)
        share = 100 * position / max(1, total)
        return f"{share:3.0f} %  {tally.applied:,} rows  {rate:,.0f} rows/s"

    return now_and_then(line)


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
