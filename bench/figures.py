"""Figures that scenarios yield, the aims for them, and the table that shows both."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """One measured value. A figure that is yielded again is another sample; the table shows
    medians.

    Attributes:
        row: the measured quantity.
        column: the system, variant or size.
        unit: of the value; the same in all of a row.
    """

    row: str
    column: str
    value: float
    unit: str = ""


class Aim(NamedTuple):
    """A bound on a figure, or on its ratio to another figure of the same run.

    Attributes:
        bound: the least value, or the greatest if ``at_most``.
        of: row and column of the figure to divide by.
    """

    row: str
    column: str
    bound: float
    of: tuple[str, str] | None = None
    at_most: bool = False


class Results:
    """All samples of one run, by row and column, in the order in which they came."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[str, list[float]]] = {}
        self._units: dict[str, str] = {}

    def add(self, figure: Figure) -> None:
        """Add a sample."""
        self._units[figure.row] = figure.unit
        columns = self._samples.setdefault(figure.row, {})
        columns.setdefault(figure.column, []).append(figure.value)

    def median(self, row: str, column: str) -> float | None:
        """Return the median of the samples; None if there are none."""
        samples = self._samples.get(row, {}).get(column)
        return statistics.median(samples) if samples else None

    def figures(self) -> Iterable[Figure]:
        """Yield every sample."""
        for row, columns in self._samples.items():
            for column, samples in columns.items():
                for value in samples:
                    yield Figure(row, column, value, self._units[row])

    def as_json(self) -> list[Any]:
        """Return plain types, which ``from_json`` reads."""
        return [list(figure) for figure in self.figures()]

    @classmethod
    def from_json(cls, figures: Iterable[Sequence[Any]]) -> Results:
        """Return the results from the output of ``as_json``."""
        results = cls()
        for figure in figures:
            results.add(Figure(*figure))
        return results

    def table(self) -> str:
        """Return the medians as text, with a line for each row and a column for each column."""
        columns = list(dict.fromkeys(figure.column for figure in self.figures()))
        names = {row: f"{row}, {unit}" if unit else row for row, unit in self._units.items()}
        wide = max(map(len, names.values()), default=0)
        widths = [max(len(column), 9) + 2 for column in columns]
        heads = "".join(f"{c:>{w}}" for c, w in zip(columns, widths, strict=True))
        lines = [" " * wide + heads]
        for row, name in names.items():
            cells = (shown(self.median(row, column)) for column in columns)
            line = "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
            lines.append(f"{name:<{wide}}{line}".rstrip())
        return "\n".join(lines)

    def held_to(self, aims: Iterable[Aim]) -> str:
        """Return a line for each aim whose figures were measured: the result, and whether it
        reaches the aim.
        """
        lines = []
        for row, column, bound, of, at_most in aims:
            value, base = self.median(row, column), self.median(*of) if of else 1.0
            if value is None or not base:
                continue
            ratio = value / base
            reached = ratio <= bound if at_most else ratio >= bound
            name = f"{row}: {column}" + (f" / {of[0]}: {of[1]}" if of else "")
            wanted = f"{'at most' if at_most else 'at least'} {shown(bound)}"
            lines.append(f"{name:<52}{shown(ratio):>9}  {wanted}{'' if reached else ', missed'}")
        return "\n".join(lines)


def shown(value: float | None) -> str:
    """Format a value with three digits or more."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
