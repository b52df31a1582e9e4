"""The demo's output: numbered acts, sentences, checks, and progress that also suits a CI log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from koinon.cli.console.progress_bar import line_at_intervals
from koinon.cli.console.terminal import Console
from koinon_proto.process.printable import goes_to_terminal

PLAIN_WIDTH = 100


class MismatchError(Exception):
    """A check of the demo failed."""


class Advance(Protocol):
    """Reports progress: the amount done, and a remark."""

    def __call__(self, done: int, remark: str = "") -> None: ...


class Stage:
    """Prints the demo; counts its checks."""

    def __init__(self) -> None:
        self._tty = goes_to_terminal()
        self.console = Console(highlight=False, width=None if self._tty else PLAIN_WIDTH)
        self.checks = 0
        self._act = 0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def act(self, title: str) -> None:
        """Begin the next act."""
        self._act += 1
        self.console.print(f"\n[bold cyan]{self._act}. {title}[/]")

    def say(self, sentence: str) -> None:
        self.console.print(f"   {sentence}", soft_wrap=True)

    def event(self, sentence: str) -> None:
        """Announce a deliberate failure."""
        self.console.print(f" [bold yellow]⚡ {sentence}[/]", soft_wrap=True)

    def check(self, holds: bool, promise: str) -> None:
        """Show a check that holds; end the demo if it does not."""
        if not holds:
            self.console.print(f" [bold red]✘ {promise}[/]", soft_wrap=True)
            raise MismatchError(promise)
        self.checks += 1
        self.console.print(f" [green]✔[/] {promise}", soft_wrap=True)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Advance]:
        """Yield a function that shows progress: a bar on a terminal, else lines at intervals."""
        if not self._tty:
            yield self._plain_progress(what, total)
            return
        columns = (
            TextColumn("   " + what),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[remark]}"),
        )
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(what, total=total, remark="")

            def advance(done: int, remark: str = "") -> None:
                bar.update(task, completed=done, remark=remark)

            yield advance

    def _plain_progress(self, what: str, total: int) -> Advance:
        def line(state: tuple[int, str]) -> str:
            done, remark = state
            return f"   {what}: {done:,} of {total:,}  {remark}".rstrip()

        say = line_at_intervals(line, say=lambda text: self.console.print(text, soft_wrap=True))
        return lambda done, remark="": say((done, remark))
