"""The table, the bars beside it, and the plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.rows import CONCURRENCY, LARGE
from bench.peers.systems import SYSTEMS

Rounds = Sequence[Mapping[str, Any]]
Results = Mapping[str, Mapping[str, Rounds]]  # by row, by system: one mapping a round


@dataclass(frozen=True)
class Bar:
    """A bound to reach: so many times the peer's figure, at least (``at_most``: at most)."""

    row: str
    ours: str
    peer: str
    factor: float
    what: str = "rows_per_s"
    at_most: bool = False


BARS = (
    Bar("get", "k1", "redis", 1.4),
    Bar("get", "k1", "redis", 0.4, "client_us", at_most=True),
    Bar("get", "guest", "redis", 0.8),
    Bar("put", "k1", "aof", 1.0),
    Bar("threads16-get", "k1", "aof", 2.5),
    Bar("threads16-put", "k1", "aof", 1.5),
    Bar("tasks64-get", "k1", "aof", 2.5),
    Bar("tasks64-put", "k1", "aof", 2.0),
    Bar("tasks64-put", "k3", "etcd", 4.0),
    Bar("tasks64-put", "k3", "wait", 1.0),
    Bar("put", "k3", "etcd", 1.0),
    Bar("put", "k3", "wait", 1.0),
    Bar("batch-put", "k3", "etcd", 1.0),
    Bar("batch-put", "k3", "wait", 1.0),
    Bar("batch-get", "k1", "redis", 5.0),
    Bar("batch4-get", "k1", "redis", 7.0),
    Bar("scan", "k1", "etcd", 1.5),
    Bar("large-get", "k1", "redis", 0.6),
    Bar("large-put", "k1", "aof", 0.6),
)
AWAKE_BARS = (Bar("get", "k1", "redis", 2.0), *BARS[1:])
"""With cores that are kept awake (``--awake``)."""


def figure(rounds: Rounds, what: str) -> float | None:
    """Return the median of a figure over the rounds."""
    values = [value for outcome in rounds if (value := _of(outcome, what)) is not None]
    return statistics.median(values) if values else None


def _of(outcome: Mapping[str, Any], what: str) -> float | None:
    rows = outcome.get("rows") or 0
    if what in ("client_us", "server_us"):
        used_s = outcome.get(what.replace("_us", "_cpu_s"))
        return used_s / rows * 1e6 if rows and used_s is not None else None
    value: float | None = outcome.get(what)
    return value


def show(results: Results, names: Sequence[str], *, awake: bool = False) -> None:
    """Print the table: a line a row, a column a system; then the bars."""
    for name in names:
        print(f"{name:<8} {SYSTEMS[name].title}: {SYSTEMS[name].durability}")
    width = 16
    print()
    print(f"{'rows/s':<16}" + "".join(f"{name:>{width}}" for name in names))
    for row, of_row in results.items():
        rates = [figure(of_row.get(name, ()), "rows_per_s") for name in names]
        megabytes = row.startswith("large")
        print(f"{row:<16}" + "".join(f"{_rate(rate, megabytes):>{width}}" for rate in rates))
        cells = [_latency(of_row.get(name, ())) for name in names]
        if any(cells):
            print(f"{'  p50 / p99 ms':<16}" + "".join(f"{cell:>{width}}" for cell in cells))
        if row in ("get", "put"):
            for what in ("client", "server"):
                used = [figure(of_row.get(name, ()), f"{what}_us") for name in names]
                cells = ["-" if value is None else f"{value:,.0f} us" for value in used]
                print(f"{'  CPU of ' + what:<16}" + "".join(f"{c:>{width}}" for c in cells))
    _show_bars(results, AWAKE_BARS if awake else BARS)


def _rate(rate: float | None, megabytes: bool) -> str:
    if rate is None:
        return "-"
    return f"{rate * len(LARGE) / 1e6:,.0f} MB/s" if megabytes else f"{rate:,.0f}"


def _latency(rounds: Rounds) -> str:
    p50, p99 = figure(rounds, "p50_ms"), figure(rounds, "p99_ms")
    return "" if p50 is None or p99 is None else f"{p50:.2f} / {p99:.2f}"


def ratios(results: Results, bars: Sequence[Bar]) -> list[tuple[Bar, float]]:
    """Return by how much we are above or below the peer, in medians, where both were measured."""
    found = []
    for bar in bars:
        of_row = results.get(bar.row, {})
        ours, peers = (figure(of_row.get(n, ()), bar.what) for n in (bar.ours, bar.peer))
        if ours is not None and peers:
            found.append((bar, ours / peers))
    return found


def _show_bars(results: Results, bars: Sequence[Bar]) -> None:
    measured = ratios(results, bars)
    if measured:
        print(f"\n{'bar':<46}{'ratio':>9}{'wanted':>12}")
    for bar, ratio in measured:
        what = "CPU of client" if bar.what == "client_us" else "rate"
        wanted = f"{'<=' if bar.at_most else '>='} {bar.factor:g}x"
        reached = ratio <= bar.factor if bar.at_most else ratio >= bar.factor
        name = f"{bar.row}, {what}: {bar.ours} / {bar.peer}"
        print(f"{name:<46}{ratio:>8.2f}x{wanted:>12}  {'' if reached else 'missed'}".rstrip())


def plot(results: Results, names: Sequence[str], path: Path) -> None:
    """Draw throughput over concurrency, gets beside puts."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawn, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    for axis, what in zip(axes, ("get", "put"), strict=True):
        for name in names:
            points = [
                (n, rate)
                for n in CONCURRENCY
                if (rounds := results.get(f"tasks{n}-{what}", {}).get(name))
                and (rate := figure(rounds, "rows_per_s")) is not None
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=SYSTEMS[name].title)
        axis.set(title=what, xscale="log", yscale="log", xlabel="asyncio tasks")
        axis.set_xticks(CONCURRENCY, [str(n) for n in CONCURRENCY])
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].set_ylabel("operations a second, one client process")
    axes[1].legend(fontsize=8)
    drawn.tight_layout()
    drawn.savefig(path, dpi=120)
