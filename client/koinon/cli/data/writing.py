"""Writes slabs of rows, a few at once, and counts the rows by their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from koinon.cli.console.reply import Block, Styled
from koinon.operate.wording import count
from koinon.types import Row, WriteResult
from koinon_proto.process.printable import printable_bytes

SLABS_IN_FLIGHT = 2
EXAMPLES_MAX = 5
DEFAULT_TIMEOUT_MS = 30_000


@dataclass(kw_only=True)
class Fates:
    """Counts of the rows so far, by their results."""

    applied: int = 0
    present: int = 0
    """Rows that were not written because a record exists."""
    refused: int = 0
    unknown: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def durable(self) -> str:
        """Return a clause with the number of rows written."""
        rows = count(self.applied, "row")
        return f"{rows} {'was' if self.applied == 1 else 'were'} written and durable"

    def unwritten(self, again: str) -> list[Block]:
        """Return lines about the rows that were refused, about rows of unknown fate, and about
        examples of bad rows.
        """
        fates = (
            (self.refused, "refused, not written"),
            (self.unknown, f"of unknown fate: {again}"),
        )
        lines: list[Block] = [
            Styled(f"{count(number, 'row')} {fate}", "red") for number, fate in fates if number
        ]
        return [*lines, *[f"  {example}" for example in self.examples]]

    def note_result(self, result: WriteResult) -> None:
        self.applied += result.applied
        self.present += result.present
        self.refused += len(result.refused)
        self.unknown += len(result.unknown)
        for failure in [*result.refused, *result.unknown]:
            self.note_example(failure.key, str(failure.error))

    def note_example(self, key: bytes, reason: str) -> None:
        """Keep the row as an example of unwritten ones, if few are kept yet."""
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(f"key {printable_bytes(key[:60])}: {reason}")


class SlabWriter:
    """Keeps a few slabs in flight at once. A slab that repeats a key of a slab in flight waits, so
    that of several rows with the same key the last one wins.
    """

    def __init__(
        self,
        client: Any,
        fates: Fates,
        timeout_ms: int,
        advance: Callable[[int], None],
        *,
        if_absent: bool = False,
    ) -> None:
        """``advance`` is called with the position up to which the input is written, in the unit of
        ``send``'s ``end``.
        """
        self._client = client
        self._fates = fates
        self._options = {
            "retry_unknown": True,
            "timeout_ms": timeout_ms,
            **({"if_absent": True} if if_absent else {}),
        }
        self._advance = advance
        self._pool = ThreadPoolExecutor(SLABS_IN_FLIGHT, thread_name_prefix="write")
        self._under_way: dict[Future[WriteResult], _Sent] = {}
        self._read_to = 0  # the end of the last slab

    def send(self, rows: Sequence[Row], end: int) -> None:
        """Send the rows once there is room; ``end`` is the position in the input after them."""
        began, self._read_to = self._read_to, end
        if not rows:
            return
        keys = {bytes(row[0]) for row in rows}
        while len(self._under_way) >= SLABS_IN_FLIGHT or not all(
            keys.isdisjoint(other.keys) for other in self._under_way.values()
        ):
            self._collect()
        future = self._pool.submit(self._client.put_many, rows, **self._options)
        self._under_way[future] = _Sent(keys, began)
        self._advance(min(sent.began for sent in self._under_way.values()))

    def drain(self) -> None:
        """Wait for all slabs in flight."""
        while self._under_way:
            self._collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """On an exception, do not wait: the slabs in flight end when the client is closed."""
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    @property
    def failing(self) -> bool:
        """True once rows were refused or lost: further rows would fail as well."""
        return bool(self._fates.refused or self._fates.unknown)

    def _collect(self) -> None:
        done, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
        for future in done:
            self._under_way.pop(future)
            self._fates.note_result(future.result())
        began = (sent.began for sent in self._under_way.values())
        self._advance(min(began, default=self._read_to))


class _Sent(NamedTuple):
    """A slab in flight: its keys, and the position in the input where it begins."""

    keys: set[bytes]
    began: int
