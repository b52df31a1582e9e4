"""A process's own counters and histograms, cheap enough for the hot path, and their exposition
text.

Nothing here locks: a ``Histogram`` belongs to one thread, which counts and which copies it into
``Family`` objects; those are plain data and may be rendered anywhere. The text is Prometheus' own
(0.0.4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Number = int | float

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Bounds of a histogram of times in this cluster: from a commit without a disk to a failover."""

_PIECE = 512


class Histogram:
    """Counts values by bucket; a value on a bound belongs to the bucket that ends there."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[Number] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total: Number = 0

    def observe(self, value: Number) -> None:
        """Count ``value``."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with its samples: ``series[i]``, a name with its labels, has ``values[i]``."""

    name: str
    kind: Kind
    meaning: str
    series: Sequence[str]
    values: Sequence[Number]

    def pieces(self) -> Iterator[str]:
        """The text, in pieces of some 0.1 ms each."""
        yield f"# HELP {self.name} {self.meaning}\n# TYPE {self.name} {self.kind}\n"
        for first in range(0, len(self.series), _PIECE):
            part = slice(first, first + _PIECE)
            lines = map("%s %s".__mod__, zip(self.series[part], self.values[part], strict=True))
            yield "\n".join(lines) + "\n"


def series_of(name: str, label: str, values: Sequence[object]) -> list[str]:
    """Return the series of one label; make them once if there are many."""
    return [f'{name}{{{label}="{_escaped(str(value))}"}}' for value in values]


def single(name: str, kind: Kind, meaning: str, value: Number) -> Family:
    """Return a metric without labels."""
    return Family(name, kind, meaning, (name,), (value,))


def labelled(
    name: str,
    kind: Kind,
    meaning: str,
    labels: tuple[str, ...],
    values: Mapping[tuple[str, ...], Number],
) -> Family:
    """Return a metric with one label, by the label's values."""
    series = []
    for of in values:
        pairs = (f'{k}="{_escaped(v)}"' for k, v in zip(labels, of, strict=True))
        series.append(f"{name}{{{','.join(pairs)}}}")
    return Family(name, kind, meaning, series, tuple(values.values()))


def distribution(name: str, meaning: str, histogram: Histogram) -> Family:
    """Return a histogram's metric, as of now."""
    bounds = [*(f"{bound}" for bound in histogram.bounds), "+Inf"]
    counts = list(accumulate(histogram.counts))
    series = [*series_of(f"{name}_bucket", "le", bounds), f"{name}_sum", f"{name}_count"]
    return Family(name, "histogram", meaning, series, (*counts, histogram.total, counts[-1]))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
