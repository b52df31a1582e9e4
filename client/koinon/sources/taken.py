"""The keys and values that are taken of each row of a file, and the maker that is given them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from koinon_proto.contract.errors import InvalidArgumentError

Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The columns that are taken of each row. ``value`` None: the whole row, as ``encoding`` says.
    ``beside``: columns whose cells go along as texts.
    """

    key: tuple[str, ...]
    key_encoding: str = "text"
    value: str | None = None
    encoding: str = "json"
    beside: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str] | None:
        """All columns that are named, each once; None: whole rows are taken."""
        if self.value is None:
            return None
        return list(dict.fromkeys((*self.key, self.value, *self.beside)))

    @property
    def named(self) -> tuple[str, ...]:
        """The columns that every file must have."""
        return (*self.key, *self.beside, *(() if self.value is None else (self.value,)))


Cells = tuple[bytes | None, ...]


class Maker(Protocol[Made]):
    """Takes rows one by one and makes lots of them. ``row`` counts the rows from 1, good and bad;
    ``line`` is the reader's place in the file, 0 where it does not see lines.
    """

    row: int
    line: int

    def add(self, key: bytes | None, value: bytes | None, beside: Cells = ()) -> None:
        """Take a row."""

    def refuse(self, reason: str, text: bytes = b"") -> None:
        """Count a row that cannot be read. ``text``: the row, where the reader has it."""

    @property
    def full(self) -> bool:
        """True when ``take`` is to be called before more is added."""

    def take(self, position: int) -> Made:
        """Return the rows since the last call. ``position``: bytes of the file behind them."""

    def start_again(self) -> None:
        """The file is read from its start once more: pass over the rows that were taken."""


def check_columns(file: str, names: list[str], wanted: tuple[str, ...]) -> None:
    """Raise InvalidArgumentError unless each wanted column is there, and no name comes twice."""
    if repeated := sorted({repr(name) for name in names if names.count(name) > 1}):
        raise InvalidArgumentError(
            field="column",
            reason=f"{file} has more than one column named {', '.join(repeated)}",
        )
    for column in wanted:
        if column not in names:
            raise InvalidArgumentError(
                field="column",
                reason=f"{file} has no column {column!r}; it has {', '.join(map(repr, names))}",
            )
