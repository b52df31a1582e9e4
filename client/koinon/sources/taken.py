"""The columns that are read from each row of a file, and the interface that receives the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from koinon_proto.contract.errors import InvalidArgumentError

Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The columns that are read from each row. ``value`` None: the whole row, encoded as
    ``encoding``. ``beside``: further columns, whose cells are read as texts.
    """

    key: tuple[str, ...]
    key_encoding: str = "text"
    value: str | None = None
    encoding: str = "json"
    beside: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str] | None:
        """All named columns, each once; None: whole rows are read."""
        if self.value is None:
            return None
        return list(dict.fromkeys((*self.key, self.value, *self.beside)))

    @property
    def named(self) -> tuple[str, ...]:
        """The columns that every file must have."""
        return (*self.key, *self.beside, *(() if self.value is None else (self.value,)))


Cells = tuple[bytes | None, ...]


class Maker(Protocol[Made]):
    """Receives rows one by one and builds lots. ``row`` counts the rows from 1, good and bad;
    ``line`` is the reader's line in the file, 0 if it does not know lines.
    """

    row: int
    line: int

    def add(self, key: bytes | None, value: bytes | None, beside: Cells = ()) -> None:
        """Add a row."""

    def refuse(self, reason: str, text: bytes = b"") -> None:
        """Count a row that cannot be read. ``text``: the row, if the reader has it."""

    @property
    def full(self) -> bool:
        """True when ``take`` must be called before another row is added."""

    def take(self, position: int) -> Made:
        """Return a lot of the rows since the last call. ``position``: bytes of the file up to their
        end.
        """

    def start_again(self) -> None:
        """Prepare for reading the file again from its start: skip the rows that were already
        taken.
        """


def check_columns(file: str, names: list[str], wanted: tuple[str, ...]) -> None:
    """Raise InvalidArgumentError unless each wanted column exists, and no name occurs twice."""
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
